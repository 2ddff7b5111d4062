"""The vectorised environment: what stable-baselines3 expects of it, masks, determinism, and one encoding for all.

Time budget: 60 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoprec.encoding import CLIP_MULTIPLIERS, FEATURES, GlobalReading, UnitReading, encode
from autoprec.envs.baselines import Constant, RandomMoves, Table, play
from autoprec.envs.engine import FORMATS
from autoprec.envs.proxies import Bank, Distribution, Task, draw_task
from autoprec.envs.reward import RewardWeights
from autoprec.envs.simulation import Simulation
from autoprec.envs.twins import Twin, run_twins
from autoprec.feature_rows import INDEX
from autoprec.readings import LAYER_KINDS
from autoprec.table import propose_levels, propose_scale
from autoprec.trends import Rows, drift_bits, finite, relative_change, spread, spread_around_drift
from tests.kernels import needs_cpu_kernels

pytest.importorskip("stable_baselines3")
pytest.importorskip("gymnasium")
from autoprec.envs.proxy_env import HOLD, ProxyVecEnv

pytestmark = needs_cpu_kernels

SMALL = Distribution(units=(3, 4), widths=(32,), budget=48, late_budget=64, steps=8, late_steps=8)


@pytest.fixture(scope="module")
def tasks() -> list[tuple[Task, Twin]]:
    drawn = list(Bank("train", 12, SMALL))
    # short runs make little progress; what a twin is worth is of no matter here
    return [
        (task, Twin(twin.first_loss, twin.first_loss / 1.5)) for task, twin in zip(drawn, run_twins(drawn), strict=True)
    ]


@pytest.fixture
def env(tasks: list[tuple[Task, Twin]]) -> Iterator[ProxyVecEnv]:
    made = ProxyVecEnv(tasks, runs=6, seed=5)
    yield made
    made.close()


def keep(env: ProxyVecEnv) -> Any:
    return np.ones(env.num_envs, dtype=np.int64)


def reset(env: ProxyVecEnv) -> Any:
    return env.reset()


def step(env: ProxyVecEnv, actions: Any) -> Any:
    return env.step(actions)


def random_actions(env: ProxyVecEnv, rng: np.random.Generator) -> Any:
    return rng.integers(0, 3, env.num_envs)


def test_rows_follow_the_runs(env: ProxyVecEnv) -> None:
    observation = reset(env)
    assert observation.shape == (env.num_envs, len(FEATURES))
    assert env.observation_space.contains(observation[0])
    for run, task in enumerate(env.simulation.tasks):
        rows = observation[env.run_of_row == run]
        kinds = rows[:, INDEX["knob_precision"] : INDEX["knob_precision"] + 4].argmax(axis=1)
        assert kinds.tolist() == [0] * task.units + [1, 2, 3]


def test_episodes_end_as_stable_baselines_expects(env: ProxyVecEnv) -> None:
    before, ended = reset(env), 0
    for _ in range(30):
        after, rewards, dones, infos = step(env, keep(env))
        assert np.isfinite(after).all()
        assert np.isfinite(rewards).all()
        for run in range(len(env.simulation)):
            rows = np.flatnonzero(env.run_of_row == run)
            assert len(set(dones[rows].tolist())) == len(set(rewards[rows].tolist())) == 1
            if dones[rows[0]]:
                ended += 1
                last = np.stack([infos[row]["terminal_observation"] for row in rows])
                assert not infos[rows[0]]["TimeLimit.truncated"]
                assert last[0, INDEX["progress"]] == 1.0 or infos[rows[0]]["diverged"]
                assert after[rows[0], INDEX["progress"]] < 0.5  # the next episode has begun
                assert {"r", "l", "t"} <= infos[rows[0]]["episode"].keys()
            else:
                assert all(infos[row] == {} for row in rows)
        before = after
    assert ended > 6
    assert before.shape == after.shape


def test_a_time_limit_truncates(tasks: list[tuple[Task, Twin]]) -> None:
    env = ProxyVecEnv(tasks, runs=4, max_decisions=2)
    reset(env)
    step(env, keep(env))
    _, _, dones, infos = step(env, keep(env))
    assert dones.all()
    assert all(info["TimeLimit.truncated"] for info in infos)
    env.close()


def test_rewards_sum_to_progress_less_the_budget(tasks: list[tuple[Task, Twin]]) -> None:
    env = ProxyVecEnv(tasks, runs=len(tasks), is_shuffled=False)
    reset(env)
    s = env.simulation
    start_share, start_loss = s.share.copy(), s.loss.copy()
    totals, seen = np.zeros(len(s)), np.zeros(len(s), dtype=bool)
    first_rows = [int(np.flatnonzero(env.run_of_row == run)[0]) for run in range(len(s))]
    made = {run: env._queues[run][0][1].progress for run in range(len(s))}
    for _ in range(60):
        _, rewards, dones, infos = step(env, keep(env))
        totals += np.where(seen, 0.0, rewards[first_rows])
        for run, row in enumerate(first_rows):
            if dones[row] and not seen[run]:
                seen[run] = True
                gained = np.log(start_loss[run] / s.loss[run]) / made[run]
                if not infos[row]["diverged"]:
                    assert totals[run] == pytest.approx(gained - (1.0 - start_share[run]), abs=1e-4)
                    assert infos[row]["episode"]["r"] == pytest.approx(totals[run], abs=1e-4)
    assert seen.all()
    assert env.is_idle.all()  # every task was played once
    assert step(env, keep(env))[2].all()
    env.close()


def roll(env: ProxyVecEnv, seed: int) -> list[Any]:
    env.seed(seed)
    rng, seen = np.random.default_rng(0), [reset(env)]
    for _ in range(12):
        observation, rewards, dones, _ = step(env, random_actions(env, rng))
        seen += [observation, rewards, dones]
    return seen


def test_a_seed_fixes_everything(tasks: list[tuple[Task, Twin]]) -> None:
    one, other = ProxyVecEnv(tasks, runs=5), ProxyVecEnv(tasks, runs=5, threads=2)
    first = roll(one, 3)
    for again in (roll(other, 3), roll(one, 3)):
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(first, roll(one, 4), strict=True))
    one.close()
    other.close()


@pytest.mark.parametrize("mode", ["offset", "ladder"])
def test_masks_say_which_moves_lead_somewhere(tasks: list[tuple[Task, Twin]], mode: str) -> None:
    env, rng = ProxyVecEnv(tasks, runs=6, mode=mode), np.random.default_rng(1)
    observation = reset(env)
    for _ in range(10):
        masks = env.action_masks()
        assert masks[:, 1].all()
        if mode == "ladder":  # rows say what may be done from where knobs are, masks from what moves are relative to
            np.testing.assert_array_equal(masks[:, 0], observation[:, INDEX["can_lower"]] == 1.0)
            np.testing.assert_array_equal(masks[:, 2], observation[:, INDEX["can_raise"]] == 1.0)
        else:
            clip, last_of_run = env.proposals()[3], np.flatnonzero(np.diff(env.run_of_row, append=-1))
            np.testing.assert_array_equal(masks[last_of_run, 0], clip > 0)
            np.testing.assert_array_equal(masks[last_of_run, 2], clip < len(CLIP_MULTIPLIERS) - 1)
        observation, *_ = step(env, random_actions(env, rng))
        s = env.simulation
        assert ((s.level >= 0) & (s.level < s.levels[:, None])).all()
        assert ((s.batch_index >= 0) & (s.clip_index >= 0) & (s.clip_index < len(CLIP_MULTIPLIERS))).all()
    assert not env.action_masks().all()
    env.close()


def test_features_say_where_knobs_can_go_from_where_they_are(tasks: list[tuple[Task, Twin]]) -> None:
    env, rng = ProxyVecEnv(tasks, runs=6, guard=False), np.random.default_rng(1)
    observation = reset(env)
    for _ in range(10):
        s = env.simulation
        is_unit = observation[:, INDEX["knob_precision"]] == 1.0
        np.testing.assert_array_equal(
            observation[is_unit, INDEX["can_lower"]], (s.level < s.levels[:, None] - 1)[s.is_unit]
        )
        np.testing.assert_array_equal(observation[is_unit, INDEX["can_raise"]], (s.level > 0)[s.is_unit])
        is_batch = observation[:, INDEX["knob_batch_size"]] == 1.0
        np.testing.assert_array_equal(observation[is_batch, INDEX["can_lower"]], s.batch_index > 0)
        observation, *_ = step(env, random_actions(env, rng))
    env.close()


def test_in_ladder_mode_keep_keeps_and_lower_lowers(tasks: list[tuple[Task, Twin]]) -> None:
    env = ProxyVecEnv(tasks, runs=4, mode="ladder", guard=False, max_decisions=50)
    reset(env)
    s = env.simulation
    before = (s.level.copy(), s.batch_index.copy(), s.clip_index.copy())
    env._apply(np.zeros(env.num_envs, dtype=np.int64))
    for old, new in zip(before, (s.level, s.batch_index, s.clip_index), strict=True):
        np.testing.assert_array_equal(old, new)
    env._apply(np.full(env.num_envs, -1))
    assert (s.level[s.is_unit] == 1).all()  # one format narrower than fp32
    assert (s.batch_index == before[1] - 1).all()
    assert (s.clip_index == before[2] - 1).all()
    env.close()


def test_keep_in_offset_mode_takes_the_proposal(env: ProxyVecEnv) -> None:
    reset(env)
    for _ in range(4):
        level, scale, batch, clip = env.proposals()
        env._apply(np.zeros(env.num_envs, dtype=np.int64))
        s = env.simulation
        np.testing.assert_array_equal(s.level[s.is_unit], level[s.is_unit])
        np.testing.assert_array_equal(s.batch_index, batch)
        np.testing.assert_array_equal(s.clip_index, clip)
        np.testing.assert_array_equal(s.loss_scale, np.clip(scale, 1.0, 2.0**24))
        step(env, keep(env))


def test_the_guard_raises_the_offender_and_holds_it() -> None:
    task = draw_task(1, Distribution(units=(3,), architectures={"mlp": 1.0}, regimes=(1, 0, 0)))
    spec = task.spec.copy()
    spec["event_count"], spec["activation_bits"], spec["activation_mean"], spec["gradient_bits"] = 0, 0.0, 0.0, 0.0
    spec["activation_bits"][1] = 40.0  # beyond fp16, within bf16
    spec["loss_factor"] = 1.0
    ladder = tuple(map(FORMATS.index, ("fp32", "bf16", "fp16")))
    env = ProxyVecEnv([(replace(task, spec=spec, ladder=ladder), Twin(2.0, 1.0))], runs=1, mode="ladder")
    reset(env)
    s = env.simulation
    s.level[:] = 2
    step(env, keep(env))
    assert (s.windows["first_unit"][0], s.windows["first_tensor"][0]) == (1, 0)
    assert s.level[0].tolist() == [2, 1, 2]
    for _ in range(HOLD):
        assert not env.action_masks()[1, 0]
        assert step(env, keep(env))[0][1, INDEX["held"]] == (env._hold[0, 1] > 0)
    assert s.windows["skipped"][0] == 0
    assert env.action_masks()[1, 0]
    env.close()


def readings_of(s: Simulation, run: int, env: ProxyVecEnv) -> tuple[list[UnitReading], GlobalReading]:
    """What a live run would have been told, as far as it is told the same."""
    task, window = s.tasks[run], s.windows[run]
    legal = tuple(FORMATS[index] for index in task.ladder)
    units = []
    for u in range(task.units):
        format_name = FORMATS[s.formats[run, u]]
        seen = s.activation_amax[run, u, -16:]
        overflow_count = int(window["overflows"][u].sum())
        units.append(
            UnitReading(
                name=str(u), kind=LAYER_KINDS[task.kinds[u]], depth=task.depth[u], legal=legal, format=format_name,
                parameter_share=task.parameter_share[u], compute_share=task.compute_share[u],
                grad_amax=float(window["gradient_amax"][u]), grad_norm=float(s.gradient_norm[run, u, -1]),
                grad_norm_history=tuple(finite(s.gradient_norm[run, u])),
                act_amax=float(np.fmax.reduce(np.where(seen > 0, seen, np.nan))),
                steps_since_change=int(s.since_change[run, u]), overflow_count=overflow_count,
                nonfinite_count=overflow_count, held=bool(env._hold[run, u] > 0),
            )
        )  # fmt: skip
    known = np.isfinite(s.losses[run])
    norms = tuple(s.norms[run][known])
    median = float(np.median(finite(norms)))
    return units, GlobalReading(
        losses=tuple(s.losses[run][known]), loss_scale=float(s.loss_scale[run]), norms=norms,
        loss_scale_history=tuple(s.scales[run][known]), progress=float(s.share[run]),
        batch_size=int(2 ** (3 + s.batch_index[run])), clip_threshold=CLIP_MULTIPLIERS[s.clip_index[run]] * median,
        applied_share=1.0 - float(window["skipped"] / window["steps"]),
        clipped_share=float(window["clipped"] / window["steps"]), growth_tracker=int(window["growth_tracker"]),
    )  # fmt: skip


def test_rows_are_those_that_a_live_run_would_see() -> None:
    plain = Distribution(units=(3,), widths=(32,), ladders=(0, 1, 1, 0, 0), regimes=(1, 0, 0), budget=96)
    drawn = list(Bank("train", 4, plain))
    env = ProxyVecEnv([(task, Twin(2.0, 1.0)) for task in drawn], runs=4, mode="ladder")
    reset(env)
    rng = np.random.default_rng(0)
    for _ in range(4):
        observation, *_ = step(env, random_actions(env, rng))
    told = [
        *("format_fp32", "format_bf16", "format_fp16", "format_fp8", "format_int8", "depth", "parameter_share"),
        *("compute_share", "grad_headroom", "grad_headroom_lower", "act_headroom", "act_headroom_lower", "grad_cv"),
        *("grad_trend", "grad_readings", "grad_share", "steps_since_change", "overflows", "nonfinite", "held"),
        *("loss_fast", "loss_slow", "loss_cv", "loss_scale", "loss_scale_trend", "applied_share", "clipped_share"),
        *("clip", "clip_off", "norm_cv", "norm_median", "progress", "batch_size", "layer_linear", "layer_conv"),
        *("pool_units", "pool_rank", "pool_grad_headroom", "pool_act_headroom", "pool_overflows"),
    ]
    for run in range(4):
        live = encode(*readings_of(env.simulation, run, env))
        rows = observation[env.run_of_row == run]
        for name in told:
            np.testing.assert_allclose(rows[:, INDEX[name]], live[:, INDEX[name]], atol=2e-5, err_msg=name)
    env.close()


def test_rows_of_trends_are_those_of_single_series() -> None:
    rng = np.random.default_rng(2)
    values = rng.lognormal(0, 2, (200, 12)) * rng.choice(
        [1.0, 1.0, np.nan, 0.0, -1.0], (200, 12), p=[0.5, 0.3, 0.1, 0.05, 0.05]
    )
    values[:5] = np.nan
    values[5:20, :6] = np.nan
    values[20:60] = np.abs(values[20:60])
    rows = Rows(values)
    for index, series in enumerate(values):
        kept = finite(series)
        first = int(np.isfinite(series).argmax()) if len(kept) else 0
        assert rows.spread()[index] == pytest.approx(spread(kept))
        assert rows.spread_around_drift()[index] == pytest.approx(spread_around_drift(kept), rel=1e-6, abs=1e-9)
        assert rows.drift_bits()[index] == pytest.approx(drift_bits(series[first:]), rel=1e-6, abs=1e-9)
        for part in (2, 4):
            expected = relative_change(kept, max(kept.size // part, 1))
            assert rows.relative_change(part)[index] == pytest.approx(expected, abs=1e-9)
        assert rows.median()[index] == pytest.approx(np.median(kept) if len(kept) else math.nan, nan_ok=True)


def test_the_table_takes_the_cheapest_format_that_is_accurate_enough() -> None:
    errors = np.full((1, 3, len(FORMATS)), 0.01)
    errors[0, 1, FORMATS.index("fp8")] = 0.5
    errors[0, 2] = np.nan
    cost = np.tile(np.linspace(1.0, 0.3, len(FORMATS)), (1, 3, 1))
    ladder = np.array([[0, 1, 2, FORMATS.index("fp8"), -1, -1]])
    level = np.full((1, 3), 1)
    assert propose_levels(errors, cost, ladder, level, 0.1).tolist() == [[3, 2, 1]]  # what nobody measured stays
    assert propose_levels(errors, cost[..., ::-1], ladder, level, 0.1).tolist() == [[0, 0, 1]]
    errors[0, 0] = 2.0
    assert propose_levels(errors, cost, ladder, level, 0.1)[0, 0] == 0


def test_the_loss_scale_leaves_headroom() -> None:
    amax, limit = np.array([[1.0, 1e-3], [1.0, 1.0]]), np.full((2, 2), 65504.0)
    needs = np.array([[True, True], [False, False]])
    scale = propose_scale(amax, limit, needs, np.array([5.0, 7.0]), 3.0)
    assert scale.tolist() == [2.0**12, 7.0]


@pytest.mark.parametrize(
    ("options", "match"),
    [({"mode": "absolute"}, "Modes are"), ({"runs": 0}, "runs=0"), ({"max_decisions": 0}, "1 at least")],
    ids=["mode", "runs", "limit"],
)
def test_bad_arguments_are_named(tasks: list[tuple[Task, Twin]], options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ProxyVecEnv(tasks, **options)


def test_bad_actions_and_use_after_close_are_named(env: ProxyVecEnv) -> None:
    reset(env)
    with pytest.raises(ValueError, match="each 0, 1 or 2"):
        step(env, np.full(env.num_envs, 3))
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="not reset, or it is closed"):
        env.action_masks()


def test_probes_cost_time(tasks: list[tuple[Task, Twin]]) -> None:
    times = {}
    for is_probing in (False, True):
        simulation = Simulation([tasks[0][0]])
        simulation.restart({0: tasks[0][0]})
        object.__setattr__(simulation.tasks[0], "probe_cost", 2.0)
        start = simulation.time[0]
        simulation.probes[:] = is_probing
        simulation.advance()
        times[is_probing] = simulation.time[0] - start
        object.__setattr__(simulation.tasks[0], "probe_cost", 0.0)
        simulation.close()
    assert times[True] == pytest.approx(times[False] + 2.0)


def test_measured_times_are_noisy_and_charged_ones_exact(tasks: list[tuple[Task, Twin]]) -> None:
    charged, seen = [], []
    for noise in (0.0, 0.1):
        simulation = Simulation([replace(task, time_noise=noise) for task, _ in tasks[:1]])
        simulation.restart({0: simulation.tasks[0]})
        for _ in range(4):
            simulation.advance()
            charged.append(simulation.time[0])
            seen.append(simulation.measured_time[0] / simulation.last_time[0])
        simulation.close()
    assert charged[:4] == charged[4:]
    assert seen[:4] == [1.0] * 4
    assert len(set(seen[4:])) == 4


def test_baselines_play_to_the_end(tasks: list[tuple[Task, Twin]]) -> None:
    fp32 = play(tasks, Constant(format="fp32", clip=math.inf))
    assert fp32.level.max() == 0
    assert (fp32.skipped == 0).all()
    budgets = np.array([task.budget for task, _ in tasks])
    assert (fp32.steps <= budgets).all()
    assert (fp32.steps >= budgets - 9).all()
    for other in (Constant(format="fp16"), RandomMoves(), Table()):
        played = play(tasks, other)
        assert played.level.max() > 0
        assert np.isfinite(played.score).all()


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_ppo_of_stable_baselines_trains_on_it(env: ProxyVecEnv) -> None:
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", env, n_steps=4, batch_size=env.num_envs * 2, n_epochs=1, device="cpu", seed=1)
    model.learn(env.num_envs * 8)
    assert model.num_timesteps == env.num_envs * 8


def test_masks_reach_sb3_contrib(env: ProxyVecEnv) -> None:
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

    reset(env)
    assert is_masking_supported(env)
    np.testing.assert_array_equal(get_action_masks(env), env.action_masks())


def test_weights_of_the_reward_reach_it(tasks: list[tuple[Task, Twin]]) -> None:
    totals = []
    for weights in (RewardWeights(), RewardWeights(memory=5.0)):
        env = ProxyVecEnv(tasks, runs=4, weights=weights)
        reset(env)
        totals.append(step(env, keep(env))[1])
        env.close()
    assert (totals[1] < totals[0]).all()
