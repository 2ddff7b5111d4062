"""A training of the user's own module as an environment of gymnasium.

Behind it is a real ``Trainer.fit`` under the callback: an episode is a fit, a step is the stretch from one decision to
the next. What lives here: spaces, rewards and the life of an episode. What does not: the fit (``episode``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from numpy.typing import NDArray

from autoprec.config import AutoPrecisionConfig
from autoprec.encoding import FEATURES, LIMIT
from autoprec.envs.episode import Course, EpisodeSettings, Report
from autoprec.envs.heldout import HeldOut
from autoprec.envs.paused_thread import PausedThread
from autoprec.envs.reward import LEAST_PROGRESS, SCORE_RANGE, RewardWeights, is_diverged, progress, reward, score
from autoprec.envs.step_cost import StepCost
from autoprec.envs.training_setup import SetupSource, Source
from autoprec.feature_rows import RUN_KNOBS
from autoprec.knobs import KNOBS
from autoprec.moved_table import MODES, Mode

Array = NDArray[Any]

_LEAST_LOSS = math.ulp(0.0)
"""What stands for a loss of 0, which has no logarithm."""


@dataclass(frozen=True)
class TrainingTwin:
    """What the same training does in fp32, nobody steering: the unit of rewards.

    Args:
        first_loss: Loss before training.
        last_loss: Loss at its end.
        time: Time that it took.
    """

    first_loss: float
    last_loss: float
    time: float

    def __post_init__(self) -> None:
        """Validates the fields."""
        if not (0.0 < self.first_loss < math.inf and 0.0 < self.time < math.inf and 0.0 <= self.last_loss < math.inf):
            raise ValueError(
                f"The fp32 twin gave {self}. Rewards are falls of the log loss in its time: the losses must be finite"
                " and not negative, the first one and the time above 0. Pass `metric=` to choose another held-out loss."
            )

    @property
    def progress(self) -> float:
        """Fall of the log loss, ``LEAST_PROGRESS`` at least, so that no reward explodes."""
        fall = math.log(self.first_loss) - math.log(max(self.last_loss, _LEAST_LOSS))
        return max(fall, LEAST_PROGRESS)


class TrainingEnv(gymnasium.Env[Array, Array]):
    """Steers the training of a LightningModule, from one decision of the callback to the next.

    ``reset`` begins a fit and lets it run to its first decision. Two episodes with the same seed and the same actions
    are the same bit for bit, given ``cost`` and ``Trainer(deterministic=True)``; otherwise the clock has a say in
    rewards and in costs of layers. Nothing is left behind in the process: after every call random generators, flags of
    torch and the caller's module are as they were.

    ## Observation space

    ``Box(-LIMIT, LIMIT, (rows * features,), float32)``: ``autoprec.encoding`` of the run, as the live callback makes
    it, row by row: one for each unit, then loss scale, batch size and clip. ``observation.reshape(env.rows, -1)`` has a
    row for each knob. At the end of an episode it is that of the last decision.

    ## Action space

    ``MultiDiscrete([3] * rows)``: 0 lowers the knob of a row, 1 keeps it, 2 raises it, from what the table proposes or
    from where it is (``mode``). ``action_masks`` says which of them lead somewhere.

    ## Reward

    Fall of the log loss in units of the twin's, within [-1, 1], minus the share of the twin's time that the step took,
    minus 1 for divergence. The loss is held-out if the module validates, else the mean of the training losses of the
    step. The twin is trained once, in fp32, at the first reset.

    ## End of an episode

    Terminated: the fit is over, its budget of time is spent, or it diverged. Truncated: never by itself;
    ``gymnasium.make(..., max_episode_steps=...)`` does.

    Args:
        make: A function that returns (LightningModule, data, Trainer arguments), with a parameter ``seed`` if it likes;
            the text ``module:function`` or ``file.py:function`` of one; or a pair (LightningModule, data) or a triple
            with Trainer arguments, which are copied for each episode.
        interval: Applied optimizer steps between decisions.
        budget: Optimizer steps of the twin. An episode trains as long as the twin's time for them lasts, whatever the
            Trainer's arguments say. ``None``: as long as these say, in whatever time.
        mode: ``"offset"``: actions are relative to what the table proposes, as those of the learned policy are in a
            live run; ``"ladder"``: to where knobs are.
        knobs: What may be moved.
        config: Settings of the callback.
        cost: Time of a batch from formats and batch size; ``None`` to go by the clock.
        metric: Name of the held-out loss; ``None`` for ``val_loss``, else the first with a loss in its name.
        weights: What rewards weigh.
        twin: The twin of another environment of the same training, so that it is not trained again.
        render_mode: ``None``; there is nothing to see.

    Raises:
        TargetError: If a text names no function.
        TypeError: If ``make`` is nothing that can be trained.
        ValueError: If an argument is out of range.
    """

    metadata = {"render_modes": []}

    def __init__(
        self,
        make: Source,
        *,
        interval: int = 50,
        budget: int | None = None,
        mode: Mode = "offset",
        knobs: Sequence[str] = KNOBS,
        config: AutoPrecisionConfig | None = None,
        cost: StepCost | None = None,
        metric: str | None = None,
        weights: RewardWeights | None = None,
        twin: TrainingTwin | None = None,
        render_mode: None = None,
    ) -> None:
        if budget is not None and (not isinstance(budget, Integral) or isinstance(budget, bool) or budget < 1):
            raise ValueError(f"Passed `TrainingEnv(budget={budget!r})`. It must be a number of optimizer steps >= 1.")
        if mode not in MODES:
            raise ValueError(f"Passed `TrainingEnv(mode={mode!r})`. Modes are {MODES}.")
        self.weights, self.render_mode = weights or RewardWeights(), render_mode
        settings = EpisodeSettings(
            interval=interval,
            budget=budget,
            mode=mode,
            knobs=tuple(knobs),
            config=config or AutoPrecisionConfig(),
            cost=cost,
        )
        source = SetupSource(make)
        self._course = Course(source, HeldOut(source, metric), settings)
        self._twin = twin
        self._thread: PausedThread[Report] | None = None
        self._report: Report | None = None
        self._is_closed = False
        self._seed = 0
        self.unit_names: tuple[str, ...] = self._probe()
        """Names of the units, in the order of their rows."""
        self._course = replace(self._course, units=len(self.unit_names))
        self.rows = len(self.unit_names) + RUN_KNOBS
        """Number of knobs."""
        self.observation_space = gymnasium.spaces.Box(-LIMIT, LIMIT, (self.rows * len(FEATURES),), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([3] * self.rows)

    # ---- what gymnasium asks for ----

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begins a fit and lets it run to its first decision.

        Args:
            seed: Of the environment; the seed of each training is drawn from it.
            options: Of no effect.

        Raises:
            RuntimeError: If the fit ends before a first decision.
            BaseException: What the user's code raised.
        """
        super().reset(seed=seed)
        if self._is_closed:
            raise ClosedEnvironmentError("The environment is closed. Make a new one.")
        self._end_episode()
        twin = self.twin
        budget = None if self._course.settings.budget is None else twin.time
        self._seed = int(self.np_random.integers(2**31))
        body = partial(self._course.run_episode, seed=self._seed, budget=budget)
        self._thread = PausedThread(body, "autoprec-episode")
        report = self._resume(None)
        if report.ending is not None:
            self._end_episode()
            raise RuntimeError(
                f"The fit {_ENDED[report.ending]} before its first decision, which follows `interval`"
                f" ({self._course.settings.interval}) applied optimizer steps and one more that is measured. Pass a"
                " smaller `interval`, or let it train longer."
            )
        return self._observation(report), self._info(report)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Moves the knobs and lets the fit run to its next decision, or to its end.

        Args:
            action: ``[rows]``: 0 lowers, 1 keeps, 2 raises.

        Raises:
            ResetNeeded: If no episode is under way.
            ValueError: If the action is not in the action space.
            BaseException: What the user's code raised; the episode is over then.
        """
        if self._report is None:
            raise ResetNeeded("No episode is under way. Call `reset` first.")
        before, moves = self._report, self._moves(action)
        after = self._resume(moves)
        has_diverged = bool(is_diverged(np.array(after.loss), np.array(after.first_loss)))
        is_over = has_diverged or after.ending is not None
        value = self._reward(before, after, has_diverged)
        observation, info = self._observation(after), self._info(after)
        if is_over:
            info |= {"score": self._score(after, has_diverged), "diverged": has_diverged}
            self._end_episode()
        return observation, value, is_over, False, info

    def close(self) -> None:
        """Ends the fit that is under way. May be called twice."""
        self._end_episode()
        self._course.held_out.close()
        self._is_closed = True

    # ---- what policies may ask ----

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns ``[rows * 3]``: which actions lead somewhere; ``sb3_contrib`` asks for it."""
        if self._report is None or self._report.masks is None:
            raise ResetNeeded("No episode is under way. Call `reset` first.")
        masks: NDArray[np.bool_] = self._report.masks.reshape(-1).copy()
        return masks

    @property
    def twin(self) -> TrainingTwin:
        """The fp32 twin; it is trained when it is first asked for."""
        if self._twin is None:
            last: Report = PausedThread(self._course.run_twin, "autoprec-twin").resume()
            self._twin = TrainingTwin(last.first_loss, last.loss, last.time)
        return self._twin

    # ---- inside ----

    def _probe(self) -> tuple[str, ...]:
        thread: PausedThread[None] = PausedThread(self._course.probe, "autoprec-probe")
        try:
            names: tuple[str, ...] = thread.resume()
        finally:
            thread.stop()
        return names

    def _resume(self, moves: Array | None) -> Report:
        assert self._thread is not None
        try:
            report: Report = self._thread.resume(moves)
        except BaseException:
            self._end_episode()
            raise
        self._report = report
        return report

    def _end_episode(self) -> None:
        thread, self._thread, self._report = self._thread, None, None
        if thread is not None:
            thread.stop()

    def _moves(self, action: Any) -> NDArray[np.int64]:
        actions = np.asarray(action)
        if actions.shape != (self.rows,) or not np.isin(actions, (0, 1, 2)).all():
            raise ValueError(
                f"Passed `step({action!r})`. There must be {self.rows} actions, each 0 (lower), 1 (keep) or 2 (raise)."
            )
        return actions.astype(np.int64) - 1

    def _observation(self, report: Report) -> Array:
        assert report.observation is not None
        flat: Array = report.observation.reshape(-1).copy()
        return flat

    def _reward(self, before: Report, after: Report, has_diverged: bool) -> float:
        made = progress(_positive(before.loss), _positive(after.loss), np.array(self.twin.progress))
        share = min((after.time - before.time) / self.twin.time, 1.0)
        paid = reward(made, np.array(share), np.array(after.memory), np.array(has_diverged), self.weights)
        return float(paid)

    def _score(self, report: Report, has_diverged: bool) -> float:
        if has_diverged:
            return SCORE_RANGE[0]
        return float(score(_positive(report.first_loss), _positive(report.loss), np.array(self.twin.progress)))

    def _info(self, report: Report) -> dict[str, Any]:
        facts = {name: dict(value) if isinstance(value, dict) else value for name, value in report.facts.items()}
        ending = {} if report.ending is None else {"ending": report.ending}
        return {"seed": self._seed, "loss": report.loss, "time_share": report.time / self.twin.time, **facts, **ending}


def _positive(loss: float) -> Array:
    return np.array(loss if math.isnan(loss) else max(loss, _LEAST_LOSS))


_ENDED = {"finished": "ended", "budget": "spent its budget of time", "diverged": "diverged"}
