"""Times the CPU kernels against torch: ``python -m benchmarks.ops [--threads N] [--rounds N] [table ...]``.

Rows are lists of gradients as real models have them. Each figure is a ratio of times measured in turns, see
``benchmarks/timing.py``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoprec import ops
from benchmarks.timing import measure, plain_reads

Shapes = list[tuple[int, ...]]


def mlp(width: int) -> Shapes:
    layers: Shapes = [(width, 64), (width, width), (width, width), (10, width)]
    return [shape for layer in layers for shape in (layer, layer[:1])]


def gpt(layers: int, width: int, vocabulary: int = 512, length: int = 128) -> Shapes:
    linear: Shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    block = [shape for layer in linear for shape in (layer, layer[:1])] + [(width,)] * 4
    return [(vocabulary, width), (length, width), *block * layers, (width,), (width,), (vocabulary, width)]


def cnn(width: int) -> Shapes:
    channels = [3, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
    convolutions = [(out, in_, 3, 3) for in_, out in zip(channels, channels[1:], strict=False)]
    return [shape for conv in convolutions for shape in (conv, conv[:1], conv[:1])] + [(10, 4 * width), (10,)]


ROWS: dict[str, Shapes] = {
    "mlp-128": mlp(128),
    "mlp-512": mlp(512),
    "mlp-2048": mlp(2048),
    "gpt-2-128": gpt(2, 128),
    "gpt-4-256": gpt(4, 256),
    "gpt-6-512": gpt(6, 512, 1024, 256),
    "cnn-32": cnn(32),
    "50M": [(50_000_000,)],
}

OUT_OF_CACHE_MB = 64.0
"""Gradients of that size come from memory: the last cache of a core is smaller."""

MODEL_SHAPES = [name for name in ROWS if name != "50M"]
"""The rows that are gradients of a model."""


def adam_of(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    zeros = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    return zeros[0], zeros[1], [torch.zeros(()) for _ in params]


OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decoupled": True,
}


def torch_step(shapes: Shapes, is_clipped: bool, recast: str | None) -> Callable[[], None]:
    """Clipping, fused AdamW and bf16 weights, as torch does them.

    ``recast`` is ``"fresh"`` for new tensors, as autocast makes them in every forward, or ``"kept"`` for the same ones.
    """
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    copies = [param.detach().bfloat16() for param in params]

    def step() -> None:
        if is_clipped:
            nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if recast == "fresh":
            copies[:] = [param.detach().bfloat16() for param in params]
        elif recast == "kept":
            for param, copy in zip(params, copies, strict=True):
                copy.copy_(param.detach())

    return step


def our_step(
    shapes: Shapes, dtype: torch.dtype, is_clipped: bool, copy: str | None, moment: torch.dtype
) -> Callable[[], None]:
    params = [torch.randn(shape) for shape in shapes]
    grads = [torch.randn_like(p).mul(1e-3).to(dtype) for p in params]
    exp_avgs, exp_avg_sqs, steps = adam_of(params)
    exp_avg_sqs = [v.to(moment) for v in exp_avg_sqs]
    copies = [ops.new_copy(p, copy if p.ndim > 1 else "bf16") if copy else None for p in params]
    run = ops.prepare_adam(params, exp_avgs, exp_avg_sqs, steps, copies)

    def step() -> None:
        factor = 1.0
        if is_clipped:
            factor = min(1.0, 1.0 / (float(ops.grad_stats(grads).total_norm) + 1e-6))
        run(grads, grad_factor=factor, **OPTIONS)

    return step


Row = dict[str, float | str]


def stats_row(name: str, rounds: int) -> Row:
    """grad_stats against torch's clipping, which it replaces."""
    shapes = ROWS[name]
    params = [nn.Parameter(torch.empty(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-6
    wide = [param.grad for param in params if param.grad is not None]
    half = [grad.bfloat16() for grad in wide]
    limits = [1e-7] * len(wide)
    mb = sum(g.nbytes for g in wide) / 1e6
    reads = plain_reads(torch.zeros(int(mb * 250_000))) if mb > OUT_OF_CACHE_MB else {}
    timing = measure(
        {
            "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(params, 1.0),
            "fp32": lambda: float(ops.grad_stats(wide).total_norm),
            "bf16": lambda: float(ops.grad_stats(half).total_norm),
            "all": lambda: ops.grad_stats(wide, limits, limits),
            **reads,
        },
        rounds=rounds,
    )
    us, clip_us = timing.median("fp32") * 1e6, timing.median("clip_grad_norm_") * 1e6
    ratios = {f"{kind} vs clip": timing.ratio(kind, "clip_grad_norm_") for kind in ("fp32", "bf16", "all")}
    of_bandwidth = {"of bandwidth": min(timing.ratio(name, "fp32") for name in reads)} if reads else {}
    return {
        "table": "grad_stats",
        "row": name,
        "MB": mb,
        "clip us": clip_us,
        "fp32 us": us,
        "GB/s": mb / us * 1e3,
        **ratios,
        **of_bandwidth,
    }


def step_row(name: str, rounds: int) -> Row:
    """One whole step, like for like, and bare AdamW; speed-ups over torch."""
    shapes = ROWS[name]
    timing = measure(
        {
            "torch": torch_step(shapes, True, "fresh"),
            "torch kept": torch_step(shapes, True, "kept"),
            "bf16 grads": our_step(shapes, torch.bfloat16, True, "bf16", torch.float32),
            "fp32 grads": our_step(shapes, torch.float32, True, "bf16", torch.float32),
            "v bf16": our_step(shapes, torch.bfloat16, True, "bf16", torch.bfloat16),
            "int8 copies": our_step(shapes, torch.bfloat16, True, "int8", torch.float32),
            "torch bare": torch_step(shapes, False, None),
            "bare": our_step(shapes, torch.float32, False, None, torch.float32),
        },
        rounds=rounds,
    )
    kinds = ("bf16 grads", "fp32 grads", "v bf16", "int8 copies")
    gains = {kind: 1 / timing.ratio(kind, "torch") for kind in kinds}
    kept = 1 / timing.ratio("bf16 grads", "torch kept")
    bare = 1 / timing.ratio("bare", "torch bare")
    return {
        "table": "step",
        "row": name,
        "M": sum(math.prod(shape) for shape in shapes) / 1e6,
        "torch ms": timing.median("torch") * 1e3,
        "ms": timing.median("bf16 grads") * 1e3,
        **gains,
        "vs kept copies": kept,
        "bare AdamW": bare,
    }


def int8_rows(rounds: int) -> Iterator[Row]:
    """Forward and input gradient of a linear layer; speed-ups over bf16 with a kept copy of the weight."""
    for rows, inner, out in ((128, 512, 512), (512, 512, 2048), (512, 2048, 2048), (128, 2048, 2048)):
        weight, x = torch.randn(out, inner), torch.randn(rows, inner).bfloat16()
        grad = torch.randn(rows, out).bfloat16()
        copy, half = ops.new_copy(weight, "int8"), weight.bfloat16()
        ops.refresh_copies_([weight], [copy])
        forward, backward = (copy.values, copy.scale), (copy.transposed_values, copy.transposed_scale)
        timing = measure(
            {
                "bf16": lambda x=x, half=half: nn.functional.linear(x, half),  # type: ignore[misc]
                "int8": lambda x=x, operand=forward: ops.int8_matmul(x, *operand),  # type: ignore[misc]
                "bf16 gradient": lambda grad=grad, half=half: grad @ half,  # type: ignore[misc]
                "int8 gradient": lambda grad=grad, operand=backward: ops.int8_matmul(grad, *operand),  # type: ignore[misc]
            },
            rounds=rounds,
        )
        forward_gain, gradient_gain = (
            1 / timing.ratio("int8", "bf16"),
            1 / timing.ratio("int8 gradient", "bf16 gradient"),
        )
        ms = timing.median("int8") * 1e3
        name = f"{rows}x{inner}x{out}"
        yield {"table": "int8", "row": name, "ms": ms, "forward": forward_gain, "input gradient": gradient_gain}


def overhead_rows(rounds: int) -> Iterator[Row]:
    """Calls on tensors of one element: what is left is overhead."""
    for count in (1, 8, 75):
        params = [torch.ones(1) for _ in range(count)]
        step = our_step([(1,)] * count, torch.float32, False, None, torch.float32)
        timing = measure({"grad_stats": lambda params=params: ops.grad_stats(params), "step": step}, rounds=rounds)  # type: ignore[misc]
        yield {
            "table": "overhead",
            "row": f"{count} tensors",
            "grad_stats us": timing.median("grad_stats") * 1e6,
            "step us": timing.median("step") * 1e6,
        }


ROW_TABLES: dict[str, Callable[[str, int], Row]] = {"grad_stats": stats_row, "step": step_row}
"""Tables over :data:`ROWS`: a row from its name and the number of rounds."""


def over_rows(row: Callable[[str, int], Row]) -> Callable[[int], Iterator[Row]]:
    return lambda rounds: (row(name, rounds) for name in ROWS)


TABLES: dict[str, Callable[[int], Iterator[Row]]] = {
    **{name: over_rows(row) for name, row in ROW_TABLES.items()},
    "int8": int8_rows,
    "overhead": overhead_rows,
}


def show(row: Row) -> None:
    figures = (f"{key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
    print(f"{row['table']:12s}{row['row']:14s}" + "  ".join(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also writes the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {ops.implementations()['cpu'].detail}")
    rows = []
    for name in options.tables or TABLES:
        for row in TABLES[name](options.rounds):
            show(row)
            rows.append(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
