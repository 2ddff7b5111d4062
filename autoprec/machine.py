"""What a result depends on besides the code: versions, command, machine. Imports nothing heavy."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from autoprec.hardware.probing import processor_name
from autoprec.version import __version__


def circumstances(threads: int) -> dict[str, Any]:
    """Returns where, when and with what something runs.

    Args:
        threads: Threads for one operation.
    """
    return {
        "command": f"{_program()} {shlex.join(sys.argv[1:])}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"autoprec": __version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "lightning", "numpy", "scikit-learn")},
        "threads": threads,
        "machine": {"system": platform.platform(), "processor": processor_name(), "cores": os.cpu_count()},
    }


def command_line() -> str:
    """Returns what started this process, options of the interpreter included."""
    program, *arguments = sys.orig_argv or sys.argv
    return shlex.join([Path(program).name, *arguments])


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "python -m autoprec" if name in ("__main__.py", "cli.py") else name


def version(distribution: str) -> str:
    """Returns the version of an installed distribution, or ``not installed``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
