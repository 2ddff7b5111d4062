"""What a user may set on the plugin and the callback alike, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoprec.config import AutoPrecisionConfig
from autoprec.formats import nearest
from autoprec.knobs import KNOBS
from autoprec.packing import load_codec


class PluginSettings(NamedTuple):
    """What the callback hands to the plugin: settings, knobs that may be moved, precision of evaluation."""

    config: AutoPrecisionConfig
    knobs: tuple[str, ...]
    eval_precision: str


def checked_settings(config: AutoPrecisionConfig | None, knobs: Sequence[str], eval_precision: str) -> PluginSettings:
    """Returns the settings if they are legal.

    Args:
        config: Settings, ``None`` for the defaults.
        knobs: Names of knobs that may be moved.
        eval_precision: ``"base"`` or ``"current"``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a name is unknown. The message lists the names and the nearest one.
        ModuleNotFoundError: If copies of the run are to be compressed and zstandard is not installed.
    """
    if config is not None and not isinstance(config, AutoPrecisionConfig):
        raise TypeError(
            f"Passed `config={config!r}` of type `{type(config).__qualname__}`. It must be an `AutoPrecisionConfig`."
        )
    if not isinstance(knobs, (str, Sequence)):
        raise TypeError(f"Passed `knobs={knobs!r}`. It must be a sequence of names out of {list(KNOBS)}.")
    unknown = [knob for knob in knobs if knob not in KNOBS]
    if isinstance(knobs, str) or unknown:
        hint = nearest(str(unknown[0]), KNOBS) if unknown and not isinstance(knobs, str) else ""
        raise ValueError(f"Passed `knobs={knobs!r}`. `knobs` must hold names out of {list(KNOBS)}.{hint}")
    if eval_precision not in ("base", "current"):
        raise ValueError(f"Passed `eval_precision={eval_precision!r}`. It must be 'base' or 'current'.")
    if config is not None and config.rollback.compress:
        load_codec()
    return PluginSettings(config or AutoPrecisionConfig(), tuple(knobs), eval_precision)
