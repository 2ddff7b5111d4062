"""Keeps low-precision gradients aside, so that ``.grad`` never holds anything but what the user would find there.

A layer that runs on a low-precision copy of its weight gets its gradient in that precision. Casting it up for ``.grad``
costs a pass over memory that the kernels of a step do not need. What lives here: the table that holds such gradients
between the backward and the step, and the node of the graph that fills it. What does not: which layers run on copies
(``fast_path``) and what a step does with gradients (``gradients``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

_MARK = "autoprec"


class GradientTable:
    """Gradients of one window that have not become anybody's ``.grad``.

    Attributes:
        held: Gradients in the precision of their layer, by ``id`` of the parameter.
        shared: ``id`` of parameters that get further gradients in this backward: autograd adds them up in its order.
    """

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}
        self.shared: set[int] = set()
        self._parameters: dict[int, nn.Parameter] = {}
        self._graph_task = -1

    def hand_out(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns tensors with given values whose gradients go into the table instead of into ``.grad``.

        Any other use of the parameters, ``torch.autograd.grad`` for them and graphs of the backward work as always.

        Args:
            parameters: Leaves that require a gradient.
            values: Their values in the precision of their layers. The storage is shared, not copied.
        """
        out: tuple[Tensor, ...] = _HandOut.apply(self, parameters, values, *parameters)  # type: ignore[no-untyped-call]
        return out

    def open(self, loss: Tensor) -> AbstractContextManager[Any]:
        """Returns a context for the one backward whose gradients the table takes.

        Args:
            loss: What it starts from.
        """
        # without a gradient: the backward will say so
        return loss.register_hook(self._note_graph_task) if loss.requires_grad else nullcontext()

    def _note_graph_task(self, grad: Tensor) -> None:
        self._graph_task = torch._C._current_graph_task_id()

    def receive(self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Takes what arrives for some parameters; returns the gradients that go on to ``.grad``."""
        # recomputations and `torch.autograd.grad` run backwards of their own, in which somebody waits for the result
        if torch.is_grad_enabled() or torch._C._current_graph_task_id() != self._graph_task:
            return list(grads)
        passed: list[Tensor | None] = [None] * len(grads)
        held, shared, known = self.held, self.shared, self._parameters
        for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            if grad is None:
                continue
            key = id(parameter)
            if parameter.grad is not None or key in held or key in shared or is_observed(parameter):
                passed[index] = grad
            else:
                held[key], known[key] = grad, parameter
        return passed

    def merge(self) -> None:
        """Adds gradients to the ``.grad`` of parameters that got one from elsewhere (other uses, micro-batches)."""
        for key in [key for key, parameter in self._parameters.items() if parameter.grad is not None]:
            self._add(self._parameters.pop(key), self.held.pop(key))

    def materialize(self) -> None:
        """Turns everything into ``.grad``, as it would have been without the table."""
        for key, parameter in self._parameters.items():
            self._add(parameter, self.held[key])
        self.clear()

    @staticmethod
    def _add(parameter: nn.Parameter, grad: Tensor) -> None:
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(grad)
            elif parameter.grad.is_sparse or parameter.grad.requires_grad:
                parameter.grad = parameter.grad + grad.float()
            else:
                parameter.grad.add_(grad)

    def clear(self) -> None:
        """Lets go of all gradients."""
        self.held.clear()
        self.shared.clear()
        self._parameters.clear()


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: GradientTable, parameters: Sequence[nn.Parameter], values: Sequence[Tensor], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.table, ctx.parameters = table, parameters
        return tuple([value.detach() for value in values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *ctx.table.receive(ctx.parameters, grads)


def uses_of(loss: Tensor) -> Counter[int]:
    """How many gradients a backward adds up for each leaf, by ``id``; what is recomputed is not seen."""
    uses: Counter[int] = Counter()
    pending = [loss.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for following, _ in () if node is None else node.next_functions:
            uses[id(getattr(following, "variable", None))] += 1
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return uses


def is_observed(parameter: Tensor) -> bool:
    """Whether a hook waits for the gradient of a leaf."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_node_kept(parameter: Tensor) -> bool:
    """Whether somebody keeps the graph node that adds up the gradient of a leaf: its hooks cannot be listed.

    Called while no graph is under way. A node that nobody keeps is another one each time, and without hooks.
    """
    _metadata_of(parameter)[_MARK] = True
    return _metadata_of(parameter).pop(_MARK, False)


def _metadata_of(parameter: Tensor) -> dict[str, bool]:
    node: Any = get_gradient_edge(parameter).node
    metadata: dict[str, bool] = node.metadata
    return metadata
