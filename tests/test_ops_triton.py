"""Runs the tests of the GPU kernels, `test_ops_triton_*.py`, under Triton's interpreter; compiles two kernels.

Triton decides at its import whether it interprets, so each file gets a process of its own.

Time budget: 150 s for all files, each under 60 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoprec.ops.registry import missing_triton

FILES = sorted(Path(__file__).parent.glob("test_ops_triton_*.py"))
ROOT = Path(__file__).parents[1]
MISSING = missing_triton()
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@needs_triton
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_under_the_interpreter(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
def test_streaming_kernels_compile_without_spills(tmp_path: Path) -> None:
    """Two kernels for two vendors; `make triton-aot` compiles all for all."""
    script = ROOT / "scripts" / "triton_aot.py"
    command = [sys.executable, str(script), "--only", "grad_stats t", "--targets", "sm_90", "gfx942"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "triton-aot: kernels=2 targets=2 spills=0 failed=0"


def run_gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_says_that_there_is_no_gpu() -> None:
    done = run_gpu_check()
    assert done.returncode == 2
    assert "there is no GPU here" in done.stdout


@needs_triton
@pytest.mark.slow
def test_gpu_check_holds_under_the_interpreter() -> None:
    done = run_gpu_check("--interpret")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed=0" in done.stdout.splitlines()[-1]


def test_finds_its_files() -> None:
    assert len(FILES) == 4
