"""A report in Weights & Biases that compares the runs of a group with a static precision.

``build_report`` is pure: it makes the report of wandb-workspaces from names and figures, without a network.
``publish`` reads the figures of the runs, and saves the report. It needs a login and a network; the HTML report of
``autoprec report`` shows the same and needs neither.

Runs belong to a group by ``group=`` of their WandbLogger, and say what they are by ``job_type=``: ``autoprec``,
``amp-bf16``, ``fp32`` (``JOB_TYPES``). ``autoprec compare --wandb`` sets both. A static run has the same metrics with
``AutoPrecisionCallback(knobs=())``, which changes nothing in it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from autoprec import metric_names
from autoprec.target_functions import PlainError
from autoprec.wandb_logging import COMPARISON, JOB_TYPES

METRICS: Final = (
    metric_names.LOSS,
    metric_names.ELAPSED_S,
    metric_names.STEP_MS,
    metric_names.SAMPLES_PER_S,
    metric_names.MEMORY_BYTES,
    metric_names.PEAK_BYTES,
    metric_names.SKIPPED_STEPS,
    metric_names.LOSS_SCALE,
    metric_names.BITS,
    *metric_names.share_names(metric_names.PARAMETER_SHARE),
    *metric_names.share_names(metric_names.UNIT_SHARE),
)
"""Metrics of autoprec that the report draws."""

TABLES: Final = (metric_names.FORMAT_MAP, metric_names.HISTORY, metric_names.VERDICT)
"""Tables of autoprec that the report shows."""

_INSTEAD = "`autoprec report FOLDER` makes the same comparison as an HTML file, which needs no network."
_COLUMNS = (
    ("step ms", metric_names.STEP_MS, 1.0),
    ("samples/s", metric_names.SAMPLES_PER_S, 1.0),
    ("peak MiB", metric_names.PEAK_BYTES, 2.0**-20),
    ("skipped steps", metric_names.SKIPPED_STEPS, 1.0),
)


class ReportError(PlainError):
    """The report cannot be made; the message says why, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What one run of a group has ended with.

    Args:
        name: Its name.
        job_type: What it is in its group, ``""`` if nobody has said so.
        summary: Last value of each metric.
    """

    name: str
    job_type: str = ""
    summary: Mapping[str, float] = field(default_factory=dict)


def build_report(
    entity: str,
    project: str,
    group: str,
    *,
    static: str = "bf16-mixed",
    metric: str = "val_loss",
    runs: Sequence[RunFigures] = (),
) -> Any:
    """Returns the report, a ``wandb_workspaces.reports.v2.Report`` that nobody sees before it is saved.

    Args:
        entity: User or team that the project belongs to.
        project: The project.
        group: Group of the runs.
        static: The Trainer's ``precision`` that the others are compared with, or the job type of such runs.
        metric: What the modules log about held-out data.
        runs: What the runs have ended with, for the table.

    Raises:
        ReportError: If wandb-workspaces is not installed.
    """
    _check_installed()
    v2: Any = importlib.import_module("wandb_workspaces.reports.v2")  # exports its names without saying so
    job_type = JOB_TYPES.get(static, static)
    return v2.Report(
        entity=entity,
        project=project,
        title=f"autoprec and {static}: {group}"[:128],
        description=f"Runs of group {group}, compared with {static}.",
        width="fluid",
        blocks=[
            v2.H1("What the runs have ended with"),
            *_verdict_blocks(v2, entity, project, group, job_type, runs, metric),
            v2.H1("All runs"),
            v2.P(
                f"Lines are means over the runs of a job type, areas their range. Over seconds, {metric} is drawn for"
                " runs of `autoprec compare`, which log both together."
            ),
            v2.PanelGrid(runsets=_everything(v2, entity, project, group), panels=_shared_panels(v2, metric)),
            v2.H1("What autoprec did"),
            v2.PanelGrid(runsets=_steered(v2, entity, project, group), panels=_steered_panels(v2)),
        ],
    )


def publish(entity: str, project: str, group: str, *, static: str = "bf16-mixed", metric: str | None = None) -> str:
    """Saves the report.

    Args:
        entity: User or team that the project belongs to.
        project: The project.
        group: Group of the runs.
        static: The Trainer's ``precision`` that the others are compared with, or the job type of such runs.
        metric: What the modules log about held-out data; ``None`` for ``val_loss``, or what comes nearest to it.

    Returns:
        Its address.

    Raises:
        ReportError: If a package, the login, the network or the group is missing. The message says what to do.
    """
    _check_installed()
    import wandb

    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        raise ReportError(f"WANDB_MODE={mode}: a report in Weights & Biases is made on its server. {_INSTEAD}")
    if not wandb.login(prompt=False, verify=False):
        raise ReportError(f"There is no login for Weights & Biases. Run `wandb login`, or go without: {_INSTEAD}")
    try:
        runs = _read_runs(entity, project, group)
        if not runs:
            raise ReportError(
                f"Passed the group {group!r}. `{entity}/{project}` has no runs of it. Runs join a group by"
                f" `WandbLogger(group=...)`, offline ones once `wandb sync` has sent them. {_INSTEAD}"
            )
        report = build_report(
            entity, project, group, static=static, metric=metric or _held_out_metric(runs), runs=runs
        ).save()
    except (wandb.errors.Error, ConnectionError, ValueError) as error:
        raise ReportError(f"Weights & Biases: {str(error).rstrip('.')}. {_INSTEAD}") from error
    return str(report.url)


def _check_installed() -> None:
    missing = [name for name in ("wandb", "wandb_workspaces") if importlib.util.find_spec(name) is None]
    if missing:
        raise ReportError(
            f"A report in Weights & Biases needs {' and '.join(missing)}. Run `pip install 'autoprec[wandb]'`, or go"
            f" without: {_INSTEAD}"
        )


def _read_runs(entity: str, project: str, group: str) -> list[RunFigures]:
    import wandb

    found = wandb.Api().runs(f"{entity}/{project}", filters={"group": group})
    return [
        RunFigures(name=str(run.name), job_type=run.job_type or "", summary=_numbers(dict(run.summary)))
        for run in found
    ]


def _numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in summary.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def _held_out_metric(runs: Sequence[RunFigures]) -> str:
    names = sorted({name for run in runs for name in run.summary if not name.startswith(metric_names.PREFIX)})
    losses = [name for name in names if "val" in name and "loss" in name]
    return "val_loss" if "val_loss" in losses else next(iter(losses), "val_loss")


# ---- sets of runs ----


def _everything(v2: Any, entity: str, project: str, group: str) -> list[Any]:
    filters = f"Metric('Group') = {group!r} and Metric('JobType') != {COMPARISON!r}"
    return [v2.Runset(entity=entity, project=project, name="all runs", filters=filters, groupby=["JobType"])]


def _steered(v2: Any, entity: str, project: str, group: str) -> list[Any]:
    others = [COMPARISON, *JOB_TYPES.values()]
    filters = f"Metric('Group') = {group!r} and Metric('JobType') not in {others!r}"
    return [v2.Runset(entity=entity, project=project, name="autoprec", filters=filters)]


def _comparison(v2: Any, entity: str, project: str, group: str) -> list[Any]:
    filters = f"Metric('Group') = {group!r} and Metric('JobType') = {COMPARISON!r}"
    return [v2.Runset(entity=entity, project=project, name="verdict", filters=filters)]


# ---- panels ----


def _line(v2: Any, title: str, x: str, y: str, place: int, **options: Any) -> Any:
    layout = v2.Layout(x=8 * (place % 3), y=8 * (place // 3), w=8, h=8)
    return v2.LinePlot(title=title, x=x, y=[y], layout=layout, **options)


def _shared_panels(v2: Any, metric: str) -> list[Any]:
    options: dict[str, Any] = {"groupby": "JobType", "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
    step, seconds = metric_names.STEP, metric_names.ELAPSED_S
    lines = [
        ("Training loss over steps", step, metric_names.LOSS),
        ("Training loss over seconds", seconds, metric_names.LOSS),
        (f"{metric} over steps", step, metric),
        (f"{metric} over seconds", seconds, metric),
        ("Milliseconds of a step", step, metric_names.STEP_MS),
        ("Samples per second", step, metric_names.SAMPLES_PER_S),
        ("Memory in bytes", step, metric_names.MEMORY_BYTES),
    ]
    panels = [_line(v2, title, x, y, place, **options) for place, (title, x, y) in enumerate(lines)]
    bars = [("Peak memory in bytes", metric_names.PEAK_BYTES), ("Skipped steps", metric_names.SKIPPED_STEPS)]
    for place, (title, name) in enumerate(bars, start=len(lines)):
        layout = v2.Layout(x=8 * (place % 3), y=8 * (place // 3), w=8, h=8)
        panels.append(v2.BarPlot(title=title, metrics=[name], layout=layout, groupby="JobType"))
    return panels


def _steered_panels(v2: Any) -> list[Any]:
    step = metric_names.STEP
    shares = [
        v2.LinePlot(
            title=title,
            x=step,
            y=list(metric_names.share_names(prefix)),
            range_y=(0.0, 1.0),
            plot_type="stacked-area",
            layout=v2.Layout(x=12 * place, y=0, w=12, h=10),
        )
        for place, (title, prefix) in enumerate(
            [
                ("Format map: share of parameters in each format", metric_names.PARAMETER_SHARE),
                ("Format map: share of units in each format", metric_names.UNIT_SHARE),
            ]
        )
    ]
    lines = [
        ("Bits, averaged over parameters", metric_names.BITS),
        ("Loss scale", metric_names.LOSS_SCALE),
        ("Skipped steps so far", metric_names.SKIPPED_STEPS),
    ]
    knobs = [_line(v2, title, step, name, place + 6) for place, (title, name) in enumerate(lines)]
    tables = [
        v2.WeavePanelSummaryTable(table_name=name, layout=v2.Layout(x=0, y=24 + 12 * place, w=24, h=12))
        for place, name in enumerate((metric_names.FORMAT_MAP, metric_names.HISTORY))
    ]
    return [*shares, *knobs, *tables]


# ---- the table ----


def _verdict_blocks(
    v2: Any, entity: str, project: str, group: str, static: str, runs: Sequence[RunFigures], metric: str
) -> list[Any]:
    blocks = [v2.MarkdownBlock(verdict_table(runs, static, metric))] if runs else []
    if runs and not any(run.job_type == COMPARISON for run in runs):
        return blocks
    panel = v2.WeavePanelSummaryTable(table_name=metric_names.VERDICT, layout=v2.Layout(x=0, y=0, w=24, h=10))
    note = "The verdict of `autoprec compare`, with intervals over seeds, where it has made these runs:"
    return [
        *blocks,
        v2.P(note),
        v2.PanelGrid(runsets=_comparison(v2, entity, project, group), panels=[panel]),
    ]


def verdict_table(runs: Sequence[RunFigures], static: str, metric: str) -> str:
    """Returns what the runs have ended with, a row for each job type, as Markdown.

    Args:
        runs: The runs.
        static: Job type that ratios are to.
        metric: What the modules log about held-out data.
    """
    by_type: dict[str, list[RunFigures]] = {}
    for run in runs:
        if run.job_type != COMPARISON:
            by_type.setdefault(run.job_type or "(no job type)", []).append(run)
    basis = _mean(by_type.get(static, ()), metric_names.STEP_MS)
    columns = ["runs of", "number", metric, f"step time / {static}", *(name for name, _, _ in _COLUMNS)]
    lines = [columns, ["---"] * len(columns)]
    for name in sorted(by_type, key=lambda name: (name != static, name)):
        members = by_type[name]
        step_ms = _mean(members, metric_names.STEP_MS)
        ratio = "" if basis is None or step_ms is None else f"{step_ms / basis:.3f}"
        figures = [_spread(members, key, factor) for _, key, factor in _COLUMNS]
        lines.append([name, str(len(members)), _spread(members, metric, 1.0), ratio, *figures])
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    said = "" if static in by_type else f"\n\nNo run of this group has the job type `{static}` to compare with."
    return f"{table}{said}\n\nMeans over runs, with the range. Below 1, a step is faster than with `{static}`."


def _values(runs: Sequence[RunFigures], key: str) -> list[float]:
    return [run.summary[key] for run in runs if key in run.summary]


def _mean(runs: Sequence[RunFigures], key: str) -> float | None:
    values = _values(runs, key)
    return statistics.fmean(values) if values else None


def _spread(runs: Sequence[RunFigures], key: str, factor: float) -> str:
    values = [factor * value for value in _values(runs, key)]
    if not values:
        return ""
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    mean = f"{statistics.fmean(values):.4g}"
    return mean if low == high else f"{mean} ({low} to {high})"
