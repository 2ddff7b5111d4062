"""The transfer study on a tiny budget: charges by hand, single runs, scores of known curves, resuming, and the page.

Time budget: 25 s.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported
pytest.importorskip("rich")
pytest.importorskip("mnist1d")

from autoprec import Action, AutoPrecisionCallback, ScriptedController
from autoprec.cost_table import StepModel
from autoprec.encoding import Observation, feature
from autoprec.envs.profiles import Profile, Range
from autoprec.paired import Interval
from benchmarks import transfer, transfer_tasks
from benchmarks.transfer_arms import ARMS, SUBJECTS, Arm, available, folder_arm, settings
from benchmarks.transfer_charge import CHARGES, OVERHEAD, StepCharge, profile_of, unit_shares
from benchmarks.transfer_report import deeds, last_line, page_block, scores
from benchmarks.transfer_runs import run
from benchmarks.transfer_scores import best_static, difference, differences, named, reached, total, verdict
from benchmarks.transfer_tasks import TASKS, Classifier, SignalMLP, Task, digits, labelled

STEPS = 20
ARM = {arm.name: arm for arm in ARMS}
TWIN, FP32, BF16, FP16, RULE = (
    ARM[name] for name in ("fp32-twin", "32-true+clip", "bf16-mixed+clip", "16-mixed+clip", "rule")
)


class Tiny(Classifier):
    """Two layers on 64 pixels; ``factor`` on the activations between them, ``weight`` on the loss."""

    def __init__(self, factor: float = 1.0, weight: float = 1.0) -> None:
        super().__init__(learning_rate=0.1)
        self.factor, self.weight = factor, weight
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.second(self.first(images.flatten(1)).relu() * self.factor) / self.factor
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight * super().training_step(batch, batch_idx)


def tiny(**changes: Any) -> Task:
    return Task("tiny", partial(Tiny, **changes), digits, labelled, 32, STEPS, 5)


@dataclass(frozen=True)
class OwnArm(Arm):
    """An arm with a controller of its own."""

    controller: Any = None

    def callback(self, charge: str) -> AutoPrecisionCallback:
        return AutoPrecisionCallback(self.controller, interval=2, config=settings(charge), verbose=False)


# ---- charges ----


def test_a_step_is_charged_by_the_formats_of_its_units() -> None:
    profile = Profile(
        name="p",
        cost={"fp32": 1.0, "bf16": 0.5, "fp8": 0.25},
        overhead=Range(low=0.4, high=0.6),
        batch_exponent=Range(low=1.0, high=1.0),
        cast_cost=0.1,
    )
    charge = StepCharge(profile, {"a": 0.25, "b": 0.75})
    assert charge.step({"a": "fp32", "b": "fp32"}) == 1.0
    assert charge.step({"a": "bf16", "b": "bf16"}) == pytest.approx((0.5 + 0.5) / 1.5)
    # 0.25 + 0.75 / 4, and one change of format between neighbours; the norm between them is not in the shares
    assert charge.step({"a": "fp32", "norm": "fp8", "b": "fp8"}) == pytest.approx((0.5 + 0.4375 + 0.1) / 1.5)
    assert charge.step({"a": "fp32", "b": "fp32"}, 3.0) == pytest.approx((0.5 + 3.0) / 1.5)


def test_devices_are_charged_by_the_rates_of_the_database() -> None:
    h100, a100 = profile_of("h100"), profile_of("a100")
    assert h100.cost == {
        "fp32": 1.0,
        "bf16": 66.9 / 989.4,
        "fp16": 66.9 / 989.4,
        "fp8": 66.9 / 1978.9,
        "int8": pytest.approx(66.9 / 989.4 / 3 + 2 * 66.9 / 1978.9 / 3),  # its weight gradient is taken in bf16
    }
    assert "fp8" not in a100.cost
    assert a100.cost["bf16"] == 19.5 / 312
    assert h100.overhead == Range(low=OVERHEAD, high=OVERHEAD)


def test_shares_are_those_of_the_multiplications() -> None:
    _, batch = digits()
    pair = tuple(part[:8] for part in batch)
    assert unit_shares(Tiny(), labelled, pair) == {"first": 1024 / 1184, "second": 160 / 1184}
    found = unit_shares(TASKS["digits-cnn"].model(), labelled, pair)
    work = {"features.0": 64 * 9 * 16, "features.3": 64 * 9 * 16 * 32, "features.7": 16 * 9 * 32 * 64, "head": 640}
    assert found == pytest.approx({name: value / sum(work.values()) for name, value in work.items()})
    task = TASKS["byte-lstm"]
    assert unit_shares(task.model(), task.answer, (task.material()[1][0][:2],)) == {"recurrent": 0.8, "head": 0.2}


def test_a_policy_is_told_the_costs_of_the_device() -> None:
    charge, model = StepCharge(profile_of("h100"), {"a": 0.25, "b": 0.75}), StepModel()
    table = charge.table()
    assert table.map_ms({"a": "fp32", "b": "bf16"}) == pytest.approx(10 * (0.25 + 0.75 * 66.9 / 989.4))
    assert table.why_too_slow("a", "fp16", ["fp32", "bf16", "fp16"]) is not None
    assert table.why_too_slow("a", "fp8", ["fp32", "bf16", "fp8"]) is None
    charge.note_step(model)
    assert model.predict_ms(table.map_ms({"a": "fp32", "b": "fp32"})) == pytest.approx(10 * (1 + OVERHEAD))


# ---- tasks and arms ----


@pytest.mark.parametrize("name", TASKS)
def test_the_order_of_samples_is_that_of_the_seed(name: str) -> None:
    def first(seed: int) -> Tensor:
        batch: Tensor = next(iter(TASKS[name].loader(seed)))[0]
        return batch

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
    logits, labels = TASKS[name].answer(TASKS[name].model(), next(iter(TASKS[name].loader(0))))
    assert logits.ndim == 2
    assert len(logits) == len(labels)


def test_making_signals_leaves_the_global_generators_alone() -> None:
    transfer_tasks.signals.cache_clear()
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    train, (signals, labels) = transfer_tasks.signals()
    assert (len(train), signals.shape, labels.dtype) == (4000, (1000, 40), torch.int64)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]


def test_arms_that_this_version_does_not_have_are_named(tmp_path: Path) -> None:
    arms = [TWIN, RULE, Arm("better", policy="better"), folder_arm(str(tmp_path / "seed-1"))]
    found, missing = available(arms)
    assert found == [TWIN, RULE]
    assert missing == [f"{name} is left out: this version does not have it." for name in ("better", "seed-1")]


def test_the_files_of_a_policy_are_part_of_what_a_run_depends_on(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text("1")
    before = folder_arm(str(tmp_path)).identity()
    assert folder_arm(str(tmp_path)).identity() == before
    (tmp_path / "policy.json").write_text("2")
    assert folder_arm(str(tmp_path)).identity() != before


# ---- one run ----


def recomputed(found: dict[str, Any], charge: str, task: Task) -> float:
    """What the recorded formats and batch sizes cost."""
    steps, formats, size, spent = StepCharge(profile_of(charge), found["shares"]), {}, 0, 0.0
    changes, sizes = dict(found["maps"]), dict(found["batch_sizes"])
    for batch in range(found["batches"]):
        formats.update(changes.get(batch, {}))
        size = sizes.get(batch, size)
        spent += steps.step(formats, size / task.batch_size)
    return spent


def test_the_twin_is_charged_a_step_for_a_step() -> None:
    found = run(tiny(), TWIN, None, 0, {"h100": STEPS, "a100": STEPS})
    assert (found["batches"], found["charges"], found["error"]) == (STEPS, ["cpu", "h100", "a100"], None)
    assert [point[0] for point in found["points"]] == list(range(STEPS + 1))
    assert found["points"][-1][4:] == [STEPS, STEPS]
    assert (found["mean_bits"], found["emulated"], found["skipped"]) == (32.0, [], 0)
    assert json.loads(json.dumps(found)) == found


def test_a_run_goes_on_until_its_last_budget_is_spent() -> None:
    found = run(tiny(), BF16, None, 0, {"h100": STEPS, "a100": 10.0})
    step = (OVERHEAD + 66.9 / 989.4) / (1 + OVERHEAD)
    assert found["batches"] == math.ceil(STEPS / step)
    assert found["points"][-1][4] == pytest.approx(recomputed(found, "h100", tiny()), abs=1e-3)
    assert found["mean_bits"] == 16.0


def test_runs_of_a_seed_share_first_weights_and_samples() -> None:
    first, again, other = (
        run(tiny(), arm, None, seed, {"h100": 3.0}) for arm, seed in ((TWIN, 1), (TWIN, 1), (TWIN, 2))
    )
    assert [point[:3] for point in first["points"]] == [point[:3] for point in again["points"]]
    assert first["points"][0][1] != other["points"][0][1]
    assert run(tiny(), BF16, None, 1, {"h100": 1.0})["points"][0][1] == first["points"][0][1]


@pytest.mark.parametrize("charge", ["h100", "a100"])
def test_a_policy_chooses_among_the_formats_of_the_device_and_is_charged_for_them(charge: str) -> None:
    found = run(tiny(), RULE, charge, 0, {charge: STEPS})
    assert (found["charges"], found["error"]) == (["cpu", charge], None)
    used = {name for _, changed in found["maps"] for name in changed.values()}
    assert {"bf16"} < used
    assert used <= set(profile_of(charge).cost)
    assert found["points"][-1][4] == pytest.approx(recomputed(found, charge, tiny()), abs=1e-3)
    assert STEPS <= found["points"][-1][4] < STEPS + 1


def test_what_is_emulated_is_called_so() -> None:
    found = run(tiny(), OwnArm("own", policy="own", controller="fixed:fp8"), "h100", 0, {"h100": 3.0})
    assert found["emulated"] == ["fp8"]


class Watching(ScriptedController):
    """Doubles the batch from the second epoch on and notes what it is told of the run's progress."""

    looks = True

    def __init__(self) -> None:
        super().__init__(epochs={1: Action(batch_size=64)})
        self.seen: list[float] = []

    def decide(self, observation: Observation) -> None:
        self.seen.append(float(feature(observation[:1], "progress")[0]))


