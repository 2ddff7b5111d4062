"""What `autoprec compare --wandb` sends, read back from the offline files. Time budget: 6 s; `slow`: 40 s."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprec import cli, metric_names
from autoprec.compare.arms import parse_arms
from autoprec.compare.records import Run
from autoprec.compare.run import Result
from autoprec.compare.settings import CompareSettings
from autoprec.compare.store import Store, Stored
from autoprec.compare.targets import load_target
from autoprec.compare.verdict import judge
from autoprec.compare.wandb_runs import rows_of_run, send
from autoprec.wandb_logging import COMPARISON, VERDICT_COLUMNS
from tests.compared import write_training
from tests.comparisons import arm_runs, comparison
from tests.wandb_files import OfflineRun, read_runs

wandb = pytest.importorskip("wandb")

EXTRA = {
    "timeline": [[0, {"a": "fp32", "b": "fp32"}], [2, {"b": "bf16"}]],
    "unit_parameters": {"a": 10, "b": 30},
    "samples_per_step": 8.0,
}


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write_training(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        del os.environ[name]


def settings() -> CompareSettings:
    return CompareSettings(
        target=load_target("training.py:build", []),
        arms=parse_arms(["bf16-mixed", "autoprec"]),
        seeds=1,
        out=Path("out"),
    )


def result(*arms: tuple[Run, ...]) -> Result:
    return Result(comparison(*arms), "val_loss", "min")


def sent(found: Result, said: list[str]) -> list[str]:
    verdict = judge(found.comparison, metric="val_loss", mode="min", margin=0.05)
    return send(found, verdict, settings(), "mine", said.append)


def by_name(count: int) -> dict[str, OfflineRun]:
    return {run.name: run for run in read_runs(Path("out"), count)}


STATIC = arm_runs("bf16-mixed", 10.0, 1.0, seeds=1, steps=6, peak_bytes=2**20, skipped_steps=1)
STEERED = arm_runs("autoprec", 8.0, 1.0, seeds=1, steps=6)


def test_a_run_for_each_arm_and_one_with_the_verdict() -> None:
    Store(Path("out"), settings().identity()).add(Stored(STEERED[0], EXTRA))
    said: list[str] = []
    assert sent(result(STATIC, STEERED), said) == ["bf16-mixed-seed0", "autoprec-seed0"]
    runs = by_name(3)
    assert {name: run.job_type for name, run in runs.items()} == {
        "bf16-mixed-seed0": "amp-bf16",
        "autoprec-seed0": "autoprec",
        COMPARISON: COMPARISON,
    }
    (group,) = {run.group for run in runs.values()}
    assert group.startswith("build-")
    assert said == [
        f"Weights & Biases: 2 runs in group `{group}` of project `mine`."
        " Offline: `wandb sync out/wandb/offline-run-*` sends them."
    ]
    static, steered = runs["bf16-mixed-seed0"], runs["autoprec-seed0"]
    assert static.config["autoprec"]["arm"] == "bf16-mixed"
    assert static.step_metrics["*"] == metric_names.STEP
    assert [row[metric_names.LOSS] for row in static.rows(metric_names.LOSS)] == [step.loss for step in STATIC[0].steps]
    assert (static.summary[metric_names.PEAK_BYTES], static.summary[metric_names.SKIPPED_STEPS]) == (2**20, 1)
    assert len(static.history) == len(list(rows_of_run(STATIC[0], {})))
    assert [row["autoprec/parameter_share/bf16"] for row in steered.rows(metric_names.STEP_MS)] == [0, *[0.75] * 5]
    table = runs[COMPARISON].table(metric_names.VERDICT)
    assert table["columns"] == VERDICT_COLUMNS
    assert [row[0] for row in table["data"]] == ["bf16-mixed", "autoprec"]


def test_a_comparison_that_goes_on_sends_the_rest_into_the_same_group() -> None:
    said: list[str] = []
    assert sent(result(STATIC), said) == ["bf16-mixed-seed0"]
    assert sent(result(STATIC, STEERED), said) == ["autoprec-seed0"]
    assert sent(result(STATIC, STEERED), said) == []
    runs = read_runs(Path("out"), 4)
    assert len({run.group for run in runs}) == 1
    assert "nothing new in group" in said[-1]


def test_disabled_and_faults_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert sent(result(STATIC), said) == []
    assert said == ["WANDB_MODE=disabled: nothing is logged to Weights & Biases."]
    monkeypatch.setenv("WANDB_MODE", "offline")

    def broken(**options: Any) -> Any:
        raise OSError("disk full")

    monkeypatch.setattr(wandb, "init", broken)
    assert sent(result(STATIC), said) == []
    assert said[1:] == ["Weights & Biases: OSError: disk full. The results in `out` are complete."]


def test_rows_hold_finite_numbers_and_the_evaluations() -> None:
    (run,) = arm_runs("autoprec", 8.0, 1.0, seeds=1, steps=6, error="diverged")
    rows = list(rows_of_run(run, EXTRA))
    steps = [row for row in rows if metric_names.STEP_MS in row]
    assert [row[metric_names.STEP] for row in steps] == list(range(6))
    assert steps[0][metric_names.SAMPLES_PER_S] == pytest.approx(8e3 / run.steps[0].step_ms)
    assert [row[metric_names.STEP] for row in rows if "val_loss" in row] == [1, 2, 3, 4, 5, 6]
    assert rows[-1][metric_names.WALL_S] == pytest.approx(sum(step.step_ms for step in run.steps) / 1e3)
    assert metric_names.PEAK_BYTES not in rows[-1]  # not known


def test_a_missing_package_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    original = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "wandb" else original(name, *rest)
    )
    assert cli.main(["compare", "training.py:build", "--wandb", "mine"]) == 1
    assert capsys.readouterr().err == "`autoprec compare` needs wandb. Run `pip install '.[wandb]'` in a checkout.\n"
    assert not Path("autoprec-compare").exists()


@pytest.mark.slow
def test_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    words = "compare training.py:build --arms bf16-mixed,autoprec:fixed:bf16 --seeds 1 --steps 6 --out out --wandb mine"
    assert cli.main(words.split()) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "2 runs in group `build-" in printed
    assert printed.splitlines()[-1].startswith("compare: task=build ")
    runs = {run.job_type: run for run in read_runs(Path("out"), 3)}
    assert set(runs) == {"amp-bf16", "autoprec:fixed:bf16", COMPARISON}
    steered = runs["autoprec:fixed:bf16"]
    assert len(steered.rows(metric_names.STEP_MS)) == 6
    assert steered.rows(metric_names.SAMPLES_PER_S)
    assert {row["autoprec/unit_share/bf16"] for row in steered.rows("autoprec/unit_share/bf16")} == {1}
    assert runs["amp-bf16"].rows("val_loss")
