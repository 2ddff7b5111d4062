"""Tensors as other libraries make them, at whose address there is nothing to read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.alias.default)


class Wrapped(Tensor):
    """Hands every operation on to the tensor inside."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapped:
        made: Any = Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        made.inside = inside
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*tree_map(_inside, args), **tree_map(_inside, kwargs or {}))
        return Wrapped(result) if function in _VIEWS else result


def _inside(value: Any) -> Any:
    return value.inside if isinstance(value, Wrapped) else value
