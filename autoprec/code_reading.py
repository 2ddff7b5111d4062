"""Reads code objects: which functions a step may call, and whether one of them mentions certain names.

What lives here: following methods, helpers, wrappers and callable objects from one function to the next. What does not:
which functions to start from and which names matter (``onlookers``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

# their code is known: it reads no gradient and writes no weight in a training step
_KNOWN = ("torch", "lightning", "lightning_fabric", "lightning_utilities", "autoprec", "numpy", "torchmetrics")

# where wrappers keep what they wrap; other objects may make up any attribute they are asked for
_INSIDE: Sequence[tuple[tuple[type, ...], str]] = (
    ((MethodType, staticmethod, classmethod), "__func__"),
    ((functools.partial,), "func"),
    ((property,), "fget"),
    ((FunctionType, type(functools.cache(len))), "__wrapped__"),
)
_WRAPPERS = tuple(kind for kinds, _ in _INSIDE for kind in kinds)


def is_known(module: str | None) -> bool:
    """Whether a module of this name belongs to a library whose code is known."""
    top = (module or "").partition(".")[0]
    return top in _KNOWN or top in sys.stdlib_module_names


def is_known_function(function: FunctionType) -> bool:
    """Whether a function was written in a library whose code is known."""
    return is_known(function.__globals__.get("__name__"))


def unwrapped(value: Any) -> Iterator[FunctionType]:
    """The functions that a method, a partial or a decorated function is made of, the outermost first."""
    while value is not None:
        if isinstance(value, FunctionType):
            yield value
        value = next((getattr(value, name, None) for kinds, name in _INSIDE if isinstance(value, kinds)), None)


class Reading:
    """Finds names in functions and in all that they may call.

    Calls are followed by name: through globals, closures, the classes of the owners, and objects that these hold. That
    finds too much rather than too little. Code of known libraries is left out.

    Args:
        owners: Modules, and other objects whose methods may be called.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        owners = list(owners)
        self._attributes: dict[str, list[Any]] = {}
        classes = {base for cls in {type(owner) for owner in owners} for base in _own_bases(cls)}
        for name, value in (item for each in (*owners, *classes) for item in vars(each).items()):
            if _is_worth_following(value):
                self._attributes.setdefault(name, []).append(value)

    def telltale(self, starts: Iterable[Any], names: Mapping[str, str]) -> str | None:
        """Returns the first function that mentions one of some names.

        Args:
            starts: Functions, methods or callable objects to start from.
            names: Names to look for, with what they stand for.
        """
        seen: set[CodeType] = set()
        pending = [function for start in starts for function in _functions_of(start, ())]
        while pending:
            function = pending.pop()
            if function.__code__ in seen or is_known_function(function):
                continue
            seen.add(function.__code__)
            mentioned = set(_names(function.__code__))
            found = next((name for name in sorted(names) if name in mentioned), None)
            if found is not None:
                return f"`{function.__qualname__}`, which mentions `.{found}` ({names[found]})"
            for value in self._callees(function, mentioned):
                pending += _functions_of(value, mentioned)
        return None

    def _callees(self, function: FunctionType, names: set[str]) -> Iterator[Any]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":  # of `super()`, whose methods are found by name
                yield getattr(cell, "cell_contents", None)
        for name in names:
            if not _is_special(name):  # `super().__init__` is not that of every module
                yield from self._attributes.get(name, ())
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType) and not is_known(value.__name__):
                yield from (vars(value).get(other) for other in names)
            yield value


def _functions_of(value: Any, names: Container[str]) -> list[FunctionType]:
    """What may run where a value is used: the function itself, or named and special methods of an object's class."""
    functions = list(unwrapped(value))
    if functions or not _is_worth_following(value):
        return functions
    bases = _own_bases(value if isinstance(value, type) else type(value))
    methods = [item for base in bases for item in vars(base).items()]
    return [
        function for name, method in methods if name in names or _is_special(name) for function in unwrapped(method)
    ]


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _own_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if not is_known(base.__module__)]


def _is_worth_following(value: Any) -> bool:
    """Whether it is code, or an object of a class, that somebody outside of the known libraries has written."""
    if isinstance(value, _WRAPPERS):
        return True
    if isinstance(value, (Tensor, nn.Module, ModuleType)):
        return False
    return not is_known((value if isinstance(value, type) else type(value)).__module__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
