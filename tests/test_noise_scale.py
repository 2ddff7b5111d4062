"""The gradient-noise scale against models whose noise is known, and where its gradients come from in a run.

Time budget: 30 s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.data import DataLoader

from autoprec import Action, AutoPrecisionCallback, Controller, RuleController, ScriptedController, noise_scale
from autoprec.encoding import feature
from autoprec.noise_probe import NoiseProbe
from autoprec.noise_scale import PAIRS, NoiseScale, gradient_sample
from tests.resumed import Setup, assert_resumes, noise_pairs
from tests.small_fits import Plain, assert_identical, loader, outcome, quiet, seed
from tests.support import Manual, reported

WIDTH = 20


# ---- the estimate ----


def pairs_of(mean: Tensor, spread: Tensor, x_rows: int, y_rows: int, generator: torch.Generator) -> NoiseScale:
    scale = NoiseScale()
    for _ in range(PAIRS):
        x = mean + spread * torch.randn(len(mean), generator=generator) / math.sqrt(x_rows)
        y = mean + spread * torch.randn(len(mean), generator=generator) / math.sqrt(y_rows)
        scale.add(x, y, x_rows, y_rows)
    return scale


@pytest.mark.parametrize(("x_rows", "y_rows"), [(8, 8), (8, 24), (64, 4)])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_a_known_noise_scale_lies_within_the_error(x_rows: int, y_rows: int, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = size * torch.rand(200, generator=generator)
    spread = 3.0 * size * torch.rand(200, generator=generator)
    expected = float((spread.double() ** 2).sum() / (mean.double() ** 2).sum())
    z = []
    for _ in range(60):
        value, error = pairs_of(mean, spread, x_rows, y_rows, generator).estimate
        assert 0 < error < 0.5 * expected
        z.append((value - expected) / error)
    inside = sum(abs(each) < 2 for each in z) / len(z)
    assert inside > 0.85  # 95 % with the normal distribution
    assert sum(abs(each) < 0.5 for each in z) / len(z) < 0.7  # 38 %: the error is no larger than it has to be
    assert abs(sum(z) / len(z)) < 0.6  # no bias to speak of


def test_unknown_until_two_pairs_and_while_no_gradient_stands_out() -> None:
    scale, generator = NoiseScale(), torch.Generator().manual_seed(0)
    x = torch.ones(4)
    assert all(map(math.isnan, scale.estimate))
    scale.add(x, x + 0.01, 8, 8)
    assert all(map(math.isnan, scale.estimate))
    scale.add(x, x - 0.01, 8, 8)
    assert scale.estimate[0] == pytest.approx(8 * 0.5 * 4e-4 / 4.0, rel=0.05)
    noise = pairs_of(torch.zeros(50), torch.ones(50), 8, 8, generator)
    assert all(map(math.isnan, noise.estimate))


def test_samples_that_are_all_alike_have_no_noise() -> None:
    scale = NoiseScale()
    for _ in range(3):
        scale.add(torch.ones(4), torch.ones(4), 8, 8)
    assert scale.estimate == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_pair_that_is_not_finite_is_left_out(bad: float) -> None:
    scale = NoiseScale()
    for x in (1.0, bad, 1.1):
        scale.add(torch.full((4,), x), torch.ones(4), 8, 8)
    assert math.isfinite(scale.estimate[0])
    assert len(scale.state_dict()["squares"]) == 2


def test_only_the_newest_pairs_count() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = (pairs_of(torch.ones(50), torch.full((50,), s), 8, 8, generator) for s in (9.0, 1.0))
    kept = new.estimate
    state, earlier = new.state_dict(), old.state_dict()
    both = NoiseScale()
    both.load_state_dict({name: earlier[name] + state[name] for name in state})
    assert both.estimate == kept


# ---- which entries ----


def parameter(grad: Tensor | None, *shape: int) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(*shape) if grad is None else torch.zeros(grad.shape))
    made.grad = grad
    return made


def grads_of(parameters: Sequence[nn.Parameter]) -> dict[int, Tensor]:
    return {id(each): each.grad for each in parameters if each.grad is not None}


@pytest.mark.parametrize("entries", [10**6, 40, 7])
def test_every_nth_entry_of_dense_sparse_and_missing_gradients(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_scale, "ENTRIES", entries)
    dense = torch.arange(1.0, 61.0).reshape(6, 10)
    rows = torch.sparse_coo_tensor(torch.tensor([[3, 1, 3]]), torch.arange(1.0, 16.0).reshape(3, 5), (7, 5))
    cells = torch.sparse_coo_tensor(torch.tensor([[0, 3], [2, 1]]), torch.tensor([5.0, 6.0]), (4, 3))
    flipped = torch.arange(12.0).reshape(3, 4).T.bfloat16()
    parameters = [parameter(dense), parameter(rows), parameter(None, 9), parameter(cells), parameter(dense[:1])]
    parameters.append(nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16)))
    parameters[-1].grad = flipped
    sample = gradient_sample(parameters, grads_of(parameters))
    assert sample is not None
    assert len(sample) <= entries
    whole = [dense, rows.to_dense(), torch.zeros(9), cells.to_dense(), dense[:1], flipped.float()]
    laid_out = torch.cat([each.reshape(-1) for each in whole])
    stride = next(n for n in range(1, 100) if torch.equal(laid_out[::n], sample))
    assert len(sample) == len(range(0, len(laid_out), stride))
    assert stride == 1 or all(stride % prime for prime in (2, 3, 5, 7))
    sample.zero_()  # a copy
    assert dense.sum() > 0


def test_gradients_without_such_entries() -> None:
    assert gradient_sample([parameter(None, 3)], {}) is None
    odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    odd.grad = torch.ones(2, dtype=torch.complex64)
    assert gradient_sample([odd], grads_of([odd])) is None


class Pair(NamedTuple):
    label: Any
    x: Tensor


@dataclass
class Held:
    name: str
    x: Tensor


# ---- in a run ----


class Regression(pl.LightningModule):
    """``WIDTH`` weights that stay where they are, far enough from the best ones; its noise scale is known."""

    expected = (WIDTH + 1) + WIDTH * 1.0**2 / (WIDTH * 0.3**2)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1, bias=False)
        nn.init.constant_(self.net.weight, 0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, noise = batch
        loss: Tensor = (self.net(x).squeeze(1) - noise).square().mean()
        return loss

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.0)


def regression_data(rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return list(zip(torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, generator=generator), strict=True))


def regression_loader(rows: int, batch: int) -> DataLoader[Any]:
    data: Any = regression_data(rows)
    return DataLoader(data, batch_size=batch)


class Sees(ScriptedController):
    """Keeps the observations."""

    def __init__(self, steps: Mapping[int, Action] | None = None) -> None:
        super().__init__(steps)
        self.observations: list[Any] = []

    def decide(self, observation: Any) -> None:
        self.observations.append(observation)


def measured(
    batch: int = 8, steps: Mapping[int, Action] | None = None, windows: int = 70, module: Any = None, **options: Any
) -> AutoPrecisionCallback:
    seed()
    callback = AutoPrecisionCallback(Sees(steps), interval=1, verbose=False)
    others = options.pop("callbacks", [])
    rows = windows * batch * options.get("accumulate_grad_batches", 1)
    data = regression_loader(rows, batch)
    quiet(max_epochs=1, callbacks=[callback, *others], **options).fit(module or Regression(), data)
    return callback


SCALED = {0: Action(loss_scale=2.0**10)}


@pytest.mark.parametrize(("batch", "parts"), [(8, 4), (32, 1), (8, 2), (5, 3)])
def test_known_noise_scale_at_any_split_of_a_batch(batch: int, parts: int) -> None:
    plain = measured(batch, accumulate_grad_batches=parts)
    value, error = plain.noise_scale
    assert error < 0.3 * value
    assert abs(value - Regression.expected) < 3 * error
    scaled = measured(batch, SCALED, accumulate_grad_batches=parts)
    assert scaled.loss_scale == 2.0**10
    assert scaled.noise_scale == plain.noise_scale
    clipped = measured(batch, accumulate_grad_batches=parts, gradient_clip_val=1e-3)
    assert clipped.noise_scale == plain.noise_scale
    last = plain.controller.observations[-1]  # type: ignore[attr-defined]
    assert feature(last, "noise_known").all()
    assert plain.steering is not None
    assert plain.steering.telemetry.noise.effective_batch == batch * parts


def test_the_first_micro_batch_against_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[Tensor, Tensor, float, float]] = []
    monkeypatch.setattr(NoiseScale, "add", lambda self, *pair: taken.append(pair))
    measured(8, SCALED, windows=2, accumulate_grad_batches=4)
    (x, y, x_rows, y_rows), *_ = taken
    net, data = Regression().net, regression_data(64)[32:]  # the first window comes before anything is applied
    rows, noises = (torch.stack(column) for column in zip(*data, strict=True))
    for part, sample in ((slice(0, 8), x), (slice(8, 32), y)):
        loss = (net(rows[part]).squeeze(1) - noises[part]).square().mean()
        (grad,) = torch.autograd.grad(loss, [net.weight])
        torch.testing.assert_close(sample, grad.reshape(-1))
    assert (x_rows, y_rows) == (8, 24)


def test_a_short_window_at_the_end_of_an_epoch_and_a_change_of_accumulation() -> None:
    schedule = GradientAccumulationScheduler({0: 4})
    callback = AutoPrecisionCallback(Sees(), interval=1, verbose=False)
    data = regression_loader(8 * 5 + 3, 8)
    seed()
    quiet(max_epochs=40, callbacks=[callback, schedule]).fit(Regression(), data)
    value, error = callback.noise_scale
    # 43 samples over and over: what is known is that nothing is counted twice or divided by too much
    assert 0.2 * Regression.expected < value < 5 * Regression.expected
    assert math.isfinite(error)


def test_not_known_under_manual_optimization() -> None:
    callback = AutoPrecisionCallback(RuleController(), interval=1, verbose=False)
    quiet(max_epochs=1, callbacks=[callback]).fit(Manual(nn.Linear(4, 1), torch.randn(64, 4)))
    assert all(map(math.isnan, callback.noise_scale))


class Nameless(Regression):
    """Draws its batches itself, so that nobody can count their samples."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_not_known_where_samples_cannot_be_counted() -> None:
    callback = measured(module=Nameless())
    assert all(map(math.isnan, callback.noise_scale))
    assert callback.steering is not None
    assert not callback.steering.telemetry.noise.is_open
    assert callback.applied_steps == 70


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")
def test_skipped_steps_and_batches_without_a_loss() -> None:
    class Faulty(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 7 == 3 else loss * (math.inf if batch_idx % 5 == 1 else 1.0)

    callback = measured(32, windows=120, module=Faulty())
    value, error = callback.noise_scale
    assert callback.skipped_steps > 10
    assert abs(value - Regression.expected) < 3 * error


def test_an_optimizer_that_runs_its_closure_again_counts_samples_once() -> None:
    class Searching(Regression):
        def configure_optimizers(self) -> Optimizer:
            return LBFGS(self.parameters(), lr=1e-3, max_iter=3)

    callback = measured(16, windows=20, module=Searching())
    assert callback.steering is not None
    assert callback.steering.telemetry.noise.effective_batch == 16
    assert math.isfinite(callback.noise_scale[0])


# ---- what it costs ----


def test_gradients_are_looked_at_in_two_windows_of_a_decision_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec import noise_probe

    windows: list[int] = []

    def look(parameters: Sequence[nn.Parameter], grads: Mapping[int, Tensor]) -> Tensor | None:
        assert callback.steering is not None
        windows.append(callback.steering.window)
        return gradient_sample(parameters, grads)

    monkeypatch.setattr(noise_probe, "gradient_sample", look)
    callback = AutoPrecisionCallback("rule", interval=10, verbose=False)
    quiet(max_epochs=4, callbacks=[callback]).fit(Plain(), loader())
    assert windows == [10, 11, 21, 22]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_training_is_the_same_bit_for_bit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        seed()
        module, callback = Plain(), AutoPrecisionCallback("fixed:bf16", interval=3, verbose=False)
        trainer = quiet(max_epochs=4, callbacks=[callback], **options)
        trainer.fit(module, loader())
        return outcome(trainer, module), callback.noise_scale

    with_noise, known = run()
    assert math.isfinite(known[0])
    begin = NoiseProbe.begin_window
    monkeypatch.setattr(NoiseProbe, "begin_window", lambda self, is_sampling: begin(self, False))
    without, unknown = run()
    assert math.isnan(unknown[0])
    assert_identical(with_noise, without)


# ---- state and reports ----


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning")
@pytest.mark.parametrize("stop", [36, 37, 38, 39])
def test_resumed_in_the_middle_of_a_pair(stop: int, tmp_path: Path) -> None:
    setup = Setup(lambda: AutoPrecisionCallback("rule", interval=3, verbose=False))
    through = assert_resumes(setup, tmp_path, stop=stop)
    assert through.callback is not None
    assert len(noise_pairs(through.callback)["squares"]) > 10
    held = [
        torch.load(path, weights_only=True)["AutoPrecision"]["telemetry"]["noise"]["waiting"]
        for path in tmp_path.glob("*.ckpt")
    ]
    assert len(held) == 1


def test_a_state_without_it_loads() -> None:
    callback = measured(windows=4)
    assert callback.steering is not None
    telemetry = callback.steering.telemetry
    state = telemetry.state_dict()
    del state["noise"]
    telemetry.load_state_dict(state)


def test_it_is_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    said, seen = reported(caplog, monkeypatch), {}

    def look(trainer: pl.Trainer, *args: Any) -> None:
        seen.update(trainer.callback_metrics)

    callback = AutoPrecisionCallback("rule", interval=1)
    assert all(map(math.isnan, callback.noise_scale))
    data = regression_loader(640, 16)
    others = [LambdaCallback(on_train_batch_end=look)]
    quiet(max_epochs=1, log_every_n_steps=1, callbacks=[callback, *others]).fit(Regression(), data)
    value, error = callback.noise_scale
    assert float(seen["autoprec/noise_scale"]) == pytest.approx(value, rel=1e-6)
    assert f"noise      scale {value:.3g} +- {error:.2g} samples, 16 in a step" in said()


def test_a_foreign_controller_finds_it() -> None:
    class Finds(Controller):
        name = "finds"
        last = math.nan

        def decide(self, observation: Any) -> None:
            if feature(observation, "noise_known").all():
                self.last = float(feature(observation, "noise_scale")[0])

    finds = Finds()
    callback = AutoPrecisionCallback(finds, interval=1, verbose=False)
    data = regression_loader(640, 16)
    quiet(max_epochs=1, callbacks=[callback]).fit(Regression(), data)
    assert finds.last == pytest.approx(math.log2(Regression.expected / 16) / 16, abs=0.1)
