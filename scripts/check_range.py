"""Runs the fast tests at one end of the supported range of torch and lightning.

Usage: ``python scripts/check_range.py lowest|newest``. Each end has its own environment in ``build/range``, which is
kept: a second call only runs the tests. ``lowest`` installs the lower bounds that the installed autoprec declares,
``newest`` what pip takes without a bound above; everything else comes from ``requirements/dev.txt``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANGED = ("torch", "lightning")
FOLLOWS_TORCH = ("triton",)  # each torch asks for one version of it
SETUPTOOLS = "setuptools>=77"  # what the build needs; each version of torch has a bound above of its own


def requirements(end: str) -> list[str]:
    """Returns the lines to install: the development pins with the ranged packages moved to one end."""
    declared = [line for line in requires("autoprec") or [] if re.split("[<>=~! ;[]", line)[0] in RANGED]
    ranged = [line.replace(">=", "==") if end == "lowest" else line for line in declared]
    pins = (ROOT / "requirements" / "dev.txt").read_text().split("\n")
    others = [
        line for line in pins if line and not line.startswith(("#", *(f"{name}==" for name in RANGED + FOLLOWS_TORCH)))
    ]
    return ranged + [SETUPTOOLS if line.startswith("setuptools==") else line for line in others]


def install(python: Path, lines: list[str]) -> None:
    """Creates the environment of ``python`` with ``lines`` in it, unless an earlier call has finished that."""
    folder = python.parents[1]
    ready, wanted = folder / "ready", "\n".join(lines)
    if ready.exists() and ready.read_text() == wanted:
        return
    venv.create(folder, symlinks=True, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *lines], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--editable", str(ROOT)], check=True)
    ready.write_text(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("end", choices=["lowest", "newest"])
    end = parser.parse_args().end
    python = ROOT / "build" / "range" / end / "bin" / "python"
    install(python, requirements(end))
    versions = "import lightning, torch; print(f'torch {torch.__version__}, lightning {lightning.__version__}')"
    subprocess.run([python, "-c", versions], check=True)
    tests = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
    return subprocess.run(tests, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
