"""Takes an optimizer's step with one kernel for each of its parameter groups.

The kernel stands in for the loop inside the optimizer's own ``step``, so hooks, schedules, the profiler and groups that
are added in mid-run work as always, and the moments stay in the optimizer's own ``state`` under torch's own keys. What
lives here: which optimizers and groups a kernel can take, and calling it. What does not: gradients, clipping, skipping
(``stepping``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from autoprec.moments import LEFT_TO_TORCH, NarrowMoments
from autoprec.ops import WeightCopy, has_kernel, prepare_adam, prepare_sgd
from autoprec.ops.prepared import AdamStep, SgdStep

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_PLAIN = {Tensor, nn.Parameter}
_SHAPE = operator.attrgetter("shape")

Options = dict[str, Any]


class _Prepared(NamedTuple):
    """What a kernel is prepared for: some parameters of a group, their state and their copies."""

    keys: list[int]
    layouts: list[Any]
    parameters: list[Tensor]
    states: list[Tensor]
    copies: dict[int, WeightCopy]
    step: AdamStep | SgdStep


class _Part(NamedTuple):
    """The share of one group in a step that is about to be taken."""

    members: list[Tensor]
    grads: list[Tensor]
    prepared: _Prepared | None  # not before there is a state


class FusedStep:
    """Stands in for the update of one optimizer.

    Args:
        optimizer: One that :func:`is_fusible` accepts.

    Attributes:
        copies: Low-precision copies of weights to write in the same pass, by ``id`` of the parameter.
        moments: What keeps second moments in 16 bits, ``None`` where they are float32.
        taken: Steps that the kernels took.
        updated: ``id`` of the parameters that they updated in the latest call of ``optimizer.step``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.copies: dict[int, WeightCopy] = {}
        self.moments: NarrowMoments | None = None
        self.taken = 0
        self.updated: list[int] = []
        self._optimizer = optimizer
        self._is_adam = isinstance(optimizer, Adam)
        self._prepared: dict[int, _Prepared] = {}
        self._plan: dict[int, _Part] | None = None
        self._factor = 1.0

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Surrounds a call of ``optimizer.step``; a plan made in its closure is carried out instead of torch's loop."""
        optimizer = self._optimizer
        own = optimizer._init_group  # type: ignore[attr-defined]

        def collect(group: Options, *lists: list[Tensor]) -> bool:
            if self._plan is not None and self._take(group, own, len(lists)):
                return False  # torch's loop finds nothing to do
            is_special: bool = own(group, *lists)
            return is_special

        optimizer._init_group = collect  # type: ignore[attr-defined]
        self.updated = []
        if self.moments is not None:
            self.moments.has_stepped = False
        try:
            yield
            self.taken += bool(self.updated)
        finally:
            del optimizer._init_group  # type: ignore[attr-defined]
            if self.moments is not None:
                self.moments.guard()
            self._plan = None

    def plan(self, parameters: Sequence[Tensor], grads: Sequence[Tensor], are_in_grad: bool = False) -> bool:
        """Gets ready to take a step.

        Args:
            parameters: The optimizer's parameters that have a gradient.
            grads: Their gradients.
            are_in_grad: Whether these are what torch finds in ``.grad``. Then it can make moments of Adam that are not
                there yet, for the kernel to take the first step as well.

        Returns:
            Whether the kernels can take it. Else torch's own loop runs: wherever a tensor is not a plain one, and in
            the first step of SGD with momentum, which takes over the gradients as its moments.
        """
        self._plan = None
        by_key = dict(zip(map(id, parameters), grads, strict=True))
        kinds = {(type(grad), grad.dtype, grad.layout) for grad in grads}  # all of a kind, most of the time
        if not all(cls in _PLAIN and dtype in _DTYPES and layout is torch.strided for cls, dtype, layout in kinds):
            return False
        plan: dict[int, _Part] = {}
        groups = self._optimizer.param_groups
        if len(self._prepared) > len(groups):
            self._prepared.clear()
        for index, group in enumerate(groups):
            members = [parameter for parameter in group["params"] if id(parameter) in by_key]
            prepared = self._prepare(index, group, members)
            if prepared is None and not (are_in_grad and self._is_new(group, members)):
                return False
            plan[id(group)] = _Part(members, [by_key[id(member)] for member in members], prepared)
        self._plan = plan
        return True

    def arm(self, factor: float) -> None:
        """Sets what the gradients of the plan are multiplied by."""
        self._factor = factor

    def parameters(self) -> list[Tensor]:
        """All parameters of the optimizer."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _prepare(self, index: int, group: Options, members: list[Tensor]) -> _Prepared | None:
        if any(group.get(name) for name in LEFT_TO_TORCH):
            return None
        states = self._states(group, members)
        if states is None:
            return None
        keys, layouts = list(map(id, members)), layouts_of(members)
        known = self._prepared.get(index)
        is_same = known is not None and known.copies is self.copies and known.keys == keys
        if known is not None and is_same and known.layouts == layouts and _are(known.states, states):
            return known
        if not _fit(members, states, torch.float32 if self.moments is None else self.moments.dtype):
            return None
        step = self._prepare_step(members, states, [self.copies.get(key) for key in keys])
        self._prepared[index] = _Prepared(keys, layouts, members, states, self.copies, step)
        return self._prepared[index]

    def _states(self, group: Options, members: Sequence[Tensor]) -> list[Tensor] | None:
        """The state of some parameters, one kind after the other; ``None`` if torch has not made it yet."""
        names = ("exp_avg", "exp_avg_sq", "step") if self._is_adam else ("momentum_buffer",) * bool(group["momentum"])
        state = self._optimizer.state
        rows = [state.get(member, {}) for member in members]
        found = [row.get(name) for name in names for row in rows]
        return None if any(each is None for each in found) else found

    def _is_new(self, group: Options, members: Sequence[Tensor]) -> bool:
        """Whether all that the kernel needs for a group is moments that torch has yet to make."""
        if not self._is_adam or any(group.get(name) for name in LEFT_TO_TORCH):
            return False
        state = self._optimizer.state
        return _fit(members, (), torch.float32) and not all(state.get(member) for member in members)

    def _made(self, group: Options, members: list[Tensor], own: Callable[..., bool], lists: int) -> _Prepared | None:
        """Has torch make the moments that are missing."""
        own(group, *([] for _ in range(lists)))
        return self._prepare(self._index(group), group, members)

    def _index(self, group: Options) -> int:
        return next(index for index, each in enumerate(self._optimizer.param_groups) if each is group)

    def _prepare_step(
        self, members: list[Tensor], states: list[Tensor], copies: list[WeightCopy | None]
    ) -> AdamStep | SgdStep:
        count = len(members)
        if self._is_adam:
            return prepare_adam(members, states[:count], states[count : 2 * count], states[2 * count :], copies)
        return prepare_sgd(members, states or None, copies)

    def _take(self, group: Options, own: Callable[..., bool], lists: int) -> bool:
        """Takes the step of a group; returns whether it did, and if not, it is left to torch."""
        assert self._plan is not None
        members, grads, prepared = self._plan[id(group)]
        if not grads:
            return True
        prepared = prepared or self._made(group, members, own, lists)
        if prepared is None:
            return False
        options = _adam_options(group) if self._is_adam else _sgd_options(group)
        if self.moments is not None:
            prepared = self._narrowed(self.moments, group, prepared)
            options.update(self.moments.words(group, prepared.parameters, prepared.states))
        prepared.step(grads, grad_factor=self._factor, **options)
        torch.autograd.graph.increment_version(prepared.parameters)
        self.updated += prepared.keys
        return True

    def _narrowed(self, moments: NarrowMoments, group: Options, prepared: _Prepared) -> _Prepared:
        if not moments.narrow(group, prepared.parameters, prepared.states):
            return prepared
        again = self._prepare(self._index(group), group, prepared.parameters)
        assert again is not None, "narrow moments lie as the wide ones did"
        return again


def is_fusible(optimizer: Any) -> bool:
    """Whether a kernel may stand in for an optimizer's update: exactly torch's SGD, Adam or AdamW, as torch made it."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return False
    if "_init_group" in optimizer.__dict__ or not has_torchs_step(optimizer):
        return False  # somebody replaced it
    devices = {parameter.device.type for group in optimizer.param_groups for parameter in group["params"]}
    return len(devices) == 1 and has_kernel("prepare_adam", devices.pop())


