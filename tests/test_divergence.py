"""The divergence study on a tiny budget: what survival is, what is seen of a run, resuming, and the page.

Time budget: 20 s.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported
pytest.importorskip("rich")

from autoprec import Decision
from benchmarks import divergence
from benchmarks.divergence_models import Perceptron
from benchmarks.divergence_recipes import RECIPES, Arm, Recipe
from benchmarks.divergence_report import figures, last_line, page_block, summarise
from benchmarks.divergence_runs import run
from benchmarks.survival import answers, deeds, failure, symptoms

STATIC, FP32, STEERED = Arm("16-mixed"), Arm("32-true"), Arm("16-mixed", is_steered=True)


def healthy(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "steps": 100,
        "final_loss": 1.0,
        "val_loss": 1.0,
        "error": None,
        "steps_lost": 0,
        "last_moved": 100,
        "moved_share": 0.9,
        "largest_weight": 1.0,
        "nonfinite_step": None,
        "nonfinite_weights": [],
        "nonfinite_buffers": [],
        "loss_scale": None,
        "cpu_seconds": 1.0,
        "undone_steps": 0,
        "answers": answers([]),
    }
    assert changes.keys() <= found.keys()
    return found | changes


def short(name: str, steps: int, **changes: Any) -> Recipe:
    return replace(RECIPES[name], steps=steps, **changes)


# ---- survival ----


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"final_loss": 1.5}, None),
        ({"final_loss": 1.51}, "the final loss is 1.51 times the reference's"),
        ({"final_loss": 0.1}, None),
        ({"final_loss": None}, "the final loss is not finite"),
        ({"val_loss": None}, "the Trainer's validation is not finite"),
        ({"nonfinite_weights": ["net.1.weight"]}, "weights are not finite"),
        ({"nonfinite_buffers": ["norm.running_var"]}, "buffers are not finite"),
        ({"error": "RuntimeError: no"}, "stopped: RuntimeError: no"),
    ],
)
def test_a_run_survives_if_all_of_it_is_finite_and_its_loss_is_near(
    changes: dict[str, Any], reason: str | None
) -> None:
    assert failure(healthy(**changes), 1.0, 1.5) == reason


def test_nothing_survives_without_a_reference() -> None:
    assert failure(healthy(), None, 1.5) == "the reference has no finite loss"


def test_a_recipe_counts_if_it_survived_with_every_seed() -> None:
    recipe = short("bf16-tail", 100)
    good, bad = healthy(), healthy(final_loss=2.0)
    runs = dict.fromkeys(recipe.arms(), [good, good]) | {"static": [good, bad]}
    summary = summarise(recipe, runs)
    assert summary["arms"]["static"]["survived"] == 1
    assert summary["arms"]["static"]["failures"] == [None, "the final loss is 2 times the reference's"]
    assert last_line({"bf16-tail": summary}) == "divergence: recipes=1 static_survived=0 autoprec_survived=1"


@pytest.mark.parametrize(
    ("losses", "shown"),
    [([1.0, 3.0, 2.0], "2"), ([None, 1.0, 2.0], "2"), ([None, None, 1.0], "not finite"), ([None, 1.0], "not finite")],
)
def test_a_loss_that_is_not_finite_is_larger_than_all_others(losses: list[float | None], shown: str) -> None:
    recipe = short("bf16-tail", 100)
    runs = {arm: [healthy(final_loss=loss) for loss in losses] for arm in recipe.arms()}
    (line,) = figures({"bf16-tail": summarise(recipe, runs)}).lines
    assert line[5] == shown


# ---- what is seen of a run ----


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "nothing"),
        ({"last_moved": 0, "loss_scale": 0.0}, "weights never moved; loss scale 0"),
        ({"last_moved": 40, "val_loss": None}, "weights last moved in step 40; validation not finite"),
        ({"nonfinite_step": 7, "loss_scale": 65536.0}, "weights not finite from step 7 on"),
        ({"moved_share": 0.3}, "30% of the weights moved in the last tenth of the run, 90% in the reference"),
        ({"largest_weight": 2e4}, "largest weight 2e+04, 1 in the reference"),
        ({"nonfinite_buffers": ["a", "b", "c"]}, "c not finite, and 2 more buffers"),
        ({"error": "RuntimeError: too small. Use another."}, "RuntimeError: too small"),
    ],
)
def test_symptoms_say_what_is_wrong(changes: dict[str, Any], text: str) -> None:
    assert symptoms(healthy(**changes), healthy()) == text


def test_deeds_are_those_of_the_history() -> None:
    history = [
        Decision(4, "precision", "a", "fp16", "fp32", "fp32", "applied", "guard: its output left the range"),
        Decision(4, "precision", "b", "fp16", "fp32", "fp32", "applied", "guard: its output left the range"),
        Decision(9, "precision", "a", "fp32", "bf16", "bf16", "applied", "policy 'rule'"),
        Decision(9, "precision", "c", "fp16", "bf16", "fp16", "refused", "held"),
        Decision(15, "loss_scale", None, 4.0, 2.0, 2.0, "applied", "guard: a gradient was not finite"),
        Decision(19, "clip", None, math.inf, 1.0, 1.0, "applied", "from now on"),
    ]
    found = healthy(answers=answers(history), undone_steps=3)
    assert json.loads(json.dumps(found["answers"])) == found["answers"]
    assert deeds(found) == "a, b to fp32 in step 5; clips from step 20 on; lowered the loss scale 1x; undid 3 steps"
    assert deeds(healthy()) == "nothing"


# ---- one run ----


def test_large_logits_stop_static_fp16_and_cost_the_callback_one_step() -> None:
    recipe = short("large-logits", 30)
    static, steered, reference = (run(recipe, arm, 0) for arm in (STATIC, STEERED, FP32))
    assert (static["last_moved"], static["steps_lost"], static["val_loss"]) == (0, 30, None)
    assert static["loss_scale"] == 65536.0 / 2**30
    assert (steered["steps_lost"], steered["skipped_steps"]) == (1, 1)
    assert failure(static, reference["final_loss"], 1.5) == "the Trainer's validation is not finite"
    assert failure(steered, reference["final_loss"], 1.5) is None
    assert deeds(steered).startswith("products to fp32 in step 2")
    assert json.loads(json.dumps(steered)) == steered


def test_runs_with_the_same_seed_share_data_and_first_weights() -> None:
    recipe = short("tiny-loss", 4)
    first, again, other = run(recipe, FP32, 1), run(recipe, FP32, 1), run(recipe, FP32, 2)
    assert first | {"cpu_seconds": 0} == again | {"cpu_seconds": 0}
    assert first["final_loss"] != other["final_loss"]


@pytest.mark.parametrize("name", ["large-logits", "mask-constant", "exploding-rnn"])
def test_where_the_forward_leaves_fp16_the_default_validation_is_finite(name: str) -> None:
    recipe = short(name, 10)
    assert run(recipe, recipe.arms()["autoprec"], 0)["val_loss"] is not None
    assert run(recipe, recipe.arms()["static"], 0)["val_loss"] is None


def test_an_arm_may_have_a_threshold_of_its_own() -> None:
    recipe = short("spike-batch", 42)
    assert run(recipe, recipe.arms()["bf16-mixed + clips at 1"], 0)["largest_weight"] < 10.0


def test_clean_data_are_those_without_the_spike() -> None:
    recipe = short("spike-batch", 42)
    spiked, clean = run(recipe, FP32, 0), run(recipe, recipe.arms()["reference"], 0)
    assert spiked["largest_weight"] > 100 * clean["largest_weight"]


@pytest.mark.parametrize("name", RECIPES)
def test_material_is_that_of_the_seed(name: str) -> None:
    material = RECIPES[name].material
    (first, held_out), (again, _), (other, same) = material(32, 0), material(32, 0), material(32, 1)
    assert len(first) == 32
    assert all(map(torch.equal, first.tensors, again.tensors))
    assert not torch.equal(first.tensors[0], other.tensors[0])
    assert torch.equal(held_out[0], same[0])


class Stubborn(Perceptron):
    def loss(self, batch: Any) -> Tensor:
        raise RuntimeError("value cannot be converted. Really.")


def test_a_step_that_raises_is_a_result() -> None:
    recipe = short("tiny-loss", 4, module=partial(Stubborn, make_optimizer=partial(SGD, lr=0.1)))
    found = run(recipe, FP32, 0)
    assert found["error"] == "RuntimeError: value cannot be converted. Really."
    assert (found["steps_lost"], found["val_loss"]) == (4, None)


@pytest.mark.parametrize(("rate", "lost"), [(0.1, 0), (0.0, 20)])
def test_a_step_is_lost_where_no_weight_moves(rate: float, lost: int) -> None:
    recipe = short("tiny-loss", 20, module=partial(Perceptron, make_optimizer=partial(SGD, lr=rate)))
    found = run(recipe, FP32, 0)
    assert (found["steps_lost"], found["last_moved"]) == (lost, 20 - lost)
    assert (found["moved_share"] > 0.5) is not bool(lost)


class Explodes(Perceptron):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (math.nan if self.global_step == 2 else 1.0)


def test_the_step_that_ruins_the_weights_is_known() -> None:
    recipe = short("tiny-loss", 6, module=partial(Explodes, make_optimizer=partial(SGD, lr=0.1)))
    found = run(recipe, FP32, 0)
    assert (found["nonfinite_step"], found["steps_lost"], found["final_loss"]) == (3, 4, None)
    assert "net.1.weight" in found["nonfinite_weights"]


# ---- the whole thing ----


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    recipes = {name: short(name, 4) for name in ("large-logits", "spike-batch")}
    monkeypatch.setattr(divergence, "RECIPES", recipes)
    return lambda *arguments: divergence.main(["--folder", str(tmp_path), *arguments])


def test_a_study_leaves_a_file_for_each_run_and_goes_on_where_it_stopped(
    study: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, int]] = []

    def counted(recipe: Recipe, arm: Arm, seed: int) -> dict[str, Any]:
        made.append((recipe.name, seed))
        return run(recipe, arm, seed)

    monkeypatch.setattr(divergence, "run", counted)
    study("--quick")
    first = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"divergence: recipes=2 static_survived=\d autoprec_survived=\d", first)
    assert made == [("large-logits", 10)] * 4 + [("spike-batch", 10)] * 5
    made.clear()
    study("--quick")
    assert made == []
    assert capsys.readouterr().out.splitlines()[-1] == first
    (damaged,) = tmp_path.glob("divergence-spike-batch-static-*.json")
    damaged.write_text("{")
    study("--quick", "--recipe", "spike-batch")
    assert made == [("spike-batch", 10)]
    study("--seeds", "2", "--recipe", "large-logits")
    assert made[1:] == [("large-logits", 11)] * 4
    summary = json.loads((tmp_path / "divergence.json").read_text())
    assert {"command", "date", "versions", "machine", "source"} <= summary.keys()
    assert summary["seeds"] == [10, 11]


@pytest.mark.parametrize("change", ["steps", "options", "source", "seed", "arm"])
def test_a_run_depends_on_everything_that_its_file_is_named_after(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = RECIPES["gan"], Path("results")
    before = divergence.run_path(folder, recipe, "static", 10)
    assert divergence.run_path(folder, replace(recipe, factor=9.0), "static", 10) == before
    if change == "source":
        monkeypatch.setattr(divergence, "source_digest", lambda: "another")
    changes: dict[str, dict[str, Any]] = {"steps": {"steps": 5}, "options": {"options": {"gradient_clip_val": 5.0}}}
    arm, seed = "autoprec" if change == "arm" else "static", 11 if change == "seed" else 10
    assert divergence.run_path(folder, replace(recipe, **changes.get(change, {})), arm, seed) != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "at least one run"),
        (["--quick", "--seeds", "3"], "choose one of"),
        (["--write-docs", "--quick"], "--write-docs is for whole studies"),
        (["--write-docs", "--recipe", "gan"], "--write-docs is for whole studies"),
        (["--recipe", "mnist"], "invalid choice"),
    ],
)
def test_refusals_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        divergence.parse(arguments)
    assert message in capsys.readouterr().err


def test_the_page_says_what_the_last_study_found() -> None:
    study = json.loads(divergence.SUMMARY.read_text())
    assert list(study["recipes"]) == list(RECIPES)
    for name, found in study["recipes"].items():
        assert (found["steps"], found["factor"]) == (RECIPES[name].steps, RECIPES[name].factor)
        assert all(arm["seeds"] >= divergence.SEEDS for arm in found["arms"].values())
        also = {name: arm["survived"] == arm["seeds"] for name, arm in found["arms"].items()}
        assert also.get("bf16-mixed", True)
        assert also.get("bf16-mixed + clips at 1", True)
        assert not also.get("32-true", False)
    block = f"{divergence.BEGIN}\n{page_block(study)}\n{divergence.END}"
    assert block in divergence.PAGE.read_text()
