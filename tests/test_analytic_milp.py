"""The integer program finds what a look at every map finds.

Time budget: 20 s.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.policies.analytic_milp import Limit, Table, check_scipy, choose, least, total

FORMATS = ("fp32", "bf16", "fp16", "int8")
# far apart as rounding errors are, and never so close to a bound that the solver's tolerance would decide
numbers = st.integers(0, 64).map(float) | st.integers(1, 64).map(lambda n: n * 1e-5)


@st.composite
def programs(draw: st.DrawFn) -> tuple[dict[str, tuple[str, ...]], list[dict[str, dict[str, float]]]]:
    """Legal formats of up to six units, and three tables over them; some pairs are barred in the second."""
    legal = {
        f"net.{index}": tuple(sorted(draw(st.sets(st.sampled_from(FORMATS), min_size=1))))
        for index in range(draw(st.integers(1, 6)))
    }
    tables = [{unit: {name: draw(numbers) for name in names} for unit, names in legal.items()} for _ in range(3)]
    for row in tables[1].values():
        for name in row:
            if draw(st.integers(0, 9)) == 0:
                row[name] = math.inf
    return legal, tables


def every_map(legal: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, str]]:
    for names in itertools.product(*legal.values()):
        yield dict(zip(legal, names, strict=True))


def by_enumeration(legal: Mapping[str, tuple[str, ...]], objective: Table, limits: list[Limit]) -> float | None:
    sums = [
        total(objective, formats)
        for formats in every_map(legal)
        if all(total(limit.values, formats) <= limit.bound * (1 + 1e-9) for limit in limits)
    ]
    return min(sums, default=None)


@settings(max_examples=150, deadline=None)
@given(programs(), st.integers(0, 200).map(float), st.none() | st.integers(0, 200).map(float))
def test_finds_what_enumeration_finds(
    program: tuple[dict[str, tuple[str, ...]], list[dict[str, dict[str, float]]]], budget: float, memory: float | None
) -> None:
    legal, (times, harm, sizes) = program
    limits = [Limit(harm, budget), *([] if memory is None else [Limit(sizes, memory)])]
    expected = by_enumeration(legal, times, limits)
    formats = choose(times, limits, harm)
    if expected is None or math.isinf(expected):
        assert formats is None
        return
    assert formats is not None
    assert all(formats[unit] in names for unit, names in legal.items())
    for limit in limits:
        assert total(limit.values, formats) <= limit.bound * (1 + 1e-6) + 1e-9
    assert total(times, formats) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(0, 200).map(float))
def test_among_equally_good_maps_the_tie_break_decides(
    program: tuple[dict[str, tuple[str, ...]], list[dict[str, dict[str, float]]]], budget: float
) -> None:
    legal, (_, harm, _) = program
    flat = {unit: dict.fromkeys(row, 1.0) for unit, row in harm.items()}
    formats = choose(flat, [Limit(harm, budget)], harm)
    least_harm = math.fsum(min(row.values()) for row in harm.values())
    assert (formats is None) == (least_harm > budget)
    if formats is not None:
        assert total(harm, formats) == pytest.approx(least_harm, rel=1e-5, abs=1e-9)


@given(programs())
def test_least_is_the_least(
    program: tuple[dict[str, tuple[str, ...]], list[dict[str, dict[str, float]]]],
) -> None:
    legal, (times, harm, _) = program
    found = least(harm, times)
    assert total(harm, found) == min(total(harm, formats) for formats in every_map(legal))
    ties = [formats for formats in every_map(legal) if total(harm, formats) == total(harm, found)]
    if not math.isinf(total(harm, found)):
        assert total(times, found) <= min(total(times, formats) for formats in ties)


def test_nothing_to_choose() -> None:
    assert choose({}, [Limit({}, 1.0)], {}) == {}


def test_a_budget_of_zero_leaves_what_does_no_harm() -> None:
    times = {"a": {"fp32": 2.0, "bf16": 1.0}, "b": {"fp32": 2.0, "bf16": 1.0}}
    harm = {"a": {"fp32": 0.0, "bf16": 1e-12}, "b": {"fp32": 0.0, "bf16": 0.0}}
    assert choose(times, [Limit(harm, 0.0)], harm) == {"a": "fp32", "b": "bf16"}


def test_is_the_same_again() -> None:
    """Many equally good maps: the answer must not depend on anything but the numbers."""
    times = {str(index): {"fp32": 2.0, "bf16": 1.0, "fp16": 1.0} for index in range(40)}
    harm = {str(index): {"fp32": 0.0, "bf16": 1.0, "fp16": 1.0} for index in range(40)}
    first = choose(times, [Limit(harm, 17.0)], harm)
    assert first is not None
    assert total(harm, first) == 17.0
    assert choose(times, [Limit(harm, 17.0)], harm) == first


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    check_scipy("fisher")
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ModuleNotFoundError, match=r"Passed `policy='fisher'`. It needs SciPy. Run `pip install"):
        check_scipy("fisher")
