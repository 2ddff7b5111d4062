"""Data of the demo: the Python standard library's own source, and scikit-learn's digits.

Both are on the machine already, so that nothing is downloaded. The order of the training samples is drawn once for a
seed and is the same in every run with that seed.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

CORPUS_BYTES = 4_000_000
HELD_OUT_PERCENT = 10
# installed packages are not the standard library; tests are most of its bytes; the last three are generated tables
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_TABLES = frozenset({"encodings", "pydoc_data", "lib2to3"})


@dataclass(frozen=True)
class Split:
    """Training and held-out tensors of one task.

    Args:
        train: Tensors of the training part.
        held_out: Tensors of the held-out part.
        description: What the data is, with its size, for the output.
    """

    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    description: str


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Returns the ``.py`` files of the standard library, sorted by their path below ``root``.

    Args:
        root: Where to look. ``None``: the standard library of the running interpreter.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    return sorted(path for path in root.rglob("*.py") if not (_LEFT_OUT | _TABLES) & set(path.relative_to(root).parts))


def is_held_out(content: bytes) -> bool:
    """Returns whether a file belongs to the held-out part: decided by its content alone, for about one in ten."""
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def load_source(root: Path | None = None, limit: int = CORPUS_BYTES) -> Split:
    """Reads the standard library's source as two byte strings.

    Files are taken in the order of their content's hash until ``limit`` bytes are reached, each different content once.
    No file is in both parts.

    Args:
        root: Where to look. ``None``: the standard library of the running interpreter.
        limit: Most bytes to take, both parts together.

    Returns:
        One uint8 tensor ``[bytes]`` in each part.

    Raises:
        FileNotFoundError: If fewer than 20 source files are found.
    """
    paths = standard_library_files(root)
    if len(paths) < 20:
        raise FileNotFoundError(
            f"Found {len(paths)} `.py` files of the Python standard library below"
            f" `{root or sysconfig.get_path('stdlib')}`. The demo trains on them and needs at least 20."
            " Use a Python installation that comes with the source of its standard library."
        )
    contents = {path.read_bytes() for path in paths}
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for content in sorted(contents, key=lambda content: hashlib.sha256(content).digest()[4:]):
        if total + len(content) <= limit:
            parts[is_held_out(content)].append(content)
            total += len(content)
    train, held_out = (torch.frombuffer(bytearray(b"".join(parts[key])), dtype=torch.uint8) for key in (False, True))
    files = sum(map(len, parts.values()))
    description = (
        f"{files} files of the standard library, {len(train) / 1e6:.1f} MB + {len(held_out) / 1e6:.1f} MB held out"
    )
    return Split((train,), (held_out,), description)


def load_digits(held_out: int = 360) -> Split:
    """Returns scikit-learn's digits as images ``[n, 1, 8, 8]`` float32 in [0, 1] and int64 labels.

    Args:
        held_out: Number of images in the held-out part, chosen by a fixed seed.

    Raises:
        ModuleNotFoundError: If scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The demo trains on scikit-learn's digits, and scikit-learn is not installed."
            " Run `pip install '.[cli]'` in a checkout of autoprec."
        ) from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div_(16).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    test, train = order[:held_out], order[held_out:]
    description = f"{len(train)} images of 8 x 8 + {len(test)} held out"
    return Split((images[train], targets[train]), (images[test], targets[test]), description)


class Windows(Dataset[tuple[Tensor]]):
    """Windows of ``length`` bytes at the given offsets.

    Args:
        text: The bytes, ``[bytes]`` uint8.
        offsets: Start of each window, ``[windows]`` int64.
        length: Bytes in a window.
    """

    def __init__(self, text: Tensor, offsets: Tensor, length: int) -> None:
        self.text = text
        self.offsets = offsets.tolist()
        self.length = length

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        start = self.offsets[index]
        return (self.text[start : start + self.length].long(),)


class Picks(Dataset[tuple[Tensor, ...]]):
    """Samples of tensors in the given order, an index may occur more than once.

    Args:
        tensors: Tensors of equal length.
        order: Index of each sample, ``[samples]`` int64.
    """

    def __init__(self, tensors: tuple[Tensor, ...], order: Tensor) -> None:
        self.tensors = tensors
        self.order = order.tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[self.order[index]] for tensor in self.tensors)


def random_offsets(size: int, length: int, count: int, seed: int) -> Tensor:
    """Returns ``count`` random starts of windows of ``length`` in ``size`` bytes, the same for the same seed."""
    return torch.randint(size - length + 1, (count,), generator=torch.Generator().manual_seed(seed))


def spread_offsets(size: int, length: int, count: int) -> Tensor:
    """Returns ``count`` starts of windows of ``length`` spread evenly over ``size`` bytes."""
    return torch.linspace(0, size - length, count).long()


def shuffled_passes(size: int, count: int, seed: int) -> Tensor:
    """Returns ``count`` indices below ``size``: whole passes, each in its own order, fixed by the seed."""
    generator = torch.Generator().manual_seed(seed)
    passes: Iterator[Tensor] = (torch.randperm(size, generator=generator) for _ in range(-(-count // size)))
    return torch.cat(list(passes))[:count]
