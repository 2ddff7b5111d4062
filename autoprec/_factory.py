"""The ``lightning.pytorch.callbacks_factory`` entry point.

Lightning calls it for every Trainer in the environment where autoprec is installed, so it does nothing unless asked.
"""

from __future__ import annotations

import os

from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from autoprec.callback import AutoPrecisionCallback


def callbacks() -> list[Callback]:
    """Returns an ``AutoPrecisionCallback`` if the environment has ``AUTOPREC_AUTO=1`` (or true, yes, on), else nothing.

    It is for Trainers whose code cannot be edited. A Trainer that already has the callback raises Lightning's error
    about two stateful callbacks of one type: use one way or the other.
    """
    value = os.environ.get("AUTOPREC_AUTO", "")
    if value.lower() in ("1", "true", "yes", "on"):
        return [AutoPrecisionCallback()]
    if value.lower() not in ("", "0", "false", "no", "off"):
        rank_zero_warn(f"AUTOPREC_AUTO={value!r} is not understood and adds no callback. Use 1 or 0.")
    return []
