"""Cases A-24 and A-25: resume, and contents of checkpoints.

Time budget: 25 s.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from autoprec import (
    Action,
    AutoPrecision,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    GuardConfig,
    LossScaleConfig,
    RuleConfig,
    RuleController,
    ScriptedController,
)
from tests.support import (
    Task,
    Watch,
    assert_same_state,
    cpu,
    fp16cpu,
    rows,
    scripted,
    squares,
    state_of,
    watch_dtypes,
)

# ---- resume ----


EPOCHS, BATCHES = 4, 6
RECORDED = ("window", "applied_steps", "skipped_steps", "user_skipped_steps")


class Net(Task):
    def __init__(self, is_constant: bool = False) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
        data = torch.rand(8, 16).repeat(BATCHES, 1) if is_constant else torch.rand(8 * BATCHES, 16)
        super().__init__(net, data, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
        self.bad: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = squares(self.net, batch, batch_idx)
        step = self.trainer.current_epoch * BATCHES + batch_idx
        return loss * (float("inf") if step in self.bad else 1.0)


SCRIPT = {
    1: Action(precision={"net.0": "bf16", "net.3": "fp16"}),
    3: Action(loss_scale=512.0),
    4: Action(clip=0.5),
    9: Action(precision={"net.4": "int8"}, clip=0.25),
    12: Action(precision={"net.0": "int8"}),  # the first window after the checkpoint
    15: Action(precision={"net.3": "bf16"}, loss_scale=2048.0),
    20: Action(clip=float("inf")),
}
SETTINGS = AutoPrecisionConfig(
    loss_scale=LossScaleConfig(init_scale=1024.0, growth_interval=5), guard=GuardConfig(hold=4)
)


class Stochastic(ScriptedController):
    """Draws its decisions from a private generator, which is part of its state."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.name = "stochastic"
        self.generator = torch.Generator().manual_seed(3)
        self.seen: list[float] = []

    def decide(self, observation: Any) -> Any:
        self.seen.append(float(observation.sum()))
        return torch.randint(-1, 2, (len(observation),), generator=self.generator).numpy()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def daring_rule() -> RuleController:
    return RuleController(
        AutoPrecisionConfig(rule=RuleConfig(stable_cv=10.0, headroom_bits=0.0), formats=("fp32", "bf16", "fp16"))
    )


POLICIES: dict[str, Callable[[], ScriptedController | RuleController]] = {
    "scripted": lambda: ScriptedController(SCRIPT, {2: Action(clip=0.75), 3: Action(precision={"net.1": "bf16"})}),
    "rule": daring_rule,
    "stochastic": Stochastic,
}


def tuned(policy: str) -> AutoPrecisionCallback:
    config = AutoPrecisionConfig(
        formats=("fp32", "bf16", "fp16", "int8"), loss_scale=SETTINGS.loss_scale, guard=SETTINGS.guard
    )
    return AutoPrecisionCallback(policy=POLICIES[policy](), interval=5, config=config)


