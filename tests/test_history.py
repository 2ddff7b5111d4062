"""The record: round trips through JSON Lines and through a checkpoint.

Time budget: 5 s.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoprec.history import Decision, History

numbers = st.floats(allow_nan=False) | st.integers(-(2**53), 2**53) | st.none()
words = st.text(max_size=8) | st.sampled_from(["inf", "nan", "bf16"]) | st.none()


def fixed(
    knob: str, values: st.SearchStrategy[Any], unit: st.SearchStrategy[str | None]
) -> st.SearchStrategy[Decision]:
    return st.builds(
        Decision,
        step=st.integers(0, 10**9),
        knob=st.just(knob),
        unit=unit,
        before=values,
        requested=values,
        applied=values,
        outcome=st.sampled_from(["applied", "refused", "deferred", "limited"]),
        reason=st.text(max_size=8),
    )


decisions = st.one_of(
    *(fixed(knob, numbers, st.none()) for knob in ("loss_scale", "batch_size", "clip", "accumulate")),
    *(fixed(knob, words, st.text()) for knob in ("precision", "policy")),
)


def example() -> History:
    return History(
        [
            Decision(0, "precision", "net.0", "fp32", "bf16", "bf16", "applied", "requested"),
            Decision(3, "clip", None, 1.5, math.inf, math.inf, "applied", "requested"),
            Decision(4, "precision", "net.1", "fp32", "fp8", "fp32", "refused", "not legal"),
        ]
    )


@given(history=st.lists(decisions).map(History))
def test_jsonl_round_trip(history: History, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    history.to_jsonl(path)
    assert History.from_jsonl(path) == history


@given(history=st.lists(decisions).map(History))
def test_state_round_trip(history: History) -> None:
    loaded = History([*example()])
    loaded.load(history.state())
    assert loaded == history


def test_jsonl_is_standard_json_one_object_a_line(tmp_path: Path) -> None:
    example().to_jsonl(tmp_path / "made" / "history.jsonl")
    lines = (tmp_path / "made" / "history.jsonl").read_text(encoding="utf-8").splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [record["step"] for record in records] == [0, 3, 4]
    assert records[1]["requested"] == "inf"


def test_nan_survives(tmp_path: Path) -> None:
    history = History([Decision(0, "clip", None, -math.inf, math.nan, 1.0, "refused", "NaN")])
    history.to_jsonl(tmp_path / "history.jsonl")
    (decision,) = History.from_jsonl(tmp_path / "history.jsonl")
    assert isinstance(decision.requested, float)
    assert math.isnan(decision.requested)
    assert decision.before == -math.inf


def test_state_loads_with_weights_only(tmp_path: Path) -> None:
    torch.save(example().state(), tmp_path / "state.pt")
    history = History()
    history.load(torch.load(tmp_path / "state.pt", weights_only=True))
    assert history == example()


def test_last() -> None:
    history = example()
    assert history.last() is history[2]
    assert history.last("clip") is history[1]
    assert history.last("precision", "net.0") is history[0]
    assert history.last(unit="net.1") is history[2]
    assert history.last("batch_size") is None
    assert History().last() is None


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"step": 1}', '{"knob": "colour"}'])
def test_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    example().to_jsonl(path)
    path.write_text(f"{path.read_text(encoding='utf-8')}{line}\n", encoding="utf-8")
    passed = f"Passed `History.from_jsonl({str(path)!r})`. Line 4 is not a decision:"
    with pytest.raises(ValueError, match=re.escape(passed)):
        History.from_jsonl(path)


@pytest.mark.parametrize(("field", "value"), [("knob", "colour"), ("outcome", "ignored")])
def test_closed_sets(field: str, value: str) -> None:
    data = {**example()[0].to_dict(), field: value}
    with pytest.raises(ValueError, match=re.escape(f"Passed `Decision({field}={value!r})`.")):
        Decision.from_dict(data)


def test_g02_the_last_answer_before_a_recovery_is_marked() -> None:
    history = History(
        [
            Decision(2, "precision", "a", "fp16", "bf16", "bf16", "applied"),  # before the first skipped step
            Decision(5, "loss_scale", None, 8.0, 4.0, 4.0, "applied"),
            Decision(6, "precision", "b", "fp16", "fp32", "fp32", "applied"),
            Decision(6, "loss_scale", None, 4.0, 2.0, 2.0, "limited"),
            Decision(6, "clip", None, 1.0, 2.0, 1.0, "refused"),
        ]
    )
    history.note_recovery(since=4, at=6)
    assert [decision.recovered_at for decision in history] == [None, None, 6, 6, None]
    history.note_recovery(since=6, at=8)
    assert [decision.recovered_at for decision in history] == [None, None, 6, 6, None]
