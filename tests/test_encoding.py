"""The encoding: finite and bounded whatever comes in, blind to loss scale and accumulation, and its way back.

Time budget: 15 s.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autoprec.action import Action
from autoprec.encoding import (
    CLIP_MULTIPLIERS,
    FEATURES,
    HEADROOM_BITS,
    LIMIT,
    VERSION,
    GlobalReading,
    KnobKind,
    Observation,
    UnitReading,
    decode,
    encode,
    feature,
    log_steps,
)
from autoprec.formats import FORMATS
from autoprec.readings import LAYER_KINDS

numbers = st.floats() | st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e308, 5e-324])
histories = st.lists(numbers, max_size=12).map(tuple)
counts = st.integers(0, 10**12)
names = st.sampled_from(list(FORMATS))
legals = st.sets(names).map(lambda chosen: tuple(name for name in FORMATS if name in chosen))
unit_readings = st.builds(
    UnitReading,
    name=st.text(max_size=4),
    kind=st.sampled_from([*LAYER_KINDS, "block"]),
    depth=numbers,
    parameter_share=numbers,
    compute_share=numbers,
    format=names,
    legal=legals,
    grad_amax=numbers,
    grad_norm=numbers,
    grad_norm_history=histories,
    nonfinite_count=counts,
    underflow_fraction=numbers,
    underflow_fraction_lower=numbers,
    act_amax=numbers,
    act_amax_history=histories,
    steps_since_change=counts,
    overflow_count=counts,
    held=st.booleans(),
    frozen=st.booleans(),
    emulated=st.booleans(),
)
global_readings = st.builds(
    GlobalReading,
    losses=histories,
    loss_scale=numbers,
    loss_scale_history=histories,
    growth_tracker=counts,
    applied_share=numbers,
    clipped_share=numbers,
    norms=histories,
    clip_threshold=numbers,
    progress=numbers,
    batch_size=counts,
    noise_scale=numbers,
    noise_scale_error=numbers,
    effective_batch=numbers,
)
models = st.lists(unit_readings, max_size=4)

GOOD = UnitReading(
    name="net.0",
    kind="linear",
    depth=0.5,
    format="bf16",
    legal=("fp32", "bf16", "fp16"),
    grad_amax=2.0**-4,
    grad_norm=1.0,
    grad_norm_history=(1.0, 1.1, 0.9, 1.0),
    underflow_fraction=0.1,
    underflow_fraction_lower=0.2,
    act_amax=8.0,
    act_amax_history=(8.0, 8.0, 8.0),
    steps_since_change=100,
)
RUN = GlobalReading(
    losses=(4.0, 3.0, 2.0, 1.0),
    loss_scale=1024.0,
    norms=(1.0, 2.0, 4.0),
    clip_threshold=3.0,
    progress=0.25,
    batch_size=8,
)


def value(observation: Observation, name: str, row: int = 0) -> float:
    return float(feature(observation, name)[row])


def one(name: str, unit: UnitReading = GOOD, run: GlobalReading = RUN) -> float:
    return value(encode([unit], run), name)


def moves(units: Sequence[UnitReading], *last_three: int, unit: int = 0) -> list[int]:
    return [unit] * len(units) + list(last_three or (0, 0, 0))


@given(units=models, run=global_readings)
def test_finite_and_bounded(units: list[UnitReading], run: GlobalReading) -> None:
    observation = encode(units, run)
    assert observation.shape == (len(units) + 3, len(FEATURES))
    assert observation.dtype == np.float32
    assert np.isfinite(observation).all()
    assert (np.abs(observation) <= LIMIT).all()


@given(
    units=models,
    run=global_readings,
    scale=st.floats(1.0, 2.0**24),
    tracker=st.integers(0, 2000),
    history=st.lists(st.floats(1.0, 2.0**24), max_size=5).map(tuple),
)
def test_loss_scale_shows_in_its_own_features_only(
    units: list[UnitReading], run: GlobalReading, scale: float, tracker: int, history: tuple[float, ...]
) -> None:
    # away from floor and cap, where the moves of the loss scale's own row end
    run = replace(run, loss_scale=1024.0)
    scaled = replace(run, loss_scale=scale, growth_tracker=tracker, loss_scale_history=history)
    own = [FEATURES.index(name) for name in ("loss_scale", "loss_scale_trend", "growth_tracker")]
    before, after = encode(units, run), encode(units, scaled)
    np.testing.assert_array_equal(np.delete(before, own, axis=1), np.delete(after, own, axis=1))


@given(
    gradients=st.lists(st.floats(-100, 100, width=32), min_size=8, max_size=8),
    scale=st.integers(0, 24).map(lambda e: 2.0**e),
    accumulate=st.sampled_from([1, 2, 4]),
)
def test_readings_of_the_same_training_look_the_same(gradients: list[float], scale: float, accumulate: int) -> None:
    """Splits one batch into micro-batches, scales their losses, and undoes both as a training step does."""

    def observe(scale: float, accumulate: int) -> Observation:
        parts = np.split(np.array(gradients) * scale / len(gradients), accumulate)
        gradient = abs(sum(float(part.sum()) for part in parts)) / scale
        losses = tuple(np.concatenate(parts) * len(gradients) / scale)
        unit = replace(GOOD, grad_amax=gradient, grad_norm=gradient, grad_norm_history=(gradient,) * 4)
        return encode([unit], replace(RUN, losses=losses, norms=(gradient,) * 3))

    np.testing.assert_allclose(observe(scale, accumulate), observe(1.0, 1), atol=2e-4)


def test_no_reading_depends_on_accumulation() -> None:
    assert not [f.name for kind in (UnitReading, GlobalReading) for f in fields(kind) if "accumul" in f.name]


@pytest.mark.parametrize("count", [0, 3, 7, 40])
def test_e02_any_number_of_units(count: int) -> None:
    units = [replace(GOOD, name=f"net.{index}") for index in range(count)]
    observation = encode(units, RUN)
    kinds = np.stack([feature(observation, f"knob_{kind.value}") for kind in KnobKind])
    assert kinds.argmax(axis=0).tolist() == [0] * count + [1, 2, 3]
    assert kinds.sum(axis=0).tolist() == [1] * (count + 3)
    action = decode(moves(units, 1, 0, 0, unit=-1), units, RUN)
    assert action.precision == ({unit.name: "fp16" for unit in units} or None)
    assert action.loss_scale == 2048.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_e01_non_finite_readings_are_flagged(bad: float) -> None:
    assert (one("nonfinite"), one("loss_nonfinite"), one("norm_nonfinite")) == (0.0, 0.0, 0.0)
    history = (1.0, bad, 2.0)
    for unit in (
        replace(GOOD, grad_amax=bad),
        replace(GOOD, grad_norm=bad),
        replace(GOOD, grad_norm_history=history),
        replace(GOOD, act_amax_history=history),
        replace(GOOD, nonfinite_count=1),
    ):
        assert one("nonfinite", unit) == 1.0
    assert one("loss_nonfinite", run=replace(RUN, losses=(1.0, bad))) == 1.0
    assert one("norm_nonfinite", run=replace(RUN, norms=(1.0, bad))) == 1.0


def test_not_known_is_not_non_finite() -> None:
    unknown = UnitReading(name="net.0")
    frozen = replace(GOOD, frozen=True, grad_amax=math.nan, grad_norm=math.nan, act_amax=math.nan)
    for unit in (unknown, frozen):
        assert [one(name, unit) for name in ("nonfinite", "grad_known", "act_known", "grad_headroom")] == [0, 0, 0, 0]
    assert one("underflow_lower_known", unknown) == 0.0
    assert one("progress_known", run=GlobalReading()) == 0.0


def test_headroom_counts_bits_to_the_limit() -> None:
    assert one("act_headroom_lower") * HEADROOM_BITS == pytest.approx(math.log2(65504) - 3)
    assert one("grad_headroom_lower") * HEADROOM_BITS == pytest.approx(math.log2(65504) + 4)
    assert one("act_headroom") * HEADROOM_BITS == pytest.approx(128 - 3, abs=0.01)
    assert one("act_headroom", replace(GOOD, act_amax=math.inf)) == -LIMIT
    assert one("act_headroom", replace(GOOD, act_amax=0.0)) == LIMIT
    # fp8 scales every tensor into its range, so the limit is that of bf16
    scaled = replace(GOOD, legal=("fp32", "bf16", "fp8"))
    assert one("act_headroom_lower", scaled) == one("act_headroom", scaled)


def test_spread_and_drift() -> None:
    doubling = tuple(2.0**step for step in range(10))
    assert one("grad_trend", replace(GOOD, grad_norm_history=doubling)) == pytest.approx(9.0)
    assert one("act_drift", replace(GOOD, act_amax_history=doubling[::-1])) == pytest.approx(-9.0)
    assert one("grad_trend", replace(GOOD, grad_norm_history=(1.0, math.nan, 4.0, 8.0))) == pytest.approx(3.0)
    assert one("norm_trend", run=replace(RUN, norms=doubling)) == pytest.approx(9.0)
    assert one("grad_cv", replace(GOOD, grad_norm_history=(1.0, 3.0))) == pytest.approx(0.5)
    falling = tuple(8.0 * 0.5**step for step in range(12))
    assert one("grad_cv", replace(GOOD, grad_norm_history=falling)) == pytest.approx(0.0, abs=1e-6)
    restless = tuple(norm * (1.5 if step % 2 else 0.5) for step, norm in enumerate(falling))
    assert one("grad_cv", replace(GOOD, grad_norm_history=restless)) == pytest.approx(0.5, abs=0.1)
    huge = replace(GOOD, grad_norm_history=(1e300, 3e300))
    assert one("grad_cv", huge) == pytest.approx(0.5)


def test_g02_slow_drift_is_visible_before_the_spike() -> None:
    norms = tuple(1.02**step for step in range(50))
    observation = encode(
        [replace(GOOD, grad_norm_history=norms)], replace(RUN, norms=norms, loss_scale_history=(8, 4, 2))
    )
    assert value(observation, "grad_trend") == value(observation, "norm_trend") == pytest.approx(1.4, abs=0.01)
    assert value(observation, "loss_scale_trend") == pytest.approx(-2 / 24)


def test_c06_share_of_clipped_steps_and_median_norm_are_visible() -> None:
    run = GlobalReading(norms=(20.0,) * 50, clip_threshold=1.0, clipped_share=1.0)
    assert one("clipped_share", run=run) == 1.0
    assert one("norm_median", run=run) * 16 == pytest.approx(math.log2(20))
    assert one("clip", run=run) * 4 == pytest.approx(-math.log2(20))
    assert (one("clip_off", run=run), one("clip_off", run=GlobalReading())) == (0.0, 1.0)


def test_loss_trend_at_two_time_scales() -> None:
    recovering = replace(RUN, losses=(4.0, 4.0, 4.0, 4.0, 1.0, 1.0, 2.0, 2.0))
    assert one("loss_slow", run=recovering) < 0 < one("loss_fast", run=recovering)
    assert one("loss_slow", run=replace(RUN, losses=(-4.0, -8.0))) < 0


def test_one_hots_and_flags() -> None:
    unit = replace(GOOD, kind="block", held=True, frozen=True, emulated=True, overflow_count=3)
    assert [name for name in FEATURES if name.startswith("layer_") and one(name, unit)] == ["layer_other"]
    assert [name for name in FEATURES if name.startswith("format_") and one(name, unit)] == ["format_bf16"]
    assert [one(name, unit) for name in ("held", "frozen", "emulated", "can_lower", "can_raise")] == [1, 1, 1, 0, 1]
    assert one("overflows", unit) == 0.5
    assert one("steps_since_change") == np.float32(log_steps(100))


def test_pools_over_units() -> None:
    units = [replace(GOOD, compute_share=0.5, act_amax=2.0**e, overflow_count=e) for e in (1, 2)]
    units.append(UnitReading(name="silent", compute_share=0.0))
    observation = encode(units, RUN)
    assert value(observation, "pool_act_headroom") == value(observation, "act_headroom", 1)
    assert value(observation, "pool_rank") == pytest.approx(2 / 5)
    assert value(observation, "pool_overflows") == 0.5
    assert (feature(observation, "pool_units") == np.float32(math.log2(4) / 8)).all()


@pytest.mark.parametrize(
    ("current", "legal", "lower", "higher"),
    [
        ("fp32", ("fp32", "bf16"), "bf16", None),
        ("bf16", ("fp32", "bf16"), None, "fp32"),
        ("bf16", ("fp32", "fp8"), "fp8", "fp32"),
        ("bf16", ("fp32", "tf32", "bf16", "fp16", "fp8", "int8"), "fp16", "tf32"),
        ("fp32", ("fp32",), None, None),
        ("fp32", (), None, None),
    ],
)
def test_precision_moves(current: str, legal: tuple[str, ...], lower: str | None, higher: str | None) -> None:
    unit = replace(GOOD, format=current, legal=legal)
    for move, target in ((-1, lower), (0, None), (1, higher)):
        expected = Action(precision={"net.0": target}) if target else Action()
        assert decode([move, 0, 0, 0], [unit], RUN) == expected
    assert (one("can_lower", unit), one("can_raise", unit)) == (lower is not None, higher is not None)


def test_loss_scale_and_batch_size_moves() -> None:
    assert decode([-1, 1, 0], [], RUN) == Action(loss_scale=512.0, batch_size=16)
    assert decode([1, -1, 0], [], RUN) == Action(loss_scale=2048.0, batch_size=4)
    assert decode([0, -1, 0], [], replace(RUN, batch_size=1)) == Action()
    assert decode([0, 1, 0], [], replace(RUN, batch_size=0)) == Action()


@pytest.mark.parametrize(("scale", "lower", "higher"), [(1.0, None, 2.0), (8.0, 4.0, 16.0), (16.0, 8.0, None)])
def test_loss_scale_moves_between_its_limits(scale: float, lower: float | None, higher: float | None) -> None:
    run = replace(RUN, loss_scale=scale, loss_scale_limits=(1.0, 16.0))
    assert decode([-1, 0, 0], [], run) == Action(loss_scale=lower)
    assert decode([1, 0, 0], [], run) == Action(loss_scale=higher)
    observation = encode([], run)
    assert (value(observation, "can_lower"), value(observation, "can_raise")) == (lower is not None, higher is not None)


def test_knobs_that_do_not_act_here_do_not_move() -> None:
    run = replace(RUN, movable=frozenset())
    assert decode([1, 1, 1], [], run).is_empty
    observation = encode([], run)
    assert not (feature(observation, "can_lower") + feature(observation, "can_raise")).any()


@pytest.mark.parametrize(
    ("threshold", "lower", "higher"),
    [
        (3.0, 2.0, 6.0),  # 1.5 x the median norm of 2
        (3.3, 2.0, 6.0),
        (1.0, None, 2.0),
        (0.001, None, 2.0),
        (16.0, 6.0, math.inf),
        (1e9, 6.0, math.inf),
        (math.inf, 16.0, None),
        (math.nan, None, None),
    ],
)
def test_clip_moves(threshold: float, lower: float | None, higher: float | None) -> None:
    run = replace(RUN, clip_threshold=threshold)
    assert decode([0, 0, -1], [], run) == Action(clip=lower)
    assert decode([0, 0, 1], [], run) == Action(clip=higher)
    observation = encode([], run)
    can_move = (value(observation, "can_lower", 2), value(observation, "can_raise", 2))
    assert can_move == (lower is not None, higher is not None)


@pytest.mark.parametrize("norms", [(), (0.0, 0.0), (math.nan,)])
def test_clip_does_not_move_without_a_median(norms: tuple[float, ...]) -> None:
    assert decode([0, 0, 1], [], replace(RUN, norms=norms)) == Action()


@given(units=models, run=global_readings, data=st.data())
def test_decoding_legal_moves_never_fails(units: list[UnitReading], run: GlobalReading, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=len(units) + 3, max_size=len(units) + 3))
    action = decode(chosen, units, run)
    for name, target in (action.precision or {}).items():
        assert any(name == unit.name and target in unit.legal and target != unit.format for unit in units)


@pytest.mark.parametrize("wrong", [[0, 0, 0], [0] * 5, [[0, 0, 0, 0]], 0])
def test_wrong_number_of_moves(wrong: Any) -> None:
    with pytest.raises(ValueError, match=re.escape("`actions` must have shape [4]")):
        decode(wrong, [GOOD], RUN)


@pytest.mark.parametrize(
    "wrong", [[0, 0, 2], [0, 0.5, 0], [math.nan, 0, 0], ["keep", "keep", "keep"], [True, True, True]]
)
def test_wrong_moves(wrong: Any) -> None:
    with pytest.raises(ValueError, match=re.escape("Moves must be the numbers -1, 0 or 1.")):
        decode(wrong, [], RUN)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float32])
def test_moves_of_any_number_type(dtype: type[np.number[Any]]) -> None:
    chosen: NDArray[Any] = np.array([-1, 0, 0, 0], dtype=dtype)
    assert decode(chosen, [GOOD], RUN) == Action(precision={"net.0": "fp16"})


def test_feature_errors() -> None:
    observation = encode([], RUN)
    with pytest.raises(ValueError, match=re.escape("Did you mean 'grad_headroom'?")):
        feature(observation, "grad_hedroom")
    with pytest.raises(ValueError, match=f"with 5 columns. Version 3 of the observation has {len(FEATURES)}."):
        feature(observation[:, :5], "depth")


def test_prices_and_errors_show_where_they_are_known() -> None:
    names = ("proposal", "cost_lower", "cost_known", "error", "error_lower", "error_known", "step_time_known")
    assert [one(name) for name in names] == [0.0] * len(names)
    priced = replace(GOOD, cost_lower=-0.25, proposal=-1.0, error=2.0**-7, error_lower=2.0, error_higher=0.0)
    assert [one(name, priced) for name in names] == [-1.0, -2.5, 1.0, 0.0, np.float32(8 / 7), 1.0, 0.0]
    assert one("error_higher", priced) == -1.0
    run = replace(RUN, cost_higher=-0.5, proposal=1.0, step_time_bits=-2.0)
    observation = encode([GOOD], run)
    assert feature(observation, "cost_higher").tolist() == [0.0, 0.0, -5.0, 0.0]  # of the batch size's row
    assert feature(observation, "proposal").tolist() == [0.0, 0.0, 1.0, 0.0]
    assert feature(observation, "step_time").tolist() == [-0.5] * 4


def test_noise_scale_counts_in_units_of_the_effective_batch() -> None:
    known = replace(RUN, noise_scale=2.0**13, noise_scale_error=2.0**11, effective_batch=32.0)
    assert one("noise_known", run=known) == 1.0
    assert one("noise_scale", run=known) == 8 / 16
    assert one("noise_error", run=known) == 0.25
    assert one("noise_scale", run=replace(known, noise_scale=0.0)) == -1.0
    for unknown in (RUN, replace(known, effective_batch=math.nan), replace(known, noise_scale=math.nan)):
        assert [one(name, run=unknown) for name in ("noise_known", "noise_scale", "noise_error")] == [0.0, 0.0, 0.0]


def many_readings() -> tuple[list[UnitReading], GlobalReading]:
    rng = random.Random(0)

    def number() -> float:
        return rng.choice([0.0, -1.0, math.nan, math.inf]) if rng.random() < 0.2 else rng.lognormvariate(0, 6)

    def history() -> tuple[float, ...]:
        return tuple(number() for _ in range(rng.randrange(12)))

    def unit(index: int) -> UnitReading:
        return UnitReading(
            name=str(index), kind=rng.choice(LAYER_KINDS), depth=number(), parameter_share=number(),
            compute_share=number(), format=rng.choice(list(FORMATS)), legal=tuple(FORMATS), grad_amax=number(),
            grad_norm=number(), grad_norm_history=history(), underflow_fraction=number(), act_amax=number(),
            act_amax_history=history(), steps_since_change=rng.randrange(999), overflow_count=rng.randrange(9),
        )  # fmt: skip

    run = GlobalReading(
        losses=history(), loss_scale=number(), loss_scale_history=history(), growth_tracker=rng.randrange(99),
        norms=history(), clip_threshold=number(), progress=number(), batch_size=rng.randrange(300),
        noise_scale=2.0**9, noise_scale_error=3.0, effective_batch=48.0,
    )  # fmt: skip
    return [unit(index) for index in range(40)], run


def test_features_of_version_2_keep_their_bits() -> None:
    """What one run after the other was encoded as before rows of many runs were."""
    old = encode(*many_readings())[:, :77]
    assert zlib.crc32(np.ascontiguousarray(old).tobytes()) == 0xA71D18B3


def test_layout_of_version_3() -> None:
    """A change here needs a new ``VERSION``."""
    assert len(FEATURES) == len(set(FEATURES)) == 87
    assert zlib.crc32(",".join(FEATURES[:77]).encode()) == 0x59D9B0C2  # version 2, which version 3 goes on from
    assert zlib.crc32(",".join(FEATURES).encode()) == 0x931A74B0
    assert list(CLIP_MULTIPLIERS) == [0.5, 1.0, 1.5, 3.0, 8.0, math.inf]
    assert VERSION == 4
