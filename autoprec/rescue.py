"""Keeps a window alive whose operations cannot run in low precision: trials, repeated steps, and who is raised then."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from autoprec.compilation import CompilationWatch
from autoprec.knobs import Knobs
from autoprec.layers import Runtime
from autoprec.trial import Trial

_MEASURES = 3  # a trial, the unit that ran last, all units


class Rescue:
    """Runs the first window under a new map as a trial, and decides what a failing step is repeated with.

    Args:
        knobs: Knobs of the fit.
        runtime: State shared by the layers.
        compilation: Knows whether the model is compiled; compiled code is not tried.

    Attributes:
        trial: The trial under way, ``None`` outside of one.
    """

    def __init__(self, knobs: Knobs, runtime: Runtime, compilation: CompilationWatch) -> None:
        self.trial: Trial | None = None
        self._knobs = knobs
        self._runtime = runtime
        self._compilation = compilation
        self._started_as_trial = False

    def start_trial(self) -> None:
        """Begins a trial if the map has an effect."""
        # compiled graphs raise when they are compiled, and tracing through a mode would compile them anew
        if self._knobs.is_steering and not self._compilation.is_compiled:
            self.trial = Trial()

    def end_trial(self) -> None:
        """Drops the trial under way."""
        self.trial = None

    def finish_window(self, next_window: int, applied_steps: int) -> None:
        """Raises what the window has shown to need fp32.

        Args:
            next_window: Index of the window that begins.
            applied_steps: Applied optimizer steps so far.
        """
        trial, self.trial = self.trial, None
        if trial is not None and trial.failures:
            for name, reason in trial.failures.items():
                rank_zero_info(f"autoprec: {name} goes to fp32: {reason}")
            before = self._knobs.precision_map()
            self._knobs.raise_units(trial.failures, next_window, applied_steps, forever=True, have_failed=True)
            if self._knobs.precision_map() != before:
                self.start_trial()
        self._pin_untouched(next_window, applied_steps)

    def _pin_untouched(self, next_window: int, applied_steps: int) -> None:
        """Reports units in fp32 that the user's own autocast(enabled=False) keeps there."""
        if self._runtime.untouched:
            names = sorted(self._runtime.untouched)
            reason = "the model switches autocast off around it"
            self._knobs.raise_units(dict.fromkeys(names, reason), next_window, applied_steps, forever=True)
            self._runtime.untouched.clear()

    def take_measure(self, failed_attempts: int, error: BaseException, window: int, applied_steps: int) -> bool:
        """Makes the next attempt of a failing step safer.

        Args:
            failed_attempts: How often the step has raised.
            error: What it raised.
            window: Index of the window.
            applied_steps: Applied optimizer steps so far.

        Returns:
            Whether there was anything left to do.
        """
        if failed_attempts == 1:
            self._started_as_trial = self.trial is not None
        measure = failed_attempts + self._started_as_trial
        if measure > _MEASURES:
            return False
        if measure == 1:
            self.start_trial()
            return True
        last = self.trial.last if self.trial is not None else None
        names = [last] if measure == 2 and last is not None else list(self._knobs.units)
        reason = f"a training step raised: {str(error).strip().splitlines()[0]}"
        self._knobs.raise_units(dict.fromkeys(names, reason), window, applied_steps, forever=True)
        return True
