"""The knobs: what becomes of a request, what the guard moves by itself, and what acts on the layers.

Time budget: 10 s.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, Decision
from autoprec.autocast import ambient
from autoprec.base import Base
from autoprec.formats import FORMATS
from autoprec.history import History
from autoprec.knobs import Knobs
from autoprec.layers import Runtime, attach, detach
from autoprec.loss_scale import LossScale
from autoprec.units import find_units
from tests.support import Task, cpu, watch_dtypes


def network() -> nn.Module:
    layers = {"a": nn.Linear(16, 16), "n": nn.LayerNorm(16), "b": nn.Linear(16, 10), "c": nn.Embedding(4, 16)}
    return nn.ModuleDict(layers)


def knobs_of(
    net: nn.Module | None = None,
    base: Base | None = None,
    masked: Mapping[str, str] | None = None,
    config: AutoPrecisionConfig | None = None,
) -> Knobs:
    config, base = config or AutoPrecisionConfig(), base or Base()
    units, runtime = find_units(net or network(), granularity=config.granularity), Runtime("cpu")
    assert not attach(units, runtime)
    scale = LossScale(config.loss_scale, enabled=base.format == "fp16")
    return Knobs(units, runtime, config, masked or {}, base, scale, History())


def apply(knobs: Knobs, median: float = math.nan, applied: int = 0, **action: Any) -> list[Decision]:
    count = len(knobs.history)
    knobs.apply(Action(**action), 7, applied, median)
    return knobs.history[count:]


def short(rows: list[Decision]) -> list[tuple[Any, ...]]:
    return [(row.knob, row.unit, row.before, row.requested, row.applied, row.outcome) for row in rows]


# ---- precision ----


def test_a_request_is_applied_and_on_record() -> None:
    knobs = knobs_of()
    (row,) = apply(knobs, precision={"a": "bf16"})
    assert row == Decision(7, "precision", "a", "fp32", "bf16", "bf16", "applied", "requested")
    assert knobs.precision_map() == {"a": "bf16", "n": "fp32", "b": "fp32", "c": "fp32"}
    assert knobs.is_steering
    assert not knobs.is_all_wide


def test_a_star_means_matrices_and_a_name_beats_a_pattern_in_any_order() -> None:
    for precision in ({"*": "bf16", "b": "fp32"}, {"b": "fp32", "*": "bf16"}, {"[abc]": "bf16", "b": "fp32"}):
        knobs = knobs_of()
        apply(knobs, precision=precision)
        assert knobs.precision_map() == {"a": "bf16", "n": "fp32", "b": "fp32", "c": "bf16"}
    knobs = knobs_of()
    apply(knobs, precision={"*": "bf16", "?": "fp16"})
    assert knobs.precision_map() == {"a": "fp16", "n": "fp32", "b": "fp16", "c": "fp16"}
    apply(knobs, precision={"[nop]": "bf16"})  # meets nothing but the norm
    assert knobs.precision_map()["n"] == "bf16"


@pytest.mark.parametrize(
    ("precision", "unit", "word"),
    [
        ({"b": "fp8"}, "b", "legal here: fp32, tf32, bf16, fp16, int8"),
        ({"c": "tf32"}, "c", "cannot run in tf32"),
        ({"n": "int8"}, "n", "cannot run in int8"),
        ({"aa": "bf16"}, None, "no unit is called 'aa'. Did you mean 'a'?"),
        ({"x.*": "bf16"}, None, "no unit is called 'x.*'"),
    ],
)
def test_illegal_requests_are_refused_with_the_reason(precision: dict[str, str], unit: str | None, word: str) -> None:
    knobs = knobs_of()
    before = knobs.precision_map()
    (row,) = apply(knobs, precision=precision)
    assert (row.unit, row.outcome) == (unit, "refused")
    assert word in row.reason
    assert row.applied == row.before
    assert knobs.precision_map() == before
    assert not knobs.is_steering


@given(
    asked=st.dictionaries(st.sampled_from(["a", "b", "c", "n", "*", "?", "zz"]), st.sampled_from(list(FORMATS))),
    held=st.sets(st.sampled_from(["a", "b", "c", "n"])),
)
def test_no_request_ever_makes_an_illegal_map(asked: dict[str, str], held: set[str]) -> None:
    knobs = knobs_of()
    for name in held:
        knobs.guard.hold(name, 0)
    rows = apply(knobs, precision=asked)
    for name, format_name in knobs.precision_map().items():
        assert format_name in knobs.units[name].legal
        assert name not in held or format_name == "fp32"
        state: Any = vars(knobs.units[name].modules[0])["_autoprec"]
        assert (state.run is not None) == knobs.is_steering
    for row in rows:
        assert row.outcome in ("applied", "refused")
        assert row.applied == (row.requested if row.outcome == "applied" else row.before)
        assert row.reason
    assert {row.unit for row in rows if row.outcome == "applied" and row.knob == "precision"} <= set(knobs.units)


def test_a09_a_contradiction_over_tied_weights_goes_to_the_widest() -> None:
    net: Any = nn.ModuleDict({"e": nn.Embedding(16, 16), "h": nn.Linear(16, 16, bias=False)})
    net["h"].weight = net["e"].weight
    knobs = knobs_of(net)
    (row,) = apply(knobs, precision={"h": "int8", "e": "bf16"})
    assert (row.unit, row.requested, row.applied, row.outcome) == ("e", "bf16", "bf16", "limited")
    assert "e, h share weights" in row.reason
    (row,) = apply(knobs, precision={"h": "int8"})
    assert (row.unit, row.applied, row.outcome) == ("e", "int8", "applied")


def test_block_names_their_members_and_saved_maps_reach_a_block() -> None:
    parts = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(2)]
    knobs = knobs_of(nn.Sequential(*parts), config=AutoPrecisionConfig(granularity="block"))
    assert list(knobs.precision_map()) == ["0", "1"]
    for key in ("0", "0.2", "0*"):
        apply(knobs, precision={"0": "fp32"})
        (row,) = apply(knobs, precision={key: "bf16"})
        assert (row.unit, row.outcome) == ("0", "applied")
    assert knobs.precision_map() == {"0": "bf16", "1": "fp32"}
    again = knobs_of(nn.Sequential(*parts), config=AutoPrecisionConfig(granularity="block"))
    assert {row.outcome for row in apply(again, precision=knobs.precision_map())} == {"applied"}


def test_left_alone_units_are_refused_by_name_and_passed_over_by_a_star() -> None:
    net: Any = network()
    net["a"].forward = lambda input: input
    knobs = knobs_of(net)
    (row,) = apply(knobs, precision={"a": "bf16"})
    assert (row.unit, row.outcome) == ("a", "refused")
    assert "replaced on the instance" in row.reason
    assert {row.unit for row in apply(knobs, precision={"*": "bf16"})} == {"b", "c"}


@pytest.mark.parametrize("knob", ["precision", "loss_scale", "clip"])
def test_a_masked_knob_refuses_with_its_reason(knob: str) -> None:
    net = network()
    if knob == "precision":  # nothing is attached then
        units = find_units(net)
        knobs = Knobs(units, Runtime("cpu"), AutoPrecisionConfig(), {knob: "why"}, Base(), LossScale(), History())
    else:
        knobs = knobs_of(net, masked={knob: "why"})
    before = knobs.precision_map(), knobs.loss_scale.scale, knobs.clip
    value: Any = {"precision": {"a": "bf16"}, "loss_scale": 8.0, "clip": 0.5}[knob]
    (row,) = apply(knobs, **{knob: value})
    assert (row.knob, row.outcome) == (knob, "refused")
    assert "why" in row.reason
    assert before == (knobs.precision_map(), knobs.loss_scale.scale, knobs.clip)
    knobs.check(Action(**{knob: value}), 7, 0, math.nan)
    assert knobs.history[-1].outcome == "refused"


# ---- what acts ----


@pytest.mark.parametrize(("base", "found"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_the_start_is_what_the_trainer_runs(base: str, found: str) -> None:
    knobs = knobs_of(base=Base(format=base))
    assert knobs.precision_map() == {"a": found, "n": "fp32", "b": found, "c": found}
    assert knobs.is_steering == (base == "fp16")  # its range is watched
    assert knobs.uses_fp16 == (base == "fp16")
    assert knobs.ambient_dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[base]


def test_formats_act_on_the_layers() -> None:
    net: Any = network()
    knobs = knobs_of(net)
    knobs.runtime.is_active = True
    x = torch.randn(16, 16)
    apply(knobs, precision={"a": "bf16", "b": "fp16"})
    with ambient("cpu", torch.float32):
        assert net["a"](x).dtype == torch.bfloat16
        assert net["b"](x).dtype == torch.float16
        assert net["n"](net["a"](x)).dtype == torch.float32
        assert net["c"](torch.arange(4)).dtype == torch.float32
    apply(knobs, precision={"*": "fp32", "n": "bf16"})
    with ambient("cpu", torch.float32):
        assert net["a"](x).dtype == torch.float32
        assert net["n"](x).dtype == torch.bfloat16
    detach(list(knobs.units.values()))


def test_fp16_takes_the_loss_scale_into_use() -> None:
    knobs = knobs_of()
    assert knobs.loss_scale.scale == 1.0
    apply(knobs, precision={"a": "fp16"})
    assert knobs.loss_scale.scale == 65536.0
    masked = knobs_of(masked={"loss_scale": "why"})
    apply(masked, precision={"a": "fp16"})
    assert masked.loss_scale.scale == 1.0


def test_steerable_is_what_a_policy_may_choose() -> None:
    knobs = knobs_of()
    units = knobs.units
    native = "bf16" if "bf16" in units["a"].native else "fp16"
    assert knobs.steerable(units["a"]) == tuple(n for n in ("fp32", native) if n == "fp32" or n in units["a"].native)
    assert knobs.steerable(units["n"]) == ("fp32",)
    apply(knobs, precision={"a": "int8"})
    assert "int8" in knobs.steerable(units["a"])
    narrow = knobs_of(config=AutoPrecisionConfig(formats=("fp16", "int8")))
    assert narrow.steerable(narrow.units["b"]) == ("fp32", "fp16", "int8")
    assert knobs_of(base=Base(format="bf16")).steerable(knobs.units["b"])[-1] == "bf16"


# ---- loss scale and clip ----


@pytest.mark.parametrize(
    ("value", "applied", "outcome"),
    [(512.0, 512.0, "applied"), (0.0, 1.0, "refused"), (math.nan, 1.0, "refused"), (2.0**40, 2.0**24, "limited")],
)
def test_loss_scale_requests(value: float, applied: float, outcome: str) -> None:
    knobs = knobs_of()
    (row,) = apply(knobs, loss_scale=value)
    assert (row.knob, row.before, row.applied, row.outcome) == ("loss_scale", 1.0, applied, outcome)
    assert knobs.loss_scale.scale == applied


@pytest.mark.parametrize(
    ("value", "applied", "outcome"),
    [
        (0.5, 0.5, "applied"),
        (math.inf, math.inf, "applied"),
        (-1.0, 3.0, "refused"),
        (0.0, 3.0, "refused"),
        (math.nan, 3.0, "refused"),
        (1e-12, 0.02, "limited"),
    ],
)
def test_c03_clip_requests(value: float, applied: float, outcome: str) -> None:
    knobs = knobs_of(base=Base(clip=3.0))
    (row,) = apply(knobs, median=2.0, clip=value)
    assert (row.knob, row.before, row.applied, row.outcome) == ("clip", 3.0, applied, outcome)
    assert row.requested == value or math.isnan(value)
    assert knobs.clip == applied


def test_the_clip_follows_the_median_until_somebody_sets_it() -> None:
    knobs = knobs_of()
    knobs.threshold.follow(2.0, 15, 15)
    assert math.isinf(knobs.clip)
    knobs.threshold.follow(2.0, 16, 16)
    knobs.threshold.follow(4.0, 17, 17)
    assert knobs.clip == 6.0
    (row,) = knobs.history
    assert (row.step, row.knob, row.before, row.applied) == (16, "clip", math.inf, 3.0)
    knobs.threshold.follow(0.0, 18, 18)
    knobs.threshold.follow(math.nan, 19, 19)
    assert knobs.clip == 6.0
    apply(knobs, median=4.0, clip=1.0)
    knobs.threshold.follow(100.0, 20, 20)
    assert knobs.clip == 1.0


def test_the_trainers_own_clip_stays() -> None:
    knobs = knobs_of(base=Base(clip=3.0))
    knobs.threshold.follow(100.0, 64, 64)
    assert knobs.clip == 3.0


def test_sizes_wait_for_a_fit_that_begins() -> None:
    knobs = knobs_of()
    rows = apply(knobs, batch_size=4, accumulate=2)
    assert [(row.knob, row.requested, row.outcome) for row in rows] == [
        ("batch_size", 4, "deferred"),
        ("accumulate", 2, "deferred"),
    ]
    rows = apply(knobs, batch_size=0, accumulate=0)
    assert [row.outcome for row in rows[-2:]] == ["refused", "refused"]


# ---- requests inside a window ----


def test_check_refuses_at_once_and_defers_the_rest() -> None:
    knobs = knobs_of()
    action = Action(precision={"a": "bf16", "b": "fp8", "zz": "bf16"}, loss_scale=-1.0, clip=2.0, batch_size=0)
    rest = knobs.check(action, 7, 0, math.nan)
    assert rest == Action(precision={"a": "bf16"}, clip=2.0)
    assert sorted((row.unit or row.knob, row.outcome) for row in knobs.history) == [
        ("a", "deferred"),
        ("b", "refused"),
        ("batch_size", "refused"),
        ("clip", "deferred"),
        ("loss_scale", "refused"),
        ("precision", "refused"),
    ]
    assert all(row.applied == row.before for row in knobs.history)
    assert knobs.precision_map()["a"] == "fp32"
    assert math.isinf(knobs.clip)


# ---- the guard's own moves ----


def test_raised_units_are_in_fp32_held_and_on_record() -> None:
    knobs = knobs_of()
    apply(knobs, precision={"*": "bf16"})
    knobs.raise_units({"a": "it overflowed", "gone": "x"}, 9, 100)
    row = knobs.history[-1]
    assert (row.step, row.unit, row.before, row.applied, row.outcome) == (9, "a", "bf16", "fp32", "applied")
    assert row.reason == "guard: it overflowed"
    assert apply(knobs, applied=299, precision={"a": "bf16"})[0].outcome == "refused"
    assert apply(knobs, applied=300, precision={"a": "bf16"})[0].outcome == "applied"
    knobs.raise_units({"a": "again"}, 9, 300, forever=True)
    assert apply(knobs, applied=10**6, precision={"a": "bf16"})[0].outcome == "refused"


@pytest.mark.parametrize("base", ["fp32", "bf16", "fp16"])
def test_raising_all_reaches_the_operations_between_units(base: str) -> None:
    knobs = knobs_of(base=Base(format=base))
    apply(knobs, precision={"*": "fp16"})
    assert not knobs.is_all_wide
    knobs.raise_all(9, 100, "20 steps in a row")
    assert set(knobs.precision_map().values()) == {"fp32"}
    assert knobs.ambient_dtype == torch.float32
    assert knobs.is_all_wide
    assert knobs.is_steering
    assert {row.unit for row in knobs.history if row.step == 9} == {"a", "b", "c"}


def test_with_the_precision_masked_nothing_is_raised() -> None:
    units = find_units(network())
    knobs = Knobs(
        units, Runtime("cpu"), AutoPrecisionConfig(), {"precision": "why"}, Base(format=None), LossScale(), History()
    )
    assert knobs.is_all_wide
    knobs.raise_units({"a": "x"}, 9, 0)
    assert not knobs.history
    assert knobs.steerable(units[0]) == ("fp32",)


# ---- state ----


def test_state_is_primitive_and_goes_round() -> None:
    knobs = knobs_of()
    apply(knobs, precision={"a": "bf16", "n": "fp16"}, loss_scale=512.0, clip=2.5)
    knobs.raise_units({"b": "x"}, 9, 50)
    state = json.loads(json.dumps(knobs.state_dict()))
    other = knobs_of()
    other.load_state_dict(state)
    assert other.state_dict() == knobs.state_dict()
    assert other.precision_map() == knobs.precision_map()
    assert other.is_steering
    assert (other.clip, other.loss_scale.scale, other.threshold.follows_median) == (2.5, 512.0, False)
    assert apply(other, applied=60, precision={"b": "bf16"})[0].outcome == "refused"


def test_what_was_steered_once_stays_so_after_a_load() -> None:
    """Back at the Trainer's own map nothing in the formats says so; hidden states may still be in low precision."""
    knobs = knobs_of()
    apply(knobs, precision={"*": "bf16"})
    apply(knobs, precision={"*": "fp32"})
    assert knobs.is_steering
    other = knobs_of()
    assert not other.is_steering
    other.load_state_dict(json.loads(json.dumps(knobs.state_dict())))
    assert other.is_steering
    assert [unit.states[0].format_name for unit in other.units.values()] == ["fp32"] * 4


