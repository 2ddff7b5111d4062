"""Writes the files that `autoprec monitoring` hands out: Grafana's dashboard, alert rules, Prometheus' settings.

    python scripts/make_dashboard.py            # writes autoprec/monitoring/data
    python scripts/make_dashboard.py --check    # says whether the files there are what it would write

Names of metrics are looked up, so that a file cannot name one that no run exports. It needs grafana-foundation-sdk from
requirements/dev.txt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as queries

from autoprec.formats import FORMATS
from autoprec.monitoring.files import DATA, PORT
from autoprec.monitoring.metrics import METRICS, PREFIX

COLORS = dict(zip(FORMATS, ("#7f7f7f", "#a0a0c8", "#4c78a8", "#f58518", "#e45756", "#b279a2"), strict=True))
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WHOLE, HALF, THIRD, EIGHTH = 24, 12, 8, 3


def series(name: str, part: str = "") -> str:
    """The full name of a metric's series."""
    return f"{PREFIX}{name}{METRICS[name].suffix}{part}"


def chosen(name: str, part: str = "", **labels: str) -> str:
    """Its series of the runs that the reader has chosen."""
    matchers = ['run=~"$run"', *(f'{label}="{value}"' for label, value in labels.items())]
    return f"{series(name, part)}{{{','.join(matchers)}}}"


def query(expression: str, legend: str = "{{run}}", index: int = 0) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression).legend_format(legend).range().ref_id("ABCDEF"[index])


def plot(
    title: str,
    about: str,
    *wanted: tuple[str, str],
    unit: str = "short",
    log: bool = False,
    stacked: bool = False,
    width: int = HALF,
) -> timeseries.Panel:
    """Lines over time."""
    panel = timeseries.Panel().title(title).description(about).datasource(SOURCE).unit(unit).span(width).height(8)
    panel = panel.line_width(1).fill_opacity(70 if stacked else 5).show_points(common_models.VisibilityMode.NEVER)
    panel = panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
    )
    if log:
        panel.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(2))
    if stacked:
        panel.min(0).stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
        for name, color in COLORS.items():
            fixed = models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})
            panel.override_by_regexp(f"/^{name}( |$)/", [fixed])
    for index, (expression, legend) in enumerate(wanted):
        panel.with_target(query(expression, legend, index))
    return panel


def number(title: str, about: str, expression: str, unit: str = "short", low: float | None = None) -> stat.Panel:
    """One large number; below ``low`` it is red."""
    steps = [models.Threshold(value=None, color="green" if low is None else "red")]
    if low is not None:
        steps.append(models.Threshold(value=low, color="green"))
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .span(EIGHTH)
        .height(4)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(query(expression))
    )


def overview() -> list[Any]:
    steps = f"rate({chosen('applied_steps')}[$__rate_interval])"
    return [
        number("Progress", METRICS["progress_ratio"].help, chosen("progress_ratio"), "percentunit"),
        number("Steps per second", "Applied optimizer steps.", steps, "none"),
        number("Samples per second", METRICS["samples_per_second"].help, chosen("samples_per_second"), "none"),
        number("Utilisation", METRICS["utilization_ratio"].help, chosen("utilization_ratio"), "percentunit", 0.3),
        number("Memory", METRICS["memory_bytes"].help, chosen("memory_bytes"), "bytes"),
        number("Skipped steps", METRICS["skipped_steps"].help, chosen("skipped_steps"), "none"),
        number("Rollbacks", METRICS["rollbacks"].help, chosen("rollbacks"), "none"),
        number("Loss", METRICS["loss"].help, chosen("loss"), "none"),
    ]


