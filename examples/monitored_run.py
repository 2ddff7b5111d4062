"""Trains a small network on digits and shows the run to Prometheus while it goes.

    pip install '.[cli,monitor]'                       # once, in the checkout
    python examples/monitored_run.py --epochs 200      # two minutes on one core

Meanwhile, in another terminal, with or without Prometheus:

    curl -s localhost:9753/metrics | grep -v '^#'
    autoprec monitoring watch && prometheus --config.file=watch/prometheus.yml

After some epochs it reads its own metrics once, as a scraper would, and prints a few of them.
"""

from __future__ import annotations

import argparse
from typing import Any
from urllib.request import urlopen

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback, MonitorConfig

Batch = tuple[Tensor, Tensor]
SHOWN = ("applied_steps_total", "skipped_steps_total", "grad_norm", "clip_threshold", "utilization_ratio", "units")


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 256),
            nn.ReLU(),
            nn.Linear(256, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        noisy = images + 0.3 * torch.randn_like(images)  # so that there is something to learn for long
        return F.cross_entropy(self.net(noisy), labels, label_smoothing=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Look(pl.Callback):
    """Reads the metrics once, after the second epoch."""

    def __init__(self, autoprec: AutoPrecisionCallback) -> None:
        self.autoprec = autoprec

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        url = self.autoprec.monitor_url
        if trainer.current_epoch != 1 or url is None:
            return
        with urlopen(url) as answer:
            lines = answer.read().decode().splitlines()
        print(f"{len(lines)} lines at {url}, among them")
        for line in lines:
            if line.startswith(tuple(f"autoprec_{name}{{" for name in SHOWN)) and not line.endswith(" 0.0"):
                print(f"  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--port", type=int, default=9753, help="0 takes a free one")
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error(f"--epochs is {options.epochs}, and at least 2 are needed")

    pl.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    autoprec = AutoPrecisionCallback(interval=20, monitor=MonitorConfig(port=options.port, run="digits"))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        callbacks=[autoprec, Look(autoprec)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(digits, batch_size=64, shuffle=True))


if __name__ == "__main__":
    main()
