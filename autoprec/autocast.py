"""Autocast states that autoprec needs and torch's context manager does not offer.

What lives here: the fp32 ambient (autocast whose target is float32, so that ``torch.matmul`` of a bfloat16 and a
float32 tensor works and the list of float32 operations still applies) and the calls that switch the ambient in place.
What does not: deciding which ambient is wanted (``layers`` and ``precision``).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch

from autoprec.replaced import Replaced

# the fused inference path of TransformerEncoderLayer reads weights past the layers
ENCODER_FAST_PATH = Replaced(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False)


class Autocast(torch.autocast):
    """``torch.autocast`` that accepts ``torch.float32`` as its target on every device.

    Torch's own class warns and switches itself off for float32 on a CPU, although the dispatcher supports it.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` ...
        dtype: Target of the operations that autocast lowers. ``None`` takes the device's current one.
        enabled: ``False`` switches autocast off in the region.
        cache_enabled: Whether casts of weights are cached inside the region.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        is_float32 = enabled and dtype is torch.float32
        super().__init__(
            device_type, torch.bfloat16 if is_float32 else dtype, enabled and not is_float32, cache_enabled
        )
        if is_float32:
            self.fast_dtype = torch.float32
            self._enabled = True


def ambient(device_type: str, dtype: torch.dtype | None) -> torch.autocast:
    """Returns a context in which operations between units run in ``dtype``.

    Args:
        device_type: Device of the tensors.
        dtype: bfloat16, float16, or float32 (mixed inputs are widened). ``None`` switches autocast off.
    """
    if dtype is None:
        return torch.autocast(device_type, enabled=False)
    return Autocast(device_type, dtype, cache_enabled=False)


def set_ambient(device_type: str, dtype: torch.dtype) -> None:
    """Switches the target of the enabled autocast region in place; the region's exit puts the old one back.

    Does nothing while the compiler traces, which does not allow it; compiled layers bring their own regions.
    """
    if not torch.compiler.is_compiling():
        torch.set_autocast_dtype(device_type, dtype)


_TORCHS = Replaced(lambda: torch.amp.autocast, functools.partial(setattr, torch.amp, "autocast"), Autocast)


def float32_recomputation(device_type: str) -> AbstractContextManager[None]:
    """Lets activation checkpointing recompute under a float32 ambient on a CPU.

    ``torch.utils.checkpoint`` records the autocast state of the forward and enters it again through
    ``torch.amp.autocast``, which refuses float32 on a CPU: the recomputation would run without autocast and could
    return other dtypes than the forward did. On other devices nothing is changed.
    """
    return _TORCHS.region() if device_type == "cpu" else nullcontext()
