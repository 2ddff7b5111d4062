"""What a device computes itself: which formats are native, which are emulated there."""

from __future__ import annotations

import functools

import torch


@functools.cache
def _native_on_cpu() -> tuple[str, ...]:
    names = ["fp32"]
    # the checks are private and younger than the lowest supported torch on some platforms
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    if any(check is not None and check() for check in (has_bf16, has_amx)):
        names.append("bf16")
    if has_vnni is not None and has_vnni():
        names.append("int8")
    return tuple(names)


def _native_on_cuda(capability: tuple[int, int]) -> tuple[str, ...]:
    names = ["fp32"]
    if capability >= (8, 0):
        names += ["tf32", "bf16"]
    if capability >= (7, 0):
        names.append("fp16")
    if capability >= (8, 9):
        names.append("fp8")
    if capability >= (8, 0):
        names.append("int8")
    return tuple(names)


def native_formats(device: torch.device) -> tuple[str, ...]:
    """Returns the formats that the device multiplies itself, widest first; all others are emulated there.

    Args:
        device: Any torch device. Only CPU and CUDA devices are known in detail; on others float32 and float16 count as
            native.
    """
    if device.type == "cpu":
        return _native_on_cpu()
    if device.type == "cuda":
        if torch.version.hip is not None:
            return ("fp32", "bf16", "fp16")
        return _native_on_cuda(torch.cuda.get_device_capability(device))
    return ("fp32", "fp16")
