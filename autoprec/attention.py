"""Which implementation a call of ``scaled_dot_product_attention`` runs in while a training step is steered, on a CPU.

The function of ``torch.nn.functional`` is replaced for the time of a training step, and only where something other than
torch's own was chosen, or a calibration wants to know which calls there are. Calls of other threads, in compiled code,
with dropout, under counters and modes, in regions where the user switched autocast off, and all that torch would not
give to its fused kernel run as always. What does not live here: the arithmetic (``attention_product``), and what is
chosen (a calibration fills ``Runtime.attention``).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoprec import attention_product
from autoprec.onednn import is_watched
from autoprec.replaced import Replaced

_BUILTIN = F.scaled_dot_product_attention
_PLAIN = (Tensor, nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# calls with ever new shapes would fill memory
_MOST_SEEN = 256
# what `torch._fused_sdp_choice` returns for the kernel that has a CPU version
_FUSED = 1


class AttentionSignature(NamedTuple):
    """What a call looks like; equal ones share a choice. Primitives only, and nothing that depends on data.

    Attributes:
        query: Shape.
        key: Shape.
        value: Shape.
        dtype: What the call computes in after autocast, ``"float32"`` or ``"bfloat16"``.
        mask: ``"none"``, ``"bool"`` or ``"float"``.
        mask_shape: Shape of the mask as it was passed.
        is_causal: As passed.
        enable_gqa: As passed.
        has_dropout: Whether probabilities are dropped; then torch's own runs.
        needs_grad: Whether a backward may follow.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    mask: str = "none"
    mask_shape: tuple[int, ...] = ()
    is_causal: bool = False
    enable_gqa: bool = False
    has_dropout: bool = False
    needs_grad: bool = True

    def to_list(self) -> list[Any]:
        """Returns it as a checkpoint holds it."""
        return [list(field) if isinstance(field, tuple) else field for field in self]

    @classmethod
    def from_list(cls, fields: Sequence[Any]) -> AttentionSignature:
        """Reads what :meth:`to_list` returned."""
        values: list[Any] = [tuple(field) if isinstance(field, list) else field for field in fields]
        return cls(*values)


class Choices(Protocol):
    """What is read of the runtime of a fit."""

    attention: dict[AttentionSignature, str]
    attention_seen: dict[AttentionSignature, int]
    attention_ran: set[AttentionSignature]
    wants_attention: bool
    had_autocast: bool


class _Here(threading.local):
    """The innermost steered step of this thread, and whether autocast was on when it began."""

    runtime: Choices | None = None
    has_autocast = False


_here = _Here()


