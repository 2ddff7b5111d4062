"""Plays anything that turns rows into moves on proxy tasks, and records what it did.

What lives here: a policy, or "accept what the table proposes", from the first to the last window of each task. What
does not: hand-made settings that write knobs by themselves (``autoprec.envs.baselines``) and what scores mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, overload, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from autoprec.envs.baselines import Scores
from autoprec.envs.proxies import Task
from autoprec.envs.proxy_env import ProxyVecEnv
from autoprec.envs.reward import is_diverged, score
from autoprec.envs.simulation import Simulation
from autoprec.envs.twins import Twin
from autoprec.table import TableSettings

Array = NDArray[Any]
Decide = Callable[[NDArray[np.float32]], Array]
"""From rows ``[rows, features]`` to moves -1, 0 or 1 ``[rows]``."""

CHUNK = 64
"""Tasks that run side by side. Those of a chunk are about equally long, so that few wait for the last one."""


@runtime_checkable
class RunPolicy(Protocol):
    """A way to decide that remembers something about each run, or sets knobs before the first window."""

    def start(self, env: ProxyVecEnv) -> None:
        """Begins a chunk of runs; ``env.run_of_row`` says which rows belong together."""

    def __call__(self, rows: NDArray[np.float32]) -> Array:
        """Returns a move -1, 0 or 1 for each row."""


@dataclass(frozen=True, eq=False)
class Recording:
    """What happened in each window of each task; arrays are ``[windows, tasks]``, or ``[windows, tasks, units]``.

    Numbers behind the end of a run and beyond a task's units are -1 where they are whole, else NaN.

    Attributes:
        tasks: The tasks, in their order.
        is_played: Whether a task had that many windows.
        share: Share of the budget that was over before the window.
        steps: Steps of the window.
        skipped: Those that were skipped.
        step_time: Time of one of them, in fp32 steps at the base batch size.
        loss: Held-out loss after the window.
        norm: Global gradient norm of the last step.
        loss_scale: Loss scale after the window.
        batch: Index of the batch size in ``BATCH_SIZES``.
        clip: Index of the clip in ``CLIP_MULTIPLIERS``.
        offender: Unit that overflowed first, -1 if none did.
        knob_moves: ``[windows, tasks, 3]``: moves asked for, of loss scale, batch size and clip.
        level: ``[..., units]``: place of each unit's format in the task's ladder, 0 is fp32.
        formats: Engine's index of that format.
        overflows: Overflows of each unit in the window.
        gradient_norm: Norm of each unit's gradient in the last step.
        gradient_amax: Largest unscaled gradient of each unit in the window.
        activation_amax: Largest activation of each unit in the last step.
        error: Measured error of each unit in its format, from the latest probe.
        unit_moves: Moves asked for.
    """

    tasks: tuple[Task, ...]
    is_played: Array
    share: Array
    steps: Array
    skipped: Array
    step_time: Array
    loss: Array
    norm: Array
    loss_scale: Array
    batch: Array
    clip: Array
    offender: Array
    knob_moves: Array
    level: Array
    formats: Array
    overflows: Array
    gradient_norm: Array
    gradient_amax: Array
    activation_amax: Array
    error: Array
    unit_moves: Array


@overload
def play_policy(
    tasks: Sequence[tuple[Task, Twin]],
    network: nn.Module | Decide | None,
    settings: TableSettings | None = ...,
    *,
    mode: str = ...,
    guard: bool = ...,
    sampled: int | None = ...,
    record: Literal[False] = ...,
    progress: Callable[[int], None] | None = ...,
) -> Scores: ...


@overload
def play_policy(
    tasks: Sequence[tuple[Task, Twin]],
    network: nn.Module | Decide | None,
    settings: TableSettings | None = ...,
    *,
    mode: str = ...,
    guard: bool = ...,
    sampled: int | None = ...,
    record: Literal[True],
    progress: Callable[[int], None] | None = ...,
) -> tuple[Scores, Recording]: ...


def play_policy(
    tasks: Sequence[tuple[Task, Twin]],
    network: nn.Module | Decide | None,
    settings: TableSettings | None = None,
    *,
    mode: str = "offset",
    guard: bool = True,
    sampled: int | None = None,
    record: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Scores | tuple[Scores, Recording]:
    """Plays each task once, to the end of its budget.

    Args:
        tasks: Tasks with their twins.
        network: What decides: a network from rows to logits ``[rows, 3]`` of lower, keep and raise; a policy of
            stable-baselines3; a function from rows to moves; or ``None`` for keep everywhere, which is the table.
        settings: The table's parameters.
        mode: Whether moves are relative to the table's proposal (``offset``) or to where knobs are (``ladder``).
        guard: Whether the unit that overflowed first is raised and held.
        sampled: Seed of a private generator that moves of a network are drawn with; ``None`` takes the likeliest.
        record: Whether to return what happened in each window as well.
        progress: Called with the number of tasks that are done, chunk by chunk.

    Returns:
        Scores in the order of the tasks, and the recording if it was asked for.
    """
    decide = deciding(network, sampled)
    order = sorted(range(len(tasks)), key=lambda index: tasks[index][0].budget / tasks[index][0].steps)
    parts: list[Scores] = []
    recordings: list[dict[str, Array]] = []
    places: list[int] = []
    for start in range(0, len(order), CHUNK):
        chunk = order[start : start + CHUNK]
        env = ProxyVecEnv(
            [tasks[index] for index in chunk],
            runs=len(chunk),
            mode=mode,
            settings=settings,
            guard=guard,
            is_shuffled=False,
        )
        try:
            scores, seen, played = _play_chunk(env, [tasks[index] for index in chunk], decide, record)
        finally:
            env.close()
        parts.append(scores)
        recordings.append(seen)
        places += [chunk[index] for index in played]
        if progress is not None:
            progress(len(places))
    back = np.argsort(places)
    scores = Scores(*(np.concatenate(columns)[back] for columns in zip(*parts, strict=True)))
    return (scores, _joined([task for task, _ in tasks], recordings, back)) if record else scores


def deciding(network: nn.Module | Decide | None, sampled: int | None = None) -> Decide:
    """Returns a function from rows to moves.

    Args:
        network: See :func:`play_policy`.
        sampled: See :func:`play_policy`.
    """
    if network is None:
        return lambda rows: np.zeros(len(rows), dtype=np.int64)
    if isinstance(network, nn.Module):
        return _Network(network, sampled)
    return network


class _Network:
    """Turns the logits of a network, or the actions of a policy of stable-baselines3, into moves."""

    def __init__(self, network: nn.Module, sampled: int | None) -> None:
        self._network, self._rng = network, None if sampled is None else np.random.Generator(np.random.PCG64(sampled))

    def __call__(self, rows: NDArray[np.float32]) -> Array:
        logits = self._logits(torch.from_numpy(rows))
        if self._rng is not None:
            logits = logits + self._rng.gumbel(size=logits.shape)
        return np.asarray(logits.argmax(axis=1)) - 1

    @torch.no_grad()
    def _logits(self, rows: torch.Tensor) -> Array:
        distribution = getattr(self._network, "get_distribution", None)  # stable-baselines3 has its logits there
        logits = self._network(rows) if distribution is None else distribution(rows).distribution.logits
        return np.asarray(logits.double().numpy())


def _play_chunk(
    env: ProxyVecEnv, tasks: Sequence[tuple[Task, Twin]], decide: Decide, record: bool
) -> tuple[Scores, dict[str, Array], list[int]]:
    """Returns scores, what was seen, and which of the tasks each run played. Every run plays one task."""
    rows: Any = env.reset()
    simulation = env.simulation
    played = _places(simulation.tasks, [task for task, _ in tasks])
    if isinstance(decide, RunPolicy):
        decide.start(env)
    steps, skipped, level, windows = np.zeros((4, len(simulation)))
    diverged = np.zeros(len(simulation), dtype=bool)
    seen: list[dict[str, Array]] = []
    while not env.is_idle.all():
        active, share = ~env.is_idle, simulation.share
        moves = decide(rows)
        env.step_async(moves + 1)
        rows = env.step_wait()[0]
        ran = active & (simulation.windows["steps"] > 0)
        levels = _levels_of_window(simulation, ran)
        steps += simulation.windows["steps"] * active
        skipped += simulation.windows["skipped"] * active
        level += active * levels.sum(axis=1) / simulation.is_unit.sum(axis=1)
        windows += active
        diverged |= active & is_diverged(simulation.loss, simulation.first_loss)
        if record:
            seen.append(_window(env, active, share, levels, moves))
    made = np.array([tasks[index][1].progress for index in played])
    scores = np.where(diverged, -2.0, score(simulation.first_loss, simulation.loss, made))
    found = Scores(scores, diverged, steps, skipped, level / np.maximum(windows, 1))
    return found, _stacked(seen), played


def _places(tasks: Sequence[Task], wanted: Sequence[Task]) -> list[int]:
    """Where each of the tasks is among those wanted; a task may be there more than once."""
    left: dict[int, list[int]] = {}
    for index, task in enumerate(wanted):
        left.setdefault(id(task), []).append(index)
    return [left[id(task)].pop(0) for task in tasks]


def _levels_of_window(s: Simulation, ran: Array) -> Array:
    """Levels that the last window ran at: the guard may have raised a unit since."""
    of_format = (s.ladder[:, None, :] == s.last_formats[:, :, None]).argmax(axis=2)
    return np.where(s.is_unit, np.where(ran[:, None], of_format, s.level), 0)


def _window(env: ProxyVecEnv, active: Array, share: Array, level: Array, moves: Array) -> dict[str, Array]:
    s, units = env.simulation, env.simulation.is_unit.shape[1]
    windows, is_unit = s.windows, s.is_unit & active[:, None]
    formats = np.take_along_axis(s.ladder, level, axis=1)
    by_row = _by_run(env, moves)
    whole = {
        "steps": windows["steps"],
        "skipped": windows["skipped"],
        "batch": s.batch_index,
        "clip": s.clip_index,
        "offender": np.where(windows["steps"] > 0, windows["first_unit"], -1),
    }
    real = {"share": share, "step_time": s.last_time, "loss": s.loss, "loss_scale": s.loss_scale}
    whole_of_units = {"level": level, "formats": formats, "overflows": windows["overflows"][:, :units].sum(axis=2)}
    real_of_units = {
        "gradient_norm": s.gradient_norm[:, :, -1],
        "gradient_amax": windows["gradient_amax"][:, :units],
        "activation_amax": s.activation_amax[:, :, -1],
        "error": np.take_along_axis(s.worst_errors(), formats[:, :, None], axis=2)[:, :, 0],
    }
    return {
        "is_played": active,
        **{name: np.where(active, values, -1) for name, values in whole.items()},
        **{name: np.where(active, values, np.nan) for name, values in {**real, "norm": s.norms[:, -1]}.items()},
        **{name: np.where(is_unit, values, -1) for name, values in whole_of_units.items()},
        **{name: np.where(is_unit, values, np.nan) for name, values in real_of_units.items()},
        "unit_moves": np.where(is_unit, by_row[:, :units], 0),
        "knob_moves": np.where(active[:, None], by_row[:, units:], 0),
    }


def _by_run(env: ProxyVecEnv, moves: Array) -> Array:
    """``[runs, units + 3]``: moves of rows, units padded with 0."""
    is_unit = env.simulation.is_unit
    by_run = np.zeros((len(is_unit), is_unit.shape[1] + 3), dtype=np.int64)
    knobs = np.ones((len(is_unit), 3), dtype=bool)
    # rows of a run are its units, then its knobs
    by_run[np.concatenate([is_unit, knobs], axis=1)] = moves
    return by_run


def _stacked(seen: list[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.stack([window[name] for window in seen]) for name in (seen[0] if seen else ())}


def _joined(tasks: Sequence[Task], recordings: list[dict[str, Array]], back: Array) -> Recording:
    length = max(len(seen["is_played"]) for seen in recordings)
    units = max(seen["level"].shape[2] for seen in recordings)
    columns = {
        field.name: np.concatenate(list(_padded(field.name, recordings, length, units)), axis=1)[:, back]
        for field in fields(Recording)
        if field.name != "tasks"
    }
    return Recording(tasks=tuple(tasks), **columns)


def _padded(name: str, recordings: list[dict[str, Array]], length: int, units: int) -> Iterator[Array]:
    for seen in recordings:
        values = seen[name]
        shape = (length, values.shape[1], *(() if values.ndim == 2 else (units if name != "knob_moves" else 3,)))
        fill: Any = np.nan if values.dtype.kind == "f" else -1
        if values.dtype.kind == "b" or name.endswith("_moves"):
            fill = 0
        padded = np.full(shape, fill, dtype=values.dtype)
        padded[tuple(map(slice, values.shape))] = values
        yield padded
