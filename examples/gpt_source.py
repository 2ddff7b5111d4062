"""Trains a small byte-level GPT on the Python standard library's own source, with its precision under control.

    pip install .                                # once, in the checkout
    python examples/gpt_source.py --steps 200    # a few minutes on 2 cores

The only line about precision is the callback. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from autoprec import AutoPrecisionCallback

HEAD_WIDTH = 32
INTERVAL = 10  # decides often, because this run is short


class SourceBytes(Dataset[Tensor]):
    """Random windows of the standard library's source, as byte numbers."""

    def __init__(self, windows: int, length: int) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(0)
        self.starts = torch.randint(len(self.text) - length, (windows,), generator=generator).tolist()
        self.length = length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.text[start : start + self.length].long()


class GPT(pl.LightningModule):
    """A plain LightningModule: no autocast, no scaler, no cast."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=width // HEAD_WIDTH,
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        x = self.embed(tokens) + self.position(torch.arange(time, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        logits: Tensor = self.head(self.blocks(x, mask=mask, is_causal=True))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    options = parser.parse_args()
    for name, value in vars(options).items():
        if value < 1:
            parser.error(f"--{name} is {value}, and at least 1 is needed")
    if options.width % HEAD_WIDTH:
        parser.error(f"--width is {options.width}, and a multiple of {HEAD_WIDTH}, the width of a head, is needed")

    pl.seed_everything(0)
    data = SourceBytes(windows=8 * options.steps, length=options.context + 1)
    model = GPT(options.width, options.layers, options.context)
    auto = AutoPrecisionCallback(interval=INTERVAL)
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[auto], gradient_clip_val=1.0, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, DataLoader(data, batch_size=8))

    print("formats at the end:", dict(Counter(auto.precision_map().values())))
    print("optimizer steps: applied", auto.applied_steps, "skipped", auto.skipped_steps)
    if not auto.history:
        print(f"no decision is on record: the first is due after {INTERVAL} steps")
        return
    print("the last decisions:")
    for decision in auto.history[-5:]:
        print("  ", decision)


if __name__ == "__main__":
    main()
