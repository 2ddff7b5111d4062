"""Files of JSON that are whole or not there, for results that later runs go on from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any, allow_nan: bool = True) -> None:
    """Writes a file whole or not at all.

    Args:
        path: File to write. Its folder is made if it does not exist.
        value: What JSON can hold.
        allow_nan: Whether numbers may be written that are not finite, which strict readers refuse.

    Raises:
        ValueError: If there is such a number and it may not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(value, indent=1, allow_nan=allow_nan) + "\n")
    partial.replace(path)


def read_json(path: Path) -> Any:
    """Returns what a file holds, ``None`` where there is none or it is damaged.

    Args:
        path: File to read.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
