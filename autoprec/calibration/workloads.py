"""Workloads: which different things the layers of a model were seen to compute, and how to make such a layer again.

What lives here: from the calls of a step to distinct workloads, and from a workload to a layer with its input. What
does not: running it in a format (``layer_runs``) and timing it (``timing``).
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoprec.cost import Product
from autoprec.layers import Call
from autoprec.units import Unit, is_exact, kind_of

_LOW = (torch.bfloat16, torch.float16)
_PATTERN = 1 << 16
_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("in_features", "out_features"),
    "conv": (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
        "output_padding",
    ),
    "embedding": ("num_embeddings", "embedding_dim", "padding_idx", "sparse"),
}


class Workload(NamedTuple):
    """What one call of a layer computes, whatever the format. Two calls with the same workload cost the same.

    Attributes:
        layer: Name of torch's class.
        options: Arguments of its constructor, as JSON.
        shape: That of the input; all dimensions of a linear layer's input but the last are one.
        follows: Whether the input comes in the format of the layers before, else it is float32 whatever they run in.
        needs_grad: Whether the input takes a gradient.
        trains: Whether the parameters do.
        is_channels_last: Whether the input lies channels last.
    """

    layer: str
    options: str
    shape: tuple[int, ...]
    follows: bool
    needs_grad: bool
    trains: bool
    is_channels_last: bool = False

    @classmethod
    def from_list(cls, fields: Sequence[Any]) -> Workload:
        """Makes a workload from its fields as a checkpoint holds them.

        Args:
            fields: In order.
        """
        layer, options, shape, follows, needs_grad, trains, is_channels_last = fields
        return cls(layer, options, tuple(shape), follows, needs_grad, trains, is_channels_last)

    @property
    def numel(self) -> int:
        """Entries of the input."""
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """``"linear"``, ``"conv"`` or ``"embedding"``."""
        return {"Linear": "linear", "Embedding": "embedding"}.get(self.layer, "conv")

    @property
    def product(self) -> Product | None:
        """The matrix product of a linear layer."""
        return Product(self.shape[0], self.shape[1], _width_of(self)) if self.kind == "linear" else None

    def __str__(self) -> str:
        """Class, sizes of the input and of the output."""
        return f"{self.layer} {' x '.join(map(str, self.shape))} -> {_width_of(self)}"


def workload_of(call: Call, follows: bool) -> Workload | None:
    """Returns what a call computes, ``None`` for a layer that cannot be made again.

    Args:
        call: The call.
        follows: Whether its input comes in the format of the layers before.
    """
    module, kind = call.module, kind_of(call.module)
    weight = module._parameters.get("weight")
    if kind not in _FIELDS or not is_exact(module) or weight is None or 0 in (*call.shape, *weight.shape):
        return None
    if kind == "conv" and len(call.shape) != weight.ndim:  # one sample without a batch
        return None
    found = {name: getattr(module, name) for name in _FIELDS[kind] if hasattr(module, name)}
    if not type(module).__name__.startswith("ConvTranspose"):
        found.pop("output_padding", None)
    if kind != "embedding":
        found["bias"] = module._parameters.get("bias") is not None
    shape = (math.prod(call.shape[:-1]), call.shape[-1]) if kind == "linear" else tuple(call.shape)
    if kind == "embedding":
        shape = (math.prod(call.shape),)
    layer = next(cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.modules."))
    trains = weight.requires_grad
    return Workload(
        layer, json.dumps(found, sort_keys=True), shape, follows, call.needs_grad, trains, call.is_channels_last
    )


def find_workloads(
    calls: Sequence[Call], units: Mapping[str, Unit], formats: Mapping[str, str]
) -> dict[str, Counter[Workload]]:
    """Finds what each unit computes in a step.

    Args:
        calls: Calls of a step, in order of execution.
        units: All units by name.
        formats: Format of each unit by name, at the time of the calls.

    Returns:
        For each unit how often it computes what. A unit of which one call cannot be made again is left out.
    """
    found: dict[str, Counter[Workload]] = {}
    unknown: set[str] = set()
    before: Call | None = None
    for call in calls:
        workload = workload_of(call, _follows(call, before, units, formats))
        if workload is None or call.name not in units:
            unknown.add(call.name)
        else:
            found.setdefault(call.name, Counter())[workload] += 1
        before = call
    return {name: counts for name, counts in found.items() if name not in unknown}


def _follows(call: Call, before: Call | None, units: Mapping[str, Unit], formats: Mapping[str, str]) -> bool:
    """Whether a layer's input comes in the format of what is before it."""
    if call.dtype in _LOW:
        return True
    if formats.get(call.name, "fp32") not in ("fp32", "tf32"):
        return False  # everything around it is low most of the time, and yet it gets float32
    if before is None or before.name not in units:
        return False
    # norms and the data are float32 in every format; what comes from a layer in float32 may be low later
    return units[before.name].kind != "norm" and formats.get(before.name) in ("fp32", "tf32")


