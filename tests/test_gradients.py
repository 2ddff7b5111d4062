"""One optimizer's gradients: unscaled once, measured once, clipped as torch clips, checked again when touched.

Time budget: 10 s.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autoprec.gradients import Gradients, ScaleMarks
from tests.wrapped_tensors import Wrapped


def parameters(*grads: Tensor | None) -> list[nn.Parameter]:
    made = []
    for grad in grads:
        parameter = nn.Parameter(torch.zeros(4, 2) if grad is None else torch.zeros(grad.shape, dtype=grad.dtype))
        parameter.grad = grad
        made.append(parameter)
    return made


def grads_of(made: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in made if parameter.grad is not None]


def sparse(rows: list[int], values: list[list[float]]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.tensor(values), (4, 2), check_invariants=True)


# ---- unscaling and measuring ----


@given(exponent=st.integers(-24, 24), seed=st.integers(0, 50))
def test_unscaling_by_a_power_of_two_is_exact(exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    true = [torch.randn(3, 2, generator=generator), torch.randn(5, generator=generator)]
    made = parameters(*(grad * 2.0**exponent for grad in true), None)
    gradients = Gradients(made, 2.0**-exponent)
    assert len(gradients.parameters) == 2
    assert all(torch.equal(a, b) for a, b in zip(grads_of(made), true, strict=True))
    assert gradients.total == pytest.approx(math.sqrt(sum(float(g.pow(2).sum()) for g in true)), rel=1e-5)
    assert gradients.norms.tolist() == pytest.approx([float(g.norm()) for g in true], rel=1e-5)
    assert gradients.is_finite


def test_bare_gradients_are_not_unscaled() -> None:
    made = parameters(torch.full((2,), 8.0), torch.full((2,), 8.0))
    Gradients(made, 0.25, bare=made[1:])
    assert [grad.tolist() for grad in grads_of(made)] == [[2.0, 2.0], [8.0, 8.0]]


def test_nothing_to_do() -> None:
    gradients = Gradients(parameters(None), 0.5)
    assert (gradients.total, gradients.is_finite, gradients.parameters) == (0.0, True, [])
    gradients.clip_norm_(1.0)
    gradients.clip_value_(1.0)
    gradients.after_foreign_code(leaves_traces=True, keeps_norms=False)
    assert not gradients.is_clipped


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_c01_one_bad_entry_makes_the_step_non_finite(bad: float, dtype: torch.dtype) -> None:
    grad = torch.ones(5, dtype=dtype)
    grad[3] = bad
    for made in (parameters(torch.ones(3), grad), parameters(grad, torch.ones(3))):
        assert not Gradients(made, 0.5).is_finite


def test_c07_a_finite_gradient_is_never_judged_non_finite() -> None:
    made = parameters(torch.full((4,), 40000.0, dtype=torch.float16), torch.full((4,), 1e30))
    gradients = Gradients(made, 1.0)
    assert gradients.is_finite
    assert gradients.total == pytest.approx(2e30)


# ---- clipping ----


@given(threshold=st.floats(0.01, 100.0), seed=st.integers(0, 50))
def test_clipping_by_norm_has_torchs_bits(threshold: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    true = [torch.randn(3, 2, generator=generator), torch.randn(5, generator=generator)]
    made, theirs = parameters(*copy.deepcopy(true)), parameters(*copy.deepcopy(true))
    gradients = Gradients(made, 1.0)
    gradients.clip_norm_(threshold, has_torchs_bits=True)
    before = nn.utils.clip_grad_norm_(theirs, threshold)
    assert all(torch.equal(a, b) for a, b in zip(grads_of(made), grads_of(theirs), strict=True))
    assert gradients.total == pytest.approx(float(before), rel=1e-6)
    assert gradients.is_clipped == (float(before) > threshold)


def test_clipping_by_value_has_torchs_bits() -> None:
    true = [torch.randn(3, 2), torch.randn(5)]
    made, theirs = parameters(*copy.deepcopy(true)), parameters(*copy.deepcopy(true))
    gradients = Gradients(made, 1.0)
    gradients.clip_value_(0.3)
    nn.utils.clip_grad_value_(theirs, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(grads_of(made), grads_of(theirs), strict=True))


def test_c05_sparse_gradients_are_clipped_through_their_values() -> None:
    unmerged, merged = sparse([0, 0, 2], [[3.0, 0.0], [3.0, 0.0], [0.0, 8.0]]), sparse([1], [[10.0, 0.0]]).coalesce()
    made = parameters(unmerged, merged)
    gradients = Gradients(made, 1.0)
    assert gradients.total == pytest.approx(math.sqrt(200.0))
    gradients.clip_norm_(1.0)
    norm = torch.stack([grad.to_dense() for grad in grads_of(made)]).norm()
    assert float(norm) == pytest.approx(1.0, rel=1e-5)
    gradients.clip_value_(0.1)
    assert max(float(grad.coalesce().values().abs().max()) for grad in grads_of(made)) <= 0.2 + 1e-6


def test_c05_duplicates_that_overflow_only_when_merged_are_found() -> None:
    biggest = torch.finfo(torch.float32).max
    made = parameters(sparse([1, 1], [[biggest, 0.0], [biggest, 0.0]]))
    assert not Gradients(made, 1.0).is_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c07_half_gradients_are_scaled_to_the_threshold_and_not_zeroed(dtype: torch.dtype) -> None:
    made = parameters(torch.full((4,), 40000.0, dtype=dtype), torch.full((9,), 1.0))
    gradients = Gradients(made, 1.0)
    assert gradients.total == pytest.approx(80000.0, rel=2e-3)
    gradients.clip_norm_(1.0)
    half, single = grads_of(made)
    assert half.dtype == dtype
    assert half.tolist() == pytest.approx([0.5] * 4, rel=1e-2)
    assert single.tolist() == pytest.approx([1 / 80000.0] * 9, rel=1e-2)


def test_clipping_twice_remembers_that_it_acted_and_the_first_norm() -> None:
    made = parameters(torch.full((4,), 10.0))
    gradients = Gradients(made, 1.0)
    gradients.clip_norm_(1.0)
    gradients.clip_norm_(100.0)
    assert (gradients.is_clipped, gradients.total) == (True, 20.0)
    assert float(grads_of(made)[0].norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(("kind", "first"), [("norm", 5.0), ("value", 3.0), ("norm", 100.0)])
@pytest.mark.parametrize("second", [2.0, 50.0])
def test_clipping_again_goes_by_the_norm_that_is_left(kind: str, first: float, second: float) -> None:
    true = torch.tensor([8.0, 6.0, 0.0])
    made, theirs = parameters(true.clone()), parameters(true.clone())
    gradients = Gradients(made, 1.0)
    if kind == "norm":
        gradients.clip_norm_(first)
        nn.utils.clip_grad_norm_(theirs, first)
    else:
        gradients.clip_value_(first)
        nn.utils.clip_grad_value_(theirs, first)
    gradients.clip_norm_(second)
    nn.utils.clip_grad_norm_(theirs, second)
    assert torch.allclose(grads_of(made)[0], grads_of(theirs)[0], rtol=1e-5)
    assert gradients.total == 10.0


# ---- who touched them? ----


def in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.grad.fill_(math.nan)  # type: ignore[union-attr]


def replaced(parameter: nn.Parameter) -> None:
    parameter.grad = torch.full_like(parameter, math.nan)


def through_data(parameter: nn.Parameter) -> None:
    parameter.grad.data.fill_(math.nan)  # type: ignore[union-attr]


@pytest.mark.parametrize("touch", [in_place, replaced])
@pytest.mark.parametrize("keeps_norms", [True, False])
def test_a_later_write_is_measured_again(touch: Callable[[nn.Parameter], None], keeps_norms: bool) -> None:
    made = parameters(torch.ones(3), torch.ones(3))
    gradients = Gradients(made, 1.0)
    gradients.clip_norm_(1.0)
    touch(made[1])
    gradients.after_foreign_code(leaves_traces=True, keeps_norms=keeps_norms)
    assert not gradients.is_finite


def test_a_write_without_a_trace_is_found_where_it_may_have_happened() -> None:
    made = parameters(torch.ones(3))
    gradients = Gradients(made, 1.0)
    through_data(made[0])
    gradients.after_foreign_code(leaves_traces=False, keeps_norms=True)
    assert not gradients.is_finite


def test_the_norms_from_before_clipping_are_kept_when_asked() -> None:
    made = parameters(torch.full((4,), 10.0))
    gradients = Gradients(made, 1.0)
    gradients.clip_norm_(1.0)
    gradients.after_foreign_code(leaves_traces=False, keeps_norms=True)
    assert (gradients.total, gradients.norms.tolist()) == (20.0, [20.0])
    gradients.after_foreign_code(leaves_traces=False, keeps_norms=False)
    assert gradients.total == pytest.approx(1.0, rel=1e-5)


def test_a_gradient_taken_away_is_left_out() -> None:
    made = parameters(torch.ones(3), torch.full((4,), math.nan))
    gradients = Gradients(made, 1.0)
    assert not gradients.is_finite
    made[1].grad = None
    gradients.after_foreign_code(leaves_traces=True, keeps_norms=True)
    assert gradients.is_finite
    assert gradients.parameters == made[:1]
    assert gradients.norms.shape == (1,)


def test_first_bad_layer_is_the_last_one_in_the_model() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = Gradients(list(net.parameters()), 1.0)
    assert gradients.first_nonfinite(net) is None
    for name in ("0.weight", "1.weight"):
        net.get_parameter(name).grad = torch.full((2, 2), math.inf)
    assert gradients.first_nonfinite(net) == "1 (its gradient)"


# ---- which gradients hold a scaled loss? ----


def backward(net: nn.Module, *layers: int) -> None:
    torch.stack([net.get_submodule(str(layer))(torch.ones(2)).sum() for layer in layers]).sum().backward()


def test_a14_marks_tell_scaled_gradients_from_others() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = list(net[0].parameters()), list(net[1].parameters())
    marks = ScaleMarks()
    marks.begin(net, 8.0)
    backward(net, 0)
    marks.end(net, 8.0)
    backward(net, 1)
    gc.collect()
    assert marks.take(first, 8.0) == ([], False)
    bare, is_doubtful = marks.take(second, 8.0)
    assert is_doubtful
    assert all(a is b for a, b in zip(bare, second, strict=True))


def test_a14_a_bare_backward_on_top_of_a_scaled_one_is_doubtful() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    marks = ScaleMarks()
    marks.begin(net, 8.0)
    backward(net, 0)
    marks.end(net, 8.0)
    backward(net, 0)
    assert marks.take(list(net.parameters()), 8.0) == ([], True)


def test_a14_marks_of_an_earlier_step_do_not_count() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    made, marks = list(net.parameters()), ScaleMarks()
    for _ in range(2):
        marks.begin(net, 8.0)
        backward(net, 0)
        marks.end(net, 8.0)
        assert marks.take(made, 8.0) == ([], False)
        net.zero_grad()
    backward(net, 0)
    bare, is_doubtful = marks.take(made, 8.0)
    assert is_doubtful
    assert len(bare) == 2


@pytest.mark.parametrize("moves", [(2.0, 2.0), (8.0, 2.0), (2.0, 8.0)])
def test_a05_gradients_that_wait_follow_the_scale(moves: tuple[float, float]) -> None:
    """Two backwards under different scales before one step: the sum is that of two unscaled ones."""
    net = nn.Linear(2, 2)
    made, marks = list(net.parameters()), ScaleMarks()
    for scale in moves:
        marks.begin(net, scale)
        (net(torch.ones(2)).sum() * scale).backward()
        marks.end(net, scale)
    last = 4.0  # it moved once more before the step
    assert marks.take(made, last) == ([], False)
    assert net.weight.grad is not None
    assert torch.equal(net.weight.grad, torch.full((2, 2), 2 * last))


def test_gradients_of_other_libraries_are_not_read_by_kernels() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    grads = [torch.randn_like(parameter) for parameter in parameters]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = Wrapped(grad.clone())
    found = Gradients(parameters, 0.5)
    assert found.total == pytest.approx(0.5 * float(torch.cat([grad.flatten() for grad in grads]).norm()))
    assert found.is_finite
