"""Training of policies: the same seed gives the same bytes, killed or not; what is exported is what was trained.

Time budget: 30 s (two processes of their own).
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from gymnasium import spaces

from autoprec.encoding import FEATURES, LIMIT
from autoprec.json_files import read_json, write_json
from autoprec.policies.policy_file import WEIGHTS_FILE, load_policy
from autoprec.policies.train_settings import SettingsError, Stage
from autoprec.policies.training_state import CHECKPOINT_FILE, RESULT_FILE, SETTINGS_FILE, forget, load_state
from tests.kernels import needs_cpu_kernels
from tests.tiny_training import TASKS, tiny

pytest.importorskip("stable_baselines3")
from autoprec.envs.proxy_env import ProxyVecEnv
from autoprec.policies import seeds, training_tasks
from autoprec.policies.ppo import train_policy
from autoprec.policies.row_policy import RowPolicy, to_network
from autoprec.policies.training_logs import writers_of
from autoprec.policies.training_tasks import bank_tasks, of_stage
from autoprec.policies.training_watch import Progress

pytestmark = needs_cpu_kernels

FILES = ("policy.safetensors", "policy.json")


def bytes_of(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


def last_weights(folder: Path) -> dict[str, torch.Tensor]:
    state = load_state(folder)
    assert state is not None
    return {**state.policy, "low": state.low, "high": state.high}


def assert_same_training(one: Path, other: Path) -> None:
    assert bytes_of(one) == bytes_of(other)
    first, second = last_weights(one), last_weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0.0, atol=0.0)
    results = [read_json(folder / RESULT_FILE)["validations"] for folder in (one, other)]
    assert results[0] == results[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What seed 5 comes to without any interruption."""
    return train_policy(tiny(), 5, tmp_path_factory.mktemp("trained") / "policy")


def test_a_seed_fixes_every_byte_and_another_one_is_another_training(trained: Path, tmp_path: Path) -> None:
    assert_same_training(trained, train_policy(tiny(), 5, tmp_path / "again"))
    other = last_weights(train_policy(tiny(), 6, tmp_path / "other"))
    head = "mlp_extractor.actor.head.weight"
    assert not torch.equal(other[head], last_weights(trained)[head])
    assert last_weights(trained)[head].abs().max() > 0  # it has learnt at all


def test_a_killed_training_ends_with_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("tiny_training.py")), str(tmp_path / "killed"), "160"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / RESULT_FILE).exists()
    seen: list[Progress] = []
    assert_same_training(trained, train_policy(tiny(), 5, tmp_path / "killed", progress=seen.append))
    assert min(now.done for now in seen if now.phase == "learning") == 160  # two segments had ended


@pytest.mark.parametrize("at", [("statistics", 8), ("learning", 32)], ids=["statistics", "first segment"])
def test_a_training_stopped_before_its_first_checkpoint_begins_anew(
    trained: Path, tmp_path: Path, at: tuple[str, int]
) -> None:
    def stop(now: Progress) -> None:
        if (now.phase, now.done) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_policy(tiny(), 5, tmp_path, progress=stop)
    assert not (tmp_path / CHECKPOINT_FILE).exists()
    assert_same_training(trained, train_policy(tiny(), 5, tmp_path))


def test_a_finished_training_is_left_alone(trained: Path) -> None:
    before = bytes_of(trained)
    train_policy(tiny(), 5, trained, progress=lambda now: pytest.fail("it trained again"))
    assert bytes_of(trained) == before


