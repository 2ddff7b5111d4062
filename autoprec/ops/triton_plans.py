"""Launch plans: what lets one kernel launch work on many tensors.

A plan is two small tensors on the device. The table has a row of int64 for each tensor: its number of elements, then
whatever the kernel needs, mostly addresses. The chunks say which program works on which part of which tensor. Both are
copied once, without a wait, and kept for as long as the same tensors come again.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

ALIGNMENT = 16
_MAX_PLANS = 64
_plans: OrderedDict[Hashable, tuple[Plan, ...]] = OrderedDict()


@dataclass(frozen=True)
class Plan:
    """One launch over many tensors.

    Attributes:
        table: ``[n_tensors, width]``, int64 on the device.
        chunk_tensors: ``[n_chunks]``, int32 on the device: row of the table that a program works on.
        chunk_starts: ``[n_chunks]``, int64 on the device: where in that tensor it starts.
        boundaries: ``[n_tensors + 1]``, int64 on the device: first chunk of each tensor, and the end.
        is_aligned: All addresses are multiples of 16 bytes and all sizes multiples of 16.
        scratch: Memory whose addresses are in the table, kept with it.
    """

    table: Tensor
    chunk_tensors: Tensor
    chunk_starts: Tensor
    boundaries: Tensor
    is_aligned: bool
    scratch: Tensor | None = None

    @property
    def n_tensors(self) -> int:
        """Tensors in the launch."""
        return len(self.table)

    @property
    def n_chunks(self) -> int:
        """Programs in the launch."""
        return len(self.chunk_tensors)


def chunk_map(sizes: Sequence[int], chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts tensors into chunks.

    Args:
        sizes: Elements (or tiles) of each tensor, any number up to 2**63.
        chunk: What one program works on.

    Returns:
        Tensor of each chunk, int32, its start in that tensor, int64, and the first chunk of each tensor with the number
        of all chunks at the end, int64; all on the CPU.
    """
    counts = torch.tensor([-(-size // chunk) for size in sizes], dtype=torch.int64, device="cpu")
    tensors = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    boundaries = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    starts = (torch.arange(len(tensors), device="cpu") - boundaries[tensors]) * chunk
    return tensors.int(), starts, boundaries


def build_plans(
    rows: Sequence[Sequence[int]],
    sizes: Sequence[int],
    aligned: Sequence[bool],
    chunk: int,
    device: torch.device,
    scratch: Tensor | None = None,
) -> tuple[Plan, ...]:
    """Builds one plan over the aligned tensors and one over the others, leaves out what is empty, sends both.

    Args:
        rows: Row of the table for each tensor.
        sizes: Elements (or tiles) of each tensor.
        aligned: Whether a kernel may rely on each tensor's alignment.
        chunk: What one program works on.
        device: Where the tensors are.
        scratch: Memory whose addresses are in the rows.
    """
    plans = []
    for wanted in (True, False):
        chosen = [i for i, size in enumerate(sizes) if size and aligned[i] is wanted]
        if chosen:
            table = torch.tensor([rows[i] for i in chosen], dtype=torch.int64, device="cpu")
            host = (table, *chunk_map([sizes[i] for i in chosen], chunk))
            table, tensors, starts, boundaries = (_send(part, device) for part in host)
            plans.append(Plan(table, tensors, starts, boundaries, wanted, scratch))
    return tuple(plans)


def linear_plans(
    kind: Hashable, columns: Sequence[Sequence[Tensor | None]], extra: Sequence[Sequence[int]], chunk: int
) -> tuple[Plan, ...]:
    """Plans over tensors that are read element by element.

    Args:
        kind: Tells plans of different kernels apart.
        columns: Lists of equal length, the first without ``None``; tensors at one position have equal sizes.
        extra: Further numbers in the row of each position.
        chunk: Elements of one program, a multiple of 16.

    Returns:
        At most two plans over the positions that have elements, see :func:`build_plans`. A row of the table is the
        size, the address from each column (0 for ``None``), the extra numbers.
    """
    key = (kind, tuple(map(identity, columns)), tuple(map(tuple, extra)))
    return cached_plans(key, lambda: build_linear_plans(columns, extra, chunk))


def build_linear_plans(
    columns: Sequence[Sequence[Tensor | None]], extra: Sequence[Sequence[int]], chunk: int
) -> tuple[Plan, ...]:
    """:func:`linear_plans`, built anew."""
    first = [tensor for tensor in columns[0] if tensor is not None]
    sizes = [tensor.numel() for tensor in first]
    addresses = list(zip(*([0 if t is None else t.data_ptr() for t in column] for column in columns), strict=True))
    rows = [(size, *found, *more) for size, found, more in zip(sizes, addresses, extra, strict=True)]
    aligned = [is_aligned(size, *found) for size, found in zip(sizes, addresses, strict=True)]
    return build_plans(rows, sizes, aligned, chunk, first[0].device)


def is_aligned(*numbers: int) -> bool:
    """Whether addresses and sizes allow vectors of 16 bytes."""
    return all(number % ALIGNMENT == 0 for number in numbers)


def cached_plans(key: Hashable, build: Callable[[], tuple[Plan, ...]]) -> tuple[Plan, ...]:
    """Returns the plans made for ``key``, built at the first call; the least recently used are dropped.

    Args:
        key: Everything the plans depend on: kind of launch, addresses, sizes, dtypes, device.
        build: Makes the plans.
    """
    plans = _plans.get(key)
    if plans is None:
        plans = _plans[key] = build()
        if len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
    else:
        _plans.move_to_end(key)
    return plans


def identity(tensors: Sequence[Tensor | None]) -> tuple[Hashable, ...]:
    """What a plan over these tensors depends on."""
    return tuple(None if t is None else (t.data_ptr(), t.numel(), t.dtype, t.device) for t in tensors)


def as_int64(number: int) -> int:
    """The low 64 bits of a number as the signed integer that a kernel takes."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _send(host: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def on_own_device(function: Callable[P, R]) -> Callable[P, R]:
    """Makes the device of the first tensor among the arguments current during a call, as Triton launches there."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        for argument in args:
            first = argument[0] if isinstance(argument, (list, tuple)) and argument else argument
            if isinstance(first, Tensor):
                with torch.cuda.device_of(first):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return guarded
