"""A run that is stopped and resumed ends like one that was not, bit for bit.

What Lightning alone reproduces is established first: a checkpoint at an epoch's end, one in the middle of an epoch with
a loader that can go on there, with dropout if the random state is carried over.

Time budget: 60 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from torch import nn

from autoprec import (
    Action,
    AutoPrecision,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    ClipConfig,
    GuardConfig,
    LossScaleConfig,
    PlanConfig,
    RuleConfig,
    RuleController,
    ScriptedController,
)
from autoprec.layers import set_format
from autoprec.run_length import EpochPlan, RunLength
from autoprec.steering import Steering
from tests.resumed import STOP, TOTAL, Net, Result, Setup, assert_resumes, assert_same_end, assert_same_state
from tests.small_fits import (
    Plain,
    StatefulLoader,
    callback_of,
    differences,
    fp16_plugin,
    loader,
    outcome,
    quiet,
    seed,
)

pytestmark = [
    # a resumed run has no ModelCheckpoint
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    # what every run under manual optimization hears
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning"),
    # what one run here is made to do
    pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning"),
    # and the policy of another
    pytest.mark.filterwarnings("ignore:autoprec. policy 'scripted' failed:UserWarning"),
    pytest.mark.filterwarnings("ignore:autoprec. 3 steps in a row:UserWarning"),
]

# moves often: decisions every few steps, fp16 from the start of its life on a scale that overflows and grows
RESTLESS = AutoPrecisionConfig(
    formats=("fp32", "fp16"),
    rule=RuleConfig(stable_cv=10.0),
    loss_scale=LossScaleConfig(init_scale=2.0**22, growth_interval=6),
    clip=ClipConfig(min_norms=4, window=8),
    guard=GuardConfig(hold=7),
)


def plain_loader(callback: Callable[[], AutoPrecisionCallback | None]) -> Setup:
    """A torch loader draws a seed per epoch, one more in a resumed run."""
    return Setup(callback, data=lambda: loader(80), is_random_state_carried=False)


def planned() -> AutoPrecisionCallback:
    config = AutoPrecisionConfig(formats=("fp32", "bf16", "fp16"), plan=PlanConfig(replan=2, warmup=1))
    return AutoPrecisionCallback("fisher", interval=5, config=config, verbose=False)


def rule() -> AutoPrecisionCallback:
    return AutoPrecisionCallback("rule", interval=5, config=RESTLESS, verbose=False)


# what Lightning reproduces by itself


@pytest.mark.parametrize("stop", [30, STOP])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_lightning_alone_resumes_exactly(dropout: float, stop: int, tmp_path: Path) -> None:
    assert_resumes(Setup(lambda: None, lambda: Net(dropout)), tmp_path, stop)


def test_lightning_alone_resumes_a_plain_loader_at_an_epoch_end(tmp_path: Path) -> None:
    assert_resumes(plain_loader(lambda: None), tmp_path, stop=40)


# the rule, fp16 units


def spiked() -> StatefulLoader:
    return StatefulLoader(spikes=[20, 35, 55])


def test_rule_with_fp16_units(tmp_path: Path) -> None:
    through = assert_resumes(Setup(rule, data=spiked), tmp_path)
    assert through.callback is not None
    moves = [d for d in through.callback.history if d.knob == "precision" and d.outcome == "applied"]
    assert {d.applied for d in moves if d.step <= STOP} == {"fp16", "fp32"}, "too little happens before the stop"
    assert {d.applied for d in moves if d.step > STOP} == {"fp16", "fp32"}, "too little happens after the stop"
    assert through.callback.skipped_steps > 0


class Recorded(NamedTuple):
    """A run through and its checkpoints after every step."""

    setup: Setup
    result: Result
    folder: Path


def record(setup: Setup, folder: Path) -> Recorded:
    return Recorded(setup, setup.fit(TOTAL, folder, save_at=1), folder)


@pytest.fixture(scope="module")
def recorded_rule(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(Setup(rule, data=spiked), tmp_path_factory.mktemp("rule"))


@pytest.mark.parametrize("step", [1, 10, 11, 12, 13, 20, 21, 22, 34, 35, 36, 40, 56, 79])
def test_rule_from_any_step(step: int, recorded_rule: Recorded, tmp_path: Path) -> None:
    """Before, at and after changes, skipped steps, samplings and epochs."""
    setup, through, folder = recorded_rule
    assert_same_end(through, setup.fit(TOTAL, tmp_path, resume=folder / f"step={step}.ckpt"))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rule_with_validation_and_accumulation(accumulate: int, tmp_path: Path) -> None:
    """Windows of three end on other steps than epochs of ten batches do."""
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    config = AutoPrecisionConfig(formats=("fp32", "bf16", "fp16"), rule=RuleConfig(stable_cv=10.0))
    setup = Setup(lambda: AutoPrecisionCallback(interval=4, config=config, verbose=False), options=options)
    through = assert_resumes(setup, tmp_path)
    assert through.callback is not None
    assert "fp16" in through.callback.precision_map().values()


class StartsLow(RuleController):
    """Begins in fp16 on a scale far too small: the rule raises units, and lowers them when the scale has grown."""

    def initial_map(self) -> dict[str, str]:
        return {"*": "fp16"}


class Faint(Net):
    def loss(self, batch: Any) -> Any:
        return super().loss(batch) * 1e-6


def starts_low() -> AutoPrecisionCallback:
    config = replace(
        RESTLESS,
        loss_scale=LossScaleConfig(init_scale=1.0, growth_interval=3),
        guard=GuardConfig(hold=6),
    )
    return AutoPrecisionCallback(StartsLow(config), interval=4, config=config, verbose=False)


def test_rule_that_raises(tmp_path: Path) -> None:
    """How often the rule raised a unit, and since when it waits, comes back."""
    through = assert_resumes(Setup(starts_low, Faint), tmp_path)
    assert through.callback is not None
    rows = [(d.before, d.applied) for d in through.callback.history if d.knob == "precision"]
    assert {("fp16", "fp32"), ("fp32", "fp16")} <= set(rows)
    assert through.callback.controller.state_dict()["raises"]


# every field


class Eventful(Net):
    """One step without a loss, three with an infinite one, and a schedule that moves every other step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        step = self.trainer.global_step
        return None if step == 5 else loss * float("inf") if step in (8, 9, 10) else loss

    def configure_optimizers(self) -> Any:
        optimizers, (schedule,) = super().configure_optimizers()
        return optimizers, [{**schedule, "frequency": 2}]


