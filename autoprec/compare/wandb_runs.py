"""The runs of a comparison in Weights & Biases: one run for each arm and seed, and one with the verdict.

They are sent when the comparison has ended, from what it has stored: nothing that logs is in a measured step.
``wandb.json`` in the folder says what was sent, so that a comparison that goes on sends the rest into the same group.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec import metric_names
from autoprec.compare.records import Run
from autoprec.compare.run import Result
from autoprec.compare.settings import CompareSettings
from autoprec.compare.store import Store, Stored, slug
from autoprec.compare.verdict import Verdict
from autoprec.formats import FORMATS
from autoprec.json_files import read_json, write_json
from autoprec.wandb_logging import COMPARISON, JOB_TYPES, VERDICT_COLUMNS, open_run

FILE = "wandb.json"

Row = dict[str, Any]


def send(
    result: Result, verdict: Verdict, settings: CompareSettings, project: str, say: Callable[[str], None]
) -> list[str]:
    """Sends the runs that were not sent yet, and the verdict on all.

    A fault of wandb or its server is said and ends the sending, nothing else.

    Args:
        result: The comparison.
        verdict: What it says.
        settings: What was compared.
        project: Project of Weights & Biases.
        say: Is told where the runs are, or what went wrong.

    Returns:
        Names of the runs that were sent.
    """
    if os.environ.get("WANDB_MODE") == "disabled":
        say("WANDB_MODE=disabled: nothing is logged to Weights & Biases.")
        return []
    path = settings.out / FILE
    state = _state(path, project, settings.target.name)
    names: list[str] = []
    stored = Store(settings.out, settings.identity()).runs
    try:
        for run in result.comparison.runs:
            name = slug(run.arm, run.seed)
            if name in state["sent"]:
                continue
            _send_run(run, stored.get((run.arm, run.seed)), settings, state, say)
            state["sent"].append(name)
            write_json(path, state)
            names.append(name)
        if names:
            _send_verdict(verdict, settings, state, say)
    except Exception as error:  # its servers, its service, its disk: the comparison is written already
        say(f"Weights & Biases: {type(error).__name__}: {error}. The results in `{settings.out}` are complete.")
        return names
    _tell(names, settings, state, say)
    return names


def _state(path: Path, project: str, target: str) -> dict[str, Any]:
    found = read_json(path)
    if isinstance(found, dict) and found.get("project") == project:
        return found
    group = os.environ.get("WANDB_RUN_GROUP") or f"{target}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    return {"project": project, "group": group, "sent": []}


def _send_run(
    run: Run, stored: Stored | None, settings: CompareSettings, state: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    config = {"arm": run.arm, "seed": run.seed, "environment": run.environment, **settings.identity()}
    opened = open_run(
        state["project"],
        group=state["group"],
        job_type=JOB_TYPES.get(run.arm, run.arm),
        name=slug(run.arm, run.seed),
        folder=settings.out,
        config=config,
        say=say,
    )
    try:
        opened.define_metric(metric_names.STEP)
        opened.define_metric("*", step_metric=metric_names.STEP, step_sync=True)
        for row in rows_of_run(run, stored.extra if stored is not None else {}):
            opened.log(row)
    finally:
        opened.finish(exit_code=0 if run.error is None else 1)


def rows_of_run(run: Run, extra: Mapping[str, Any]) -> Iterator[Row]:
    """Returns what a run logs: a row for each step, one for each evaluation after its steps, and one at the end.

    Args:
        run: The run.
        extra: What was stored besides: ``timeline`` of formats, ``unit_parameters``, ``samples_per_step``.
    """
    timeline = {int(step): changed for step, changed in extra.get("timeline", ())}
    evaluations = {found.step: found for found in run.evaluations}
    parameters: Mapping[str, int] = extra.get("unit_parameters") or {}
    samples, elapsed_s = extra.get("samples_per_step"), 0.0
    formats = dict(timeline.get(0, {}))
    for step in run.steps:
        formats |= timeline.get(step.index + 1, {})  # noted when the step has ended
        elapsed_s += step.step_ms / 1e3
        values = {
            metric_names.LOSS: step.loss,
            metric_names.STEP_MS: step.step_ms,
            metric_names.ELAPSED_S: elapsed_s,
            metric_names.SAMPLES_PER_S: samples * 1e3 / step.step_ms if samples and step.step_ms else None,
        }
        yield _row(step.index, {**values, **_shares(formats, parameters)})
        found = evaluations.get(step.index + 1)
        if found is not None:
            yield _row(found.step, {**found.metrics, metric_names.ELAPSED_S: found.elapsed_s})
    end = {
        metric_names.PEAK_BYTES: run.peak_bytes,
        metric_names.WALL_S: elapsed_s,
        metric_names.APPLIED_STEPS: len(run.steps) - run.skipped_steps,
        metric_names.SKIPPED_STEPS: run.skipped_steps,
    }
    yield _row(len(run.steps), end)


def _row(step: int, values: Mapping[str, float | None]) -> Row:
    finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    return {**finite, metric_names.STEP: step}


def _shares(formats: Mapping[str, str], parameters: Mapping[str, int]) -> dict[str, float]:
    values: dict[str, float] = {}
    total = sum(parameters.get(unit, 0) for unit in formats)
    for name in FORMATS if formats else ():
        members = [unit for unit, found in formats.items() if found == name]
        values[metric_names.UNIT_SHARE + name] = len(members) / len(formats)
        if total:
            values[metric_names.PARAMETER_SHARE + name] = sum(parameters.get(unit, 0) for unit in members) / total
    return values


def _send_verdict(
    verdict: Verdict, settings: CompareSettings, state: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    import wandb

    config = {"verdict": verdict.headline, "reasons": list(verdict.reasons), **settings.identity()}
    run = open_run(
        state["project"],
        group=state["group"],
        job_type=COMPARISON,
        name=COMPARISON,
        folder=settings.out,
        config=config,
        say=say,
    )
    try:
        run.log({metric_names.VERDICT: wandb.Table(columns=[*VERDICT_COLUMNS], data=verdict_rows(verdict))})
        run.summary["autoprec/headline"] = verdict.headline
    finally:
        run.finish()


def verdict_rows(verdict: Verdict) -> list[list[str]]:
    """Returns the verdict with ``VERDICT_COLUMNS``, a row for each arm, as text.

    Args:
        verdict: The verdict.
    """
    return [
        [
            arm.arm,
            str(len(arm.seeds)),
            f"{arm.step_ms:.4g}",
            _interval(arm.time_ratio),
            _interval(arm.metric),
            _interval(arm.difference),
            arm.relation,
            "" if arm.peak_bytes is None else f"{arm.peak_bytes / 2**20:.0f}",
            str(arm.skipped_steps),
        ]
        for arm in verdict.arms
    ]


def _interval(estimate: Any) -> str:
    if not math.isfinite(estimate.value):
        return ""
    return f"{estimate.value:.4g}" + (f" ({estimate.low:.4g} to {estimate.high:.4g})" if estimate.is_sure else "")


def _tell(
    names: Sequence[str], settings: CompareSettings, state: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    where = f"group `{state['group']}` of project `{state['project']}`"
    offline = list((settings.out / "wandb").glob("offline-run-*"))
    count = f"{len(names)} run{'' if len(names) == 1 else 's'}" if names else "nothing new"
    sync = f" Offline: `wandb sync {settings.out}/wandb/offline-run-*` sends them." if offline else ""
    say(f"Weights & Biases: {count} in {where}.{sync}")
