"""Gradient clipping: scaled gradients, illegal thresholds, whose clip it is, sparse and half gradients.

Time budget: 20 s.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam
from torch.utils.data import DataLoader

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig
from autoprec.collect import read_globals
from autoprec.config import ClipConfig
from autoprec.encoding import encode, feature
from autoprec.summary import summarize
from tests.clipping import State, change, constant, same
from tests.support import Lin, Manual, Watch, cpu, fp16cpu, rows, scripted, squares, weights_of

# ---- c02: what is clipped is unscaled ----


class ManualClip(Manual):
    def __init__(self, algorithm: str = "norm", threshold: float = 1.0) -> None:
        super().__init__(nn.Linear(4, 1), torch.ones(8, 4), 8)
        self.algorithm, self.threshold = algorithm, threshold
        with torch.no_grad():
            self.net.get_parameter("weight").fill_(3.0)
            self.net.get_parameter("bias").fill_(1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(squares(self.net, batch, batch_idx))
        self.clip_gradients(optimizer, self.threshold, self.algorithm)
        optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 256.0, 1000.0, 2048.0])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_c02_manual_clipping_sees_unscaled_gradients(scale: float, algorithm: str) -> None:
    expected = change(ManualClip(algorithm), cpu())
    ap = AutoPrecisionCallback()
    found = change(ManualClip(algorithm), cpu(plugins=fp16cpu(scale), callbacks=[ap]))
    assert ap.applied_steps == 1
    assert ap.loss_scale == scale
    assert torch.allclose(found, expected, rtol=0.0, atol=1e-6)
    if algorithm == "norm":
        assert float(found.norm()) == pytest.approx(0.1, abs=1e-6)
        assert float(found[:4].norm()) == pytest.approx(0.0894, abs=1e-4)


def test_c02_fp16_chosen_by_the_script_is_clipped_alike() -> None:
    ap = scripted({0: Action(precision={"*": "fp16"}, loss_scale=2.0**10)})
    found = change(ManualClip(), cpu(callbacks=[ap]))
    assert ap.loss_scale == 2.0**10
    assert torch.allclose(found, change(ManualClip(), cpu()), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_c02_automatic_clipping_sees_unscaled_gradients(algorithm: str) -> None:
    def trainer(**kwargs: Any) -> Trainer:
        return cpu(gradient_clip_val=0.3, gradient_clip_algorithm=algorithm, **kwargs)

    def module() -> Lin:
        made = Lin(8, 8)
        with torch.no_grad():
            made.net.get_parameter("weight").fill_(3.0)
            made.net.get_parameter("bias").fill_(1.0)
        return made

    found = change(module(), trainer(plugins=fp16cpu(1024), callbacks=[AutoPrecisionCallback()]))
    assert torch.allclose(found, change(module(), trainer()), rtol=0.0, atol=1e-6)


def test_c02_each_of_two_optimizers_is_clipped_by_itself() -> None:
    class Two(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.nets = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
            for parameter in self.parameters():
                nn.init.constant_(parameter, 2.0)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizers: Any = self.optimizers()
            for net, optimizer in zip(self.nets, optimizers, strict=True):
                optimizer.zero_grad()
                self.manual_backward(squares(net, batch, batch_idx))
                self.clip_gradients(optimizer, 1.0, "norm")
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [SGD(net.parameters(), lr=0.1) for net in self.nets]

        def train_dataloader(self) -> Any:
            return DataLoader(torch.ones(8, 4), batch_size=8)  # type: ignore[arg-type]

    ap = AutoPrecisionCallback()
    found = change(Two(), cpu(plugins=fp16cpu(256), callbacks=[ap]))
    assert ap.applied_steps == 2
    assert torch.allclose(found, change(Two(), cpu()), rtol=0.0, atol=1e-6)
    assert [float(part.norm()) for part in found.chunk(2)] == pytest.approx([0.1, 0.1], abs=1e-6)


# ---- c03: illegal thresholds ----


def test_c03_illegal_values_are_refused_and_the_floor_keeps_training_alive() -> None:
    script = {
        0: Action(clip=40.0),
        1: Action(clip=-1.0),
        2: Action(clip=0.0),
        3: Action(clip=math.nan),
        4: Action(clip=None),
        5: Action(clip=1e-12),
        6: Action(clip=math.inf),
    }
    module, ap, watch = Lin(64, 8, loss=constant), scripted(script), Watch()
    trainer = cpu(callbacks=[ap, watch])
    trainer.fit(module)
    found = [(row.step, row.requested, row.applied, row.outcome) for row in rows(ap.history, "clip")]
    expected = [
        (0, 40.0, 40.0, "applied"),
        (1, -1.0, 40.0, "refused"),
        (2, 0.0, 40.0, "refused"),
        (3, pytest.approx(math.nan, nan_ok=True), 40.0, "refused"),
        (5, 1e-12, pytest.approx(0.2), "limited"),
        (6, math.inf, math.inf, "applied"),
    ]
    assert found == expected
    assert all(row.reason for row in ap.history)
    weights = [torch.cat([w.view(-1) for w in kept]) for kept in watch.weights]
    steps = [float((after - before).norm()) for before, after in zip(weights, weights[1:], strict=False)]
    assert steps == pytest.approx([2.0, 2.0, 2.0, 2.0, 0.02, 2.0, 2.0], rel=1e-4)
    assert all(bool((after[:4] < before[:4]).all()) for before, after in zip(weights, weights[1:], strict=False))
    assert trainer.gradient_clip_val is None


def test_c03_before_any_norm_is_known_a_tiny_threshold_is_taken_and_then_limited() -> None:
    """Without a median there is no floor; the request itself is positive and on record."""
    ap = scripted({0: Action(clip=1e-12), 4: Action(clip=1e-12)})
    cpu(callbacks=[ap]).fit(Lin(64, 8, loss=constant))
    assert [row.outcome for row in rows(ap.history, "clip")] == ["applied", "limited"]
    assert ap.clip_threshold == pytest.approx(0.2)


def test_c03_the_floor_is_a_setting() -> None:
    config = AutoPrecisionConfig(clip=ClipConfig(floor=0.5))
    ap = scripted({3: Action(clip=1.0)}, config=config)
    cpu(callbacks=[ap]).fit(Lin(64, 8, loss=constant))
    assert ap.clip_threshold == pytest.approx(10.0)


@pytest.mark.parametrize("value", ["1.0", True, [1.0]])
def test_c03_wrong_types_raise_at_once(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Passed `Action\(clip=...\)`"):
        Action(clip=value)


# ---- c04: who owns the clip ----


def test_c04_a_under_manual_optimization_the_knob_is_masked_and_the_users_clipping_works() -> None:
    ap = scripted({0: Action(clip=0.5)})
    found = change(ManualClip(), cpu(callbacks=[ap]))
    assert torch.allclose(found, change(ManualClip(), cpu()), rtol=0.0, atol=1e-7)
    (row,) = rows(ap.history, "clip")
    assert (row.outcome, row.requested) == ("refused", 0.5)
    assert "manual optimization" in row.reason
    assert ap.steering is not None
    assert "not steered: under manual optimization" in summarize(ap.steering, "scripted")


class OwnClip(Lin):
    """Clips to a constant of its own, whatever the Trainer says."""

    calls = 0

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.calls += 1
        nn.utils.clip_grad_norm_(self.parameters(), 0.25)


@pytest.mark.parametrize("trainer_clip", [None, 3.0])
def test_c04_b_the_modules_own_clipping_wins(trainer_clip: float | None) -> None:
    module, ap, watch = OwnClip(16, 8, loss=constant), scripted({0: Action(clip=0.5)}), Watch()
    trainer = cpu(callbacks=[ap, watch], gradient_clip_val=trainer_clip)
    found = change(module, trainer)
    assert module.calls == 2
    assert float(found.norm()) == pytest.approx(2 * 0.1 * 0.25, rel=1e-5)
    (row,) = rows(ap.history, "clip")
    assert row.outcome == "refused"
    assert "configure_gradient_clipping" in row.reason
    assert trainer.gradient_clip_val == trainer_clip


class TwoClips(Lin):
    """Clips by one kind, then by norm."""

    first: tuple[float, str] = (1.0, "norm")

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, *self.first)
        self.clip_gradients(optimizer, 0.5, "norm")


@pytest.mark.parametrize("first", [(1.0, "norm"), (3.0, "value")])
@pytest.mark.parametrize("knobs", [("precision", "loss_scale", "clip"), ()], ids=["steered", "masked"])
def test_c04_b_two_clips_in_a_row_act_as_without_the_plugin(first: tuple[float, str], knobs: tuple[str, ...]) -> None:
    modules = TwoClips(16, 8, loss=constant), TwoClips(16, 8, loss=constant)
    for module in modules:
        module.first = first
    found = change(modules[0], cpu(callbacks=[AutoPrecisionCallback(knobs=knobs)]))
    assert torch.allclose(found, change(modules[1], cpu()), rtol=1e-4, atol=1e-6)
    assert float(found.norm()) == pytest.approx(2 * 0.1 * 0.5, rel=1e-4)


@pytest.mark.parametrize("value", [None, 0.0, 0.3])
@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
def test_c04_the_trainers_own_setting_is_back_after_fit(value: float | None, algorithm: str | None) -> None:
    trainer = cpu(
        callbacks=[scripted({0: Action(clip=0.5)})], gradient_clip_val=value, gradient_clip_algorithm=algorithm
    )
    before = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    trainer.fit(Lin(16, 8))
    assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) == before


def test_c04_the_trainers_threshold_is_the_starting_point() -> None:
    ap = AutoPrecisionCallback()
    found = change(Lin(8, 8, loss=constant), cpu(callbacks=[ap], gradient_clip_val=0.5))
    assert ap.clip_threshold == 0.5
    assert float(found.norm()) == pytest.approx(0.05, rel=1e-5)


def test_c04_clipping_by_value_masks_the_threshold_on_the_norm() -> None:
    ap = scripted({0: Action(clip=0.5)})
    options: dict[str, Any] = {"gradient_clip_val": 0.2, "gradient_clip_algorithm": "value"}
    found = change(Lin(8, 8, loss=constant), cpu(callbacks=[ap], **options))
    assert found.abs().tolist() == pytest.approx([0.02] * 4 + [0.0], abs=1e-6)
    (row,) = rows(ap.history, "clip")
    assert row.outcome == "refused"
    assert "clips by value" in row.reason


class SetsTrainer(Callback):
    """A callback that sets the Trainer's threshold in mid-run, which Lightning itself obeys."""

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            trainer.gradient_clip_val = 0.5


