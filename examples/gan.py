"""Trains a small GAN on scikit-learn's digits: manual optimization, two optimizers, and the callback as ever.

    pip install '.[cli]'      # once, in the checkout: the extra brings scikit-learn
    python examples/gan.py    # a minute on one core

Under manual optimization `self.manual_backward` scales the loss where a loss scale is in use, and the steps of both
optimizers are guarded, unscaled and counted. Clipping is the module's own business there. Nothing is downloaded.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback

NOISE = 32


class GAN(pl.LightningModule):
    """A plain LightningModule that takes its steps itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid()
        )
        self.critic = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        real = batch[0]
        to_generator, to_critic = self.optimizers()  # type: ignore[attr-defined]
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device))

        self.toggle_optimizer(to_critic)
        # softplus(-x) is the cross entropy of "real", softplus(x) that of "made"
        loss = (F.softplus(-self.critic(real)) + F.softplus(self.critic(fake.detach()))).mean()
        to_critic.zero_grad()
        self.manual_backward(loss)
        to_critic.step()
        self.untoggle_optimizer(to_critic)

        self.toggle_optimizer(to_generator)
        loss = F.softplus(-self.critic(fake)).mean()
        to_generator.zero_grad()
        self.manual_backward(loss)
        to_generator.step()
        self.untoggle_optimizer(to_generator)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        adam = {"lr": 3e-4, "betas": (0.5, 0.99)}
        return [
            torch.optim.Adam(self.generator.parameters(), **adam),  # type: ignore[arg-type]
            torch.optim.Adam(self.critic.parameters(), **adam),  # type: ignore[arg-type]
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args()
    if min(options.epochs, options.width) < 1:
        parser.error("--epochs and --width are at least 1")

    pl.seed_everything(0, verbose=False)
    pixels, _ = load_digits(return_X_y=True)
    real = torch.tensor(pixels / 16, dtype=torch.float32)
    model, auto = GAN(options.width), AutoPrecisionCallback(interval=20)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        callbacks=[auto],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(real), batch_size=128, shuffle=True, drop_last=True))

    with torch.no_grad():
        made = model.generator(torch.randn(512, NOISE))
    print("distance of pixel means:", round(float((made.mean(0) - real.mean(0)).square().mean().sqrt()), 3))
    print("one of them:")
    for row in made[0].view(8, 8).tolist():
        print("  " + "".join(" .:-=+*#%@"[min(9, int(10 * pixel))] * 2 for pixel in row))
    print("formats:", auto.precision_map())
    print("optimizer steps of both: applied", auto.applied_steps, "skipped", auto.skipped_steps)


if __name__ == "__main__":
    main()
