"""Small fixed data sets for the model zoo, drawn from private generators."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.demos import lstm, transformer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCAB = 64
LENGTH = 16
SAMPLES = 80
BATCH = 4

Batches = Callable[[], "DataLoader[Any]"]
Draw = Callable[[torch.Generator], Any]


class Samples(Dataset[Any]):
    """A fixed list of samples, drawn from a private generator."""

    def __init__(self, draw: Draw, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(20)
        self.samples = [draw(generator) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def loader(draw: Draw, shuffle: bool = True) -> Batches:
    return lambda: DataLoader(Samples(draw), batch_size=BATCH, shuffle=shuffle)


def tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=generator)


def draw_text(generator: torch.Generator) -> dict[str, Tensor]:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def draw_masked_text(generator: torch.Generator) -> dict[str, Tensor]:
    """Padded to the right, and only some positions count, as in masked language modelling."""
    ids, keep = tokens(generator), torch.rand(LENGTH, generator=generator) < 0.5
    attention = torch.ones(LENGTH, dtype=torch.long)
    attention[LENGTH - int(torch.randint(1, 6, (), generator=generator)) :] = 0
    keep[0] = True
    return {"input_ids": ids, "attention_mask": attention, "labels": ids.where(keep & attention.bool(), -100)}


def draw_translation(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_ids": tokens(generator),
        "attention_mask": torch.ones(LENGTH, dtype=torch.long),
        "labels": tokens(generator, 12),
    }


def draw_speech(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(8, 32, generator=generator), "labels": tokens(generator, 10)}


def draw_image(generator: torch.Generator) -> dict[str, Tensor]:
    label = torch.randint(0, 10, (), generator=generator)
    return {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": label}


def wikitext() -> transformer.WikiText2:
    """The demos' own data set, read from a text of ``VOCAB`` words in random order."""
    generator = torch.Generator().manual_seed(20)
    words = torch.randint(0, VOCAB - 1, (300, 30), generator=generator).tolist()
    words[0] = list(range(VOCAB - 1))
    with tempfile.TemporaryDirectory() as folder:
        text = "\n".join(" ".join(f"w{word}" for word in line) for line in words)
        Path(folder, "wikitext-2.txt").write_text(text, encoding="utf8")
        return transformer.WikiText2(Path(folder), download=False)


def wikitext_batches() -> DataLoader[Any]:
    return DataLoader(wikitext())


def wikitext_sequences() -> DataLoader[Any]:
    data = wikitext()
    return DataLoader(data, batch_sampler=lstm.SequenceSampler(data, batch_size=10))


def boring_batches(shuffle: bool) -> Batches:
    return loader(lambda generator: torch.randn(32, generator=generator), shuffle)
