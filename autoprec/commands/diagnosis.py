"""What ``autoprec doctor`` finds out, as plain data, and its advice."""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from autoprec import __version__
from autoprec.commands import extras

VARIABLES = (
    *("AUTOPREC_AUTO", "AUTOPREC_CACHE_DIR", "AUTOPREC_CHECK", "AUTOPREC_HARDWARE_DIR", "AUTOPREC_ISA"),
    *("AUTOPREC_OPS", "AUTOPREC_TRACEBACK"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "KMP_BLOCKTIME"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "LD_PRELOAD"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "PYTORCH_CUDA_ALLOC_CONF"),
    *("PYTORCH_ALLOC_CONF", "PL_GLOBAL_SEED", "WANDB_MODE"),
)
"""Environment variables that change what is computed, or how fast."""

_PACKAGES = ("torch", "lightning", "pytorch-lightning", "numpy", "triton", "torchao", "transformers", "jsonargparse")
_REFUSED = {"transformer_engine": "TransformerEngine", "bitsandbytes": "bitsandbytes", "deepspeed": "DeepSpeed"}
_ENTRY_POINTS = "lightning.pytorch.callbacks_factory"


def diagnose() -> dict[str, Any]:
    """Returns what a bug report needs, as JSON can hold it."""
    import torch

    found: dict[str, Any] = {
        "versions": _versions(),
        "system": _system(),
        "threads": {"torch": torch.get_num_threads(), "interop": torch.get_num_interop_threads()},
        "devices": _devices(),
        "kernels": _kernels(),
        "caches": _caches(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "extras": {extra: extras.missing(extra) for extra in extras.EXTRAS},
        "lightning": _lightning(),
    }
    return {**found, "advice": list(advise(found))}


def _versions() -> dict[str, str]:
    found = {"autoprec": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    import torch

    # a build says more than its distribution: +cpu, +cu129
    return {**found, "torch": torch.__version__}


def _system() -> dict[str, Any]:
    from autoprec.hardware.probing import processor_name
    from autoprec.machine_load import total_bytes

    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return {
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": cores,
        "usable_cores": usable,
        "memory_bytes": total_bytes(),
    }


def _devices() -> list[dict[str, Any]]:
    from autoprec.formats import FORMATS
    from autoprec.hardware import describe, devices

    described = [describe(device) for device in devices()]
    return [
        {
            "device": each.device,
            "name": each.name,
            "family": each.family,
            "row": list(each.row),
            "native": list(each.native),
            "emulated": [name for name in FORMATS if name not in each.native],
            "notes": list(each.notes),
        }
        for each in described
    ]


def _kernels() -> dict[str, Any]:
    from autoprec.ops import implementations, native

    known = implementations()
    spec = importlib.util.find_spec("autoprec.ops._C")
    forced = os.environ.get("AUTOPREC_OPS")
    automatic = "cpu" if known["cpu"].is_available else "reference"
    why_missing = native.missing()
    return {
        "implementations": {
            name: {"available": each.is_available, "detail": each.detail} for name, each in known.items()
        },
        "chosen": f"{forced} (AUTOPREC_OPS)" if forced else automatic,
        "extension": None if spec is None else spec.origin,
        "why_missing": why_missing,
        "isas": native.available_isas() if why_missing is None else [],
    }


def _caches() -> dict[str, Any]:
    import torch

    from autoprec.calibration.cache import Cache, cache_folder, key_of
    from autoprec.hardware.database import user_directories

    folder = cache_folder()
    key = key_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    own = Cache(key, folder)
    files = [_calibration_file(path, own) for path in sorted(folder.glob("calibration-*.json"))]
    found = {"calibration": {"folder": str(folder), "is_writable": _is_writable(folder), "files": files}}
    for index, each in enumerate(user_directories()):
        names = [{"name": path.name, "state": "rows of your own"} for path in sorted(each.glob("*.toml"))]
        name = "hardware" if index == 0 else f"hardware {index + 1}"
        found[name] = {"folder": str(each), "is_writable": _is_writable(each), "files": names}
    return found


def _calibration_file(path: Path, own: Any) -> dict[str, Any]:
    try:
        size = f"{path.stat().st_size / 1024:.0f} KiB"
    except OSError as error:  # a link to nowhere, or another run has just removed it
        return {"name": path.name, "state": f"cannot be read: {error.strerror or error}"}
    if path != own.path:
        return {"name": path.name, "state": f"{size}, of another device, thread count or version"}
    if own.note is not None:
        return {"name": path.name, "state": own.note}
    return {"name": path.name, "state": f"{size}, {len(own.entries)} measurements, used by runs with these threads"}


def _is_writable(folder: Path) -> bool:
    """Whether a file can be made there, or the folder itself where it does not exist."""
    try:
        while not folder.exists() and folder.parent != folder:  # raises where a folder above may not be looked into
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _lightning() -> dict[str, Any]:
    from lightning.pytorch.strategies import StrategyRegistry

    names = [name for name in ("lightning", "pytorch_lightning") if importlib.util.find_spec(name) is not None]
    points = [point.value for point in metadata.entry_points(group=_ENTRY_POINTS) if point.name == "autoprec"]
    plugins = {text: name for name, text in _REFUSED.items() if importlib.util.find_spec(name) is not None}
    return {
        "packages": names,
        "entry_point": "found" if points else "not found (autoprec is not installed, only on the path)",
        "strategy": "autoprec" in StrategyRegistry,
        "refused_plugins": dict.fromkeys(plugins, "it does its own precision"),
    }


def advise(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is known to go wrong, each with what to do.

    Args:
        found: What :func:`diagnose` has found.
    """
    environment, kernels, system = found["environment"], found["kernels"], found["system"]
    if kernels["why_missing"] is not None:
        yield f"{kernels['why_missing']}. Until then plain PyTorch measures and steps, more slowly."
    if "pytorch_lightning" in found["lightning"]["packages"]:
        yield (
            "`pytorch_lightning` is installed too, as `lightning` brings it. The two do not mix: import Trainer,"
            " LightningModule and callbacks from `lightning.pytorch`."
        )
    if found["threads"]["torch"] > system["usable_cores"]:
        yield (
            f"torch uses {found['threads']['torch']} threads on {system['usable_cores']} usable cores, and they wait"
            f" for each other. Set OMP_NUM_THREADS={system['usable_cores']}."
        )
    for name, each in found["caches"].items():
        if not each["is_writable"] and name == "calibration":
            yield (
                f"{each['folder']} cannot be written: every run measures anew. Set AUTOPREC_CACHE_DIR to a folder of"
                " yours."
            )
    yield from _device_advice(found["devices"])
    yield from _variable_advice(environment)


def _device_advice(devices: list[Mapping[str, Any]]) -> Iterator[str]:
    for device in devices:
        if "bf16" not in device["native"] and "fp16" not in device["native"]:
            yield (
                f"{device['device']} has no 16-bit format of its own: low precision saves no time there, and policies"
                " keep fp32."
            )


def _variable_advice(environment: Mapping[str, str]) -> Iterator[str]:
    if environment.get("AUTOPREC_AUTO", "").lower() in ("1", "true", "yes", "on"):
        yield (
            "AUTOPREC_AUTO adds the callback to every Trainer. A Trainer that has one already raises an error about two"
            " stateful callbacks; unset one of the two."
        )
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield "CUDA_LAUNCH_BLOCKING makes every step wait for the GPU; times mean nothing. Unset it."
    if environment.get("AUTOPREC_CHECK", "0") not in ("", "0"):
        yield "AUTOPREC_CHECK compares all copies of weights in every step, which takes time. Unset it for real runs."
    limits = [name for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "AUTOPREC_ISA") if name in environment]
    if limits:
        yield f"{', '.join(limits)} keeps instructions of this CPU unused, those of bf16 and int8 perhaps."
    if environment.get("NVIDIA_TF32_OVERRIDE") is not None:
        yield "NVIDIA_TF32_OVERRIDE decides on tf32 past torch and autoprec. Unset it; `tf32` is a format here."