class FailsOnce(ScriptedController):
    """Gives an answer that is none before the second epoch."""

    def epoch_action(self, epoch: int) -> Any:
        return "nothing" if epoch == 1 else None


def eventful() -> AutoPrecisionCallback:
    config = AutoPrecisionConfig(guard=GuardConfig(max_consecutive_skips=3, hold=2))
    return AutoPrecisionCallback(FailsOnce({2: Action(precision={"net.5": "fp32"})}), config=config)


class Asks(Callback):
    """Asks for a change at the end of a batch, after which the checkpoint is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == self.step:
            callback_of(trainer).request(Action(precision={"net.4": "int8"}, clip=0.25))


class Resizes(Callback):
    """Says before a batch that the effective batch has changed, and with it the steps that are left."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        steering = callback_of(trainer).steering
        if trainer.global_step == self.step and steering is not None:
            steering.learning_rate.set_batch_factor(2.0)
            steering.learning_rate.set_factor("test", 0.7)
            steering.learning_rate.set_first_batch(8)
            steering.learning_rate.set_noise_scale(5.5)
            before, now = EpochPlan(batches=20), EpochPlan(batches=14)
            steering.schedules.stretch(RunLength(before=before, now=now, epochs_left=3))


class KeepsParts(Callback):
    """What autoprec's objects were made of when each checkpoint was written."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, Any]] = {}

    def on_save_checkpoint(self, trainer: Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.at[trainer.global_step] = parts_of(callback_of(trainer))


class ComparesParts(Callback):
    """At the start of training they are made of the same."""

    def __init__(self, expected: Mapping[str, Any]) -> None:
        self.expected = expected

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        ours, missing = parts_of(callback_of(trainer)), "missing"
        both = {name: (self.expected.get(name, missing), ours.get(name, missing)) for name in {*self.expected, *ours}}
        found = [name for name, (left, right) in both.items() if differences(left, right)]
        assert not found, f"not restored: {[(name, *both[name]) for name in sorted(found)[:10]]}"


NOT_SAVED = {
    "_step_guard": "identities of objects",
    "_unit_of": "identities of objects",
    "_shadow": "filled when a window opens",
    "_effects_at_entry": "noted when a step begins",
    "backwards": "counted from when a window opens",
    "records_all": "set when a window opens",
    "_logged_window": "a resumed run does not log the window again that it begins with",
    "restored": "says how much of the history comes from a checkpoint",
    "trial": "the first window of any run is one",
    "_locator": "the search for the layer at fault begins anew",
    "maps": "counts what the compiler of this process has made",
    "_reasons": "of the latest moves, on record already",
    "_saved_controller": "what the file held",
    "_has_failed": "each process warns of the first fault",
    "is_resumed": "it is",
    "_resumed_after": "where it was when it was",
    "_seen_changes": "counted in one process, like the changes themselves",
    "_last_of_user": "Lightning's own count of reloads begins anew",
    "kernel_steps": "counted in one process, for its table",
    "copied_layers": "of the latest step, for the table",
    "_stepping": "kernels are prepared and copies made anew; a step has the same bits with them and without",
    "runs_on_copies": "set when a step begins",
    "override": "set while a layer runs on copies",
    "onlooker": "found out when the first step begins",
    "changes": "says when that has to be looked at anew",
    "_ring": "a resumed run begins with a copy of its own",
    "_live": "identities of objects",
    "_due": "when the next copy is taken",
    "_has_new_copy": "whether one was taken since the run went back",
    "_from_start": "looked up with the first copy",
    "calls": "set when a window opens, and kept as workloads",
    "wants_attention": "set when a window opens",
    "had_autocast": "noted when a step begins",
    "_step_s": "times of steps are of one process",
    "_last_s": "the same",
    "_size": "the same",
    "_size_ms": "the same",
    "_cache": "read anew",
}


def parts_of(callback: AutoPrecisionCallback) -> dict[str, Any]:
    """Every attribute of the callback and of the objects of autoprec behind it, down to primitives, by its path."""
    callback.plugin.state_dict()  # closes the window and reads what is on the device, as writing a file does
    return dict(sorted(_parts("callback", callback)))


def _parts(path: str, value: Any, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (bool, int, float, str, NoneType)):
        yield path, value
        return
    items: list[tuple[Any, Any]] = []
    if type(value).__module__.startswith("autoprec."):
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        items += [(name, getattr(value, name)) for name in names if name not in NOT_SAVED]
    if isinstance(value, Mapping):
        items += value.items()
    elif isinstance(value, (list, tuple, deque)):
        items += enumerate(value)
    elif isinstance(value, (set, frozenset)):
        items += enumerate(sorted(value, key=str))
    for key, item in items:
        if id(item) not in above:
            yield from _parts(f"{path}.{key}", item, (*above, id(value)))
    if not items:
        yield path, f"{type(value).__name__} without items"


class Kept(NamedTuple):
    """A run with its checkpoints, and what autoprec was made of at each."""

    recorded: Recorded
    parts: dict[int, dict[str, Any]]


def keep(setup: Setup, folder: Path) -> Kept:
    parts = KeepsParts()
    recorded = record(replace(setup, others=[*setup.others, lambda: parts]), folder)
    return Kept(recorded._replace(setup=setup), parts.at)


RUNS = {"rule": Setup(rule, data=spiked)}
RUNS["events"] = Setup(
    eventful, Eventful, options={"precision": "bf16-mixed"}, others=[lambda: Asks(13), lambda: Resizes(9)]
)
RUNS["planned"] = Setup(planned)
# a window that is measured is skipped in 56; a request waits in 13; what was measured for a plan waits in 12
STEPS = [
    *(("rule", step) for step in (1, 13, 21, 36, STOP, 56, 60)),
    *(("events", step) for step in (7, 9, 11, 13, 20)),
    *(("planned", step) for step in (5, 6, 12, 18)),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kept]:
    return {name: keep(setup, tmp_path_factory.mktemp(name)) for name, setup in RUNS.items()}


def resume_comparing(kept: Kept, step: int, folder: Path) -> Result:
    (setup, _, files), expected = kept
    setup = replace(setup, others=[*setup.others, lambda: ComparesParts(expected[step])])
    return setup.fit(TOTAL, folder, resume=files / f"step={step}.ckpt")


@pytest.mark.parametrize(("run", "step"), STEPS)
def test_every_field_comes_back(run: str, step: int, kept: dict[str, Kept], tmp_path: Path) -> None:
    """Not only those that are in the file."""
    assert_same_end(kept[run].recorded.result, resume_comparing(kept[run], step, tmp_path))


def test_no_field_keeps_one_value_through_these_steps(kept: dict[str, Kept]) -> None:
    """Else its way back is not tested."""
    values: dict[str, set[str]] = {}
    for run, step in STEPS:
        content = torch.load(kept[run].recorded.folder / f"step={step}.ckpt", weights_only=True)
        ours = content["AutoPrecision"], content["callbacks"]["AutoPrecisionCallback"]
        for name, value in [item for state in ours for item in fields_of(state)]:
            values.setdefault(name, set()).add(repr(value))
    assert len(values) > 30
    constant = {"version", "growth_factor", "backoff_factor", "multiplier", "given"}
    constant |= {"undone_windows", "rollbacks"}  # test_rollback.py
    constant |= {"lost_windows"}  # test_cases_b_memory.py
    constant |= {"accumulation", "asked_ahead", "batch_size", "lost_samples"}  # see test_cases_b_resume.py
    constant |= {"plan"}  # test_cases_b_together.py
    constant |= {"is_pinned"}  # test_table_fits.py
    constant |= {"attention", "implementations"}  # test_attention_costs.py, test_implementations_fits.py
    constant |= {"failed_in_base", "has_ambient_failed"}  # test_cases_a_evaluation_raised.py
    assert {name for name, seen in values.items() if len(seen) == 1} == constant


def fields_of(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of the nested states too, but not entries by the name of a unit."""
    for name, value in state.items():
        if name in ("knobs", "telemetry", "clip", "loss_scale", "guard", "learning_rate") and isinstance(
            value, Mapping
        ):
            yield from fields_of(value)
        else:
            yield name, value


