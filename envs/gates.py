"""Gates: what must hold of the proxies before a policy is worth training on them.

Each is a question whose wrong answer made a prototype's results worthless: time that is not scarce, a constant that is
optimal, baselines that lose for want of a clip, errors that predict nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.baselines import Choose, Constant, RandomMoves, Scores, Switched, Table, play
from autoprec.envs.engine import FORMATS
from autoprec.envs.profiles import PROFILES
from autoprec.envs.proxies import Task
from autoprec.envs.simulation import Simulation
from autoprec.envs.twins import Twin
from autoprec.table import TableSettings

Tasks = Sequence[tuple[Task, Twin]]

LEAST_GAIN = 0.05
"""Least distance between the best constant of each task and the best of all."""


@dataclass(frozen=True)
class Gate:
    """The answer to one question.

    Attributes:
        name: What must hold.
        is_passed: Whether it does.
        figures: What was measured.
    """

    name: str
    is_passed: bool
    figures: str


def run_gates(tasks: Tasks) -> Iterator[Gate]:
    """Yields each gate as soon as it is measured.

    Args:
        tasks: Tasks with twins, 40 at least for figures that mean something.
    """
    gates: tuple[Callable[[Tasks], Iterator[Gate]], ...] = (time_is_scarce, hardware_decides, no_constant_is_optimal)
    for gate in (*gates, random_loses, clip_is_not_everything, errors_predict_harm, time_changes_the_answer):
        yield from gate(tasks)


def time_is_scarce(tasks: Tasks) -> Iterator[Gate]:
    """Asks whether more time makes a better model."""
    means = []
    for factor in (0.5, 1.0, 2.0):
        scaled = [(replace(task, budget=round(task.budget * factor)), twin) for task, twin in tasks]
        means.append(float(play(scaled, Constant(format="bf16")).score.mean()))
    text = ", ".join(f"{factor} of the budget {mean:.3f}" for factor, mean in zip((0.5, 1, 2), means, strict=True))
    yield Gate(
        "score rises with the budget", means[0] + LEAST_GAIN < means[1] and means[1] + LEAST_GAIN < means[2], text
    )


def hardware_decides(tasks: Tasks) -> Iterator[Gate]:
    """Asks whether bf16 beats fp32 exactly where it is cheaper: on the task's own device, jitter of layers included."""
    gain = play(tasks, Constant(format="bf16")).score - play(tasks, Constant(format="fp32")).score
    relative = np.array([task.cost[:, FORMATS.index("bf16")].sum() for task, _ in tasks])
    cheaper, dearer = _mean(gain[relative < 1.0]), _mean(gain[relative > 1.0])
    by_profile = (f"{name} {_mean(gain[[task.profile == name for task, _ in tasks]]):+.3f}" for name in PROFILES)
    text = f"cheaper {cheaper:+.3f}, dearer {dearer:+.3f}; by profile " + ", ".join(by_profile)
    yield Gate("bf16 beats fp32 exactly where it is cheaper", cheaper > 0 > dearer, text)


def no_constant_is_optimal(tasks: Tasks) -> Iterator[Gate]:
    """Asks whether tasks differ in what suits them."""
    formats, batches, clips = ("fp32", "bf16", "fp16", "int4"), (8, 16, 32, 64, 128), (1.0, 3.0)
    # the narrowest format of each run goes by the name of the narrowest of all
    grid = [Constant(format=f, batch=b, clip=1.0) for f, b in product(formats, batches)]
    grid += [Constant(format="bf16", batch=32, clip=clip) for clip in clips[1:]]
    scores = np.stack([play(tasks, constant).score for constant in grid])
    best = int(scores.mean(axis=1).argmax())
    gain = float(scores.max(axis=0).mean() - scores[best].mean())
    named = f"{grid[best].format} batch {grid[best].batch}"
    yield Gate(
        f"the best constant of each task is better by {LEAST_GAIN} than the best of all",
        gain >= LEAST_GAIN,
        f"{scores.max(axis=0).mean():.3f} against {scores[best].mean():.3f} ({named}): {gain:.3f}",
    )
    by_batch = np.array([scores[[c.batch == b for c in grid]].mean() for b in batches])
    wins = np.bincount(scores.argmax(axis=0), minlength=len(grid)) / len(tasks)
    text = "by batch size " + ", ".join(f"{b}: {mean:.3f}" for b, mean in zip(batches, by_batch, strict=True))
    is_inside = 0 < int(by_batch.argmax()) < len(batches) - 1
    yield Gate("the best batch size lies inside the range", is_inside, text)
    yield Gate(
        "no constant wins most tasks", float(wins.max()) < 0.5, f"the most frequent winner wins {wins.max():.0%}"
    )


