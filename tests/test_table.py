"""The table: its arithmetic by enumeration, and what the policy makes of readings.

Time budget: 5 s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoprec import Action, AutoPrecisionConfig, BatchConfig, ClipConfig, GuardConfig, TableConfig, TableSettings
from autoprec.controller import resolve_policy
from autoprec.encoding import decode, encode, feature, with_proposal
from autoprec.envs.proxies import BASE_BATCH
from autoprec.feature_rows import INDEX
from autoprec.formats import FORMATS, get_format, rank
from autoprec.readings import GlobalReading, UnitReading
from autoprec.table import BASE_BATCH as TABLES_BASE
from autoprec.table import CLIP_MULTIPLIERS, Proposal, propose_batch, propose_clip, propose_levels, propose_scale
from autoprec.table_policy import TableController
from tests.table_readings import LADDER, RUN, UNIT


def table(**settings: Any) -> TableController:
    config = {name: settings.pop(name) for name in ("guard", "clip_config", "batch_config") if name in settings}
    return TableController(
        AutoPrecisionConfig(
            table=TableConfig(**settings),
            guard=config.get("guard", GuardConfig()),
            clip=config.get("clip_config", ClipConfig()),
            batch=config.get("batch_config", BatchConfig()),
        )
    )


def chosen(unit: UnitReading, controller: TableController | None = None) -> str:
    return (controller or table()).propose([unit], RUN).formats[unit.name]


def decided(controller: TableController, *units: UnitReading, run: GlobalReading = RUN) -> Action:
    moved_units, moved_run = with_proposal(units, run, controller.propose(units, run))
    action = controller.decide(encode(moved_units, moved_run))
    assert isinstance(action, Action)
    return action


# ---- arithmetic ----


def test_levels_are_those_of_a_search() -> None:
    """Every combination of errors and costs of three formats, against the definition in words."""
    ladder, threshold = np.array([[0, 2, 1]]), 0.1
    for errors in itertools.product((0.0, 0.05, 0.1, 2.0, math.nan), repeat=3):
        for cost in itertools.permutations((1.0, 2.0, 3.0, math.inf), 3):
            for level in range(3):
                known = np.array([[errors]]), np.array([[cost]])
                (found,) = propose_levels(known[0], known[1], ladder, np.array([[level]]), threshold)[0]
                good = [at for at, f in enumerate(ladder[0]) if at == 0 or errors[f] < threshold]
                best = min(good, key=lambda at: (cost[ladder[0][at]], at))
                assert found == (level if all(map(math.isnan, errors)) else best), (errors, cost, level)


def test_levels_with_casts_are_the_cheapest_together() -> None:
    """Random costs, errors and casts, some unknown and some units missing, against every combination."""
    rng = np.random.default_rng(0)
    runs, units, ladder = 40, 4, np.array([0, 2, 1])
    errors = rng.choice([0.01, 0.5, 2.0], (runs, units, 3))
    errors[rng.random((runs, units)) < 0.2] = np.nan
    cost = rng.uniform(0.0, 1.0, (runs, units, 3))
    casts = rng.choice([0.0, 0.1, 0.6], (runs, units - 1))
    level = rng.integers(0, 3, (runs, units))
    found = propose_levels(errors, cost, np.tile(ladder, (runs, 1)), level, 0.1, casts)
    for run in range(runs):
        choices = []
        for unit in range(units):
            is_known = not np.isnan(errors[run, unit]).all()
            good = [at for at in range(3) if at == 0 or errors[run, unit, ladder[at]] < 0.1]
            choices.append(good if is_known else [int(level[run, unit])])

        def total(levels: tuple[int, ...], run: int = run) -> float:
            known = [unit for unit in range(units) if not np.isnan(errors[run, unit]).all()]
            price = sum(cost[run, unit, ladder[levels[unit]]] for unit in known)
            return float(price + sum(casts[run, u] for u in range(units - 1) if levels[u] != levels[u + 1]))

        best = min(itertools.product(*choices), key=total)
        assert total(tuple(found[run].tolist())) == pytest.approx(total(best))
    alone = propose_levels(errors, cost, np.tile(ladder, (runs, 1)), level, 0.1)
    assert (alone != found).any(axis=1).sum() > 5


@pytest.mark.parametrize(
    ("amax", "needs", "bits", "expected"),
    [
        ([1.0, 2.0], [True, True], 3.0, 2.0**11),  # 65504 / 2 is just below 2 ** 15
        ([1.0, 2.0], [True, False], 0.0, 2.0**15),
        ([1.0, math.nan], [True, True], 3.0, 2.0**12),
        ([0.0, 1e-9], [True, True], 3.0, 2.0**24),
        ([1e9, 1.0], [True, True], 3.0, 1.0),
        ([math.inf, math.nan], [True, True], 3.0, 5.0),
        ([1.0, 1.0], [False, False], 3.0, 5.0),
    ],
)
def test_scale(amax: list[float], needs: list[bool], bits: float, expected: float) -> None:
    found = propose_scale(np.array([amax]), np.full((1, 2), 65504.0), np.array([needs]), np.array([5.0]), bits)
    assert found.tolist() == [expected]


def test_batch_and_clip() -> None:
    share = np.array([0.0, 0.25, 0.5, 0.8, math.nan])
    assert propose_batch(share, TableSettings()).tolist() == [2, 3, 3, 4, 2]
    assert propose_batch(share, TableSettings(batch=-1, schedule=(0.8, 0.1)), base=0).tolist() == [-1, 0, 0, 1, -1]
    assert propose_batch(share, TableConfig(), base=0).tolist() == [0] * 5
    assert TABLES_BASE == BASE_BATCH
    assert [propose_clip(2, TableSettings(clip=c)).tolist() for c in CLIP_MULTIPLIERS] == [[i, i] for i in range(6)]


def test_a_live_run_has_no_schedule_unless_it_is_given_one() -> None:
    assert TableSettings().schedule == (0.25, 0.75)
    assert AutoPrecisionConfig().table.schedule is None
    assert AutoPrecisionConfig(table=TableConfig(threshold=0.05)).table.schedule is None
    assert AutoPrecisionConfig(table=TableSettings()).table.schedule == (0.25, 0.75)
    assert TableConfig(schedule=(0.25, 0.75)) == TableSettings()
    assert hash(TableConfig(schedule=(0.25, 0.75))) == hash(TableSettings())
    assert TableConfig() != TableSettings()


# ---- formats ----


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "fp16"),
        ({"errors": {"fp32": 0.0, "bf16": 0.01, "fp16": 0.2}}, "bf16"),
        ({"errors": {"fp32": 0.0, "bf16": 0.2, "fp16": 2.0}}, "fp32"),
        ({"errors": {}}, "fp32"),  # nobody has looked yet
        ({"errors": {}, "format": "bf16"}, "bf16"),
        ({"times": {"fp32": 1.0, "bf16": 0.5}}, "bf16"),  # fp16 is not known to pay
        ({"times": {"fp32": 1.0, "bf16": 1.1, "fp16": 1.2}}, "fp32"),
        ({"times": {"fp32": 1.0, "bf16": 0.98, "fp16": 0.975}}, "fp32"),  # noise
        ({"times": {"fp32": 1.0}}, "fp32"),
        ({"legal": ("fp32", "bf16")}, "bf16"),
        ({"legal": ("fp32",)}, "fp32"),
        ({"act_amax": 40000.0}, "bf16"),  # within a bit of the end of fp16
        ({"act_amax": 30000.0}, "fp16"),
        ({"format": "bf16", "errors": {"fp32": 0.0, "bf16": 0.11}, "times": {"fp32": 2.0, "bf16": 1.0}}, "bf16"),
        ({"format": "bf16", "errors": {"fp32": 0.0, "bf16": 0.13}, "times": {"fp32": 2.0, "bf16": 1.0}}, "fp32"),
        ({"format": "bf16", "errors": {"fp32": 0.0, "bf16": 0.13}, "times": {"bf16": 1.0}}, "fp32"),
        ({"format": "bf16", "times": {"fp32": 0.8, "bf16": 1.0}}, "fp32"),  # it costs more than it seemed to
        ({"format": "bf16", "errors": {"fp32": 0.0}, "times": {"fp32": 2.0}}, "bf16"),  # requested after the look
        ({"format": "fp16", "overflow_count": 1, "times": {"fp32": 3.0, "bf16": 2.0, "fp16": 1.0}}, "bf16"),
        ({"format": "fp16", "legal": ("fp16",), "held": True, "overflow_count": 1}, "fp16"),
    ],
)
def test_format(change: dict[str, Any], expected: str) -> None:
    assert chosen(replace(UNIT, **change)) == expected


def test_every_format_that_is_proposed_is_legal() -> None:
    values = (0.01, 0.3, math.nan)
    for legal in itertools.chain.from_iterable(itertools.combinations(FORMATS, count) for count in (1, 2, 3)):
        for current, error, time in itertools.product(legal, values, values):
            known: Mapping[str, float] = {} if math.isnan(time) else dict.fromkeys(legal, time)
            unit = replace(UNIT, format=current, legal=legal, errors=dict.fromkeys(legal, error), times=known)
            assert chosen(unit) in legal


def test_a_unit_that_was_raised_waits_longer_each_time() -> None:
    controller = table(guard=GuardConfig(hold=100))
    bad = replace(UNIT, format="bf16", legal=("fp32", "bf16"), errors={"fp32": 0.0, "bf16": 0.5})
    good = replace(UNIT, legal=("fp32", "bf16"))
    for wait in (100, 200, 400):
        assert decided(controller, bad).precision == {"a": "fp32"}
        assert decided(controller, replace(good, steps_since_change=wait - 1)).precision is None
        assert decided(controller, replace(good, steps_since_change=wait)).precision == {"a": "bf16"}


def test_what_the_guard_raises_counts_once() -> None:
    controller = table(guard=GuardConfig(hold=100))
    held = replace(UNIT, legal=("fp32",), held=True)
    for _ in range(3):
        assert decided(controller, held).precision is None
    assert decided(controller, replace(UNIT, steps_since_change=99)).precision is None
    assert decided(controller, replace(UNIT, steps_since_change=100)).precision == {"a": "fp16"}


def test_nothing_moves_back_and_forth_on_noise() -> None:
    """Errors around the limit and times that are nearly alike: one change at most."""
    controller, unit, changes = table(), replace(UNIT, legal=("fp32", "bf16")), 0
    rng = np.random.default_rng(0)
    for _ in range(200):
        low, time = 0.1 + 0.02 * rng.uniform(-1, 1), 0.5 + 0.02 * rng.uniform(-1, 1)
        times = {"fp32": 1.0, "bf16": time} if unit.format == "fp32" else {"fp32": 1.0 / time, "bf16": 1.0}
        unit = replace(unit, errors={"fp32": 0.0, "bf16": low}, times=times, steps_since_change=1000)
        asked = decided(controller, unit).precision
        if asked:
            unit, changes = replace(unit, format=asked["a"]), changes + 1
    assert (unit.format, changes) == ("bf16", 1)


# ---- the other knobs ----


def test_the_loss_scale_follows_the_largest_gradient_of_those_that_need_one() -> None:
    off = replace(RUN, movable=frozenset({"clip"}))
    wide = replace(UNIT, name="b", legal=("fp32", "bf16"), grad_amax=1e6)
    passing = replace(UNIT, passed_amax=4.0)
    action = decided(table(), passing, wide, run=off)
    assert action.precision == {"a": "fp16", "b": "bf16"}
    assert action.loss_scale == 2.0 ** (13 - 3)
    assert decided(table(headroom_bits=5.0), passing, run=off).loss_scale == 2.0 ** (13 - 5)
    # a scale of 1 is asked for as well: what begins by itself is 65536
    assert decided(table(), replace(UNIT, grad_amax=5e3), run=off).loss_scale == 1.0
    assert decided(table(), wide, run=off).loss_scale is None
    assert decided(table(), replace(UNIT, grad_amax=math.nan), run=off).loss_scale is None


@pytest.mark.parametrize(
    ("now", "applied", "expected"),
    [(2.0**12, 1.0, None), (2.0**13, 1.0, None), (2.0**11, 1.0, None), (2.0**14, 1.0, 2.0**12)]
    + [(2.0**10, 1.0, 2.0**12), (2.0**10, 0.9, None), (2.0**14, 0.9, 2.0**12)],
)
def test_the_loss_scale_moves_when_it_is_far_off(now: float, applied: float, expected: float | None) -> None:
    unit = replace(UNIT, format="fp16", times={"fp16": 1.0})
    run = replace(RUN, loss_scale=now, applied_share=applied)
    assert decided(table(), unit, run=run).loss_scale == expected
    assert decided(table(), unit, run=replace(run, chosen=frozenset({"loss_scale"}))).loss_scale is None


def test_the_loss_scale_stays_within_its_limits() -> None:
    unit = replace(UNIT, format="fp16", times={"fp16": 1.0}, grad_amax=1e-6)
    assert decided(table(), unit, run=replace(RUN, loss_scale_limits=(1.0, 256.0))).loss_scale == 256.0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 2.0),
        ({"clip_threshold": math.inf}, 2.0),
        ({"clip_threshold": 2.0}, None),
        ({"clip_threshold": 2.01}, None),
        ({"norms": (2.0,) * 15}, None),
        ({"chosen": frozenset({"clip"})}, None),
        ({"movable": frozenset()}, None),
    ],
)
def test_clip(change: dict[str, Any], expected: float | None) -> None:
    assert decided(table(), UNIT, run=replace(RUN, **change)).clip == expected


def test_clip_can_be_off() -> None:
    assert decided(table(clip=math.inf), UNIT).clip == math.inf
    assert decided(table(clip=math.inf), UNIT, run=replace(RUN, clip_threshold=math.inf)).clip is None


def test_batch_size_follows_its_schedule_and_is_asked_for_once() -> None:
    controller = table(schedule=(0.25, 0.75), batch_config=BatchConfig(max_size=100))
    asked = []
    for progress, size in ((0.0, 32), (0.2, 32), (0.3, 32), (0.4, 64), (0.8, 64), (0.9, 100), (0.95, 48)):
        asked.append(decided(controller, UNIT, run=replace(RUN, progress=progress, batch_size=size)).batch_size)
    assert asked == [None, None, 64, None, 100, None, None]
    assert decided(table(), UNIT, run=replace(RUN, progress=0.9)).batch_size is None
    assert decided(table(batch=-1), UNIT).batch_size == 16
    unknown = replace(RUN, progress=0.9, batch_size=0)
    assert decided(table(schedule=(0.5,)), UNIT, run=unknown).batch_size is None


# ---- the policy ----


def test_without_units_the_other_knobs_are_steered() -> None:
    action = decided(table())
    assert action == Action(clip=2.0)


def test_proposal_in_the_observation_is_what_was_proposed() -> None:
    """Moves along the ladder lead from where each knob is to the proposal, for every state of a unit."""
    for current, legal in itertools.product(LADDER, (LADDER, ("fp32", "bf16", "fp16", "int8"))):
        unit = replace(UNIT, format=current, legal=legal, times={"fp32": 2.0, "bf16": 1.0, "fp16": 0.5, current: 1.0})
        run = replace(RUN, loss_scale=2.0**14, clip_threshold=6.0, progress=0.3)
        proposal = table(schedule=(0.25,)).propose([unit], run)
        units, moved = with_proposal([unit], run, proposal)
        rows = feature(encode(units, moved), "proposal")
        ladder = sorted(legal, key=rank)
        assert ladder[ladder.index(current) - int(rows[0])] == proposal.formats["a"]
        is_scaled = proposal.loss_scale is not None
        assert rows[1:].tolist() == [math.log2((proposal.loss_scale or 1.0) / 2.0**14) if is_scaled else 0.0, 1.0, -2.0]
        # one move at a time gets there
        for _ in range(abs(int(rows[0]))):
            target = decode([int(np.sign(rows[0])), 0, 0, 0], [unit], run).precision
            assert target is not None
            unit = replace(unit, format=target["a"])
        assert unit.format == proposal.formats["a"]
        without = encode([replace(units[0], proposal=math.nan)], RUN)
        np.testing.assert_array_equal(
            np.delete(encode(units, RUN)[0], INDEX["proposal"]), np.delete(without[0], INDEX["proposal"])
        )


def test_what_does_not_exist_or_move_is_left_out() -> None:
    still = replace(RUN, movable=frozenset(), batch_size=0)
    proposal = Proposal(formats={"a": "int8", "b": "fp32"}, loss_scale=8.0, clip=1.0, batch_size=8)
    units, run = with_proposal([UNIT], still, proposal)
    assert units == [UNIT]
    assert math.isnan(run.proposal)
    assert math.isnan(run.loss_scale_proposal)
    assert math.isnan(run.clip_proposal)


@pytest.mark.parametrize(("every", "expected"), [(1, "lllll"), (2, "l.l.l"), (4, "l...l")])
def test_looks_are_as_far_apart_as_they_are_to_be(every: int, expected: str) -> None:
    controller, seen = table(probe_every=every), ""
    assert controller.wants_errors()
    decided(controller, replace(UNIT, errors={}))
    for _ in expected:  # the first look has failed
        seen += "l" if controller.wants_errors() else "."
        decided(controller, UNIT)
    assert seen == expected
    decided(controller, replace(UNIT, legal=("fp32",)))
    assert not controller.wants_errors(), "no unit has a choice"


def test_reasons_say_what_a_change_rests_on() -> None:
    controller = table(schedule=(0.0,))
    decided(controller, UNIT, run=replace(RUN, loss_scale=2.0**16))
    assert controller.reasons() == {
        "a": "error 0.001 (limit 0.1), 0.4 x its time in fp32",
        "loss_scale": "3 bits above the largest gradient",
        "clip": "1 x the running median",
        "batch_size": "0% of the run is over",
    }
    decided(controller, replace(UNIT, format="bf16", errors={"fp32": 0.0, "bf16": 0.5}))
    assert controller.reasons()["a"] == "error 0.5 in bf16 (limit 0.1)"
    decided(controller, replace(UNIT, format="fp16", overflow_count=2))
    assert controller.reasons()["a"] == "it overflowed in fp16"
    decided(controller, replace(UNIT, errors={}))
    assert "a" not in controller.reasons()
    assert controller.notes() == ("errors of 0 layers measured once, limit 0.1",)


def test_state() -> None:
    controller = table(schedule=(0.0,), probe_every=3)
    decided(controller, replace(UNIT, format="bf16", errors={"fp32": 0.0, "bf16": 0.5}))
    other = table(schedule=(0.0,), probe_every=3)
    other.load_state_dict(controller.state_dict())
    assert other.state_dict() == controller.state_dict()
    waiting = replace(UNIT, steps_since_change=199)
    assert [decided(each, waiting) for each in (controller, other)] == [Action(clip=2.0)] * 2
    controller.start(["a"], [LADDER])
    assert controller.state_dict() == table().state_dict()


def test_policy_by_name() -> None:
    config = AutoPrecisionConfig(table=TableSettings(threshold=0.3))
    controller = resolve_policy("table", config)
    assert isinstance(controller, TableController)
    assert controller.settings.threshold == 0.3
    assert get_format("fp16").needs_loss_scale, "what the tests of the loss scale rest on"
