"""The sentences of a verdict, each with the numbers that it rests on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from autoprec.compare.evidence import Evidence
from autoprec.compare.statistics import MIN_SEEDS, Estimate, train_seconds, whole_ratio

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_ODD_BYTES = 0.05
_WIDE = 0.10
"""A tie whose interval leaves room for more than this is called wide."""


class Words:
    """Sentences about the judged arm against the best static arm.

    Args:
        evidence: What the runs show.
        level: Level of the intervals that the verdict rests on.
    """

    def __init__(self, evidence: Evidence, level: float) -> None:
        self._evidence = evidence
        self._level = level
        self._ours, self._best = str(evidence.candidate), str(evidence.best_static)

    def time(self, speed: str, ratio: Estimate) -> str:
        """Says how the times differ.

        Args:
            speed: ``faster``, ``slower``, ``tie`` or ``unknown``.
            ratio: Time of the judged arm over that of the best static arm.
        """
        what = "whole runs" if self._evidence.is_whole_run else "a step"
        if math.isnan(ratio.value):
            return f"No ratio of the times of {self._ours} and {self._best} can be made: too few steps of common seeds."
        take = "take" if self._evidence.is_whole_run else "takes"
        said = f"with {self._ours} {what} {take} {ratio.value:.3f} times as long as with {self._best}"
        if speed == "unknown":
            return f"{_upper(said)} ({_seeds(ratio.seeds)}, of which no interval can be made: {self._needed()})."
        if speed == "tie":
            return f"{_upper(said)}, which is inside the noise{self._interval(ratio, '.3f')}.{_width(ratio)}"
        return f"{_upper(said)}{self._interval(ratio, '.3f')}."

    def metric(self, loss: str, difference: Estimate) -> str:
        """Says how the metric differs at the end.

        Args:
            loss: ``equivalent``, ``worse``, ``better`` or ``unknown``.
            difference: Metric of the judged arm less that of the best static arm.
        """
        name, margin = self._evidence.metric, f"the margin of {self._evidence.margin:.4g}"
        if difference.seeds == 0:
            return f"{name} at the end is missing, so nothing is known about it."
        said = f"{name} of {self._ours} less that of {self._best} is {difference.value:+.3g}"
        if not difference.is_sure:
            return f"{said} ({_seeds(difference.seeds)}, of which no interval can be made: {self._needed()})."
        said += self._interval(difference, "+.3g")
        if loss != self._evidence.relation(difference):
            return f"{said}, but its mean is worse than {self._evidence.reference}'s by more than {margin}."
        return {
            "equivalent": f"{said}, all of it inside {margin}: equivalent.",
            "worse": f"{said}: worse, and not shown to be inside {margin}.",
            "better": f"{said}: better, and not only inside {margin}.",
            "unknown": f"{said}, which is neither inside {margin} nor clear of 0.",
        }[loss]

    def target(self, ratio: Estimate) -> str:
        """Says how the times to the target differ.

        Args:
            ratio: Time to the target of the judged arm over that of the best static arm.
        """
        name, target = self._evidence.metric, self._evidence.target_text
        if math.isnan(ratio.value):
            return f"Times until {name} reaches {target} cannot be compared: not every run reached it."
        interval = self._interval(ratio, ".3f") if ratio.is_sure else ""
        return (
            f"{_upper(self._ours)} takes {ratio.value:.3f} times as long as {self._best} until {name} reaches"
            f" {target}{interval}."
        )

    def whole_run(self, ratio: Estimate) -> str:
        """Says how whole runs differ, and when the first steps are made up for where they cost more than was won.

        Args:
            ratio: Time of whole runs of the judged arm over that of the best static arm.
        """
        said = f"Whole runs, their first steps included: {ratio.value:.3f} times{self._interval(ratio, '.3f')}."
        step = self._evidence.time_ratio(self._ours, self._best).value
        best = self._evidence.of(self._best)
        steps = statistics.median(len(run.steps) for run in best)
        if not (step < 1.0 <= ratio.value) or not steps:
            return said
        usual_ms = statistics.median(found.step_ms for run in best for found in run.steps)
        seconds = statistics.median(map(train_seconds, best))
        even = steps + 1e3 * (ratio.value - 1.0) * seconds / (usual_ms * (1.0 - step))
        return (
            f"{said} The first steps of {self._ours} cost more than the others won in runs of {steps:.0f} steps; at"
            f" this rate it is ahead after about {float(f'{even:.2g}'):.0f} steps."
        )

    def remarks(self) -> Iterator[str]:
        """Yields what else has to be known: how the best static arm was chosen, what was left out, memory, skips."""
        evidence = self._evidence
        yield from self._choice()
        for arm, problem in evidence.problems.items():
            yield f"Left out: {arm} {problem}."
        if evidence.is_whole_run:
            yield "Runs of a seed differ in their number of steps, so whole runs are compared, not single steps."
        if evidence.candidate is not None and evidence.best_static is not None:
            yield from self._whole_runs()
            yield from self._memory()
        if len(evidence.steered) > 1:
            yield (
                f"{self._ours} is the fastest of {len(evidence.steered)} arms with autoprec; for that choice it is"
                f" judged by {_percent(self._level)} intervals."
            )
        yield from self._kernels()

    def _choice(self) -> Iterator[str]:
        evidence = self._evidence
        if evidence.best_static is None or evidence.reference is None:
            return
        outside = [arm for arm in evidence.static if not evidence.is_within_margin(arm)]
        for arm in outside:
            worse = evidence.worse_by(arm, evidence.reference)
            yield (
                f"Not the best static: {arm}, whose {evidence.metric} is worse than {evidence.reference}'s by"
                f" {worse:.3g}."
            )
        others = [arm for arm in evidence.static if arm not in outside]
        if len(others) > 1:
            yield (
                f"{self._best} is the fastest of {len(others)} static arms whose mean {evidence.metric} is not worse"
                f" than {evidence.reference}'s by more than {evidence.margin:.4g}."
            )

    def _whole_runs(self) -> Iterator[str]:
        if self._evidence.is_whole_run:
            return
        found = whole_ratio(self._evidence.runs, self._ours, self._best, self._level)
        if not math.isnan(found.value):
            yield self.whole_run(found)

    def _memory(self) -> Iterator[str]:
        ours, best = (self._peak(arm) for arm in (self._ours, self._best))
        if not ours or not best:
            return
        ratio = ours / best
        word = "the same as" if abs(ratio - 1) < _ODD_BYTES else "less than" if ratio < 1 else "more than"
        yield f"Peak memory of {self._ours} is {bytes_text(ours)}, {word} the {bytes_text(best)} of {self._best}."

    def _peak(self, arm: str) -> int:
        return max((run.peak_bytes or 0 for run in self._evidence.of(arm)), default=0)

    def _kernels(self) -> Iterator[str]:
        for arm in self._evidence.arms:
            base, at, kernels = arm.partition("@")
            found = self._evidence.difference(arm, base) if at else None
            if found is not None and found.seeds:
                yield (
                    f"Consistency: {base} under {kernels} ends with a mean {self._evidence.metric} that differs by"
                    f" {found.value:+.3g} ({_seeds(found.seeds)})."
                )

    def _interval(self, estimate: Estimate, form: str) -> str:
        if estimate.low is None or estimate.high is None:
            return ""
        ends = f"{format(estimate.low, form)} to {format(estimate.high, form)}"
        return f" ({_percent(self._level)} interval {ends}, {_seeds(estimate.seeds)})"

    def _needed(self) -> str:
        return f"that takes {MIN_SEEDS}"


def bytes_text(count: float) -> str:
    """Returns a number of bytes with a unit, as in ``1.5 GiB``.

    Args:
        count: Bytes, 0 or more.
    """
    power = min(len(_UNITS) - 1, int(math.log(count, 1024))) if count >= 1 else 0
    value = count / 1024**power
    return f"{value:.0f} {_UNITS[power]}" if power == 0 or value >= 99.95 else f"{value:.3g} {_UNITS[power]}"


def _width(ratio: Estimate) -> str:
    room = max(abs(math.log(end)) for end in (ratio.low, ratio.high) if end is not None)
    return f" That leaves room for {math.expm1(room):.0%}: more seeds would narrow it." if room > _WIDE else ""


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _percent(level: float) -> str:
    return f"{100 * level:.3g}%"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