@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_what_runs_between_units_stays_raised_after_a_load(base: str) -> None:
    knobs = knobs_of(base=Base(format=base))
    knobs.raise_all(9, 100, "20 steps in a row")
    other = knobs_of(base=Base(format=base))
    assert other.ambient_dtype != torch.float32
    other.load_state_dict(json.loads(json.dumps(knobs.state_dict())))
    assert other.ambient_dtype == torch.float32
    assert other.is_all_wide


def test_state_of_another_model_is_taken_where_it_fits() -> None:
    knobs = knobs_of()
    apply(knobs, precision={"a": "int8", "b": "bf16"})
    other = knobs_of(nn.ModuleDict({"a": nn.LSTM(4, 4), "b": nn.Linear(4, 4)}))
    other.load_state_dict(knobs.state_dict())
    assert other.precision_map() == {"a": "fp32", "b": "bf16"}  # an LSTM has no int8


def test_block_granularity_reaches_the_layers_through_the_rule() -> None:
    parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)]
    config = AutoPrecisionConfig(granularity="block", formats=("fp32", "bf16"))
    ap = AutoPrecisionCallback(interval=10, config=config, verbose=False)
    net = nn.Sequential(*parts)
    seen = watch_dtypes(net)
    still = functools.partial(torch.optim.SGD, lr=1e-6)
    cpu(callbacks=[ap]).fit(Task(net, torch.randn(120, 16), 4, optimizer=still))
    assert ap.precision_map() == {"net.0": "bf16", "net.1": "bf16"}
    assert {dtypes[-1] for dtypes in seen.values()} == {torch.bfloat16}


def test_a_notch_of_a_policy_keeps_following_the_median() -> None:
    knobs = knobs_of()
    knobs.threshold.follow(2.0, 64, 1)
    assert knobs.clip == 3.0
    knobs.apply(Action(clip=6.0), 2, 100, 2.0, "policy 'rule'", {}, is_move=True)
    assert knobs.clip == 6.0
    knobs.threshold.follow(1.0, 64, 3)
    assert knobs.clip == 3.0  # three times the median from here on
    apply(knobs, clip=5.0)
    knobs.threshold.follow(1.0, 64, 4)
    assert knobs.clip == 5.0  # a request stays


def test_the_loss_scale_is_on_record_from_its_first_use() -> None:
    knobs = knobs_of()
    rows = apply(knobs, precision={"a": "fp16"})
    assert [(row.knob, row.before, row.applied) for row in rows] == [
        ("precision", "fp32", "fp16"),
        ("loss_scale", 1.0, knobs.loss_scale.scale),
    ]
