"""The convergence study on a tiny budget: runs, resuming, intervals and verdicts.

Time budget: 20 s.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported
pytest.importorskip("rich")

from autoprec.paired import Interval, paired_difference, verdict
from benchmarks import convergence, convergence_runs
from benchmarks.convergence_runs import ARMS, TASKS, StudyCNN, StudyGPT, Task, decayed, run
from benchmarks.store import ROOT

STEPS = 4


def tiny_gpt() -> Task:
    return replace(
        TASKS["gpt-2-128"],
        model=partial(StudyGPT, width=16, layers=1, heads=2, context=16),
        material=partial(convergence_runs._gpt_material, context=16, batch_size=4, batches=2),
        batch_size=4,
        steps=STEPS,
    )


def tiny_cnn() -> Task:
    return replace(TASKS["digits-cnn"], model=partial(StudyCNN, width=4), batch_size=16, steps=STEPS)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    tasks = {task.name: task for task in (tiny_gpt(), tiny_cnn())}
    monkeypatch.setattr(convergence, "TASKS", tasks)

    def call(*arguments: str) -> None:
        convergence.main(["--folder", str(tmp_path / "results"), "--seeds", "2", *arguments])

    return call


def runs_in(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "results").iterdir() if path.name != "convergence.json")


# ---- the whole thing ----


def test_a_study_leaves_a_file_for_each_run_a_summary_and_one_line_for_each_task(
    study: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("convergence: ")]
    number = r"[-+]\d+\.\d{4}"
    pattern = (
        rf"convergence: task=(\S+) int8_minus_bf16={number} ci=\[{number},{number}\] margin=0\.0\d"
        " verdict=(equivalent|worse|better|undecided)"
    )
    assert [re.fullmatch(pattern, line).group(1) for line in lines] == ["gpt-2-128", "digits-cnn"]  # type: ignore[union-attr]
    assert len(runs_in(tmp_path)) == 2 * len(ARMS) * 2
    summary = json.loads((tmp_path / "results" / "convergence.json").read_text())
    assert summary["command"].startswith("python -m benchmarks.convergence --folder")
    assert {"date", "source", "versions", "machine", "threads"} <= summary.keys()
    for name, task in summary["tasks"].items():
        assert (task["steps"], task["seeds"], task["margin"]) == (STEPS, 2, TASKS[name].margin)
        assert {arm: len(losses) for arm, losses in task["final_losses"].items()} == dict.fromkeys(ARMS, 2)
        assert set(task["differences"]) == {"int8_minus_bf16", "int8_minus_static", "bf16_minus_static"}
        assert task["int8_units"]
    assert summary["tasks"]["digits-cnn"]["int8_units"] == ["head"]


def test_a_study_that_is_started_again_makes_only_what_is_missing(
    study: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study("--tasks", "digits-cnn")
    made: list[tuple[str, int]] = []

    def counted(task: Task, arm: str, seed: int, *rest: Any) -> dict[str, Any]:
        made.append((arm, seed))
        return run(task, arm, seed, *rest)

    monkeypatch.setattr(convergence, "run", counted)
    capsys.readouterr()
    study("--tasks", "digits-cnn")
    first = capsys.readouterr().out
    assert made == []
    (damaged,) = [path for path in runs_in(tmp_path) if "ours_int8-1" in path.name]
    damaged.write_text('{"final_loss": 0.')
    runs_in(tmp_path)[0].unlink()
    study("--tasks", "digits-cnn")
    assert made == [("bf16_mixed", 0), ("ours_int8", 1)]
    assert capsys.readouterr().out.splitlines()[-1] == first.splitlines()[-1]  # the runs are the same again
    made.clear()
    study("--tasks", "digits-cnn", "--seeds", "3")
    assert {seed for _, seed in made} == {2}


@pytest.mark.parametrize("change", ["steps", "map", "source", "seed", "arm"])
def test_a_run_depends_on_everything_that_its_file_is_named_after(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, arm, seed, folder = tiny_cnn(), "ours_int8", 0, Path("results")
    before = convergence.run_path(folder, task, arm, seed)
    assert convergence.run_path(folder, replace(task, margin=9.0), arm, seed) == before
    if change == "source":
        monkeypatch.setattr(convergence, "source_digest", lambda: "another")
    task = {"steps": replace(task, steps=5), "map": replace(task, int8={"*": "int8"})}.get(change, task)
    arm, seed = "ours_bf16" if change == "arm" else arm, int(change == "seed")
    assert convergence.run_path(folder, task, arm, seed) != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1"], "at least 2 pairs"),
        (["--write-docs", "--steps", "10"], "--write-docs is for whole studies"),
        (["--write-docs", "--tasks", "digits-cnn"], "--write-docs is for whole studies"),
        (["--tasks", "mnist"], "invalid choice"),
    ],
)
def test_refusals_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convergence.parse(arguments)
    assert message in capsys.readouterr().err


# ---- one run ----


def test_arms_differ_in_their_formats_alone() -> None:
    found = {arm: run(tiny_gpt(), arm, 0) for arm in ARMS}
    assert found["bf16_mixed"]["map"] is None
    assert {"bf16", "fp32"} == set(found["ours_bf16"]["map"].values())
    layers = [name for name, format_name in found["ours_int8"]["map"].items() if format_name == "int8"]
    assert layers == [f"blocks.0.{part}" for part in ("qkv", "project", "expand", "contract")]
    losses = [one["final_loss"] for one in found.values()]
    assert len(set(losses)) >= 2
    assert losses == pytest.approx([losses[0]] * 3, abs=0.05)
    for one in found.values():
        assert [step for step, _ in one["curve"]] == [1, 2, 3, 4]
        assert one["curve"][-1][1] == one["final_loss"]
        assert (one["applied_steps"], one["error"]) == (STEPS, None)


def test_a_pair_shares_its_data_and_first_weights() -> None:
    task = tiny_cnn()
    assert run(task, "bf16_mixed", 3) | {"cpu_seconds": 0} == run(task, "bf16_mixed", 3) | {"cpu_seconds": 0}
    assert run(task, "bf16_mixed", 3)["curve"] != run(task, "bf16_mixed", 4)["curve"]


def test_every_step_is_counted() -> None:
    calls: list[None] = []
    run(tiny_cnn(), "ours_bf16", 0, lambda: calls.append(None))
    assert len(calls) == STEPS


class Diverges(StudyCNN):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * math.nan


@pytest.mark.parametrize("arm", ["bf16_mixed", "ours_int8"])
@pytest.mark.filterwarnings("ignore:autoprec. 20 steps in a row had non-finite gradients:UserWarning")
def test_a_run_that_diverges_is_a_result(arm: str) -> None:
    found = run(replace(tiny_cnn(), model=partial(Diverges, width=4), steps=50), arm, 0)
    assert found["final_loss"] == math.inf
    assert (found["error"] is None) is (arm == "bf16_mixed")


def test_the_learning_rate_ends_at_zero() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = decayed(optimizer, 100)["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.2)
    assert rates.index(max(rates)) == 4
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 1e-3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_the_trainer_is_as_loud_as_before() -> None:
    levels = [logging.getLogger(f"lightning.pytorch{part}").level for part in ("", ".utilities.rank_zero")]
    run(tiny_cnn(), "bf16_mixed", 0)
    assert levels == [logging.getLogger(f"lightning.pytorch{part}").level for part in ("", ".utilities.rank_zero")]


# ---- intervals and verdicts ----


def test_the_difference_is_that_of_the_pairs() -> None:
    """Seeds differ by far more than the arms do, and that does not widen the interval."""
    right = [1.0, 5.0, 3.0, 9.0, 2.0]
    found = paired_difference([value + 0.1 for value in right], right)
    assert found == pytest.approx((0.1, 0.1, 0.1))


def test_the_interval_is_the_same_every_time_and_turns_with_the_sides() -> None:
    left, right = [1.0, 1.5, 0.5, 2.0, 1.2], [0.9, 1.7, 0.6, 1.5, 1.0]
    found, turned = paired_difference(left, right), paired_difference(right, left)
    assert found == paired_difference(left, right)
    assert found.low < found.mean < found.high
    assert turned == pytest.approx((-found.mean, -found.high, -found.low), abs=0.05)


@pytest.mark.parametrize("count", [5, 6, 10])
def test_the_interval_covers_the_true_mean(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """95 times in 100; plain percentiles of 5 values do so 83 times. A simulation of 300 is good to 4."""
    monkeypatch.setattr("autoprec.paired.RESAMPLES", 2000)
    generator = np.random.default_rng(1)
    found = [paired_difference(generator.normal(size=count).tolist(), [0.0] * count) for _ in range(300)]
    assert sum(each.low <= 0.0 <= each.high for each in found) / len(found) > 0.89


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([math.inf, 1.0], [1.0, 1.0], "worse"),
        ([1.0, 1.0], [1.0, math.inf], "better"),
        ([math.inf, math.inf], [math.inf, math.inf], "equivalent"),
    ],
)
def test_divergence_counts(left: list[float], right: list[float], expected: str) -> None:
    assert verdict(paired_difference(left, right), 0.1) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.05, 0.05, "equivalent"),
        (0.01, 0.05, "equivalent"),  # a difference, but one that was declared to be none
        (0.01, 0.2, "worse"),
        (0.15, 0.2, "worse"),
        (-0.2, -0.01, "better"),
        (-0.2, 0.05, "undecided"),
        (-0.05, 0.1, "undecided"),
        (-0.2, 0.2, "undecided"),
    ],
)
def test_verdicts(low: float, high: float, expected: str) -> None:
    assert verdict(Interval((low + high) / 2, low, high), 0.1) == expected


@pytest.mark.parametrize(("left", "right"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_values_without_partner_are_refused(left: list[float], right: list[float]) -> None:
    with pytest.raises(ValueError, match="one of each for every pair"):
        paired_difference(left, right)


def test_documented_verdicts_are_those_of_the_last_study() -> None:
    summary = json.loads(convergence.SUMMARY.read_text())
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert set(summary["tasks"]) == set(TASKS)
    for name, found in summary["tasks"].items():
        assert found["seeds"] == convergence.SEEDS
        assert f"    {convergence.verdict_line(name, found)}\n" in text
