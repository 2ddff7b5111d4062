"""What a copy of a run consists of: weights, buffers, and the state of optimizers and schedules.

What lives here: reading it as one nest of containers, writing such a nest back in place, and finding values that are
not finite. What does not: where copies are kept (``snapshots``), and when one is taken or used (``rollback``).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from autoprec.ops import grad_stats

Nest = Any
Labelled = tuple[str, Tensor]

_PRIMITIVES = (type(None), bool, int, float, complex, str, bytes)
_STATISTICS = ("running_mean", "running_var")
_ONE_PASS = {torch.float32, torch.bfloat16, torch.float16}
_PLAIN = {Tensor, nn.Parameter}


class LiveState:
    """The state of a run, wherever it is at the moment.

    Args:
        root: The model.
        optimizers: Its optimizers.
        schedules: The schedules that count applied steps; others do not go back.
        fixed: Indices of optimizers whose learning rate and other settings do not go back, because a schedule moves
            them that does not.
    """

    def __init__(
        self, root: nn.Module, optimizers: Sequence[Any], schedules: Sequence[Any] = (), fixed: Sequence[int] = ()
    ) -> None:
        self._root = root
        self._optimizers = list(optimizers)
        self._schedules = list(schedules)
        self._fixed = frozenset(fixed)

    @property
    def has_lazy(self) -> bool:
        """Whether a parameter or buffer waits for its first forward."""
        return any(is_lazy(tensor) for _, tensor in self._weights()) or any(is_lazy(b) for _, b in self._buffers())

    def gather(self) -> Nest:
        """Returns everything, tensors as they are: nothing is copied."""
        return {
            "weights": {name: weight for name, weight in self._weights() if not is_lazy(weight)},
            "buffers": {name: buffer for name, buffer in self._buffers() if not is_lazy(buffer)},
            "optimizers": [self._gather(index, each) for index, each in enumerate(self._optimizers)],
            "schedules": [each.state_dict() for each in self._schedules],
        }

    @torch.no_grad()
    def write(self, saved: Nest, read: Callable[[Any], Tensor]) -> None:
        """Writes back what a copy holds: in place wherever a tensor is still of the same kind. Gradients are emptied.

        Args:
            saved: What ``gather`` returned, with anything in the place of tensors.
            read: Turns what is in the place of a tensor into the tensor.
        """
        writer = _Writer(read)
        weights = dict(self._weights())
        for name, value in saved["weights"].items():
            if name in weights and not is_lazy(weights[name]):
                writer.fill(value, weights[name])
        for name, value in saved["buffers"].items():
            self._write_buffer(name, value, writer)
        for index, (optimizer, value) in enumerate(zip(self._optimizers, saved["optimizers"], strict=True)):
            self._write_optimizer(index, optimizer, value, writer)
        for _, weight in self._weights():
            weight.grad = None  # of what is undone; under manual optimization nobody may clear it
        for schedule, value in zip(self._schedules, saved["schedules"], strict=True):
            schedule.load_state_dict(writer.value(value, None))

    def nonfinite(self) -> list[str]:
        """Names of the weights, running statistics and moments with inf or NaN, and of other buffers with NaN.

        Buffers that are no statistics may hold inf on purpose, as attention masks do.
        """
        weights = [(name, weight.detach()) for name, weight in self._weights() if _is_readable(weight)]
        return [*_with_nonfinite(weights), *self._bad_buffers(), *_with_nonfinite(self._moments())]

    # ---- reading ----

    def _weights(self) -> Iterator[Labelled]:
        known = set()
        for name, weight in self._root.named_parameters():
            known.add(id(weight))
            yield name, weight
        for index, optimizer in enumerate(self._optimizers):
            for place, parameter in enumerate(_parameters_of(optimizer)):
                if id(parameter) not in known:
                    yield f"parameter {place} of optimizer {index}", parameter

    def _buffers(self) -> Iterator[Labelled]:
        for module_name, module in self._root.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{module_name}.{name}" if module_name else name, buffer

    def _gather(self, index: int, optimizer: Any) -> Nest:
        if not _has_torchs_state(optimizer):
            return optimizer.state_dict()
        groups = [] if index in self._fixed else [_without_parameters(group) for group in optimizer.param_groups]
        return {"rows": [[_Key(key), row] for key, row in optimizer.state.items()], "groups": groups}

    # ---- writing ----

    def _write_buffer(self, name: str, value: Nest, writer: _Writer) -> None:
        module_name, _, own_name = name.rpartition(".")
        try:
            table = self._root.get_submodule(module_name)._buffers
        except AttributeError:  # its module has left the model
            return
        current = table.get(own_name)
        if current is None or not writer.fill(value, current):
            table[own_name] = writer.value(value, None)

    def _write_optimizer(self, index: int, optimizer: Any, saved: Nest, writer: _Writer) -> None:
        if not _has_torchs_state(optimizer):
            kept = [_without_parameters(group) for group in optimizer.param_groups] if index in self._fixed else []
            optimizer.load_state_dict(writer.value(saved, None))
            for group, values in zip(optimizer.param_groups, kept, strict=False):
                group.update(values)
            return
        rows = {row_key.value: row for row_key, row in saved["rows"]}
        for key in [key for key in optimizer.state if key not in rows]:
            del optimizer.state[key]
        for key, row in rows.items():
            optimizer.state[key] = writer.value(row, optimizer.state.get(key))
        # groups that joined since then stay as they are
        for group, values in zip(optimizer.param_groups, saved["groups"], strict=False):
            for name, value in values.items():
                group[name] = writer.value(value, group.get(name))

    # ---- what is not finite ----

    def _bad_buffers(self) -> list[str]:
        modules = dict(self._root.named_modules())
        statistics: list[Labelled] = []
        others: list[Labelled] = []
        for name, buffer in self._buffers():
            module_name, _, own_name = name.rpartition(".")
            if _is_readable(buffer):
                is_statistic = isinstance(modules[module_name], _NormBase) or own_name in _STATISTICS
                (statistics if is_statistic else others).append((name, buffer))
        with_nan = [name for name, buffer in others if bool(torch.isnan(_entries(buffer)).any())]
        return _with_nonfinite(statistics) + with_nan

    def _moments(self) -> list[Labelled]:
        """State as large as its parameter; smaller values may be sentinels."""
        names = {id(parameter): name for name, parameter in self._weights()}
        moments: list[Labelled] = []
        for optimizer in self._optimizers:
            for parameter, row in getattr(optimizer, "state", {}).items():
                if isinstance(row, dict) and isinstance(parameter, Tensor):
                    moments += [
                        (f"{key} of {names.get(id(parameter), 'a parameter')}", value)
                        for key, value in row.items()
                        if isinstance(value, Tensor) and value.shape == parameter.shape and _is_readable(value)
                    ]
        return moments


class _Key:
    """A key of an optimizer's state, which is a parameter most of the time and must not be copied."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _Key:
        return self


