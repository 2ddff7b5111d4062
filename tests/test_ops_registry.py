"""Choice of an implementation, the compiled library, and what is said when it is missing.

Time budget: 10 s.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from autoprec import ops
from autoprec.ops import native, registry
from tests.kernels import ISAS, needs_cpu_kernels

GRADS = [torch.tensor([3.0, 4.0])]


@pytest.fixture(autouse=True)
def _fresh_choice() -> Iterator[None]:
    """Forgets what was read from the environment and the disk, before and after."""
    caches = (registry.chosen, registry._resolve, registry._remembered, native._load, native.library)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    if native.missing() is None:
        native.select_isa(None)


def without_library(monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)


def test_what_runs_is_described_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.describe("grad_stats", "cuda") == "eager PyTorch (kernels for cuda run on request)"
    monkeypatch.setattr(native, "missing", lambda: "the extension was not built")
    assert registry.describe("grad_stats", "cpu") == "eager PyTorch (the extension was not built)"
    monkeypatch.setattr(native, "missing", lambda: None)
    assert registry.describe("grad_stats", "cpu") == f"C kernels for {native.selected_isa()}"
    monkeypatch.setattr(registry, "chosen", lambda: "reference")
    assert registry.describe("grad_stats", "cpu") == "eager PyTorch (`AUTOPREC_OPS=reference`)"


def test_has_kernel_is_false_where_only_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not registry.has_kernel("grad_stats", "meta")
    monkeypatch.setattr(registry, "chosen", lambda: "reference")
    assert not registry.has_kernel("grad_stats", "cpu")
    monkeypatch.setattr(registry, "chosen", lambda: "cpu")
    assert registry.has_kernel("grad_stats", "cpu")


def test_the_reference_is_always_there() -> None:
    found = ops.implementations()
    assert list(found) == ["reference", "cpu", "triton"]
    assert found["reference"].is_available
    assert float(ops.grad_stats(GRADS, implementation="reference").total_norm) == 5.0


@needs_cpu_kernels
def test_automatic_choice_takes_the_kernels() -> None:
    assert registry.automatic("grad_stats", "cpu") == "cpu"
    assert registry.automatic("grad_stats", "meta") == "reference"
    assert ops.implementations()["cpu"].detail == f"C kernels for {ISAS[0]}"


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_environment_chooses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "cpu" and native.missing():
        pytest.skip("needs the compiled CPU kernels")
    monkeypatch.setenv("AUTOPREC_OPS", name)
    assert registry.chosen() == name
    assert f".{'cpu' if name == 'cpu' else 'statistics'}" in registry.resolve("grad_stats", "cpu").__module__


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("Passed `'gpu'` as an implementation of `grad_stats`.")):
        ops.grad_stats(GRADS, implementation="gpu")
    with pytest.raises(ValueError, match="Did you mean 'triton'"):
        ops.grad_stats(GRADS, implementation="tritn")


def test_an_explicit_choice_that_cannot_run_raises_with_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    without_library(monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"installed without its compiled kernels.*Available: \['reference'\]"):
        ops.grad_stats(GRADS, implementation="cpu")
    with pytest.raises(RuntimeError, match="grad_stats"):
        ops.grad_stats(GRADS, implementation="triton")


def test_without_the_library_the_reference_runs_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without_library(monkeypatch, None)
    assert float(ops.grad_stats(GRADS).total_norm) == 5.0
    found = ops.implementations()["cpu"]
    assert not found.is_available
    assert "a C compiler builds them" in found.detail
    with pytest.raises(RuntimeError, match="implementation `cpu` is not available"):
        native.library()


def test_a_checkout_that_hides_an_installed_autoprec_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_library(monkeypatch, None)
    (tmp_path / "autoprec" / "ops").mkdir(parents=True)
    (tmp_path / "autoprec" / "ops" / "_C.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    why = native.missing()
    assert why is not None
    assert f"hides {tmp_path / 'autoprec'}, which has: start Python in another folder" in why


def test_a_library_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "_C.so"
    broken.write_text("not a library")
    without_library(monkeypatch, ModuleSpec("_C", None, origin=str(broken)))
    assert f"{broken} does not load" in str(native.missing())


@needs_cpu_kernels
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    assert "build it again" in str(native.missing())


@needs_cpu_kernels
@pytest.mark.parametrize("name", ISAS)
def test_the_environment_picks_the_instruction_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC_ISA", name)
    assert native.selected_isa() == name
    assert ops.implementations()["cpu"].detail == f"C kernels for {name}"


@needs_cpu_kernels
def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("Passed `'avx51'` as an instruction set.")):
        native.select_isa("avx51")
    assert native.selected_isa() == ISAS[0]


@needs_cpu_kernels
def test_every_declared_function_is_exported() -> None:
    header = "".join(path.read_text() for path in (Path(native.__file__).parent / "csrc").glob("ap_*.h"))
    declared = set(re.findall(r"AP_EXPORT [\w ]+?[ *](ap_\w+)\(", header))
    assert declared == set(native._SIGNATURES)
    assert f"AP_ABI_VERSION {native.ABI_VERSION}" in header


@needs_cpu_kernels
def test_the_library_shares_torchs_openmp_runtime() -> None:
    """A second runtime would spin its own threads against torch's."""
    code = (
        "import torch; from autoprec.ops import native; native.library();"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}))"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    root = Path(native.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1
