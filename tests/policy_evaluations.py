"""Made-up results of policies on made-up tasks, and small policies, for tests of the evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoprec.envs.baselines import Scores
from autoprec.envs.proxies import Distribution, Task, draw_task
from autoprec.policies.evaluate import Played
from autoprec.policies.network import PolicyNetwork
from autoprec.policies.policy_file import PolicyCard, save_policy
from autoprec.policies.raising import Raises
from autoprec.policies.rivals import Rival, rivals

SMALL = Distribution(units=(3, 4), widths=(32,), budget=48, late_budget=64, steps=8, late_steps=8)
# how much better than fp32 each of them is made to be
WORTH = {
    "fp32": 0.0, "fp32_clip": 0.2, "bf16_clip": 0.27, "gradscaler_clip": 0.25, "lowest_clip": -0.3, "random": -0.2,
    "rule": 0.28, "table": 0.3, "table_schedule": 0.36, "table_learnt": 0.4, "policy": 0.45,
}  # fmt: skip


def drawn_tasks(count: int) -> list[Task]:
    return [draw_task(seed, Distribution()) for seed in range(count)]


def made_up_scores(worth: float, count: int, seed: int) -> Scores:
    noise = np.random.default_rng(seed).normal(0.0, 0.02, count)
    of_task = np.random.default_rng(99).normal(0.0, 0.3, count)
    steps = np.full(count, 200.0)
    return Scores(1.0 + worth + of_task + noise, np.zeros(count, bool), steps, steps * 0.01, np.ones(count))


def made_up_results(count: int, seeds: int = 5, worth: dict[str, float] | None = None) -> list[Played]:
    worth = {**WORTH, **(worth or {})}
    known = {rival.name: rival for rival in rivals(Path("no such file"))}
    policy = Rival(name="policy", description="policy", plays=Path("somewhere"))
    alone = Rival(name="policy", description="policy", plays=Path("somewhere"), guard=False)
    found = [
        Played(rival, "test", made_up_scores(worth[name], count, index), None)
        for index, (name, rival) in enumerate(known.items())
    ]
    for seed in range(seeds):
        scores = made_up_scores(worth["policy"], count, 50 + seed)
        found.append(Played(policy, "test", scores, Raises((0, 4, 2), (0, 4, 2), (0, 50, 40), (0, 1, 1))))
        found.append(Played(alone, "test", scores, Raises((0, 4, 4), (0, 2, 2), (0, 50, 40), (0, 1, 2))))
    return found


def small_policies(folder: Path, seeds: Sequence[int] = (0, 1)) -> list[Path]:
    """Writes untrained policies and returns their folders."""
    folders = []
    for seed in seeds:
        network = PolicyNetwork(hidden=(4,), seed=seed)
        card = PolicyCard(hidden=(4,), name=f"untrained-{seed}", table={"clip": 1.0, "schedule": [0.25, 0.75]})
        save_policy(folder / str(seed), network, card)
        folders.append(folder / str(seed))
    return folders


def made_up_trainings(seeds: int) -> list[dict[str, Any]]:
    return [
        {
            "seed": seed,
            "decisions": 200_000,
            "seconds": 600.0,
            "best": {"score": 1.4 + seed / 100},
            "gain": {"over_decision_0": 0.03, "standard_error": 0.01},
        }
        for seed in range(seeds)
    ]
