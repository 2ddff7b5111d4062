"""Sweeps: offline tuning with Optuna over the callback's options, maps and the user's own hyper-parameters.

Needs the extra ``sweep``. :func:`run` does it all, ``autoprec sweep`` is the same from the command line.
"""

from __future__ import annotations

import importlib.util

_NEEDED = ("optuna", "sqlalchemy", "filelock", "plotly", "rich")
_missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"`autoprec.sweep` needs {', '.join(_missing)}. Run `pip install '.[sweep]'` in a checkout of autoprec.",
        name=_missing[0],
    )

from autoprec.sweep.config import SweepConfig, SweepError  # noqa: E402
from autoprec.sweep.reading import load_config  # noqa: E402
from autoprec.sweep.results import SweepResult, TrialRecord  # noqa: E402
from autoprec.sweep.running import SweepInterruptedError, run  # noqa: E402

__all__ = [
    "SweepConfig",
    "SweepError",
    "SweepInterruptedError",
    "SweepResult",
    "TrialRecord",
    "load_config",
    "run",
]
