"""The demo's results as JSON: every number behind the table, and what is needed to repeat the run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoprec.demo.results import RunResult
from autoprec.demo.summary import TaskSummary, plain_words


def write_json(
    path: Path, about: dict[str, Any], summaries: Sequence[TaskSummary], runs: Sequence[RunResult], seconds: float
) -> None:
    """Writes the results. Numbers that are not finite become null.

    Args:
        path: The file.
        about: Circumstances and settings.
        summaries: What came out of the tasks.
        runs: Results of all runs.
        seconds: Duration of the demo.
    """
    document = about | {
        "seconds": seconds,
        "tasks": [_task(summary) for summary in summaries],
        "runs": [_run(run) for run in runs],
    }
    path.write_text(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")


def _task(summary: TaskSummary) -> dict[str, Any]:
    derived = {
        "step_ratio": summary.ratio.median,
        "whole_run_ratio": summary.whole_ratio,
        "loss_diff": summary.difference.value,
        "skipped": summary.skipped,
    }
    return asdict(summary) | derived | {"words": plain_words(summary)}


def _run(run: RunResult) -> dict[str, Any]:
    points = [{"step": step, "seconds": seconds, "loss": loss} for step, seconds, loss in run.points]
    changes = [{"step": step, "formats": formats} for step, formats in run.format_changes]
    derived = {"final_loss": run.final_loss, "seconds": run.seconds, "format_shares": run.format_shares()}
    return asdict(run) | {"points": points, "format_changes": changes} | derived


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
