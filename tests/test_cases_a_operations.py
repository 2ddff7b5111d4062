"""Cases A-07 and A-12: operations that do not take every format.

Time budget: 20 s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from autoprec import Action, AutoPrecisionCallback, NonFiniteTrainingError
from tests.support import (
    Task,
    Watch,
    all_in,
    assert_finite,
    cpu,
    fp16cpu,
    loader,
    rows,
    scripted,
    sgd,
    state_of,
    watch_dtypes,
    weights_of,
)


def raised(ap: AutoPrecisionCallback) -> dict[str | None, str]:
    """Units that the guard moved to fp32, with the reason."""
    return {d.unit: d.reason for d in rows(ap.history, "precision", "applied") if d.reason.startswith("guard")}


# ---- masks ----


ROWS = 16


class Masked(nn.Module):
    """Scores of a small attention, masked in some way, between ordinary layers."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.scores, self.last = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 1)
        self.mask = mask

    def forward(self, x: Tensor) -> Any:
        return self.last(self.mask(self.scores(self.first(x))).softmax(-1))


def diagonal(scores: Tensor) -> Tensor:
    return torch.eye(scores.shape[0], scores.shape[1], dtype=torch.bool)


def masked_fill(value: float) -> Callable[[Tensor], Tensor]:
    return lambda scores: scores.masked_fill(diagonal(scores), value)


def masked_fill_in_place(scores: Tensor) -> Tensor:
    scores = scores * 1.0
    return scores.masked_fill_(diagonal(scores), -1e9)


def index_assignment(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[diagonal(scores)] = -1e9
    return scores


def where(scores: Tensor) -> Tensor:
    return torch.where(diagonal(scores), torch.full_like(scores, -1e9), scores)


def additive(scores: Tensor) -> Tensor:
    return scores + diagonal(scores) * -1e9


def clamped_min(scores: Tensor) -> Tensor:
    return scores.clamp(min=-1e9)


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": masked_fill(-1e9),
    "fp32_min": masked_fill(torch.finfo(torch.float32).min),
    "in_place": masked_fill_in_place,
    "index_assignment": index_assignment,
    "where": where,
    "additive": additive,
    "clamp": clamped_min,
    "minus_infinity": masked_fill(-math.inf),
}


def masked_task(mask: Callable[[Tensor], Tensor], **kwargs: Any) -> Task:
    return Task(Masked(mask), torch.rand(4 * ROWS, 4), ROWS, **kwargs)


def test_a07_mask_constant_raises_only_the_layer_before_it() -> None:
    ap, task = scripted({0: all_in("fp16")}), masked_task(masked_fill(-1e9))
    seen, before = watch_dtypes(task), weights_of(task)
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.first": "fp16", "net.scores": "fp32", "net.last": "fp16"}
    (unit,), (reason,) = zip(*raised(ap).items(), strict=True)
    assert unit == "net.scores"
    assert "masked_fill" in reason
    assert seen["net.scores"][-1] is torch.float32
    assert seen["net.first"][-1] is torch.float16
    assert ap.applied_steps == 4
    assert not any(map(torch.equal, weights_of(task)[:1], before[:1]))
    assert_finite(task)


@pytest.mark.parametrize("mask", list(MASKS))
def test_a07_every_way_to_mask_trains_in_fp16(mask: str) -> None:
    ap, task = scripted({0: all_in("fp16")}), masked_task(MASKS[mask])
    watch, before = Watch(ap), weights_of(task)
    cpu(callbacks=[ap, watch]).fit(task)
    assert all(map(math.isfinite, watch.losses))
    assert_finite(task)
    assert not any(map(torch.equal, weights_of(task)[:2], before[:2]))
    # whatever was raised has a reason, and the first layer is never to blame
    assert ap.precision_map()["net.first"] == "fp16"
    assert all(raised(ap).values())


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "fp32_min"])  # beyond the largest bf16
def test_a07_bf16_needs_no_help(mask: str) -> None:
    ap, task = scripted({0: all_in("bf16")}), masked_task(MASKS[mask])
    cpu(callbacks=[ap]).fit(task)
    assert set(ap.precision_map().values()) == {"bf16"}
    assert ap.skipped_steps == 0
    assert_finite(task)


