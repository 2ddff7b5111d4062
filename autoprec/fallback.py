"""What happens after a skipped step: the offending unit is found and raised, then everything, then training stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from autoprec.gradients import Gradients
from autoprec.guard import NonFiniteTrainingError, Verdict
from autoprec.knobs import Knobs
from autoprec.layers import Runtime
from autoprec.locate import Locator, Offender, finite_flags, first_overflow, is_finite
from autoprec.telemetry import Telemetry

# after so many skips in a row the search for the first offending layer begins
_SKIPS_BEFORE_SEARCH = 3
_ADVICE = {
    True: "Precision is not the cause: look at the learning rate, the data and the loss.",
    False: "See whether it trains in fp32: `Trainer(precision='32-true')`, or 'precision' among the `knobs`.",
}


class Fallback:
    """Carries out the guard's level 2 and the end of training.

    Args:
        root: The model.
        knobs: Knobs of the fit.
        telemetry: Measurements of the fit.
        runtime: Where layers record their outputs.

    Attributes:
        overflows: Unit name to the number of overflows located there.
        last_resort: Called with what happened and where before training would stop; returns ``None`` if it need not,
            else what to say.
    """

    def __init__(self, root: nn.Module, knobs: Knobs, telemetry: Telemetry, runtime: Runtime) -> None:
        self.overflows: dict[str, int] = {}
        self.last_resort: Callable[[str, str], str | None] | None = None
        self._root: nn.Module | None = root
        self._knobs = knobs
        self._telemetry = telemetry
        self._runtime = runtime
        self._locator: Locator | None = None
        self._earlier: list[Tensor] = []
        self._has_advised = False
        self._has_told_of_data = False

    def release(self) -> None:
        """Removes all hooks and lets go of the model."""
        self._stop_search()
        self._root = None

    def begin_window(self) -> None:
        """Forgets the batches of the window before."""
        self._earlier.clear()

    def note_earlier_batch(self, batch: Any) -> None:
        """Looks at a micro-batch before it is let go of, without waiting for the device.

        Args:
            batch: Not the newest batch of its window, any nesting of tensors.
        """
        if self._runtime.records:  # else no layer can be blamed
            self._earlier += finite_flags(batch)

    def on_applied(self, optimizer: int = 0) -> None:
        """Notes an applied step of the optimizer with this index."""
        self._knobs.guard.on_applied(optimizer)
        if not self._knobs.guard.consecutive_skips:
            self._stop_search()

    def on_skipped(
        self,
        gradients: Gradients | None,
        window: int,
        applied_steps: int,
        skipped_steps: int,
        batch: Any = None,
        optimizer: int = 0,
    ) -> None:
        """Reacts to a skipped step.

        Args:
            gradients: What the step would have used.
            window: Index of the window.
            applied_steps: Steps taken so far.
            skipped_steps: Steps skipped so far, this one included.
            batch: The newest batch of the window, any nesting of tensors, if it is known.
            optimizer: Index of the optimizer.

        Raises:
            NonFiniteTrainingError: If everything runs in fp32 and steps keep being skipped.
        """
        guard = self._knobs.guard
        # a scaler that is only observed may start anywhere; its way down is not a failure of training
        scale = self._knobs.loss_scale
        is_backing_off = not self._knobs.runs_in_fp32 and scale.scale > max(scale.config.floor, 1.0)
        verdict = guard.on_skipped(self._knobs.is_all_wide, is_backing_off, optimizer)
        if verdict is Verdict.STOP:
            where = self._first_offender(gradients) or "unknown"
            skips = f"{guard.config.max_consecutive_skips} steps in a row had non-finite gradients"
            cause = f"{skips} although {self._width()}"
            past = "" if self.last_resort is None else self.last_resort(cause, where)
            if past is None:
                self._stop_search()
                return
            raise NonFiniteTrainingError(
                f"Training stopped at window {window}: {cause}. First offending layer: {where}. The weights are"
                f" those of the last applied step ({applied_steps} applied, {skipped_steps} skipped)."
                f"{past and f' {past}'} {_ADVICE[self._knobs.runs_in_fp32]}"
            )
        if is_finite(batch) and all(map(bool, self._earlier)):
            self._raise_offender(window + 1, applied_steps)
        else:
            self._tell_of_bad_data(window)
        if verdict is Verdict.RAISE_ALL:
            reason = f"{guard.config.max_consecutive_skips} steps in a row had non-finite gradients"
            # the range of bf16 is that of fp32, so that no format is to blame there
            is_short = self._knobs.base.format == "fp16"
            self._knobs.raise_all(window + 1, applied_steps, reason, have_failed=is_short)
            rank_zero_warn(f"autoprec: {reason}; everything runs in fp32 from here on.")
        if verdict is Verdict.RAISE_ALL or guard.consecutive_skips >= _SKIPS_BEFORE_SEARCH:
            self._start_search()

    def _width(self) -> str:
        """What the run is as wide as, for a message."""
        if self._knobs.runs_in_fp32:
            return "everything that can be moved runs in fp32"
        scale, base = self._knobs.loss_scale.scale, self._knobs.base.precision
        return f"the loss scale is down to {scale:g} and the precision of {base} stays"

    def located(self) -> Offender | None:
        """Where the forward of the window left the range, if it did."""
        return first_overflow(self._runtime.records)

    def _raise_offender(self, window: int, applied_steps: int) -> None:
        offender = self.located()
        if offender is None:
            return
        self.overflows[offender.name] = self.overflows.get(offender.name, 0) + 1
        self._telemetry.note_overflow(offender.name)
        self._knobs.raise_units({offender.name: offender.reason}, window, applied_steps, have_failed=True)
        self._runtime.records_inputs = True
        if offender.is_between and not self._has_advised:
            self._has_advised = True
            rank_zero_info(
                f"autoprec: {offender.reason}; {offender.name} goes to fp32, and with it what follows. If these are"
                " attention scores, scale the queries before the product with the keys instead of the scores after it."
            )

    def _tell_of_bad_data(self, window: int) -> None:
        if not self._has_told_of_data:
            self._has_told_of_data = True
            rank_zero_info(
                f"autoprec: the batch of window {window} holds inf or NaN. Its step was skipped, and so will be others"
                " like it; no layer is to blame."
            )

    def _first_offender(self, gradients: Gradients | None) -> str | None:
        where = self._locator.report() if self._locator is not None else None
        if where is None and gradients is not None and self._root is not None:
            where = gradients.first_nonfinite(self._root)
        return where

    def _start_search(self) -> None:
        if self._locator is None and self._root is not None:
            self._locator = Locator(self._root)
            self._locator.start()

    def _stop_search(self) -> None:
        if self._locator is not None:
            self._locator.stop()
            self._locator = None
