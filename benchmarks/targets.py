"""What the project aims at on a CPU with AVX512-BF16. Shown beside the figures, never a condition of anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.figures import Figures, Findings, RowTimes
from benchmarks.machine import memory_gbs, step_bound_ms


@dataclass(frozen=True)
class Target:
    """An aim for a figure.

    Args:
        figure: Name of the figure.
        row: Row, or a pattern of rows.
        limit: Where it is met.
        is_least: Whether the figure should reach the limit from above, as speed-ups do; else stay below it.
    """

    figure: str
    row: str
    limit: float
    is_least: bool = True

    @property
    def text(self) -> str:
        """The limit with its direction."""
        return f"{'>=' if self.is_least else '<='} {self.limit:g}"

    def is_met(self, value: float) -> bool:
        """Whether a value, rounded as it is shown, reaches the limit.

        Args:
            value: A figure.
        """
        value = round(value, 2 if self.limit >= 0.1 else 3)
        return value >= self.limit if self.is_least else value <= self.limit


TARGETS = (
    Target("vs_amp_clip", "mlp-128-64", 1.45),
    Target("vs_amp_clip", "mlp-512-64", 1.9),
    Target("vs_amp_clip", "mlp-2048-128", 2.2),
    Target("vs_amp_clip", "mlp geomean", 1.7),
    Target("vs_amp_clip", "gpt-2-128", 1.05),
    Target("vs_amp_clip", "gpt-4-256", 1.05),
    Target("vs_amp_clip", "gpt-6-512", 1.12),
    Target("vs_amp_clip", "cnn-*", 1.0),
    Target("vs_amp_fused", "mlp-*", 1.04),
    Target("vs_amp_fused", "gpt-*", 1.0),
    Target("vs_amp_fused", "worst", 0.98),
    Target("vs_best_static", "*-*", 0.97),
    Target("grad_stats_vs_clip", "median", 0.4, is_least=False),
    Target("grad_stats_vs_clip", "worst", 0.6, is_least=False),
    Target("grad_stats_of_bandwidth", "*", 0.85),
    Target("grad_stats_share", "mlp-*", 0.05, is_least=False),
    Target("grad_stats_share", "gpt-*", 0.01, is_least=False),
    Target("grad_stats_share", "cnn-*", 0.01, is_least=False),
    Target("fused_step_vs_torch", "worst", 2.0),
    Target("fused_step_vs_torch", "geomean", 2.7),
    Target("plain_adamw_vs_torch", "50M", 1.0),
    Target("int8_vs_ours", "mlp-2048-512", 1.15),
    Target("int8_vs_ours", "gpt-6-512", 1.1),
    Target("rss_ratio", "*-*", 0.7, is_least=False),
    Target("measured_vs_amp_clip", "geomean", 1.5),
    Target("measured_vs_amp_clip", "gpt-6-512", 1.3),
    Target("measured_vs_best_static", "gpt-2-128", 1.15),
    Target("measured_vs_best_static", "gpt-6-512", 1.15),
    Target("measured_vs_best_static", "worst", 0.98),
    Target("fp32_measured_vs_fp32", "gpt-6-512", 1.2),
    Target("fp32_measured_vs_fp32", "mlp-2048-512", 1.2),
)
"""All targets, in the order of the table."""


@dataclass(frozen=True)
class Verdict:
    """A target beside its figure.

    Args:
        target: The target.
        row: The row that was measured.
        value: The figure.
        bound: For a missed one, what the machine allows at most; empty where no bound is known.
    """

    target: Target
    row: str
    value: float
    bound: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the figure reaches the target."""
        return self.target.is_met(self.value)


def judge(findings: Findings) -> list[Verdict]:
    """Returns every target with every figure that it is for.

    Args:
        findings: What was measured.
    """
    figures = findings.figures()
    verdicts = [verdict for target in TARGETS for verdict in _matches(target, figures)]
    return [v if v.is_met else Verdict(v.target, v.row, v.value, bound_of(findings, v)) for v in verdicts]


def _matches(target: Target, figures: Figures) -> Iterator[Verdict]:
    for (name, row), value in figures.items():
        if name == target.figure and fnmatchcase(row, target.row):
            yield Verdict(target, row, value)


def bound_of(findings: Findings, verdict: Verdict) -> str:
    """Says what the roofline of this machine leaves to a figure.

    Args:
        findings: What was measured.
        verdict: A missed target.
    """
    machine = findings.machine()
    if machine is None:
        return ""
    rows = {row.name: row for row in findings.steps()}
    if verdict.row in rows:
        return _step_bound(rows[verdict.row], machine, verdict.target.figure)
    return _kernel_bound(findings, machine, verdict)


def _step_bound(row: RowTimes, machine: Mapping[str, Any], figure: str) -> str:
    over = {
        "vs_amp_clip": "amp_clip",
        "vs_amp_fused": "amp_fused",
        "vs_best_static": min(row.static, key=row.median_ms, default=""),
        "int8_vs_ours": "ours",
        "measured_vs_amp_clip": "amp_clip",
        "measured_vs_best_static": min(row.static, key=row.median_ms, default=""),
    }.get(figure)
    bound = row.bound_ms(machine, is_int8=figure == "int8_vs_ours")
    if over is None or bound is None:
        return ""
    return f"bound {bound:.2f} ms, {over} {row.median_ms(over):.2f} ms: {row.median_ms(over) / bound:.2f} at most"


def _kernel_bound(findings: Findings, machine: Mapping[str, Any], verdict: Verdict) -> str:
    if verdict.row != "worst":
        return ""
    if verdict.target.figure == "fused_step_vs_torch":
        worst = min(findings.model_rows("step"), key=lambda row: float(row["bf16 grads"]))
        bound = step_bound_ms(worst["M"] * 1e6, machine)
        over = worst["torch ms"]
        return f"{worst['row']}: bound {bound:.2f} ms, torch {over:.2f} ms: {over / bound:.2f} at most"
    if verdict.target.figure == "grad_stats_vs_clip":
        worst = max(findings.model_rows("grad_stats"), key=lambda row: float(row["fp32 vs clip"]))
        bound = worst["MB"] / memory_gbs(machine, worst["MB"], ["read_gbs"]) * 1e3
        over = worst["clip us"]
        return f"{worst['row']}: bound {bound:.0f} us, clip {over:.0f} us: {bound / over:.2f} at best"
    return ""
