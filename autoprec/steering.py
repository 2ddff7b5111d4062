"""One fit: its counters, windows and knobs, and the reaction to applied and skipped steps.

A *window* is everything up to and including an optimizer step (all micro-batches of an accumulation; a whole batch
under manual optimization). What does not live here: Lightning's plugin methods (``precision``), requests that wait for
the end of a window (``request_queue``), and the question when a decision is due (``callback``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from autoprec.action import Action
from autoprec.base import Base
from autoprec.batches import rows_of
from autoprec.buffers import BufferShadow
from autoprec.compilation import CompilationWatch
from autoprec.config import AutoPrecisionConfig
from autoprec.cost_watch import CostWatch
from autoprec.counters import Counters
from autoprec.coupling import Coupling
from autoprec.fallback import Fallback
from autoprec.gradients import Gradients
from autoprec.history import History
from autoprec.implementations import candidates_alone
from autoprec.knobs import Knobs, steered_units
from autoprec.layers import Runtime, note_channels_last, prepare, runs_channels_last
from autoprec.layouts import find_containers
from autoprec.learning_rate import LearningRate
from autoprec.loss_scale import LossScale
from autoprec.manual_scaling import ManualScaling
from autoprec.memory_errors import free_memory
from autoprec.request_queue import RequestQueue
from autoprec.rescue import Rescue
from autoprec.rounding_probe import RoundingProbe
from autoprec.saved_state import STATE_VERSION, check_version
from autoprec.schedules import ScheduleHold
from autoprec.telemetry import Telemetry
from autoprec.trial import Trial
from autoprec.units import Unit


class Steering(Counters):
    """State of one fit, which counts what happens in it.

    Args:
        root: The model.
        units: Its decision units.
        device_type: Where it runs.
        config: Settings.
        masked: Knob to the reason why it cannot be moved.
        base: What the Trainer had.
        loss_scale: The loss scale's state machine.
        is_automatic: Whether the Trainer runs backward and step.

    Attributes:
        lower_batch_size: Called with the samples of a batch that did not fit; returns whether there was a smaller size
            to go to. ``None`` where nobody can lower it: then an out-of-memory error ends the run.
        is_lost: Whether the current window is lost to memory.
        copies: What copies of the run there were at the end, for the table.
        has_skipped: Whether a step was skipped since somebody looked at the weights.
        is_sampling: Whether the current window is measured in detail for a decision.
        is_in_step: Whether ``training_step`` is running.
        wide_reason: Why some or all second moments stay in float32 though 16 bits were asked for; ``None`` where
            nothing stood in the way at the start.
        costs: What formats cost here, and which do not pay.
        onlooker: Whose code may look at gradients in the middle of a step, so that they are kept in ``.grad`` and no
            copies of weights are kept; ``None`` if nobody's.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        device_type: str,
        config: AutoPrecisionConfig,
        masked: Mapping[str, str],
        base: Base,
        loss_scale: LossScale,
        is_automatic: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.is_automatic = is_automatic
        self.history = History()
        self.runtime = Runtime(device_type, config.clamp_output)
        if "precision" not in masked:
            prepare(units, self.runtime)
            self.runtime.containers = find_containers(root, runs_channels_last, note_channels_last)
        self.knobs = Knobs(units, self.runtime, config, masked, base, loss_scale, self.history)
        self.telemetry = Telemetry(units, config.clip.window)
        self.rounding = RoundingProbe(units, self.runtime.is_other_thread)
        self.knobs.batch_size.on_lost = self._note_lost
        self.lower_batch_size: Callable[[int], bool] | None = self._lower_batch_size
        formats = self.knobs.unit_formats
        self.costs = CostWatch(formats, self.runtime, config.calibration, candidates_alone, formats.set_implementations)
        self.fallback = Fallback(root, self.knobs, self.telemetry, self.runtime)
        self.schedules = ScheduleHold(config)
        self.learning_rate = LearningRate(config.batch.learning_rate)
        self.coupling = Coupling(root, config, self.knobs, self.learning_rate, self.schedules)
        self.manual_scaling = ManualScaling(loss_scale, is_automatic)
        self.is_lost = False
        self.copies = ""
        self.has_skipped = False
        self.is_sampling = False
        self.backwards = 0
        self.is_in_step = False
        self.wide_reason: str | None = None
        self.onlooker: str | None = None
        self._root: nn.Module | None = root
        self._shadow: BufferShadow | None = BufferShadow(root)
        self._batch: Any = None
        self._running: Any = None  # the batch of the latest micro-batch
        self._earlier_rows = 0  # of the micro-batches before it in its window
        self._should_free = False
        self._effects_at_entry = (0, 0)
        self._is_window_open = False
        self._seen_changes = self.knobs.changes
        self._has_stepped = False
        self._has_counted = False
        self._found_inf = False
        self._skipping_since: int | None = None
        self._compilation = CompilationWatch(root)
        self.knobs.unit_formats.map_limit = self._compilation.map_limit
        self._rescue = Rescue(self.knobs, self.runtime, self._compilation)
        self.requests = RequestQueue(self.knobs, self.telemetry, self._rescue.start_trial)
        self._rescue.start_trial()  # the Trainer's own fp16 is probed like any other map

    @property
    def root(self) -> nn.Module:
        """The model, while the fit lasts."""
        assert self._root is not None, "the fit is over"
        return self._root

    @property
    def trial(self) -> Trial | None:
        """The trial under way, ``None`` outside of one."""
        return self._rescue.trial

    @property
    def is_compiled(self) -> bool:
        """Whether something that runs layers is compiled."""
        return self._compilation.is_compiled

    @property
    def is_released(self) -> bool:
        """Whether the fit is over."""
        return self._root is None

    def release(self) -> None:
        """Leaves module and schedules as they were found; what was measured and decided stays readable."""
        self.fallback.release()
        self.rounding.close()
        self.schedules.detach()
        self.learning_rate.detach()
        self.coupling.release()
        self.knobs.batch_size.release()
        self.knobs.accumulation.release()
        for unit in self.knobs.units.values():
            unit.states.clear()
        self.runtime.containers = ()
        self._rescue.end_trial()
        if self._shadow is not None and not self.is_at_boundary:  # an exception has left the window
            self._shadow.put_back_nonfinite()
        self._root = self._shadow = self._batch = self._running = None
        self.lower_batch_size = None

    # ---- windows ----

    @property
    def is_at_boundary(self) -> bool:
        """Whether the next micro-batch opens a new window."""
        return not self._is_window_open or self._has_stepped

    def begin_step(self) -> None:
        """Called before each micro-batch; the first one opens a window."""
        self.finish_window()
        if self._is_window_open:
            self._earlier_rows += rows_of(self._running)
        else:
            self._open_window()
        self._running = self._batch
        self._effects_at_entry = self._effects
        if self.trial is not None:
            self.trial.forget_graphs()

    def note_batch(self, batch: Any) -> None:
        """Keeps the newest batch until its window ends: where its data are not finite, no layer is to blame."""
        self.finish_window()
        if self._should_free:  # only now nobody holds what did not fit
            self._should_free = False
            free_memory(self.runtime.device_type)
        if self._is_window_open and self._batch is not None:
            self.fallback.note_earlier_batch(self._batch)
        self._batch = batch

    @property
    def rows(self) -> int:
        """Samples in the newest batch, 0 if they are not known."""
        return rows_of(self._batch)

    def _open_window(self) -> None:
        self.apply_pending()
        has_new_formats = self.knobs.changes != self._seen_changes
        if self.costs.sees_calls:
            self.costs.open_window(self.is_sampling and not self.is_compiled, has_new_formats)
        if has_new_formats:
            self._seen_changes = self.knobs.changes
            self.telemetry.note_new_formats()
            self.coupling.follow_formats(self.window)
        self._is_window_open = True
        if self._shadow is not None:
            self._shadow.refresh()
        self.runtime.records.clear()
        self.fallback.begin_window()
        self.runtime.records_all = self.is_sampling
        # several optimizers, and backwards that the user arranges, have no gradient that is known to be one mean
        self.telemetry.noise.begin_window(self.is_sampling and self.is_automatic)
        if self.is_sampling and self.rounding.is_wanted:
            self._begin_rounding()
        self.backwards = self._earlier_rows = 0

    def _begin_rounding(self) -> None:
        knobs = self.knobs
        formats = {unit.name: names for unit in steered_units(knobs) if len(names := knobs.steerable(unit)) > 1}
        self.rounding.begin_window(
            formats, knobs.loss_scale.inv_scale, knobs.loss_scale.planned, self.config.plan.headroom_bits
        )

    def finish_window(self) -> None:
        """Closes the window if a step was attempted: loss scale, guard, telemetry. Safe to call at any time."""
        if not self._has_stepped:
            return
        is_located = self._found_inf and self.fallback.located() is not None
        self._batch = self._running = None
        # an overflow in the forward is answered by its unit; a smaller scale would only cost small gradients
        if self._has_counted and not is_located and not self._follows_trainer:
            self.knobs.move_loss_scale(self._found_inf, self.window + 1)
        if self.is_sampling and self._has_counted and not self._found_inf:
            self.telemetry.note_outputs(self.runtime.records)
            self.rounding.commit()
            self.is_sampling = False
            self.samples += 1
        if self.telemetry.noise.is_open:
            self.telemetry.noise.close()
        if self.rounding.is_open:
            self.rounding.close()
        if self.knobs.is_steering:
            self._compilation.look()
            self.knobs.unit_formats.map_limit = self._compilation.map_limit
        is_untried = self.is_lost and self.trial is not None
        self._rescue.finish_window(self.window + 1, self.applied_steps)
        if is_untried:
            self._rescue.start_trial()
        self.runtime.records.clear()
        self.window += 1
        self._has_stepped = self._has_counted = self._found_inf = self._is_window_open = self.is_lost = False
        if self.knobs.threshold.follows_median:  # else the median, which sorts, is not needed
            self.knobs.threshold.follow(self.telemetry.median_norm, len(self.telemetry.norms), self.window)

    @property
    def _follows_trainer(self) -> bool:
        """A masked loss scale moves as Lightning moves it: after each optimizer, not once per window."""
        return "loss_scale" in self.knobs.masked

    @property
    def _effects(self) -> tuple[int, int]:
        """Grows with everything a training step does to gradients and weights."""
        return self.backwards, self.applied_steps + self.skipped_steps

    # ---- requests ----

    def apply(
        self,
        action: Action,
        why: str = "requested",
        reasons: Mapping[str, str] = MappingProxyType({}),
        is_move: bool = False,
    ) -> None:
        """Carries out a request now; the caller is at a boundary.

        Args:
            action: What is asked for.
            why: Reason to record for what is applied as asked.
            reasons: More, by unit name or ``"clip"``.
            is_move: Whether these are moves of a policy, relative to what is there.
        """
        self.requests.apply(action, self.window, self.applied_steps, why, reasons, is_move)

    def request(self, action: Action) -> None:
        """Checks a request at once and applies it at the next boundary.

        Args:
            action: What is asked for.
        """
        self.requests.defer(action, self.window, self.applied_steps)

    def take_trainer_clip(self, value: float | None, is_by_norm: bool) -> None:
        """Takes over a threshold that user code sets on the Trainer in mid-run."""
        self.knobs.take_trainer_clip(value, is_by_norm, self.window)

    def apply_pending(self) -> None:
        """Applies what was requested inside the last window; called at a boundary."""
        self.requests.apply_pending(self.window, self.applied_steps)
        if self.knobs.accumulation.is_waiting:
            self.knobs.accumulation.apply_if_aligned(self.window)

    def begin_epoch(self) -> None:
        """Called when an epoch begins, once its loaders are set up: sizes that waited for it act from here on."""
        self.knobs.batch_size.begin_epoch(self.window)
        self.apply_pending()

    # ---- the batch ----

    @property
    def batch_factor(self) -> float:
        """The effective batch in units of the one that the run began with."""
        return self.coupling.batch_factor

    def _note_lost(self, samples: int) -> None:
        self.lost_samples += samples

    def _lower_batch_size(self, rows: int) -> bool:
        return self.knobs.batch_size.lower(rows, self.window)

    def prepare_retry(self, failed_attempts: int, error: BaseException) -> bool:
        """Called when a training step raised: makes the next attempt safer, unless the step has taken effect.

        Args:
            failed_attempts: How often the step has raised.
            error: What it raised.

        Returns:
            Whether the step may run again.
        """
        if not self.knobs.is_steering or self._effects != self._effects_at_entry:
            return False
        if not self._rescue.take_measure(failed_attempts, error, self.window, self.applied_steps):
            return False
        if self._shadow is not None:
            self._shadow.restore()
        self.costs.forget_calls()
        return True

    # ---- windows lost to memory ----

    def note_lost_rows(self) -> int:
        """Counts the samples of a window up to now as lost; returns how many there are."""
        samples = self._earlier_rows + self.rows
        self.lost_samples += samples
        self._earlier_rows = 0
        self._batch = self._running = None
        return samples

    def lose_window(self) -> int:
        """Gives the window up, with everything that its forwards and backwards have written but weights.

        Loss scale, guard, and the measurements that decisions rest on stay as they are. Steps that were taken in this
        window before, under manual optimization, count.

        Returns:
            The samples that are lost.
        """
        if not self._has_counted:
            self.lost_windows += 1
            self.telemetry.drop_losses(self.backwards)
        self.is_lost = self._should_free = True
        self._has_stepped = not self.is_automatic  # else the window ends with Lightning's own step
        self.manual_scaling.forget()
        if self._shadow is not None:
            self._shadow.restore()
        if self.trial is not None:
            self.trial.forget_graphs()
        self.runtime.records.clear()
        self.fallback.begin_window()
        return self.note_lost_rows()

    # ---- steps ----

    def sample(self, gradients: Gradients, optimizer: Any = None) -> None:
        """Measures the gradients of a step in detail, before they are clipped, for the decision after it.

        Args:
            gradients: What the step uses.
            optimizer: Takes the step.
        """
        grads, factor, scale = gradients.grads(), gradients.factor, self.knobs.loss_scale.scale
        self.rounding.note_step(gradients.parameters, grads, factor, optimizer)
        formats = self.knobs.unit_formats.current_and_lower()
        self.telemetry.sample_gradients(gradients.parameters, grads, factor, formats, scale)
        self.telemetry.sample_weights(steered_units(self.knobs), formats)

    def on_applied(self, gradients: Gradients, optimizer: int = 0) -> None:
        """Counts an applied step.

        Args:
            gradients: What the step used.
            optimizer: Index of the optimizer.
        """
        self._has_stepped = self._has_counted = True
        self.applied_steps += 1
        if self.knobs.batch_size.is_unproven:
            self.knobs.batch_size.prove()
        if self._follows_trainer:
            self.knobs.loss_scale.update(found_inf=False)
        self.fallback.on_applied(optimizer)
        if self._skipping_since is not None and self.window > self._skipping_since:
            self.history.note_recovery(self._skipping_since, self.window)
            self._skipping_since = None
        scale = self.knobs.loss_scale.scale
        self.telemetry.note_applied(gradients.parameters, gradients.norms, gradients.total, gradients.is_clipped, scale)
        # with several optimizers, the next one's window starts here
        if self._shadow is not None and not self.is_automatic:
            self._shadow.refresh()

    def on_empty(self, is_by_user: bool = False) -> None:
        """Closes a window whose step had no gradient at all: neither applied nor skipped, nothing learnt from it.

        Args:
            is_by_user: Whether that is because ``training_step`` returned no loss.
        """
        self._has_stepped = True
        self.user_skipped_steps += is_by_user

    def on_skipped(self, gradients: Gradients | None, optimizer: int = 0) -> None:
        """Counts a skipped step, puts buffers back and lets the guard react.

        Args:
            gradients: What the step would have used.
            optimizer: Index of the optimizer.

        Raises:
            NonFiniteTrainingError: If everything runs in fp32 and steps keep being skipped.
        """
        self._has_stepped = self._has_counted = self._found_inf = True
        if self._follows_trainer:
            self.knobs.loss_scale.update(found_inf=True)
        self.skipped_steps += 1
        self.has_skipped = True
        if self._skipping_since is None:
            self._skipping_since = self.window
        self.telemetry.note_skipped()
        lost = self._shadow.restore() if self._shadow is not None else []
        if lost:
            rank_zero_warn(
                f"A skipped step wrote {', '.join(lost)} for the first time after the start of training; these buffers"
                " could not be put back."
            )
        self.fallback.on_skipped(gradients, self.window, self.applied_steps, self.skipped_steps, self._batch, optimizer)

    def go_back(self, applied_steps: int, telemetry: Mapping[str, Any]) -> None:
        """Counts the steps that a return to a copy of the run undoes; the caller has put weights and optimizers back.

        Args:
            applied_steps: Those of the copy.
            telemetry: What ``Telemetry.copies`` returned then.
        """
        self.undone_windows += self.applied_steps - applied_steps
        self.applied_steps = applied_steps
        self.telemetry.go_back(telemetry)
        self.knobs.guard.forget_skips()
        self.knobs.unit_formats.go_back(applied_steps)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs, as primitives."""
        if not self.is_in_step:  # saving must not split the window of a step with several optimizers
            self.finish_window()
        return {
            "version": STATE_VERSION,
            **self.counts(),
            "has_skipped": self.has_skipped,
            "skipping_since": self._skipping_since,
            "overflows": dict(self.fallback.overflows),
            "has_new_formats": self.knobs.changes != self._seen_changes,
            "is_sampling": self.is_sampling,
            "records_inputs": self.runtime.records_inputs,
            "knobs": self.knobs.state_dict(),
            "telemetry": self.telemetry.state_dict(),
            "rounding": self.rounding.state_dict(),
            "schedules": self.schedules.state(),
            "plan": self.coupling.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "pending": self.requests.state(),
            "history": self.history.state(),
            "costs": self.costs.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned.

        Raises:
            ValueError: If the state is of another version.
        """
        check_version(state)
        self.coupling.is_resumed = True
        self.load_counts(state)
        self.has_skipped = bool(state.get("has_skipped", False))
        self._skipping_since = state["skipping_since"]
        self.fallback.overflows = dict(state["overflows"])
        self.is_sampling = bool(state["is_sampling"])
        self.runtime.records_inputs = bool(state["records_inputs"])
        self.schedules.load(state["schedules"])
        if "learning_rate" in state:
            self.learning_rate.load_state_dict(state["learning_rate"])
        self.requests.load(state["pending"])
        self.history.load(state["history"])
        self.telemetry.load_state_dict(state["telemetry"])
        if "rounding" in state:  # not in a checkpoint of an earlier version
            self.rounding.load_state_dict(state["rounding"])
        self.knobs.load_state_dict(state["knobs"], self.window)
        self.coupling.load_state_dict(state.get("plan"))
        self.costs.load_state_dict(state.get("costs", {}))
        self._seen_changes = self.knobs.changes - bool(state.get("has_new_formats", False))
        self._rescue.end_trial()
        self._rescue.start_trial()
        self._is_window_open = self._has_stepped = self._has_counted = self._found_inf = self.is_lost = False
