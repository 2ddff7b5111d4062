"""A controller of your own: lowers one layer at a time and takes it back where the loss has become worse.

    pip install .                        # once, in the checkout
    python examples/own_controller.py    # a few seconds

`decide` gets a row of features for every knob and answers -1 (lower), 0 (keep) or 1 (raise) for each. What it must
remember is in its state, so that a run that is resumed from a checkpoint goes on as if it had not been stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, Controller
from autoprec.encoding import feature

Batch = tuple[Tensor, Tensor]


class OneAtATime(Controller):
    """Lowers a layer at each decision, the one with most compute first, and undoes what made the loss worse."""

    name = "one-at-a-time"

    def __init__(self, tolerance: float = 0.05) -> None:
        self.tolerance = tolerance  # log2 of loss / loss before the last change
        self.last = -1  # row that was lowered last, -1 for none
        self.refused: list[int] = []  # rows that are left alone

    def start(self, names: Sequence[str], legal: Sequence[tuple[str, ...]]) -> None:
        self.last, self.refused = -1, []

    def decide(self, observation: NDArray[np.float32]) -> NDArray[np.int64]:
        moves = np.zeros(len(observation), dtype=np.int64)  # one row per unit, then loss scale, batch size, clip
        is_known = feature(observation, "loss_since_change_known")[0] == 1
        if self.last >= 0 and is_known and feature(observation, "loss_since_change")[0] > self.tolerance:
            moves[self.last] = 1
            self.refused.append(self.last)
            self.last = -1
            return moves
        open_ = (feature(observation, "knob_precision") == 1) & (feature(observation, "can_lower") == 1)
        open_ &= feature(observation, "grad_known") == 1
        open_[self.refused] = False
        if open_.any():
            self.last = int(np.where(open_, feature(observation, "compute_share"), -1).argmax())
            moves[self.last] = -1
        return moves

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "refused": list(self.refused)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last, self.refused = state["last"], list(state["refused"])


class Regression(pl.LightningModule):
    """A plain LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 384), nn.Tanh(), nn.Linear(384, 512), nn.Tanh(), nn.Linear(512, 384), nn.Linear(384, 1)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(epochs: int, folder: Path, resume: Path | None = None) -> AutoPrecisionCallback:
    pl.seed_everything(0, verbose=False)
    samples = torch.randn(2560, 32)
    data = TensorDataset(samples, samples.square().mean(1, keepdim=True).sin())
    auto = AutoPrecisionCallback(
        OneAtATime(), interval=5, config=AutoPrecisionConfig(formats=("fp32", "bf16")), verbose=False
    )
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[auto],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=128), ckpt_path=resume)
    trainer.save_checkpoint(folder / f"after-{epochs}.ckpt", weights_only=False)  # with the optimizer
    return auto


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error(f"--epochs is {options.epochs}, and at least 2 are needed to resume in between")

    with TemporaryDirectory() as name:
        folder = Path(name)
        whole = fit(options.epochs, folder)
        for each in whole.history:
            if each.knob == "precision":
                print(f"step {each.step:3}: {each.unit} {each.before} -> {each.applied} ({each.outcome})")
        fit(1, folder)
        resumed = fit(options.epochs, folder, resume=folder / "after-1.ckpt")
    print("formats:", whole.precision_map())
    print("a resumed run decides the same:", list(resumed.history) == list(whole.history))


if __name__ == "__main__":
    main()