def test_a_larger_batch_is_charged_and_progress_is_the_share_of_the_budget() -> None:
    controller = Watching()
    found = run(tiny(), OwnArm("own", policy="own", controller=controller), "h100", 0, {"h100": STEPS})
    assert found["batch_sizes"][:2] == [[0, 32], [5, 64]]
    assert found["points"][-1][4] == pytest.approx(recomputed(found, "h100", tiny()), abs=1e-3)
    assert found["batches"] < STEPS
    assert controller.seen == sorted(controller.seen)
    assert 0.7 < controller.seen[-1] <= 1.0


def test_steps_that_a_scaler_skips_are_counted() -> None:
    found = run(tiny(factor=1e6), FP16, None, 0, {"h100": 2.0})
    assert found["skipped"] == found["batches"] > 2
    assert found["points"][-1][1] == found["points"][0][1]
    assert found["emulated"] == ["fp16"]


def test_weights_that_are_not_finite_are_a_divergence() -> None:
    found = run(tiny(weight=math.nan), TWIN, None, 0, {"h100": 2.0})
    assert found["diverged"]
    assert found["points"][-1][1] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_an_arm_that_does_not_work_is_a_result() -> None:
    task = replace(tiny(), model=partial(SignalMLP, width=8))  # takes 40 numbers, not images
    task = replace(task, answer=lambda module, batch: (module(batch[0].flatten(1)[:, :40]), batch[1]))
    found = run(task, FP32, None, 0, {"h100": 2.0})
    assert found["error"].startswith("RuntimeError: ")
    assert (found["batches"], found["diverged"]) == (0, False)