def test_a07_first_window_computes_what_fp32_would() -> None:
    """The constant is not limited to the range of fp16 where that would change the result."""
    losses = []
    for name in ("fp32", "fp16"):
        torch.manual_seed(0)
        ap, task = scripted({0: all_in(name)}), masked_task(masked_fill(-1e9))
        watch = Watch(ap)
        cpu(callbacks=[ap, watch]).fit(task)
        losses.append(watch.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a07_fp16_from_the_trainer_is_helped_as_well() -> None:
    ap, task = scripted(), masked_task(masked_fill(-1e9))
    cpu(plugins=fp16cpu(128), callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.first": "fp16", "net.scores": "fp32", "net.last": "fp16"}
    assert ap.applied_steps == 4


def test_a07_refused_format_stays_refused() -> None:
    """The policy may ask again and again: it costs a line in the record each time, and never the run."""
    again = {window: Action(precision={"net.scores": "fp16"}) for window in range(4)}
    ap, task = scripted({**again, 0: all_in("fp16")}), masked_task(masked_fill(-1e9))
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map()["net.scores"] == "fp32"
    refused = rows(ap.history, "precision", "refused")
    assert [d.step for d in refused] == [1, 2, 3]
    assert all("holds" in d.reason for d in refused)


def late(scores: Tensor, calls: list[int]) -> Tensor:
    """Masks only in the third batch, as a batch without padding does not."""
    calls.append(1)
    return scores.masked_fill(diagonal(scores), -1e9) if len(calls) > 2 else scores


def test_a07_branch_that_the_first_window_did_not_take() -> None:
    """A mask that appears later must not end the run either."""
    ap, task = scripted({0: all_in("fp16")}), masked_task(functools.partial(late, calls=[]))
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map()["net.scores"] == "fp32"
    assert ap.applied_steps == 4
    assert_finite(task)


class LateMask(nn.Module):
    """The same behind a layer with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scores, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Any:
        return self.last(late(self.scores(self.norm(self.first(x))), self.calls).softmax(-1))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a07_repeated_step_writes_statistics_once(accumulate: int) -> None:
    """The fifth batch is the first of a window, the sixth would be its second."""
    results = []
    for name in ("fp32", "fp16"):
        torch.manual_seed(0)
        task = Task(LateMask(), torch.rand(6 * ROWS, 4), ROWS)
        ap = scripted({0: all_in(name)})
        cpu(callbacks=[ap], accumulate_grad_batches=accumulate).fit(task)
        assert ap.applied_steps == 6 // accumulate
        results.append(state_of(task))
    assert int(results[1]["net.norm.num_batches_tracked"]) == 6
    for key in ("net.norm.running_mean", "net.norm.running_var"):
        torch.testing.assert_close(results[1][key], results[0][key], rtol=1e-2, atol=1e-2)


class SecondFails(LightningModule):
    """The first optimizer has stepped when the second net meets its mask, in the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), Masked(functools.partial(late, calls=[]))
        self.automatic_optimization = False
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for net, optimizer in zip((self.a, self.b), optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(net(batch).float().mean())
            optimizer.step()
            self.steps += net is self.a

    def configure_optimizers(self) -> Any:
        return sgd(self.a.parameters()), sgd(self.b.parameters())

    def train_dataloader(self) -> Any:
        return loader(torch.ones(4 * ROWS, 4), ROWS)


def test_a07_step_that_has_taken_effect_is_not_repeated() -> None:
    """It cannot be: the first optimizer would step twice. The user's own error tells what is wrong."""
    task = SecondFails()
    before = weights_of(task.a)[0]
    with pytest.raises(RuntimeError, match="without overflow"):
        cpu(callbacks=[scripted({0: all_in("fp16")})]).fit(task)
    assert task.steps == 3
    torch.testing.assert_close(weights_of(task.a)[0], before - 3 * 0.1, rtol=1e-3, atol=1e-3)


def fully_masked(scores: Tensor) -> Tensor:
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[0] = True
    return scores.masked_fill(mask, -math.inf)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8"])
def test_a07_fully_masked_row_does_not_go_unnoticed(name: str) -> None:
    """Its softmax is NaN in every format: each step is skipped and counted, and the weights stay."""
    ap, task = scripted({0: all_in(name)}), masked_task(fully_masked)
    before = weights_of(task)
    with pytest.warns(UserWarning, match="(?i)no step was applied"):
        cpu(callbacks=[ap]).fit(task)
    assert (ap.skipped_steps, ap.applied_steps) == (4, 0)
    assert all(map(torch.equal, weights_of(task), before))


def test_a07_fully_masked_rows_end_the_run_in_the_end() -> None:
    ap, task = scripted({0: all_in("fp16")}), masked_task(fully_masked)
    with pytest.raises(NonFiniteTrainingError) as caught:
        cpu(callbacks=[ap], max_epochs=100).fit(task)
    assert ap.skipped_steps <= 40
    assert "net.last" in str(caught.value)
    assert "from the operations before it" in str(caught.value)


def test_a07_attention_of_torch_with_a_large_mask() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Any:
            mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e9)
            return self.out(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=mask))

    for name in ("bf16", "fp16"):
        ap, task = scripted({0: all_in(name)}), Task(Attention(), torch.rand(32, 4, 4))
        cpu(callbacks=[ap]).fit(task)
        assert ap.applied_steps == 4
        assert ap.skipped_steps == 0
        assert_finite(task)