@functools.wraps(_BUILTIN)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands in for torch's function."""
    if not torch.compiler.is_compiling() and _here.runtime is not None:
        signature = _signature_here(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if signature is not None:
            runtime = _here.runtime
            if runtime.wants_attention:
                _note(runtime.attention_seen, signature)
            if runtime.attention.get(signature, "default") == "matmul" and not signature.has_dropout:
                output = _by_products(query, key, value, attn_mask, signature, scale)
                if output is not None:
                    runtime.attention_ran.add(signature)
                    return output
    return _BUILTIN(
        query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


_SWAP = Replaced(
    lambda: F.scaled_dot_product_attention, functools.partial(setattr, F, "scaled_dot_product_attention"), _attention
)


def is_wanted(runtime: Choices) -> bool:
    """Whether steps must look at calls: something was chosen, or somebody asks which calls there are."""
    return runtime.wants_attention or any(name != "default" for name in runtime.attention.values())


@contextmanager
def region(runtime: Choices, is_recomputation: bool = False) -> Iterator[None]:
    """Surrounds a training step or a recomputation whose calls follow ``runtime.attention``.

    Args:
        runtime: The fit's.
        is_recomputation: Whether activation checkpointing repeats, in a backward, parts of the latest step.
    """
    if F.scaled_dot_product_attention not in (_BUILTIN, _attention):
        yield  # another library has its own
        return
    before = _here.runtime, _here.has_autocast
    if not is_recomputation:  # which enters the autocast state of its forward again
        runtime.had_autocast = torch.is_autocast_enabled("cpu")
    _here.runtime, _here.has_autocast = runtime, runtime.had_autocast
    try:
        with _SWAP.region():
            yield
    finally:
        _here.runtime, _here.has_autocast = before


def _signature_here(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> AttentionSignature | None:
    """The signature of a call that may run otherwise than torch runs it, ``None`` for others."""
    if torch.is_autocast_enabled("cpu") != _here.has_autocast or is_watched():
        return None
    if not all(map(_is_plain, (query, key, value))) or (mask is not None and not _is_plain_mask(mask)):
        return None
    if not (scale is None or type(scale) in (int, float)) or type(is_causal) is not bool:
        return None
    if (is_causal and mask is not None) or torch._C._are_functorch_transforms_active():
        return None
    dtype = torch.get_autocast_dtype("cpu") if _here.has_autocast else query.dtype
    if dtype not in _NAMES or (not _here.has_autocast and not query.dtype == key.dtype == value.dtype):
        return None
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return AttentionSignature(
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        _NAMES[dtype],
        "none" if mask is None else "bool" if mask.dtype is torch.bool else "float",
        () if mask is None else tuple(mask.shape),
        is_causal,
        bool(enable_gqa),
        dropout_p > 0.0,
        needs_grad,
    )


def _is_plain(tensor: Any) -> bool:
    if type(tensor) not in _PLAIN or tensor.dtype not in _FLOATS or not tensor.is_cpu:
        return False
    return tensor.ndim == 4 and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 0


def _is_plain_mask(mask: Any) -> bool:
    if type(mask) not in _PLAIN or not (mask.dtype is torch.bool or mask.dtype in _FLOATS) or not mask.is_cpu:
        return False
    return not mask.requires_grad and mask.layout is torch.strided and not mask.is_nested and mask.numel() > 0


def _note(seen: dict[AttentionSignature, int], signature: AttentionSignature) -> None:
    if signature in seen or len(seen) < _MOST_SEEN:
        seen[signature] = seen.get(signature, 0) + 1


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, signature: AttentionSignature, scale: float | None
) -> Tensor | None:
    """Runs a call as matrix products, ``None`` where torch would not give it to the fused kernel."""
    dtype = _DTYPES[signature.dtype]
    # as autocast would
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if mask is not None and mask.dtype is not torch.bool:
        if not _here.has_autocast and mask.dtype is not dtype:
            return None
        mask = mask.to(dtype)
    causal, gqa = signature.is_causal, signature.enable_gqa
    choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=gqa)
    if choice != _FUSED or not fits(signature):
        return None
    if key.shape[1] != query.shape[1]:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return attention_product.attend(query, key, value, mask, causal, factor)


def fits(signature: AttentionSignature) -> bool:
    """Whether matrix products can run a call, by its sizes. Where they do not agree at all, torch raises its own error.

    Args:
        signature: What the call looks like.
    """
    batch, heads, length, width = signature.query
    groups, keys = signature.key[1], signature.key[2]
    if signature.key != (batch, groups, keys, width) or signature.value != signature.key:
        return False
    if groups != heads and not (signature.enable_gqa and heads % groups == 0):
        return False
    if signature.mask == "none":
        return True
    sizes, whole = signature.mask_shape, (batch, heads, length, keys)
    return 2 <= len(sizes) <= 4 and all(m in (1, n) for m, n in zip(sizes[::-1], whole[::-1], strict=False))


def dtype_of(signature: AttentionSignature) -> torch.dtype:
    """Returns what a call computes in.

    Args:
        signature: What the call looks like.
    """
    return _DTYPES[signature.dtype]


def runner(signature: AttentionSignature, implementation: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns a function of query, key and value that computes what a call of that signature does, outside of steps.

    Args:
        signature: What the call looks like; its mask is that of :func:`example`, its scale the usual one.
        implementation: ``"default"`` or ``"matmul"``.
    """
    mask: Tensor | None = None

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal mask
        if mask is None and signature.mask != "none":  # not before it is needed: most cases are known already
            mask = _example_mask(signature, 0)
        seen = mask if mask is None or mask.dtype is torch.bool else mask.to(query.dtype)
        causal, gqa = signature.is_causal, signature.enable_gqa
        if implementation == "default":
            return _BUILTIN(query, key, value, seen, is_causal=causal, enable_gqa=gqa)
        if (group := query.shape[1] // key.shape[1]) > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        return attention_product.attend(query, key, value, seen, causal, query.shape[-1] ** -0.5)

    return run


def saved_bytes(signature: AttentionSignature, implementation: str) -> int:
    """Returns the bytes that a call keeps for its backward, its inputs and its output included.

    Args:
        signature: What the call looks like.
        implementation: ``"default"`` or ``"matmul"``.

    Raises:
        ValueError: If there is no such implementation.
    """
    if implementation not in ("default", "matmul"):
        raise ValueError(
            f"Passed `saved_bytes(implementation={implementation!r})`. `implementation` must be 'default' or 'matmul'."
        )
    if not signature.needs_grad:
        return 0
    size = _DTYPES[signature.dtype].itemsize
    query, key, value = map(math.prod, (signature.query, signature.key, signature.value))
    if implementation == "default":
        output, rows = query // signature.query[-1] * signature.value[-1], query // signature.query[-1]
        return (query + key + value + output) * size + rows * torch.float32.itemsize
    group = signature.query[1] // signature.key[1]
    kept = attention_product.saved_elements(signature.query, signature.key, signature.is_causal)
    return (query + group * (key + value) + kept) * size


def example(signature: AttentionSignature, seed: int = 0) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Returns arguments for a call of that signature, drawn from a generator of its own.

    Queries, keys and values lie in memory as transformers make them, heads next to each other. Masks hide about a
    tenth of the keys, but not the first.

    Args:
        signature: What the call looks like.
        seed: Of the generator.

    Returns:
        Query, key and value, leaves that want gradients if the signature says so; the other arguments by name.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = _DTYPES[signature.dtype]
    leaves = []
    for batch, heads, length, width in (signature.query, signature.key, signature.value):
        drawn = torch.randn(batch, length, heads, width, generator=generator).to(dtype).transpose(1, 2)
        leaves.append(drawn.requires_grad_(signature.needs_grad))
    options: dict[str, Any] = {"is_causal": signature.is_causal, "enable_gqa": signature.enable_gqa}
    if signature.mask != "none":
        options["attn_mask"] = _example_mask(signature, seed)
    return tuple(leaves), options


def _example_mask(signature: AttentionSignature, seed: int) -> Tensor:
    visible = torch.rand(signature.mask_shape, generator=torch.Generator().manual_seed(seed)) > 0.1
    visible[..., 0] = True
    if signature.mask == "bool":
        return visible
    return torch.zeros(signature.mask_shape, dtype=_DTYPES[signature.dtype]).masked_fill_(~visible, -math.inf)
