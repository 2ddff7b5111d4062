"""A run in its own process that kills itself with SIGKILL and resumes from its newest checkpoint when started again.

Started as ``python tests/killed_run.py FOLDER [PLACE WINDOW]...``: each start dies at the first place that is not used
up; the last one goes through and writes what it ends with to ``FOLDER/end.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the project, as pytest has it

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, ClipConfig, LossScaleConfig, RuleConfig
from tests.resumed import Setup
from tests.small_fits import StatefulLoader

STEPS = 60
EVERY = 4
CONFIG = AutoPrecisionConfig(
    formats=("fp32", "fp16"),
    rule=RuleConfig(stable_cv=10.0, stages=2),
    loss_scale=LossScaleConfig(init_scale=2.0**22, growth_interval=6),
    clip=ClipConfig(min_norms=4, window=8),
)


class Killer(Callback):
    """Ends the process in the middle of something."""

    def __init__(self, place: str, window: int) -> None:
        self.place, self.window = place, window

    def _kill_at(self, place: str, trainer: Trainer) -> None:
        if place == self.place and trainer.global_step >= self.window:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._kill_at("batch start", trainer)

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        self._kill_at("backward", trainer)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self._kill_at("step", trainer)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self._kill_at("validation", trainer)

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self._kill_at("save", trainer)


def newest(folder: Path) -> Path | None:
    found = sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))
    return found[-1] if found else None


def main(folder: Path, deaths: list[tuple[str, int]]) -> None:
    torch.set_num_threads(1)
    starts = folder / "starts"
    count = int(starts.read_text()) if starts.exists() else 0
    starts.write_text(str(count + 1))
    others = [lambda: Killer(*deaths[count])] if count < len(deaths) else []
    setup = Setup(
        lambda: AutoPrecisionCallback(interval=5, config=CONFIG, verbose=False),
        data=lambda: StatefulLoader(spikes=[20, 35]),
        others=others,
        options={"check_val_every_n_epoch": 1},
    )
    result = setup.fit(STEPS, folder, resume=newest(folder), save_at=EVERY)
    assert result.callback is not None
    history = [repr(decision) for decision in result.callback.history]
    end = {"weights": result.outcome.weights, "optimizers": result.outcome.optimizers, "history": history}
    torch.save({**end, "losses": result.outcome.losses[-1]}, folder / "end.pt")


if __name__ == "__main__":
    words = sys.argv[2:]
    main(Path(sys.argv[1]), [(place, int(window)) for place, window in zip(words[::2], words[1::2], strict=True)])