class Save(Callback):
    """Saves a checkpoint in the middle of training."""

    def __init__(self, path: Path, hook: str, epoch: int, batch: int | None = None) -> None:
        self.path, self.epoch, self.batch = path, epoch, batch
        setattr(self, hook, self._save)

    def _save(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.current_epoch == self.epoch and (self.batch is None or args[-1] == self.batch):
            trainer.save_checkpoint(self.path)


def fingerprint(ap: AutoPrecisionCallback) -> dict[str, Any]:
    """Everything that a tuner controls or remembers."""
    steering = ap.steering
    assert steering is not None
    return {
        **{name: getattr(steering, name) for name in RECORDED},
        "map": ap.precision_map(),
        "scale": ap.loss_scale,
        "growth": steering.knobs.loss_scale.growth_tracker,
        "clip": ap.clip_threshold,
        "held": dict(steering.knobs.guard.held),
        "history": [d.to_dict() for d in ap.history],
        "norms": list(steering.telemetry.norms),
        "controller": {k: v.tolist() if isinstance(v, Tensor) else v for k, v in ap.controller.state_dict().items()},
    }


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("base", ["32-true", "fp16", "bf16-mixed"])
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("how", ["epoch_end", "model_checkpoint", "after_fit"])
def test_a24_resumed_run_equals_the_uninterrupted_one(policy: str, base: str, how: str, tmp_path: Path) -> None:
    def trainer(*callbacks: Callback, epochs: int = EPOCHS) -> Trainer:
        plugins = {"plugins": fp16cpu(256, growth_interval=5)} if base == "fp16" else {"precision": base}
        is_saving = any(isinstance(c, ModelCheckpoint) for c in callbacks)
        return cpu(
            callbacks=list(callbacks),
            max_epochs=epochs,
            enable_checkpointing=is_saving,
            num_sanity_val_steps=0,
            **plugins,
        )

    path = tmp_path / "last.ckpt"
    straight, first, resumed = tuned(policy), tuned(policy), tuned(policy)
    expected, watch = Watch(straight), Watch(resumed)
    whole, task = Net(), Net()
    whole.bad = task.bad = {7}  # one skipped step before the checkpoint
    trainer(straight, expected).fit(whole)

    saver: list[Callback] = []
    if how == "epoch_end":
        saver = [Save(path, "on_train_epoch_end", 1)]
    elif how == "model_checkpoint":
        saver = [ModelCheckpoint(tmp_path, save_last=True)]
    interrupted = trainer(first, *saver, epochs=2)
    interrupted.fit(task)
    if how == "after_fit":
        interrupted.save_checkpoint(path)

    fresh = Net()
    fresh.bad = {7}
    again = [ModelCheckpoint(tmp_path, save_last=True)] if how == "model_checkpoint" else []
    trainer(resumed, watch, *again).fit(fresh, ckpt_path=path)
    assert watch.losses == expected.losses[2 * BATCHES :]
    assert watch.maps == expected.maps[2 * BATCHES :]
    assert watch.scales == expected.scales[2 * BATCHES :]
    assert fingerprint(resumed) == fingerprint(straight)
    assert_same_state(state_of(fresh), state_of(whole))
    assert straight.skipped_steps >= 1
    assert len(set(map(str, expected.maps))) > 1  # or there was nothing to restore


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("policy", list(POLICIES))
def test_a24_checkpoint_in_the_middle_of_an_epoch(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    straight, resumed = tuned(policy), tuned(policy)
    expected, watch = Watch(straight), Watch(resumed)
    whole, fresh = Net(is_constant=True), Net(is_constant=True)
    cpu(callbacks=[straight, expected, Save(path, "on_train_batch_end", 1, batch=2)], max_epochs=EPOCHS).fit(whole)
    cpu(callbacks=[resumed, watch], max_epochs=EPOCHS).fit(fresh, ckpt_path=path)
    assert watch.losses == expected.losses[BATCHES + 3 :]
    assert fingerprint(resumed) == fingerprint(straight)
    assert_same_state(state_of(fresh), state_of(whole))


def test_a24_growth_counter_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    plugins = functools.partial(fp16cpu, 64, growth_interval=2 * BATCHES + 3)
    cpu(plugins=plugins(), callbacks=[scripted(), Save(path, "on_train_epoch_end", 1)], max_epochs=2).fit(Net())
    ap = scripted()
    watch = Watch(ap)
    cpu(plugins=plugins(), callbacks=[ap, watch], max_epochs=3).fit(Net(), ckpt_path=path)
    assert watch.scales == [64.0, 64.0, 128.0, 128.0, 128.0, 128.0]


def saved(tmp_path: Path, *callbacks: Callback, **kwargs: Any) -> Path:
    """A checkpoint after two epochs."""
    path = tmp_path / "saved.ckpt"
    cpu(callbacks=[*callbacks, Save(path, "on_train_epoch_end", 1)], max_epochs=2, **kwargs).fit(Net())
    return path


@pytest.mark.parametrize("base", ["32-true", "bf16-mixed"])
def test_a24_checkpoint_with_autoprec_goes_on_without_it(base: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, tuned("scripted"), precision=base)
    task, weights = Net(), torch.load(path, weights_only=True)["state_dict"]
    trainer = cpu(precision=base, max_epochs=3)
    with pytest.warns(UserWarning, match="AutoPrecisionCallback"):
        trainer.fit(task, ckpt_path=path)
    assert trainer.global_step == 3 * BATCHES
    assert not torch.equal(task.state_dict()["net.0.weight"], weights["net.0.weight"])


def test_a24_static_amp_goes_on_with_the_scale_of_autoprec(tmp_path: Path) -> None:
    ap = scripted({5: Action(loss_scale=32.0)})
    path = saved(tmp_path, ap, plugins=fp16cpu(1024, growth_interval=100))
    plugin = fp16cpu(1024, growth_interval=100)
    with pytest.warns(UserWarning, match="AutoPrecisionCallback"):
        cpu(plugins=plugin, max_epochs=3).fit(Net(), ckpt_path=path)
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 32.0
    state = plugin.scaler.state_dict()
    # counted from the request on; float32 weights and fp16 autocast on a CPU overflow nowhere here
    assert state["_growth_tracker"] == 3 * BATCHES - 5
    assert state["growth_interval"] == 100


def test_a24_autoprec_goes_on_with_the_scale_of_static_amp(tmp_path: Path) -> None:
    path = saved(tmp_path, plugins=fp16cpu(512, growth_interval=2 * BATCHES + 2))
    ap = scripted()
    watch = Watch(ap)
    with pytest.warns(UserWarning, match="autoprec"):
        cpu(plugins=fp16cpu(64), callbacks=[ap, watch], max_epochs=3).fit(Net(), ckpt_path=path)
    assert watch.scales[0] == 512.0
    assert watch.scales.index(1024.0) == 1  # its growth counter and interval came along
    assert ap.applied_steps == BATCHES


@pytest.mark.parametrize("base", ["32-true", "bf16-mixed"])
def test_a24_plain_checkpoint_goes_on_with_autoprec(base: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, precision=base)
    ap, task = tuned("scripted"), Net()
    trainer = cpu(precision=base, callbacks=[ap], max_epochs=3)
    with pytest.warns(UserWarning, match="autoprec"):
        trainer.fit(task, ckpt_path=path)
    assert ap.applied_steps == BATCHES
    assert trainer.global_step == 3 * BATCHES
    assert ap.precision_map()["net.0"] == "bf16"


def test_a24_another_policy_goes_on_from_the_formats_with_a_warning(tmp_path: Path) -> None:
    path = saved(tmp_path, tuned("scripted"))
    ap = AutoPrecisionCallback(policy="rule", interval=1000)
    with pytest.warns(UserWarning, match="'scripted'.*'rule'"):
        cpu(callbacks=[ap], max_epochs=3).fit(Net(), ckpt_path=path)
    assert ap.precision_map() == {
        "net.0": "bf16",
        "net.1": "fp32",
        "net.3": "fp16",
        "net.4": "int8",
    }
    assert ap.clip_threshold == 0.25


def test_a24_formats_of_the_checkpoint_beat_those_of_a_new_start(tmp_path: Path) -> None:
    """Formats and knob values come from the checkpoint, not from the policy's first map."""
    path = saved(tmp_path, AutoPrecisionCallback(policy="fixed:bf16"))
    ap = AutoPrecisionCallback(policy="fixed:bf16", knobs=("precision",))
    task = Net()
    seen = watch_dtypes(task)
    cpu(callbacks=[ap], max_epochs=3).fit(task, ckpt_path=path)
    assert seen["net.0"][0] is torch.bfloat16
    assert len(rows(ap.history, "precision")) == 3  # those of the first run, no second first map


def test_a24_plugin_without_the_callback_resumes_as_well(tmp_path: Path) -> None:
    formats = {"net.0": "bf16", "net.3": "fp16"}
    path = tmp_path / "plugin.ckpt"
    whole, task, fresh = Net(), Net(), Net()
    expected, watch = Watch(), Watch()
    config = AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=256.0, growth_interval=7))
    cpu(plugins=[AutoPrecision(formats, config=config)], callbacks=[expected], max_epochs=4).fit(whole)
    save = Save(path, "on_train_epoch_end", 1)
    cpu(plugins=[AutoPrecision(formats, config=config)], callbacks=[save], max_epochs=2).fit(task)
    cpu(plugins=[AutoPrecision(formats, config=config)], callbacks=[watch], max_epochs=4).fit(fresh, ckpt_path=path)
    assert watch.losses == expected.losses[2 * BATCHES :]
    assert_same_state(state_of(fresh), state_of(whole))


