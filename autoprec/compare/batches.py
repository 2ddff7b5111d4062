"""The tensors of a batch, whatever it is made of, and a digest of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_VALUES = 4096


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of nested mappings and sequences.

    Args:
        batch: A batch of a data loader.
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)


def digest_of_batch(batch: Any) -> str:
    """Returns a digest of the first values of each tensor that is the same in whatever floating type it is held.

    Args:
        batch: A batch of a data loader.
    """
    digest = hashlib.sha256()
    for tensor in tensors_of(batch):
        part = tensor.detach().flatten()[:_VALUES].cpu()
        part = part.to(torch.bfloat16).view(torch.int16) if part.is_floating_point() else part
        digest.update(repr(tuple(tensor.shape)).encode() + part.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
