"""Trainings of policies that take a second: four runs of small MLPs, a few hundred decisions."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the project, as pytest has it

from autoprec.envs.proxies import Distribution
from autoprec.policies.train_settings import BankSettings, TrainSettings

TASKS: dict[str, Any] = {
    "units": (3, 4),
    "widths": (32,),
    "architectures": {"mlp": 1.0},
    "budget": 64,
    "late_budget": 64,
    "steps": 8,
    "late_steps": 8,
    "lr_bits": {"low": 0.5, "high": 1.0},
}
VALUES: dict[str, Any] = {
    "decisions": 192,
    "n_envs": 4,
    "train": {"name": "train", "size": 16, "distribution": TASKS},
    "validation": {"name": "val", "size": 8, "distribution": TASKS},
    "segment": 2,
    "statistics_steps": 6,
    "n_steps": 8,
    "batch_size": 64,
    "n_epochs": 2,
    "net_arch": (16,),
    "learning_rate": 0.01,
}


def tiny(**changes: Any) -> TrainSettings:
    return TrainSettings.model_validate({**VALUES, **changes})


def tasks(name: str, size: int, **changes: Any) -> BankSettings:
    return BankSettings(name=name, size=size, distribution=Distribution.model_validate({**TASKS, **changes}))


def main(folder: Path, deadly: int) -> None:
    """Trains until so many decisions are made, and is killed then."""
    from autoprec.policies.ppo import train_policy

    def tell(now: Any) -> None:
        if now.phase == "learning" and now.done >= deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    train_policy(tiny(), 5, folder, progress=tell)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
