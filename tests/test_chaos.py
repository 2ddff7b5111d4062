"""The fault campaign: a bounded one, and that each of its checks can fail. `make chaos` runs more of it.

Time budget: 60 s (one server process that imports everything, and a process for each schedule).
"""

from __future__ import annotations

import functools
import json
import math
import random
import signal
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec import Action, Decision, History
from autoprec.buffers import BufferShadow
from autoprec.gradients import Gradients
from autoprec.rollback import Rollback
from autoprec.steering import Steering
from scripts import chaos
from tests.chaos import campaign
from tests.chaos.apart import run_apart
from tests.chaos.fault import Asked, Fault, Scene
from tests.chaos.faults import FAULTS
from tests.chaos.fits import fit, make_faults
from tests.chaos.invariants import INVARIANTS, Evidence, Reading, Violation, violations
from tests.chaos.process_faults import damage
from tests.chaos.runs import Report, die, missing_copy, resume, run, spread
from tests.chaos.schedules import Injection, Schedule, draw
from tests.chaos.settings import Setting
from tests.chaos.shrink import shrink

SCHEDULES = 25


@pytest.mark.parametrize("index", range(SCHEDULES))
def test_nothing_breaks_under_faults(index: int) -> None:
    schedule = draw(0, index)
    report = run_apart(schedule)
    assert not report.violations, f"{report.violations}\n{campaign.command(schedule)}"


# ---- schedules ----


def test_a_seed_always_draws_the_same_and_each_schedule_can_be_written_down() -> None:
    drawn = [draw(3, index) for index in range(500)]
    assert drawn == [draw(3, index) for index in range(500)]
    assert drawn[:9] != [draw(4, index) for index in range(9)]
    assert [Schedule.from_json(each.to_json()).to_json() for each in drawn] == [each.to_json() for each in drawn]
    assert 30 <= sum(each.is_killed for each in drawn) <= 40
    names = {injection.fault for each in drawn for injection in each.faults}
    assert names == {name for name, cls in FAULTS.items() if cls.is_enabled()}


def test_an_unknown_fault_is_refused() -> None:
    text = Schedule(faults=(Injection("loss", 3, {}),)).to_json().replace('"loss"', '"lost"')
    with pytest.raises(ValueError, match="Passed a schedule with the fault 'lost'"):
        Schedule.from_json(text)


# ---- invariants ----


def struck(name: str, *batches: int, **options: Any) -> Fault:
    fault = FAULTS[name](batches[0], **options)
    fault.scene = Scene(Setting(), Path(), None)
    fault.struck = set(batches)
    return fault


def read(window: int, **changes: Any) -> Reading:
    return replace(Reading(window, {"net.0": "fp32"}, 1.0, math.inf, 8, 1), **changes)


