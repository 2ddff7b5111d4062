"""What the machine does at best, and the bound that follows for a row: its products and its bytes, nothing else.

The bound leaves out everything element by element, norms, softmax and dispatch, so that it cannot be reached. What the
Trainer's loop costs by itself is measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.arms import Arm
from benchmarks.fits import measure_fits
from benchmarks.timing import plain_reads
from benchmarks.turns import time_calls
from benchmarks.workloads import MakeOptimizer, Trained, Workload

BYTES_PER_PARAMETER = 30
"""A step reads a bf16 gradient, weight and two moments, writes the latter three and a bf16 copy."""

SIZES_MB = (1, 16, 256)
"""Where rates of memory are measured: in the caches of a core, in the shared one, and beyond."""


def measure_machine(threads: int, rounds: int) -> dict[str, Any]:
    """Returns the best rates that were seen.

    Args:
        threads: Threads in use; at one, the thread's processor time counts, else the wall.
        rounds: Tries of each.

    Returns:
        ``bf16_gflops``, ``int8_gops``, ``loop_ms``, and by the megabytes in use ``read_gbs`` and ``copy_gbs`` (bytes
        read plus bytes written).
    """
    clock = 0 if threads == 1 else 1

    def best(calls: list[tuple[float, Callable[[], object]]]) -> float:
        return max(work / min(time_calls(call, 4)[clock] for _ in range(rounds)) for work, call in calls) / 1e9

    read_gbs, copy_gbs = {}, {}
    for size in SIZES_MB:
        memory = torch.zeros(size << 18)
        half, other = memory.chunk(2)
        read_gbs[str(size)] = best([(memory.nbytes, call) for call in plain_reads(memory).values()])
        copy_gbs[str(size)] = best([(memory.nbytes, lambda half=half, other=other: other.copy_(half))])  # type: ignore[misc]
    return {
        "bf16_gflops": best([_product(n, torch.bfloat16) for n in (512, 1024, 2048)]),
        "int8_gops": best([_product(n, torch.int8) for n in (512, 1024, 2048)]),
        "read_gbs": read_gbs,
        "copy_gbs": copy_gbs,
        "loop_ms": _loop_ms(clock, rounds),
    }


def memory_gbs(machine: Mapping[str, Any], size_mb: float, kinds: Sequence[str] = ("read_gbs", "copy_gbs")) -> float:
    """Returns the best rate for so much memory: that of the next smaller size that was measured.

    Args:
        machine: What :func:`measure_machine` returned.
        size_mb: Megabytes in use.
        kinds: Which rates count.
    """
    size = max((size for size in SIZES_MB if size <= size_mb), default=SIZES_MB[0])
    return max(float(machine[kind][str(size)]) for kind in kinds)


def _product(size: int, dtype: torch.dtype) -> tuple[float, Callable[[], object]]:
    a, b = (torch.ones(size, size).to(dtype) for _ in range(2))
    product = torch._int_mm if dtype is torch.int8 else torch.mm
    return 2.0 * size**3, lambda: product(a, b)


class _OneWeight(Trained):
    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        super().__init__(make_optimizer)
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight * 1.0


def _loop_ms(clock: int, rounds: int) -> float:
    loop = Workload("loop", _OneWeight, lambda: torch.zeros(1, 1), classes=2, steps=50)
    arm = Arm("loop", "", "32-true", lambda params: SGD(params, lr=0.0), is_clipped=False)
    laps = measure_fits(loop, [arm], rounds, loop.steps)["laps"]["loop"]
    return min(float(lap[clock]) for lap in laps) * 1e3


def work_of(workload: Workload) -> dict[str, float]:
    """Returns the operations of the products of one step, forward and backward, and the number of parameters.

    Args:
        workload: The row.
    """
    module = workload.make_module(lambda params: SGD(params, lr=0.0))
    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda query, *_, **__: _causal(query),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, query, *__, **___: 2 * _causal(query),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        module.training_step(workload.make_batches()[0], 0).backward()
    return {"flops": counter.get_total_flops(), "parameters": sum(p.numel() for p in module.parameters())}


def _causal(query: Any) -> int:
    batch, heads, time, width = query
    return int(2 * batch * heads * time * time * width)  # half of two full products


def bound_ms(work: Mapping[str, float], machine: Mapping[str, Any], is_int8: bool = False) -> float:
    """Returns the milliseconds below which no step can go on this machine.

    Args:
        work: What :func:`work_of` returned.
        machine: What :func:`measure_machine` returned.
        is_int8: Two of three products are taken in int8, else all in bf16.
    """
    seconds_per_gflop = 1 / machine["bf16_gflops"]
    if is_int8:
        seconds_per_gflop = (1 / machine["bf16_gflops"] + 2 / machine["int8_gops"]) / 3
    return work["flops"] * float(seconds_per_gflop) / 1e6 + step_bound_ms(work["parameters"], machine)


def step_bound_ms(parameters: float, machine: Mapping[str, Any]) -> float:
    """Returns the milliseconds below which no step of the optimizer can go on this machine.

    Args:
        parameters: How many it steps.
        machine: What :func:`measure_machine` returned.
    """
    size_mb = BYTES_PER_PARAMETER * parameters / 1e6
    return size_mb / memory_gbs(machine, size_mb)