@pytest.mark.parametrize("ap", [None, AutoPrecisionCallback(), AutoPrecisionCallback(knobs=())])
def test_c04_a_threshold_set_on_the_trainer_in_mid_run_acts(ap: AutoPrecisionCallback | None) -> None:
    watch = Watch()
    cpu(callbacks=[SetsTrainer(), watch, *([ap] if ap else [])]).fit(Lin(64, 8, loss=constant))
    weights = [torch.cat([w.view(-1) for w in kept]) for kept in watch.weights]
    steps = [float((after - before).norm()) for before, after in zip(weights, weights[1:], strict=False)]
    assert steps == pytest.approx([2.0] * 3 + [0.05] * 4, rel=1e-4)


# ---- c05: sparse gradients ----


class Rows(LightningModule):
    """A sparse embedding whose rows repeat."""

    def __init__(self, make: Callable[..., Optimizer], is_mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 2, sparse=True)
        self.head = nn.Linear(2, 1) if is_mixed else None
        self.make = make

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden: Tensor = self.table(batch)
        return (hidden if self.head is None else self.head(hidden)).pow(2).sum() * 10.0

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.tensor([[0, 0, 0, 1], [2, 1, 1, 1]] * 4), batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [functools.partial(SparseAdam, lr=0.1), functools.partial(SGD, lr=0.01)])
@pytest.mark.parametrize("plugin", [None, "fp16"])
def test_c05_sparse_gradients_are_clipped_and_trained(make: Callable[..., Optimizer], plugin: str | None) -> None:
    module, ap = Rows(make), scripted({0: Action(clip=1.0)})
    before = weights_of(module)
    cpu(callbacks=[ap], plugins=fp16cpu(1024) if plugin else None).fit(module)
    assert (ap.applied_steps, ap.skipped_steps) == (4, 0)
    found = module.table.weight.detach()
    assert torch.isfinite(found).all()
    assert not torch.equal(found[:3], before[0][:3])
    assert torch.equal(found[3], before[0][3])  # never looked up