# ---- scores ----


def curve(losses: list[float | None], spent: list[float], **changes: Any) -> dict[str, Any]:
    points = [[step, loss, step / 10, time] for step, (loss, time) in enumerate(zip(losses, spent, strict=True))]
    return {"charges": ["cpu"], "points": points, "diverged": False, "error": None, **changes}


TWIN_CURVE = curve([math.e**2, math.e, 1.0], [0.0, 1.0, 2.0])


def test_a_score_is_progress_within_the_budget_in_units_of_the_twins() -> None:
    assert tuple(reached(TWIN_CURVE, TWIN_CURVE, "cpu")) == pytest.approx((1.0, 1.0, 0.2, False))
    # the budget of 2 ends half way between log losses of 1 and -2
    faster = curve([math.e**2, math.e, math.e**-2], [0.0, 1.5, 2.5])
    found = reached(faster, TWIN_CURVE, "cpu")
    assert found.score == pytest.approx(1.25)
    assert found.loss == pytest.approx(math.e**-0.5)
    assert (found.accuracy, found.is_short) == (0.1, False)


def test_a_run_that_ends_early_keeps_its_last_loss_and_is_marked() -> None:
    found = reached(curve([math.e**2, math.e], [0.0, 1.0]), TWIN_CURVE, "cpu")
    assert found.score == pytest.approx(0.5)
    assert found.is_short