DEFERRED = Decision(3, "clip", None, math.inf, 0.5, math.inf, "deferred")
APPLIED = Decision(4, "clip", None, math.inf, 0.5, 0.5, "applied")
GOOD: dict[str, Evidence] = {
    "healthy": Evidence(Setting(), windows=9, applied=6, skipped=2, user_skipped=1, attempts=9),
    "recovered": Evidence(Setting(), [struck("input", 3)], skipped=1, windows=1, attempts=1, loss=2.0, twin_loss=2.5),
    "within the noise": Evidence(
        Setting(),
        [struck("no loss", 3)],
        user_skipped=1,
        windows=1,
        attempts=1,
        loss=2.0,
        twin_loss=1.9,
        noise=lambda: 0.2,
    ),
    "left out": Evidence(
        Setting(), [struck("input", 3), struck("no loss", 3)], windows=1, user_skipped=1, attempts=1, loss=-1.0
    ),
    "answered": Evidence(
        Setting(), windows=9, applied=9, attempts=9, history=[DEFERRED, APPLIED], asked=[Asked(Action(clip=0.5), 3)]
    ),
    "told": Evidence(
        Setting(),
        readings=[read(3), read(4, formats={"net.0": "bf16"})],
        history=[Decision(4, "precision", "net.0", "fp32", "bf16", "bf16", "applied")],
    ),
}
ERROR = ValueError("somebody else's")
BAD: dict[str, tuple[str, Evidence]] = {
    "a moment": ("everything_is_finite", Evidence(Setting(), non_finite=["optimizer 0 3 exp_avg_sq"])),
    "a lost window": ("windows_add_up", Evidence(Setting(), windows=9, applied=8, attempts=8)),
    "an attempt": ("windows_add_up", Evidence(Setting(), windows=9, applied=9, attempts=10)),
    "a poisoned step": (
        "bad_steps_are_skipped",
        Evidence(Setting(), [struck("gradient", 3)], differences=[], loss=-1.0),
    ),
    "another error": ("the_right_error_arrives", Evidence(Setting(), error=ERROR)),
    "a swallowed error": ("the_right_error_arrives", Evidence(Setting(), raised=[ERROR])),
    "a format": (
        "every_change_is_on_record",
        Evidence(Setting(), readings=[read(3), read(4, formats={"net.0": "bf16"})]),
    ),
    "a scale": ("every_change_is_on_record", Evidence(Setting(), readings=[read(3), read(4, loss_scale=2.0)])),
    "a size": ("every_change_is_on_record", Evidence(Setting(), readings=[read(3), read(4, batch_size=16)])),
    "a threshold": ("every_change_is_on_record", Evidence(Setting(), readings=[read(3), read(4, clip=1.0)])),
    "no answer": ("every_request_has_an_outcome", Evidence(Setting(), asked=[Asked(Action(clip=math.nan), 3)])),
    "no last answer": (
        "every_request_has_an_outcome",
        Evidence(Setting(), windows=9, applied=9, attempts=9, history=[DEFERRED], asked=[Asked(Action(clip=0.5), 3)]),
    ),
    "a silent controller": (
        "faults_are_answered",
        Evidence(Setting(), [struck("controller", 3, kind="raises", is_for_good=True)]),
    ),
    "an uncounted window": ("faults_are_answered", Evidence(Setting(), [struck("no loss", 3)])),
    "a bit": (
        "nothing_is_lost",
        Evidence(Setting(), [struck("request", 3, is_legal=False, place="training_step")], differences=[".weights.a"]),
    ),
    "a worse loss": (
        "nothing_is_lost",
        Evidence(Setting(), [struck("loss", 3, value="nan", windows=1)], skipped=1, windows=1, attempts=1, loss=2.0),
    ),
    "no loss left": (
        "nothing_is_lost",
        Evidence(Setting(), [struck("input", 3)], skipped=1, windows=1, attempts=1, loss=math.nan),
    ),
    "a hook": ("no_trace_is_left", Evidence(Setting(), traces=["module net has a hook"])),
    "a dtype": ("gradients_have_their_dtype", Evidence(Setting(), gradient_dtypes=["net.weight"])),
    "a checkpoint": ("checkpoints_load", Evidence(Setting(), checkpoints=["step=3.ckpt: UnpicklingError"])),
    "a resumed run": ("resumed_runs_are_the_same", Evidence(Setting(), resumed=[".weights.a"])),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_not_complained_of(name: str) -> None:
    assert violations(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_each_invariant_can_fail(name: str) -> None:
    expected, evidence = BAD[name]
    assert {each.name for each in violations(evidence)} == {expected}


def test_no_invariant_is_left_out() -> None:
    assert {name for name, _ in BAD.values()} == {check.__name__ for check in INVARIANTS}


def nothing(*args: Any, **kwargs: Any) -> list[str]:
    return []


BROKEN: dict[str, tuple[str, str, Any, str, Schedule]] = {
    "buffers stay poisoned": (
        "restore",
        "everything_is_finite",
        nothing,
        "BufferShadow",
        Schedule(model="cnn", faults=(Injection("input", 20, {"value": "nan", "where": 0.5}),)),
    ),
    "bad gradients pass": (
        "has_finite_squares",
        "everything_is_finite",
        True,
        "Gradients",
        Schedule(optimizer="adam", faults=(Injection("gradient", 20, {"value": "nan", "where": 0.5}),)),
    ),
    "nobody writes down": (
        "append",
        "every_change_is_on_record",
        nothing,
        "History",
        Schedule(policy="mixed", faults=(Injection("no loss", 20, {}),)),
    ),
    "requests go lost": (
        "request",
        "every_request_has_an_outcome",
        nothing,
        "Steering",
        Schedule(
            faults=(Injection("request", 9, {"action": {"clip": 0.5}, "is_legal": True, "place": "training_step"}),)
        ),
    ),
}
CLASSES: dict[str, type] = {cls.__name__: cls for cls in (BufferShadow, Gradients, History, Steering)}


@pytest.mark.parametrize("name", BROKEN)
def test_the_campaign_finds_a_broken_guard(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, expected, value, cls, schedule = BROKEN[name]
    monkeypatch.setattr(CLASSES[cls], attribute, value)
    for method in ("at_boundary", "at_end"):  # the last level would put it right
        monkeypatch.setattr(Rollback, method, nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = run(schedule, tmp_path)
    assert expected in {each.name for each in report.violations}


def test_noise_has_a_tail_that_a_few_runs_do_not_show() -> None:
    """A range grows with the number of runs, a deviation does not; and it is no licence for a run that is ruined."""
    chance = random.Random(0)
    few = [4.5 + chance.gauss(0, 1) for _ in range(12)]
    many = [4.5 + chance.gauss(0, 1) for _ in range(2000)]
    excesses = [a - b for a, b in zip(many[::2], many[1::2], strict=True)]
    assert sum(each > spread(few) for each in excesses) <= 1
    assert sum(each > max(few) - min(few) for each in excesses) > 1
    assert spread(few) < 10.0
    assert spread([1.0, 1.0, 9.0]) >= 8.0


def test_copies_are_damaged_and_nothing_else() -> None:
    copy, live = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    assert damage(deque([{"weights": [copy, live]}, None])) == 1
    assert damage(torch.nn.Linear(2, 2)) == damage(None) == 0
    assert not copy.eq(1.0).all()
    assert live.eq(1.0).all()


# ---- processes ----


def test_a_run_that_does_not_end_is_a_violation() -> None:
    report = run_apart(draw(0, 0), limit_s=0.01)
    assert [each.name for each in report.violations] == ["the_process_ends"]


def test_a_run_that_is_killed_is_killed(tmp_path: Path) -> None:
    """The resumed run would be compared with nothing if the process ended by itself."""
    options = {"place": "training_step", "ms": 0}
    schedule = Schedule(saves_every=4, faults=(Injection("kill", 10, options),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert die(schedule, tmp_path)
        assert not die(replace(schedule, faults=(Injection("kill", 10**6, options),)), tmp_path)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


OUTLIERS = Injection("outliers", 0, {"factor": 1e4})
RETURN = Decision(6, "rollback", None, 2, 0, 0, "applied")


def test_a_copy_from_before_the_checkpoint_is_missed_where_the_run_goes_back_to_it() -> None:
    def found(applied: int, window: int = 4, skipping_since: int | None = None, row: Decision = RETURN) -> int | None:
        saved = {"window": window, "applied_steps": applied, "skipping_since": skipping_since}
        return missing_copy([DEFERRED, row], saved)

    assert found(2) == RETURN.step
    assert found(0) is None  # the resumed run begins with the same copy
    assert found(0, skipping_since=3) == RETURN.step  # where it does not
    assert found(2, window=7) is None  # it went back before
    assert found(2, row=replace(RETURN, outcome="refused")) is None


@pytest.mark.parametrize("is_other", [False, True])
def test_a_resumed_run_is_compared_until_the_run_goes_back_to_a_copy_that_it_lacks(
    is_other: bool, tmp_path: Path
) -> None:
    """The outlier ruins the weights before the checkpoint, and the only healthy copy is older."""
    schedule = Schedule(saves_every=4, faults=(OUTLIERS, Injection("kill", 4, {"place": "training_step", "ms": 0})))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert die(schedule, tmp_path / "killed")
        through = fit(schedule, make_faults(schedule), tmp_path / "through")
        other = replace(schedule, clip=0.5) if is_other else schedule
        differing = resume(other, through, tmp_path / "killed")
    assert through.error is None
    assert any(row.knob == "rollback" for row in through.callback.history)  # type: ignore[union-attr]
    assert bool(differing) == is_other


# ---- faults ----


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_optimizer_fault_leaves_no_hook_where_the_fit_ends_before_its_step(place: str, tmp_path: Path) -> None:
    ending = Injection("step", 9, {"place": "backward"})
    schedule = Schedule(faults=(ending, Injection("optimizer", 9, {"place": place})))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = run(schedule, tmp_path)
    assert report.struck == 2
    assert report.violations == []


@pytest.mark.parametrize(("accumulate", "is_uncounted"), [(1, True), (2, False)])
def test_a_batch_without_loss_is_a_window_only_where_nothing_accumulates(accumulate: int, is_uncounted: bool) -> None:
    class Now:
        accumulate_grad_batches = accumulate

    fault = struck("no loss", 3)
    assert fault.on_batch(3, [torch.ones(1)], Now()) is None  # type: ignore[arg-type]
    assert bool(list(fault.complaints(Evidence(Setting(), [fault])))) == is_uncounted


# ---- shrinking ----


def test_a_failing_schedule_becomes_as_small_as_it_gets() -> None:
    calls: list[Schedule] = []

    def fails(schedule: Schedule) -> bool:
        calls.append(schedule)
        return schedule.model == "gpt" and "loss" in {each.fault for each in schedule.faults}

    names = ("no loss", "gradient", "loss", "request")
    drawn = tuple(Injection(name, 20 + i, {"place": "training_step"}) for i, name in enumerate(names))
    schedule = Schedule("gpt", "mixed", "adam", 3, (), "bf16-mixed", 1.0, 40, 7, False, True, 5, faults=drawn)
    found = shrink(schedule, fails)
    assert [each.fault for each in found.faults] == ["loss"]
    assert found.without(found.faults) == Schedule("gpt")
    assert found.faults[0].batch <= 4
    assert len(calls) < 60
    assert shrink(schedule, lambda each: False) == schedule


# ---- campaigns ----


def fake(schedule: Schedule, calls: list[Schedule]) -> Report:
    calls.append(schedule)
    is_bad = schedule.model == "gpt"
    return Report(len(schedule.faults), [Violation("windows_add_up", "3 windows, but 2")] if is_bad else [])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    """Schedules that a campaign has run, none of which trains anything: those with a GPT fail."""
    seen: list[Schedule] = []
    runner: Callable[[Schedule], Report] = functools.partial(fake, calls=seen)
    monkeypatch.setattr(campaign, "run_missing", functools.partial(campaign.run_missing, runner=runner))
    monkeypatch.setattr(campaign, "make_smaller", functools.partial(campaign.make_smaller, runner=runner))
    monkeypatch.setattr("tests.chaos.apart.run_apart", runner)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return seen


def test_a_stopped_campaign_goes_on_where_it_was(
    calls: list[Schedule], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--results", str(tmp_path), "--jobs", "1", "--seed", "6", "--schedules"]
    assert chaos.main([*arguments, "8"]) == 1
    first = capsys.readouterr().out
    (path,) = tmp_path.glob("seed-6-*.jsonl")
    assert {json.loads(line)["index"] for line in path.read_text().split("\n") if line} == set(range(8))
    path.write_text(path.read_text() + '{"index": 8, "sched')  # stopped in the middle of a line
    calls.clear()
    assert chaos.main([*arguments, "8"]) == 1
    assert calls == []
    assert capsys.readouterr().out.splitlines()[-1] == first.splitlines()[-1]
    assert chaos.main([*arguments, "10"]) == 1
    assert [each.to_json() for each in calls[:2]] == [draw(6, 8).to_json(), draw(6, 9).to_json()]


def test_the_last_line_and_the_command_of_a_failing_schedule(
    calls: list[Schedule], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos.main(["--results", str(tmp_path), "--schedules", "12", "--jobs", "1"]) == 1
    output = capsys.readouterr().out
    drawn = [draw(0, index) for index in range(12)]
    bad = sum(each.model == "gpt" for each in drawn)
    assert bad
    faults = sum(len(each.faults) for each in drawn)
    assert output.splitlines()[-1] == f"chaos: schedules=12 faults={faults} violations={bad}"
    smallest = Schedule("gpt")
    assert output.count(f"again: {campaign.command(smallest)}") == bad
    assert chaos.main(["--run", smallest.to_json()]) == 1
    assert chaos.main(["--run", Schedule().to_json()]) == 0
    assert capsys.readouterr().out.endswith("chaos: schedules=1 faults=0 violations=0\n")
    assert chaos.main(["--only", str([each.model for each in drawn].index("gpt"))]) == 1


def test_help_and_the_list_of_faults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit):
        chaos.main(["--help"])
    assert "make chaos SCHEDULES=500" in capsys.readouterr().out
    assert chaos.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:20].strip() for line in lines] == list(FAULTS)
    with pytest.raises(SystemExit):
        chaos.main(["--schedules", "0"])
    assert "`--schedules` must be at least 1" in capsys.readouterr().err
