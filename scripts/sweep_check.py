"""Kills a sweep twice and checks that no finished trial is lost.

    python scripts/sweep_check.py [--trials 20] [--out build/sweep-check]

Two workers tune the digits task. One of them is killed (SIGKILL) in mid-trial; later the parent is, and the sweep is
started again. The last line is `sweep: trials=<n> lost=<n> resumed=<n>`: trials that ended, finished trials that are
missing or have other values afterwards, and trials that were begun again. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
CONFIG = """\
target: {target}
name: check
arguments:
  learning_rate: {{low: 3e-4, high: 1e-2, log: true, default: 2e-3}}
  epochs: 2
callback:
  interval: 10
  policy: {{choices: [rule, "fixed:bf16"]}}
objectives: [val_loss, training_seconds]
trials: {trials}
minutes: null
out: {out}
"""
_PATIENCE_S = 400.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path, default=CHECKOUT / "build" / "sweep-check")
    options = parser.parse_args()
    if options.trials < 8:
        parser.error(f"--trials is {options.trials}, and at least 8 are needed to kill twice in between")
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config = out / "config.yaml"
    target = CHECKOUT / "examples" / "sweep_target.py"
    config.write_text(CONFIG.format(target=f"{target}:digits", trials=options.trials, out=out / "sweep"))

    parent = start(config)
    try:
        workers = kill_both(parent, out, options.trials)
    finally:  # whatever went wrong, nothing stays behind
        parent.kill()
        parent.wait()
    wait_for("workers to end with their parent", lambda: not any(map(is_alive, workers)))
    before = ended(out)
    print(f"parent killed after {len(before)} trials", flush=True)

    code = start(config, "--resume").wait()
    after = ended(out)
    lost = [number for number, values in before.items() if after.get(number) != values]
    resumed = retried(out)
    print(f"sweep: trials={len(after)} lost={len(lost)} resumed={resumed}")
    return int(code != 0 or bool(lost) or len(after) != options.trials or resumed < 2)


def kill_both(parent: subprocess.Popen[bytes], out: Path, count: int) -> list[int]:
    """Kills a worker, and later the parent; returns the workers that the parent had."""
    wait_for("a quarter of the trials", lambda: len(ended(out)) >= count // 4)
    worker = wait_for("a worker in mid-trial", lambda: next(iter(busy_workers(parent.pid)), None))
    os.kill(worker, signal.SIGKILL)
    print(f"worker {worker} killed after {len(ended(out))} trials", flush=True)
    wait_for("half of the trials", lambda: len(ended(out)) >= count // 2)
    workers: list[int] = wait_for("a worker in mid-trial", lambda: busy_workers(parent.pid))
    parent.kill()
    return workers


def start(config: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "autoprec", "sweep", str(config), "--workers", "2", *words]
    return subprocess.Popen(command, cwd=CHECKOUT)


def wait_for(what: str, look: Callable[[], Any]) -> Any:
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        found = look()
        if found:
            return found
        time.sleep(0.5)
    raise SystemExit(f"sweep: waited {_PATIENCE_S:.0f} s for {what}")


def trials(out: Path) -> list[Any]:
    import optuna

    storage = f"sqlite:///{out / 'sweep' / 'study.db'}"
    if not (out / "sweep" / "sweep.yaml").exists():  # the tables may not be there yet
        return []
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.load_study(study_name="check", storage=storage).get_trials(deepcopy=False)


def ended(out: Path) -> dict[int, Any]:
    """Trials with a result: objectives, or the reason for none."""
    from autoprec.sweep.studies import is_lost

    return {
        trial.number: trial.values or trial.user_attrs.get("reason")
        for trial in trials(out)
        if trial.state.is_finished() and not is_lost(trial)
    }


def retried(out: Path) -> int:
    return sum("retry_history" in trial.system_attrs for trial in trials(out))


def busy_workers(parent: int) -> list[int]:
    """Workers that have a run in progress: a server of processes below them, and a run below that."""
    parents = {int(entry.name): parent_of(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}

    def below(process: int) -> list[int]:
        return [child for child, above in parents.items() if above == process]

    return [worker for worker in below(parent) if any(below(server) for server in below(worker))]


def parent_of(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


if __name__ == "__main__":
    sys.exit(main())
