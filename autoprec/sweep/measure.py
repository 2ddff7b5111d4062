"""One trial: its runs, each in a process of its own, and the figures that they give."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import TIMEOUT_MAX, Timer
from typing import Any

from autoprec.compare.arms import Arm
from autoprec.compare.gate import TRAIN_LOSS, Clock, steered_callback
from autoprec.compare.groups import NOT_RUNNABLE, RunUnderWay
from autoprec.compare.messages import Done, Finish, Ready, Turn
from autoprec.compare.records import Run
from autoprec.compare.session import RunSpec, Session, train_session
from autoprec.compare.targets import Target
from autoprec.compare.turns import Job, Plan, RunError, Worker, open_workers, take_turns
from autoprec.json_files import write_json
from autoprec.sweep.config import PEAK, SECONDS, STEP_MS, STEP_TIME_RATIO
from autoprec.target_functions import TargetError

MAP_FILE, LOG_FILE, RECORD = "map.yaml", "log.txt", "record"
SKIPPED = "skipped_steps"
_DIVERGED = ("NonFiniteTrainingError", "DivergedTrainingError")
_GIVEN_UP = 50
_WARMUP = 10
_LATE_S = 0.1


class UnusableError(Exception):
    """A trial has no figures, for a reason that lies in its values: it diverged, or its arm cannot run here."""


class FailedTrialError(Exception):
    """A trial broke down: its process ended, or the user's code raised."""


@dataclass(frozen=True)
class TrialSpec:
    """What a trial trains.

    Args:
        target: The training, arguments included.
        arm: How it trains.
        reference: Trains beside it for the ratio of step times, ``None`` where nobody asks for it.
        seeds: How many seeds.
        folder: The trial's own.
        threads: Threads for one operation.
        clock: What measures steps on a CPU.
        steps: Most optimizer steps.
        every: Steps between validations.
        seconds: Most seconds for all seeds together.
    """

    target: Target
    arm: Arm
    reference: Arm | None
    seeds: int
    folder: Path
    threads: int = 1
    clock: Clock = "wall"
    steps: int | None = None
    every: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Progress:
    """How far a trial is.

    Args:
        seed: Which seed trains.
        step: Steps of all seeds so far.
        steps: Steps of all seeds, ``None`` where that is not known.
        loss: Latest training loss.
        metrics: Metrics of validations, by the step in which they were made; all seeds so far.
    """

    seed: int
    step: int
    steps: int | None
    loss: float | None
    metrics: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Measured:
    """What the runs of a trial gave.

    Args:
        figures: Means over seeds, by name.
        by_seed: Final metrics of each seed, by name.
        environment: Device and versions.
        formats: Format of each unit at the end, of the last seed.
    """

    figures: dict[str, float]
    by_seed: dict[str, list[float]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)


OnProgress = Callable[[Progress], object]


def measure(spec: TrialSpec, on_progress: OnProgress = lambda now: None) -> Measured:
    """Trains all seeds of a trial and returns its figures. What ``on_progress`` raises ends it.

    Args:
        spec: What to train.
        on_progress: Is told how far it is.

    Raises:
        UnusableError: If it diverged, took too long, or its arm cannot run here.
        FailedTrialError: If its process ended, or the user's code raised.
        TargetError: If the target cannot be trained at all.
    """
    ends = math.inf if spec.seconds is None else time.monotonic() + spec.seconds
    figures: list[dict[str, float]] = []
    run = None
    before = 0
    for seed in range(spec.seeds):
        own, reference = _train_seed(spec, seed, ends, before, on_progress)
        before += len(own.step_s)
        run = own.stored().run
        extra = own.stored().extra
        write_json(spec.folder / f"seed-{seed}.json", {"run": run.to_dict(), "extra": extra}, allow_nan=False)
        figures.append(_figures(spec, own, run, reference))
    assert run is not None
    names = [name for name in figures[0] if all(name in each for each in figures)]
    by_seed = {name: [each[name] for each in figures] for name in names}
    means = {name: math.fsum(values) / len(values) for name, values in by_seed.items()}
    return Measured(means, by_seed, run.environment, run.formats)


def _train_seed(
    spec: TrialSpec, seed: int, ends: float, before: int, on_progress: OnProgress
) -> tuple[RunUnderWay, RunUnderWay | None]:
    own, reference = RunUnderWay(spec.arm, seed, spec.arm.name), None
    jobs = [_job(spec, spec.arm, seed, LOG_FILE)]
    if spec.reference is not None and spec.reference.name != spec.arm.name:
        reference = RunUnderWay(spec.reference, seed, spec.reference.name)
        jobs.append(_job(spec, spec.reference, seed, f"reference-{LOG_FILE}"))
    try:
        with open_workers(jobs) as workers, _ending(workers, ends):
            runs = dict(zip(workers, [own] if reference is None else [own, reference], strict=True))
            _take_all_turns(spec, runs, seed, ends, before, on_progress)
    except RunError as error:
        if time.monotonic() > ends:
            raise _took_too_long(spec, before + len(own.step_s)) from error
        raise _ended(own, error) from error
    finally:
        shutil.rmtree(spec.folder / "work", ignore_errors=True)
    return own, reference