@pytest.mark.parametrize("changes", [{"diverged": True}, {"losses": [math.e**2, None, None]}])
def test_a_run_that_diverged_has_the_lowest_score(changes: dict[str, Any]) -> None:
    losses = changes.pop("losses", [math.e**2, math.e, 0.5])
    assert reached(curve(losses, [0.0, 1.0, 2.0], **changes), TWIN_CURVE, "cpu").score == -2.0


def test_a_twin_that_learns_nothing_is_no_measure() -> None:
    with pytest.raises(ValueError, match="Give the task more steps"):
        reached(TWIN_CURVE, curve([1.0, 0.9], [0.0, 1.0]), "cpu")


def test_intervals_are_over_tasks_and_seeds() -> None:
    assert difference(np.full((3, 4), 0.5)) == (0.5, 0.5, 0.5)
    assert difference(np.array([[0.5]])) == (0.5, 0.5, 0.5)
    # the difference is the task's, so that more seeds teach nothing
    few, many = (difference(np.repeat([[-1.0], [0.0], [1.0]], seeds, axis=1)) for seeds in (2, 50))
    assert few == many
    assert few.low < -1.0 < 1.0 < few.high
    # of one task only seeds can be drawn
    assert difference(np.array([[-1.0, 1.0, 0.0]])).low < -1.0
    tight = difference(np.random.default_rng(0).normal(0.5, 0.1, size=(5, 5)))
    assert 0.3 < tight.low < tight.mean < tight.high < 0.7


def test_intervals_hold_the_true_mean_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks differ as much as seeds do. A simulation of 200 is good to 4 in 100."""
    monkeypatch.setattr("benchmarks.transfer_scores.RESAMPLES", 500)
    generator = np.random.default_rng(1)
    found = [difference(generator.normal(size=(5, 1)) + generator.normal(size=(5, 5))) for _ in range(200)]
    assert sum(each.low <= 0.0 <= each.high for each in found) / len(found) > 0.89


@pytest.mark.parametrize(("low", "high", "word"), [(0.1, 0.2, "better"), (-0.2, -0.1, "worse"), (-0.1, 0.2, "tie")])
def test_an_interval_that_holds_zero_is_a_tie(low: float, high: float, word: str) -> None:
    assert verdict(Interval((low + high) / 2, low, high)) == word


def arms_of(**by_name: Any) -> dict[str, Any]:
    return {
        name.replace("_", "-") if name != "fp32" else "32-true+clip": {
            "cpu": {"scores": values, "failed": None if values else "no"}
        }
        for name, values in by_name.items()
    }


def test_the_best_static_arm_works_and_is_no_policy() -> None:
    arms = arms_of(fp32=[1.0, 1.2], rule=[9.0, 9.0], fp32_twin=[1.0, 1.0]) | {
        "16-mixed+clip": {"cpu": {"scores": [5.0, 5.0], "failed": "no"}}
    }
    assert best_static(arms, "cpu") == "32-true+clip"
    tasks = {"a": {"arms": arms}}
    assert differences(tasks, "rule", best_static, ["cpu"]) == {"a": [8.0, pytest.approx(7.8)]}
    assert differences(tasks, "rule", named("16-mixed+clip"), ["cpu"]) == {}
    assert differences(tasks, "rule", named("rule"), ["cpu"]) == {}
    assert total({}) is None


# ---- the whole thing ----


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a study in this process and returns the titles of what was done."""
    monkeypatch.setattr(transfer, "TASKS", {"tiny": tiny()})
    monkeypatch.setattr(transfer, "QUICK_TASKS", ("tiny",))
    monkeypatch.setattr(transfer, "ARMS", (TWIN, BF16, RULE, Arm("none", policy="none")))

    def call(*arguments: str) -> list[str]:
        done: list[str] = []

        def counted(order: transfer.Order) -> None:
            done.append(order.job.title)
            transfer.perform(order)

        folder = str(tmp_path / "results")
        transfer.main(["--folder", folder, "--jobs", "1", *arguments], counted)
        return done

    return call