def frozen(nest: Nest, put: Callable[[Tensor], Any]) -> Nest:
    """Copies a nest of containers.

    Args:
        nest: Dicts, lists, tuples and deques of tensors and anything else.
        put: Called with each tensor; what it returns stands in its place.
    """
    if isinstance(nest, Tensor):
        return put(nest)
    if isinstance(nest, _PRIMITIVES):
        return nest
    if isinstance(nest, dict):
        return {key: frozen(value, put) for key, value in nest.items()}
    if isinstance(nest, deque):
        return deque((frozen(value, put) for value in nest), nest.maxlen)
    if isinstance(nest, (list, tuple)):
        values = [frozen(value, put) for value in nest]
        if isinstance(nest, list):
            return values
        return type(nest)(*values) if hasattr(nest, "_fields") else tuple(values)
    return _copied(nest)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a class of the user's may refuse in any way; then it is not a value that a step changes
        return value


class _Writer:
    """Turns a frozen nest back into values, in place where that is possible."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        self._read = read
        self._made: dict[int, Tensor] = {}
        self._written: set[int] = set()

    def value(self, saved: Nest, live: Any) -> Any:
        """Returns the value of a frozen nest; containers and tensors of ``live`` are kept where they fit."""
        if isinstance(saved, Place | Held):
            if id(saved) not in self._made:
                is_filled = isinstance(live, Tensor) and self.fill(saved, live)
                self._made[id(saved)] = live if is_filled else self._read(saved)
            return self._made[id(saved)]
        if isinstance(saved, dict):
            return self._dict(saved, live)
        if isinstance(saved, (list, deque)):
            return self._list(saved, live)
        if isinstance(saved, tuple):
            olds = live if isinstance(live, tuple) and len(live) == len(saved) else (None,) * len(saved)
            values = [self.value(value, old) for value, old in zip(saved, olds, strict=True)]
            return type(saved)(*values) if hasattr(saved, "_fields") else tuple(values)
        return saved if isinstance(saved, _PRIMITIVES) else _copied(saved)

    def fill(self, saved: Nest, live: Tensor) -> bool:
        """Writes a tensor into another; returns whether it could."""
        value = self._read(saved)
        is_alike = (value.shape, value.dtype, value.layout) == (live.shape, live.dtype, live.layout)
        if not is_alike or live.layout is not torch.strided or live.is_inference():
            return False
        if type(live) in _PLAIN:
            if _overlaps(live):
                return False
            if live.data_ptr() in self._written:  # two values share memory that they did not share before
                return torch.equal(live.detach().cpu(), value.cpu())
            self._written.add(live.data_ptr())
        live.copy_(value)
        self._made[id(saved)] = live
        return True

    def _dict(self, saved: dict[Any, Nest], live: Any) -> Any:
        old = live if isinstance(live, MutableMapping) else {}
        values = {key: self.value(value, old.get(key)) for key, value in saved.items()}
        if isinstance(live, MutableMapping):
            live.clear()
            live.update(values)
            return live
        return values

    def _list(self, saved: list[Nest] | deque[Nest], live: Any) -> Any:
        is_kept = type(live) is type(saved)
        olds = list(live) if is_kept else []
        olds += [None] * (len(saved) - len(olds))
        values = [self.value(value, old) for value, old in zip(saved, olds, strict=False)]
        if is_kept:
            live.clear()
            live.extend(values)
            return live
        return values if isinstance(saved, list) else deque(values, saved.maxlen)


class Place:
    """Where the bytes of a dense tensor are in a block of memory.

    Args:
        tensor: The tensor.
        offset: First byte.
    """

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self.offset = offset
        self.dtype, self.shape, self.device = tensor.dtype, tensor.shape, tensor.device
        self.stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()

    def view(self, block: Tensor) -> Tensor:
        """The tensor in a block."""
        typed = block.view(self.dtype)
        return torch.as_strided(typed, self.shape, self.stride, self.offset // self.dtype.itemsize)


class Held:
    """A tensor that has no place in a block: sparse, nested, empty, or of a class of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.is_meta or is_lazy(tensor) else tensor.detach().clone()