def test_global_generators_and_threads_are_left_as_found(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
        train_policy(tiny(decisions=32, segment=1), 0, tmp_path / "policy")
        assert torch.get_num_threads() == 2
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
        assert torch.equal(torch.get_rng_state(), before[2])
    finally:
        torch.set_num_threads(1)


def test_training_begins_with_the_table_and_keeps_the_best(trained: Path) -> None:
    result, (network, card) = read_json(trained / RESULT_FILE), load_policy(trained)
    validations = result["validations"]
    assert [one["decisions"] for one in validations] == [0, 64, 128, 192]
    best = max(validations, key=lambda one: one["score"])
    assert result["best"]["score"] == best["score"] == card.training["validation"]["score"]  # type: ignore[index, call-overload]
    assert result["gain"]["over_decision_0"] == pytest.approx(best["score"] - validations[0]["score"])
    assert (card.mode, card.training["seed"], network.hidden) == ("offset", 5, (16,))
    assert len(result["metrics"]) >= 6
    tasks = bank_tasks(tiny())[1]
    assert len(validations[0]["scores"]) == len(tasks)
    env = ProxyVecEnv(tasks, runs=len(tasks), is_shuffled=False)
    env.reset()
    kept: dict[int, float] = {}
    while not env.is_idle.all():
        infos = env.step(np.ones(env.num_envs, dtype=np.int64))[3]
        kept |= {info["seed"]: info["score"] for info in infos if info}
    env.close()
    assert [kept[seed] for seed in sorted(kept)] == validations[0]["scores"]


def policy_of(scale: float) -> RowPolicy:
    torch.manual_seed(3)
    box = spaces.Box(-LIMIT, LIMIT, (len(FEATURES),), np.float32)
    policy = RowPolicy(box, spaces.Discrete(3), lambda _: 1e-3, net_arch=[16, 16])
    policy.network.set_normalisation(torch.randn(500, len(FEATURES)) * 3.0 + 1.0)
    with torch.no_grad():
        policy.network.head.weight.normal_(0.0, scale)
    return policy


def test_the_exported_network_decides_as_the_trained_policy() -> None:
    policy = policy_of(1.0)
    rows = np.random.default_rng(0).uniform(-LIMIT, LIMIT, (1000, len(FEATURES))).astype(np.float32)
    actions = policy.predict(rows, deterministic=True)[0]
    assert len(set(actions.tolist())) == 3
    network = to_network(policy)
    np.testing.assert_array_equal(network(torch.from_numpy(rows)).argmax(dim=1).numpy(), actions)
    np.testing.assert_array_equal(network.moves(rows) + 1, actions)
    limits = torch.from_numpy(rows)
    ranged = to_network(policy, limits.amin(dim=0), limits.amax(dim=0))
    np.testing.assert_array_equal(ranged.moves(rows) + 1, actions)
    assert (policy.network.low == -LIMIT).all()  # what still learns knows no range


def test_a_new_policy_keeps_everything() -> None:
    box = spaces.Box(-LIMIT, LIMIT, (len(FEATURES),), np.float32)
    policy = RowPolicy(box, spaces.Discrete(3), lambda _: 1e-3, net_arch=[8], keep_bias=0.25)
    rows = torch.randn(50, len(FEATURES))
    assert policy.network(rows).tolist() == [[0.0, 0.25, 0.0]] * 50
    names = {name for name, _ in policy.named_parameters()}
    held = {id(value) for group in policy.optimizer.param_groups for value in group["params"]}
    assert {id(value) for value in policy.parameters()} == held
    assert not any(name.startswith("action_net") for name in names)


def test_a_training_begins_with_another_policy(trained: Path, tmp_path: Path) -> None:
    folder = train_policy(tiny(start=str(trained), decisions=32, segment=1), 0, tmp_path / "policy")
    found, _ = load_policy(trained)
    state = load_state(folder)
    assert state is not None
    assert torch.equal(state.policy["mlp_extractor.actor.mean"], found.mean)
    assert (state.low <= found.low).all()
    assert read_json(folder / RESULT_FILE)["validations"][0]["decisions"] == 0
    with pytest.raises(SettingsError, match="hidden layers are \\[16\\]"):
        train_policy(tiny(start=str(trained), net_arch=(8,)), 0, tmp_path / "wrong")
    with pytest.raises(SettingsError, match="no such folder"):
        train_policy(tiny(start="nowhere"), 0, tmp_path / "none")


def test_a_ladder_is_trained_from_scratch(tmp_path: Path) -> None:
    folder = train_policy(tiny(mode="ladder", decisions=64), 0, tmp_path / "ladder")
    assert load_policy(folder)[1].mode == "ladder"
    assert last_weights(folder)["mlp_extractor.actor.head.weight"].abs().max() > 0


@pytest.mark.parametrize("batch_size", [2, 7], ids=str)
def test_tiny_rollouts_leave_weights_finite(tmp_path: Path, batch_size: int) -> None:
    folder = train_policy(tiny(n_envs=1, decisions=16, batch_size=batch_size), 0, tmp_path / "policy")
    assert all(torch.isfinite(value).all() for value in last_weights(folder).values())


def test_weights_that_are_lost_end_the_training_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"no longer finite.*Lower it"):
        train_policy(tiny(learning_rate=1e30), 0, tmp_path / "policy")
    assert load_state(tmp_path / "policy") is None