def make_layer(workload: Workload, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Makes a layer and an input, float32, without drawing from the global random generators.

    Args:
        workload: What it computes.
        device: Where.
    """
    module = _on_meta(workload).to_empty(device=device)
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(_PATTERN, generator=generator, dtype=torch.float32, device="cpu").to(device)
    layout = torch.channels_last if workload.is_channels_last else torch.contiguous_format
    for parameter in module.parameters():
        fan_in = max(parameter[0].numel(), 1) if parameter.ndim > 1 else 1
        filled = _fill(parameter.shape, pattern) / math.sqrt(fan_in)
        parameter.data = filled.contiguous(memory_format=layout) if parameter.ndim == 4 else filled
        parameter.requires_grad_(workload.trains)
    if workload.kind == "embedding":
        rows = json.loads(workload.options)["num_embeddings"]
        return module, torch.randint(rows, workload.shape, generator=generator, device="cpu").to(device)
    x = _fill(workload.shape, pattern)
    return module, x.contiguous(memory_format=layout) if x.ndim == 4 else x


def bytes_of(workload: Workload) -> int:
    """Returns about how much memory it takes to run a workload with its gradients, at most.

    Args:
        workload: The workload.
    """
    parameters = sum(parameter.numel() for parameter in _on_meta(workload).parameters())
    return 16 * (parameters + workload.numel + _rows_of(workload) * _width_of(workload))


@functools.lru_cache(maxsize=4096)
def multiplications(workload: Workload) -> int:
    """Returns about how many numbers a workload multiplies, those of a lookup counted once.

    Args:
        workload: The workload.
    """
    weight = next(_on_meta(workload).parameters())
    per_row = weight.shape[1] if workload.kind == "embedding" else weight.numel()
    return _rows_of(workload) * per_row


def _rows_of(workload: Workload) -> int:
    """Entries of the input in one channel."""
    if workload.kind == "embedding":
        return workload.numel
    spatial = int(workload.layer[-2]) if workload.kind == "conv" else 0
    return workload.numel // workload.shape[-1 - spatial]


def _width_of(workload: Workload) -> int:
    options = json.loads(workload.options)
    names = ("out_features", "out_channels", "embedding_dim")
    return int(next(options[name] for name in names if name in options))


def _on_meta(workload: Workload) -> nn.Module:
    cls: type[nn.Module] = getattr(nn, workload.layer)
    options = json.loads(workload.options)
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return cls(**lists, device="meta", dtype=torch.float32)


def _fill(shape: Sequence[int], pattern: Tensor) -> Tensor:
    """Repeats a pattern, which takes next to no time."""
    numel = math.prod(shape)
    repeated = pattern.repeat(-(-numel // pattern.numel()))
    return repeated[:numel].clone().reshape(tuple(shape))
