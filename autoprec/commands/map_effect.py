"""What ``autoprec apply`` measures: the target's own validation, without a map and with it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback

from autoprec import AppliedMap, __version__
from autoprec.commands.one_fit import OneFit
from autoprec.compare.gate import reseed
from autoprec.compare.recorder import OutputRecorder
from autoprec.compare.session import validation_data
from autoprec.compare.targets import Target
from autoprec.fidelity import compare_outputs
from autoprec.target_functions import PlainError, TargetError

_EPOCH = 1 << 20  # the seed of all passes, of no epoch of a training


class MapError(PlainError):
    """The map does not fit the model, or the weights do not."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement.

    Args:
        precision: The map.
        checkpoint: File with weights, ``None`` for those that the target builds.
        batches: Most validation batches of each loader.
        rounds: Rounds in which time is measured.
        threads: Threads for one operation, ``None`` for what torch uses.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
    """

    precision: Mapping[str, str]
    checkpoint: Path | None = None
    batches: int = 16
    rounds: int = 3
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.checkpoint is not None and not self.checkpoint.is_file():
            raise FileNotFoundError(f"Passed `--checkpoint {self.checkpoint}`. There is no such file.")


def measure(target: Target, settings: Settings, prints_to_stderr: bool) -> dict[str, Any]:
    """Returns fidelity and times of a map on a target's validation data, as JSON can hold them.

    Args:
        target: What is validated.
        settings: What to measure.
        prints_to_stderr: Whether standard output is left to the command.

    Raises:
        TargetError: If the target has no validation.
        MapError: If the map does not fit the model.
    """
    found: dict[str, Any] = {}
    watch = _Watch()

    def after_fit(trainer: Any, arguments: dict[str, Any]) -> None:
        found.update(_Validation(target, settings, watch, trainer, arguments).document())

    arguments = {"num_sanity_val_steps": 0, "limit_val_batches": settings.batches}
    OneFit(target, lambda: [watch], arguments, after_fit).run(settings.threads, prints_to_stderr)
    return found


class _Watch(Callback):
    """Stops the fit before its first step; times validation batches, and has their outputs recorded."""

    def __init__(self) -> None:
        self.recorder: OutputRecorder | None = None
        self.seconds = 0.0
        self.batches = 0
        self._begun = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        self._begun = _now(pl_module.device)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *others: Any) -> None:
        self.seconds += _now(pl_module.device) - self._begun
        self.batches += 1
        if self.recorder is not None:
            self.recorder.end_batch(batch)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Validation:
    """The validation of a target's module, as often as it is wanted."""

    def __init__(
        self, target: Target, settings: Settings, watch: _Watch, trainer: Any, arguments: dict[str, Any]
    ) -> None:
        self._target, self._settings, self._watch, self._trainer = target, settings, watch, trainer
        self._data = validation_data(arguments)
        self._module: Any = arguments.get("model")
        if not trainer.enable_validation:
            raise TargetError(
                f"The target `{target.text}` has no validation: no `validation_step`, or no data for it. A map is"
                " measured on validation data."
            )

    def document(self) -> dict[str, Any]:
        self._load_weights()
        with TemporaryDirectory() as folder:
            reference, ours = Path(folder) / "reference", Path(folder) / "ours"
            self._pass(reference)
            try:
                applied = AppliedMap(self._module, self._settings.precision, device=self._trainer.strategy.root_device)
            except ValueError as error:
                raise MapError(str(error)) from error
            with applied:
                self._pass(ours)
                fidelity = compare_outputs(ours, reference)
                batches = self._watch.batches
                return {**self._about(applied, fidelity), "batches": batches, **self._times(applied)}

    def _about(self, applied: AppliedMap, fidelity: Mapping[str, float]) -> dict[str, Any]:
        settings = self._settings
        return {
            "target": self._target.text,
            "autoprec": __version__,
            "torch": torch.__version__,
            "device": str(self._trainer.strategy.root_device),
            "threads": torch.get_num_threads(),
            "weights": str(settings.checkpoint)
            if settings.checkpoint
            else "as the target builds them, not trained here",
            "formats": applied.formats,
            "emulated": applied.emulated,
            "refused": applied.refused,
            "uncalled": list(applied.uncalled),
            "repaired": applied.repaired,
            "copied_bytes": applied.copied_bytes,
            # JSON has no infinity: equal outputs have an unbounded SQNR
            "fidelity": {name: value if math.isfinite(value) else None for name, value in fidelity.items()},
        }

    def _times(self, applied: AppliedMap) -> dict[str, Any]:
        pairs = []
        for _ in range(self._settings.rounds):
            with applied.suspended():
                without = self._pass()
            pairs.append((without, self._pass()))
        if not pairs:
            return {"time_ratio": None, "seconds": None}
        without, with_map = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(after / before for before, after in pairs)
        return {"time_ratio": ratio, "seconds": {"without": without, "with_map": with_map}}

    def _pass(self, outputs: Path | None = None) -> float:
        """Validates once; returns the seconds in batches."""
        watch = self._watch
        watch.seconds, watch.batches = 0.0, 0
        reseed(_EPOCH)
        recorder = watch.recorder = None if outputs is None else OutputRecorder()
        if recorder is None or outputs is None:
            self._trainer.validate(self._module, **self._data, verbose=False)
            return watch.seconds
        with recorder.listening(self._trainer.lightning_module):
            self._trainer.validate(self._module, **self._data, verbose=False)
        watch.recorder = None
        if not recorder.save(outputs):
            raise TargetError(
                f"The validation of `{self._target.text}` has no layer that gives a matrix, so outputs cannot be"
                " compared."
            )
        return watch.seconds

    def _load_weights(self) -> None:
        path = self._settings.checkpoint
        if path is None:
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self._trainer.lightning_module.load_state_dict(state["state_dict"])
        except Exception as error:  # torch raises what it likes
            raise MapError(f"Passed `--checkpoint {path}`, whose weights do not fit this target: {error}") from error
