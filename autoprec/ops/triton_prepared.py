"""What fused steps have in common: lists in one memory order, launches that are remembered, scaled copies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from autoprec.ops.reference_steps import WeightCopy
from autoprec.ops.triton_copies import write_scaled_copies
from autoprec.ops.triton_plans import Plan, is_dense
from autoprec.ops.triton_rounding import BFLOAT16, FLOAT16, FLOAT32

CODES = {torch.float32: FLOAT32.value, torch.bfloat16: BFLOAT16.value, torch.float16: FLOAT16.value}
PLAIN_COPIES = {"bf16": BFLOAT16.value, "fp16": FLOAT16.value}
_DTYPE = attrgetter("dtype")
# address patterns of one preparation that are remembered: allocators alternate between a few
_MAX_KNOWN = 8
Column = Sequence["Tensor | None"]


class Group(NamedTuple):
    """Positions that one kernel launch can serve, or two if some are not aligned."""

    moment: int
    first: int
    plans: tuple[Plan, ...]


Clones = list["tuple[Tensor | None, Tensor]"]


def _in_one_order(columns: Sequence[Column], grads: Sequence[Tensor]) -> tuple[list[list[Tensor | None]], Clones]:
    """Lists whose tensors lie in memory in one order at each position.

    Tensors that do not are replaced by clones that lie like their parameter, by whose memory random words are drawn; a
    parameter with gaps is cloned as well. Pairs of originals and clones are returned, to be kept until the launch; for
    gradients, which nothing writes, without the original.
    """
    ordered, clones = [list(column) for column in columns], []
    for position, tensors in enumerate(zip(*columns, strict=True)):
        if is_one_order([tensor for tensor in tensors if tensor is not None]):
            continue
        param = tensors[0]
        assert param is not None, "the first column holds the parameters"
        strides = torch.empty_like(param).stride()  # those of the parameter, unless it has gaps
        for column in ordered:
            original = column[position]
            if original is not None and original.stride() != strides:
                clone = torch.empty_strided(original.shape, strides, dtype=original.dtype, device=original.device)
                column[position] = clone.copy_(original.detach())
                clones.append((None if original is grads[position] else original, clone))
    return ordered, clones


def write_back(clones: Clones) -> None:
    """Brings what was written into clones to where it belongs."""
    for original, clone in clones:
        if original is not None:
            original.detach().copy_(clone)


def is_one_order(tensors: Sequence[Tensor]) -> bool:
    """Whether the elements of all tensors lie in memory in the same order."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    stride = tensors[0].stride()
    return is_dense(tensors[0]) and all(tensor.stride() == stride for tensor in tensors)


