"""From which size on 8-bit formats are offered to policies.

Time budget: 1 s.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoprec import AutoPrecisionCallback, cost
from autoprec.cost import Product, why_unprofitable
from autoprec.formats import FORMATS
from tests.small_fits import Plain, loader, quiet

SMALLEST_16_BIT = cost._SMALLEST_16_BIT

LARGE = Product(2.0**30, 2**20, 2**20)
sizes = st.integers(0, 2**14)


def why(name: str, *products: Product, device: str = "cpu", is_emulated: bool = False) -> str | None:
    return why_unprofitable(name, device, is_emulated, products)


@pytest.fixture
def small_layers_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_SMALLEST_16_BIT", SMALLEST_16_BIT)


@pytest.mark.usefixtures("small_layers_are_judged")
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("fp8", "int8")])
def test_wider_formats_are_not_judged_where_they_are_emulated(name: str) -> None:
    assert why(name, Product(1, 1, 1), is_emulated=True) is None
    assert why(name, Product(1, 1, 1), device="cuda") is None


@pytest.mark.usefixtures("small_layers_are_judged")
@pytest.mark.parametrize(
    ("products", "pays"),
    [
        ([Product(64, 512, 512)], True),
        ([Product(64, 320, 320)], True),
        ([Product(64, 256, 256)], False),
        ([Product(512, 128, 128)], True),
        ([Product(64, 512, 10)], False),
        ([Product(4096, 512, 10)], True),
        ([Product(math.nan, 8, 8)], True),  # nothing is known against it
        ([], True),
        ([Product(64, 512, 512), Product(64, 512, 1)], True),  # a gate in a block
        ([Product(64, 256, 256), Product(64, 256, 256)], False),
    ],
    ids=str,
)
def test_bf16_on_a_cpu_pays_from_the_measured_sizes_on(products: list[Product], pays: bool) -> None:
    reason = why("bf16", *products)
    assert (reason is None) is pays
    assert why("fp32", *products) is None
    if reason is not None:
        assert str(products[0]) in reason
        assert "64 x 320 x 320" in reason


@pytest.mark.usefixtures("small_layers_are_judged")
@pytest.mark.parametrize(("width", "lowered"), [(64, set()), (512, {"net.2"})])
def test_the_rule_leaves_small_layers_in_fp32(width: int, lowered: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.units.native_formats", lambda device: ("fp32", "bf16"))
    module = Plain()
    module.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 2))
    callback = AutoPrecisionCallback("rule", interval=2, verbose=False)
    quiet(max_epochs=30, callbacks=[callback]).fit(module, loader(batch_size=64))
    assert {name for name, each in callback.precision_map().items() if each == "bf16"} == lowered
    refused = {d.unit for d in callback.history if d.outcome == "refused" and "64 x 320 x 320" in d.reason}
    assert refused == {"net.0", "net.2", "net.3"} - lowered


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_emulation_never_pays(name: str) -> None:
    reason = why(name, LARGE, is_emulated=True)
    assert reason is not None
    assert "emulated" in reason


@pytest.mark.parametrize(
    ("product", "pays"),
    [
        (Product(64, 512, 512), True),
        (Product(256, 256, 256), True),
        (Product(2048, 256, 1024), True),
        (Product(63, 512, 1024), False),  # too few rows to make up for quantising the weight
        (Product(1, 8192, 8192), False),
        (Product(64, 512, 511), False),
        (Product(64, 128, 128), False),
        (Product(2**20, 255, 512), False),  # too narrow, however many rows
        (Product(2**20, 512, 10), False),
        (Product(math.nan, 512, 512), False),
        (Product(0, 512, 512), False),
    ],
    ids=str,
)
def test_int8_on_a_cpu_pays_from_the_measured_sizes_on(product: Product, pays: bool) -> None:
    reason = why("int8", product)
    assert (reason is None) is pays
    if reason is not None:
        assert str(product) in reason
        assert "64 x 512 x 512 or 256 x 256 x 256" in reason


def test_a_block_pays_if_all_its_layers_do() -> None:
    large, small = Product(512, 512, 512), Product(512, 512, 8)
    assert why("int8", large, large) is None
    assert why("int8", large, small) == why("int8", small)


def test_fp8_on_a_gpu_pays_at_the_published_size() -> None:
    assert why("fp8", Product(4096, 8192, 16384), device="cuda") is None
    assert why("fp8", Product(1024, 2048, 1024), device="cuda") is not None


@pytest.mark.parametrize(("name", "device"), [("int8", "cuda"), ("fp8", "cpu"), ("int8", "mps"), ("fp8", "xpu")])
def test_where_nothing_is_known_nothing_is_offered(name: str, device: str) -> None:
    assert why(name, LARGE, device=device) == f"no gain of {name} is known on {device}"


@given(rows=sizes, inner=sizes, outer=sizes, more=st.tuples(sizes, sizes, sizes))
def test_a_larger_product_pays_too(rows: int, inner: int, outer: int, more: tuple[int, int, int]) -> None:
    larger = Product(rows + more[0], inner + more[1], outer + more[2])
    if why("int8", Product(rows, inner, outer)) is None:
        assert why("int8", larger) is None
