"""The version of what plugin and callback write into checkpoints; what they write is their own business."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATE_VERSION = 1


def check_version(state: Mapping[str, Any]) -> None:
    """Refuses a saved state that this version does not read.

    Args:
        state: What a checkpoint holds.

    Raises:
        ValueError: If its version is missing or another one.
    """
    version = state.get("version")
    if version != STATE_VERSION:
        raise ValueError(
            f"The checkpoint holds autoprec state of version {version!r}, this autoprec reads version {STATE_VERSION}."
            " Resume with the autoprec that wrote it, or remove the entries of autoprec from the checkpoint."
        )
