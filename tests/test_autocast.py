"""Autocast states that torch's own context manager does not offer.

Time budget: 5 s.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.autocast import Autocast, ambient, float32_recomputation, set_ambient

LOW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *LOW)


def state() -> tuple[object, ...]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def test_torch_itself_refuses_float32_on_a_cpu() -> None:
    """The reason for this module; if torch learns it, the module can go."""
    with pytest.warns(UserWarning, match="not supported"), torch.autocast("cpu", torch.float32):
        assert not torch.is_autocast_enabled("cpu")


def test_float32_target_widens_mixed_inputs_and_keeps_the_list_of_float32_operations() -> None:
    low, wide = torch.randn(4, 4, dtype=torch.bfloat16), torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Autocast("cpu", torch.float32):
            assert state()[:2] == (True, torch.float32)
            assert torch.equal(low @ wide, low.float() @ wide)
            assert nn.functional.mse_loss(low, wide).dtype == torch.float32
            assert (low @ low).dtype == torch.float32


@pytest.mark.parametrize("dtype", LOW)
def test_other_targets_are_torchs(dtype: torch.dtype) -> None:
    x, layer = torch.randn(4, 4), nn.Linear(4, 4)
    with Autocast("cpu", dtype):
        ours = layer(x)
    with torch.autocast("cpu", dtype):
        theirs = layer(x)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)


def test_disabled_and_default() -> None:
    with Autocast("cpu", torch.float32, enabled=False):
        assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.float16), Autocast("cpu"):
        assert torch.get_autocast_dtype("cpu") == torch.float16


def fail_inside(dtype: torch.dtype | None) -> None:
    with ambient("cpu", dtype):
        set_ambient("cpu", torch.bfloat16)
        raise KeyError


@pytest.mark.parametrize("dtype", [*DTYPES, None])
@pytest.mark.parametrize("outer", [None, *LOW])
def test_ambient_leaves_no_trace(dtype: torch.dtype | None, outer: torch.dtype | None) -> None:
    with torch.autocast("cpu", outer, enabled=outer is not None):
        before = state()
        with ambient("cpu", dtype):
            assert torch.is_autocast_enabled("cpu") == (dtype is not None)
            if dtype is not None:
                assert torch.get_autocast_dtype("cpu") == dtype
                assert not torch.is_autocast_cache_enabled()
                set_ambient("cpu", torch.float16)
        assert state() == before
        with pytest.raises(KeyError):
            fail_inside(dtype)
        assert state() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_set_ambient_acts_in_place_until_the_region_ends(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with ambient("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        set_ambient("cpu", dtype)
        assert layer(x).dtype == dtype
        with torch.autocast("cpu", enabled=False):
            assert layer(x).dtype == torch.float32
        assert layer(x).dtype == dtype


def test_float32_recomputation_puts_torchs_class_back() -> None:
    original = torch.amp.autocast
    with float32_recomputation("cpu"):
        assert torch.amp.autocast is not original
        assert issubclass(torch.amp.autocast, original)
        with float32_recomputation("cpu"):
            pass
    assert torch.amp.autocast is original
    with pytest.raises(KeyError), float32_recomputation("cpu"):
        raise KeyError
    assert torch.amp.autocast is original


def test_float32_recomputation_leaves_other_devices_alone() -> None:
    with float32_recomputation("cuda"):
        assert torch.amp.autocast is torch.autocast


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a08_recomputation_sees_the_ambient_of_the_forward(use_reentrant: bool, dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        raw = h @ h
        seen.append(raw.dtype)
        return raw.exp()

    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    with float32_recomputation("cpu"):
        with ambient("cpu", dtype):
            y = checkpoint(function, x, use_reentrant=use_reentrant)
        y.sum().backward()
    assert seen == [dtype, dtype]
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
