"""Folders for tests of reports: records, comparisons and sweeps that nobody has trained."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec import Decision
from autoprec.compare.records import Comparison, Evaluation, Run, Step
from autoprec.compare.store import slug
from autoprec.compare.verdict import judge
from autoprec.progress_reading import ProgressReading, RunInfo, RunTotals, UnitInfo
from autoprec.record_writer import RecordWriter

EVIL = "<script>alert(1)</script>"
GUARD = "guard: it left the range"


def info(units: Sequence[str] = ("0", EVIL), **values: Any) -> RunInfo:
    known: dict[str, Any] = {
        "model": "Net",
        "started_at": "2026-01-01T00:00:00+00:00",
        "command": f"python train.py --name {EVIL}",
        "versions": {"autoprec": "0", "torch": "2"},
        "device": "a CPU",
        "device_type": "cpu",
        "machine": {"cores": 2},
        "policy": "rule",
        "interval": 10,
        "knobs": ("precision", "clip"),
        "masked": {"batch_size": "the loader has its own"},
        "settings": {"rule": {"stages": 1}},
        "base_precision": "32-true",
        "units": tuple(UnitInfo(name=name, kind="linear", parameter_count=100, emulated=("fp16",)) for name in units),
        "formats": dict.fromkeys(units, "fp32"),
        "parameter_count": 100 * len(units),
    }
    return RunInfo(**{**known, **values})


def reading(window: int, **values: Any) -> ProgressReading:
    known: dict[str, Any] = {
        "window": window,
        "global_step": window,
        "epoch": 0,
        "elapsed_s": window / 10,
        "loss": 100.0 / window,
        "grad_norm": 1.0 / window,
        "clip_threshold": 0.5,
        "applied": window,
        "batch_size": 8,
        "step_ms": 100.0,
        "samples_per_s": 80.0,
        "memory_bytes": 2**30,
        "utilisation": 0.5,
    }
    return ProgressReading(**{**known, **values})


def cost(ms: float, **values: Any) -> dict[str, Any]:
    return {"ms": ms, "activation_bytes": 0, "copy_bytes": 0, "implementation": "default", "error": 0.0, **values}


DECISIONS = (
    Decision(10, "precision", "0", "fp32", "bf16", "bf16", "applied", "it is stable"),
    Decision(15, "precision", EVIL, "fp32", "fp16", "fp16", "applied", EVIL),
    Decision(25, "precision", EVIL, "fp16", "fp32", "fp32", "applied", GUARD),
    Decision(30, "precision", "0", "bf16", "int8", "bf16", "refused", "not offered to policies: int8 does not pay"),
    Decision(40, "clip", None, 0.5, -1.0, 0.5, "refused", "must be positive"),
)


def record(folder: Path, ends: bool = True, costs: Mapping[str, Any] | None = None) -> Path:
    """A run of 50 windows in which a unit goes to bf16, and one is raised after it has overflowed in fp16."""
    writer = RecordWriter(folder)
    writer.started(info())
    readings = [
        reading(10, changed={"0": "bf16"}, costs=costs),
        reading(20, changed={EVIL: "fp16"}, loss=math.nan, grad_norm=math.inf, loss_scale=65536.0),
        reading(30, changed={EVIL: "fp32"}, overflows={EVIL: 2}, skipped=1, applied=29, loss_scale=1024.0),
        reading(40, skipped=1, applied=39, loss_scale=1024.0),
    ]
    for each, new in zip(readings, (DECISIONS[:1], DECISIONS[1:2], DECISIONS[2:4], DECISIONS[4:]), strict=True):
        writer.decided(new)
        writer.progressed(each)
    if ends:
        totals = RunTotals(
            ended="finished",
            window=50,
            applied=49,
            skipped=1,
            wall_s=5.0,
            decision_s=0.5,
            peak_bytes=2**31,
            metrics={EVIL: 0.25},
            formats={"0": "bf16", EVIL: "fp32"},
            summary=EVIL,
            history=DECISIONS,
        )
        writer.ended(totals)
    return folder


def _run(arm: str, seed: int, step_ms: float, shift: float) -> Run:
    steps = tuple(
        Step(index=i, step_ms=step_ms * (1 + 0.01 * ((i + seed) % 3)), loss=math.nan if i == 7 else 3.0 / (i + 1))
        for i in range(60)
    )
    metrics = [{"val_loss": 1.0 / (n + 1) + shift + 0.001 * seed} for n in range(3)]
    evaluations = tuple(
        Evaluation(step=20 * (n + 1), elapsed_s=0.02 * (n + 1) * step_ms, metrics=each)
        for n, each in enumerate(metrics)
    )
    return Run(
        arm=arm,
        seed=seed,
        steps=steps,
        evaluations=evaluations,
        peak_bytes=2**27,
        energy_j=3.6e6 if arm == "autoprec" else 7.2e6,
        energy_source="a counter",
        skipped_steps=0,
        formats={"a": "bf16"} if arm == "autoprec" else {},
        final_metric=metrics[-1]["val_loss"],
        environment={"device": "cpu: a CPU", "torch": "2"},
    )


def comparison(folder: Path, task: str = EVIL, ours_ms: float = 8.0) -> Path:
    """Three seeds of two static arms and of autoprec, which is the fastest; its first seed has a record."""
    arms = {"32-true": (12.0, 0.0), "bf16-mixed": (10.0, 0.0001), "autoprec": (ours_ms, 0.0)}
    runs = tuple(_run(arm, seed, ms, shift) for seed in range(3) for arm, (ms, shift) in arms.items())
    settings = {"what": "train.py", "arguments": ["--name", EVIL], "arms": list(arms), "seeds": 3, "metric": "val_loss"}
    compared = Comparison(task=task, runs=runs, settings=settings)
    verdict = judge(compared, metric="val_loss", mode="min", margin=0.01)
    document = {
        **compared.to_dict(),
        "verdict": verdict.to_dict(),
        "refused": {"16-mixed": EVIL},
        "notes": [EVIL],
        "consistency": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(document))
    record(folder / "records" / slug("autoprec", 0))
    return folder


def sweep(folder: Path) -> Path:
    """Four trials with two objectives: two on the front, one that breaks a constraint, one that failed."""
    trial = {"arm": "autoprec", "state": "complete", "params": {EVIL: 0.5}, "seconds": 3.0, "figures": {}}
    trials = [
        {**trial, "number": 0, "values": [1.0, 3.0], "arm": "bf16-mixed", "baseline": "bf16-mixed"},
        {**trial, "number": 1, "values": [2.0, 2.0]},
        {**trial, "number": 2, "values": [0.5, 0.5], "constraints": {"peak_bytes": 1.0}},
        {**trial, "number": 3, "state": "failed", "values": [], "reason": EVIL},
    ]
    document = {
        "version": 1,
        "study": EVIL,
        "objectives": [{"name": EVIL, "direction": "minimize"}, {"name": "val_loss", "direction": "minimize"}],
        "front": [0, 1],
        "best": 1,
        "message": "best: trial 1",
        "trials": trials,
        "something new": 1,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pareto.json").write_text(json.dumps(document))
    (folder / "best.yaml").write_text(f"name: '{EVIL}'\n")
    return folder
