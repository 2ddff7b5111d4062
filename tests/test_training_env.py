"""The training environment: what gymnasium and stable-baselines3 ask of it, that it repeats, and what a policy sees.

Time budget: 40 s.
"""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from autoprec import AutoPrecisionCallback
from autoprec.encoding import FEATURES, LIMIT
from autoprec.feature_rows import INDEX, RUN_KNOBS
from autoprec.moved_table import MODES, MovedTableController
from autoprec.target_functions import TargetError
from tests.small_fits import QUIET, Full, Plain, differences, loader, quiet, rows

pytest.importorskip("gymnasium")
import gymnasium

from autoprec.envs.process_state import ProcessState, isolated
from autoprec.envs.training_env import TrainingEnv, TrainingTwin
from tests.doc_pages import blocks
from tests.training_envs import SETTINGS, Maker, make_env, nothing_left, play, random_moves


class Recorder(MovedTableController):
    """Moves as it is told and keeps what it sees, in a live run."""

    def __init__(self, moves: Any, mode: Any) -> None:
        super().__init__(SETTINGS["config"], mode)
        self.moves, self.seen, self.seen_masks = moves, list[Any](), list[Any]()

    def moves_for(self, observation: Any) -> Any:
        self.seen.append(observation.copy())
        self.seen_masks.append(self.masks())
        return self.moves(len(self.seen) - 1) - 1

    def decide(self, observation: Any) -> Any:
        action = super().decide(observation)
        return self._moves if self.is_ladder else action


def test_spaces_follow_the_model() -> None:
    env = make_env()
    assert env.unit_names == ("net.0", "net.2")
    assert env.rows == 2 + RUN_KNOBS
    observation, info = env.reset(seed=1)
    assert observation.shape == (env.rows * len(FEATURES),)
    kinds = observation.reshape(env.rows, -1)[:, INDEX["knob_precision"] : INDEX["knob_precision"] + 4].argmax(axis=1)
    assert kinds.tolist() == [0, 0, 1, 2, 3]
    assert env.action_masks().reshape(-1, 3)[:2].tolist() == [[True, True, False]] * 2  # fp32 is the widest
    assert info["precision_map"] == {"net.0": "fp32", "net.2": "fp32"}
    env.close()


def test_random_steps_stay_in_the_spaces() -> None:
    env = make_env()
    moves = random_moves(env)
    with nothing_left():
        for seed in range(3):
            observations, rewards, info = play(env, moves, seed)
            assert all(observation in env.observation_space for observation in observations)
            assert all(type(reward) is float and abs(reward) <= 3.0 for reward in rewards)
            assert info["ending"] == "finished"
            assert math.isfinite(info["score"])
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_same_seed_and_same_actions_are_the_same_bits(mode: str) -> None:
    make = Maker()
    env, other = make_env(make, mode=mode), make_env(Maker(), mode=mode)
    moves = random_moves(env)
    first = play(env, moves, 3)
    losses = make.modules[-1].losses
    torch.rand(5)  # what the caller draws is of no matter
    play(env, moves, 4)
    again, elsewhere = play(env, moves, 3), play(other, moves, 3)
    assert not differences(first, again)
    assert not differences(first, elsewhere)
    assert make.modules[-1].losses == losses
    assert differences(first, play(env, moves, 5))
    env.close()
    other.close()


def fit_live(policy: Any, seed: int) -> tuple[AutoPrecisionCallback, list[float]]:
    """Trains what environments train, in a plain fit."""
    callback = AutoPrecisionCallback(policy, interval=4, config=SETTINGS["config"], verbose=False)
    with isolated():
        seed_everything(seed, workers=True, verbose=False)
        module, (train, held_out), options = Maker()()
        quiet(**options, callbacks=[callback]).fit(module, train, held_out)
    return callback, module.losses


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_sees_what_it_sees_in_a_live_run(mode: str) -> None:
    make, masks = Maker(), list[Any]()
    env = make_env(make, mode=mode)
    moves = random_moves(env, 2)

    def noted(step: int) -> Any:
        masks.append(env.action_masks().reshape(env.rows, 3))
        return moves(step)

    observations, _, info = play(env, noted, 5)
    recorder = Recorder(moves, mode)
    callback, losses = fit_live(recorder, info["seed"])
    live = [seen.reshape(-1) for seen in recorder.seen]
    assert len(live) > 3
    assert not differences(observations[: len(live)], live)
    if mode == "offset":
        assert not differences(masks, recorder.seen_masks)
    assert make.modules[-1].losses == losses
    assert callback.precision_map() == info["precision_map"]
    env.close()


