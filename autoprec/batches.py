"""What a batch says about its size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def rows_of(batch: Any) -> int:
    """Returns the samples in a batch: the first dimension of its first tensor that has one; 0 if there is none.

    Args:
        batch: A tensor, or mappings, lists, tuples and dataclasses of tensors.
    """
    pending = [batch]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            if value.ndim:
                return int(value.shape[0])
        elif isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
        elif isinstance(value, Mapping):
            pending.extend(reversed(list(value.values())))
        elif isinstance(value, (list, tuple)):
            pending.extend(reversed(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            pending.extend(getattr(value, field.name, None) for field in reversed(dataclasses.fields(value)))
    return 0
