"""One row in hand-written loops: what the Trainer adds is absent, and our kernels can be driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from autoprec import ops
from benchmarks.arms import ADAMW, CLIP_NORM, Arm, clip_factor
from benchmarks.fits import append
from benchmarks.turns import Lap, time_calls
from benchmarks.workloads import Workload

HAND = "hand"
"""Name of the loop on our kernels alone."""

Step = Callable[[tuple[Tensor, ...]], object]


def static_step(workload: Workload, arm: Arm) -> Step:
    """Returns one step of a static arm as its user would write the loop.

    Args:
        workload: The row.
        arm: A static arm or a control.
    """
    module = workload.make_module(arm.make_optimizer)
    dtype = torch.bfloat16 if arm.precision == "bf16-true" else torch.float32
    module.to(dtype)
    optimizer = module.configure_optimizers()
    params = list(module.parameters())

    def region() -> AbstractContextManager[Any]:
        if arm.precision != "bf16-mixed":
            return nullcontext()
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    def step(batch: tuple[Tensor, ...]) -> None:
        optimizer.zero_grad()
        with region():
            loss = module.training_step([_cast(tensor, dtype) for tensor in batch], 0)
        loss.backward()
        if arm.is_clipped:
            nn.utils.clip_grad_norm_(params, CLIP_NORM)
        optimizer.step()

    return step


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class HandStep:
    """One step without autocast: layers hold bf16 copies of fp32 weights that the fused step writes.

    Their gradients stay in bf16; norms and embeddings train in fp32, as under autocast.

    Args:
        workload: The row.
    """

    def __init__(self, workload: Workload) -> None:
        self.module = workload.make_module(AdamW)
        self._masters: list[Tensor] = []
        self._leaves: list[nn.Parameter] = []
        self._copies: list[ops.WeightCopy | None] = []
        last: nn.Module | None = None
        for layer in self.module.modules():
            if is_cast := isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.register_forward_pre_hook(lambda _, args: args[0].bfloat16())
                last = layer
            for name, param in layer.named_parameters(recurse=False):
                self._add(layer, name, param, is_cast)
        assert last is not None, "a row without a layer"
        last.register_forward_hook(lambda _, args, output: output.float())  # cross entropy is taken in fp32
        exp_avgs, exp_avg_sqs = ([torch.zeros_like(p) for p in self._masters] for _ in range(2))
        ops.refresh_copies_(self._masters, self._copies)
        steps = [torch.zeros(()) for _ in self._masters]
        self._run = ops.prepare_adam(self._masters, exp_avgs, exp_avg_sqs, steps, self._copies)

    def _add(self, layer: nn.Module, name: str, param: nn.Parameter, is_cast: bool) -> None:
        self._masters.append(param.detach())
        copy = ops.new_copy(param, "bf16") if is_cast else None
        leaf = param if copy is None else nn.Parameter(copy.values)
        setattr(layer, name, leaf)
        self._copies.append(copy)
        self._leaves.append(leaf)

    def __call__(self, batch: tuple[Tensor, ...]) -> None:
        """Takes one step."""
        self.module.training_step(batch, 0).backward()
        grads = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        factor = clip_factor(float(ops.grad_stats(grads).total_norm), CLIP_NORM)
        if factor is not None:
            self._run(grads, lr=1e-3, grad_factor=factor, **ADAMW)
        for leaf in self._leaves:
            leaf.grad = None


def measure_bare(
    workload: Workload,
    arms: Sequence[Arm],
    rounds: int,
    steps: int,
    on_round: Callable[[int], None] = lambda index: None,
) -> dict[str, Any]:
    """Times the static arms of a row and :class:`HandStep` in turns.

    Args:
        workload: The row.
        arms: Static arms and controls; others are left out.
        rounds: Rounds that count, after one that does not.
        steps: Steps of one turn.
        on_round: Called after each round with its index, 0 for the one that does not count.

    Returns:
        ``laps``: for each arm a :class:`Lap` for every round.
    """
    batches = workload.make_batches()
    static = {arm.name: arm for arm in arms if arm.callback is None}
    loops: dict[str, Step] = {name: static_step(workload, arm) for name, arm in static.items()}
    loops[HAND] = HandStep(workload)
    laps: dict[str, list[Lap]] = {name: [] for name in loops}
    before = torch.get_float32_matmul_precision()
    for index in range(rounds + 1):
        found = {}
        for name in list(loops) if index % 2 else reversed(loops):
            torch.set_float32_matmul_precision(static[name].matmul if name in static else "highest")
            found[name] = time_calls(_in_order(loops[name], batches), steps)
        torch.set_float32_matmul_precision(before)
        if index:
            append(laps, found)
        on_round(index)
    return {"laps": laps}


def _in_order(step: Step, batches: Sequence[tuple[Tensor, ...]]) -> Callable[[], object]:
    count = iter(range(1 << 60))
    return lambda: step(batches[next(count) % len(batches)])