def test_a_study_leaves_a_file_for_each_run_and_goes_on_where_it_stopped(
    study: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = study("--quick")
    policies = [f"tiny-rule-{charge}-{seed}" for seed in (10, 11) for charge in CHARGES]
    static = [f"tiny-{name}-{seed}" for name in ("fp32-twin", "bf16-mixed+clip") for seed in (10, 11)]
    assert sorted(done) == sorted(["tiny-prices", *policies, *static])
    assert done[:3] == ["tiny-fp32-twin-10", "tiny-fp32-twin-11", "tiny-prices"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "none is left out: this version does not have it."
    number = r"[+-]\d\.\d{3}"
    last = rf"transfer: tasks=1 seeds=2 vs_best_static={number} vs_rule=n/a vs_table=n/a skipped=0\.\d{{4}} diverged=0"
    assert re.fullmatch(last, lines[-1])
    assert study("--quick") == []
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]
    (damaged,) = (tmp_path / "results").glob("transfer-tiny-rule-h100-10-*.json")
    damaged.write_text("{")
    assert study("--quick") == ["tiny-rule-h100-10"]
    assert (tmp_path / "results" / "transfer.png").stat().st_size > 10_000
    summary = json.loads((tmp_path / "results" / "transfer.json").read_text())
    assert {"command", "date", "versions", "machine", "source"} <= summary.keys()
    assert (summary["seeds"], summary["subject"]) == ([10, 11], "rule")
    arms = summary["tasks"]["tiny"]["arms"]
    assert arms["fp32-twin"]["h100"]["scores"] == [1.0, 1.0]
    assert arms["bf16-mixed+clip"]["h100"]["steps"] > STEPS
    assert last_line(summary) == lines[-1]
    assert scores(summary, "h100").lines[0] == ["fp32-twin", "1.000"]
    assert [line[0] for line in deeds(summary).lines] == ["rule"] * 3
    assert "`" + summary["command"] + "`" in page_block(summary)


@pytest.mark.slow
def test_a_job_has_a_process_of_its_own_whose_failure_ends_the_study(tmp_path: Path) -> None:
    task = replace(TASKS["digits-cnn"], steps=2)
    job = transfer.twin_of(task, 10)
    transfer.in_own_process(transfer.order(job, tmp_path))
    assert json.loads(job.path(tmp_path).read_text())["batches"] == 2
    with pytest.raises(
        RuntimeError, match=re.escape("The run digits-cnn-fp32-twin-10 failed: its process ended with 1")
    ):
        transfer.in_own_process(transfer.order(replace(job, task=replace(task, batch_size=-1)), tmp_path))


@pytest.mark.parametrize("change", ["steps", "source", "seed", "arm", "charge", "batch"])
def test_a_run_depends_on_everything_that_its_file_is_named_after(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, folder = transfer.Job(TASKS["byte-gpt"], RULE, "h100", 10), Path("results")
    before = job.path(folder)
    if change == "source":
        monkeypatch.setattr(transfer, "_fixed", lambda: ["another"])
    changes: dict[str, dict[str, Any]] = {
        "steps": {"task": replace(job.task, steps=5)},
        "batch": {"task": replace(job.task, batch_size=5)},
        "seed": {"seed": 11},
        "arm": {"arm": ARM["shape"]},
        "charge": {"charge": "a100"},
    }
    assert replace(job, **changes.get(change, {})).path(folder) != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1"], "an interval needs 2 seeds"),
        (["--jobs", "0"], "an interval needs 2 seeds"),
        (["--quick", "--seeds", "3"], "--quick has its own tasks and seeds"),
        (["--write-docs", "--tasks", "byte-gpt"], "--write-docs is for whole studies"),
        (["--write-docs", "--seeds", "4"], "--write-docs is for whole studies"),
        (["--tasks", "mnist"], "invalid choice"),
    ],
)
def test_refusals_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        transfer.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_subject_is_one_of_the_policies(study: Callable[..., list[str]]) -> None:
    with pytest.raises(SystemExit, match="must be one of the policies of this study, rule"):
        study("--quick", "--subject", "bf16-mixed+clip")


def test_the_page_says_what_the_last_study_found() -> None:
    found = json.loads(transfer.SUMMARY.read_text())
    assert found["subject"] in SUBJECTS
    assert set(found["tasks"]) <= set(TASKS)
    assert len(found["seeds"]) >= 2
    for name, task in found["tasks"].items():
        assert (task["steps"], task["batch_size"]) == (TASKS[name].steps, TASKS[name].batch_size)
    block = f"{transfer.BEGIN}\n{page_block(found)}\n{transfer.END}"
    assert block in transfer.PAGE.read_text()
    assert transfer.SUMMARY.with_suffix(".png").exists()
