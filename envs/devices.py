"""Profiles of real devices: from the rates of the capability database to what each format costs.

What lives here: a model of one layer's step, and the devices whose profiles proxies are timed as. What does not: rates
(``autoprec.hardware``) and kinds of hardware made by hand (``profiles``).

A step of a linear layer, forward, backward and update, takes the time of its products at the stated dense rate, plus
that of its memory traffic at the stated bandwidth, plus that of starting kernels. fp32 runs in TF32 where the device
has it: whoever cares for speed has switched it on. Formats that the device does not compute itself, or has no rate for,
run at the rate of the format that they are computed in, plus the passes over memory that round their tensors; native
narrow formats pay for casts, scaled ones also for looking for the amax.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.envs.engine import FORMATS
from autoprec.envs.profiles import PROFILES, Profile, Range
from autoprec.formats import nearest
from autoprec.hardware import Device
from autoprec.hardware.database import shipped
from autoprec.hardware.detection import match
from autoprec.hardware.probing import Facts

LAYER_WIDTHS = (512, 1024, 2048, 4096)
"""Widths of the layers that devices are profiled with."""
ROWS = 4096
"""Rows of a step: samples times positions."""
LAYERS = 4
"""Layers of the model that a cast between two of them is a part of."""
REACHED = 0.7
"""Share of stated rates and bandwidths that is reached."""
CPU_GB_PER_S = 150.0
"""Bandwidth of a CPU with ``CPU_CORES``; the database states none."""
CPU_CORES, CPU_GHZ = 16, 2.5
REST = Range(low=0.05, high=0.3)
"""What no format changes, relative to a step's compute in fp32: loading, norms, loss. Starting kernels comes on top."""
_POINTWISE = 6
"""Passes over activations of what lies between two layers, forward and backward."""
_UPDATE_BYTES = 28
"""Traffic of Adam for each weight: weight, gradient and moments in, weight and moments out."""
_KERNELS, _CASTS = 8, 3
_START_US = {"cuda": 4.0, "rocm": 6.0, "cpu": 5.0}

_AVX2 = frozenset({"avx2", "fma3"})
_AVX512 = _AVX2 | {"avx512_f", "avx512_vnni"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}


def _cpu(name: str, flags: frozenset[str]) -> Facts:
    return Facts(device_type="cpu", name=name, capability="x86_64", flags=flags, cores=CPU_CORES, ghz=CPU_GHZ)


def _gpu(name: str, capability: str, device_type: str = "cuda") -> Facts:
    return Facts(device_type=device_type, name=name, capability=capability)


DEVICES: Mapping[str, Facts] = {
    "b200": _gpu("NVIDIA B200", "10.0"),
    "h100": _gpu("NVIDIA H100 80GB HBM3", "9.0"),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", "8.0"),
    "l4": _gpu("NVIDIA L4", "8.9"),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090", "8.9"),
    "rtx-3090": _gpu("NVIDIA GeForce RTX 3090", "8.6"),
    "t4": _gpu("Tesla T4", "7.5"),
    "v100": _gpu("Tesla V100-SXM2-32GB", "7.0"),
    "mi300x": _gpu("AMD Instinct MI300X", "gfx942", "rocm"),
    "cpu-avx2": _cpu("CPU with AVX2", _AVX2),
    "cpu-avx512": _cpu("CPU with AVX512-VNNI", _AVX512),
    "cpu-avx512-bf16": _cpu("CPU with AVX512-BF16", _AVX512_BF16),
    "cpu-amx": _cpu("CPU with AMX", _AVX512_BF16 | {"amx_bf16", "amx_int8"}),
}
"""What the devices say of themselves, so that the database knows them."""


@dataclass(frozen=True)
class _Way:
    """How a device runs a layer in a format.

    Args:
        tflops: Rate of the products.
        carried: Bytes of a value between layers.
        operand: Bytes of a value as the products read it.
        casts: Bytes moved for each value that is rounded: activations, gradients and weights.
        kernels: Kernels that this takes beside those of fp32.
    """

    tflops: float
    carried: int
    operand: float
    casts: float = 0.0
    kernels: int = 0