def test_an_agent_that_keeps_everything_is_the_table() -> None:
    make = Maker()
    env = make_env(make, mode="offset")
    _, _, info = play(env)
    callback, losses = fit_live("table", info["seed"])
    assert make.modules[-1].losses == losses
    assert callback.precision_map() == info["precision_map"]
    env.close()


@pytest.mark.parametrize("is_validated", [True, False], ids=["held-out", "training"])
def test_rewards_are_progress_less_time(is_validated: bool) -> None:
    make = Maker(Full if is_validated else Plain)
    env = make_env(make)
    _, rewards, info = play(env, None, 2)
    assert info["time_share"] == pytest.approx(1.0)  # the twin's own formats all along
    env.reset(seed=2)
    start = env.reset(seed=2)[1]
    made = math.log(start["loss"]) - math.log(info["loss"])
    assert sum(rewards) == pytest.approx(made / env.twin.progress - (1.0 - start["time_share"]), abs=1e-6)
    assert info["score"] > 0.5
    losses = make.modules[-1].losses
    if not is_validated:
        assert start["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    env.close()


def test_saved_time_pays() -> None:
    env = make_env()
    lowered = [0, 0, 1, 1, 1]
    _, kept, _ = play(env)
    _, saved, info = play(env, lambda step: np.array(lowered if step == 0 else [1] * 5))
    assert set(info["precision_map"].values()) == {"bf16"}
    assert info["time_share"] < 0.9
    assert sum(saved) > sum(kept)
    env.close()


def test_a_budget_of_time_replaces_the_trainers_own_end() -> None:
    env = make_env(Maker(max_epochs=1), budget=24)
    observations, _, kept = play(env)
    assert (kept["ending"], kept["applied_steps"]) == ("budget", 24)
    _, _, saved = play(env, lambda step: np.array([0, 0, 1, 1, 1] if step == 0 else [1] * 5))
    assert saved["ending"] == "budget"
    assert saved["applied_steps"] > 28
    progress = [row.reshape(env.rows, -1)[0, INDEX["progress"]] for row in observations]
    assert progress[0] == pytest.approx(kept["time_share"] * 5 / 24, abs=0.1)
    env.close()


def test_time_goes_by_the_clock_unless_it_is_told() -> None:
    env = make_env(cost=None)
    _, rewards, info = play(env)
    assert 0.0 < env.twin.time < 60.0
    assert info["time_share"] > 0.0
    assert all(math.isfinite(reward) for reward in rewards)
    env.close()


def test_module_and_data_as_they_are_are_copied() -> None:
    module, data = Full(), (loader(shuffle=True), loader(32))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    env = TrainingEnv((module, data, {**QUIET, "max_epochs": 2, "deterministic": True}), **SETTINGS)
    first, again = play(env), play(env)
    assert not differences(first, again)
    assert not differences(before, module.state_dict())
    assert module.losses == []
    env.close()


def test_targets_of_compare_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "steered_target.py").write_text(
        "from tests.small_fits import *\n"
        "def build(seed, epochs=3):\n"
        "    return Full(), (loader(shuffle=True), loader(32)), {**QUIET, 'max_epochs': epochs}\n"
    )
    env = TrainingEnv("steered_target.py:build", **SETTINGS)
    assert play(env)[2]["applied_steps"] == 24
    env.close()


def test_callbacks_of_the_user_are_kept_and_files_are_not_written(tmp_path: Path) -> None:
    def make() -> Any:
        stop = EarlyStopping("val_loss", patience=0, stopping_threshold=1e9, check_on_train_epoch_end=False)
        own = [ModelCheckpoint(dirpath=tmp_path), AutoPrecisionCallback(verbose=False), stop]
        options = {"logger": True, "enable_checkpointing": True, "callbacks": own, "max_epochs": 3}
        return Full(), (loader(), loader(32)), {**QUIET, **options}

    env = make_env(make, interval=2)
    assert play(env)[2]["applied_steps"] == 8  # after one epoch
    assert list(tmp_path.iterdir()) == []
    env.close()


