"""Compiled layers: the eager values, a bounded number of graphs, none in steady state.

Time budget: 30 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.autocast import ambient
from autoprec.formats import get_format
from autoprec.layers import detach, set_format
from tests.steered import (
    BF16,
    TORCH_REMARKS,
    assert_near,
    attached,
    run,
    steered,
)

pytestmark = TORCH_REMARKS

# ---- compiled ----


@pytest.fixture
def graphs() -> Any:
    """Counts compiled graphs."""

    class Counting:
        count = 0

        def __call__(self, graph: Any, example: Any) -> Any:
            self.count += 1
            return graph.forward

    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


@pytest.mark.parametrize("rounds", [("bf16", "fp32"), ("fp16", "bf16"), ("int8", "fp32", "fp8")], ids="-".join)
def test_a20_a_compiled_unit_is_bounded_and_settles(rounds: tuple[str, ...], graphs: Any) -> None:
    net, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(16, 16)
    for layer in (net[0], net[2]):
        layer.compile(backend=graphs)
    units, runtime = attached(net, {})
    runtime.is_active = runtime.is_recording = True
    counts = []
    for name in rounds * 6:
        for unit in units:
            set_format(unit, name)
        for _ in range(3):
            with ambient("cpu", torch.float32):
                y = net(x)
            y.float().sum().backward()
            counts.append(graphs.count)
        assert y.dtype == get_format(name).compute_dtype
    runtime.is_active = False
    detach(units)
    settled = counts[4 * len(rounds) * 3 :]
    assert len(set(settled)) == 1, "a format that was seen before is compiled again"
    # each layer once per format, and once more where its ambient differs at the second call
    assert 2 * len(rounds) <= graphs.count <= 4 * len(rounds)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "fp8", "tf32", "fp32"])
def test_compiled_layers_compute_what_eager_ones_do(name: str, dtype: torch.dtype, graphs: Any) -> None:
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(16, 16)
    with steered(net, name, dtype=dtype):
        eager, expected = run(net, [x])
    compiled = torch.compile(net, backend=graphs)
    for _ in range(3):
        with steered(net, name, dtype=dtype):
            outputs, gradients = run(compiled, [x])
    assert graphs.count == 1
    assert outputs[0].dtype == eager[0].dtype
    assert_near(outputs, eager, 2.0**-6)
    assert_near(gradients, expected, 2.0**-6)
