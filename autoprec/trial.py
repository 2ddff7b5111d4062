"""Keeps the first window under a new map alive: operations that have no low-precision form run in float32 instead.

A mask constant that does not fit into fp16, an ``index_put`` that wants equal dtypes, an FFT without a half version:
each raises in the middle of a user's forward. During a trial such a call is repeated on float32 copies, and the units
whose outputs it read are named, so that the guard can raise them before the next window.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from autoprec.memory_errors import is_out_of_memory
from autoprec.replaced import Replaced

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.complex32: torch.complex64}
_MAX_NODES = 4096


class Trial(TorchFunctionMode):
    """Repeats failing low-precision calls in float32 and remembers which units fed them.

    Attributes:
        failures: Unit name to the reason, in order of appearance.
        last: The unit that ran last, ``None`` before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[str, str] = {}
        self._producers: dict[Any, str] = {}
        self.last: str | None = None

    def forget_graphs(self) -> None:
        """Lets go of the graphs of earlier forwards; called before each micro-batch."""
        self._producers.clear()

    def note_output(self, name: str, output: Tensor) -> None:
        """Remembers the unit that produced ``output``."""
        self.last = name
        if output.grad_fn is not None:
            self._producers[output.grad_fn] = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            return self._repaired(func, getattr(func, "__name__", str(func)), args, kwargs, error)

    def __enter__(self) -> Trial:
        _APPLY.enter()
        _here.trials = [*_trials(), self]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        _here.trials = _trials()[:-1]
        _APPLY.leave()

    def _repaired(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, error: Exception) -> Any:
        lows = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dtype in _WIDE]
        if not lows or is_out_of_memory(error, error.__context__):
            raise error
        try:
            result = self._repeat(func, args, kwargs)
        except (RuntimeError, TypeError, ValueError, AssertionError) as second:
            if is_out_of_memory(second, error):  # wider formats need more
                raise
            raise error from None
        self._blame(lows, f"`{name}` fails in {lows[0].dtype}: {_first_line(error)}")
        return result

    def _repeat(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        is_in_place = name in ("__setitem__", "__iadd__", "__imul__") or (name.endswith("_") and name[:2] != "__")
        if is_in_place and args and isinstance(args[0], Tensor):
            return _repeat_in_place(func, args, kwargs)
        args, kwargs = _widened((args, kwargs))
        return func(*args, **kwargs)

    def _blame(self, tensors: list[Tensor], reason: str) -> None:
        names = {name for tensor in tensors for name in self._nearest(tensor)}
        if not names and self.last is not None:
            names = {self.last}
        for name in sorted(names):
            self.failures.setdefault(name, reason)

    def _nearest(self, tensor: Tensor) -> Iterator[str]:
        """Walks back through the graph to the closest unit outputs."""
        pending: list[Any] = [tensor.grad_fn]
        seen: set[Any] = set()
        while pending and len(seen) < _MAX_NODES:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._producers:
                yield self._producers[node]
            else:
                pending.extend(parent for parent, _ in node.next_functions)


# trials of this thread, innermost last
_here = threading.local()


def _trials() -> list[Trial]:
    trials: list[Trial] = getattr(_here, "trials", [])
    return trials


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``Function.apply``: the user's own autograd functions do not pass through the mode."""
    original = _APPLY.original.__get__(None, cls)  # a classmethod, in C from torch 2.14 on
    trials = _trials()
    if not trials or cls.__module__.startswith("autoprec."):
        return original(*args, **kwargs)
    try:
        return original(*args, **kwargs)
    except (RuntimeError, TypeError, AssertionError) as error:
        return trials[-1]._repaired(original, cls.__name__, args, kwargs, error)


_APPLY = Replaced(
    lambda: Function.__dict__["apply"], functools.partial(setattr, Function, "apply"), classmethod(_apply)
)


def _widened(value: Any) -> Any:
    return tree_map(lambda v: v.to(_WIDE[v.dtype]) if isinstance(v, Tensor) and v.dtype in _WIDE else v, value)


def _repeat_in_place(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The target keeps its dtype; what is written into it follows, and constants are limited to its range."""
    target, rest = args[0], args[1:]
    info = torch.finfo(target.dtype) if target.is_floating_point() else None

    def fit(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and target.is_floating_point():
            return value.to(target.dtype)
        if isinstance(value, float) and info is not None and value == value and abs(value) != float("inf"):
            return min(max(value, info.min), info.max)
        return value

    rest, kwargs = tree_map(fit, (rest, kwargs))
    return func(target, *rest, **kwargs)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
