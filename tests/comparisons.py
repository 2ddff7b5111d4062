"""Recorded runs of made-up trainings, for tests of what is made of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from autoprec.compare.records import Comparison, Evaluation, Run, Step

SEEDS = 4
STEPS = 60


def arm_runs(
    arm: str,
    step_ms: float,
    final: float | None,
    *,
    seeds: int = SEEDS,
    steps: int = STEPS,
    noise: float = 0.002,
    **fields: Any,
) -> tuple[Run, ...]:
    """Runs of an arm; losses differ by 0.1 between seeds and by ``noise`` between arms, step times by 1%."""
    return tuple(_run(arm, step_ms, final, seed, steps, noise, fields) for seed in range(seeds))


def _run(
    arm: str, step_ms: float, final: float | None, seed: int, steps: int, noise: float, fields: Mapping[str, Any]
) -> Run:
    own, of_seed = random.Random(f"{arm}-{seed}"), random.Random(seed)
    end = None if final is None else final + 0.1 * of_seed.gauss(0, 1) + noise * own.gauss(0, 1)
    points = [] if end is None else [(step, end + 1.0 - step / steps) for step in range(0, steps + 1, steps // 6)]
    return Run(
        **{
            "arm": arm,
            "seed": seed,
            "steps": tuple(_step(own, index, step_ms, steps) for index in range(steps)),
            "evaluations": tuple(
                Evaluation(step=step, elapsed_s=step * step_ms / 1e3, metrics={"val_loss": value})
                for step, value in points
            ),
            "final_metric": end,
            **fields,
        }
    )


def _step(own: random.Random, index: int, step_ms: float, steps: int) -> Step:
    return Step(index=index, step_ms=step_ms * (1 + 0.01 * own.gauss(0, 1)), loss=2.0 + own.random() - index / steps)


def comparison(*arms: tuple[Run, ...], **settings: Any) -> Comparison:
    """A comparison of these arms."""
    return Comparison(task="made-up", runs=tuple(run for arm in arms for run in arm), settings=settings)
