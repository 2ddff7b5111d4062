"""What an enabled exporter costs: in each optimizer step, and in each scrape, which competes for the interpreter.

    OMP_NUM_THREADS=1 python -m benchmarks.monitoring            # 50 units
    OMP_NUM_THREADS=1 python -m benchmarks.monitoring --units 8

A fit is held after some steps, and what the exporter does in a step and in a scrape is repeated on its state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback, MonitorConfig

STEPS, REPEATS, CALLS = 12, 15, 2000


class Stack(LightningModule):
    """Linear layers, one unit each."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(units)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns a loss."""
        return torch.as_tensor(self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def median_s(function: Callable[[], object], calls: int) -> float:
    """Seconds of one call, by the median over rounds."""
    rounds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(calls):
            function()
        rounds.append((time.perf_counter() - begun) / calls)
    return statistics.median(rounds)


class Hold(Callback):
    """Takes the times after the last step."""

    def __init__(self, ap: AutoPrecisionCallback) -> None:
        self.ap = ap

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Waits for the last step."""
        if trainer.global_step < STEPS:
            return
        monitor, url = self.ap._monitor, str(self.ap.monitor_url)
        assert monitor is not None

        def step() -> None:
            monitor.begin_step()
            monitor.end_step()

        with urlopen(url) as answer:
            lines = answer.read().decode().splitlines()
        series = sum(not line.startswith("#") for line in lines)
        print(f"step    {median_s(step, CALLS) * 1e6:.1f} us")
        print(f"scrape  {median_s(lambda: urlopen(url).read(), 10) * 1e3:.2f} ms, {series} series")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=50, help="layers of the model")
    units = parser.parse_args().units
    callback = AutoPrecisionCallback(interval=4, verbose=False, monitor=MonitorConfig(max_units=units))
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(accelerator="cpu", max_steps=STEPS, callbacks=[callback, Hold(callback)], **quiet)
    trainer.fit(Stack(units), DataLoader(TensorDataset(torch.randn(8 * STEPS, 16)), batch_size=8))


if __name__ == "__main__":
    main()
