"""The table of a comparison at the widths of terminals, its picture, and what is left out where.

Time budget: 15 s.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from rich.console import Console

from autoprec.compare.picture import band, draw, draw_metric, draw_ratios, losses
from autoprec.compare.records import Comparison, Evaluation, Run
from autoprec.compare.table import fitting_table, render_table
from autoprec.compare.verdict import Verdict, judge
from tests.comparisons import arm_runs, comparison

MEASURED: dict[str, Any] = {"peak_bytes": 2**30, "energy_j": 1234.0, "energy_source": "codecarbon (estimated)"}
ALL_COLUMNS = [
    "arm",
    "time",
    "metric",
    "relation",
    "time to target",
    "peak memory",
    "skipped steps",
    "energy",
    "fidelity",
    "formats",
]


def full() -> Comparison:
    """A comparison with figures for every column, an arm that diverged and one that failed."""
    return comparison(
        arm_runs("32-true", 10.0, 1.0, **MEASURED),
        arm_runs("bf16-mixed", 6.0, 1.0, fidelity={"kl": 1.2e-4, "logit_sqnr_db": 38.12}, **MEASURED),
        arm_runs("bf16-true", 5.5, 1.3, fidelity={"sqnr_db": math.inf}, **MEASURED),
        arm_runs("16-mixed", 5.0, math.nan, skipped_steps=11),
        arm_runs("autoprec:rule", 5.0, 1.0, formats={"a": "bf16", "b": "bf16", "c": "fp32"}, peak_bytes=2**29),
        arm_runs("autoprec", 4.0, 1.0, error="Traceback\n[bold]RuntimeError[/]: out of luck"),
        arm_runs("autoprec:rule@avx2", 15.0, 1.0),
        flops_per_step=1e12,
    )


def judged(compared: Comparison) -> Verdict:
    return judge(compared, metric="val_loss", mode="min", margin=0.02)


def printed(verdict: Verdict, width: int, **options: Any) -> str:
    screen = io.StringIO()
    render_table(verdict, Console(file=screen, width=width, **options))
    return screen.getvalue()


def table_lines(text: str) -> list[str]:
    """The table's lines, without the space that ends them."""
    lines = [line.rstrip() for line in text.splitlines()]
    first = next(index for index, line in enumerate(lines) if line.strip().startswith("trained"))
    return lines[first : next(index for index, line in enumerate(lines) if line.startswith("intervals"))]


# ---- widths ----


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_cell_is_cut_at_any_width(width: int) -> None:
    text = printed(judged(full()), width)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= width


def test_columns_go_in_a_fixed_order_and_are_named() -> None:
    verdict = judged(full())
    before = len(ALL_COLUMNS)
    for width in (200, 120, 100, 80, 70, 60, 40, 10):
        table, left_out = fitting_table(verdict, Console(file=io.StringIO(), width=width))
        kept = len(table.columns)
        assert kept <= before
        assert left_out == ALL_COLUMNS[kept:][::-1]
        before = kept
    assert before == 3  # arm, time and metric are never left out
    narrow = " ".join(printed(verdict, 60).split())
    assert "not shown at this width: time to target, peak memory, skipped steps, energy, fidelity, formats" in narrow
    assert "not shown" not in printed(verdict, 140)


def test_columns_without_figures_are_not_shown() -> None:
    verdict = judged(comparison(arm_runs("32-true", 10.0, 1.0), arm_runs("autoprec", 5.0, 1.0)))
    table, left_out = fitting_table(verdict, Console(file=io.StringIO(), width=140))
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    assert headings == ["trained with", "step time / best static", "val_loss", "difference, relation", "time to target"]
    assert left_out == []


# ---- contents ----


def test_the_answer_comes_first_and_the_reasons_last() -> None:
    verdict = judged(full())
    text = " ".join(printed(verdict, 80).split())
    assert text.startswith(verdict.headline)
    assert text.endswith(f"- {verdict.reasons[-1]}")
    assert all(reason in text for reason in verdict.reasons)


def test_every_cell_has_its_figure() -> None:
    verdict = judged(full())
    text = printed(verdict, 200)
    rows = "\n".join(table_lines(text))
    for cell in (
        *("1.000", "diverged", "failed", "4 of 4", "never", "0 of 4", "1 GiB", "512 MiB", "1.23 kJ", "TOPS/W", "44"),
        *("KL 0.00012", "38.1 dB", "equal", "2 x bf16", "1 x fp32", "worse", "equivalent"),
    ):
        assert cell in rows, cell
    ours = verdict.figures("autoprec:rule")
    assert ours is not None
    assert f"{ours.time_ratio.value:.3f}" in rows
    assert f"{ours.time_ratio.low:.3f}-{ours.time_ratio.high:.3f}" in rows
    assert f"{ours.metric.low:.4g} to {ours.metric.high:.4g}" in rows


def test_footnotes_say_what_numbers_are_of() -> None:
    text = printed(judged(full()), 200)
    assert "intervals: 95% over 4 seeds; difference: from 32-true, margin 0.02" in text
    assert "energy of a run: codecarbon (estimated)" in text
    assert "autoprec, seed 0: [bold]RuntimeError[/]: out of luck" in text


