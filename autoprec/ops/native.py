"""Finds and loads the compiled CPU kernels; says why they are missing.

What lives here: the C functions as ctypes sees them. What does not: tensors.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from ctypes import c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch  # loads the OpenMP runtime that the kernels then share

from autoprec.formats import nearest

ABI_VERSION = 3
MASK64 = 2**64 - 1
ISAS = ("avx512", "avx2", "scalar")

# what ap_ops.h calls the dtypes and formats
FP32, BF16, FP16, E4M3, E5M2, INT8, TF32 = range(7)
CODES = {
    torch.float32: FP32,
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    torch.int8: INT8,
}


class Copy(ctypes.Structure):
    """``ap_copy``."""

    _fields_ = (
        ("format", c_int64),
        ("values", c_void_p),
        ("scale", c_void_p),
        ("transposed_values", c_void_p),
        ("transposed_scale", c_void_p),
    )


class Parameter(ctypes.Structure):
    """``ap_parameter``."""

    _fields_ = (
        ("param", c_void_p),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("step", c_void_p),
        ("size", c_int64),
        ("rows", c_int64),
        ("cols", c_int64),
        ("moment_format", c_int64),
        ("element", c_uint64),
        ("first_chunk", c_int64),
        ("copy", Copy),
    )


class AdamOptions(ctypes.Structure):
    """``ap_adam_options``."""

    _fields_ = (
        *((name, c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_factor")),
        ("decoupled", c_int64),
        ("seed", c_uint64),
        ("offset", c_uint64),
    )


class SgdOptions(ctypes.Structure):
    """``ap_sgd_options``."""

    _fields_ = (
        *((name, c_double) for name in ("lr", "momentum", "dampening", "weight_decay", "grad_factor")),
        ("nesterov", c_int64),
        ("is_first", c_int64),
    )


_POINTER = c_void_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ap_abi_version": (c_int, ()),
    "ap_select": (c_int, (c_char_p,)),
    "ap_selected": (c_char_p, ()),
    "ap_grad_stats": (c_int, (c_int64, *[_POINTER] * 6, c_int)),
    "ap_adam": (None, (c_int64, *[_POINTER] * 4, c_int)),
    "ap_sgd": (None, (c_int64, *[_POINTER] * 4, c_int)),
    "ap_refresh": (None, (c_int64, _POINTER, c_int)),
    "ap_stale": (c_int64, (c_int64, _POINTER, c_int64, c_uint64)),
    "ap_cast": (None, (_POINTER, c_int, *[c_int64] * 4, c_int, c_int, c_float, *[_POINTER] * 4, c_int)),
    "ap_restore": (None, (_POINTER, c_int, *[c_int64] * 4, _POINTER, _POINTER, c_int)),
    "ap_fake_cast": (None, (_POINTER, c_int64, c_int64, *[_POINTER] * 4, c_int)),
    "ap_dequantize": (c_int, (_POINTER, c_int64, c_int64, *[_POINTER] * 4, c_int)),
    "ap_random": (None, (c_uint64, c_uint64, c_uint64, c_int64, _POINTER)),
    "ap_proxy_create": (_POINTER, (_POINTER,)),
    "ap_proxy_free": (None, (_POINTER,)),
    "ap_proxy_run": (None, (c_int64, *[_POINTER] * 3, c_int)),
    "ap_proxy_read": (c_int64, (_POINTER, c_int, _POINTER)),
    "ap_proxy_write_parameters": (None, (_POINTER, _POINTER)),
}


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    spec = importlib.util.find_spec("autoprec.ops._C")
    if spec is None or spec.origin is None:
        other = _compiled_elsewhere()
        if other is not None:  # Python was started in a checkout, and prefers it
            return (
                f"{Path(__file__).parents[1]} has no compiled kernels (autoprec.ops._C), and hides {other}, which has:"
                " start Python in another folder, or build them here with `pip install -e .`"
            )
        return "autoprec was installed without its compiled kernels (autoprec.ops._C); a C compiler builds them"
    try:
        library = ctypes.CDLL(spec.origin)
        version = library.ap_abi_version()
    except (OSError, AttributeError) as error:
        return f"{spec.origin} does not load: {error}"
    if version != ABI_VERSION:
        return f"{spec.origin} has ABI version {version}, this autoprec needs {ABI_VERSION}; build it again"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compiled_elsewhere() -> Path | None:
    """An installed autoprec with kernels that the imported one hides."""
    own = Path(__file__).parents[1]
    for entry in sys.path:
        package = Path(entry).resolve() / "autoprec"
        if package != own.resolve() and any((package / "ops").glob("_C.*")):
            return package
    return None


def missing() -> str | None:
    """Returns why the kernels cannot run, ``None`` if they can."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the loaded library, running the best kernels of this machine or those that ``AUTOPREC_ISA`` names.

    Raises:
        RuntimeError: If there is no library.
        ValueError: If the machine does not have what ``AUTOPREC_ISA`` asks for.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(f"The implementation `cpu` is not available: {loaded}.")
    isa = os.environ.get("AUTOPREC_ISA")
    if isa:
        _select(loaded, isa)
    return loaded


def select_isa(isa: str | None) -> str:
    """Makes all later calls run the kernels of one instruction set; for tests and benchmarks.

    Args:
        isa: ``"scalar"``, ``"avx2"``, ``"avx512"``, or ``None`` for the best that the machine has.

    Returns:
        The name of what runs now.

    Raises:
        ValueError: If the machine does not have it.
    """
    return _select(library(), isa)


def _select(loaded: ctypes.CDLL, isa: str | None) -> str:
    if loaded.ap_select(None if isa is None else isa.encode()) != 0:
        raise ValueError(
            f"Passed `{isa!r}` as an instruction set. This machine can run some of {ISAS}, `scalar` always."
            f"{nearest(str(isa), ISAS)}"
        )
    return _selected(loaded)


def selected_isa() -> str:
    """Returns the name of the instruction set in use."""
    return _selected(library())


def _selected(loaded: ctypes.CDLL) -> str:
    name: bytes = loaded.ap_selected()
    return name.decode()


def available_isas() -> list[str]:
    """Returns the instruction sets that this machine can run, best first. The choice in use is left as it is."""
    current, found = selected_isa(), []
    for isa in ISAS:
        if library().ap_select(isa.encode()) == 0:
            found.append(isa)
    select_isa(current)
    return found