def test_the_learning_rate_falls_with_decisions_whatever_segments_there_are(tmp_path: Path) -> None:
    folder = train_policy(tiny(learning_rate="lin_0.01", clip_range="lin_0.2"), 0, tmp_path / "policy")
    logged = [one for one in read_json(folder / RESULT_FILE)["metrics"] if "train/learning_rate" in one]
    shares = [index / 6 for index in range(6)]
    assert [one["train/learning_rate"] for one in logged] == pytest.approx([0.01 * (1.0 - share) for share in shares])
    assert [one["train/clip_range"] for one in logged] == pytest.approx([0.2 * (1.0 - share) for share in shares])


def test_banks_without_a_usable_task_are_named(tmp_path: Path) -> None:
    slow = {**TASKS, "lr_bits": {"low": -30.0, "high": -30.0}}
    with pytest.raises(SettingsError, match="None of the 4 tasks of bank 'train' is usable"):
        train_policy(tiny(train={"size": 4, "distribution": slow}), 0, tmp_path / "policy")


def test_a_curriculum_plays_the_tasks_of_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = (Stage(until=0.5, tables=("exact",)), Stage(until=1.0, tables=("wrong", "hidden")))
    settings = tiny(curriculum=stages, decisions=128, train={"name": "train", "size": 40, "distribution": TASKS})
    played = []

    def watched(tasks: Any, stage: Any) -> Any:
        chosen = of_stage(tasks, stage)
        played.append({task.table_kind for task, _ in chosen})
        return chosen

    monkeypatch.setattr(training_tasks, "of_stage", watched)
    train_policy(settings, 0, tmp_path / "policy")
    assert played == [{"exact"}, {"wrong", "hidden"}]
    with pytest.raises(SettingsError, match="No task of the train bank"):
        of_stage([], stages[0])


