"""What a prepared step is, whatever implementation runs it: the options of a call, and the classes to derive from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from autoprec.ops.reference_steps import WeightCopy


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

    Args:
        params: Parameters.
        copies: Copies that the step writes, one entry for each parameter; ``None`` for none at all.
    """

    def __init__(self, params: Sequence[Tensor], copies: Sequence[WeightCopy | None] | None) -> None:
        self.params = params
        self.copies: Sequence[WeightCopy | None] = [None] * len(params) if copies is None else copies

    @staticmethod
    @abstractmethod
    def _write(params: Sequence[Tensor], copies: Sequence[WeightCopy | None]) -> None:
        """Writes copies of weights as they are."""

    def refresh(self) -> None:
        """Writes the copies of weights as they are, for weights that something else than this step has written."""
        self._write(self.params, self.copies)


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
