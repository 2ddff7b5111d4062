"""Copies that are no longer what their weights give: what is found, what is not, and the same by every implementation.

Time budget: 20 s.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

from autoprec import ops
from autoprec.ops.staleness import sampled_places
from tests.kernels import ISAS, NONFINITE, SPECIAL, isa, needs_cpu_kernels, unaligned

__all__ = ["isa"]
FORMATS = ["bf16", "fp16", "e4m3", "int8"]
IMPLEMENTATIONS = ["reference", *(["cpu"] if ISAS else [])]
SHAPES = [(1, 1), (3, 5), (64, 64), (65, 130), (8, 3, 5, 5), (0, 4)]


def prepared(weights: list[Tensor], format_name: str, implementation: str) -> ops.SgdStep:
    copies = [ops.new_copy(weight, format_name) for weight in weights]
    step = ops.prepare_sgd(weights, copies=copies, implementation=implementation)
    step.refresh()
    return step


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_copies_as_they_were_written_are_current(format_name: str, implementation: str) -> None:
    rows = [SPECIAL, *([1.0] * 13 + [bad] for bad in NONFINITE), [0.0] * 14]
    weights = [*map(torch.randn, SHAPES), torch.tensor(rows), unaligned(torch.randn(5, 6)) * 1e5]
    if format_name != "int8":
        weights += [torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last), torch.tensor(0.1)]
    step = prepared(weights, format_name, implementation)
    for samples in (1, 4, 33, 100, -1):
        assert [step.stale(samples, seed) for seed in range(10)] == [None] * 10


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_entry_is_reached_in_time(format_name: str, implementation: str) -> None:
    for entry in range(6):
        weight = torch.tensor([[1.0, -1.0], [0.7, 0.9], [-0.9, 0.8]])
        step = prepared([weight], format_name, implementation)
        weight.view(-1)[entry] *= -1
        found = [step.stale(2, seed) for seed in range(40)]
        assert set(found) == {None, 0}
        assert step.stale(-1, 0) == 0
        step.refresh()
        assert [step.stale(2, seed) for seed in range(40)] == [None] * 40


@needs_cpu_kernels
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_implementation_looks_at_the_same_entries(isa: str, format_name: str) -> None:
    image = torch.randn(4, 3, 5, 6)
    images = [image if format_name == "int8" else image.contiguous(memory_format=torch.channels_last)]
    weights = [torch.randn(30, 70), *images, torch.randn(2, 500)]
    steps = [prepared(weights, format_name, implementation) for implementation in IMPLEMENTATIONS]
    for weight in weights:
        weight[torch.rand_like(weight) < 0.03] += 0.3
    for samples in (1, 7, 40, 65):
        reference, cpu = ([step.stale(samples, seed) for seed in (*range(20), -1, 2**64 - 3)] for step in steps)
        assert cpu == reference
        assert len(set(reference)) > 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_first_of_several_is_named(implementation: str) -> None:
    weights: list[Tensor] = [nn.Parameter(torch.randn(8, 8)) for _ in range(5)]
    copies = [None if index == 1 else ops.new_copy(weight, "bf16") for index, weight in enumerate(weights)]
    step = ops.prepare_sgd(weights, copies=copies, implementation=implementation)
    step.refresh()
    weights[1].data.zero_()
    assert step.stale(64, 1) is step.stale(-1, 1) is None
    weights[4].data.clamp_(-0.01, 0.01)
    assert step.stale(4, 1) == step.stale(-1, 1) == 4
    weights[2].data = torch.randn(8, 8)
    assert step.stale(4, 1) == step.stale(-1, 1) == 2
    step.refresh()
    assert step.stale(64, 1) is step.stale(-1, 1) is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("format_name", ["e4m3", "int8"])
def test_a_largest_entry_that_grew_is_found_although_its_value_cannot_grow(
    format_name: str, implementation: str
) -> None:
    weight = torch.ones(1, 1)
    step = prepared([weight], format_name, implementation)
    weight.mul_(1.02)
    assert step.stale(1, 0) == (0 if format_name == "int8" else None)
    assert step.stale(-1, 0) == 0
    weight.mul_(1.02)
    assert step.stale(1, 0) == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_whole_copies_are_compared_with_scales_and_transposed_values(implementation: str) -> None:
    weight = torch.randn(6, 5)
    step = prepared([weight], "int8", implementation)
    (copy,) = step.copies
    assert copy is not None
    for tensor in copy.tensors:
        assert tensor is not None
        tensor.view(-1)[0] += 1
        assert step.stale(-1, 0) == 0
        step.refresh()
        assert step.stale(-1, 0) is None


def test_a_weight_that_became_nan_is_found() -> None:
    for implementation in IMPLEMENTATIONS:
        for format_name in ("bf16", "fp16", "e4m3"):
            weight = torch.randn(3, 4)
            step = prepared([weight], format_name, implementation)
            weight.fill_(math.nan)
            assert step.stale(1, 0) == 0


def test_places_in_a_tensor_of_more_than_2_to_the_32_entries() -> None:
    places = sampled_places(3, 2**40 + 1, 4000, 7)
    assert int(places.min()) >= 0
    assert int(places.max()) <= 2**40
    assert torch.histc(places.double(), bins=8, min=0, max=2**40).min() > 400


def test_the_number_of_samples_is_checked_and_torchs_generators_are_left_alone() -> None:
    step = prepared([torch.randn(3, 4)], "bf16", "reference")
    state = torch.get_rng_state()
    step.stale(4, 0)
    assert torch.equal(torch.get_rng_state(), state)
    for samples in (0, -2):
        with pytest.raises(ValueError, match=re.escape(f"Passed `stale(samples={samples})`.")):
            step.stale(samples, 0)
