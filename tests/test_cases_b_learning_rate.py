"""What the effective batch does to the learning rate in real runs: inside the update, and nowhere else.

Time budget: 30 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, BatchConfig
from autoprec.learning_rate import Applied
from tests.private_runs import Net, run
from tests.resized import Change, Run
from tests.small_fits import Plain, differences, loader, quiet, seed
from tests.support import Task, cpu, reported, rows, scripted, squares_but

BF16: dict[str, Any] = {"knobs": ("precision",)}


class Sets(Callback):
    """Sets factors in the first window, before any step."""

    def __init__(self, k: float = 4.0, **factors: float) -> None:
        self.k = k
        self.factors = factors

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        rates = trainer.precision_plugin.steering.learning_rate
        rates.set_batch_factor(self.k)
        for name, factor in self.factors.items():
            rates.set_factor(name, factor)


def config(rule: Any = "sqrt", **options: Any) -> AutoPrecisionConfig:
    return AutoPrecisionConfig(batch=BatchConfig(learning_rate=rule), **options)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("is_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("options", [BF16, {**BF16, "fused": False}, {"knobs": ()}], ids=["kernel", "torch", "masked"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_factor_is_a_factor_on_the_rate(name: str, options: dict[str, Any], is_tensor: bool) -> None:
    """Bit for bit the run with the other rate; the user's own comes back."""

    def fit(lr: float, *others: Callback) -> Any:
        seed()
        value: Any = torch.tensor(lr) if is_tensor else lr
        module = Plain(lambda parameters: OPTIMIZERS[name](parameters, lr=value))
        is_fused = options.get("fused", True)
        ap = AutoPrecisionCallback(
            "fixed:bf16", knobs=options["knobs"], config=config(fused_step=is_fused), verbose=False
        )
        trainer = quiet(max_epochs=2, callbacks=[ap, *others])
        trainer.fit(module, loader())
        (group,) = trainer.optimizers[0].param_groups
        return module.state_dict(), float(group["lr"]), ap.steering

    lr = 0.0078125  # so that twice of it is exact in float32 as well
    ours, seen, steering = fit(lr, Sets())
    theirs, _, _ = fit(2.0 * lr)
    assert not differences(ours, theirs)
    assert differences(ours, fit(lr)[0])
    assert seen == lr
    assert steering.learning_rate.factor == 2.0
    is_by_kernel = options == BF16 and name in ("sgd", "momentum", "adam", "adamw")
    assert (steering.kernel_steps > 0) is is_by_kernel


def test_factor_reaches_private_steps() -> None:
    def fit(lr: float, *others: Callback, looks_on: bool = False) -> Any:
        seed()
        module = Net(optimizer=partial(AdamW, lr=lr))
        return run(module, config=config(), callbacks=others, looks_on=looks_on)

    ours, theirs = fit(0.01, Sets()), fit(0.02)
    assert ours.counts["private"] == theirs.counts["private"] > 0
    assert not differences(ours.left.weights, theirs.left.weights)
    assert not differences(ours.left.weights, fit(0.01, Sets(), looks_on=True).left.weights)


def test_without_a_factor_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("the groups were touched")

    monkeypatch.setattr(Applied, "__init__", fail)
    Run(config=config("linear")).fit(others=[Sets(k=1.0)])
    with pytest.raises(AssertionError, match="touched"):
        Run(config=config("linear")).fit(others=[Sets(k=2.0)])