def test_c05_the_norm_is_that_of_the_merged_rows() -> None:
    module, ap = Rows(functools.partial(SGD, lr=0.1), is_mixed=True), scripted({0: Action(clip=1.0)})
    dense = copy.deepcopy(module)
    dense.table.sparse = False
    found = change(module, cpu(callbacks=[ap], limit_train_batches=1))
    expected = change(dense, cpu(gradient_clip_val=1.0, limit_train_batches=1))
    assert torch.allclose(found, expected, rtol=0.0, atol=1e-6)
    assert float(found.norm()) == pytest.approx(0.1, rel=1e-4)
    assert ap.steering is not None
    assert ap.steering.telemetry.norms[-1] > 10.0


def test_c05_duplicates_that_overflow_when_merged_are_skipped() -> None:
    module, ap, state = Rows(functools.partial(SGD, lr=0.1)), AutoPrecisionCallback(), State()
    biggest, calls = torch.finfo(torch.float32).max, iter(range(9))

    def hook(grad: Tensor) -> Tensor:
        values = torch.full_like(grad._values(), biggest) if next(calls) == 1 else grad._values()
        return torch.sparse_coo_tensor(grad._indices(), values, grad.shape, check_invariants=True)

    module.table.weight.register_hook(hook)
    cpu(callbacks=[ap, state], limit_train_batches=3).fit(module)
    assert (ap.applied_steps, ap.skipped_steps) == (2, 1)
    assert same(state.weights[1], state.weights[0])
    assert torch.isfinite(module.table.weight).all()


