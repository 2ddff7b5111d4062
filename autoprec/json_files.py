"""Files of JSON that are whole or not there, which later runs go on from, and values as JSON can hold them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Set
from contextlib import suppress
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
    write_whole(path, (json.dumps(value, indent=1, allow_nan=allow_nan) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all; nothing is left of one that could not be written.

    Args:
        path: File to write, in a folder that exists.
        content: What it is to hold.
    """
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename is None:  # of a disk that is full
            error.filename = str(path)
        raise


def read_json(path: Path) -> Any:
    """Returns what a file holds, ``None`` where there is none or it is damaged.

    Args:
        path: File to read.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def encoded(value: Any) -> Any:
    """Returns a value as JSON can hold it: numbers that are not finite become strings that ``float`` reads.

    Args:
        value: Mappings, sequences, strings, numbers, ``None``.
    """
    if isinstance(value, Mapping):
        return {str(key): encoded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def primitive(value: Any) -> Any:
    """Returns a value as primitives: what is none of them becomes its text.

    Args:
        value: Anything; mappings, sequences and sets are gone through.
    """
    if isinstance(value, Mapping):
        return {str(key): primitive(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, Set)):
        return [primitive(entry) for entry in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