def cosine(optimizer: Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedules_and_checkpoints_keep_their_own_value(accumulate: int, tmp_path: Any) -> None:
    """The recursive form of the cosine goes on from what it finds in the group."""

    class Saves(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{len(list(tmp_path.iterdir()))}.ckpt")

    kinds = Run(cosine, config=config("linear"), accumulate=accumulate)
    changed, ap = kinds.fit(others=[Sets(), Saves()])
    plain, _ = kinds.fit(others=[Saves()])
    assert ap.steering is not None
    assert ap.steering.learning_rate.factor == 4.0
    assert changed.rates == plain.rates
    saved = [torch.load(tmp_path / f"{index}.ckpt", weights_only=True) for index in range(2)]
    assert not differences(*(each["lr_schedulers"] for each in saved))
    assert not differences(*(each["optimizer_states"][0]["param_groups"] for each in saved))


def test_b04_rate_and_schedule_together() -> None:
    """Twice the batch at the linear rule: half the steps, each with twice the rate that was due there."""
    used: list[float] = []

    class Looks(SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            used.append(self.param_groups[0]["lr"])
            return loss

    class Follows(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            trainer.precision_plugin.steering.learning_rate.set_batch_factor(trainer.accumulate_grad_batches)

    kind = Run(cosine, optimizer=partial(Looks, lr=0.05), config=config("linear"))
    changed, _ = kind.fit(Change(accumulate=2), others=[Follows()])
    effective = used.copy()
    plain, _ = kind.fit()
    expected = [0.05, *plain.rates.values()][:-1]
    assert changed.rates[128] == plain.rates[128]
    assert effective == [*expected[:8], *(2 * rate for rate in expected[8::2])]


# ---- what the user's code sees and does ----


class ByHand(Task):
    """Sets its rate itself in some hook, as warm-ups by hand do, and notes what it finds."""

    where = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: list[tuple[str, float]] = []

    def _at(self, place: str) -> None:
        (group,) = self.trainer.optimizers[0].param_groups
        self.found.append((place, group["lr"]))
        if place == self.where:
            group["lr"] = 0.01 * (self.trainer.global_step + 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._at("training_step")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self._at("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._at("on_before_optimizer_step")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self._at("optimizer_step")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self._at("after optimizer_step")

    def on_train_batch_end(self, *args: Any) -> None:
        self._at("on_train_batch_end")


PLACES = (
    "training_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "after optimizer_step",
    "on_train_batch_end",
)


@pytest.mark.parametrize("knobs", [(), ("precision",)], ids=["masked", "steered"])
@pytest.mark.parametrize("where", PLACES)
def test_code_of_the_users_sees_and_sets_its_own_value(where: str, knobs: tuple[str, ...]) -> None:
    def fit(*others: Callback) -> tuple[Any, Any]:
        kind = Run(task=type("Placed", (ByHand,), {"where": where}), config=config("linear"), knobs=knobs)
        modules: list[Any] = []

        class Keeps(Callback):
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                modules.append(pl_module)

        record, _ = kind.fit(others=[Keeps(), *others])
        return modules[0], record

    ours, changed = fit(Sets(k=4.0))
    theirs, plain = fit()
    assert ours.found == theirs.found
    assert changed.rates == plain.rates
    assert len({rate for _, rate in ours.found}) > 10
    assert differences(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("knobs", [(), ("precision",)], ids=["masked", "steered"])
def test_skipped_steps_leave_the_value(knobs: tuple[str, ...]) -> None:
    loss = partial(squares_but, bad=(0, 3))
    kind = Run(cosine, loss=loss, config=config(), knobs=knobs)
    changed, ap = kind.fit(others=[Sets()])
    assert ap.skipped_steps == 4
    assert changed.rates == kind.fit()[0].rates


def test_a_step_that_raises_leaves_the_value() -> None:
    class Fails(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise RuntimeError(f"at {self.param_groups[0]['lr']}")

    kept: list[Any] = []

    class Keeps(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            kept.extend(trainer.optimizers)

    with pytest.raises(RuntimeError, match="at 0.5"):
        Run(optimizer=partial(Fails, lr=0.25), config=config()).fit(others=[Sets(), Keeps()])
    assert kept[0].param_groups[0]["lr"] == 0.25


class Gan(Plain):
    """Two optimizers, stepped one after the other."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [AdamW(self.net[0].parameters(), lr=self.lr), SGD(self.net[2].parameters(), lr=2 * self.lr)]


@pytest.mark.parametrize("policy", ["fixed:bf16", "fixed:fp32"])
def test_all_optimizers_of_a_gan(policy: str) -> None:
    def fit(lr: float, *others: Callback) -> Any:
        seed()
        module = Gan(lr)
        ap = AutoPrecisionCallback(policy, config=config(), verbose=False)
        trainer = quiet(max_epochs=1, callbacks=[ap, *others])
        trainer.fit(module, loader())
        return module.state_dict(), [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]

    ours, rates = fit(0.01, Sets())
    theirs, _ = fit(0.02)
    assert not differences(ours, theirs)
    assert rates == [0.01, 0.02]


# ---- rules ----


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_sde_with_and_without_kernels(cls: Any, is_fused: bool) -> None:
    def fit(k: float, **options: Any) -> Any:
        seed()
        module = Plain(lambda parameters: cls(parameters, **options))
        settings = config("sde", fused_step=is_fused)
        ap = AutoPrecisionCallback("fixed:bf16", config=settings, verbose=False)
        trainer = quiet(max_epochs=1, callbacks=[ap, Sets(k)])
        trainer.fit(module, loader())
        return module.state_dict(), trainer.optimizers[0].param_groups[0]

    ours, group = fit(4.0, lr=0.01, betas=(0.9, 0.99), eps=1e-6)
    betas = (1.0 - 4.0 * (1.0 - 0.9), 1.0 - 4.0 * (1.0 - 0.99))
    assert not differences(ours, fit(1.0, lr=0.02, betas=betas, eps=5e-7)[0])
    assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.9, 0.99), 1e-6)


def test_sde_is_refused_for_other_optimizers_at_the_start() -> None:
    with pytest.raises(MisconfigurationException, match="learning_rate='sde'.*`SGD` is not Adam or AdamW.*Choose"):
        Run(config=config("sde")).fit()


def test_report_says_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    text = reported(caplog, monkeypatch)
    ap = scripted(config=config())
    trainer = cpu(callbacks=[ap, Sets(rollback=0.5)], log_every_n_steps=1, accumulate_grad_batches=1)
    trainer.fit(Run().module())
    assert "lr  " not in text()  # 2 x 0.5
    trainer = cpu(callbacks=[ap, Sets(rollback=0.25)], log_every_n_steps=1)
    trainer.fit(Run().module())
    why = "rule sqrt for 4 times the first effective batch, rollback x 0.25"
    assert f"lr         x 0.5 inside the optimizer's step ({why})" in text()
    assert trainer.callback_metrics["autoprec/lr_factor"] == 0.5
    assert not rows(ap.history, "learning_rate")


def test_metric_is_left_out_at_1() -> None:
    trainer = cpu(callbacks=[scripted(config=config())], log_every_n_steps=1)
    trainer.fit(Run().module())
    assert "autoprec/loss_scale" in trainer.callback_metrics
    assert "autoprec/lr_factor" not in trainer.callback_metrics


# ---- resume ----


def one_cycle(optimizer: Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=32)


class Ends(Callback):
    """Saves after a batch, and keeps weights and rates."""

    def __init__(self, path: Any, save_at: int) -> None:
        self.path = path
        self.save_at = save_at
        self.rates: dict[int, float] = {}
        self.weights: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self.rates[seen] = trainer.optimizers[0].param_groups[0]["lr"]
        if seen == self.save_at:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone()


class Accumulates(Callback):
    """Lightning does not resume the accumulation."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = 3


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("save_at", [11, 14, 16, 19])
def test_b04_resumes_bit_for_bit(save_at: int, tmp_path: Any) -> None:
    """The change is in batch 8; the schedule owes fractions of a call at each of these places."""

    def bad(net: Any, batch: Any, index: int) -> Any:
        return squares_but(net, batch, index, bad=(5,))

    path = tmp_path / "saved.ckpt"
    kind = Run(one_cycle, epochs=4, loss=bad, config=config())
    whole, resumed = Ends(path, save_at), Ends(path, 0)
    _, through = kind.fit(Change(accumulate=3), others=[whole, Sets(2.0, rollback=0.7)])
    _, again = kind.fit(others=[resumed, Accumulates()], ckpt_path=path, weights_only=True)
    assert resumed.rates
    assert {n: whole.rates[n] for n in resumed.rates} == resumed.rates
    assert torch.equal(whole.weights, resumed.weights)
    assert through.steering is not None
    assert again.steering is not None
    assert through.steering.schedules.state() == again.steering.schedules.state()
    assert through.steering.learning_rate.factor == again.steering.learning_rate.factor == math.sqrt(2) * 0.7


def test_a_checkpoint_from_before_loads(tmp_path: Any) -> None:
    path = tmp_path / "saved.ckpt"
    Run(cosine).fit(others=[Ends(path, 8)])
    content = torch.load(path, weights_only=True)
    state = content["AutoPrecision"]
    del state["learning_rate"]
    state["schedules"] = [values[:2] for values in state["schedules"]]
    torch.save(content, path)
    resumed = Ends(path, 0)
    Run(cosine).fit(others=[resumed], ckpt_path=path, weights_only=True)
    whole = Ends(path, 0)
    Run(cosine).fit(others=[whole])
    assert resumed.rates == {n: whole.rates[n] for n in range(9, 17)}