# ---- operations without a half version ----


class Spectral(nn.Module):
    def __init__(self, operation: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(width, 1)
        self.operation = operation

    def forward(self, x: Tensor) -> Any:
        return self.last(self.operation(self.first(x)))


class Scattered(nn.Module):
    """Writes activations into a preallocated float32 buffer."""

    buffer: Tensor

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.write = write
        self.register_buffer("buffer", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.write(self.buffer.clone(), self.first(x)))


class OwnFunction(torch.autograd.Function):
    """A user's operation that was only ever written for float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("expected scalar type Float")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def gram(x: Tensor) -> Tensor:
    return x.transpose(0, 1) @ x + torch.eye(8)


def index_put(buffer: Tensor, y: Tensor) -> Tensor:
    buffer[torch.arange(8)] = y
    return buffer


def index_add(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.index_add_(0, torch.arange(8), y)


def index_copy(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.index_copy(0, torch.arange(8), y)


def scatter(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.scatter(0, torch.arange(8).unsqueeze(1).expand(8, 8), y)


def scatter_add(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.scatter_add_(0, torch.arange(8).unsqueeze(1).expand(8, 8), y)


def masked_scatter(buffer: Tensor, y: Tensor) -> Tensor:
    return buffer.masked_scatter_(torch.ones(8, 8, dtype=torch.bool), y)


def slice_assignment(buffer: Tensor, y: Tensor) -> Tensor:
    buffer[:, :] = y
    return buffer


SPECTRAL: dict[str, Callable[[], nn.Module]] = {
    "rfft": lambda: Spectral(lambda x: torch.fft.rfft(x).abs(), 5),
    "fft2": lambda: Spectral(lambda x: torch.fft.fft2(x).real),
    "eigh": lambda: Spectral(lambda x: torch.linalg.eigvalsh(gram(x)).expand(8, 8)),
    "solve": lambda: Spectral(lambda x: torch.linalg.solve(gram(x), x.transpose(0, 1)).transpose(0, 1)),
    "inverse": lambda: Spectral(lambda x: torch.linalg.inv(gram(x))),
    "cholesky": lambda: Spectral(lambda x: torch.linalg.cholesky(gram(x))),
    "svd": lambda: Spectral(lambda x: torch.linalg.svdvals(gram(x)).expand(8, 8)),
    "det": lambda: Spectral(lambda x: torch.logdet(gram(x)) + x),
    "complex": lambda: Spectral(lambda x: torch.view_as_complex(x.unflatten(1, (4, 2))).abs(), 4),
    "polar": lambda: Spectral(lambda x: torch.complex(x, x).angle() + x),
    "cdist": lambda: Spectral(lambda x: torch.cdist(x, x) + 0.1),
    "quantile": lambda: Spectral(lambda x: x - torch.quantile(x, 0.5)),
    "own_function": lambda: Spectral(lambda x: OwnFunction.apply(x)),  # type: ignore[no-untyped-call]
    "own_function_alias": lambda: Spectral(OwnFunction.apply),
    "own_matmul": lambda: Spectral(lambda x: torch.mm(x, torch.eye(8))),
    "index_put": lambda: Scattered(index_put),
    "index_add": lambda: Scattered(index_add),
    "index_copy": lambda: Scattered(index_copy),
    "scatter": lambda: Scattered(scatter),
    "scatter_add": lambda: Scattered(scatter_add),
    "masked_scatter": lambda: Scattered(masked_scatter),
    "slice_assignment": lambda: Scattered(slice_assignment),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", list(SPECTRAL))
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a12_operation_without_a_half_version_trains(name: str, low: str) -> None:
    task = Task(SPECTRAL[name](), torch.rand(32, 8), optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    ap = scripted({0: all_in(low)})
    watch, before = Watch(ap), weights_of(task)
    cpu(callbacks=[ap, watch]).fit(task)
    assert (ap.applied_steps, ap.skipped_steps) == (4, 0)
    assert all(map(math.isfinite, watch.losses))
    assert not any(map(torch.equal, weights_of(task), before))
    assert ap.precision_map()["net.last"] == low  # at most the layer before the operation gives way
    assert set(raised(ap)) <= {"net.first"}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a12_unsupported_operation_pins_its_layer_after_one_failure(low: str) -> None:
    task = Task(Scattered(index_put), torch.rand(32, 8))
    ap = scripted({0: all_in(low)})
    seen = watch_dtypes(task)
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.first": "fp32", "net.last": low}
    assert seen["net.first"] == [getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[low]), *[torch.float32] * 3]
    (unit,), (reason,) = zip(*raised(ap).items(), strict=True)
    assert unit == "net.first"
    assert "__setitem__" in reason


def test_a12_loss_is_that_of_fp32_up_to_rounding() -> None:
    for name in ("rfft", "index_put", "scatter", "eigh"):
        losses = []
        for format_ in ("fp32", "bf16"):
            torch.manual_seed(0)
            task = Task(SPECTRAL[name](), torch.rand(32, 8), optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
            ap = scripted({0: all_in(format_)})
            watch = Watch(ap)
            cpu(callbacks=[ap, watch]).fit(task)
            losses.append(watch.losses)
        assert losses[1] == pytest.approx(losses[0], rel=0.05), name


class ComplexParts(nn.Module):
    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.gain = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.register_buffer("filter", torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        spectrum = torch.fft.rfft(self.first(x).float()) * self.filter * self.gain
        return self.last(torch.fft.irfft(spectrum, n=8))


@pytest.mark.parametrize("low", ["bf16", "fp16", "int8"])
def test_a12_complex_buffers_and_parameters_are_not_touched(low: str) -> None:
    task = Task(ComplexParts(), torch.rand(32, 8), optimizer=lambda p: torch.optim.SGD(p, lr=1e-2))
    net: Any = task.net
    before, gain = net.filter.clone(), net.gain
    ap = scripted({0: all_in(low)})
    cpu(callbacks=[ap]).fit(task)
    assert torch.equal(net.filter, before)
    assert net.gain is gain
    assert net.gain.dtype is torch.complex64
    assert ap.applied_steps == 4
    assert ap.precision_map()["net.last"] == low


def test_a12_numpy_has_no_bf16() -> None:
    """Metrics in a training step often go through numpy."""

    class Metrics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Any:
            y = self.first(x)
            self.seen.append(float(y.detach().numpy().mean()))
            return self.last(y)

    ap, task = scripted({0: all_in("bf16")}), Task(Metrics(), torch.rand(32, 8))
    cpu(callbacks=[ap]).fit(task)
    assert ap.applied_steps == 4
    assert ap.precision_map() == {"net.first": "fp32", "net.last": "bf16"}


def test_a12_error_that_is_the_users_own_is_not_swallowed() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.first(x) @ torch.ones(3, 3)

    ap = scripted({0: all_in("bf16")})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        cpu(callbacks=[ap]).fit(Task(Wrong(), torch.rand(32, 8)))