def test_a24_fit_twice_starts_anew() -> None:
    """Without a checkpoint nothing of an earlier fit may leak into the next one."""
    ap = tuned("scripted")
    found = []
    for _ in range(2):
        task = Net()
        cpu(callbacks=[ap], max_epochs=2).fit(task)
        found.append((fingerprint(ap), state_of(task)))
    assert found[0][0] == found[1][0]
    assert_same_state(found[1][1], found[0][1])


# ---- contents of a checkpoint ----


def every_precision() -> AutoPrecisionCallback:
    names = ("bf16", "fp16", "int8", "fp8", "tf32", "fp32", "bf16")
    return scripted({2 * step: Action(precision={"net.0": name, "net.3": name}) for step, name in enumerate(names)})


def layout(value: Any) -> Any:
    """Keys, shapes and dtypes, without values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return {key: layout(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [layout(item) for item in value]
    return type(value)


def size_of(value: Any) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return len(buffer.getvalue())


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same run with and without autoprec, loaded as safely as torch can."""
    loaded = []
    for index, callbacks in enumerate(([every_precision()], [])):
        folder = tmp_path / str(index)
        folder.mkdir()
        loaded.append(torch.load(saved(folder, *callbacks), weights_only=True))
    return loaded[0], loaded[1]


def test_a25_weights_are_those_of_a_plain_model(checkpoints: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, plain = checkpoints
    assert layout(ours["state_dict"]) == layout(plain["state_dict"])
    assert list(ours["state_dict"]) == list(plain["state_dict"])
    model = Net()
    model.load_state_dict(ours["state_dict"], strict=True)
    assert_same_state(state_of(model), ours["state_dict"])


def test_a25_optimizer_state_has_the_layout_of_a_plain_run(checkpoints: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, plain = checkpoints
    assert layout(ours["optimizer_states"]) == layout(plain["optimizer_states"])
    assert layout(ours["loops"]) == layout(plain["loops"])


def test_a25_extra_state_is_ours_alone_and_small(checkpoints: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, plain = checkpoints
    assert set(ours) - set(plain) == {"AutoPrecision"}
    extra = set(ours["callbacks"]) - set(plain["callbacks"])
    assert len(extra) == 1
    assert "AutoPrecisionCallback" in next(iter(extra))
    assert set(plain["callbacks"]) <= set(ours["callbacks"])
    assert size_of([ours["AutoPrecision"], ours["callbacks"]]) < 1_000_000


def primitives(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and primitives(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(primitives, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def test_a25_extra_state_is_made_of_primitives(checkpoints: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, _ = checkpoints
    assert primitives(ours["AutoPrecision"])
    assert primitives(ours["callbacks"])


def test_a25_checkpoint_loads_without_the_package(tmp_path: Path) -> None:
    """Nothing in the file may need autoprec to be unpickled."""
    path = saved(tmp_path, every_precision())
    assert b"autoprec." not in path.read_bytes().replace(b"autoprec.callback.AutoPrecisionCallback", b"")


def test_a25_record_of_a_long_run_stays_small(tmp_path: Path) -> None:
    """Hundreds of decisions, each of them on record."""
    script = {s: Action(precision={"*": "bf16" if s % 2 else "int8"}, clip=1.0 + s) for s in range(240)}
    path = tmp_path / "long.ckpt"
    ap = scripted(script, verbose=False)
    cpu(callbacks=[ap, Save(path, "on_train_epoch_end", 39)], max_epochs=40).fit(Net())
    assert len(ap.history) >= 900
    loaded = torch.load(path, weights_only=True)
    assert size_of([loaded["AutoPrecision"], loaded["callbacks"]]) < 1_000_000


def test_a25_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    class TiedNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.emb(ids))

    path = tmp_path / "tied.ckpt"
    task = Task(TiedNet(), torch.randint(0, 16, (32, 4)))
    script = {i: Action(precision={"*": n}) for i, n in enumerate(("bf16", "fp16", "int8"))}
    cpu(callbacks=[scripted(script), Save(path, "on_train_epoch_end", 0)]).fit(task)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert list(state) == ["net.emb.weight", "net.head.weight"]
    assert state["net.emb.weight"].data_ptr() == state["net.head.weight"].data_ptr()


def test_a25_saving_weights_only_saves_nothing_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"

    class SaveWeights(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint(path, weights_only=True)

    cpu(callbacks=[every_precision(), SaveWeights()]).fit(Net())
    loaded = torch.load(path, weights_only=True)
    assert "AutoPrecision" not in loaded
    assert "callbacks" not in loaded
    Net().load_state_dict(loaded["state_dict"], strict=True)
