"""Keeps the outputs of a trained model on held-out batches while its own validation runs.

The output of a model is that of the last layer that gives a matrix of floating-point numbers: logits, for classifiers
and language models alike, whatever the module calls its parts and however its ``forward`` is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autoprec.compare.batches import tensors_of
from autoprec.fidelity import LIMIT_BYTES, collect_outputs


class OutputRecorder:
    """Keeps the outputs of a model batch by batch, up to a bound.

    Args:
        limit_bytes: Most bytes that are kept.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._left = limit_bytes
        self._limit = limit_bytes
        self._latest: Tensor | None = None
        self._kept: list[dict[str, Tensor]] = []

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

    def end_batch(self, batch: Any) -> None:
        """Keeps the output of the batch that has ended.

        Args:
            batch: The batch.
        """
        latest, self._latest = self._latest, None
        if latest is None or self._left <= 0:
            return
        output = latest.detach().float().cpu()
        self._left -= output.nbytes
        self._kept.append({"logits" if _are_logits(output, batch) else "output": output})

    def save(self, path: Path) -> bool:
        """Writes what was kept.

        Args:
            path: File to write; its folder is made if it does not exist.

        Returns:
            Whether there was anything.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        nothing = nn.Module()
        return collect_outputs(nothing, self._kept, path, self._limit, lambda module, kept: kept) is not None


def _are_logits(output: Tensor, batch: Any) -> bool:
    classes = output.shape[-1]
    whole = [tensor for tensor in tensors_of(batch) if not tensor.is_floating_point() and not tensor.is_complex()]
    # labels that count for nothing are negative
    return classes > 1 and any(tensor.numel() > 0 and int(tensor.max()) < classes for tensor in whole)
