"""Outputs of a trained model on held-out batches, taken while its own validation runs.

The output of a model is that of the last layer that gives a matrix of floating-point numbers: logits, for classifiers
and language models alike, whatever the module calls its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MAX_VALUES = 1 << 20
"""Most numbers that are kept of a run."""


class OutputRecorder:
    """Keeps the outputs of a model batch by batch, up to a bound.

    Args:
        max_values: Most numbers that are kept.
    """

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._left = max_values
        self._latest: Tensor | None = None
        self._kept: list[Tensor] = []

    @contextmanager
    def listening(self, module: nn.Module) -> Iterator[None]:
        """Listens to the layers of a module until the end of the block.

        Args:
            module: The whole model.
        """
        layers = [layer for layer in module.modules() if not list(layer.children())]
        handles = [layer.register_forward_hook(self._note) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.ndim >= 2:
            self._latest = output

    def end_batch(self) -> None:
        """Keeps the output of the batch that has ended, as rows."""
        latest, self._latest = self._latest, None
        if latest is None or self._left <= 0:
            return
        rows = latest.detach().flatten(0, -2)
        rows = rows[: max(1, self._left // max(1, rows.shape[1]))]
        if self._kept and self._kept[-1].shape[1] != rows.shape[1]:
            return  # another head, of another loader
        self._left -= rows.numel()
        self._kept.append(rows.float().cpu())

    def save(self, path: Path) -> bool:
        """Writes what was kept, ``[rows, classes]`` float32.

        Args:
            path: File to write; its folder is made if it does not exist.

        Returns:
            Whether there was anything.
        """
        if not self._kept:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"outputs": torch.cat(self._kept)}, path)
        return True


def load_outputs(path: Path) -> Tensor | None:
    """Returns the outputs that a run has saved, ``[rows, classes]``, ``None`` where there are none.

    Args:
        path: The file.
    """
    if not path.is_file():
        return None
    document: Mapping[str, Tensor] = torch.load(path, weights_only=True)
    return document["outputs"]
