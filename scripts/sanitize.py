"""Runs the tests of the CPU kernels on a build with AddressSanitizer and UndefinedBehaviorSanitizer.

Usage: ``python scripts/sanitize.py``. Works in a copy of the checkout under ``build/sanitize``, so that the kernels in
use stay as they are. The first report of a sanitizer ends the run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "sanitize"
PARTS = ("autoprec", "envs", "policies", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
OPERATIONS = ("grad_stats", "casts", "steps", "copies", "staleness", "int8")
TESTS = (*(f"ops_{name}" for name in OPERATIONS), "proxy_engine")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"


def copy_checkout() -> None:
    """Makes a fresh copy without compiled files."""
    shutil.rmtree(COPY, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for part in PARTS:
        source, target = ROOT / part, COPY / part
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=ignore)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def runtime() -> str:
    """Libraries that have to be loaded before Python: the sanitizer's, and the C++ runtime whose throws it watches."""
    compiler = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc").split()
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        paths.append(found.stdout.strip())
        if not Path(paths[-1]).is_absolute():
            sys.exit(f"sanitize: {compiler[0]} has no {name}")
    return " ".join(paths)


def main() -> int:
    copy_checkout()
    build = {**os.environ, "CFLAGS": FLAGS, "LDFLAGS": FLAGS}
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=COPY, env=build, check=True)
    # what Python itself never frees is no finding
    options = {"LD_PRELOAD": runtime(), "ASAN_OPTIONS": "detect_leaks=0", "AUTOPREC_OPS": "cpu", "OMP_NUM_THREADS": "1"}
    tests = [f"tests/test_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=COPY, env={**os.environ, **options}, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if done.returncode:
        print("sanitize: failed")
        return 1
    passed = re.findall(r"(\d+) passed", done.stdout)
    print(f"sanitize: {passed[-1]} tests passed under AddressSanitizer and UndefinedBehaviorSanitizer, no findings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
