"""Where metrics of a training go besides its own file: TensorBoard and Weights & Biases, when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import KVWriter, TensorBoardOutputFormat


class WandbWriter(KVWriter):
    """Sends metrics to a run of Weights & Biases, on an axis of its own: a resumed training may repeat some.

    Args:
        project: Name of the project.
        name: Name of the run.
        folder: Where wandb keeps its files.
    """

    def __init__(self, project: str, name: str, folder: Path) -> None:
        from autoprec.wandb_logging import open_run

        self._run = open_run(
            project,
            group=folder.parent.name,
            job_type="ppo-train",
            name=name,
            folder=folder,
            config={"folder": str(folder)},
            say=print,
        )
        self._run.define_metric("*", step_metric="timesteps")

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        """Sends what was logged."""
        self._run.log({"timesteps": step, **key_values})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def writers_of(seed: int, folder: Path, *, tensorboard: bool = False, wandb: str | None = None) -> Sequence[KVWriter]:
    """Returns where metrics of a seed go.

    Args:
        seed: The seed.
        folder: Its folder.
        tensorboard: Whether to write files of TensorBoard into it.
        wandb: Project of Weights & Biases.
    """
    writers: list[KVWriter] = []
    if tensorboard:
        writers.append(TensorBoardOutputFormat(str(folder / "tensorboard")))
    if wandb is not None:
        writers.append(WandbWriter(wandb, f"{folder.parent.name}-seed-{seed}", folder))
    return writers
