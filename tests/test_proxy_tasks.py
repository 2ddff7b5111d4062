"""Tasks of the proxies: drawn by seed, banks that never meet, twins on disk, and what steps and moves cost.

Time budget: 20 s.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from autoprec.envs import twins
from autoprec.envs.costs import Charges, learning_rate, measured
from autoprec.envs.engine import FORMATS, Engine
from autoprec.envs.profiles import NOMINAL, PROFILES, Profile
from autoprec.envs.proxies import BANKS, BASE_BATCH, Bank, Distribution, Task, draw_task
from tests.kernels import needs_cpu_kernels

pytestmark = needs_cpu_kernels


def same(a: Task, b: Task) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True))


def test_a_seed_is_a_task() -> None:
    assert same(draw_task(7, Distribution()), draw_task(7, Distribution()))
    assert not same(draw_task(7, Distribution()), draw_task(8, Distribution()))


@pytest.mark.parametrize("name", BANKS)
def test_every_task_of_a_bank_runs(name: str) -> None:
    tasks = list(Bank(name, 40))
    with Engine(len(tasks)) as engine:
        for index, task in enumerate(tasks):
            engine.start(index, task.spec)
        knobs = engine.knobs
        knobs["steps"], knobs["batch"], knobs["clip_multiplier"], knobs["is_evaluated"] = 1, 8, np.inf, 1
        knobs["loss_scale"] = 1.0
        assert np.isfinite(engine.run()["evaluation_loss"]).all()
    if name == "deep":
        assert {task.units for task in tasks} == {8, 10}
    assert len({task.architecture for task in tasks}) > 1


def test_banks_never_meet() -> None:
    firsts = sorted(first for _, first in BANKS.values())
    assert min(np.diff(firsts)) >= 1_000_000
    with pytest.raises(ValueError, match="1 to 1000000"):
        Bank("train", 1_000_001)
    with pytest.raises(ValueError, match="Banks are"):
        Bank("trian", 1)
    with pytest.raises(IndexError, match="5 tasks"):
        Bank("train", 5)[5]


@pytest.mark.parametrize("architecture", ["mlp", "cnn", "transformer", "recurrent"])
def test_each_architecture_can_be_held_out(architecture: str) -> None:
    distribution = Distribution()
    seen = {task.architecture for task in Bank("train", 40, distribution.without(architecture))}
    assert architecture not in seen
    assert len(seen) == 3
    assert {task.architecture for task in Bank("test", 10, distribution.only(architecture))} == {architecture}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"architectures": {"gan": 1.0}}, "Choose at least one of"),
        ({"widths": (40,)}, "multiples of 16"),
        ({"units": (2,)}, "fits none"),
        ({"profiles": ()}, "Choose at least one of"),
        ({"budget": 1}, "greater than or equal to 16"),
        ({"budgets": 100}, "Extra inputs"),
    ],
)
def test_distributions_are_validated(fields: dict[str, object], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        Distribution.model_validate(fields)


def test_tables_may_be_wrong_or_hidden_but_never_about_fp32() -> None:
    tasks = list(Bank("train", 60))
    kinds = {kind: [task for task in tasks if task.table_kind == kind] for kind in ("exact", "wrong", "hidden")}
    assert all(kinds.values())
    assert all(np.array_equal(task.table, task.cost) for task in kinds["exact"])
    assert all(np.isnan(task.table).all() for task in kinds["hidden"])
    for task in kinds["wrong"]:
        np.testing.assert_array_equal(task.table[:, 0], task.cost[:, 0])
        assert (task.table[:, 1:] != task.cost[:, 1:]).all()
    assert all(task.cost[:, 0].sum() == pytest.approx(1.0) for task in tasks)


def test_late_tasks_are_long_and_cool_down() -> None:
    late = [task for task in Bank("train", 60) if task.regime == "late"]
    assert late
    for task in late:
        assert task.decays
        assert task.budget == 720
        assert "fp8-unscaled" not in [FORMATS[index] for index in task.ladder]
        start, end = (float(learning_rate([task], np.array([share]))[0]) for share in (0.2, 1.0))
        assert end < 0.02 * start


def test_ranges_drift_in_drift_tasks_only() -> None:
    for task in Bank("train", 40):
        assert (task.spec["drift_bits"].max() > 0) == (task.regime == "drift")


def charges(units: int = 3) -> Charges:
    cost = np.tile(np.linspace(1.0, 0.3, len(FORMATS)), (1, units, 1)) / units
    one = np.ones(1)
    return Charges(cost, np.ones((1, units), dtype=bool), 0.5 * one, 0.8 * one, 0.05 * one)


def test_a_step_in_fp32_at_the_base_batch_takes_one() -> None:
    assert charges().step_time(np.zeros((1, 3), int), np.array([BASE_BATCH])) == pytest.approx(1.0)


def test_moves_cost_the_casts_that_steps_then_make() -> None:
    table, formats, batch = charges(), np.array([[0, 1, 1]]), np.array([3])
    others = np.array([[1, 0, 2]])
    now = table.cast_time(formats, batch)[0]
    for unit, change in enumerate(table.casts_moved(formats, batch, others)[0]):
        moved = formats.copy()
        moved[0, unit] = others[0, unit]
        assert change == pytest.approx(table.cast_time(moved, batch)[0] - now)


def test_a_clock_errs_by_its_noise_and_always_in_the_same_way() -> None:
    steps, seeds = np.arange(20_000), np.full(20_000, 7)
    one = np.full(20_000, 3.0)
    seen = measured(one, 0.02 * one / 3.0, seeds, steps)
    assert seen.mean() == pytest.approx(3.0, rel=1e-3)
    assert seen.std() / seen.mean() == pytest.approx(0.02, rel=0.03)
    assert abs(np.corrcoef(seen[1:], seen[:-1])[0, 1]) < 0.03
    np.testing.assert_array_equal(seen[:50], measured(one[:50], np.full(50, 0.02), seeds[:50], steps[:50]))
    assert abs(np.corrcoef(seen, measured(one, 0.02 * one / 3.0, seeds + 1, steps))[0, 1]) < 0.03
    np.testing.assert_array_equal(measured(one, 0.0 * one, seeds, steps), one)


def test_profiles_are_five_and_complete() -> None:
    assert len(PROFILES) == 5
    assert all(len(profile.costs()) == len(FORMATS) for profile in (*PROFILES.values(), NOMINAL))
    with pytest.raises(ValidationError):
        Profile(name="x", cost={"fp32": 1.0}, jitter=2.0)


def test_twins_are_kept_and_only_what_is_missing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "CHUNK", 2)
    distribution = Distribution(architectures={"mlp": 1.0}, regimes=(1.0, 0.0, 0.0), budget=16)
    seen: list[tuple[int, int]] = []
    first = twins.bank_twins(Bank("train", 3, distribution), folder=tmp_path, progress=lambda *at: seen.append(at))
    assert seen == [(2, 3), (3, 3)]
    trained: list[int] = []

    def counted(tasks: list[Task], *, threads: int = 1) -> list[twins.Twin]:
        trained.append(len(tasks))
        return list(run(tasks, threads=threads))

    run = twins.run_twins
    monkeypatch.setattr(twins, "run_twins", counted)
    again = twins.bank_twins(Bank("train", 4, distribution), folder=tmp_path)
    assert trained == [1]
    assert again[:3] == first
    (file,) = tmp_path.iterdir()
    rows = json.loads(file.read_text(encoding="utf-8"))
    rows[1][0] += 1  # as if tasks had been drawn in another way when it was written
    file.write_text(json.dumps(rows), encoding="utf-8")
    assert twins.bank_twins(Bank("train", 4, distribution), folder=tmp_path) == again
    assert trained == [1, 2, 1]
    assert twins.bank_twins(Bank("train", 2, distribution), folder=tmp_path) == again[:2]
    assert len(json.loads(file.read_text(encoding="utf-8"))) == 4
    for content in ("[[1.0,", "[[Infinity, 1.0, 1.0]]", "[" * 100_000):  # as a full disk or another program leaves it
        file.write_text(content, encoding="utf-8")
        assert twins.bank_twins(Bank("train", 4, distribution), folder=tmp_path) == again
        assert len(json.loads(file.read_text(encoding="utf-8"))) == 4


def test_twins_that_cannot_be_kept_are_trained_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "CHUNK", 1)
    bank = Bank("train", 2, Distribution(architectures={"mlp": 1.0}, regimes=(1.0, 0.0, 0.0), budget=16))
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="Set AUTOPREC_CACHE_DIR") as found:
        made = twins.bank_twins(bank, folder=tmp_path / "file" / "twins")
    assert len(found) == 1
    assert made == twins.bank_twins(bank, folder=tmp_path / "good")


def test_twins_that_learn_too_little_are_no_measure() -> None:
    assert [twins.Twin(2.0, last).is_usable for last in (1.0, 1.9, float("nan"), 0.0)] == [True, False, False, False]
