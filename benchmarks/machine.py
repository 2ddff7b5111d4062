"""What the machine does at best, and the bound that follows for a row: its products and its bytes, nothing else.

The bound leaves out everything element by element, norms, softmax and dispatch, so that it cannot be reached. What the
Trainer's loop costs by itself is measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def measure_machine(threads: int, rounds: int) -> dict[str, Any]:
    """Returns the best rates that were seen.

    Args:
        threads: Threads in use; at one, the thread's processor time counts, else the wall.
        rounds: Tries of each.

    Returns:
        ``bf16_gflops``, ``int8_gops``, ``read_gbs``, ``copy_gbs`` (bytes read plus bytes written) and ``loop_ms``.
    """
    clock = 0 if threads == 1 else 1

    def best(calls: list[tuple[float, Callable[[], object]]]) -> float:
        return max(work / min(time_calls(call, 2)[clock] for _ in range(rounds)) for work, call in calls) / 1e9

    memory = torch.zeros(1 << 26)
    other = torch.ones_like(memory)
    return {
        "bf16_gflops": best([_product(n, torch.bfloat16) for n in (512, 1024, 2048)]),
        "int8_gops": best([_product(n, torch.int8) for n in (512, 1024, 2048)]),
        "read_gbs": best([(memory.nbytes, call) for call in plain_reads(memory).values()]),
        "copy_gbs": best([(2.0 * memory.nbytes, lambda: other.copy_(memory))]),
        "loop_ms": _loop_ms(clock, rounds),
    }


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


def bound_ms(work: Mapping[str, float], machine: Mapping[str, float], is_int8: bool = False) -> float:
    """Returns the milliseconds below which no step can go on this machine.

    Args:
        work: What :func:`work_of` returned.
        machine: What :func:`measure_machine` returned.
        is_int8: Two of three products are taken in int8, else all in bf16.
    """
    memory_gbs = max(machine["read_gbs"], machine["copy_gbs"])
    seconds_per_gflop = 1 / machine["bf16_gflops"]
    if is_int8:
        seconds_per_gflop = (1 / machine["bf16_gflops"] + 2 / machine["int8_gops"]) / 3
    return work["flops"] * seconds_per_gflop / 1e6 + BYTES_PER_PARAMETER * work["parameters"] / memory_gbs / 1e6
