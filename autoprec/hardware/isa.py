"""Which instruction sets of a CPU the libraries under torch use: what it has, less what the environment forbids.

Matrix products of fp32 run in MKL, those of narrower formats in oneDNN; each has a variable of its own that keeps it
below what the CPU has. ``ATEN_CPU_CAPABILITY`` limits torch's element-wise kernels only, and no matrix product.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")
# Linux's names in torch's words
_ARM_NAMES = {
    "asimd": "neon",
    "asimdhp": "fp16",
    "bf16": "bf16",
    "i8mm": "i8mm",
    "sve": "sve",
    "svebf16": "sve_bf16",
}

WIDE = frozenset({"avx2", "avx512_f", "fma3"})
"""Flags that products of fp32 rest on."""
_NARROW = frozenset({"avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "amx_fp16"})

_VNNI = frozenset({"avx512_vnni"})
_BF16 = _VNNI | {"avx512_bf16"}
_FP16 = _BF16 | {"avx512_fp16"}
_AMX = _FP16 | {"amx_bf16", "amx_int8"}
_ONEDNN_LEVELS = {
    "SSE41": frozenset[str](),
    "AVX": frozenset[str](),
    "AVX2": frozenset[str](),
    "AVX2_VNNI": frozenset[str](),
    "AVX2_VNNI_2": frozenset[str](),
    "AVX512_CORE": frozenset[str](),
    "AVX512_CORE_VNNI": _VNNI,
    "AVX512_CORE_BF16": _BF16,
    "AVX512_CORE_FP16": _FP16,
    "AVX10_1_512": _FP16,
    "AVX512_CORE_AMX": _AMX,
    "AVX10_1_512_AMX": _AMX,
}
_MKL_LEVELS = {
    "SSE4_2": frozenset[str](),
    "AVX": frozenset[str](),
    "AVX2": frozenset({"avx2", "fma3"}),
    "AVX2_E1": frozenset({"avx2", "fma3"}),
}


def cpu_flags() -> frozenset[str]:
    """Returns the flags of this CPU that matter for matrix products, in the words of ``torch.cpu.get_capabilities``."""
    # younger than the oldest torch in the range
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    flags = {name for name, value in capabilities.items() if value is True}
    checks = {
        "avx2": "_is_avx2_supported",
        "fma3": "_is_avx2_supported",
        "avx512_f": "_is_avx512_supported",
        "avx512_vnni": "_is_vnni_supported",
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_bf16": "_is_amx_tile_supported",
        "amx_int8": "_is_amx_tile_supported",
    }
    for flag, check in checks.items():
        if flag not in capabilities and getattr(torch.cpu, check, lambda: False)():
            flags.add(flag)
    if platform.machine().lower() in ("aarch64", "arm64"):
        flags |= _linux_arm_flags()
    return frozenset(flags)


def _linux_arm_flags() -> set[str]:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:  # not Linux
        return set()
    words = {word for line in lines if line.startswith("Features") for word in line.split(":", 1)[1].split()}
    return {ours for theirs, ours in _ARM_NAMES.items() if theirs in words}


def limit(flags: frozenset[str], environment: Mapping[str, str]) -> tuple[frozenset[str], list[str]]:
    """Returns the flags that matrix products can use, and what a reader should know about the limits.

    Args:
        flags: What the CPU has.
        environment: Variables of the process; the libraries read them when they start.
    """
    notes: list[str] = []
    gone: frozenset[str] = frozenset()
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        level = environment.get(variable, "").upper()
        if not level:
            continue
        missing = (flags & _NARROW) - _ONEDNN_LEVELS.get(level, _NARROW)
        if missing:
            gone |= missing
            notes.append(f"{variable}={level} keeps formats narrower than fp32 from instructions that the CPU has.")
        break  # the first that is set counts
    level = environment.get("MKL_ENABLE_INSTRUCTIONS", "").upper()
    missing = (flags & WIDE) - _MKL_LEVELS.get(level, WIDE)
    if missing:
        gone |= missing
        notes.append(f"MKL_ENABLE_INSTRUCTIONS={level} limits products of fp32 on Intel CPUs.")
    level = environment.get("ATEN_CPU_CAPABILITY", "").lower()
    if level in ("default", "avx2") and "avx512_f" in flags:
        notes.append(f"ATEN_CPU_CAPABILITY={level} limits element-wise operations, not matrix products.")
    return flags - gone, notes
