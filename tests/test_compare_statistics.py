"""Numbers that a comparison makes of its runs: ratios, intervals, equivalence, times to a target.

Time budget: 15 s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec import paired
from autoprec.compare.records import Evaluation, Run, Step
from autoprec.compare.statistics import (
    Estimate,
    Rounds,
    censored_median,
    final_value,
    interquartile_mean,
    is_diverged,
    relation,
    round_ratios,
    seconds_to_target,
    step_ratio,
    whole_ratio,
)
from autoprec.paired import Spread, bootstrap_mean
from tests.comparisons import arm_runs

ROUNDS = Rounds(warmup_steps=10, turn_steps=5)


def run_of(times: list[float], arm: str = "a", seed: int = 0) -> Run:
    steps = (Step(index=index, step_ms=step_ms, loss=1.0) for index, step_ms in enumerate(times))
    return Run(arm=arm, seed=seed, steps=tuple(steps))


def evaluated(*points: tuple[float, float]) -> Run:
    return Run(
        arm="a",
        seed=0,
        evaluations=tuple(
            Evaluation(step=step, elapsed_s=elapsed_s, metrics={"loss": loss})
            for step, (elapsed_s, loss) in enumerate(points)
        ),
    )


# ---- intervals ----


def share_covered(
    draw: Callable[[np.random.Generator, int], np.ndarray], mean: float, count: int, trials: int
) -> float:
    generator = np.random.default_rng(3)
    found = [bootstrap_mean(draw(generator, count).tolist()) for _ in range(trials)]
    return sum(each.low <= mean <= each.high for each in found) / trials


@pytest.mark.parametrize("count", [3, 5, 10])
@pytest.mark.parametrize(
    ("draw", "mean", "promised"),
    [
        (lambda generator, count: generator.normal(7.0, 2.0, count), 7.0, 0.95),
        (lambda generator, count: generator.uniform(0.0, 1.0, count), 0.5, 0.92),  # a t interval of 3 covers that
        (lambda generator, count: generator.exponential(1.0, count), 1.0, 0.86),  # no interval of few is better here
    ],
    ids=["normal", "uniform", "skewed"],
)
def test_intervals_cover_what_they_promise(
    count: int,
    draw: Callable[[np.random.Generator, int], np.ndarray],
    mean: float,
    promised: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer hits than this happen once in a thousand (normal approximation of the binomial) if the promise is true."""
    monkeypatch.setattr(paired, "RESAMPLES", 1000)
    trials = 400
    bound = promised - 3.1 * math.sqrt(promised * (1 - promised) / trials)
    assert share_covered(draw, mean, count, trials) >= bound


def test_an_interval_of_three_leaves_their_range() -> None:
    """Three values hold the mean between them 3 times in 4, so an interval within their range would be a false one."""
    found = bootstrap_mean([1.0, 2.0, 3.0])
    assert found.low < 1.0
    assert found.high > 3.0


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-100, 100), min_size=3, max_size=12), st.floats(-50, 50), st.sampled_from([0.5, 0.8, 0.95]))
def test_intervals_move_with_their_values_and_grow_with_the_level(
    values: list[float], shift: float, confidence: float
) -> None:
    found = bootstrap_mean(values, confidence)
    moved = bootstrap_mean([value + shift for value in values], confidence)
    wider = bootstrap_mean(values, 0.99)
    assert found.low <= found.mean + 1e-9
    assert found.mean <= found.high + 1e-9
    assert moved == pytest.approx([end + shift for end in found], abs=1e-6)
    assert wider.low <= found.low + 1e-9
    assert wider.high >= found.high - 1e-9


def test_there_is_no_interval_below_three_seeds_or_beside_a_number_that_is_not_finite() -> None:
    assert Estimate.of_mean([], 0.95).seeds == 0
    assert Estimate.of_mean([1.0, 3.0], 0.95) == Estimate(2.0, None, None, 2)
    assert Estimate.of_mean([1.0, 2.0, 3.0], 0.95).is_sure
    broken = Estimate.of_mean([1.0, math.inf, 3.0], 0.95)
    assert not broken.is_sure
    assert broken.holds(-1e9)


# ---- times ----


def test_a_known_ratio_comes_out() -> None:
    runs = [*arm_runs("fast", 5.0, 1.0), *arm_runs("slow", 10.0, 1.0)]
    found = step_ratio(runs, "fast", "slow", ROUNDS, 0.95)
    assert found.value == pytest.approx(0.5, rel=0.01)
    assert found.low is not None
    assert found.high is not None
    assert 0.49 < found.low < found.value < found.high < 0.51
    assert whole_ratio(runs, "slow", "fast", 0.95).value == pytest.approx(2.0, rel=0.01)


def test_a_slow_spell_that_hits_both_does_not_count() -> None:
    spell = [10.0 if 20 <= index < 40 else 1.0 for index in range(60)]
    found = round_ratios(run_of([2 * ms for ms in spell]), run_of(spell), ROUNDS)
    assert found == pytest.approx([2.0] * 10)


def test_one_slow_step_of_a_round_does_not_count() -> None:
    times = [1.0] * 60
    times[25] = 100.0
    assert round_ratios(run_of(times), run_of([1.0] * 60), ROUNDS) == pytest.approx([1.0] * 10)


def test_the_warm_up_counts_in_whole_runs_only() -> None:
    late = [run_of([100.0] * 10 + [1.0] * 50, "late", seed) for seed in range(3)]
    plain = [run_of([1.0] * 60, "plain", seed) for seed in range(3)]
    assert step_ratio([*late, *plain], "late", "plain", ROUNDS, 0.95).value == pytest.approx(1.0)
    assert whole_ratio([*late, *plain], "late", "plain", 0.95).value == pytest.approx(1050 / 60)