def fits_block(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor can be copied into a block of memory, and back."""
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized
    is_known = is_plain and not (tensor.is_meta or tensor.is_nested or tensor.is_inference())
    return is_known and tensor.numel() > 0 and not _overlaps(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_dense(tensor: Tensor) -> bool:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()


def _is_readable(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    is_there = not (is_lazy(tensor) or tensor.is_meta or tensor.is_nested)
    return is_number and is_there and tensor.dtype.itemsize > 1


def _with_nonfinite(labelled: Sequence[Labelled]) -> list[str]:
    """Names of tensors that hold inf or NaN, in one pass over memory where there is a kernel for it."""
    by_device: dict[torch.device, list[Labelled]] = {}
    bad = []
    for name, tensor in labelled:
        if type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.dtype in _ONE_PASS:
            by_device.setdefault(tensor.device, []).append((name, tensor))
        elif not bool(torch.isfinite(_entries(tensor)).all()):
            bad.append(name)
    for group in by_device.values():
        counts = grad_stats([tensor.detach() for _, tensor in group]).nonfinite_count.tolist()
        bad += [name for (name, _), count in zip(group, counts, strict=True) if count]
    return bad


def _entries(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.sparse_coo:
        return tensor.detach()._values()
    return tensor.detach() if tensor.layout is torch.strided else tensor.detach().values()


def _parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def _without_parameters(group: Any) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _has_torchs_state(optimizer: Any) -> bool:
    """Whether all that an optimizer keeps is where torch's own keep it."""
    cls = type(optimizer)
    is_own = getattr(cls, "state_dict", None) is Optimizer.state_dict
    return is_own and getattr(cls, "load_state_dict", None) is Optimizer.load_state_dict