def test_another_training_in_the_folder_is_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gamma: 0\.98 -> 0\.9.*seed: 5 -> 6"):
        train_policy(tiny(gamma=0.9), 6, trained)
    folder = tmp_path / "damaged"
    train_policy(tiny(decisions=32, segment=1), 0, folder)
    (folder / RESULT_FILE).unlink()
    (folder / CHECKPOINT_FILE).write_bytes(b"half a file")
    with pytest.raises(SettingsError, match=r"Cannot go on from .*--fresh"):
        train_policy(tiny(decisions=32, segment=1), 0, folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoint.4711.part").write_text("of a process that was killed")
    forget(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("content", [None, "{half", "// of an editor"])
def test_a_checkpoint_without_settings_is_nobodys(trained: Path, tmp_path: Path, content: str | None) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    (folder / RESULT_FILE).unlink()
    (folder / SETTINGS_FILE).unlink()
    if content is not None:
        (folder / SETTINGS_FILE).write_text(content)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SettingsError, match=r"Cannot go on from .*--fresh"):
        train_policy(tiny(gamma=0.5), 5, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _changed(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        state = torch.load(folder / CHECKPOINT_FILE, weights_only=True)
        torch.save({**state, **values}, folder / CHECKPOINT_FILE)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _changed(rollouts="x"),
        _changed(policy={}),
        _changed(policy={"value_net.weight": torch.zeros(2)}, rollouts=2),
        _changed(low=torch.zeros(3)),
        _changed(best_at=99),
        _changed(validations=[{}]),
        lambda folder: torch.save({"version": 1}, folder / CHECKPOINT_FILE),
        lambda folder: torch.save([1], folder / CHECKPOINT_FILE),
    ],
    ids=["type", "no policy", "other policy", "features", "place", "validations", "empty", "list"],
)
def test_checkpoints_of_something_else_are_named(trained: Path, tmp_path: Path, change: Any) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    (folder / RESULT_FILE).unlink()
    change(folder)
    with pytest.raises(SettingsError, match=r"Cannot go on from .*--fresh"):
        train_policy(tiny(), 5, folder)


@pytest.mark.parametrize("content", ["{}", "[1", "[]", '{"best": {}}'])
def test_a_result_that_is_none_is_made_anew(trained: Path, tmp_path: Path, content: str) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    (folder / RESULT_FILE).write_text(content)
    (folder / WEIGHTS_FILE).unlink()
    assert_same_training(trained, train_policy(tiny(), 5, folder))


def test_a_policy_that_was_lost_is_written_anew(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    (folder / WEIGHTS_FILE).unlink()
    assert_same_training(trained, train_policy(tiny(), 5, folder))


def test_a_full_disk_is_named_and_leaves_nothing_half_written(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "policy"
    train_policy(tiny(decisions=32, segment=1), 0, folder)
    state = load_state(folder)
    assert state is not None
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for write in (partial(state.save, folder), partial(write_json, folder / RESULT_FILE, {})):
            with pytest.raises(OSError, match=r"No space left on device: '.*policy/"):
                write()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_results_of_seeds_that_failed_are_not_selected(trained: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        shutil.copytree(trained, tmp_path / f"seed-{seed}")
    selection = seeds.select(tmp_path, [0, 1], {}, failed={0: "holds a training with other settings"})
    assert (selection["selected"], selection["unfinished"]) == (1, [0])


@pytest.mark.slow
def test_seeds_side_by_side_are_those_of_single_trainings(trained: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, Progress]] = []
    (tmp_path / "seed-6").mkdir()
    (tmp_path / "seed-6" / CHECKPOINT_FILE).write_bytes(b"half a file")
    failures = seeds.train_seeds(tiny(), [5, 6], tmp_path, jobs=2, progress=lambda *now: seen.append(now))
    assert_same_training(trained, tmp_path / "seed-5")
    assert {seed for seed, now in seen if now.phase == "learning"} == {5}
    assert list(failures) == [6]
    assert "Cannot go on from" in failures[6]
    selection = seeds.select(tmp_path, [5, 6], {"command": "none"})
    assert (selection["selected"], selection["unfinished"], selection["command"]) == (5, [6], "none")


def test_metrics_go_to_wandb_on_an_axis_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, wandb = MagicMock(), MagicMock()
    wandb.init.return_value = run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = tmp_path / "mine" / "seed-3"
    folder.mkdir(parents=True)
    writers = partial(writers_of, 3, folder, wandb="project")
    train_policy(tiny(decisions=32, segment=1), 3, folder, writers=writers)
    assert wandb.init.call_args.kwargs.items() >= {"project": "project", "name": "mine-seed-3"}.items()
    run.define_metric.assert_called_once_with("*", step_metric="timesteps")
    sent = [call.args[0] for call in run.log.call_args_list]
    assert any("eval/score" in row and "timesteps" in row for row in sent)
    run.finish.assert_called_once_with()
    train_policy(tiny(decisions=32, segment=1), 3, folder, writers=writers)
    wandb.init.assert_called_once()  # a finished training has nothing to say


def test_the_best_seed_in_validation_is_selected(tmp_path: Path) -> None:
    gain = {"over_decision_0": 0.1, "standard_error": 0.05}
    for seed, score in ((0, 1.2), (1, 1.3), (2, 1.3)):
        best = {"decisions": 64, "score": score, "standard_error": 0.1, "diverged": 0.0, "skipped": 0.0}
        write_json(tmp_path / f"seed-{seed}" / RESULT_FILE, {"best": best, "gain": gain})
    selection = seeds.select(tmp_path, [2, 0, 1], {"date": "today"})
    assert selection == read_json(tmp_path / seeds.SELECTION_FILE)
    assert (selection["selected"], selection["folder"], selection["date"]) == (1, "seed-1", "today")
    with pytest.raises(ValueError, match="No training of seeds"):
        seeds.select(tmp_path / "empty", [0], {})


@pytest.mark.parametrize(("numbers", "jobs"), [([], 1), ([1, 1], 1), ([-1], 1), ([0], 0)], ids=str)
def test_bad_seeds_are_named(tmp_path: Path, numbers: list[int], jobs: int) -> None:
    with pytest.raises(ValueError, match="Passed seeds="):
        seeds.train_seeds(tiny(), numbers, tmp_path, jobs=jobs)
