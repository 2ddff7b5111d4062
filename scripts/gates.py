"""Measures whether the proxies are worth training a policy on; `python scripts/gates.py --help`.

Prints each gate and, as the last line, how many passed. The twins are kept in the user's cache and reused.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed
    from autoprec.envs.gates import run_gates
    from autoprec.envs.proxies import Bank
    from autoprec.envs.proxy_env import load_tasks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bank", default="train", help="bank of tasks (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=128, help="tasks to draw (default: %(default)s)")
    arguments = parser.parse_args()
    started = time.perf_counter()
    tasks = load_tasks(Bank(arguments.bank, arguments.tasks))
    print(f"{len(tasks)} of {arguments.tasks} tasks are usable, {time.perf_counter() - started:.0f} s", flush=True)
    results = []
    for gate in run_gates(tasks):
        results.append(gate.is_passed)
        mark = "passed" if gate.is_passed else "FAILED"
        print(f"{mark}: {gate.name}: {gate.figures} ({time.perf_counter() - started:.0f} s)", flush=True)
    print(f"gates: passed={sum(results)} failed={len(results) - sum(results)}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