def test_the_picture_claims_no_interval_and_no_curve_that_is_not_there() -> None:
    one: dict[str, Any] = {"evaluations": (Evaluation(step=60, elapsed_s=0.3, metrics={"val_loss": 1.0}),)}
    for seeds, left, right in ((1, "one seed", "too few seeds"), (3, "mean and range of 3 seeds", "95% intervals")):
        compared = comparison(*(arm_runs(arm, 5.0, 1.0, seeds=seeds, **one) for arm in ("32-true", "autoprec")))
        axes = Figure().subplots(1, 2)
        draw_metric(axes[0], compared, judged(compared))
        draw_ratios(axes[1], judged(compared))
        assert axes[0].get_title() == f"training loss over time: {left}"
        assert right in axes[1].get_title()


@pytest.mark.parametrize(("seeds", "words"), [(1, "there is 1"), (2, "there are 2")])
def test_few_seeds_have_no_intervals(seeds: int, words: str) -> None:
    arms = [arm_runs(arm, 5.0, 1.0, seeds=seeds) for arm in ("32-true", "autoprec")]
    text = printed(judged(comparison(*arms)), 120)
    assert f"intervals: n/a, they need 3 seeds and {words}" in text
    assert not re.search(r"\d-\d", "\n".join(table_lines(text)))
    assert "unknown" in text


def test_the_best_cells_are_emphasised() -> None:
    text = printed(judged(full()), 200, force_terminal=True, color_system="standard", legacy_windows=False)
    best = re.findall(r"\x1b\[1;32m\s*([^\x1b]*?)\s*\x1b\[0m", text)
    ours = judged(full()).figures("autoprec:rule")
    assert ours is not None
    assert f"{ours.time_ratio.value:.3f}" in best
    assert "512 MiB" in best
    assert not any(cell.startswith("1 GiB") for cell in best)  # an arm that failed or ran elsewhere is no best


def test_no_cell_is_the_best_where_all_are_alike() -> None:
    arms = [arm_runs(arm, 5.0, 1.0, peak_bytes=2**30) for arm in ("32-true", "autoprec")]
    alike = [tuple(replace(run, arm=runs[0].arm) for run in arms[0]) for runs in arms]
    text = printed(judged(comparison(*alike)), 120, force_terminal=True, color_system="standard")
    assert "\x1b[1;32m" not in text


def test_nothing_to_show_is_shown_too() -> None:
    empty = comparison((Run(arm="32-true", seed=0),), (Run(arm="autoprec", seed=0, error=""),))
    text = printed(judged(empty), 80)
    assert "Keep 32-true: autoprec failed with 1 of 1 seeds (no message)." in text


# ---- picture ----


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(full(), judged(full()), tmp_path / "compare.png")
    assert is_png(tmp_path / "compare.png")
    empty = comparison((Run(arm="32-true", seed=0),))
    draw(empty, judged(empty), tmp_path / "empty.png")
    assert is_png(tmp_path / "empty.png")


def test_lines_are_means_over_seeds_and_points_have_intervals() -> None:
    compared = full()
    verdict = judged(compared)
    left, right = Figure().subplots(1, 2)
    draw_metric(left, compared, verdict)
    draw_ratios(right, verdict)
    labels = [str(line.get_label()) for line in left.lines]
    assert labels[3:6] == ["16-mixed (diverged)", "autoprec:rule", "autoprec (failed)"]
    runs = [run for run in compared.runs if run.arm == "32-true"]
    means = [sum(run.evaluations[i].metrics["val_loss"] for run in runs) / 4 for i in range(7)]
    assert list(left.lines[0].get_ydata()) == pytest.approx(means)
    assert [label.get_text() for label in right.get_yticklabels()] == [figures.arm for figures in verdict.arms]
    assert {text.get_text() for text in right.texts} >= {"1.000"}


def test_without_evaluations_the_training_loss_is_drawn() -> None:
    compared = full()
    bare = replace(compared, runs=tuple(replace(run, evaluations=()) for run in compared.runs))
    axes = Figure().subplots()
    draw_metric(axes, bare, judged(bare))
    assert axes.get_ylabel() == "training loss"
    assert len(list(axes.lines[0].get_xdata())) == 60  # type: ignore[arg-type]


def test_training_losses_are_means_of_parts() -> None:
    run = arm_runs("a", 10.0, 1.0, seeds=1, steps=180)[0]
    points = losses(run)
    assert len(points) == 60
    assert points[0][1] == pytest.approx(sum(step.loss or 0.0 for step in run.steps[:3]) / 3)
    assert points[-1][0] == pytest.approx(sum(step.step_ms for step in run.steps) / 1e3)


def test_a_band_goes_as_far_as_the_shortest_curve() -> None:
    assert band([[(1.0, 2.0), (2.0, 1.0)], [(3.0, 4.0)], []]) == ([2.0], [3.0], [2.0], [4.0])
    assert band([]) == ([], [], [], [])
