"""Implementation choices: the same numbers within rounding, chosen per unit and format, and no trace of them.

Time budget: 30 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from autoprec import onednn
from autoprec.implementations import candidates, check
from autoprec.layers import set_format
from autoprec.runners import make_runner
from tests.exactness import error_of, is_exact_enough, is_linear_exact_enough
from tests.steered import attached, steered

needs_onednn = pytest.mark.skipif(not onednn.is_available(), reason="this torch has no oneDNN linear")
Linear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def gradients(run: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in (x, weight, bias) if each is not None]
    output = run(leaves[0], leaves[1], leaves[2] if bias is not None else None)
    grad = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


class TestCandidates:
    def test_the_first_is_what_torch_does(self) -> None:
        for kind in ("linear", "conv", "sdpa", "norm", "rnn", "block"):
            for format_name in ("fp32", "bf16", "int8"):
                for device_type in ("cpu", "cuda"):
                    assert candidates(kind, format_name, device_type)[0] == "default"

    @needs_onednn
    def test_what_there_is(self) -> None:
        assert candidates("linear", "fp32", "cpu") == ("default", "onednn")
        assert candidates("linear", "bf16", "cpu") == ("default",)
        assert candidates("conv", "bf16", "cpu") == ("default", "channels_last")
        assert candidates("sdpa", "bf16", "cpu") == ("default", "matmul")
        assert candidates("sdpa", "bf16", "cuda") == ("default",)

    def test_others_are_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"Passed the implementation 'onednn' for linear in bf16 on cpu.*default"):
            check("linear", "bf16", "cpu", "onednn")
        with pytest.raises(ValueError, match="'fast'"):
            make_runner(nn.Linear(4, 4), "fp32", False, "cpu", implementation="fast")


class TestErrors:
    def test_twice_the_usual_error_is_the_limit(self) -> None:
        exact = [torch.tensor([1.0, 2.0], dtype=torch.float64)]
        usual, double, triple = ([torch.tensor([1.0, 2.0 + e], dtype=torch.float64)] for e in (0.01, 0.0199, 0.03))
        assert is_exact_enough(double, usual, exact)
        assert not is_exact_enough(triple, usual, exact)

    def test_nan_is_never_exact_enough(self) -> None:
        exact = torch.ones(3, dtype=torch.float64)
        assert error_of(torch.tensor([1.0, 1.0, float("nan")]), exact) == float("inf")
        assert not is_exact_enough([torch.full((3,), float("nan"))], [torch.zeros(3)], [exact])


@needs_onednn
class TestOneDnnLinear:
    @pytest.mark.parametrize(
        ("rows", "inputs", "outputs"), [(64, 512, 512), (7, 33, 5), (1, 1, 1), (16, 2048, 96), (1200, 24, 40)]
    )
    def test_it_is_as_exact_as_fp32(self, rows: int, inputs: int, outputs: int) -> None:
        assert is_linear_exact_enough(rows, inputs, outputs)

    def test_long_sums_in_one_go_would_not_be(self) -> None:
        """Why sums are cut into pieces."""
        x, weight = torch.randn(64, 2048), torch.randn(64, 2048)
        exact = x.double() @ weight.double().t()
        whole = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        assert error_of(onednn.product(x, weight), exact) < error_of(whole, exact)

    @pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 1, 3, 8)])
    @pytest.mark.parametrize("has_bias", [True, False])
    def test_values_and_gradients(self, shape: tuple[int, ...], has_bias: bool) -> None:
        x, weight, bias = torch.randn(shape), torch.randn(5, 8), torch.randn(5) if has_bias else None
        assert onednn.can_run(x, weight, bias)
        for found, usual in zip(
            gradients(onednn.linear, x, weight, bias), gradients(F.linear, x, weight, bias), strict=True
        ):
            torch.testing.assert_close(found, usual)

    def test_inputs_that_are_not_contiguous(self) -> None:
        x = torch.randn(8, 6, 4).permute(2, 1, 0)
        weight = torch.randn(5, 8)
        torch.testing.assert_close(onednn.linear(x, weight, None), F.linear(x, weight))

    def test_it_can_be_differentiated_twice(self) -> None:
        x = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
        weight = torch.randn(5, 8, requires_grad=True)

        def penalty(run: Any) -> tuple[Tensor, ...]:
            (grad,) = torch.autograd.grad(run(x, weight, None).square().sum(), x, create_graph=True)
            return torch.autograd.grad(grad.square().sum(), (x, weight))

        for found, usual in zip(penalty(onednn.linear), penalty(F.linear), strict=True):
            torch.testing.assert_close(found, usual, rtol=1e-4, atol=1e-4)

    def test_frozen_operands_get_no_gradient(self) -> None:
        x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8)
        onednn.linear(x, weight, None).sum().backward()
        assert x.grad is not None
        assert weight.grad is None

    @pytest.mark.parametrize(
        "x",
        [
            torch.randn(0, 8),
            torch.randn(3, 8, dtype=torch.float64),
            torch.randn(3, 7),
            torch.randn(3, 8).to_sparse(),
            torch.randn(3, 8, device="meta"),
            "text",
        ],
        ids=["empty", "float64", "other width", "sparse", "meta", "no tensor"],
    )
    def test_calls_that_are_left_to_torch(self, x: Any) -> None:
        assert not onednn.can_run(x, torch.randn(5, 8), None)

    def test_weights_that_are_left_to_torch(self) -> None:
        x = torch.randn(3, 8)
        assert not onednn.can_run(x, torch.randn(8, 5).t(), None)
        assert not onednn.can_run(x, torch.randn(5, 8, dtype=torch.bfloat16), None)
        assert not onednn.can_run(x, torch.randn(5, 8), torch.randn(5, dtype=torch.float64))

    def test_counted_operations_are_left_to_torch(self) -> None:
        x, weight = torch.randn(3, 8), torch.randn(5, 8)
        with FlopCounterMode(display=False):
            assert not onednn.can_run(x, weight, None)
        assert onednn.can_run(x, weight, None)


@needs_onednn
class TestOneDnnUnit:
    def run(self, make: Callable[[], nn.Module], x: Tensor, implementation: str) -> tuple[list[Tensor], dict[str, int]]:
        torch.manual_seed(0)
        net = nn.Sequential(make(), nn.ReLU())
        with steered(net, "fp32"):
            (state,) = net[0].__dict__["_autoprec"].unit.states
            set_format(state.unit, "fp32", implementation)
            output = net(x)
            output.sum().backward()
        grads = [parameter.grad for parameter in net.parameters()]
        assert all(grad is not None for grad in grads)
        return [output, *grads], dict(state.unit.implemented)

    def test_it_runs_and_is_counted(self) -> None:
        x = torch.randn(16, 64)
        (found, counted), (usual, nothing) = (
            self.run(lambda: nn.Linear(64, 32), x, name) for name in ("onednn", "default")
        )
        assert counted == {"onednn": 1}
        assert nothing == {}
        for one, other in zip(found, usual, strict=True):
            torch.testing.assert_close(one, other)
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()

    def test_low_precision_inputs_are_widened_as_autocast_does(self) -> None:
        x = torch.randn(16, 64).bfloat16()
        (found, counted), (usual, _) = (self.run(lambda: nn.Linear(64, 32), x, n) for n in ("onednn", "default"))
        assert counted == {"onednn": 1}
        assert found[0].dtype == usual[0].dtype == torch.float32
        torch.testing.assert_close(found[0], usual[0])

    def test_what_it_cannot_run_runs_as_by_default(self) -> None:
        class Own(nn.Linear):
            pass

        for make, x in ((lambda: nn.Linear(8, 4), torch.randn(0, 8)), (lambda: Own(8, 4), torch.randn(3, 8))):
            (found, counted), (usual, _) = (self.run(make, x, name) for name in ("onednn", "default"))
            assert counted == {}
            for one, other in zip(found, usual, strict=True):
                assert torch.equal(one, other)

    def test_hooks_of_the_user_see_it_as_always(self) -> None:
        seen: list[Tensor] = []
        net = nn.Sequential(nn.Linear(64, 8))
        net[0].register_forward_hook(lambda module, args, output: seen.append(output))
        weight: Any = net[0].weight
        weight.register_hook(lambda grad: grad * 2)
        with steered(net, "fp32"):
            set_format(net[0].__dict__["_autoprec"].unit, "fp32", "onednn")
            net(torch.ones(3, 64)).sum().backward()
        assert [tuple(each.shape) for each in seen] == [(3, 8)]
        assert torch.equal(weight.grad, torch.full((8, 64), 6.0))

    def test_a_choice_survives_a_parametrization(self) -> None:
        net = nn.Sequential(nn.Linear(8, 8))
        (unit,), _ = attached(net, "fp32")
        set_format(unit, "fp32", "onednn")
        state = unit.states[0]
        state.swap_out()
        nn.utils.parametrizations.weight_norm(net[0])
        state.swap_in()
        assert state.implementation == "onednn"
        state.swap_out()

    def test_no_flag_of_torch_is_touched(self) -> None:
        def flags() -> list[str]:
            backend: Any = torch.backends.mkldnn
            return [torch.get_float32_matmul_precision(), backend.matmul.fp32_precision]

        before = flags()
        seen: list[list[str]] = []
        net = nn.Sequential(nn.Linear(64, 8))
        net[0].register_forward_hook(lambda *args: seen.append(flags()))
        with steered(net, "fp32"):
            set_format(net[0].__dict__["_autoprec"].unit, "fp32", "onednn")
            net(torch.ones(3, 64)).sum().backward()
        assert seen == [before]
        assert flags() == before
