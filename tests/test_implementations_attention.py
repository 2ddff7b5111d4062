"""Attention by matrix products against float64 and torch's own, and which calls of a step run so.

Time budget: 30 s.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autoprec import attention
from autoprec.attention import AttentionSignature, example, saved_bytes
from autoprec.attention_product import attend
from autoprec.layers import Runtime
from tests.exactness import is_attention_exact_enough, is_exact_enough

BUILTIN: Any = F.scaled_dot_product_attention
SOME: Any = attend
DTYPES = (torch.float32, torch.bfloat16)


def call(*operands: Any, **options: Any) -> Tensor:
    """As code of users calls it: by its path, at the time of the call."""
    function: Any = F.scaled_dot_product_attention
    output: Tensor = function(*operands, **options)
    return output


def hidden(*shape: int) -> Tensor:
    """True takes part; the first key always does."""
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    return mask


def blank_row(mask: Tensor) -> Tensor:
    mask[..., 1, :] = False
    return mask


MASKS: dict[str, Any] = {
    "none": lambda b, h, n, s: None,
    "bool rows": lambda b, h, n, s: hidden(n, s),
    "bool of samples": lambda b, h, n, s: hidden(b, 1, 1, s),
    "bool of heads": lambda b, h, n, s: hidden(1, h, n, s),
    "bool of all": lambda b, h, n, s: hidden(b, h, n, s),
    "bool with a row that sees nothing": lambda b, h, n, s: blank_row(hidden(b, 1, n, s)),
    "float": lambda b, h, n, s: torch.randn(b, h, n, s),
    "float with a row that sees nothing": lambda b, h, n, s: torch.zeros(n, s).masked_fill(
        ~blank_row(hidden(n, s)), -math.inf
    ),
}
SIZES = {
    "square": (2, 3, 17, 17),
    "one row": (2, 2, 1, 9),
    "longer": (1, 2, 20, 9),
    "shorter": (3, 2, 9, 20),
    "blocks of rows": (1, 2, 300, 300),
    "blocks of heads": (5, 4, 150, 170),
}


def results(run: Any, operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in operands]
    output = run(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def compare(sizes: tuple[int, ...], dtype: torch.dtype, mask: Tensor | None, is_causal: bool, factor: float) -> None:
    batch, heads, length, keys = sizes
    shapes = ((batch, heads, length, 16), (batch, heads, keys, 16), (batch, heads, keys, 16))
    operands = [torch.randn(shape).to(dtype) for shape in shapes]
    grad = torch.randn(shapes[0]).to(dtype)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(dtype)
    wide = mask if mask is None or mask.dtype is torch.bool else mask.double()
    found = results(lambda q, k, v: attend(q, k, v, mask, is_causal, factor), operands, grad)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": factor}
    usual = results(lambda q, k, v: BUILTIN(q, k, v, mask, **options), operands, grad)
    exact = results(lambda q, k, v: BUILTIN(q, k, v, wide, **options), [each.double() for each in operands], grad)
    assert is_exact_enough(found, usual, exact)
    for one, other in zip(found, usual, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
    assert found[0].stride() == usual[0].stride()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3), (2, 0, 1, 3)])
def test_the_result_lies_in_memory_as_the_fused_kernels_does(order: tuple[int, ...]) -> None:
    """Code of users views it."""
    q = torch.randn(2, 4, 6, 16)
    packed = torch.randn(3, 4, 6, 3, 16)[:, :, :, 0]  # with gaps, as a part of one projection
    for query in (q.permute(order), packed):
        size = query.shape
        key, value = (torch.randn(size) for _ in range(2))
        found, usual = attend(query, key, value, None, False, 1.0), BUILTIN(query, key, value, scale=1.0)
        assert found.stride() == usual.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestNumbers:
    @pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_without_a_mask(self, sizes: tuple[int, ...], is_causal: bool, dtype: torch.dtype) -> None:
        compare(sizes, dtype, None, is_causal, 0.25)

    @pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
    @pytest.mark.parametrize("sizes", [SIZES["shorter"], SIZES["blocks of heads"]], ids=["small", "blocks"])
    def test_masks(self, make: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        compare(sizes, dtype, make(*sizes), False, 0.25)

    @pytest.mark.parametrize("factor", [1.0, 4.0])
    def test_large_scores(self, factor: float, dtype: torch.dtype) -> None:
        """Scores in bfloat16 would fail here."""
        compare(SIZES["square"], dtype, None, True, factor)

    def test_rows_that_see_nothing_are_zero(self, dtype: torch.dtype) -> None:
        q, k, v = (torch.randn(1, 2, 5, 8, dtype=dtype) for _ in range(3))
        mask = torch.ones(5, 5, dtype=torch.bool)
        mask[3] = False
        assert torch.equal(attend(q, k, v, mask, False, 1.0)[:, :, 3], torch.zeros(1, 2, 8, dtype=dtype))

    def test_nan_stays_nan(self, dtype: torch.dtype) -> None:
        q, k, v = (torch.randn(1, 1, 5, 8, dtype=dtype) for _ in range(3))
        q[0, 0, 2] = math.nan
        assert attend(q, k, v, hidden(5, 5), False, 1.0).isnan().any(-1).tolist() == [
            [[False, False, True, False, False]]
        ]

    @pytest.mark.parametrize("wants", [(True, False, False), (False, True, False), (False, False, True)])
    def test_one_operand_alone_wants_a_gradient(self, wants: tuple[bool, ...], dtype: torch.dtype) -> None:
        operands = [torch.randn(1, 2, 5, 8, dtype=dtype).requires_grad_(want) for want in wants]
        SOME(*operands, None, True, 1.0).float().sum().backward()
        assert tuple(each.grad is not None for each in operands) == wants

    def test_twice_is_not_possible_as_with_the_fused_kernel(self, dtype: torch.dtype) -> None:
        q, k, v = (torch.randn(1, 2, 5, 8, dtype=dtype, requires_grad=True) for _ in range(3))
        for run in (lambda: attend(q, k, v, None, False, 1.0), lambda: BUILTIN(q, k, v)):
            output: Tensor = run()
            (grad,) = torch.autograd.grad(output.sum(), q, create_graph=True)
            assert grad.requires_grad
            with pytest.raises(RuntimeError, match=r"differentiated twice|is not implemented"):
                torch.autograd.grad(grad.sum(), k)


@contextmanager
def step(runtime: Runtime) -> Iterator[Runtime]:
    with attention.region(runtime):
        yield runtime


def choosing(*operands: Tensor, **options: Any) -> Runtime:
    """A runtime that has chosen products for the calls that it sees when it runs these operands."""
    runtime = Runtime("cpu")
    runtime.wants_attention = True
    with step(runtime):
        call(*operands, **options)
    runtime.wants_attention = False
    runtime.attention = dict.fromkeys(runtime.attention_seen, "matmul")
    return runtime


def operands(dtype: torch.dtype = torch.float32, length: int = 6, keys: int = 6, groups: int = 4) -> list[Tensor]:
    shapes = ((2, 4, length, 8), (2, groups, keys, 8), (2, groups, keys, 8))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def said(run: Any, *arguments: Any, **options: Any) -> str:
    """The error of a call, "" if there is none."""
    try:
        run(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


class TestCalls:
    def test_a_call_is_seen_chosen_and_run(self) -> None:
        runtime = choosing(*operands(), is_causal=True)
        (signature,) = runtime.attention_seen
        assert signature == AttentionSignature(
            (2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), "float32", is_causal=True, needs_grad=True
        )
        q, k, v = operands()
        with step(runtime):
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            other = F.scaled_dot_product_attention(q, k, v)
        assert runtime.attention_ran == {signature}
        assert "Attention" in type(found.grad_fn).__name__
        assert "Flash" not in type(found.grad_fn).__name__
        assert "Flash" in type(other.grad_fn).__name__
        torch.testing.assert_close(found, BUILTIN(q, k, v, is_causal=True))

    def test_another_length_runs_as_by_default(self) -> None:
        runtime = choosing(*operands())
        q, k, v = operands(length=7, keys=7)
        with step(runtime):
            F.scaled_dot_product_attention(q, k, v)
        assert not runtime.attention_ran

    def test_grouped_queries(self) -> None:
        q, k, v = operands(groups=2)
        runtime = choosing(q, k, v, enable_gqa=True)
        grad = torch.randn(q.shape)
        with step(runtime):
            found = results(lambda *each: call(*each, enable_gqa=True), [q, k, v], grad)
        assert runtime.attention_ran
        usual = results(lambda *each: BUILTIN(*each, enable_gqa=True), [q, k, v], grad)
        for one, other in zip(found, usual, strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_autocast_casts_operands_and_mask(self, dtype: torch.dtype) -> None:
        from autoprec.autocast import ambient

        q, (k, v) = operands()[0], operands(torch.bfloat16)[1:]
        mask = torch.randn(6, 6)
        with ambient("cpu", dtype):
            runtime = choosing(q, k, v, mask)
            with step(runtime):
                found = F.scaled_dot_product_attention(q, k, v, mask)
            usual = F.scaled_dot_product_attention(q, k, v, mask)
        assert runtime.attention_ran
        assert found.dtype == usual.dtype == dtype
        torch.testing.assert_close(found, usual, rtol=0.02, atol=0.02)

    def test_dropout_is_left_to_torch_and_draws_the_same_numbers(self) -> None:
        q, k, v = operands()
        runtime = choosing(q, k, v, dropout_p=0.5)
        assert [signature.has_dropout for signature in runtime.attention] == [True]
        torch.manual_seed(0)
        usual = BUILTIN(q, k, v, dropout_p=0.5)
        torch.manual_seed(0)
        with step(runtime):
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), usual)

    def test_errors_are_torchs_own(self) -> None:
        q, k, v = operands()
        runtime = choosing(q, k, v)
        for arguments, options in (
            ((q, k[..., :4], v), {}),
            ((q, k, v, torch.ones(6, 6, dtype=torch.bool)), {"is_causal": True}),
            ((q, k, v, torch.ones(5, 5)), {}),
            ((q, k.double(), v), {}),
        ):
            usual = said(BUILTIN, *arguments, **options)
            with step(runtime):
                assert said(F.scaled_dot_product_attention, *arguments, **options) == usual
            assert usual or options  # whether a mask may be causal as well depends on the version of torch
        assert not runtime.attention_ran

    @pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
    def test_calls_that_are_not_looked_at(self) -> None:
        q, k, v = operands()
        runtime = Runtime("cpu")
        runtime.wants_attention = True
        with step(runtime):
            for arguments in ((q[0], k[0], v[0]), (q[:0], k[:0], v[:0]), (q.double(), k.double(), v.double())):
                call(*arguments)
            F.scaled_dot_product_attention(q, k, v, torch.randn(6, 6, requires_grad=True))
            with FlopCounterMode(display=False):
                F.scaled_dot_product_attention(q, k, v)
            vmapped: Any = torch.func.vmap(F.scaled_dot_product_attention)
            vmapped(*(each.expand(2, *each.shape) for each in (q, k, v)))
        assert not runtime.attention_seen

    def test_a_kernel_that_the_user_forces_is_kept(self) -> None:
        q, k, v = operands()
        runtime = choosing(q, k, v)
        with step(runtime), sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v)
        assert not runtime.attention_ran

    def test_regions_without_autocast_are_kept(self) -> None:
        q, k, v = operands()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            runtime = choosing(q, k, v)
            with step(runtime):
                with torch.autocast("cpu", enabled=False):
                    F.scaled_dot_product_attention(q, k, v)
                assert not runtime.attention_ran
                F.scaled_dot_product_attention(q, k, v)
                assert runtime.attention_ran

    def test_other_threads_are_left_alone(self) -> None:
        q, k, v = operands()
        runtime = choosing(q, k, v)
        with step(runtime):
            thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, k, v))
            thread.start()
            thread.join()
        assert not runtime.attention_ran

    def test_it_is_put_back_after_an_exception(self) -> None:
        with pytest.raises(KeyError), step(Runtime("cpu")):  # noqa: PT012
            assert F.scaled_dot_product_attention is not BUILTIN
            raise KeyError
        assert F.scaled_dot_product_attention is BUILTIN

    def test_a_function_of_another_library_is_left_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def other(*args: Any, **kwargs: Any) -> Tensor:
            return BUILTIN(*args, **kwargs)  # type: ignore[no-any-return]

        monkeypatch.setattr(F, "scaled_dot_product_attention", other)
        with step(Runtime("cpu")):
            assert F.scaled_dot_product_attention is other

    def test_torchs_own_layers_reach_it(self) -> None:
        layer = nn.MultiheadAttention(8, 2, batch_first=True)
        x = torch.randn(2, 5, 8)
        runtime = Runtime("cpu")
        runtime.wants_attention = True
        with step(runtime):
            layer(x, x, x, need_weights=False)
        assert len(runtime.attention_seen) == 1

    def test_what_is_noted_is_bounded(self) -> None:
        runtime = Runtime("cpu")
        runtime.wants_attention = True
        with step(runtime):
            for length in range(1, 300):
                q = torch.zeros(1, 1, length, 1)
                F.scaled_dot_product_attention(q, q, q)
        assert len(runtime.attention_seen) == 256


class TestSignature:
    @pytest.mark.parametrize("mask", ["none", "bool", "float"])
    def test_an_example_has_it(self, mask: str) -> None:
        shape = () if mask == "none" else (2, 1, 6, 6)
        signature = AttentionSignature(
            (2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), "bfloat16", mask, shape, enable_gqa=True
        )
        arguments, options = example(signature)
        assert list(choosing(*arguments, **options).attention) == [signature]

    def test_a_checkpoint_holds_it(self) -> None:
        signature = AttentionSignature((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), "bfloat16", "bool", (6, 6))
        assert AttentionSignature.from_list(signature.to_list()) == signature

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_it_is_exact_enough(self, dtype: str, is_causal: bool) -> None:
        shape = (8, 2, 130, 16)
        assert is_attention_exact_enough(AttentionSignature(shape, shape, shape, dtype, is_causal=is_causal))
        masked = AttentionSignature(shape, shape, shape, dtype, "float", (8, 1, 1, 130))
        assert is_attention_exact_enough(masked)

    @pytest.mark.parametrize("length", [40, 300])
    @pytest.mark.parametrize("implementation", ["default", "matmul"])
    def test_saved_bytes_are_what_the_graph_keeps(self, length: int, implementation: str) -> None:
        shape = (2, 3, length, 16)
        signature = AttentionSignature(shape, shape, shape, "bfloat16", is_causal=True)
        arguments, options = example(signature)
        runtime = choosing(*arguments, **options)
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if implementation == "matmul":
                with step(runtime):
                    output = call(*arguments, **options)
            else:
                output = BUILTIN(*arguments, **options)
        assert output.requires_grad
        assert sum(kept.values()) == saved_bytes(signature, implementation)

    def test_nothing_is_saved_without_a_backward(self) -> None:
        shape = (2, 3, 4, 16)
        signature = AttentionSignature(shape, shape, shape, "bfloat16", needs_grad=False)
        assert saved_bytes(signature, "matmul") == 0
        with pytest.raises(ValueError, match="'fast'"):
            saved_bytes(signature, "fast")