def test_steps_that_only_one_run_has_are_left_out() -> None:
    short, long = run_of([2.0] * 30), run_of([1.0] * 30 + [9.0] * 30)
    assert round_ratios(short, long, ROUNDS) == pytest.approx([2.0] * 5)
    assert round_ratios(long, short, ROUNDS) == pytest.approx([0.5] * 5)


def test_too_few_steps_give_no_ratio() -> None:
    runs = [run_of([1.0] * 12, arm, seed) for arm in "ab" for seed in range(3)]
    found = step_ratio(runs, "a", "b", ROUNDS, 0.95)
    assert found.seeds == 0
    assert math.isnan(found.value)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.1, 100.0), min_size=15, max_size=40), st.floats(0.1, 10.0))
def test_the_ratio_of_scaled_times_is_the_scale_and_turns_over_with_the_arms(times: list[float], scale: float) -> None:
    run, other = run_of([scale * ms for ms in times]), run_of(times)
    assert round_ratios(run, other, ROUNDS) == pytest.approx([scale] * len(round_ratios(run, other, ROUNDS)))
    assert round_ratios(other, run, ROUNDS) == pytest.approx([1 / scale] * len(round_ratios(run, other, ROUNDS)))


def test_rounds_follow_the_settings_and_fit_short_runs() -> None:
    runs = [run_of([1.0] * 20)]
    assert Rounds.of({"warmup_steps": 3, "turn_steps": 7}, runs) == Rounds(3, 7)
    assert Rounds.of({}, runs).warmup_steps == 5
    assert Rounds.of({}, [run_of([1.0] * 400)]).warmup_steps == 10
    assert Rounds.of({}, []).turn_steps >= 1


# ---- metrics ----


@pytest.mark.parametrize(
    ("low", "high", "mode", "expected"),
    [
        (-0.05, 0.05, "min", "equivalent"),
        (0.01, 0.05, "min", "equivalent"),
        (0.01, 0.2, "min", "worse"),
        (-0.2, -0.01, "min", "better"),
        (-0.2, 0.05, "min", "unknown"),
        (0.01, 0.2, "max", "better"),
        (-0.2, -0.01, "max", "worse"),
        (-0.05, 0.05, "max", "equivalent"),
    ],
)
def test_relations(low: float, high: float, mode: str, expected: str) -> None:
    assert relation(Estimate((low + high) / 2, low, high, 5), 0.1, mode) == expected


def test_nothing_is_shown_without_an_interval() -> None:
    assert relation(Estimate(0.0, None, None, 2), 0.1, "min") == "unknown"


def test_equivalence_is_claimed_falsely_no_more_often_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a true difference of exactly the margin, one tail of the interval is the rate of false claims: 2.5%."""
    monkeypatch.setattr(paired, "RESAMPLES", 1000)
    generator, trials = np.random.default_rng(5), 400
    claims = sum(
        relation(Estimate.of_mean(generator.normal(1.0, 0.3, 5).tolist(), 0.95), 1.0, "min") == "equivalent"
        for _ in range(trials)
    )
    assert claims / trials <= 0.025 + 3.1 * math.sqrt(0.025 * 0.975 / trials)


def test_the_interquartile_mean_is_that_of_the_middle_half() -> None:
    assert interquartile_mean([1.0, 2.0, 3.0, 4.0, 1000.0, -1000.0, 2.5, 3.5]) == pytest.approx(2.75)
    assert interquartile_mean([1.0, 2.0, 9.0]) == pytest.approx(4.0)
    assert math.isnan(interquartile_mean([]))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_the_interquartile_mean_lies_among_the_values_in_any_order(values: list[float]) -> None:
    found = interquartile_mean(values)
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6
    assert interquartile_mean(values[::-1]) == found


@pytest.mark.parametrize(
    ("final", "losses", "expected"),
    [
        (1.0, [1.0, math.nan], False),  # a scaler skipped the last step, and the metric was computed after it
        (math.nan, [1.0, 1.0], True),
        (math.inf, [], True),
        (None, [1.0, math.nan], True),
        (None, [math.nan, 1.0], False),
        (None, [], False),
    ],
)
def test_divergence_is_what_a_run_ends_in(final: float | None, losses: list[float], expected: bool) -> None:
    steps = tuple(Step(index=index, step_ms=1.0, loss=loss) for index, loss in enumerate(losses))
    assert is_diverged(Run(arm="a", seed=0, steps=steps), final) is expected


def test_the_metric_at_the_end_is_the_one_that_is_asked_for() -> None:
    run = dataclasses.replace(evaluated((0.0, 3.0), (1.0, 2.0)), final_metric=0.5)
    assert final_value(run, "accuracy", "accuracy") == 0.5
    assert final_value(run, "loss", "accuracy") == 2.0
    assert final_value(run, "recall", "accuracy") is None
    assert final_value(run, "recall") == 0.5


# ---- time to a target ----


def test_the_target_is_reached_at_the_first_evaluation_that_is_as_good() -> None:
    run = evaluated((1.0, 3.0), (2.0, math.nan), (3.0, 1.0), (4.0, 2.0), (5.0, 0.5))
    assert seconds_to_target(run, "loss", "min", 1.0) == 3.0
    assert seconds_to_target(run, "loss", "max", 3.0) == 1.0
    assert seconds_to_target(run, "loss", "min", 0.1) is None
    assert seconds_to_target(run, "accuracy", "min", 1.0) is None


def test_a_run_that_does_not_reach_the_target_is_later_than_every_other() -> None:
    assert censored_median([1.0, None, 3.0]) == 3.0
    assert censored_median([1.0, None, None]) is None
    assert censored_median([1.0, None]) is None
    assert censored_median([]) is None


def test_a_spread_has_the_quartiles() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