# ---- c06: a threshold that has become meaningless ----


@pytest.mark.parametrize("watchers", [[], [Watch()]], ids=["alone", "with a callback that reads gradients"])
def test_c06_the_share_of_clipped_steps_and_the_norm_before_clipping_are_seen(watchers: list[Callback]) -> None:
    ap = scripted({0: Action(clip=1.0)})
    cpu(callbacks=[ap, *watchers], max_epochs=5).fit(Lin(80, 8, loss=constant))
    steering = ap.steering
    assert steering is not None
    assert ap.applied_steps == 50
    assert steering.telemetry.median_norm == pytest.approx(20.0, rel=1e-5)
    assert "clip       1 (median norm 20, 100% of the last steps clipped)" in summarize(steering, "scripted")
    run = read_globals(steering.knobs, steering.telemetry, math.nan)
    observation = encode([], run)
    assert feature(observation, "clipped_share").tolist() == [1.0] * 3
    assert feature(observation, "norm_median")[0] == pytest.approx(math.log2(20.0) / 16)
    assert feature(observation, "clip")[0] == pytest.approx(math.log2(1 / 20.0) / 4)


def test_c06_a_threshold_that_never_acts_is_seen_as_such() -> None:
    ap = scripted({0: Action(clip=100.0)})
    cpu(callbacks=[ap]).fit(Lin(80, 8, loss=constant))
    assert ap.steering is not None
    assert ", 0% of the last steps clipped" in summarize(ap.steering, "scripted")


def test_c06_half_of_the_steps() -> None:
    def alternating(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return constant(net, batch, index) * (1.0 if index % 2 else 0.01)

    ap = scripted({0: Action(clip=1.0)})
    cpu(callbacks=[ap]).fit(Lin(80, 8, loss=alternating))
    assert ap.steering is not None
    assert ", 50% of the last steps clipped" in summarize(ap.steering, "scripted")


@pytest.mark.parametrize("is_fused", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("watchers", [[], [Watch()]], ids=["alone", "with a callback that reads gradients"])
def test_c06_following_the_median_does_not_depend_on_the_unit_of_the_loss(
    watchers: list[Callback], is_fused: bool
) -> None:
    """Torch adds 1e-6 to a norm before it clips, which is all there is of a norm of 1e-12."""

    def trained(unit: float) -> list[Tensor]:
        def alternating(net: nn.Module, batch: Tensor, index: int) -> Tensor:
            return constant(net, batch, index) * unit * (4.0 if index % 8 == 7 else 1.0)

        module = Lin(400, 8, loss=alternating, optimizer=lambda p: torch.optim.SGD(p, lr=2.0**-7 / unit))
        module.net = copy.deepcopy(net)
        ap = scripted(config=AutoPrecisionConfig(fused_step=is_fused))
        cpu(callbacks=[ap, *watchers]).fit(module)
        assert ap.clip_threshold == pytest.approx(30.0 * unit, rel=1e-5)
        return weights_of(module)

    net = nn.Linear(4, 1)
    assert all(map(torch.equal, trained(2.0**-40), trained(1.0)))


# ---- c07: half gradients ----


class Stored(LightningModule):
    """A parameter stored in half precision beside one in float32."""

    def __init__(self, dtype: torch.dtype, is_mixed: bool) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.zeros(4, dtype=dtype))
        self.wide = nn.Parameter(torch.zeros(9)) if is_mixed else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.low * 40000.0).float().sum()
        return loss if self.wide is None else loss + (self.wide * 80000.0 / 3).sum()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1.0)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(1, 1), batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_c07_half_gradients_are_scaled_to_the_threshold(dtype: torch.dtype, is_mixed: bool) -> None:
    module, ap = Stored(dtype, is_mixed), scripted({0: Action(clip=1.0)})
    cpu(callbacks=[ap]).fit(module)
    assert (ap.applied_steps, ap.skipped_steps) == (1, 0)
    assert ap.steering is not None
    exact = 80000.0 * (2**0.5 if is_mixed else 1.0)
    assert ap.steering.telemetry.norms[-1] == pytest.approx(exact, rel=2e-3)
    parts = [p.detach().float() for p in module.parameters()]
    assert float(torch.cat(parts).norm()) == pytest.approx(1.0, rel=1e-2)
    if is_mixed:
        assert float(parts[0].norm()) == pytest.approx(float(parts[1].norm()), rel=1e-2)
