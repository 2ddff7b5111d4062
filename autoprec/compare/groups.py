"""The runs of one seed, in turns, from their processes to records.

A run that fails is a result with an error; only a target that cannot be trained at all ends the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from autoprec.compare.arms import Arm
from autoprec.compare.checks import SUFFIX
from autoprec.compare.messages import Done, Finish, Ready, Turn
from autoprec.compare.records import Evaluation, Run, Step
from autoprec.compare.session import RunSpec, train
from autoprec.compare.settings import CompareSettings
from autoprec.compare.store import Store, Stored
from autoprec.compare.turns import Job, Plan, RunError, Worker, open_workers, take_turns
from autoprec.json_files import encoded
from autoprec.target_functions import TargetError

NOT_RUNNABLE = "not runnable: "
DIVERGED = "diverged: "

CONSISTENCY_VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "AUTOPREC_ISA": "avx2"}
"""What makes torch, oneDNN and autoprec's kernels use AVX2 and nothing above it."""


class Watcher(Protocol):
    """Who is told how far runs are."""

    def on_start(self, arm: str, seed: int, ready: Ready) -> None:
        """A run stands before its first step."""

    def on_turn(self, arm: str, seed: int, steps: int, loss: float | None) -> None:
        """A run has taken steps."""

    def on_end(self, run: Run) -> None:
        """A run has ended, one way or another."""


@dataclass
class RunUnderWay:
    """What one run has given so far.

    Args:
        arm: How it trains.
        seed: Its seed.
        name: Name of the arm in results.
        ready: What it said before its first step.
        step_s: Seconds of each step.
        losses: Training loss of each step.
        changes: Steps before which formats changed.
        evaluations: What its validations gave.
        formats: Format of each unit.
        error: Why it ended early.
        done: What it ended with.
    """

    arm: Arm
    seed: int
    name: str
    ready: Ready | None = None
    step_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    timeline: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    done: Done | None = None

    def add(self, turn: Turn) -> None:
        """Adds the steps of a turn."""
        self.step_s += turn.step_s
        self.losses += turn.losses
        self.evaluations = turn.evaluations or self.evaluations
        for step, formats in turn.formats:
            changed = {unit: name for unit, name in formats.items() if self.formats.get(unit) != name}
            self.timeline.append((step, changed))
            self.formats = formats
            self.changes += [step] if step else []

    def fail(self, error: RunError) -> None:
        """Keeps why the run failed."""
        reason = next(iter(error.reason.strip().splitlines()), "no message")
        self.error = f"failed after step {len(self.step_s)}: {reason}" if self.step_s else f"{NOT_RUNNABLE}{reason}"

    def stored(self) -> Stored:
        """Returns the record of the run."""
        done = self.done or Done(None)
        extra = dict(done.extra)
        evaluations = [Evaluation(**entry) for entry in extra.pop("evaluations", [])] or self.evaluations
        run = Run(
            arm=self.name,
            seed=self.seed,
            steps=tuple(
                Step(index=index, step_ms=1e3 * seconds, loss=loss)
                for index, (seconds, loss) in enumerate(zip(self.step_s, self.losses, strict=True))
            ),
            evaluations=tuple(evaluations),
            peak_bytes=done.peak_bytes,
            energy_j=extra.pop("energy_j", None),
            energy_source=extra.pop("energy_source", None),
            skipped_steps=done.skipped_steps,
            formats=extra.pop("formats", None) or self.formats,
            error=self.error or _divergence(self.losses),
            environment=extra.pop("environment", {}),
        )
        kept = {
            "first_change": min(self.changes, default=None),
            "parameters": self.ready and self.ready.parameters,
            "timeline": self.timeline,
            "unit_parameters": done.unit_parameters,
        }
        return Stored(run, encoded({**kept, **extra}))


def run_group(
    settings: CompareSettings,
    store: Store,
    arms: Sequence[Arm],
    seed: int,
    plan: Plan,
    watcher: Watcher,
    suffix: str = "",
) -> tuple[int, int]:
    """Trains some arms with one seed, in turns, and stores each run when it has ended.

    Args:
        settings: What is compared.
        store: Where finished runs go.
        arms: The arms.
        seed: The seed of all of them.
        plan: How long runs go on.
        watcher: Is told how far they are.
        suffix: Added to the names of arms; with one, the runs use the instructions of ``CONSISTENCY_VARIABLES``.

    Returns:
        The steps that runs took which did not end by themselves, and those of a turn.

    Raises:
        TargetError: If the target cannot be trained at all.
    """
    jobs = [_job(settings, store, arm, seed, suffix) for arm in arms]
    with open_workers(jobs) as workers:
        runs = {worker: RunUnderWay(arm, seed, arm.name + suffix) for worker, arm in zip(workers, arms, strict=True)}
        for worker, run in runs.items():
            try:
                run.ready = worker.receive(Ready)
                watcher.on_start(run.name, seed, run.ready)
            except RunError as error:
                _fail(run, error)

        def add_turn(worker: Worker, turn: Turn) -> None:
            runs[worker].add(turn)
            watcher.on_turn(runs[worker].name, seed, len(turn.step_s), next(iter(turn.losses[-1:]), None))

        taken = take_turns(
            [worker for worker, run in runs.items() if run.error is None],
            plan,
            add_turn,
            on_failure=lambda worker, error: _fail(runs[worker], error),
        )
        for worker, run in runs.items():
            if run.error is None:
                try:
                    run.done = worker.ask(Finish(), Done)
                except RunError as error:
                    _fail(run, error)
            stored = run.stored()
            store.add(stored)
            watcher.on_end(stored.run)
    for run in runs.values():
        store.clear_work(run.name, seed)
    return taken


def _job(settings: CompareSettings, store: Store, arm: Arm, seed: int, suffix: str) -> Job:
    name = arm.name + suffix
    spec = RunSpec(
        target=settings.target,
        arm=arm,
        seed=seed,
        folder=store.path("work", name, seed),
        outputs=store.path("outputs", name, seed, SUFFIX),
        record=store.new_record(name, seed),
        threads=settings.threads,
        clock=settings.used_clock,
        interval=settings.interval,
        every=settings.evaluate_every,
        steps=settings.steps,
    )
    environment = CONSISTENCY_VARIABLES if suffix else None
    log = store.path("logs", name, seed, ".log")
    return Job(f"{name}/seed {seed}", partial(train, spec), log, settings.threads, environment)


def _fail(run: RunUnderWay, error: RunError) -> None:
    if error.is_target:
        raise TargetError(error.reason) from error
    run.fail(error)


def _divergence(losses: Sequence[float | None]) -> str | None:
    known = [(step, loss) for step, loss in enumerate(losses) if loss is not None]
    if not known or math.isfinite(known[-1][1]):
        return None
    first = max((step + 1 for step, loss in known if math.isfinite(loss)), default=0)
    return f"{DIVERGED}the training loss is not finite from step {first} on"


def extra_of(store: Store, arm: str, seed: int) -> dict[str, Any]:
    """Returns what a stored run said besides its record, nothing where there is none."""
    stored = store.runs.get((arm, seed))
    return stored.extra if stored is not None else {}
