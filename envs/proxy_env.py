"""Many proxy runs as one vectorised environment of stable-baselines3, a row for every knob.

Each run has a row for each unit, then one each for loss scale, batch size and clip. Rows see what
``autoprec.encoding`` makes of a run, and act with lower / keep / raise: as an offset to what a table proposes, or as a
move from where the knob is. All rows of a run share its reward and end together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from autoprec.encoding import CLIP_MULTIPLIERS
from autoprec.envs.observing import memory_share, observe
from autoprec.envs.proxies import BATCH_SIZES, Bank, Task
from autoprec.envs.reward import RewardWeights, is_diverged, progress, reward, score
from autoprec.envs.row_vec_env import RowVecEnv
from autoprec.envs.simulation import Simulation
from autoprec.envs.table_choice import proposed_knobs, proposed_levels
from autoprec.envs.twins import Twin, bank_twins
from autoprec.feature_rows import places
from autoprec.table import TableSettings

Array = NDArray[Any]

MODES = ("offset", "ladder")
HOLD = 4
"""Decisions that the guard holds a unit it has raised."""
MAX_SCALE = 2.0**24


class ProxyVecEnv(RowVecEnv):
    """Steps many proxy runs at once.

    Actions: 0 lowers, 1 keeps, 2 raises. The environment plays tasks at random, or in order and each once
    (``is_shuffled=False``: for evaluation; runs that have played all of theirs stand still and are ``done`` for good).

    Args:
        tasks: Tasks with their twins; from :func:`load_tasks`. Runs share them out by number of units.
        runs: How many run side by side.
        mode: ``offset``: an action is relative to the table's proposal; ``ladder``: to where the knob is.
        settings: The table's parameters.
        weights: What rewards weigh.
        guard: Raises the unit that overflowed first, and holds it.
        max_decisions: Ends an episode early, as a time limit does (``TimeLimit.truncated``).
        is_shuffled: Whether tasks are drawn at random and forever.
        seed: Of the order of tasks.
        threads: Threads to share runs out to.

    Raises:
        ValueError: If there are no tasks, a mode is not known, or a limit is below 1.
    """

    def __init__(
        self,
        tasks: Sequence[tuple[Task, Twin]],
        *,
        runs: int = 48,
        mode: str = "offset",
        settings: TableSettings | None = None,
        weights: RewardWeights | None = None,
        guard: bool = True,
        max_decisions: int | None = None,
        is_shuffled: bool = True,
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"Passed `ProxyVecEnv(mode={mode!r})`. Modes are {MODES}.")
        if not tasks or runs < 1:
            raise ValueError(f"Passed `ProxyVecEnv` {len(tasks)} tasks and runs={runs}. It needs one of each at least.")
        if max_decisions is not None and not max_decisions >= 1:
            raise ValueError(f"Passed `ProxyVecEnv(max_decisions={max_decisions!r})`. It is `None`, or 1 at least.")
        self.mode, self.settings, self.weights = mode, settings or TableSettings(), weights or RewardWeights()
        self.guard, self.max_decisions, self._is_shuffled, self._seed = guard, max_decisions, is_shuffled, seed
        self._queues, self._threads = _shared_out(tasks, runs), threads
        units = np.array([queue[0][0].units for queue in self._queues])
        self._at = places(np.repeat(np.arange(len(units)), units), len(units))
        self.run_of_row = self._at.run
        """The run that each row belongs to."""
        self._simulation: Simulation | None = None
        self._actions: Array = np.ones(len(self._at.run), dtype=np.int64)
        super().__init__(len(self._at.run))

    # ---- what VecEnv asks for ----

    def reset(self) -> NDArray[np.float32]:
        """Begins every run anew and returns the first rows."""
        if self._seeds[0] is not None:
            self._seed = int(self._seeds[0])
        self._reset_seeds()
        self._rng = np.random.Generator(np.random.PCG64(self._seed))
        runs = len(self._queues)
        self._next = np.zeros(runs, dtype=np.int64)
        self._order = [self._shuffled(len(queue)) for queue in self._queues]
        first = [self._draw(index) for index in range(runs)]
        if self._simulation is not None:
            self._simulation.close()
        self._simulation = Simulation([task for task, _ in first], threads=self._threads)
        shape = self._simulation.is_unit.shape
        self._hold = np.zeros(shape, dtype=np.int64)
        self._twin_progress = np.array([twin.progress for _, twin in first])
        self._decisions, self._skipped, self._attempted = np.zeros((3, runs), dtype=np.int64)
        self._returns = np.zeros(runs)
        self.is_idle = np.zeros(runs, dtype=bool)
        """Runs that have no task left."""
        self._proposed: tuple[Array, Array, Array, Array] | None = None
        self.simulation.restart({index: task for index, (task, _) in enumerate(first)})
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return self._observe()

    def step_async(self, actions: Array) -> None:
        """Takes one action for each row."""
        self._actions = self.checked(actions).astype(np.int64) - 1

    def step_wait(self) -> VecEnvStepReturn:
        """Runs one window of every run."""
        s = self.simulation
        time_before, loss_before = s.time.copy(), s.loss.copy()
        self._apply(self._actions)
        self._proposed = None
        s.probes = s.due_probes(self.settings.probe_every)
        s.advance(~self.is_idle)
        self._hold_offenders()
        self._count()
        diverged = is_diverged(s.loss, s.first_loss) & ~self.is_idle
        made = progress(loss_before, s.loss, self._twin_progress)
        rewards = reward(made, (s.time - time_before) / s.budget, memory_share(s), diverged, self.weights)
        rewards = np.where(self.is_idle, 0.0, rewards)
        self._returns += rewards
        is_over = (s.time >= s.budget - 1e-9) | diverged
        is_cut = ~is_over & (self._decisions >= self.max_decisions) if self.max_decisions else np.zeros_like(is_over)
        done = is_over | is_cut | self.is_idle
        return self._finish(rewards, done, is_cut, diverged)

    def close(self) -> None:
        """Frees every run. May be called twice."""
        if self._simulation is not None:
            self._simulation.close()
            self._simulation = None

    # ---- what policies may ask ----

    @property
    def simulation(self) -> Simulation:
        """The runs behind the rows."""
        if self._simulation is None:
            raise RuntimeError("The environment was not reset, or it is closed. Call `reset` first.")
        return self._simulation

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns ``[rows, 3]``: which actions are legal; ``sb3_contrib`` asks for it."""
        low, high = self._legal_moves(self._base())
        return np.stack([low, np.ones_like(low), high], axis=1)

    def proposals(self) -> tuple[Array, Array, Array, Array]:
        """Returns what the table proposes: levels ``[runs, units]``, loss scales, batch and clip indices ``[runs]``."""
        if self._proposed is None:
            self._proposed = self._propose()
        return self._proposed

    # ---- inside ----

    def _propose(self) -> tuple[Array, Array, Array, Array]:
        s, settings = self.simulation, self.settings
        levels = proposed_levels(s, settings)
        levels = np.where(self._hold > 0, np.minimum(levels, s.level), levels)
        return levels, *proposed_knobs(s, settings, levels)

    def _apply(self, moves: Array) -> None:
        s, low_high = self.simulation, self._legal_moves(self._base())
        moves = np.where(moves < 0, moves * low_high[0], moves * low_high[1])
        unit_moves = np.zeros(s.is_unit.shape, dtype=np.int64)
        unit_moves[s.is_unit] = moves[self._at.units]
        scale_move, batch_move, clip_move = moves[self._at.knobs].T
        level, scale, batch, clip = self._base()
        wanted = np.clip(level - unit_moves, 0, (s.levels - 1)[:, None])  # a lower level is a wider format
        s.level = np.where(s.is_unit, np.where(self._hold > 0, np.minimum(wanted, s.level), wanted), 0)
        s.loss_scale = np.clip(scale * 2.0**scale_move, 1.0, MAX_SCALE)
        s.batch_index = np.clip(batch + batch_move, 0, len(BATCH_SIZES) - 1)
        s.clip_index = np.clip(clip + clip_move, 0, len(CLIP_MULTIPLIERS) - 1)

    def _base(self) -> tuple[Array, Array, Array, Array]:
        s = self.simulation
        return self.proposals() if self.mode == "offset" else (s.level, s.loss_scale, s.batch_index, s.clip_index)

    def _legal_moves(self, base: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        """``[rows]``: which knobs may be lowered and which raised, from levels, loss scales, batch and clip indices."""
        s = self.simulation
        level, scale, batch, clip = base
        low, high = np.zeros((2, self.num_envs), dtype=bool)
        low[self._at.units] = ((level < (s.levels - 1)[:, None]) & (self._hold == 0))[s.is_unit]
        high[self._at.units] = (level > 0)[s.is_unit]
        low[self._at.knobs] = np.stack([scale > 1.0, batch > 0, clip > 0], axis=1)
        last = (scale < MAX_SCALE, batch < len(BATCH_SIZES) - 1, clip < len(CLIP_MULTIPLIERS) - 1)
        high[self._at.knobs] = np.stack(last, axis=1)
        return low, high

    def _hold_offenders(self) -> None:
        s, windows = self.simulation, self.simulation.windows
        self._hold = np.maximum(self._hold - 1, 0)
        if not self.guard:
            return
        (runs,) = np.nonzero((windows["first_unit"] >= 0) & ~self.is_idle)
        units = windows["first_unit"][runs]
        s.level[runs, units] = np.maximum(s.level[runs, units] - 1, 0)
        self._hold[runs, units] = HOLD

    def _count(self) -> None:
        windows = self.simulation.windows
        self._decisions += ~self.is_idle
        self._skipped += windows["skipped"]
        self._attempted += windows["steps"]

    def _observe(self) -> NDArray[np.float32]:
        s = self.simulation
        low, high = self._legal_moves((s.level, s.loss_scale, s.batch_index, s.clip_index))  # as live rows have it
        level, scale, batch, clip = self.proposals()
        proposal = np.zeros(self.num_envs)
        proposal[self._at.units] = (s.level - level)[s.is_unit]
        scale_moves = np.log2(np.maximum(scale, 1.0) / np.maximum(s.loss_scale, 1.0))
        proposal[self._at.knobs] = np.stack([scale_moves, batch - s.batch_index, clip - s.clip_index], axis=1)
        return observe(s, self._at, self._hold > 0, proposal, low, high)

    def _finish(self, rewards: Array, done: Array, is_cut: Array, diverged: Array) -> VecEnvStepReturn:
        observation = self._observe()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended = np.flatnonzero(done & ~self.is_idle)
        for run in ended:
            summary = self._summary(int(run), bool(diverged[run]))
            for row in np.flatnonzero(self._at.run == run):
                infos[row] = {
                    "terminal_observation": observation[row].copy(),
                    "TimeLimit.truncated": bool(is_cut[run]),
                    **summary,
                }
        if len(ended):
            self._begin_next(ended)
            observation = self._observe()
        return observation, rewards[self._at.run].astype(np.float32), done[self._at.run], infos

    def _summary(self, run: int, diverged: bool) -> dict[str, Any]:
        s = self.simulation
        value = score(s.first_loss[run], s.loss[run], self._twin_progress[run])
        return {
            "episode": {"r": float(self._returns[run]), "l": int(self._decisions[run]), "t": float(s.time[run])},
            "score": -2.0 if diverged else float(value),
            "seed": s.tasks[run].seed,
            "diverged": diverged,
            "steps": int(self._attempted[run]),
            "skipped": int(self._skipped[run]),
        }

    def _begin_next(self, ended: Array) -> None:
        chosen = {}
        for run in map(int, ended):
            if not self._is_shuffled and self._next[run] >= len(self._queues[run]):
                self.is_idle[run] = True
                continue
            chosen[run], twin = self._draw(run)
            self._twin_progress[run] = twin.progress
        self._hold[ended] = 0
        for counts in (self._decisions, self._skipped, self._attempted, self._returns):
            counts[ended] = 0
        self._proposed = None
        if chosen:
            self.simulation.restart(chosen)

    def _draw(self, run: int) -> tuple[Task, Twin]:
        queue, order = self._queues[run], self._order[run]
        place = int(self._next[run])
        if place >= len(queue):
            self._order[run], place = self._shuffled(len(queue)), 0
            order = self._order[run]
        self._next[run] = place + 1
        return queue[int(order[place])]

    def _shuffled(self, size: int) -> Array:
        return self._rng.permutation(size) if self._is_shuffled else np.arange(size)


def load_tasks(bank: Bank, **options: Any) -> list[tuple[Task, Twin]]:
    """Returns the usable tasks of a bank with their twins, which are trained and kept on disk where they are missing.

    Args:
        bank: The bank.
        options: See ``twins.bank_twins``.
    """
    return [(bank[index], twin) for index, twin in enumerate(bank_twins(bank, **options)) if twin.is_usable]


def _shared_out(tasks: Iterable[tuple[Task, Twin]], runs: int) -> list[list[tuple[Task, Twin]]]:
    """Gives each run tasks with one number of units; numbers of units get runs by how many tasks have them."""
    groups: dict[int, list[tuple[Task, Twin]]] = {}
    for pair in tasks:
        groups.setdefault(pair[0].units, []).append(pair)
    sizes = {units: len(group) for units, group in sorted(groups.items())}
    queues: list[list[tuple[Task, Twin]]] = []
    given = dict.fromkeys(sizes, 0)
    for _ in range(max(runs, len(sizes))):  # the next run goes where tasks wait longest
        units = max(sizes, key=lambda u: (given[u] == 0, sizes[u] / (given[u] + 1)))
        given[units] += 1
    for units, count in given.items():
        queues += [groups[units][start::count] for start in range(count)]
    return [queue for queue in queues if queue]
