"""What a prepared step is, whatever implementation runs it: the options of a call, and the classes to derive from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from autoprec.ops.reference_steps import WeightCopy
from autoprec.ops.staleness import first_different


class AdamOptions(NamedTuple):
    """Options of one step of Adam or AdamW; see :func:`autoprec.ops.fused_adam_`."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    grad_factor: float | Tensor
    found_inf: Tensor | None
    seed: int
    offset: int


class SgdOptions(NamedTuple):
    """Options of one step of SGD; see :func:`autoprec.ops.fused_sgd_`."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    is_first: bool
    grad_factor: float | Tensor
    found_inf: Tensor | None


class PreparedStep(ABC):
    """A step on lists that stay the same.

    A step trusts that its copies are what the weights give. Nothing tells about a write through ``param.data``, so
    whoever reads the copies asks :meth:`stale` now and then, and lets :meth:`refresh` write them anew.

    Args:
        params: Parameters.
        copies: Copies that the step writes, one entry for each parameter; ``None`` for none at all.

    Example:
        >>> import torch
        >>> from autoprec import ops
        >>> weight = torch.randn(16, 8)
        >>> copy = ops.new_copy(weight, "bf16")
        >>> step = ops.prepare_sgd([weight], copies=[copy])
        >>> step.refresh()
        >>> _ = weight.data.clamp_(-0.1, 0.1)
        >>> step.stale(samples=4, seed=0)
        0
    """

    def __init__(self, params: Sequence[Tensor], copies: Sequence[WeightCopy | None] | None) -> None:
        self.params = params
        self.copies: Sequence[WeightCopy | None] = [None] * len(params) if copies is None else copies

    def refresh(self) -> None:
        """Writes the copies of weights as they are, for weights that something else than this step has written."""
        self._write(self.params, self.copies)

    def stale(self, samples: int, seed: int) -> int | None:
        """Looks for a copy that is no longer what its weight gives.

        bfloat16 and float16 entries are compared bit for bit, any NaN like any other. int8 and e4m3 entries are
        compared under the scale that the copy has, so that a change of less than a step of the grid is not seen;
        neither is any change in an int8 row, or an e4m3 tensor, whose scale is not finite. Every implementation looks
        at the same entries.

        Args:
            samples: Entries of each weight to compare, drawn anew for each seed from all of them. -1 makes every copy
                again and compares all of it, scales and transposed values included, which takes memory for one more
                copy of the largest weight and the time of a refresh.
            seed: 64 bits, another one for every call. Torch's generators are neither read nor advanced.

        Returns:
            Position in the list of the first parameter that differs, ``None`` if all agree. A GPU is waited for.

        Raises:
            ValueError: If ``samples`` is neither positive nor -1.
        """
        if samples == -1:
            return first_different(self.params, self.copies, self._write)
        if samples < 1:
            raise ValueError(
                f"Passed `stale(samples={samples})`. `samples` must be positive, or -1 to compare whole copies."
            )
        return self._first_stale(samples, seed)

    @staticmethod
    @abstractmethod
    def _write(params: Sequence[Tensor], copies: Sequence[WeightCopy | None]) -> None:
        """Writes copies of weights as they are."""

    @abstractmethod
    def _first_stale(self, samples: int, seed: int) -> int | None:
        """:meth:`stale` for a positive number of samples."""


class AdamStep(PreparedStep):
    """What :func:`autoprec.ops.prepare_adam` returns."""

    def __call__(
        self,
        grads: Sequence[Tensor],
        *,
        lr: float | Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        maximize: bool = False,
        grad_factor: float | Tensor = 1.0,
        found_inf: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        """Takes the step; arguments as for :func:`autoprec.ops.fused_adam_`."""
        self._take(
            grads,
            AdamOptions(lr, beta1, beta2, eps, weight_decay, decoupled, maximize, grad_factor, found_inf, seed, offset),
        )

    @abstractmethod
    def _take(self, grads: Sequence[Tensor], options: AdamOptions) -> None: ...


class SgdStep(PreparedStep):
    """What :func:`autoprec.ops.prepare_sgd` returns."""

    def __call__(
        self,
        grads: Sequence[Tensor],
        *,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        is_first: bool = False,
        grad_factor: float | Tensor = 1.0,
        found_inf: Tensor | None = None,
    ) -> None:
        """Takes the step; arguments as for :func:`autoprec.ops.fused_sgd_`."""
        self._take(
            grads,
            SgdOptions(lr, momentum, dampening, weight_decay, nesterov, maximize, is_first, grad_factor, found_inf),
        )

    @abstractmethod
    def _take(self, grads: Sequence[Tensor], options: SgdOptions) -> None: ...