def profile_from(device: Device, *, name: str, width: int = 1024) -> Profile:
    """Returns what a device charges for layers of a width, by its rates.

    Args:
        device: What the database says of it.
        name: Name of the profile.
        width: Width in and out of the layers.

    Raises:
        ValueError: If the database has no rate of fp32 or no bandwidth of the device.
    """
    is_cpu = device.device == "cpu"
    bandwidth = device.memory_gb_per_s or (CPU_GB_PER_S if is_cpu else None)
    if _rate(device, "fp32") is None or bandwidth is None:
        raise ValueError(
            f"Passed `profile_from` the device {device.name!r}. Its row in the database must state the rate of fp32 and"
            f" the memory bandwidth. Devices with profiles are {sorted(DEVICES)}."
        )
    start_s = _START_US["cpu" if is_cpu else "rocm" if device.family.startswith(("cdna", "rdna")) else "cuda"] * 1e-6
    times = {format_name: _layer_s(_way(device, format_name), width, bandwidth, start_s) for format_name in FORMATS}
    whole, fixed = times["fp32"], _KERNELS * start_s
    cast = 6.0 * ROWS * width / (bandwidth * REACHED * 1e9) + start_s
    return Profile(
        name=name,
        cost={format_name: time / whole for format_name, time in times.items()},
        overhead=Range(low=REST.low + fixed / whole, high=REST.high + 2.0 * fixed / whole),  # hosts differ
        batch_exponent=Range(low=0.8 if is_cpu else 0.4, high=1.0),
        cast_cost=cast / (LAYERS * whole),
    )


@functools.cache
def profile_of(name: str, width: int = 1024) -> Profile:
    """Returns the profile of a kind of hardware or of a real device.

    Args:
        name: One of ``PROFILES`` or of ``DEVICES``.
        width: Width of the layers that a real device is profiled with.

    Raises:
        ValueError: If there is no such profile.
    """
    if name in PROFILES:
        return PROFILES[name]
    if name not in DEVICES:
        known = [*PROFILES, *DEVICES]
        raise ValueError(f"Passed `profile_of({name!r})`. Profiles are {known}.{nearest(name, known)}")
    facts = DEVICES[name]
    # the user's own files do not count: a seed is one task everywhere
    device = match(facts, shipped(), "cpu" if facts.device_type == "cpu" else "cuda:0")
    return profile_from(device, name=name, width=width)


def _rate(device: Device, format_name: str) -> float | None:
    rate = device.formats.get(format_name)
    return rate.tflops if rate is not None and rate.is_native else None


def _way(device: Device, format_name: str) -> _Way:
    """Narrow formats are carried in bf16; what is rounded is read and written in the format that is carried."""
    tf32, bf16, fp16 = (_rate(device, name) for name in ("tf32", "bf16", "fp16"))
    fp32 = tf32 or _rate(device, "fp32")
    assert fp32 is not None
    if format_name == "fp32":
        return _Way(fp32, 4, 4.0)
    if format_name in ("bf16", "fp16"):
        own = bf16 if format_name == "bf16" else fp16
        return _Way(own, 2, 2.0) if own else _Way(fp32, 4, 4.0, casts=8.0, kernels=_CASTS)
    compute, carried = (bf16, 2) if bf16 else (fp32, 4)
    amax = 0 if format_name == "fp8-unscaled" else carried
    kernels = _CASTS * (1 if format_name == "fp8-unscaled" else 2)
    native = _rate(device, "int8" if format_name in ("int8", "int4") else "fp8")
    if native is None:
        return _Way(compute, carried, float(carried), casts=2.0 * carried + amax, kernels=kernels)
    # integers run forward and the input's gradient, the weight's gradient stays in bf16
    rate = 3.0 / (2.0 / native + 1.0 / compute) if format_name in ("int8", "int4") else native
    return _Way(rate, carried, 1.0, casts=carried + 2.0 + amax, kernels=kernels)  # written as it is and transposed


def _layer_s(way: _Way, width: int, bandwidth: float, start_s: float) -> float:
    """Seconds of a step of one layer, without the kernels that every format starts."""
    values, weights = ROWS * width, width * width
    activations = (_POINTWISE + 2) * way.carried + 4 * way.operand  # written twice and read four times by products
    of_weights = 2 * way.operand + way.carried + _UPDATE_BYTES
    traffic = values * activations + weights * of_weights + way.casts * (2 * values + weights)
    products = 6.0 * values * width
    return products / (way.tflops * REACHED * 1e12) + traffic / (bandwidth * REACHED * 1e9) + way.kernels * start_s