class Prepared:
    """Lists that a step works on again and again, and the launches made for them.

    Args:
        params: float32, on one device.
        columns: Further lists that the step writes, in the memory order of ``params``.
        copies: Copies to write, one entry for each parameter.
        others: Further tensors whose addresses the launches hold.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        columns: Sequence[Column],
        copies: Sequence[WeightCopy | None],
        others: Sequence[Tensor] = (),
    ) -> None:
        _check_lists(params, columns)
        self.params, self._columns = params, columns
        self._copies = copies
        plain = [None if c is None or c.format not in PLAIN_COPIES else c for c in self._copies]
        self._copy_values = [None if c is None else c.values for c in plain]
        self.copy_codes = [0 if c is None else PLAIN_COPIES[c.format] for c in plain]
        self._scaled = [i for i, c in enumerate(self._copies) if c is not None and c.format not in PLAIN_COPIES]
        lists = (params, *columns, self._copy_values, others)
        self._fixed = [tensor for column in lists for tensor in column if tensor is not None]
        self._known: dict[Hashable, list[Group]] = {}

    def launches(
        self, grads: Sequence[Tensor], pattern: Hashable, build: Callable[[list[list[Tensor | None]]], list[Group]]
    ) -> tuple[list[Group], Clones]:
        """The launches for these gradients, built by ``build(columns)`` unless addresses and ``pattern`` are known.

        Nothing that is remembered holds a gradient.

        Returns:
            The launches, and what :func:`write_back` needs after them.

        Raises:
            TypeError: If a gradient has another dtype than float32, bfloat16 and float16.
            ValueError: If there is not one gradient for each parameter.
        """
        # few calls for each tensor: this is what a step costs the host
        strides = [None if grad.is_contiguous() else grad.stride() for grad in grads]
        addresses = tuple(map(Tensor.data_ptr, self._fixed)), tuple(map(Tensor.data_ptr, grads))
        key = (addresses, tuple(map(_DTYPE, grads)), tuple(strides), pattern)
        known = self._known.get(key)
        if known is not None:
            return known, []
        _check_grads(self.params, grads)
        columns, clones = _in_one_order((self.params, grads, *self._columns, self._copy_values), grads)
        groups = build(columns)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        if not clones:
            self._known[key] = groups
        return groups, clones

    def write_scaled(self, found_inf: Tensor | None) -> None:
        """Writes the copies whose scales follow from whole rows or tensors."""
        write_scaled(self.params, self._copies, self._scaled, found_inf)


def _check_lists(params: Sequence[Tensor], columns: Sequence[Column]) -> None:
    for param, *state in zip(params, *columns, strict=True):
        for place, tensor in enumerate((param, *state)):
            if tensor is None:
                continue
            # only a second moment may be narrow
            allowed = tuple(CODES) if place == 2 else (torch.float32,)
            if tensor.shape != param.shape or tensor.device != param.device or tensor.dtype not in allowed:
                raise ValueError(
                    f"Passed a tensor {list(tensor.shape)} of {tensor.dtype} on {tensor.device} to the step of a"
                    f" parameter {list(param.shape)} on {param.device}. Shapes and devices must be equal, dtypes one of"
                    f" {[str(dtype) for dtype in allowed]}."
                )


def _check_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    if len(grads) != len(params):
        raise ValueError(f"Passed {len(grads)} gradients for {len(params)} parameters.")
    for param, grad in zip(params, grads, strict=True):
        if grad.dtype not in CODES:
            raise TypeError(f"Passed a gradient of {grad.dtype}. Gradients must be float32, bfloat16 or float16.")
        if grad.shape != param.shape or grad.device != param.device:
            raise ValueError(
                f"Passed a gradient {list(grad.shape)} on {grad.device} for a parameter {list(param.shape)} on"
                f" {param.device}."
            )


def check_found_inf(found_inf: Tensor | None, params: Sequence[Tensor]) -> None:
    """Raises ValueError unless ``found_inf`` is where the parameters are."""
    if found_inf is not None and found_inf.device != params[0].device:
        raise ValueError(
            f"Passed `found_inf` on {found_inf.device}. It must be on {params[0].device}, where the parameters are."
        )


def write_scaled(
    params: Sequence[Tensor],
    copies: Sequence[WeightCopy | None],
    positions: Sequence[int],
    found_inf: Tensor | None = None,
) -> None:
    """Writes the int8 and e4m3 copies at some positions of the lists; nothing where ``found_inf`` is set."""
    pairs = [(_in_order_of(copy, params[i]), copy) for i in positions if (copy := copies[i]) and params[i].numel()]
    if pairs:
        write_scaled_copies([param for param, _ in pairs], [copy for _, copy in pairs], found_inf)


def _in_order_of(copy: WeightCopy, param: Tensor) -> Tensor:
    """A weight whose elements lie in memory as those of its copy do."""
    values = copy.values
    if copy.format == "e4m3" and values.stride() == param.stride() and is_dense(values):
        return param.detach()
    if not values.is_contiguous():
        raise ValueError(
            f"Passed an {copy.format} copy with strides {values.stride()} for a parameter with strides"
            f" {param.stride()}. int8 copies must be contiguous, e4m3 copies that or laid out like the parameter."
        )
    return param.detach().contiguous()