def test_both_checkers_are_content() -> None:
    from gymnasium.utils.env_checker import check_env as check_gymnasium
    from stable_baselines3.common.env_checker import check_env as check_sb3

    made = gymnasium.make("autoprec/Training-v0", make=Maker(), max_episode_steps=3, **SETTINGS)
    check_sb3(made.unwrapped)
    check_gymnasium(made.unwrapped)


def test_a_time_limit_truncates_and_the_end_terminates() -> None:
    limited = gymnasium.make("autoprec/Training-v0", make=Maker(), max_episode_steps=2, **SETTINGS)
    limited.reset(seed=0)
    keep = np.ones(limited.get_wrapper_attr("rows"), dtype=np.int64)
    assert limited.step(keep)[2:4] == (False, False)
    assert limited.step(keep)[2:4] == (False, True)
    limited.close()


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_ppo_learns_on_it_and_masks_reach_sb3_contrib() -> None:
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = make_env(Maker(max_epochs=2), interval=2)
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, device="cpu", seed=1)
    model.learn(64)
    assert model.num_timesteps == 64
    assert all(bool(torch.isfinite(p).all()) for p in model.policy.parameters())
    env.reset()
    stacked = DummyVecEnv([lambda: env])
    assert is_masking_supported(stacked)
    np.testing.assert_array_equal(get_action_masks(stacked)[0], env.action_masks())
    env.close()


def test_observations_are_within_their_box_when_the_run_is_ruined() -> None:
    class Ruined(Full):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * (1e30 if len(self.losses) > 12 else 1.0)

    env = make_env(Maker(Ruined), twin=make_env().twin)
    observations, rewards, info = play(env)
    assert info["diverged"]
    assert info["score"] == -2.0
    assert all(np.abs(observation).max() <= LIMIT for observation in observations)
    assert rewards[-1] < -1.0
    assert all(math.isfinite(reward) for reward in rewards)
    env.close()


# what readers start from


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_code_in_the_docs_runs() -> None:
    (block,) = [block for block in blocks("docs/environments.md", "python") if "Training-v0" in block.text]
    names: dict[str, Any] = {}
    with nothing_left(draws=True):
        exec(block.text, names)
    assert names["model"].num_timesteps == 32


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[1] / "examples/training_environment.py"
    with nothing_left(draws=True):
        runpy.run_path(str(path))["main"](["--steps", "32"])
    lines = capsys.readouterr().out.splitlines()
    returns = {line[:32].strip(): float(line[32:].split()[1]) for line in lines if " return " in line}
    assert list(returns) == ["stay in fp32", "bf16 from the first decision on", "random", "PPO after 32 steps"]
    assert returns["bf16 from the first decision on"] > returns["stay in fp32"] > returns["random"]


