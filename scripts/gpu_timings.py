"""Times GPU kernels against torch; part of `gpu_check.py`, whose rows they become."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# GPT-2 small: what a step of a real model looks like, 148 tensors and 124 million numbers
GPT2_BLOCK = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)] + [
    (768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)
]  # fmt: skip
GPT2 = [(50257, 768), (1024, 768), *GPT2_BLOCK * 12, (768,), (768,)]
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: What was checked or timed.
        is_good: Whether the check holds; ``None`` for a timing, which nothing fails.
        detail: The figure that decides, or the times.
    """

    name: str
    is_good: bool | None
    detail: str


def scales(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    assert a.scale is not None
    assert b.scale is not None
    return a.scale, b.scale


def median_ms(functions: Sequence[Callable[[], object]], rounds: int = 15) -> list[float]:
    """Median time of each function between events on the device, interleaved; what the host adds shows as a gap."""
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
        function()
    for _ in range(rounds):
        for function, found in zip(functions, samples, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
    return [sorted(found)[rounds // 2] for found in samples]


def timing_row(name: str, ours: Callable[[], object], theirs: Callable[[], object], work: float, unit: str) -> Row:
    """``work`` is bytes for GB/s or operations for TFLOP/s, of ours."""
    ours_ms, theirs_ms = median_ms([ours, theirs])
    rate = work / ours_ms / (1e6 if unit == "GB/s" else 1e9)
    detail = f"{ours_ms:8.3f} ms, torch {theirs_ms:8.3f} ms, {theirs_ms / ours_ms:5.2f}x, {rate:.0f} {unit}"
    return Row(name, None, detail)


def time_steps() -> Iterator[Row]:
    from autoprec.ops import new_copy, triton_optimizers, triton_statistics

    for dtype in (torch.float32, torch.bfloat16):
        params = [torch.randn(s, device="cuda", requires_grad=True) for s in GPT2]
        grads = [torch.randn(s, device="cuda").to(dtype) for s in GPT2]
        count = sum(map(Tensor.numel, params))
        twins = [torch.nn.Parameter(grad) for grad in grads]
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad
        yield timing_row(
            f"grad_stats / clip_grad_norm_, {str(dtype)[6:]}",
            lambda grads=grads: triton_statistics.grad_stats(grads),  # type: ignore[misc]
            lambda twins=twins: torch.nn.utils.clip_grad_norm_(twins, 1e9, foreach=True),  # type: ignore[misc]
            count * grads[0].element_size(),
            "GB/s",
        )
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    for param in params:
        param.grad = torch.randn_like(param)
    full_grads = [param.grad for param in params if param.grad is not None]
    optimizer.step()
    state = [optimizer.state[param] for param in params]
    lists = [[entry[key] for entry in state] for key in ("exp_avg", "exp_avg_sq", "step")]
    settings = {**ADAM, "lr": 1e-4}
    plain = triton_optimizers.PreparedAdam(params, lists[0], lists[1], lists[2])
    yield timing_row(
        "AdamW / torch's fused, 28 bytes a number",
        lambda: plain(full_grads, **settings),  # type: ignore[arg-type]
        optimizer.step,
        28 * count,
        "GB/s",
    )
    copies = [new_copy(param, "bf16") for param in params]
    whole = triton_optimizers.PreparedAdam(params, lists[0], lists[1], lists[2], copies)
    inv_scale = torch.ones((), device="cuda")

    def ours() -> None:
        stats = triton_statistics.grad_stats(grads)
        factor, found_inf = triton_statistics.grad_factor(stats.total_norm, inv_scale, 1.0)
        whole(grads, **settings, grad_factor=factor, found_inf=found_inf)  # type: ignore[arg-type]

    def theirs() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        torch._foreach_copy_([c.values for c in copies], [param.detach() for param in params])

    yield timing_row("clip, AdamW, bf16 copies / the same in torch", ours, theirs, 30 * count, "GB/s")


def time_casts() -> Iterator[Row]:
    from autoprec.ops import reference, triton_casts

    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for granularity, reads in (("tensor", 2), ("row", 2), ("1x128", 1), ("128x128", 1)):
        yield timing_row(
            f"cast to e4m3, {granularity} / torch eager tensorwise",
            lambda g=granularity: triton_casts.cast(x, "e4m3", granularity=g),  # type: ignore[misc]
            lambda: reference.quantize_tensor(x, torch.float8_e4m3fn),
            x.numel() * (2 * reads + 1),
            "GB/s",
        )


def time_matmuls() -> Iterator[Row]:
    from autoprec.ops import reference, triton_casts, triton_matmul

    for size in (2048, 8192):
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        operations = 2 * size**3
        variants: list[tuple[str, str, str, str, Callable[..., Tensor]]] = [
            ("fp8 blocks", "e4m3", "1x128", "128x128", triton_matmul.block_scaled_matmul),
            ("int8 rows", "int8", "row", "row", triton_matmul.scaled_int8_matmul),
        ]
        if reference.is_fp8_native(a.device):
            variants += [(f"fp8 {g}", "e4m3", g, g, triton_matmul.scaled_matmul) for g in ("tensor", "row")]
        for name, format_name, a_granularity, b_granularity, multiply in variants:
            a_cast = triton_casts.cast(a, format_name, granularity=a_granularity)
            b_cast = triton_casts.cast(b, format_name, granularity=b_granularity)
            yield timing_row(
                f"matmul {name}, {size} / bf16",
                lambda m=multiply, p=a_cast, q=b_cast: m(p.values, q.values, p.scale, q.scale),  # type: ignore[misc]
                lambda a=a, b=b: a @ b.t(),  # type: ignore[misc]
                operations,
                "TFLOP/s",
            )


def time_torchao() -> Iterator[Row]:
    from autoprec.ops import reference, triton_casts, triton_matmul

    if importlib.util.find_spec("torchao") is None or not reference.is_fp8_native(torch.device("cuda")):
        yield Row("torchao float8", None, "not installed, or no fp8 units")
        return
    from torchao.float8 import convert_to_float8_training

    linear = torch.nn.Linear(8192, 8192, bias=False, device="cuda", dtype=torch.bfloat16)
    converted = convert_to_float8_training(torch.nn.Sequential(copy.deepcopy(linear)))
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    weight = triton_casts.cast(linear.weight, "e4m3", granularity="128x128")

    def ours() -> Tensor:
        rows = triton_casts.cast(x, "e4m3", granularity="1x128")
        return triton_matmul.block_scaled_matmul(rows.values, weight.values, *scales(rows, weight))

    with torch.no_grad():
        yield timing_row("linear fp8 forward, 8192 / torchao eager", ours, lambda: converted(x), 2 * 8192**3, "TFLOP/s")
