"""Subclasses that change one method of an object and look like its own class in every other respect.

Assigning such a class to ``__class__`` keeps the object's identity, state and ``isinstance`` relations. Copies and
pickles come out as the plain class.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_STATE = "_autoprec"
_BASE = "_autoprec_base"
_QUIET = ("builtins", "typing", "abc", "torch", "lightning", "transformers")


def lookalike(cls: type[T], method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> type[T]:
    """Makes a subclass of ``cls`` with one method replaced.

    Args:
        cls: The class to look like. A lookalike is returned as it is.
        method: Name of the method.
        make: Makes the new method from the old one.
    """
    if _BASE in cls.__dict__:
        return cls
    body = {
        method: make(getattr(cls, method)),
        "__reduce_ex__": _reduce_as(cls),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _BASE: cls,
    }
    if hasattr(cls, "__deepcopy__"):  # others are copied through __reduce_ex__
        body["__deepcopy__"] = _deepcopy_as(cls)
    metaclass: Any = type(cls)
    made: type[T] = metaclass(cls.__name__, (cls,), body)
    return made


def registers_subclasses(cls: type) -> bool:
    """Whether making a subclass runs code of the user (``__init_subclass__``), which a lookalike must not."""
    return any("__init_subclass__" in c.__dict__ for c in cls.__mro__ if c.__module__.split(".")[0] not in _QUIET)


def plain_class(obj: Any) -> type:
    """Returns the class an object has when nothing is steered."""
    cls: type = type(obj).__dict__.get(_BASE, type(obj))
    return cls


def undo_lookalike(obj: Any) -> None:
    """Gives an object its own class back, if it has a lookalike's or one that was derived from it meanwhile."""
    if _BASE in type(obj).__dict__:
        object.__setattr__(obj, "__class__", plain_class(obj))  # past a __setattr__ of the object's own
        return
    for cls in type(obj).__mro__:  # torch's parametrizations derive a class for the object
        if any(_BASE in base.__dict__ for base in cls.__bases__):
            cls.__bases__ = tuple(base.__dict__.get(_BASE, base) for base in cls.__bases__)


def part_from_lookalikes(obj: Any) -> None:
    """Gives an object whose class was derived from a lookalike one that derives from the plain class instead.

    Args:
        obj: The object; others of its class, as the model that it is a copy of, keep theirs.
    """
    cls = type(obj)
    if _BASE in cls.__dict__ or not any(_BASE in base.__dict__ for base in cls.__bases__):
        return
    bases = tuple(base.__dict__.get(_BASE, base) for base in cls.__bases__)
    body = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    metaclass: Any = type(cls)
    object.__setattr__(obj, "__class__", metaclass(cls.__name__, bases, body))


def _reduce_as(cls: type) -> Callable[..., Any]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced: Any = _plain_twin(self, cls).__reduce_ex__(protocol)
        if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            # the form that names no helper of ours and does not compare classes, so the pickle loads without autoprec
            reduced = (copyreg._reconstructor, (cls, object, None), *reduced[2:])  # type: ignore[attr-defined]
        return reduced

    return __reduce_ex__


def _deepcopy_as(cls: type) -> Callable[..., Any]:
    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = copy.deepcopy(_plain_twin(self, cls), memo)
        return copied

    return __deepcopy__


def _plain_twin(obj: Any, cls: type) -> Any:
    """The object as its own class and without our state, sharing everything else."""
    twin: Any = object.__new__(cls)
    twin.__dict__.update({key: value for key, value in obj.__dict__.items() if key != _STATE})
    for name in copyreg._slotnames(cls):  # type: ignore[attr-defined]
        if hasattr(obj, name):
            object.__setattr__(twin, name, getattr(obj, name))
    return twin