def random_loses(tasks: Tasks) -> Iterator[Gate]:
    """Asks whether knobs matter at all."""
    rivals: dict[str, Choose] = {"fp32": Constant(format="fp32"), "bf16": Constant(format="bf16"), "table": Table()}
    chance = play(tasks, RandomMoves()).score.mean()
    means = {name: play(tasks, rival).score.mean() for name, rival in rivals.items()}
    text = f"random {chance:.3f}, " + ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    yield Gate("random moves lose to every baseline", all(chance < mean for mean in means.values()), text)


def clip_is_not_everything(tasks: Tasks) -> Iterator[Gate]:
    """Asks whether something is left to win when the baseline clips too."""
    plain = play(tasks, Constant(format="fp32", clip=np.inf)).score.mean()
    clipped = play(tasks, Constant(format="fp32", clip=1.0)).score.mean()
    table = play(tasks, Table(settings=TableSettings(schedule=()))).score.mean()
    text = f"fp32 {plain:.3f}, with clip {clipped:.3f}, table with the same clip and batch size {table:.3f}"
    yield Gate("the table beats fp32 that clips as it does", bool(table > clipped + LEAST_GAIN), text)


def errors_predict_harm(tasks: Tasks) -> Iterator[Gate]:
    """Asks whether a format whose measured error is large does harm, where time is out of the question."""
    equal = [(_equally_fast(task), twin) for task, twin in tasks]
    reference = play(equal, Constant(format="fp32")).score
    errors, harms = [], []
    for name in ("bf16", "fp16", "fp8-unscaled", "fp8", "int8", "fp4", "int4"):
        format_index = FORMATS.index(name)
        chosen = [index for index, (task, _) in enumerate(equal) if format_index in task.ladder]
        if len(chosen) < 4:
            continue
        watched = _Watched(Constant(format=name))
        played: Scores = play([equal[index] for index in chosen], watched)
        errors.append(watched.largest(format_index))
        harms.append(reference[chosen] - played.score)
    error, harm = np.concatenate(errors), np.concatenate(harms)
    small, large = harm[error < 0.1], harm[error >= 0.1]
    rho = _rank_correlation(error, harm)
    text = f"harm {_mean(small):.3f} below an error of 0.1, {_mean(large):.3f} above; rank correlation {rho:.2f}"
    is_passed = _mean(large) > _mean(small) + LEAST_GAIN and abs(_mean(small)) < LEAST_GAIN and rho > 0.2
    yield Gate("the error relative to the centred signal predicts harm", bool(is_passed), text)


def time_changes_the_answer(tasks: Tasks) -> Iterator[Gate]:
    """Asks whether precision is worth more early where ranges settle, and late where runs converge; at equal speed."""
    questions = (
        ("drift", "fp8-unscaled", "precision is worth more early where ranges drift and settle", 1.0),
        ("late", "int4", "precision is worth more late where runs are long and the learning rate falls", -1.0),
    )
    for regime, narrow, name, sign in questions:
        wanted = [pair for pair in tasks if pair[0].regime == regime and _has_level(pair[0], narrow)]
        if not wanted:
            yield Gate(name, False, f"no {regime} task has a format as narrow as {narrow}")
            continue
        equal = [(_equally_fast(task), twin) for task, twin in wanted]
        early = play(equal, Switched(first=Constant(format="bf16"), then=Constant(format=narrow))).score
        late = play(equal, Switched(first=Constant(format=narrow), then=Constant(format="bf16"))).score
        text = f"{len(equal)} tasks: bf16 in the first half {early.mean():.3f}, in the second {late.mean():.3f}"
        yield Gate(name, bool(sign * _mean(early - late) > 0), text)


def _has_level(task: Task, narrow: str) -> bool:
    four_bits = narrow != "int4" or task.ladder[-1] >= FORMATS.index("fp4")
    return four_bits and task.ladder[-1] > FORMATS.index("bf16")


class _Watched:
    """Looks at errors while something else sets the knobs."""

    def __init__(self, choose: Constant) -> None:
        self._choose = choose
        self._seen: list[NDArray[np.float64]] = []

    def __call__(self, simulation: Simulation) -> None:
        errors = np.where(simulation.is_unit[:, :, None], simulation.worst_errors(), np.nan)
        self._seen.append(errors)
        self._choose(simulation)
        simulation.probes = np.ones(len(simulation), dtype=bool)

    def largest(self, format_index: int) -> NDArray[np.float64]:
        """The median over the run of the largest error over units."""
        by_window = np.stack([np.nanmax(seen[:, :, format_index], axis=1) for seen in self._seen])
        return np.asarray(np.median(by_window, axis=0))


def _equally_fast(task: Task) -> Task:
    cost = np.repeat(task.cost[:, :1], len(FORMATS), axis=1)
    return replace(task, cost=cost, table=cost, cast_cost=0.0, switch_cost=0.0, probe_cost=0.0)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else 0.0


def _rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    ranks = np.stack([values.argsort().argsort() for values in (a, b)]).astype(np.float64)
    return float(np.asarray(np.corrcoef(ranks))[0, 1])
