"""Loss scaling under manual optimization, where a user's backward may or may not have scaled its loss.

What lives here: when it matters which gradients hold a scaled loss, and the warning if they cannot be told apart. What
does not: the marks on gradients (``gradients``), and the scaling of a loss (``precision``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from autoprec.gradients import BARE_BACKWARD, ScaleMarks
from autoprec.loss_scale import LossScale


class ManualScaling:
    """Follows which gradients hold a scaled loss; under automatic optimization all do, and nothing is followed.

    Args:
        loss_scale: The loss scale in use.
        is_automatic: Whether the Trainer runs backward and step.
    """

    def __init__(self, loss_scale: LossScale, is_automatic: bool) -> None:
        self._loss_scale = loss_scale
        self._is_automatic = is_automatic
        self._marks = ScaleMarks()
        self._has_warned = False

    @contextmanager
    def scaled_backward(self, root: nn.Module) -> Iterator[None]:
        """Surrounds each backward of Lightning's: there may be others."""
        if self._is_automatic or not self._loss_scale.enabled:
            yield
            return
        scale = self._loss_scale.scale
        self._marks.begin(root, scale)
        yield
        self._marks.end(root, scale)

    def note_rescaled(self, parameters: Sequence[nn.Parameter]) -> None:
        """Notes that gradients which a clipping had unscaled hold a scaled loss again."""
        if not self._is_automatic:
            self._marks.mark(parameters, self._loss_scale.scale)

    def forget(self) -> None:
        """Forgets all gradients; called where they were let go of without a step."""
        self._marks = ScaleMarks()

    def take_bare(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters whose gradients come from a backward that scaled no loss; warns once.

        Args:
            parameters: The parameters of one optimizer about to step.
        """
        if self._is_automatic or not self._loss_scale.enabled:
            return []
        bare, is_doubtful = self._marks.take(parameters, self._loss_scale.scale)
        if is_doubtful and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(BARE_BACKWARD)
        return bare