class TorchsStep:
    """Tells in every step whether an optimizer's ``step`` is torch's own code; looks again where it was replaced.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._function: Any = None
        self._answer = False

    def __call__(self) -> bool:
        """Returns the answer, as :func:`has_torchs_step`."""
        step = self._optimizer.step
        function = getattr(step, "__func__", step)
        if function is not self._function:
            self._function, self._answer = function, has_torchs_step(self._optimizer)
        return self._answer


def has_torchs_step(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``step`` is torch's own code, wrappers included (profiler, schedules)."""
    function = getattr(optimizer.step, "__func__", optimizer.step)
    while isinstance(function, FunctionType):
        if not function.__globals__["__name__"].startswith("torch."):
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


def _fit(members: Sequence[Tensor], states: Sequence[Tensor], narrow: torch.dtype) -> bool:
    """Whether everything is float32, second moments maybe narrow, and lies as torch made it."""
    if not all(type(member) in _PLAIN and member.dtype is torch.float32 and is_one_block(member) for member in members):
        return False
    for index, state in enumerate(states):
        member = members[index % len(members)]
        is_counter = state.numel() == 1 and state.ndim == 0 and state.is_cpu
        is_wide = state.dtype is torch.float32 or (state.dtype is narrow and index // len(members) == 1)
        if not is_wide or not (is_counter or _lies_like(state, member)):
            return False
    return True


def is_one_block(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, contiguous or with channels last."""
    return tensor.layout is torch.strided and (
        tensor.is_contiguous()
        or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        or (tensor.ndim == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d))
    )


def layouts_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Where tensors are in memory and how they lie there: what is assigned to ``.data`` may change either alone."""
    return [*map(Tensor.data_ptr, tensors), *map(Tensor.stride, tensors), *map(_SHAPE, tensors)]


def _lies_like(state: Tensor, member: Tensor) -> bool:
    return (
        type(state) in _PLAIN
        and state.layout is torch.strided
        and state.device == member.device
        and state.shape == member.shape
        and state.stride() == member.stride()
    )


def _are(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _adam_options(group: Mapping[str, Any]) -> Options:
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"],
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
        "decoupled": group["decoupled_weight_decay"],
        "maximize": group["maximize"],
    }


def _sgd_options(group: Mapping[str, Any]) -> Options:
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return {name: group[name] for name in names}