LOST: dict[str, Callable[[Any], Any]] = {
    "saved": lambda steering: setattr(steering, "samples", 0),
    "not in any state": lambda steering: setattr(steering.knobs, "_unheard_of", 1),
    "in another object": lambda steering: setattr(steering.runtime, "records_inputs", False),
    "format that acts": lambda steering: set_format(steering.knobs.units["net.0"], "bf16"),
}


@pytest.mark.parametrize("lost", LOST)
def test_the_comparison_can_fail(
    lost: str, kept: dict[str, Kept], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Steering.load_state_dict

    def loses(steering: Steering, state: Mapping[str, Any]) -> None:
        load(steering, state)
        LOST[lost](steering)

    monkeypatch.setattr(Steering, "load_state_dict", loses)
    with pytest.raises(AssertionError, match="not restored"):
        resume_comparing(kept["rule"], STOP, tmp_path)


# scripts


def scripted() -> AutoPrecisionCallback:
    steps = {
        0: Action(precision={"net.0": "bf16"}),
        12: Action(precision={"net.4": "fp16"}, loss_scale=512.0),
        36: Action(precision={"net.5": "fp16", "net.1": "bf16"}, clip=0.7),
        37: Action(precision={"net.5": "bf16"}, loss_scale=64.0),
        38: Action(precision={"net.4": "int8"}, clip=2.0),
        60: Action(precision={"*": "fp32"}, loss_scale=2.0**20),
    }
    return AutoPrecisionCallback(ScriptedController(steps, epochs={4: Action(clip=9.0)}), verbose=False)


def test_script(tmp_path: Path) -> None:
    assert_resumes(Setup(scripted), tmp_path)


@pytest.fixture(scope="module")
def recorded_script(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(Setup(scripted), tmp_path_factory.mktemp("script"))


@pytest.mark.parametrize("step", [12, 13, 36, 38, 40, 60])
def test_script_from_any_step(step: int, recorded_script: Recorded, tmp_path: Path) -> None:
    setup, through, folder = recorded_script
    assert_same_end(through, setup.fit(TOTAL, tmp_path, resume=folder / f"step={step}.ckpt"))


@pytest.mark.parametrize("make", [rule, scripted])
def test_plain_loader_at_an_epoch_end(make: Callable[[], AutoPrecisionCallback], tmp_path: Path) -> None:
    assert_resumes(plain_loader(make), tmp_path, stop=40)


def test_request_that_waits_for_the_boundary(tmp_path: Path) -> None:
    through = assert_resumes(Setup(scripted, others=[lambda: Asks(STOP)]), tmp_path)
    assert through.callback is not None
    assert any(d.outcome == "deferred" for d in through.callback.history)


# other ways in


def test_dropout(tmp_path: Path) -> None:
    assert_resumes(Setup(scripted, lambda: Net(0.4)), tmp_path)


@pytest.mark.parametrize("policy", ["fixed:fp16", "fixed:bf16", "fixed:int8"])
def test_fixed_format(policy: str, tmp_path: Path) -> None:
    assert_resumes(Setup(lambda: AutoPrecisionCallback(policy, verbose=False), data=spiked), tmp_path)


def test_saved_map(tmp_path: Path) -> None:
    first = Setup(scripted).fit(50, tmp_path)
    assert first.callback is not None
    path = tmp_path / "maps" / "last.yaml"
    first.callback.save_map(path)
    through = assert_resumes(Setup(lambda: AutoPrecisionCallback(path, verbose=False)), tmp_path / "checkpoints")
    assert through.callback is not None
    assert through.callback.precision_map() == first.callback.precision_map()


@pytest.mark.parametrize("knobs", [(), ("loss_scale",), ("clip",), ("precision", "loss_scale", "clip")])
def test_on_top_of_a_grad_scaler(knobs: tuple[str, ...], tmp_path: Path) -> None:
    setup = Setup(
        lambda: AutoPrecisionCallback(knobs=knobs, interval=5, config=RESTLESS, verbose=False),
        data=spiked,
        plugin=lambda: fp16_plugin(2.0**20, growth_interval=5),
    )
    assert_resumes(setup, tmp_path)


@pytest.mark.parametrize("formats", [{"*": "fp16"}, {"net.0": "bf16", "net.1": "bf16"}])
def test_plugin_alone(formats: Mapping[str, str], tmp_path: Path) -> None:
    setup = Setup(lambda: None, data=spiked, plugin=lambda: AutoPrecision(formats, config=RESTLESS))
    assert_resumes(setup, tmp_path)


def test_strategy(tmp_path: Path) -> None:
    assert_resumes(Setup(rule, data=spiked, options={"strategy": "autoprec"}), tmp_path)


class TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        halves = list(self.net[:3].parameters()), list(self.net[3:].parameters())
        return [torch.optim.Adam(half, lr=1e-2) for half in halves], []


def test_two_optimizers(tmp_path: Path) -> None:
    assert_resumes(Setup(rule, TwoOptimizers, spiked), tmp_path, stop=38)


# how the file comes about


@pytest.mark.parametrize("make", [rule, scripted])
def test_file_written_after_fit(make: Callable[[], AutoPrecisionCallback], tmp_path: Path) -> None:
    setup = Setup(make, data=spiked)
    through = setup.fit(TOTAL, tmp_path)
    setup.fit(40, tmp_path).trainer.save_checkpoint(tmp_path / "late.ckpt")
    assert_same_end(through, setup.fit(TOTAL, tmp_path, resume=tmp_path / "late.ckpt"))


@pytest.mark.parametrize("make", [rule, scripted])
@pytest.mark.parametrize(
    ("when", "stop"),
    [({"every_n_epochs": 1, "save_on_train_epoch_end": True}, 40), ({"save_on_train_epoch_end": False}, 40)],
    ids=["train_epoch_end", "validation_end"],
)
def test_file_written_at(
    when: Mapping[str, Any], stop: int, make: Callable[[], AutoPrecisionCallback], tmp_path: Path
) -> None:
    assert_resumes(Setup(make, data=spiked, checkpoint=when), tmp_path, stop)


def test_file_written_by_a_validation_inside_the_epoch(tmp_path: Path) -> None:
    when = {"save_on_train_epoch_end": False, "every_n_epochs": 1}
    setup = Setup(rule, data=spiked, checkpoint=when, options={"val_check_interval": 4})
    assert_resumes(setup, tmp_path, stop=38)


class Stumbles(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == STOP:
            raise InterruptedError("the machine is taken away")


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=:UserWarning")  # Lightning looks for an earlier such file
def test_file_written_on_an_exception(tmp_path: Path) -> None:
    """Everything that is steered comes back; where the data go on is Lightning's matter."""
    seed(5)
    first = scripted()
    trainer = quiet(
        max_steps=TOTAL,
        callbacks=[first, Stumbles(), OnExceptionCheckpoint(tmp_path, "broken")],
        enable_checkpointing=True,
    )
    with pytest.raises(InterruptedError):
        trainer.fit(Net(), StatefulLoader(), loader(16))
    seen: list[dict[str, Any]] = []

    def look(trainer: Trainer, module: pl.LightningModule) -> None:
        second = callback_of(trainer)
        assert_same_state(first, second)
        seen.append(dict(second.precision_map()))

    setup = Setup(scripted, others=[lambda: LambdaCallback(on_train_start=look)], is_random_state_carried=False)
    setup.fit(STOP + 2, tmp_path, resume=tmp_path / "broken.ckpt")
    assert seen[0]["net.4"] == "fp16"


def test_second_fit_of_the_same_objects(recorded_rule: Recorded, tmp_path: Path) -> None:
    through = recorded_rule.result
    seed(5)
    module, callback = Net(), rule()
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=STOP, save_top_k=-1, filename="{step}")
    trainer = quiet(
        max_steps=50, max_epochs=-1, num_sanity_val_steps=0, callbacks=[callback, checkpoint], enable_checkpointing=True
    )
    trainer.fit(module, spiked(), loader(16))
    trainer.fit_loop.epoch_loop.max_steps = TOTAL
    module.losses.clear()
    with pytest.warns(UserWarning, match="exists and is not empty"):
        trainer.fit(module, spiked(), loader(16), ckpt_path=tmp_path / f"step={STOP}.ckpt", weights_only=True)
    assert_same_end(through, Result(outcome(trainer, module), callback, trainer), compares_random_state=False)


# what is in the file


@pytest.fixture
def checkpoint(recorded_rule: Recorded) -> Path:
    return recorded_rule.folder / f"step={STOP}.ckpt"


def leaves(value: Any) -> set[type]:
    if isinstance(value, Mapping):
        return {kind for item in [*value, *value.values()] for kind in leaves(item)}
    if isinstance(value, (list, tuple)):
        return {kind for item in value for kind in leaves(item)}
    return {type(value)}


def test_our_states_are_primitives(checkpoint: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    assert leaves(content["AutoPrecision"]) <= {str, int, float, bool, type(None)}
    assert leaves(content["callbacks"]["AutoPrecisionCallback"]) <= {str, int, float, bool, type(None), torch.Tensor}


def test_weights_are_those_of_a_plain_run(checkpoint: Path, tmp_path: Path) -> None:
    Setup(lambda: None).fit(STOP, tmp_path, save_at=STOP)
    plain = torch.load(tmp_path / f"step={STOP}.ckpt", weights_only=True)
    ours = torch.load(checkpoint, weights_only=True)
    shapes = [{key: (value.shape, value.dtype) for key, value in c["state_dict"].items()} for c in (plain, ours)]
    assert shapes[0] == shapes[1]
    assert set(ours) - set(plain) == {"AutoPrecision"}
    names = [{key.split("{")[0] for key in content["callbacks"]} for content in (plain, ours)]
    assert names[1] - names[0] == {"AutoPrecisionCallback"}
    Net().load_state_dict(ours["state_dict"], strict=True)


def test_goes_on_without_autoprec(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="AutoPrecisionCallback"):
        result = Setup(lambda: None).fit(STOP + 5, tmp_path, resume=checkpoint)
    assert result.trainer.global_step == STOP + 5


def test_begins_from_a_plain_checkpoint(tmp_path: Path) -> None:
    Setup(lambda: None).fit(STOP, tmp_path, save_at=STOP)
    with pytest.warns(UserWarning, match="no autoprec state"):
        result = Setup(rule).fit(STOP + 8, tmp_path, resume=tmp_path / f"step={STOP}.ckpt")
    assert result.callback is not None
    assert result.callback.applied_steps + result.callback.skipped_steps == 8


def test_static_scaler_is_taken_over_and_handed_back(tmp_path: Path) -> None:
    """Static AMP for 20 steps, autoprec for 10, static AMP again: one loss scale all the way."""
    static = Setup(lambda: None, plugin=lambda: fp16_plugin(2.0**10, growth_interval=7))
    ours = Setup(
        lambda: AutoPrecisionCallback("fixed:fp16", verbose=False),
        plugin=lambda: fp16_plugin(2.0**10, growth_interval=7),
    )
    through = static.fit(40, tmp_path / "through", save_at=40)
    static.fit(20, tmp_path / "static", save_at=20)
    with pytest.warns(UserWarning, match="The loss scale goes on from the checkpoint's GradScaler"):
        ours.fit(30, tmp_path / "ours", resume=tmp_path / "static" / "step=20.ckpt", save_at=30)
    with pytest.warns(UserWarning, match="AutoPrecisionCallback"):
        back = static.fit(40, tmp_path, resume=tmp_path / "ours" / "step=30.ckpt")
    scales = [result.trainer.precision_plugin.scaler.state_dict() for result in (through, back)]  # type: ignore[attr-defined]
    assert scales[0] == scales[1]
    assert scales[0]["scale"] != 2.0**10, "the scale never moved"


@pytest.mark.parametrize(
    "arguments",
    [{"knobs": ()}, {"knobs": ("clip",)}, {"interval": 3}, {"config": AutoPrecisionConfig(formats=("fp32", "bf16"))}],
    ids=["no knobs", "clip only", "interval", "formats"],
)
def test_f07_resumes_with_other_settings(arguments: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    """The state is found; what is masked now starts from what the Trainer runs."""
    callback = AutoPrecisionCallback(**{"config": RESTLESS, "verbose": False, **arguments})
    result = Setup(lambda: callback).fit(STOP + 6, tmp_path, resume=checkpoint)
    content = torch.load(checkpoint, weights_only=True)["AutoPrecision"]
    before = content["applied_steps"] + content["skipped_steps"]
    assert callback.applied_steps + callback.skipped_steps == before + 6
    if "knobs" in arguments:
        assert set(callback.precision_map().values()) == {"fp32"}
    else:
        assert callback.history.state()[: len(content["history"])] == content["history"]
    assert all(bool(torch.isfinite(value).all()) for value in result.outcome.weights.values())


def test_other_policy_goes_on_from_the_formats(checkpoint: Path, tmp_path: Path) -> None:
    setup = Setup(lambda: AutoPrecisionCallback(ScriptedController(), verbose=False))
    with pytest.warns(UserWarning, match="was written under policy 'rule'"):
        result = setup.fit(STOP + 3, tmp_path, resume=checkpoint)
    content = torch.load(checkpoint, weights_only=True)
    assert result.callback is not None
    assert result.callback.precision_map() == content["AutoPrecision"]["knobs"]["formats"]


def test_other_model_takes_what_fits(checkpoint: Path, tmp_path: Path) -> None:
    """One layer more than the checkpoint knows: it starts as the Trainer would have it."""

    class Longer(Net):
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    content = torch.load(checkpoint, weights_only=True)
    content["lr_schedulers"] = []
    torch.save(content, tmp_path / "cut.ckpt")
    result = Setup(rule, Longer).fit(STOP + 3, tmp_path, resume=tmp_path / "cut.ckpt")
    assert result.callback is not None
    formats = result.callback.precision_map()
    assert formats["extra"] == "fp32"
    assert {name: formats[name] for name in content["AutoPrecision"]["knobs"]["formats"]} == content["AutoPrecision"][
        "knobs"
    ]["formats"]


@pytest.mark.parametrize("part", ["AutoPrecision", "AutoPrecisionCallback"])
def test_state_of_another_version_is_refused(part: str, checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    (content if part == "AutoPrecision" else content["callbacks"])[part]["version"] = 99
    torch.save(content, tmp_path / "newer.ckpt")
    with pytest.raises(ValueError, match=r"version 99.*version 1"):
        Setup(rule).fit(STOP + 1, tmp_path, resume=tmp_path / "newer.ckpt")


def test_states_are_never_empty() -> None:
    """Lightning's tuners restore only what was not empty."""
    callback = AutoPrecisionCallback(verbose=False)
    assert callback.state_dict()
    assert AutoPrecision().state_dict()
    seen: list[bool] = []
    watch = LambdaCallback(
        on_train_start=lambda trainer, module: seen.append(bool(trainer.precision_plugin.state_dict()))
    )
    quiet(max_steps=1, callbacks=[callback, watch]).fit(Plain(), loader())
    assert seen == [True]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning")
def test_saving_between_two_optimizers_does_not_split_the_window(tmp_path: Path) -> None:
    class Saves(TwoOptimizers):
        def manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / "inside.ckpt")
            super().manual_backward(loss, *args, **kwargs)

    callback = scripted()
    quiet(max_epochs=1, callbacks=[callback], limit_val_batches=0).fit(Saves(), loader())
    assert callback.steering is not None
    assert callback.steering.window == 8


# a resumed run with other settings


def saved(tmp_path: Path, **arguments: Any) -> Path:
    callback = AutoPrecisionCallback(verbose=False, **arguments)
    trainer = quiet(max_epochs=1, callbacks=[callback])
    trainer.fit(Plain(), loader())
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    return tmp_path / "first.ckpt"


def resumed_with(path: Path, trainer: Mapping[str, Any], **arguments: Any) -> AutoPrecisionCallback:
    callback = AutoPrecisionCallback(verbose=False, **arguments)
    quiet(max_epochs=2, callbacks=[callback], **trainer).fit(Plain(), loader(), ckpt_path=path)
    return callback


@pytest.mark.parametrize("knobs", [("precision",), ("precision", "clip")])
def test_a_threshold_given_to_the_new_trainer_counts(knobs: tuple[str, ...], tmp_path: Path) -> None:
    path = saved(tmp_path, knobs=knobs)
    assert resumed_with(path, {"gradient_clip_val": 0.01}).clip_threshold == 0.01


def test_a_threshold_that_was_not_steered_is_steered_from_here_on(tmp_path: Path) -> None:
    assert resumed_with(saved(tmp_path, knobs=()), {}).clip_threshold < float("inf")


@pytest.mark.filterwarnings("ignore:The checkpoint was written under policy:UserWarning")
@pytest.mark.parametrize("knobs", [(), ("precision",)])
def test_a_masked_loss_scale_stays_out_of_use(knobs: tuple[str, ...], tmp_path: Path) -> None:
    path = saved(tmp_path, policy="fixed:fp16")
    callback = resumed_with(path, {}, policy="fixed:bf16", knobs=knobs)
    assert callback.steering is not None
    assert not callback.steering.knobs.loss_scale.enabled
    assert callback.loss_scale == 1.0