@contextmanager
def _ending(workers: Sequence[Worker], ends: float) -> Iterator[None]:
    """Ends the processes when the time is up, also those that hang in the user's code."""
    if math.isinf(ends):
        yield
        return

    def end() -> None:
        for worker in workers:
            worker.end()

    timer = Timer(min(max(0.0, ends - time.monotonic()) + _LATE_S, TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _took_too_long(spec: TrialSpec, step: int) -> UnusableError:
    return UnusableError(f"took longer than {spec.seconds:g} s: given up after step {step}")


def _take_all_turns(
    spec: TrialSpec, runs: dict[Worker, RunUnderWay], seed: int, ends: float, before: int, on_progress: OnProgress
) -> None:
    worker, own = next(iter(runs.items()))
    for each, run in runs.items():
        try:
            run.ready = each.receive(Ready)
        except RunError as error:
            _fail_reference(own, run, error)
    assert own.ready is not None
    planned = [steps for steps in (spec.steps, own.ready.steps) if steps is not None]
    total = min(planned) * spec.seeds if planned else None

    def on_turn(each: Worker, turn: Turn) -> None:
        runs[each].add(turn)
        if each is not worker:
            return
        if time.monotonic() > ends:
            raise _took_too_long(spec, before + len(own.step_s))
        _check_losses(own.losses)
        metrics = {before + found.step: found.metrics for found in own.evaluations}
        loss = next(iter(own.losses[-1:]), None)
        on_progress(Progress(seed, before + len(own.step_s), total, loss, metrics))

    able = [each for each, run in runs.items() if run.error is None]
    plan = Plan(spec.steps, None, math.inf)
    take_turns(able, plan, on_turn, on_failure=lambda each, error: _fail_reference(own, runs[each], error))
    own.done = worker.ask(Finish(), Done)


def _fail_reference(own: RunUnderWay, run: RunUnderWay, error: RunError) -> None:
    if run is own:
        raise error
    run.fail(error)


def _check_losses(losses: Sequence[float | None]) -> None:
    last = [loss for loss in losses[-_GIVEN_UP:] if loss is not None]
    if len(last) == _GIVEN_UP and not any(map(math.isfinite, last)):
        raise UnusableError(f"diverged: the training loss is not finite from step {_first_bad(losses)} on")


def _first_bad(losses: Sequence[float | None]) -> int:
    finite = [step for step, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    return finite[-1] + 1 if finite else 0


def _ended(own: RunUnderWay, error: RunError) -> Exception:
    reason = next(iter(error.reason.strip().splitlines()), "no message")
    if error.is_target:
        return TargetError(reason)
    if reason.startswith(_DIVERGED):
        return UnusableError(f"diverged: {reason}")
    if own.ready is None and not own.arm.is_steered:
        return UnusableError(f"{NOT_RUNNABLE}{reason}")
    where = f"after step {len(own.step_s)}" if own.step_s else "before its first step"
    return FailedTrialError(f"failed {where}: {reason}")


def _figures(spec: TrialSpec, own: RunUnderWay, run: Run, reference: RunUnderWay | None) -> dict[str, float]:
    if run.error is not None:
        raise UnusableError(run.error)
    found = dict(run.evaluations[-1].metrics) if run.evaluations else {}
    losses = [step.loss for step in run.steps if step.loss is not None]
    if losses:
        found.setdefault(TRAIN_LOSS, losses[-1])
    found[SECONDS] = math.fsum(own.step_s)
    found[STEP_MS] = 1e3 * _median(own, _warmup(own))
    found[SKIPPED] = float(run.skipped_steps)
    if run.peak_bytes is not None:
        found[PEAK] = float(run.peak_bytes)
    if reference is not None and reference.error is not None:
        raise UnusableError(f"the reference {reference.name} gives no step time: {reference.error}")
    if reference is not None:
        warmup = _warmup(own)
        found[STEP_TIME_RATIO] = _median(own, warmup) / _median(reference, warmup)
    elif spec.reference is not None:
        found[STEP_TIME_RATIO] = 1.0  # it is the reference
    return found


def _warmup(own: RunUnderWay) -> int:
    # before its first decision autoprec trains as its base does, which is no step time of what it decides
    steps = len(own.step_s)
    wanted = max([_WARMUP, *(step + 1 for step in own.changes[:1])])
    return wanted if wanted <= steps // 2 else min(_WARMUP, steps // 4)


def _median(run: RunUnderWay, warmup: int) -> float:
    return statistics.median(run.step_s[warmup:] or run.step_s or [math.nan])


def _job(spec: TrialSpec, arm: Arm, seed: int, log: str) -> Job:
    is_own = arm is spec.arm
    work = spec.folder / "work" / f"{arm.name}-{seed}".replace(":", "-")
    run = RunSpec(
        target=spec.target,
        arm=arm,
        seed=seed,
        folder=work,
        outputs=work / "outputs.safetensors",
        record=(spec.folder if is_own else work) / RECORD / f"seed-{seed}",
        threads=spec.threads,
        clock=spec.clock,
        every=spec.every,
        steps=spec.steps,
    )
    spec.folder.mkdir(parents=True, exist_ok=True)
    body = partial(_train, run, spec.folder / MAP_FILE if is_own else None)
    log_file = spec.folder / (log if seed == 0 else f"seed-{seed}-{log}")
    return Job(f"{arm.name}/seed {seed}", body, log_file, spec.threads)


def _train(spec: RunSpec, map_file: Path | None, connection: Connection) -> Done:
    return train_session(_TrialSession(spec, map_file, connection))


class _TrialSession(Session):
    """Keeps the map of the trained model besides."""

    def __init__(self, spec: RunSpec, map_file: Path | None, connection: Connection) -> None:
        super().__init__(spec, connection)
        self._map_file = map_file

    def after_fit(self, trainer: Any, arguments: dict[str, Any]) -> None:
        """Keeps what a fit gave, and the map of the first one."""
        steered = steered_callback(trainer)
        if self.done is None and steered is not None and self._map_file is not None:
            steered.save_map(self._map_file)
        super().after_fit(trainer, arguments)