def training() -> list[Any]:
    applied, skipped = (f"rate({chosen(f'{kind}_steps')}[$__rate_interval])" for kind in ("applied", "skipped"))
    buckets = f"sum by (le) (rate({chosen('step_seconds', '_bucket')}[$__rate_interval]))"
    inside = f"rate({chosen('step_seconds', '_sum')}[$__rate_interval])"
    return [
        plot("Loss", METRICS["loss"].help, (chosen("loss"), "{{run}}")),
        plot(
            "Utilisation",
            "How busy the device is, and which share of the time is spent inside of steps. Where the second is far"
            " below 1, training waits for data, validates or writes checkpoints.",
            (chosen("utilization_ratio"), "{{run}}: device busy"),
            (inside, "{{run}}: inside steps"),
            unit="percentunit",
        ),
        plot(
            "Steps per second",
            "Optimizer steps by what became of them.",
            (applied, "{{run}}: applied"),
            (skipped, "{{run}}: skipped"),
            unit="none",
        ),
        heatmap.Panel()
        .title("Step time")
        .description(METRICS["step_seconds"].help)
        .datasource(SOURCE)
        .span(HALF)
        .height(8)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .with_target(query(buckets, "{{le}}").format(queries.PromQueryFormat.HEATMAP)),
        plot("Memory", METRICS["memory_bytes"].help, (chosen("memory_bytes"), "{{run}}"), unit="bytes"),
        plot(
            "Batch",
            "Samples in a batch of the loader, and batches per optimizer step.",
            (chosen("batch_size"), "{{run}}: batch size"),
            (chosen("accumulate_grad_batches"), "{{run}}: batches per step"),
        ),
    ]


def numerics() -> list[Any]:
    skipped = f"increase({chosen('skipped_steps')}[5m])"
    return [
        plot(
            "Loss scale",
            "It halves when a step is skipped, and grows after many that were not.",
            (chosen("loss_scale"), "{{run}}"),
            (chosen("loss_scale_floor"), "{{run}}: floor"),
            log=True,
        ),
        plot(
            "Gradient norm and clip threshold",
            "Steps whose norm is above the threshold are clipped to it.",
            (chosen("grad_norm"), "{{run}}: norm"),
            (chosen("clip_threshold"), "{{run}}: threshold"),
            log=True,
        ),
        plot(
            "Skipped steps in 5 minutes",
            "Some are normal while the loss scale looks for its place. Bursts are not.",
            (skipped, "{{run}}"),
            (f"increase({chosen('undone_steps')}[5m])", "{{run}}: undone by a rollback"),
            unit="none",
        ),
        plot(
            "Overflows by unit in 5 minutes",
            METRICS["unit_overflows"].help,
            (f"increase({chosen('unit_overflows')}[5m]) > 0", "{{run}} {{unit}}"),
            unit="none",
        ),
        plot(
            "Largest output by unit",
            "fp16 ends at 65504. Outputs of a unit in fp16 that come near it will overflow.",
            (chosen("unit_activation_amax"), "{{run}} {{unit}}"),
            log=True,
        ),
        plot("Gradient norm by unit", METRICS["unit_grad_norm"].help, (chosen("unit_grad_norm"), "{{unit}}"), log=True),
    ]


def by_format(name: str) -> list[tuple[str, str]]:
    """What is emulated is a line of its own."""
    native, emulated = (f"sum by (format) ({chosen(name, emulated=value)})" for value in ("false", "true"))
    return [(native, "{{format}}"), (emulated, "{{format}} emulated")]


def formats() -> list[Any]:
    shown = [(name, emulated) for emulated in ("false", "true") for name in FORMATS]
    numbered = " or ".join(
        f"max by (run, unit) ({chosen('unit_format', format=name, emulated=emulated)}) * {index}"
        for index, (name, emulated) in enumerate(shown)
    )
    words = [f"{name} emulated" if emulated == "true" else name for name, emulated in shown]
    mapping: Any = models.ValueMap(
        {
            str(index): models.ValueMappingResult(text=text, color=COLORS[text.split()[0]], index=index)
            for index, text in enumerate(words)
        }
    )
    decisions = f"sum by (knob, outcome) (increase({chosen('decisions')}[5m])) > 0"
    hidden = {"Time": True, "Value": True, "__name__": True, "instance": True, "job": True}
    return [
        plot("Units by format", METRICS["units"].help, *by_format("units"), stacked=True, width=THIRD),
        plot("Parameters by format", METRICS["parameters"].help, *by_format("parameters"), stacked=True, width=THIRD),
        plot("Decisions in 5 minutes", METRICS["decisions"].help, (decisions, "{{knob}} {{outcome}}"), width=THIRD),
        statetimeline.Panel()
        .title("Format of each unit")
        .description("The units with the most parameters, see MonitorConfig(max_units=...).")
        .datasource(SOURCE)
        .span(WHOLE)
        .height(12)
        .mappings([mapping])
        .merge_values(True)
        .show_value(common_models.VisibilityMode.NEVER)
        .with_target(query(numbered, "{{unit}}")),
        table.Panel()
        .title("Now")
        .datasource(SOURCE)
        .span(WHOLE)
        .height(8)
        .with_target(
            prometheus.Dataquery()
            .expr(chosen("unit_format"))
            .ref_id("A")
            .instant()
            .format(queries.PromQueryFormat.TABLE)
        )
        .with_transformation(models.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})),
    ]


