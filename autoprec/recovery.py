"""What happens when memory runs out: the window is lost, the batch size goes down, and training goes on.

It does so only where there is a smaller size to go to. What does not live here: where the errors are caught (``retry``
and ``stepping``), who lowers the size (``Steering.lower_batch_size``), and what a window leaves behind (``steering``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from autoprec.memory_errors import free_memory, let_go
from autoprec.steering import Steering


class Recovery:
    """Decides about training steps that raised.

    Args:
        steering: State of the fit.

    Attributes:
        drop_gradients: Lets go of all gradients and of what holds the graph.
    """

    def __init__(self, steering: Steering) -> None:
        self.drop_gradients: Callable[[], None] = lambda: None
        self.prepare_retry = steering.prepare_retry
        self.is_automatic = steering.is_automatic
        self._steering = steering
        self._sizes_that_failed: set[int] = set()
        self._half_written_in = -1
        self._step_cut_in = -1

    def skips_micro_batch(self) -> bool:
        """Whether the micro-batch that comes belongs to a window that is lost; then its samples are, too."""
        steering = self._steering
        if not steering.is_lost:
            return False
        steering.finish_window()
        if steering.is_lost:
            steering.note_lost_rows()
        return steering.is_lost

    def note_broken_step(self, is_undone: bool) -> None:
        """Called when memory ran out in a step of an optimizer.

        Args:
            is_undone: Whether weights and state are what they were before.
        """
        self._step_cut_in = self._steering.window
        if not is_undone:
            self._half_written_in = self._steering.window

    def lose_window(self, error: BaseException, outer: BaseException | None = None) -> bool:
        """Called when memory ran out: gives the window up if the batch size can go down.

        Args:
            error: What was raised.
            outer: What was being handled where the step was called.

        Returns:
            Whether the run goes on. If not, nothing was done.
        """
        steering, rows = self._steering, self._steering.rows
        if self._half_written_in == steering.window or steering.lower_batch_size is None:
            return False
        if not steering.lower_batch_size(rows):
            return False
        lines = str(error).strip().splitlines() or [type(error).__name__]
        self.drop_gradients()
        samples = steering.lose_window()
        if not self.is_automatic:
            self._end_manual_step()
        let_go(error, outer)
        free_memory(steering.runtime.device_type)
        if rows not in self._sizes_that_failed:
            self._sizes_that_failed.add(rows)
            rank_zero_warn(
                f"autoprec: a batch of {rows} samples did not fit into memory. {samples} samples of this window are"
                f" lost, and training goes on with {self._size_that_follows()}. The error was: {lines[0]}"
            )
        return True

    def _end_manual_step(self) -> None:
        """Ends what an exception in a training step under manual optimization leaves open."""
        root: Any = self._steering.root
        root.untoggle_optimizer(None)
        if self._step_cut_in == self._steering.window:
            root.trainer.profiler.stop("optimizer_step")

    def _size_that_follows(self) -> str:
        decision = self._steering.history.last("batch_size")
        return "a smaller batch size" if decision is None else f"batches of {decision.applied}"
