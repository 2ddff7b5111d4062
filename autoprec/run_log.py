"""Writes the run's metrics every ``log_every_n_steps`` windows to loggers, progress bar and ``callback_metrics``."""

from __future__ import annotations

from typing import Any

import torch

from autoprec.loggers import others_log, take_back
from autoprec.metric_names import BITS
from autoprec.progress_feed import ProgressFeed
from autoprec.steering import Steering
from autoprec.summary import mean_bits, metrics
from autoprec.trainer_facts import log_interval


class RunLog:
    """Metrics of one fit.

    Args:
        feed: Knows the loggers.
    """

    def __init__(self, feed: ProgressFeed) -> None:
        self._feed = feed
        self._logged_window = 0

    def begin(self, window: int) -> None:
        """Takes over the window that training begins with; it is not logged again.

        Args:
            window: The window.
        """
        self._logged_window = window

    def write(self, callback: Any, trainer: Any, steering: Steering) -> None:
        """Writes a row, if one is due.

        Args:
            callback: Has ``log`` and ``log_dict``.
            trainer: Its Trainer.
            steering: State of the fit, between two windows.
        """
        interval, window = log_interval(trainer), steering.window
        if trainer.barebones or window % max(interval, 1):
            return
        values, bits = metrics(steering), mean_bits(steering.knobs)
        before, self._logged_window = self._logged_window, window
        # a row of autoprec's own is written past Lightning, which would end the training where a logger fails
        if trainer.loggers and (self._feed.has_lost_a_logger or not others_log(trainer)):
            take_back(trainer)
            row = {**values, BITS: bits}
            if interval and window != before:
                self._feed.log(row)
            _note(trainer.logged_metrics, row)
            _note(trainer.callback_metrics, row)
            trainer.progress_bar_metrics[BITS] = bits
            return
        # the batch size has no effect here, but Lightning asks for one where `training_step` takes a `dataloader_iter`
        if trainer.loggers:
            callback.log_dict(values, batch_size=1)
        else:  # what `log` does for loggers takes as long as a small step
            _note(trainer.callback_metrics, values)
        if trainer.loggers or trainer.progress_bar_callback is not None:
            callback.log(BITS, bits, prog_bar=True, batch_size=1)
        else:
            _note(trainer.callback_metrics, {BITS: bits})


def _note(known: dict[str, Any], values: dict[str, float]) -> None:
    known.update({name: torch.tensor(value) for name, value in values.items()})
