"""Whether an implementation is as exact as torch's own, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoprec import onednn
from autoprec.attention import AttentionSignature, example
from autoprec.attention_product import attend

_MOST_OF_A_SAMPLE = 64


def is_exact_enough(
    found: Sequence[Tensor], usual: Sequence[Tensor], exact: Sequence[Tensor], factor: float = 2.0
) -> bool:
    """Whether the error of results against exact ones is within a factor of the error of torch's own.

    Args:
        found: Results of an implementation.
        usual: Those of torch's own.
        exact: Those in float64.
        factor: How many times the error of ``usual`` each result may have.
    """
    return all(
        error_of(one, truth) <= factor * error_of(other, truth)
        for one, other, truth in zip(found, usual, exact, strict=True)
    )


def error_of(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is exact; inf if something is not finite."""
    error = float(
        (found.detach().double() - exact.detach()).norm()
        / exact.detach().norm().clamp_min(torch.finfo(torch.float64).tiny)
    )
    return error if error == error else float("inf")


def is_linear_exact_enough(rows: int, in_features: int, out_features: int, seed: int = 0) -> bool:
    """Measures whether oneDNN's product of a float32 linear layer is as exact as torch's, backward included.

    The whole products are computed; samples of their entries are compared with float64.

    Args:
        rows: Rows of the input.
        in_features: Of the layer.
        out_features: Of the layer.
        seed: Of the generator that draws the operands.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator)
    grad = torch.randn(rows, out_features, generator=generator)
    # left and right of `left @ right.T`, in the forward and for the two gradients
    return all(
        _is_product_exact_enough(left, right) for left, right in ((x, weight), (grad, weight.t()), (grad.t(), x.t()))
    )


def _is_product_exact_enough(left: Tensor, right: Tensor) -> bool:
    rows, cols = slice(0, _MOST_OF_A_SAMPLE), slice(0, _MOST_OF_A_SAMPLE)
    exact = left[rows].double() @ right[cols].double().t()
    with torch.autocast("cpu", enabled=False):
        found, usual = onednn.product(left, right), left @ right.t()
    return is_exact_enough([found[rows, cols]], [usual[rows, cols]], [exact])


def is_attention_exact_enough(signature: AttentionSignature, seed: int = 0) -> bool:
    """Measures whether attention by matrix products is as exact as torch's own, backward included.

    Args:
        signature: What the call looks like; one sample with all of its heads is computed.
        seed: Of the generator that draws the operands.
    """
    shapes = [(1, *shape[1:]) for shape in signature[:3]]
    mask_shape = signature.mask_shape
    if len(mask_shape) == 4:
        mask_shape = (1, *mask_shape[1:])
    fused: Any = torch.nn.functional.scaled_dot_product_attention
    small = signature._replace(query=shapes[0], key=shapes[1], value=shapes[2], mask_shape=mask_shape)
    operands, options = example(small, seed)
    group = shapes[0][1] // shapes[1][1]
    mask, scale = options.get("attn_mask"), shapes[0][-1] ** -0.5
    with torch.autocast("cpu", enabled=False):
        query, key, value = operands[0], *(each.repeat_interleave(group, 1) for each in operands[1:])
        results = [
            attend(query, key, value, mask, small.is_causal, scale),
            fused(*operands, **options),
        ]
        wide = [each.detach().double().requires_grad_(each.requires_grad) for each in operands]
        if mask is not None and mask.dtype is not torch.bool:
            options["attn_mask"] = mask.double()
        exact = fused(*wide, **options)
        if not small.needs_grad:
            return is_exact_enough(results[:1], results[1:], [exact])
        grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed), dtype=results[0].dtype)
        found, usual = ([each, *torch.autograd.grad(each, operands, grad)] for each in results)
        return is_exact_enough(found, usual, [exact, *torch.autograd.grad(exact, wide, grad.double())])
