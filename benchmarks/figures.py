"""What follows from the measured times: ratios within rounds, their medians and spreads, geometric means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from autoprec.paired import Spread
from benchmarks.arms import ARMS
from benchmarks.bare import HAND
from benchmarks.machine import bound_ms
from benchmarks.ops import MODEL_SHAPES
from benchmarks.workloads import MEMORY_ROWS, WORKLOADS

Figures = dict[tuple[str, str], float]
"""Values by name and row, as in ``("vs_amp_clip", "mlp-128-64")``; a row may also be ``geomean``, ``worst`` ..."""


class Ratio(NamedTuple):
    """A ratio of times.

    Args:
        value: Median over the rounds.
        spread: Half the distance between the quartiles.
    """

    value: float
    spread: float


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Returns the ratio of two lists of times that belong together round by round.

    Args:
        numerators: Times of the arm above the line.
        denominators: Times of the arm below it, of the same rounds.
    """
    found = Spread.of([above / below for above, below in zip(numerators, denominators, strict=True)])
    return Ratio(found.median, (found.high - found.low) / 2)


def geomean(values: Iterable[float]) -> float:
    """Returns the geometric mean.

    Args:
        values: Positive numbers, at least one.
    """
    return math.exp(statistics.fmean(map(math.log, values)))


class RowTimes:
    """Times of the arms of one row.

    Args:
        result: What a ``trainer`` or ``bare`` job wrote.

    Attributes:
        name: The row.
        base: The arm that the others are compared with.
        times: Seconds of a step for every round, by arm: processor time of the thread at one thread, else the wall's.
    """

    def __init__(self, result: Mapping[str, Any]) -> None:
        self._result = result
        self._clock = 0 if result["job"]["threads"] == 1 else 1
        self.name: str = result["job"]["row"]
        self.base = HAND if result["job"]["kind"] == "bare" else "ours"
        self.times = self._clocked(result["laps"])

    def _clocked(self, laps: Mapping[str, Any]) -> dict[str, list[float]]:
        return {arm: [lap[self._clock] for lap in values] for arm, values in laps.items()}

    @property
    def family(self) -> str:
        """``mlp``, ``gpt`` or ``cnn``."""
        return self.name.split("-")[0]

    def median_ms(self, arm: str) -> float:
        """Median milliseconds of a step; NaN without that arm.

        Args:
            arm: Its name.
        """
        return statistics.median(self.times[arm]) * 1e3 if arm in self.times else math.nan

    def speed_up(self, over: str, arm: str | None = None) -> Ratio | None:
        """Time of ``over`` over time of ``arm``; ``None`` where one of them was not measured.

        Args:
            over: What it is compared with.
            arm: What is faster where the ratio exceeds 1, ``base`` by default.
        """
        arm = self.base if arm is None else arm
        if over not in self.times or arm not in self.times:
            return None
        return ratio(self.times[over], self.times[arm])

    def elsewhere(self) -> float:
        """Largest share of processor time in threads other than that of the arm; 0 at several threads."""
        laps = [lap for laps in self._result["laps"].values() for lap in laps]
        return 0.0 if self._clock else max(process / thread - 1 for thread, _, process in laps)

    @cached_property
    def static(self) -> dict[str, Ratio]:
        """Speed-up over each static arm."""
        found = {arm: self.speed_up(arm) for arm in self.times if arm in ARMS and ARMS[arm].is_static}
        return {arm: value for arm, value in found.items() if value is not None}

    def grad_stats_share(self) -> dict[str, float]:
        """Time of one ``grad_stats`` over that of our step, by the dtype of the gradients."""
        if self.base not in self.times or "grad_stats" not in self._result:
            return {}
        calls = self._clocked(self._result["grad_stats"])
        return {dtype: ratio(times, self.times[self.base]).value for dtype, times in calls.items()}

    def bound_ms(self, machine: Mapping[str, Any] | None, is_int8: bool = False) -> float | None:
        """Milliseconds below which no step goes: products, bytes of the optimizer's step, the Trainer's loop.

        Args:
            machine: What the machine does at best, with as many threads.
            is_int8: Forward and input gradients are taken in int8, which is two thirds of the products.
        """
        if machine is None or "work" not in self._result:
            return None
        loop_ms = machine["loop_ms"] if self._result["job"]["kind"] == "trainer" else 0.0
        return bound_ms(self._result["work"], machine, is_int8) + loop_ms


