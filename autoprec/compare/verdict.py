"""What to train with, and why: autoprec, a static setting, or no answer because the runs do not show one.

Nothing is claimed that an interval does not show. Where runs are too few or too different to tell, the verdict is
``undecided``, and says what is missing.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from autoprec.compare.arm_figures import EQUIVALENT, UNKNOWN, ArmFigures, figures_of
from autoprec.compare.evidence import Evidence
from autoprec.compare.records import Comparison
from autoprec.compare.statistics import MIN_SEEDS, Estimate, whole_ratio
from autoprec.compare.wording import Words

VERSION = 1
"""Version of the JSON document."""

NOISE = 0.02
"""Ratios of times nearer to 1 than this are no difference."""

FASTER, SLOWER, TIE = "faster", "slower", "tie"
_SPEED = {FASTER: FASTER, SLOWER: SLOWER, TIE: "inside the noise", UNKNOWN: "not certain"}
_LOSS = {EQUIVALENT: EQUIVALENT, "worse": "worse", "better": "better", UNKNOWN: "not shown to be equivalent"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer of a comparison with everything that it rests on.

    Args:
        task: Name of the task.
        metric: What is compared at the end of the runs.
        mode: ``min`` where lower is better, ``max`` where higher is.
        margin: Largest difference of the metric that counts as none.
        confidence: Level of the intervals in ``arms``.
        verdict: ``use <arm>``, ``keep <arm>``, ``tie`` or ``undecided: <why>``.
        reasons: Sentences with the numbers; the first is the one that decided.
        best_static: The fastest static arm whose metric is within the margin of the reference.
        reference: The static arm that the margin is counted from.
        candidate: The steered arm that was judged.
        speed: ``faster``, ``slower``, ``tie`` or ``unknown``: the candidate against the best static arm.
        loss: ``equivalent``, ``worse``, ``better`` or ``unknown``: the same for the metric.
        time_basis: ``step``, or ``whole run`` where runs differ in their number of steps.
        time_ratio: Time of the candidate over that of the best static arm.
        difference: Metric of the candidate less that of the best static arm.
        target: What times to a target are counted to.
        arms: Figures of every arm, in the order in which they ran.
    """

    task: str
    metric: str
    mode: str
    margin: float
    confidence: float
    verdict: str
    reasons: tuple[str, ...]
    best_static: str | None
    reference: str | None
    candidate: str | None
    speed: str
    loss: str
    time_basis: str
    time_ratio: Estimate
    difference: Estimate
    target: str
    arms: tuple[ArmFigures, ...]

    @property
    def headline(self) -> str:
        """The verdict and what decided, in one sentence."""
        word, _, why = self.verdict.partition(": ")
        head = f"{word[:1].upper()}{word[1:]}" + (f", {why}" if why else "")
        if self.candidate is None or self.best_static is None:
            return f"{head}: {self.reasons[0][:1].lower()}{self.reasons[0][1:]}"
        takes = "a step takes" if self.time_basis == "step" else "a whole run takes"
        return (
            f"{head}: with {self.candidate} {takes} {self.time_ratio.value:.3f} times as long as with"
            f" {self.best_static} ({_SPEED[self.speed]}), {self.metric} is {_LOSS[self.loss]}."
        )

    def figures(self, arm: str | None) -> ArmFigures | None:
        """Returns the figures of an arm, ``None`` where there is no such arm.

        Args:
            arm: Its name.
        """
        return next((found for found in self.arms if found.arm == arm), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold, with the version of the layout; NaN becomes ``None``, infinity ``"inf"``."""
        document: dict[str, Any] = _encoded({"version": VERSION, "headline": self.headline, **asdict(self)})
        return document


def to_json(verdict: Verdict) -> str:
    """Returns a verdict as a JSON document.

    Args:
        verdict: The verdict.
    """
    return json.dumps(verdict.to_dict(), indent=1, allow_nan=False)


def summary_line(verdict: Verdict) -> str:
    """Returns the verdict as one line for scripts.

    Args:
        verdict: The verdict. The difference of the metric is that of the judged arm less that of the best static arm.
    """
    return (
        f"compare: task={verdict.task} best_static={verdict.best_static} step_ratio={verdict.time_ratio.value:.3f}"
        f" loss_diff={verdict.difference.value:.4g} verdict={verdict.verdict}"
    )


def judge(
    comparison: Comparison,
    *,
    metric: str,
    mode: str,
    margin: float,
    baseline: str | None = None,
    confidence: float = 0.95,
) -> Verdict:
    """Judges a comparison.

    Args:
        comparison: Its runs.
        metric: What is compared at the end of the runs.
        mode: ``min`` where lower is better, ``max`` where higher is.
        margin: Largest difference of the metric that counts as none, in the metric's own units.
        baseline: The static arm that the margin is counted from; by default ``32-true``, without it the static arm
            with the best mean.
        confidence: Level of the intervals. Where several steered arms ran, the best of them is judged at a level that
            makes up for having chosen it (Bonferroni).

    Raises:
        ValueError: If there are no runs, or an argument is not allowed.
    """
    _check(comparison, mode, margin, confidence)
    evidence = Evidence(comparison, metric, mode, margin, baseline, confidence)
    case = _Case(evidence)
    verdict, reasons = case.decide()
    return Verdict(
        task=comparison.task,
        metric=metric,
        mode=mode,
        margin=margin,
        confidence=confidence,
        verdict=verdict,
        reasons=(*reasons, *case.words.remarks()),
        best_static=evidence.best_static,
        reference=evidence.reference,
        candidate=evidence.candidate,
        speed=case.speed,
        loss=case.loss,
        time_basis="whole run" if evidence.is_whole_run else "step",
        time_ratio=case.ratio,
        difference=case.difference,
        target=evidence.target_text,
        arms=tuple(figures_of(evidence, arm) for arm in evidence.arms),
    )


class _Case:
    """The best static arm and the steered arm to judge, and what is shown about them."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.best, self.ours = evidence.best_static, evidence.candidate
        level = 1.0 - (1.0 - evidence.confidence) / max(1, len(evidence.steered))
        self.ratio = self.whole = self.difference = self.target_ratio = Estimate(math.nan, None, None, 0)
        if self.best is not None and self.ours is not None:
            self.ratio = evidence.time_ratio(self.ours, self.best, level)
            self.whole = whole_ratio(evidence.runs, self.ours, self.best, level)
            self.difference = evidence.difference(self.ours, self.best, level)
            self.target_ratio = evidence.target_ratio(self.ours, self.best, level)
        self.speed = speed_relation(self.ratio)
        self.loss = self._loss()
        self.words = Words(evidence, level)

    def _loss(self) -> str:
        evidence, found = self.evidence, self.evidence.relation(self.difference)
        if self.ours is None or evidence.reference is None or found == "worse" or evidence.is_within_margin(self.ours):
            return found
        # equivalent to an arm that is itself at the edge of the margin is not equivalent to the reference
        to_reference = evidence.relation(evidence.difference(self.ours, evidence.reference))
        return to_reference if to_reference == "worse" else UNKNOWN

    def decide(self) -> tuple[str, list[str]]:
        """Returns the verdict and the reasons for it, the deciding one first."""
        if self.best is None or self.ours is None:
            return self._without_a_pair()
        time, loss = self.words.time(self.speed, self.ratio), self.words.metric(self.loss, self.difference)
        keep, use = f"keep {self.best}", f"use {self.ours}"
        if self.loss == "worse":
            return keep, [loss, time]
        if self.speed == UNKNOWN:
            return self._undecided(self._missing(self.ratio), [time, loss])
        if self.speed == SLOWER:
            return (keep, [time, loss]) if self.loss != "better" else self._slower_but_better(time, loss)
        if self.loss == UNKNOWN:
            return self._undecided(self._why_unknown(), [loss, time])
        if self.speed == FASTER and speed_relation(self.whole) == SLOWER:
            return self._undecided("faster by the step, slower as a whole run of this length", [time, loss])
        if self.speed == FASTER:
            return use, [time, loss]
        return ("tie", [time, loss]) if self.loss == EQUIVALENT else (use, [loss, time])

    def _slower_but_better(self, time: str, loss: str) -> tuple[str, list[str]]:
        sooner = speed_relation(self.target_ratio)
        reasons = [self.words.target(self.target_ratio), loss, time]
        if sooner == FASTER:
            return f"use {self.ours}", reasons
        if sooner == SLOWER:
            return f"keep {self.best}", reasons
        return self._undecided("slower, but the metric is better", [loss, time, *reasons[:1]])

    def _without_a_pair(self) -> tuple[str, list[str]]:
        evidence = self.evidence
        ran = [arm for arm in evidence.arms if arm.startswith("autoprec") and "@" not in arm]
        if self.ours is None and not ran:
            return self._undecided("no arm with autoprec ran", ["No arm with autoprec ran."])
        if self.ours is None and self.best is not None:
            return f"keep {self.best}", [f"{arm} {evidence.problems[arm]}." for arm in ran]
        if self.ours is None:
            return self._undecided("no arm is usable", ["Every arm failed or diverged."])
        static = [arm for arm in evidence.arms if not arm.startswith("autoprec") and "@" not in arm]
        if not static:
            return self._undecided("no static arm ran", ["No static arm ran to compare with."])
        if all(evidence.problems[arm].startswith("diverged") for arm in static):
            return f"use {self.ours}", [f"Every static arm diverged, {self.ours} did not."]
        return self._undecided("no static arm is usable", ["Every static arm failed or diverged."])

    def _undecided(self, why: str, reasons: list[str]) -> tuple[str, list[str]]:
        return f"undecided: {why}", reasons

    def _missing(self, estimate: Estimate) -> str:
        if 0 < estimate.seeds < MIN_SEEDS:
            return f"needs {MIN_SEEDS} seeds"
        return "no common seed with enough steps" if estimate.seeds == 0 else "times are not known"

    def _why_unknown(self) -> str:
        if self.difference.seeds == 0:
            return f"{self.evidence.metric} is missing"
        if self.difference.seeds < MIN_SEEDS:
            return f"needs {MIN_SEEDS} seeds"
        return f"{self.evidence.metric} varies too much between seeds for the margin"


def speed_relation(ratio: Estimate) -> str:
    """Returns ``faster``, ``slower``, ``tie`` or ``unknown``.

    Args:
        ratio: Time of the judged arm over that of the other. Inside the noise, which is an interval that holds 1 or a
            ratio nearer to 1 than ``NOISE``, it is a tie.
    """
    if not ratio.is_sure:
        return UNKNOWN
    if ratio.holds(1.0) or abs(ratio.value - 1.0) < NOISE:
        return TIE
    return FASTER if ratio.value < 1.0 else SLOWER


def _check(comparison: Comparison, mode: str, margin: float, confidence: float) -> None:
    if not comparison.runs:
        raise ValueError("Passed `judge` a comparison without runs. It needs at least one run of two arms.")
    if mode not in ("min", "max"):
        raise ValueError(f"Passed `mode={mode!r}`. It must be 'min' (lower is better) or 'max'.")
    if not (margin > 0 and math.isfinite(margin)):
        raise ValueError(
            f"Passed `margin={margin!r}`. It must be a number above 0: the largest difference of the metric that does"
            " not matter to you."
        )
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"Passed `confidence={confidence!r}`. It must be at least 0.5 and below 1; 0.95 is usual.")


def _encoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _encoded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
