"""The ``lightning.pytorch.callbacks_factory`` entry point.

Lightning calls it for every Trainer in the environment where autoprec is installed, so it does nothing unless asked.
"""

from __future__ import annotations

import os

from lightning.pytorch import Callback

from autoprec.callback import AutoPrecisionCallback


def callbacks() -> list[Callback]:
    """Returns an ``AutoPrecisionCallback`` if the environment has ``AUTOPREC_AUTO=1``, else nothing.

    It is for Trainers whose code cannot be edited. A Trainer that already has the callback raises Lightning's error
    about two stateful callbacks of one type: use one way or the other.
    """
    if os.environ.get("AUTOPREC_AUTO") != "1":
        return []
    return [AutoPrecisionCallback()]