# what is refused


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (7, {}, TypeError, "It takes a function that returns"),
        ("script.py", {}, TargetError, "pass `package.module:function`"),
        (lambda: Full(), {}, TargetError, "It must return (LightningModule, data, Trainer arguments)"),
        (Maker(), {"budget": 0}, ValueError, "optimizer steps >= 1"),
        (Maker(), {"budget": float("nan")}, ValueError, "optimizer steps >= 1"),
        (Maker(), {"budget": "3"}, ValueError, "optimizer steps >= 1"),
        (Maker(), {"mode": "absolute"}, ValueError, "Modes are ('offset', 'ladder')"),
        (Maker(), {"interval": 0}, ValueError, "`interval` must be an int >= 1"),
    ],
    ids=["kind", "script", "result", "budget", "no number", "text", "mode", "interval"],
)
def test_bad_arguments_are_named(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with nothing_left(), pytest.raises(error, match=re.escape(message)):
        make_env(make, **options)


def test_trainings_that_cannot_be_episodes_are_named() -> None:
    shared = Plain()
    with pytest.raises(TargetError, match="returned the same module twice"):
        make_env(lambda: (shared, loader(), {**QUIET, "max_epochs": 2})).reset()
    with pytest.raises(ValueError, match="trains without end"):
        make_env(Maker(max_epochs=-1))
    for options, how in (({"interval": 40}, "ended"), ({"budget": 2}, "spent its budget of time")):
        env = make_env(**options)
        with pytest.raises(RuntimeError, match=f"The fit {how} before its first decision"):
            env.reset()
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step(np.ones(env.rows))
    with pytest.raises(ValueError, match=re.escape("metric='accuracy'")):
        make_env(metric="accuracy").reset()
    sizes = iter((8, 8, 8, 16))
    with pytest.raises(RuntimeError, match="with 3 units where the first one had 2"):
        make_env(lambda: (Growing(next(sizes)), (loader(), loader(32)), {**QUIET, "max_epochs": 4})).reset()


class Growing(Full):
    """Has another number of layers from the given size on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size > 8:
            self.net.append(torch.nn.Linear(2, 2))


def test_wrong_use_is_named() -> None:
    env = make_env()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.ones(env.rows))
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.action_masks()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="There must be 5 actions"):
        env.step(np.array([0, 1, 2, 3, 1]))
    env.close()
    env.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        env.reset()


def test_data_without_a_length_need_steps() -> None:
    batches = list(zip(*(tensor.split(8) for tensor in rows(320).tensors), strict=True))
    env = make_env(lambda: (Plain(), iter(batches), {**QUIET, "max_steps": 20}))
    assert play(env)[2]["applied_steps"] == 20
    env.close()


class Sloping(Full):
    """Its held-out loss is 1 before training and a given one after it."""

    last = 0.0
    first_weights: float | None = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        weights = float(sum(parameter.detach().double().sum() for parameter in self.parameters()))
        kind = type(self)
        kind.first_weights = weights if kind.first_weights is None else kind.first_weights
        self.log("val_loss", 1.0 if weights == kind.first_weights else self.last)


def test_a_loss_that_stays_at_0_is_no_fall() -> None:
    class Perfect(Sloping):
        pass

    env = make_env(Maker(Perfect), twin=TrainingTwin(1.0, 0.5, 512.0))
    _, rewards, info = play(env)
    assert rewards == [pytest.approx(-0.15625)] * 5 + [pytest.approx(-0.0625)]  # time alone: all progress is over
    assert info["score"] > 0
    env.close()


def test_losses_below_0_are_named() -> None:
    class Likelihood(Sloping):
        last = -1.0

    env = make_env(Maker(Likelihood))
    with pytest.raises(ValueError, match="must be finite and not negative"):
        env.reset()


@pytest.mark.parametrize("time", [math.nan, math.inf, -1.0])
def test_a_cost_that_is_no_time_is_named(time: float) -> None:
    env = make_env(cost=lambda formats, batch_size: time, twin=TrainingTwin(1.0, 0.5, 512.0))
    with nothing_left(), pytest.raises(ValueError, match="must return a finite time"):
        env.reset()


class Shared(pl.LightningDataModule):
    """Takes its data away when a fit or a validation is over."""

    train: Any = None

    def setup(self, stage: str) -> None:
        self.train = loader(shuffle=True)

    def train_dataloader(self) -> Any:
        return self.train

    def val_dataloader(self) -> Any:
        return loader(32)

    def teardown(self, stage: str) -> None:
        self.train = None


def test_a_datamodule_may_be_the_same_each_time() -> None:
    class Reading(Full):
        def on_train_batch_end(self, *arguments: Any) -> None:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            assert data.train is not None
            assert data.trainer is self.trainer

    make, shared = Maker(Reading), Shared()

    def with_shared_data() -> Any:
        module, _, options = make()
        return module, shared, options

    env, usual = make_env(with_shared_data), make_env()
    assert play(env)[1] == play(usual)[1] == play(env)[1]
    env.close()
    usual.close()


def test_a_callback_that_remembers_must_be_new() -> None:
    with pytest.raises(TargetError, match="returned the same EarlyStopping twice"):
        make_env(Maker(callbacks=[EarlyStopping("val_loss")])).reset()


def test_flags_are_those_of_whoever_runs() -> None:
    def make() -> Any:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        return Maker(detect_anomaly=True)()

    class Looking(Full):
        seen: ClassVar[list[bool]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(torch.is_anomaly_enabled())
            return super().training_step(batch, batch_idx)

    with nothing_left():
        env, flags = make_env(make), ProcessState.take().flags
        env.reset(seed=0)
        assert ProcessState.take().flags == flags
        env.close()
    env = make_env(Maker(Looking))
    try:
        torch.autograd.set_detect_anomaly(True)
        play(env)
        assert torch.is_anomaly_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)
        env.close()
    assert Looking.seen
    assert not any(Looking.seen)