class Findings:
    """All results of a run.

    Args:
        results: What the jobs wrote.
    """

    def __init__(self, results: Sequence[Mapping[str, Any]]) -> None:
        self._results = results

    def of(self, kind: str, **fields: Any) -> list[Mapping[str, Any]]:
        """Results of one kind, in order.

        Args:
            kind: Kind of the job.
            fields: What the job's fields must be.
        """
        jobs = [(result, result["job"]) for result in self._results]
        return [r for r, job in jobs if job["kind"] == kind and all(job[name] == v for name, v in fields.items())]

    def steps(self, kind: str = "trainer", threads: int = 1, malloc: str = "fixed") -> list[RowTimes]:
        """Whole steps.

        Args:
            kind: ``trainer`` or ``bare``.
            threads: Threads for one operation.
            malloc: Setting of malloc.
        """
        return [RowTimes(result) for result in self.of(kind, threads=threads, malloc=malloc)]

    def machine(self, threads: int = 1) -> Mapping[str, Any] | None:
        """What the machine does at best, ``None`` where it was not measured.

        Args:
            threads: Threads in use.
        """
        return next(iter(self.of("machine", threads=threads)), None)

    def kernel_rows(self, kind: str) -> list[dict[str, Any]]:
        """Rows of ``benchmarks.ops`` at one thread.

        Args:
            kind: ``grad_stats`` or ``step``.
        """
        return [row for result in self.of(kind, threads=1) for row in result["rows"]]

    def model_rows(self, kind: str) -> list[dict[str, Any]]:
        """Those of them that are gradients of a model.

        Args:
            kind: ``grad_stats`` or ``step``.
        """
        return [row for row in self.kernel_rows(kind) if row["row"] in MODEL_SHAPES]

    def memory_ratio(self, row: str) -> float:
        """Peak of memory of ours over that of ``amp_clip``, medians of all runs; NaN where one of them is missing.

        Args:
            row: A workload.
        """
        peaks = {arm: self.peaks(row, arm) for arm in ("ours", "amp_clip")}
        if not all(peaks.values()):
            return math.nan
        return statistics.median(peaks["ours"]) / statistics.median(peaks["amp_clip"])

    def peaks(self, row: str, arm: str) -> list[int]:
        """Bytes over what stood before fit, for every run.

        Args:
            row: A workload.
            arm: Name of the arm.
        """
        return [result["over_bytes"] for result in self.of("memory", row=row) if result["job"]["arms"] == [arm]]

    def load(self) -> float:
        """Largest load average at the end of a job; with nothing else on the machine it is about the threads."""
        return max((result.get("load") or 0.0 for result in self._results), default=0.0)

    def figures(self) -> Figures:
        """Everything that a target may be set for: one thread, processor time, real Trainer."""
        found: Figures = {}
        for row in self.steps():
            found |= _step_figures(row)
        found |= self._kernel_figures()
        for row_name in dict.fromkeys(result["job"]["row"] for result in self.of("memory")):
            found["rss_ratio", row_name] = self.memory_ratio(row_name)
        found |= _summaries(found)
        return {key: value for key, value in found.items() if not math.isnan(value)}

    def _kernel_figures(self) -> Figures:
        found: Figures = {}
        for row in self.kernel_rows("grad_stats"):
            found["grad_stats_vs_clip", row["row"]] = row["fp32 vs clip"]
            if "of bandwidth" in row:
                found["grad_stats_of_bandwidth", row["row"]] = row["of bandwidth"]
        for row in self.kernel_rows("step"):
            found["fused_step_vs_torch", row["row"]] = row["bf16 grads"]
            if row["row"] == "50M":
                found["plain_adamw_vs_torch", row["row"]] = row["bare AdamW"]
        return found


def _step_figures(row: RowTimes) -> Figures:
    found: Figures = {}
    for name, over, arm in (
        ("vs_amp_clip", "amp_clip", "ours"),
        ("vs_amp_fused", "amp_fused", "ours"),
        ("int8_vs_ours", "ours", "ours_int8"),
        ("measured_vs_amp_clip", "amp_clip", "ours_measured"),
        ("fp32_measured_vs_fp32", "fp32", "fp32_measured"),
    ):
        value = row.speed_up(over, arm)
        if value is not None:
            found[name, row.name] = value.value
    if row.static:
        found["vs_best_static", row.name] = min(value.value for value in row.static.values())
        measured = [row.speed_up(arm, "ours_measured") for arm in row.static]
        found["measured_vs_best_static", row.name] = min((m.value for m in measured if m is not None), default=math.nan)
    shares = row.grad_stats_share()
    if shares:
        found["grad_stats_share", row.name] = shares["fp32"]
    return found


def _summaries(figures: Figures) -> Figures:
    """Means and extremes; only over all the rows that they are meant for, so that a part cannot pass for the whole."""
    models, mlps = list(WORKLOADS), [name for name, workload in WORKLOADS.items() if workload.family == "mlp"]
    found: Figures = {}
    for figure, row, rows, summarize in (
        ("vs_amp_clip", "mlp geomean", mlps, geomean),
        ("vs_amp_clip", "geomean", models, geomean),
        ("vs_amp_fused", "geomean", models, geomean),
        ("vs_amp_fused", "worst", models, min),
        ("vs_best_static", "worst", models, min),
        ("measured_vs_amp_clip", "geomean", models, geomean),
        ("measured_vs_best_static", "worst", models, min),
        ("grad_stats_vs_clip", "median", MODEL_SHAPES, statistics.median),
        ("grad_stats_vs_clip", "worst", MODEL_SHAPES, max),
        ("fused_step_vs_torch", "worst", MODEL_SHAPES, min),
        ("fused_step_vs_torch", "geomean", MODEL_SHAPES, geomean),
        ("rss_ratio", "worst", MEMORY_ROWS, max),
    ):
        values = [figures.get((figure, name), math.nan) for name in rows]
        if not any(map(math.isnan, values)):
            found[figure, row] = summarize(values)
    return found


def last_line(figures: Figures) -> str:
    """The line that a run ends with; what was not measured is ``nan``.

    Args:
        figures: What :meth:`Findings.figures` returned.
    """
    parts = {
        "mlp_geomean_vs_amp_clip": ("vs_amp_clip", "mlp geomean"),
        "geomean_vs_amp_clip": ("vs_amp_clip", "geomean"),
        "geomean_vs_amp_fused": ("vs_amp_fused", "geomean"),
        "worst_vs_amp_fused": ("vs_amp_fused", "worst"),
        "worst_vs_best_static": ("vs_best_static", "worst"),
        "grad_stats_vs_clip": ("grad_stats_vs_clip", "worst"),
        "fused_step_vs_torch": ("fused_step_vs_torch", "worst"),
        "rss_ratio": ("rss_ratio", "worst"),
    }
    return "bench: " + " ".join(f"{name}={figures.get(key, math.nan):.2f}" for name, key in parts.items())
