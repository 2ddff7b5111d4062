"""Compiles every GPU kernel ahead of time for four targets and reports registers, shared memory and spills.

No GPU is needed: ptxas comes with Triton, and AMD's compiler writes the numbers into the assembly. The streaming
kernels, which only wait for memory, must not spill. `make triton-aot` runs it and writes `docs/triton_aot.md`.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from autoprec.ops import (
    triton_casts,
    triton_copies,
    triton_matmul,
    triton_optimizers,
    triton_staleness,
    triton_statistics,
    triton_steps,
)
from autoprec.ops.triton_rounding import BFLOAT16, E4M3, E5M2, FLOAT16, FLOAT32, INT8

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# targets whose conversions and matrix units know e4m3fn
NATIVE_FP8 = {"sm_90", "sm_100"}
REPORT = Path(__file__).parents[1] / "docs" / "triton_aot.md"

FP32, BF16, FP16 = FLOAT32.value, BFLOAT16.value, FLOAT16.value
PLAN = {"table": "*i64", "chunk_tensors": "*i32", "chunk_starts": "*i64", "found_inf": "*fp32"}


@dataclass(frozen=True)
class Case:
    """One specialization of a kernel.

    Attributes:
        name: Unique.
        kernel: The jitted function.
        types: Types of its arguments; those not named are float32 scalars.
        constants: Its compile-time arguments.
        options: Warps and stages of the launch.
        is_streaming: Bound by memory: must not spill.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    is_streaming: bool = True


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes: registers of a thread, bytes of shared memory, bytes or registers spilled."""

    registers: int
    shared: int
    spills: int


def statistics_cases() -> Iterator[Case]:
    """Gradient statistics."""
    outputs = {"amaxes": "*fp32", "squares": "*fp64", "counts": "*i64"}
    flags = {"num_warps": 8, "enable_fp_fusion": False}
    for aligned in (True, False):
        yield Case(
            f"grad_stats chunk{'' if aligned else ' unaligned'}",
            triton_statistics.chunk_stats_kernel,
            {**PLAN, **outputs},
            {"ALIGNED": aligned, "SIZE": triton_statistics.CHUNK},
            flags,
        )
    small = triton_statistics.SMALL_LAUNCH
    block = {"BLOCK": triton_statistics.JOIN_BLOCK}
    table = {"table": "*i64", "boundaries": "*i64", "results": "*fp32", "n_tensors": "i32"}
    yield Case("grad_stats tensor", triton_statistics.tensor_stats_kernel, {**table, **outputs}, block, small)
    yield Case("grad_stats total", triton_statistics.total_stats_kernel, table, block, small)
    scalars = {"total_norm": "*fp32", "inv_scale": "*fp32", "result": "*fp32"}
    yield Case("grad_factor", triton_statistics.grad_factor_kernel, scalars, {"HAS_SCALE": True}, small)


def step_cases() -> Iterator[Case]:
    """Optimizer steps and weight copies."""
    launch = dict(triton_optimizers.LAUNCH)
    size = {"SIZE": launch.pop("SIZE")}
    bits = dict.fromkeys(("lr_bits", "beta1_bits", "beta2_bits", "seed", "offset"), "i64")
    for moment, name in ((FP32, "fp32"), (BF16, "bf16"), (FP16, "fp16")):
        for on_device in (True, False):
            yield Case(
                f"adam {name} moment{', device scalars' if on_device else ''}",
                triton_steps.adam_kernel,
                {**PLAN, **bits, "grad_factor": "*fp32" if on_device else "fp32"},
                {"MOMENT": moment, "ALIGNED": True, **size}
                | dict.fromkeys(("HAS_FOUND_INF", "HAS_FACTOR_TENSOR", "HAS_STEP_TENSOR"), on_device),
                launch,
            )
    for has_momentum in (True, False):
        yield Case(
            f"sgd{' momentum' if has_momentum else ''}",
            triton_steps.sgd_kernel,
            {**PLAN, "grad_factor": "*fp32"},
            {"HAS_MOMENTUM": has_momentum, "IS_NESTEROV": has_momentum, "IS_FIRST": False, "ALIGNED": True, **size}
            | dict.fromkeys(("HAS_FOUND_INF", "HAS_FACTOR_TENSOR"), True),
            launch,
        )
    copies = dict(triton_copies.LAUNCH)
    tile = {"TILE": copies.pop("TILE"), "HAS_FOUND_INF": True, "ALIGNED": True}
    yield Case("weight copies amax", triton_copies.copy_amax_kernel, PLAN, tile, copies)
    yield Case("weight copies write", triton_copies.copy_write_kernel, PLAN, tile, copies)
    types = {"table": "*i64", "first": "*i32", "samples": "i32", "seed": "i64", "offset": "i64"}
    yield Case("stale copies", triton_staleness.stale_kernel, types, {"SIZE": 4}, triton_staleness.LAUNCH)


def cast_cases(is_native: bool) -> Iterator[Case]:
    """Casts; the ones with hardware conversions where the target has them."""
    launch, size = triton_casts.LAUNCH, triton_casts.CHUNK
    common = {"x": "*u16", "size": "i32", "seed": "i64", "offset": "i64", "amax": "*i32"}
    shape = {"rows": "i32", "cols": "i32", "width": "i32"}
    flags = {"INPUT": BF16, "SATURATE": True, "NATIVE": is_native}
    yield Case("amax", triton_casts.amax_kernel, common, {"INPUT": BF16, "SIZE": size}, launch)
    for name, code, scaling, is_stochastic in (
        ("e4m3 delayed", E4M3, "given", False),
        ("e4m3 current", E4M3, "current", False),
        ("e5m2 stochastic", E5M2, "given", True),
        ("bf16 stochastic", BFLOAT16, "none", True),
    ):
        yield Case(
            f"cast {name}",
            triton_casts.cast_flat_kernel,
            {**common, "y": "*u16" if code is BFLOAT16 else "*u8", "scale": "*fp32"},
            {**flags, "FORMAT": code.value, "SCALING": scaling, "HAS_AMAX": scaling == "given", "SIZE": size}
            | {"IS_STOCHASTIC": is_stochastic},
            launch,
        )
    for name, code, is_square, is_single, rows, cols in (
        ("int8 rows", INT8, False, True, 4, 1024),
        ("int8 long rows", INT8, False, False, 1, size),
        ("e4m3 1x128", E4M3, False, True, 32, 128),
        ("e4m3 128x128", E4M3, True, True, 128, 128),
    ):
        yield Case(
            f"cast {name}",
            triton_casts.cast_blocks_kernel,
            {**common, **shape, "y": "*i8" if code is INT8 else "*u8", "scales": "*fp32", "amaxes": "*fp32"},
            {**flags, "FORMAT": code.value, "IS_STOCHASTIC": False, "IS_SQUARE": is_square, "IS_SINGLE": is_single}
            | {"ROWS": rows, "COLS": cols},
            launch,
        )
    yield Case(
        "restore 1x128",
        triton_casts.restore_kernel,
        {"x": "*u8", "y": "*fp32", "scales": "*fp32"}
        | dict.fromkeys(("size", "cols", "down", "across", "n_across"), "i32"),
        {"FORMAT": E4M3.value, "HAS_SCALE": True, "IS_FLAT": False, "SIZE": size},
        launch,
    )
    rows_of = {"x": "*fp32", "y": "*fp32", "exponent_bits": "*i64", "mantissa_bits": "*i64", "is_finite_only": "*u8"}
    yield Case("fake_cast", triton_casts.fake_cast_kernel, {**rows_of, "cols": "i32"}, {"SIZE": size}, launch)


def matmul_cases(is_native: bool) -> Iterator[Case]:
    """Matmuls with large and small tiles."""
    sizes = dict.fromkeys(("rows", "cols", "inner"), "i32")
    scales = {"a_scale": "*fp32", "b_scale": "*fp32", "y": "*u16", **sizes}
    fp8_large = triton_matmul.LARGE if is_native else triton_matmul.NARROW
    for size, fp8_tile, int8_tile in (
        ("large", fp8_large, triton_matmul.LARGE),
        ("small", triton_matmul.SMALL, triton_matmul.SMALL),
    ):
        shape, options = _split(fp8_tile)
        yield Case(
            f"matmul fp8 blocks, {size} tile",
            triton_matmul.block_scaled_matmul_kernel,
            {"a": "*u8", "b": "*u8", **scales},
            {"A_E5M2": False, "NATIVE": is_native, **shape},
            {**options, "enable_fp_fusion": True},
            is_streaming=False,
        )
        shape, options = _split(int8_tile)
        yield Case(
            f"matmul int8, {size} tile",
            triton_matmul.int8_matmul_kernel,
            {"a": "*i8", "b": "*i8", "bias": "*fp32", **scales},
            {"HAS_BIAS": True, **shape},
            {**options, "enable_fp_fusion": False},
            is_streaming=False,
        )


def _split(tile: dict[str, int]) -> tuple[dict[str, int], dict[str, Any]]:
    """Compile-time sizes and launch options of a tile."""
    shape = {name: tile[name] for name in ("ROWS", "COLS")} | {"INNER": triton_matmul.BLOCK}
    return shape, {name: tile[name] for name in ("num_warps", "num_stages")}


def cases(target: str) -> list[Case]:
    """Everything that is compiled for a target."""
    is_native = target in NATIVE_FP8
    return [*statistics_cases(), *step_cases(), *cast_cases(is_native), *matmul_cases(is_native)]


def compile_case(case: Case, target: GPUTarget) -> Usage:
    """Compiles one kernel; pointers and the sizes of matrices are taken to be multiples of 16."""
    names = case.kernel.arg_names
    types = {n: "constexpr" if n in case.constants else case.types.get(n, "fp32") for n in names}
    hinted = [i for i, n in enumerate(names) if types[n].startswith("*") or types[n] == "i32"]
    source = triton.compiler.ASTSource(
        fn=case.kernel,
        signature=types,
        constexprs=case.constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in hinted},
    )
    compiled = triton.compile(source, target=target, options=case.options)
    return _amd_usage(compiled) if target.backend == "hip" else _nvidia_usage(compiled, int(target.arch))


def _amd_usage(compiled: Any) -> Usage:
    text = compiled.asm["amdgcn"]
    vector, vector_spills, scalar_spills = (
        max(map(int, re.findall(rf"\.{name}:\s+(\d+)", text)))
        for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    )
    return Usage(vector, compiled.metadata.shared, vector_spills + scalar_spills)


def _nvidia_usage(compiled: Any, arch: int) -> Usage:
    ptx = compiled.asm["ptx"]
    name = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert name, "PTX without a target"
    ptxas = knobs.nvidia.ptxas if arch < 90 else knobs.nvidia.ptxas_blackwell
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        fusion = [] if compiled.metadata.enable_fp_fusion else ["--fmad=false"]
        command = [ptxas.path, "-v", *fusion, f"--gpu-name={name[1]}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))
    return Usage(registers, compiled.metadata.shared, spills)


def table(results: dict[str, dict[str, Usage | str]]) -> str:
    """Markdown: one row for each kernel, registers / shared memory / spills for each target."""
    lines = ["| kernel | " + " | ".join(TARGETS) + " |", "|---|" + "---|" * len(TARGETS)]
    for name, found in results.items():
        cells = [
            f"{usage.registers} / {usage.shared} / {usage.spills}" if isinstance(usage, Usage) else "failed"
            for usage in found.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(results: dict[str, dict[str, Usage | str]]) -> str:
    """The page that is kept in docs."""
    return (
        "# GPU kernels, compiled ahead of time\n\n"
        f"Written by `make triton-aot` on {datetime.date.today().isoformat()} with Triton {triton.__version__}, without"
        " a GPU. Each cell: registers of a thread (vector registers on gfx942) / bytes of shared memory / spills"
        " (bytes; registers on gfx942).\nThe streaming kernels, all but the matmuls, must not spill.\n\n"
        + table(results)
        + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.relative_to(REPORT.parents[1])}")
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, Usage | str]] = {}
    failed = spills = streaming_spills = 0
    for target in options.targets:
        for case in cases(target):
            if options.only not in case.name:
                continue
            try:
                usage: Usage | str = compile_case(case, TARGETS[target])
            except Exception as error:  # a compiler can fail in any way; the others are still worth knowing
                usage, failed = str(error), failed + 1
                print(f"{case.name} for {target}: {error}", file=sys.stderr)
            results.setdefault(case.name, {})[target] = usage
            if isinstance(usage, Usage):
                spills += usage.spills
                streaming_spills += usage.spills if case.is_streaming else 0
    print(table(results))
    if options.write:
        REPORT.write_text(report(results))
    print(f"triton-aot: kernels={len(results)} targets={len(options.targets)} spills={spills} failed={failed}")
    return 1 if failed or streaming_spills else 0


if __name__ == "__main__":
    sys.exit(main())
