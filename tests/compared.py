"""A user's training as files, for tests of what trains targets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoprec.compare.trainers import Observer

TRAINING = '''
import os, random, time
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from autoprec import AutoPrecisionCallback


class Net(pl.LightningModule):
    def __init__(self, width=32, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 4))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        self.log("val_accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class NoValidation(Net):
    validation_step = pl.LightningModule.validation_step


class Exploding(Net):
    def training_step(self, batch, batch_idx):
        scale = 1.0 if self.global_step < 3 else float("nan")
        return self.loss(batch) * scale


class Fused(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


class Crashing(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.precision == "bf16-mixed" and self.global_step == 4:
            raise ZeroDivisionError("the module broke")
        return self.loss(batch)


class Slow(Net):
    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def training_step(self, batch, batch_idx):
        while self.seed == 1 and self.global_step == 5 and not os.path.exists("go"):
            time.sleep(0.02)
        return self.loss(batch)


class Unsteady:
    """Draws its order from something that no seed reaches."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(random.Random(os.urandom(8)).sample(self.batches, len(self.batches)))


def rows(count=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


def loaders():
    return DataLoader(rows(), batch_size=8, shuffle=True), DataLoader(rows(32), batch_size=16)


def build(dropout=0.0):
    return Net(dropout=dropout), loaders(), {"max_epochs": 2}


def long():
    return Net(), loaders(), {"max_epochs": 1000}


def accumulating():
    return Net(), loaders(), {"max_epochs": 2, "accumulate_grad_batches": 3}


def clash():
    return Fused(), loaders(), {"max_epochs": 1, "gradient_clip_val": 1.0}


def no_validation():
    return NoValidation(), loaders()[0], {"max_epochs": 2}


def exploding():
    return Exploding(), loaders(), {"max_epochs": 1}


def crashing():
    return Crashing(), loaders(), {"max_epochs": 1}


def slow(seed):
    return Slow(seed), loaders(), {"max_epochs": 2}


def unsteady():
    train, held_out = loaders()
    return Net(), (Unsteady(list(train)), held_out), {"max_epochs": 2}


def own_seed():
    torch.manual_seed(3)
    return Net(), (DataLoader(rows(), batch_size=8), loaders()[1]), {"max_epochs": 1}


def with_callback():
    callback = AutoPrecisionCallback(interval=3)
    return Net(), loaders(), {"max_epochs": 2, "precision": "bf16-mixed", "callbacks": [callback]}


def only_a_module():
    return Net()


def wrong_data():
    return Net(), 3, {}
'''

SCRIPT = """
import sys
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from training import Net, loaders

pl.seed_everything(7)
assert sys.argv[1:] == ["--epochs", "2"], sys.argv
trainer = pl.Trainer(
    max_epochs=2,
    precision="bf16-mixed",
    logger=CSVLogger("users_logs"),
    callbacks=[ModelCheckpoint("users_checkpoints"), TQDMProgressBar()],
)
trainer.fit(Net(), *loaders())
pl.Trainer(max_epochs=1, logger=False).fit(Net(), *loaders())
"""

CONFIG = """
seed_everything: 3
model:
  class_path: training.Net
  init_args: {width: 16}
data:
  class_path: data.Rows
trainer: {max_epochs: 2, precision: 16-mixed}
"""

DATA = """
import lightning.pytorch as pl
from training import loaders

class Rows(pl.LightningDataModule):
    def train_dataloader(self):
        return loaders()[0]

    def val_dataloader(self):
        return loaders()[1]
"""


def write_training(folder: Path) -> None:
    """Writes a user's files: functions, a script, a config and its data module."""
    files = {"training.py": TRAINING, "script.py": SCRIPT, "config.yaml": CONFIG, "data.py": DATA}
    for name, text in files.items():
        (folder / name).write_text(text)


class Recording(Observer):
    """Gives Trainers quiet arguments and keeps what it hears."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.packages: list[str] = []
        self.arguments: list[dict[str, Any]] = []
        self.fits: list[tuple[Any, dict[str, Any]]] = []
        self.seeds: list[Any] = []

    def on_trainer(self, package: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.packages.append(package)
        self.arguments.append(dict(arguments))
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        return {**arguments, "logger": False, "callbacks": None, "precision": "32-true", **quiet, **self.options}

    def after_fit(self, trainer: Any, arguments: dict[str, Any]) -> None:
        self.fits.append((trainer, arguments))

    def on_seed(self, seed: Any) -> None:
        self.seeds.append(seed)


def run_beside_another(folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command of autoprec in a folder that holds an autoprec of its own, as a checkout does.

    Args:
        folder: The folder; its ``autoprec`` raises when it is imported.
        words: The command.
    """
    (folder / "autoprec").mkdir()
    (folder / "autoprec" / "__init__.py").write_text("raise RuntimeError('this is another autoprec')\n")
    checkout = str(Path(__file__).parents[1])
    code = f"import sys; sys.path[0] = {checkout!r}; from autoprec import cli; sys.exit(cli.main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)
