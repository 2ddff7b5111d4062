"""Times the proxy trainings against a plain torch loop: ``python -m benchmarks.proxy [--rounds N]``.

Steps of a 32-64-64-10 MLP at batch 32, and decisions of the environment: alone, by architecture, and inside PPO of
stable-baselines3.
Thread-CPU time of one thread. Figures are ratios, measured in turns (see ``benchmarks/timing.py``); absolute rates are
of this machine and this moment.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from autoprec.envs.architectures import ARCHITECTURES, Graph
from autoprec.envs.engine import FORMATS, SPEC, Engine
from autoprec.envs.proxies import Bank, Distribution
from autoprec.envs.proxy_env import ProxyVecEnv, load_tasks
from benchmarks.timing import measure

WINDOW = 8


def mlp_engine(format_name: str) -> Engine:
    graph = Graph(width=32)
    graph.linear(64, "relu")
    graph.linear(64, "relu")
    graph.linear(16)  # ten classes; the engine's widths are multiples of 16
    spec = np.zeros((), SPEC)
    spec["nodes"][: len(graph.nodes)] = graph.nodes
    settings = {"node_count": len(graph.nodes), "unit_count": 3, "classes": 10, "max_batch": 128, "teacher_width": 32}
    settings |= {"evaluation_samples": 64, "outlier_factor": 1, "loss_factor": 1, "drift_steps": 1, "optimizer": 1}
    for name, value in settings.items():
        spec[name] = value
    spec["beta1"], spec["beta2"], spec["eps"] = 0.9, 0.999, 1e-8
    engine = Engine(1)
    engine.start(0, spec)
    knobs = engine.knobs
    knobs["steps"], knobs["batch"], knobs["formats"] = WINDOW, 32, FORMATS.index(format_name)
    knobs["lr_begin"] = knobs["lr_end"] = 1e-3
    knobs["clip_multiplier"], knobs["loss_scale"] = 1.5, 256.0
    return engine


def torch_loop() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def window() -> None:
        for _ in range(WINDOW):
            x, labels = torch.randn(32, 32), torch.randint(10, (32,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return window


def time_steps(rounds: int) -> float:
    loop, engines = torch_loop(), {name: mlp_engine(name) for name in FORMATS}
    timing = measure({"torch": loop, **{name: engine.run for name, engine in engines.items()}}, rounds=rounds)
    print(f"torch fp32: {WINDOW / timing.median('torch'):.0f} steps/s")
    for name in FORMATS:
        rate, ratio = WINDOW / timing.median(name), 1.0 / timing.ratio(name, "torch")
        print(f"engine {name}: {rate:.0f} steps/s, {ratio:.1f} times torch's rate")
    return timing.median("torch")


def time_decisions(window_s: float, bank: int, runs: int) -> None:
    from stable_baselines3 import PPO

    for name in ARCHITECTURES:
        only = ProxyVecEnv(load_tasks(Bank("train", 32, Distribution().only(name))), runs=24)
        _print_rate(f"environment alone, {name}", _decisions_s(only, 32), window_s)
        only.close()
    env = ProxyVecEnv(load_tasks(Bank("train", bank)), runs=runs)
    _print_rate("environment alone", _decisions_s(env, 48), window_s)
    count = len({*env.run_of_row.tolist()})
    options = {"n_steps": 32, "batch_size": env.num_envs * 8, "n_epochs": 4, "device": "cpu"}
    model = PPO("MlpPolicy", env, learning_rate=1e-3, **options)  # type: ignore[arg-type]
    start = time.thread_time()
    model.learn(2 * 32 * env.num_envs)
    _print_rate("inside PPO", 2 * 32 * count / (time.thread_time() - start), window_s)
    env.close()


def _decisions_s(env: ProxyVecEnv, steps: int) -> float:
    env.reset()
    keep = np.ones(env.num_envs, dtype=np.int64)
    start = time.thread_time()
    for _ in range(steps):
        env.step(keep)
    return steps * len({*env.run_of_row.tolist()}) / (time.thread_time() - start)


def _print_rate(name: str, rate: float, window_s: float) -> None:
    print(f"{name}: {rate:.0f} decisions of runs/s, {rate * window_s:.2f} times torch's windows of {WINDOW} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the ratios (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=256, help="tasks of the train bank (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=96, help="runs side by side (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    time_decisions(time_steps(arguments.rounds), arguments.tasks, arguments.runs)


if __name__ == "__main__":
    main()
