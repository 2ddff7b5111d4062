"""Trains a BERT classifier on lines of Python's standard library: code or comment? Then uses its map again.

    pip install . transformers          # once, in the checkout
    python examples/finetune_bert.py    # a minute on one core

The model has random weights, so that nothing is downloaded; with `from_pretrained` in their place this is fine-tuning.
Its embeddings stay in fp32, and the formats that were found are saved and used from the first step of a second run.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig

Batch = dict[str, Tensor]
LENGTH = 64
PADDING, FIRST, BYTES = 256, 257, 258  # after the 256 bytes: padding, and the token whose output is classified


class Lines(Dataset[Batch]):
    """Lines of the standard library as bytes, as many of code as of comments. The comment's sign is taken away."""

    def __init__(self, count: int, seed: int) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        lines = [line.strip() for path in sorted(root.glob("*.py")) for line in path.read_bytes().splitlines()]
        long = [line for line in lines if len(line) > 20]
        comments = [line.lstrip(b"# ") for line in long if line.startswith(b"# ")]
        code = [line for line in long if line.endswith((b":", b")", b"]")) and b"#" not in line]
        rng = random.Random(seed)
        self.samples = [
            (line, label) for label, kind in enumerate((code, comments)) for line in rng.sample(kind, count)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Batch:
        line, label = self.samples[index]
        tokens = [FIRST, *line[: LENGTH - 1]]
        tokens += [PADDING] * (LENGTH - len(tokens))
        words = torch.tensor(tokens)
        return {"input_ids": words, "attention_mask": (words != PADDING).long(), "labels": torch.tensor(label)}


class Classifier(pl.LightningModule):
    """Any transformers model that returns `loss` and `logits`."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=BYTES,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // 32),
            intermediate_size=4 * width,
            max_position_embeddings=LENGTH,
            pad_token_id=PADDING,
        )
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        right = self.model(**batch).logits.argmax(-1) == batch["labels"]
        self.log("val_accuracy", right.float().mean(), batch_size=len(right))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-4)


def train(auto: AutoPrecisionCallback, width: int, layers: int, steps: int) -> float:
    pl.seed_everything(0, verbose=False)
    train_set, val_set = Lines(8 * steps, seed=0), Lines(100, seed=1)
    trainer = pl.Trainer(
        max_epochs=1,
        callbacks=[auto],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loaders = DataLoader(train_set, batch_size=16, shuffle=True), DataLoader(val_set, batch_size=100)
    trainer.fit(Classifier(width, layers), *loaders)
    return float(trainer.callback_metrics["val_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of 16 lines")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    if min(options.steps, options.layers) < 1 or options.width % 32:
        parser.error("--steps and --layers are at least 1, --width is a multiple of 32")
    size = (options.width, options.layers, options.steps)

    auto = AutoPrecisionCallback(interval=10, config=AutoPrecisionConfig(tiers={"embedding": "fp32"}))
    print("accuracy:", round(train(auto, *size), 3))
    print("formats:", dict(Counter(auto.precision_map().values())))
    for unit, number_format in auto.precision_map().items():
        if "embeddings" in unit:
            print(f"  {unit} {number_format}")

    with TemporaryDirectory() as folder:
        path = Path(folder) / "map.yaml"
        auto.save_map(path)
        again = AutoPrecisionCallback(policy=path)
        print("accuracy with that map from the first step on:", round(train(again, *size), 3))
    assert again.precision_map() == auto.precision_map()


if __name__ == "__main__":
    main()
