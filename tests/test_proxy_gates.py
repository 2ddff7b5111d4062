"""The gates: each can fail, and the slow test runs them as `make gates` does.

Time budget: 20 s; the slow test takes 3 minutes on one core.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.envs import gates
from autoprec.envs.proxies import Bank, Distribution, Task
from autoprec.envs.twins import Twin, bank_twins, run_twins
from tests.kernels import needs_cpu_kernels

pytestmark = needs_cpu_kernels

EASY = Distribution(architectures={"mlp": 1.0}, units=(3,), regimes=(1, 0, 0), ladders=(1, 0, 0, 0, 0), budget=120)


@pytest.fixture(scope="module")
def tasks() -> list[tuple[Task, Twin]]:
    drawn = list(Bank("train", 24, EASY))
    return [(task, twin) for task, twin in zip(drawn, run_twins(drawn), strict=True) if twin.progress > 0.1]


def test_time_is_not_scarce_where_nothing_is_learnt(tasks: list[tuple[Task, Twin]]) -> None:
    (gate,) = gates.time_is_scarce(tasks)
    assert gate.is_passed, gate.figures
    (stuck,) = gates.time_is_scarce([(replace(task, lr=1e-9), twin) for task, twin in tasks])
    assert not stuck.is_passed


def test_hardware_decides_only_where_bf16_is_cheaper(tasks: list[tuple[Task, Twin]]) -> None:
    def as_costly(task: Task, bf16: float) -> Task:
        cost = task.cost.copy()
        cost[:, 1] = bf16 * cost[:, 0]
        return replace(task, cost=cost, overhead=0.0)

    halves = [(as_costly(task, 0.5 if index % 2 else 2.0), twin) for index, (task, twin) in enumerate(tasks)]
    (gate,) = gates.hardware_decides(halves)
    assert gate.is_passed, gate.figures
    (free,) = gates.hardware_decides([(as_costly(task, 0.5), twin) for task, twin in tasks])
    assert not free.is_passed


def test_one_task_over_and_over_has_one_best_constant(tasks: list[tuple[Task, Twin]]) -> None:
    results = list(gates.no_constant_is_optimal([tasks[0]] * 2))
    assert not results[0].is_passed
    assert not results[2].is_passed


def test_errors_predict_nothing_where_only_wide_formats_run(tasks: list[tuple[Task, Twin]]) -> None:
    (gate,) = gates.errors_predict_harm([(replace(task, ladder=(0, 1)), twin) for task, twin in tasks])
    assert not gate.is_passed


@pytest.mark.slow
def test_gates_pass_on_the_train_bank(tmp_path: Path) -> None:
    bank = Bank("train", 128)
    usable = [(bank[index], twin) for index, twin in enumerate(bank_twins(bank, folder=tmp_path)) if twin.is_usable]
    assert len(usable) > 80
    failed = [f"{gate.name}: {gate.figures}" for gate in gates.run_gates(usable) if not gate.is_passed]
    assert not failed