def make_dashboard() -> str:
    """Grafana's dashboard as JSON."""
    made = (
        dashboard.Dashboard("autoprec")
        .uid("autoprec")
        .description("Training runs under autoprec: speed, numerics, formats and decisions.")
        .tags(["autoprec", "pytorch-lightning"])
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run")
            .label("Run")
            .datasource(SOURCE)
            .query(f"label_values({series('running')}, run)")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .current(models.VariableOption(text="All", value="$__all", selected=True))
        )
    )
    rows = {"Now": overview(), "Training": training(), "Numerics": numerics(), "Formats": formats()}
    for title, panels in rows.items():
        made.with_row(dashboard.Row(title))
        for panel in panels:
            made.with_panel(panel)
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def alert(name: str, severity: str, expression: str, summary: str, advice: str, lasting: str = "0m") -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": f"Run {{{{ $labels.run }}}}: {summary}", "description": advice},
    }


def make_rules() -> str:
    """Prometheus' alert rules as YAML."""
    skipped, applied, rollbacks = (
        f"increase({series(name)}[{span}])"
        for name, span in (("skipped_steps", "5m"), ("applied_steps", "5m"), ("rollbacks", "10m"))
    )
    running = f"{series('running')} == 1"
    rules = [
        alert(
            "AutoprecLowUtilization",
            "warning",
            f"{series('utilization_ratio')} < 0.3 and {running}",
            "the device is busy for {{ $value | humanizePercentage }} of the time only",
            f"rate({series('step_seconds', '_sum')}[5m]) is the share of the time inside of steps: where it is far"
            " below 1, training waits for data, validates or writes checkpoints.",
            "10m",
        ),
        alert(
            "AutoprecOverflowBurst",
            "warning",
            f"{skipped} >= 5 and {skipped} > 0.1 * ({skipped} + {applied})",
            "{{ $value | humanize }} steps were skipped as non-finite in 5 minutes, more than one in ten",
            f"{series('unit_overflows')} names the units that left the range of their format.",
        ),
        alert(
            "AutoprecRollback",
            "critical",
            f"{rollbacks} > 0",
            "it went back to a copy of itself",
            "Weights were not finite, or the loss was far too high for long. Look at the learning rate and the data.",
        ),
        alert(
            "AutoprecLossScaleAtFloor",
            "warning",
            f"{series('loss_scale')} <= {series('loss_scale_floor')} and {running}",
            "the loss scale is at its floor of {{ $value | humanize }}",
            "Gradients overflow at every scale that is allowed, or small ones are lost: bf16 needs no loss scale.",
            "5m",
        ),
        alert(
            "AutoprecNoProgress",
            "critical",
            f"time() - {series('last_step_timestamp_seconds')} > 600 and {running}",
            "no optimizer step for {{ $value | humanizeDuration }}",
            "It hangs, or it validates for longer than that: then raise the limit in this rule.",
        ),
    ]
    document = {"groups": [{"name": "autoprec", "rules": rules}]}
    return f"# made by scripts/make_dashboard.py\n{yaml.safe_dump(document, sort_keys=False, width=118)}"


def make_prometheus() -> str:
    """Settings of a Prometheus that scrapes one run."""
    document = {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": ["autoprec_rules.yml"],
        "scrape_configs": [{"job_name": "autoprec", "static_configs": [{"targets": [f"127.0.0.1:{PORT}"]}]}],
    }
    about = f"# AutoPrecisionCallback(monitor={PORT}); one target for each run. Made by scripts/make_dashboard.py\n"
    return f"{about}{yaml.safe_dump(document, sort_keys=False)}"


def make_files() -> dict[str, str]:
    """Name of each file and its text."""
    return {
        "autoprec_dashboard.json": make_dashboard(),
        "autoprec_rules.yml": make_rules(),
        "prometheus.yml": make_prometheus(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, end with 1 if files differ")
    is_check = parser.parse_args(arguments).check
    stale = []
    for name, text in make_files().items():
        path = Path(DATA) / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not is_check:
                path.write_text(text, encoding="utf-8")
    print(f"{'differ' if is_check else 'written'}: {', '.join(stale) or 'none'}")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
