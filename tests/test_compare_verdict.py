"""Every verdict of a comparison, from made-up runs in which the right answer is known.

Time budget: 20 s.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.compare.evidence import Evidence
from autoprec.compare.records import Comparison, Run
from autoprec.compare.statistics import Estimate
from autoprec.compare.verdict import Verdict, judge, speed_relation, summary_line, to_json
from tests.comparisons import arm_runs, comparison


def judged(compared: Comparison, **options: Any) -> Verdict:
    return judge(compared, **{"metric": "val_loss", "mode": "min", "margin": 0.02, **options})


def static(**fields: Any) -> tuple[Run, ...]:
    """32-true, and bf16-mixed in 6 ms a step."""
    return (*arm_runs("32-true", 10.0, 1.0, **fields), *arm_runs("bf16-mixed", 6.0, 1.0, **fields))


def all_reasons(verdict: Verdict) -> str:
    return " ".join(verdict.reasons)


# ---- the verdicts ----


@pytest.mark.parametrize(
    ("step_ms", "final", "verdict", "speed", "loss"),
    [
        (5.0, 1.0, "use autoprec", "faster", "equivalent"),
        (5.0, 0.9, "use autoprec", "faster", "better"),
        (6.0, 0.9, "use autoprec", "tie", "better"),
        (6.0, 1.0, "tie", "tie", "equivalent"),
        (6.08, 1.0, "tie", "tie", "equivalent"),  # surely slower, by less than the noise
        (8.0, 1.0, "keep bf16-mixed", "slower", "equivalent"),
        (8.0, 1.1, "keep bf16-mixed", "slower", "worse"),
        (5.0, 1.1, "keep bf16-mixed", "faster", "worse"),
        (6.0, 1.1, "keep bf16-mixed", "tie", "worse"),
    ],
)
def test_verdicts(step_ms: float, final: float, verdict: str, speed: str, loss: str) -> None:
    found = judged(comparison(static(), arm_runs("autoprec", step_ms, final)))
    assert (found.verdict, found.speed, found.loss) == (verdict, speed, loss)
    assert (found.best_static, found.reference, found.candidate) == ("bf16-mixed", "32-true", "autoprec")
    assert found.time_ratio.value == pytest.approx(step_ms / 6, rel=0.01)
    assert found.difference.value == pytest.approx(final - 1, abs=0.01)
    assert f"{found.time_ratio.value:.3f} times" in found.headline
    assert found.headline.lower().startswith(verdict)


def test_higher_is_better_turns_the_metric_over() -> None:
    better = comparison(static(), arm_runs("autoprec", 6.0, 1.1))
    assert judged(better, mode="max").verdict == "use autoprec"
    assert judged(better, mode="min").verdict == "keep bf16-mixed"


@pytest.mark.parametrize("seeds", [1, 2])
def test_too_few_seeds_decide_nothing(seeds: int) -> None:
    found = judged(comparison(static(seeds=seeds), arm_runs("autoprec", 3.0, 1.0, seeds=seeds)))
    assert found.verdict == "undecided: needs 3 seeds"
    assert found.time_ratio.value == pytest.approx(0.5, rel=0.02)
    assert not found.time_ratio.is_sure
    assert "no interval can be made" in found.reasons[0]


def test_losses_that_vary_more_than_the_margin_decide_nothing() -> None:
    found = judged(comparison(static(), arm_runs("autoprec", 5.0, 1.0, noise=0.3)))
    assert found.verdict == "undecided: val_loss varies too much between seeds for the margin"
    assert found.loss == "unknown"
    assert "not shown to be equivalent" in found.headline


def test_slower_is_enough_to_keep_what_there_is_where_nothing_better_is_shown() -> None:
    found = judged(comparison(static(), arm_runs("autoprec", 8.0, 1.0, noise=0.3)))
    assert (found.verdict, found.loss) == ("keep bf16-mixed", "unknown")


@pytest.mark.parametrize(
    ("step_ms", "verdict"),
    [
        (6.6, "use autoprec"),
        (30.0, "keep bf16-mixed"),
    ],
)
def test_slower_with_a_better_metric_is_decided_by_the_time_to_the_target(step_ms: float, verdict: str) -> None:
    found = judged(comparison(static(), arm_runs("autoprec", step_ms, 0.5), target=1.4))
    assert (found.verdict, found.speed, found.loss) == (verdict, "slower", "better")
    assert "until val_loss reaches 1.4 (" in found.reasons[0]


def test_slower_with_a_better_metric_is_undecided_where_the_target_is_not_reached() -> None:
    found = judged(comparison(static(), arm_runs("autoprec", 8.0, 0.5), target=0.7))
    assert found.verdict == "undecided: slower, but the metric is better"
    assert "not every run reached it" in all_reasons(found)


# ---- what is left out ----


def test_autoprec_that_diverges_is_not_used() -> None:
    ours = arm_runs("autoprec", 3.0, 1.0)
    found = judged(comparison(static(), (*ours[:-1], replace(ours[-1], final_metric=math.nan))))
    assert found.verdict == "keep bf16-mixed"
    assert found.headline == "Keep bf16-mixed: autoprec diverged with 1 of 4 seeds."
    assert (found.candidate, found.speed, found.loss) == (None, "unknown", "unknown")


def test_autoprec_that_fails_is_not_used_and_says_why() -> None:
    ours = arm_runs("autoprec", 3.0, 1.0, error="Traceback ...\nRuntimeError: out of luck")
    found = judged(comparison(static(), ours))
    assert found.verdict == "keep bf16-mixed"
    assert "autoprec failed with 4 of 4 seeds (RuntimeError: out of luck)." in found.reasons


def test_a_static_arm_that_diverges_is_not_the_best() -> None:
    broken = arm_runs("bf16-mixed", 2.0, math.inf)
    found = judged(comparison(arm_runs("32-true", 10.0, 1.0), broken, arm_runs("autoprec", 5.0, 1.0)))
    assert (found.best_static, found.verdict) == ("32-true", "use autoprec")
    assert "Left out: bf16-mixed diverged with 4 of 4 seeds." in found.reasons


def test_losses_that_end_in_nan_are_a_divergence_where_no_metric_was_computed() -> None:
    broken = tuple(
        replace(run, steps=tuple(replace(step, loss=math.nan) for step in run.steps), evaluations=(), final_metric=None)
        for run in arm_runs("bf16-mixed", 2.0, 1.0)
    )
    found = judged(comparison(arm_runs("32-true", 10.0, 1.0), broken, arm_runs("autoprec", 5.0, 1.0)))
    assert found.best_static == "32-true"
    assert "bf16-mixed diverged" in all_reasons(found)


def test_a_run_that_was_ended_because_it_diverged_has_diverged() -> None:
    broken = [arm_runs(arm, 2.0, None, error="diverged: the training loss is not finite") for arm in ("32-true", "x")]
    found = judged(comparison(*broken, arm_runs("autoprec", 5.0, 1.0)))
    assert found.headline == "Use autoprec: every static arm diverged, autoprec did not."
    assert "Left out: x diverged with 4 of 4 seeds." in found.reasons


def test_losses_that_were_nan_on_the_way_are_none() -> None:
    runs = arm_runs("bf16-mixed", 6.0, 1.0)
    skipped = tuple(
        replace(run, steps=(replace(run.steps[0], loss=math.nan), *run.steps[1:]), skipped_steps=1) for run in runs
    )
    found = judged(comparison(arm_runs("32-true", 10.0, 1.0), skipped, arm_runs("autoprec", 5.0, 1.0)))
    assert found.best_static == "bf16-mixed"


def test_a_fast_static_arm_with_a_worse_metric_is_not_the_best() -> None:
    found = judged(comparison(static(), arm_runs("bf16-true", 3.0, 1.2), arm_runs("autoprec", 5.0, 1.0)))
    assert (found.best_static, found.verdict) == ("bf16-mixed", "use autoprec")
    assert "Not the best static: bf16-true, whose val_loss is worse than 32-true's by 0.2" in all_reasons(found)


def test_the_margin_is_counted_from_the_baseline() -> None:
    runs = comparison(static(), arm_runs("bf16-true", 3.0, 1.2), arm_runs("autoprec", 5.0, 1.0))
    found = judged(runs, baseline="bf16-true")
    assert (found.reference, found.best_static) == ("bf16-true", "bf16-true")


def test_without_full_precision_the_best_static_mean_is_the_reference() -> None:
    found = judged(comparison(arm_runs("bf16-true", 3.0, 1.2), static()[4:], arm_runs("autoprec", 5.0, 1.0)))
    assert (found.reference, found.best_static) == ("bf16-mixed", "bf16-mixed")


def test_autoprec_equivalent_to_an_arm_at_the_edge_of_the_margin_is_not_equivalent() -> None:
    """Two margins that follow each other must not add up."""
    runs = comparison(
        arm_runs("32-true", 10.0, 1.0, noise=0), arm_runs("bf16-mixed", 6.0, 1.018, noise=0),
        arm_runs("autoprec", 5.0, 1.03, noise=0),
    )  # fmt: skip
    found = judged(runs)
    assert found.best_static == "bf16-mixed"
    assert (found.loss, found.verdict) == ("worse", "keep bf16-mixed")
    assert found.reasons[0].endswith("but its mean is worse than 32-true's by more than the margin of 0.02.")


# ---- missing parts ----


def test_every_static_arm_diverged() -> None:
    runs = comparison(arm_runs("32-true", 10.0, math.nan), arm_runs("autoprec", 5.0, 1.0))
    assert judged(runs).headline == "Use autoprec: every static arm diverged, autoprec did not."


FAILED = arm_runs("32-true", 5.0, 1.0, error="no")


@pytest.mark.parametrize(
    ("arms", "verdict"),
    [
        ([static()], "undecided: no arm with autoprec ran"),
        ([arm_runs("autoprec", 5.0, 1.0)], "undecided: no static arm ran"),
        ([FAILED, arm_runs("autoprec", 5.0, 1.0)], "undecided: no static arm is usable"),
        ([FAILED, arm_runs("autoprec", 5.0, math.nan)], "undecided: no arm is usable"),
    ],
)
def test_arms_that_are_not_there(arms: list[tuple[Run, ...]], verdict: str) -> None:
    found = judged(comparison(*arms))
    assert found.verdict == verdict
    assert found.headline.startswith("Undecided, no ")
    assert json.loads(to_json(found))["verdict"] == verdict


def test_a_missing_metric_decides_nothing_where_autoprec_is_faster() -> None:
    found = judged(comparison(static(), arm_runs("autoprec", 5.0, None)))
    assert found.verdict == "undecided: val_loss is missing"
    assert found.target == "32-true's at its end, less the margin"
    other = judged(comparison(static(), arm_runs("autoprec", 5.0, 1.0), metric="val_loss"), metric="recall")
    assert other.verdict == "undecided: recall is missing"


def test_runs_without_steps_decide_nothing() -> None:
    runs = tuple(replace(run, steps=()) for run in (*static(), *arm_runs("autoprec", 5.0, 1.0)))
    assert judged(comparison(runs)).verdict == "undecided: no common seed with enough steps"


def test_a_training_that_sets_its_own_seed_has_one_seed() -> None:
    """Equal runs differ by nothing from each other, which must not pass for certainty."""
    arms = [arm_runs(arm, ms, 1.0) for arm, ms in (("32-true", 10.0), ("bf16-mixed", 6.0), ("autoprec", 5.0))]
    fixed = [tuple(replace(runs[0], seed=run.seed) for run in runs) for runs in arms]
    found = judged(comparison(*fixed))
    assert (found.verdict, found.difference.seeds) == ("undecided: needs 3 seeds", 1)


def test_seeds_that_only_one_arm_has_do_not_count() -> None:
    found = judged(comparison(static(seeds=4), arm_runs("autoprec", 5.0, 1.0, seeds=3)))
    assert (found.verdict, found.time_ratio.seeds, found.difference.seeds) == ("use autoprec", 3, 3)


# ---- times and memory ----


def test_unequal_step_counts_are_judged_by_whole_runs() -> None:
    """Half as many steps of 1.5 times the length, as a larger batch gives."""
    found = judged(comparison(static(), arm_runs("autoprec", 9.0, 1.0, steps=30)))
    assert (found.verdict, found.time_basis) == ("use autoprec", "whole run")
    assert found.time_ratio.value == pytest.approx(0.75, rel=0.01)
    assert "whole runs are compared, not single steps" in all_reasons(found)


def test_less_memory_does_not_make_up_for_time_but_is_said() -> None:
    small, large = {"peak_bytes": 2**29}, {"peak_bytes": 2**30}
    runs = comparison(static(**large), arm_runs("autoprec", 8.0, 1.0, **small))
    found = judged(runs)
    assert found.verdict == "keep bf16-mixed"
    assert "Peak memory of autoprec is 512 MiB, less than the 1 GiB of bf16-mixed." in found.reasons


def test_a_wide_tie_says_how_wide_it_is() -> None:
    ours = tuple(replace(run, steps=arm_runs("x", ms, 1.0)[0].steps) for ms, run in
                 zip((5.0, 7.0, 5.5, 6.8), arm_runs("autoprec", 6.0, 1.0), strict=True))  # fmt: skip
    found = judged(comparison(static(), ours))
    assert found.speed == "tie"
    assert re.search(r"That leaves room for \d+%", all_reasons(found))


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Estimate(0.5, 0.4, 0.6, 5), "faster"),
        (Estimate(1.5, 1.4, 1.6, 5), "slower"),
        (Estimate(0.5, 0.4, 1.0, 5), "tie"),
        (Estimate(0.985, 0.98, 0.99, 5), "tie"),
        (Estimate(1.015, 1.01, 1.02, 5), "tie"),
        (Estimate(0.5, None, None, 2), "unknown"),
        (Estimate(math.nan, None, None, 0), "unknown"),
    ],
)
def test_speed_relations(ratio: Estimate, expected: str) -> None:
    assert speed_relation(ratio) == expected


@pytest.mark.parametrize(
    ("first_ms", "verdict"),
    [
        (35.0, "use autoprec"),
        (665.0, "undecided: faster by the step, slower as a whole run of this length"),
    ],
)
def test_first_steps_that_cost_more_than_the_others_win(first_ms: float, verdict: str) -> None:
    """60 steps of 6 ms against 59 of 5 ms and a first one: 600 ms more are made up for after 600 more steps."""
    ours = tuple(
        replace(run, steps=(replace(run.steps[0], step_ms=first_ms), *run.steps[1:]))
        for run in arm_runs("autoprec", 5.0, 1.0)
    )
    found = judged(comparison(static(), ours))
    assert found.verdict == verdict
    assert found.speed == "faster"
    after = re.search(r"in runs of 60 steps; at this rate it is ahead after about (\d+) steps", all_reasons(found))
    assert (after is None) is (verdict == "use autoprec")
    assert after is None or float(after.group(1)) == pytest.approx(660, rel=0.1)


@settings(deadline=None, max_examples=25)
@given(
    step_ms=st.floats(4.0, 9.0),
    final=st.floats(0.9, 1.1) | st.just(math.nan),
    noise=st.sampled_from([0.0, 0.01, 0.1]),
    seeds=st.integers(1, 4),
    margin=st.sampled_from([0.005, 0.05]),
)
def test_nothing_is_claimed_that_no_interval_shows(
    step_ms: float, final: float, noise: float, seeds: int, margin: float
) -> None:
    arms = (static(seeds=seeds), arm_runs("autoprec", step_ms, final, noise=noise, seeds=seeds))
    found = judged(comparison(*arms), margin=margin)
    ratio, difference = found.time_ratio, found.difference
    if found.candidate is None:
        assert found.verdict == f"keep {found.best_static}"
        return
    if ratio.low is None or ratio.high is None or difference.low is None or difference.high is None:
        assert found.verdict == "undecided: needs 3 seeds"
        return
    is_inside, is_better = -margin < difference.low <= difference.high < margin, difference.high < 0
    is_faster, is_slower = ratio.high < 1 and ratio.value <= 0.98, ratio.low > 1 and ratio.value >= 1.02
    if found.verdict.startswith("use"):
        assert is_inside or is_better
        assert is_faster or is_better
    elif found.verdict.startswith("keep"):
        assert is_slower or difference.low > 0
    elif found.verdict == "tie":
        assert is_inside
        assert not is_faster
        assert not is_slower


# ---- several arms with autoprec, several instruction sets ----


def test_the_fastest_of_several_controllers_is_judged_more_strictly() -> None:
    runs = (static(), arm_runs("autoprec:rule", 5.0, 1.0), arm_runs("autoprec:table", 4.0, 1.0))
    found = judged(comparison(*runs))
    alone = judged(comparison(runs[0], runs[2]))
    assert (found.candidate, found.verdict) == ("autoprec:table", "use autoprec:table")
    assert "97.5%" in found.reasons[0]
    wide, narrow = (v.difference.high - v.difference.low for v in (found, alone))  # type: ignore[operator]
    assert wide > narrow


def test_a_faster_controller_outside_the_margin_is_not_the_one_to_judge() -> None:
    runs = (static(), arm_runs("autoprec:rule", 5.0, 1.0), arm_runs("autoprec:table", 4.0, 1.5))
    assert judged(comparison(*runs)).verdict == "use autoprec:rule"


def test_another_instruction_set_is_a_check_of_consistency_and_no_choice() -> None:
    runs = (static(), arm_runs("bf16-mixed@avx2", 1.0, 1.001), arm_runs("autoprec", 5.0, 1.0))
    found = judged(comparison(*runs))
    assert (found.best_static, found.verdict) == ("bf16-mixed", "use autoprec")
    figures = found.figures("bf16-mixed@avx2")
    assert figures is not None
    assert figures.against == "bf16-mixed"
    assert "Consistency: bf16-mixed under avx2" in all_reasons(found)


# ---- what comes out ----


def test_figures_of_an_arm() -> None:
    measured = {"energy_j": 2.0, "energy_source": "rapl", "peak_bytes": 10, "fidelity": {"kl": 0.5}}
    fields: dict[str, Any] = {"skipped_steps": 2, "formats": {"a": "bf16", "b": "fp32", "c": "bf16"}, **measured}
    found = judged(comparison(static(), arm_runs("autoprec", 5.0, 1.0, **fields), flops_per_step=1e12))
    ours, best = found.figures("autoprec"), found.figures("bf16-mixed")
    assert ours is not None
    assert best is not None
    assert found.figures("nobody") is None
    assert (ours.skipped_steps, ours.formats, ours.fidelity) == (8, {"bf16": 2, "fp32": 1}, {"kl": 0.5})
    assert (ours.peak_bytes, ours.energy_j, ours.energy_source) == (10, 2.0, "rapl")
    assert ours.tops_per_watt == pytest.approx(60 / 2.0)
    assert ours.relation == "equivalent"
    assert (best.time_ratio.value, best.tops_per_watt, best.peak_bytes) == (1.0, None, None)
    assert (ours.target_reached, ours.target_seeds) == (4, 4)
    assert ours.target_seconds == pytest.approx(0.3)


def test_the_document_is_json_with_a_version() -> None:
    broken = arm_runs("autoprec", 5.0, math.nan, fidelity={"sqnr_db": -math.inf})
    document = json.loads(to_json(judged(comparison(static(), broken))))
    assert document["version"] == 1
    assert document["arms"][2]["metric"]["value"] is None
    assert float(document["arms"][2]["fidelity"]["sqnr_db"]) == -math.inf
    assert document["arms"][0]["arm"] == "32-true"
    assert document["headline"].startswith("Keep bf16-mixed")


def test_the_line_for_scripts() -> None:
    found = judged(comparison(static(), arm_runs("autoprec", 5.0, 1.0)))
    pattern = (
        r"compare: task=made-up best_static=bf16-mixed step_ratio=0\.8\d\d loss_diff=-?[\d.e-]+ verdict=use autoprec"
    )
    assert re.fullmatch(pattern, summary_line(found))
    empty = judged(comparison(static()))
    assert summary_line(empty).endswith("step_ratio=nan loss_diff=nan verdict=undecided: no arm with autoprec ran")


def test_the_same_runs_in_another_order_give_the_same_answer() -> None:
    arms = (static(), arm_runs("autoprec", 5.0, 1.0))
    found, turned = judged(comparison(*arms)), judged(comparison(tuple(reversed([r for arm in arms for r in arm]))))
    assert turned.verdict == found.verdict
    assert turned.time_ratio.value == pytest.approx(found.time_ratio.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "lowest"}, "Passed `mode='lowest'`"),
        ({"margin": 0.0}, "Passed `margin=0.0`"),
        ({"margin": math.nan}, "Passed `margin=nan`"),
        ({"confidence": 1.0}, "Passed `confidence=1.0`"),
        ({"baseline": "fp64"}, "Passed `baseline='fp64'`. It must be one of the arms that ran: 32-true, bf16-mixed"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        judged(comparison(static()), **options)


def test_a_comparison_without_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="without runs"):
        judged(comparison())


def test_a_baseline_that_failed_gives_way() -> None:
    runs = comparison(arm_runs("32-true", 10.0, 1.0, error="no"), static()[4:], arm_runs("autoprec", 5.0, 1.0))
    evidence = Evidence(runs, "val_loss", "min", 0.02, "32-true", 0.95)
    assert evidence.reference == "bf16-mixed"
    assert judged(runs).verdict == "use autoprec"
