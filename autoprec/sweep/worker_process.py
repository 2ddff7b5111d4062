"""The process of a worker, started by a launcher with ``FOLDER DEADLINE`` behind it.

Says what happens as lines of JSON on its standard output, writes all else into a log, and ends as soon as its standard
input is closed, which the system does when its parent is gone.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from autoprec.own_process import redirect_output


def main(arguments: list[str]) -> int:
    """Works until there is nothing left to do.

    Args:
        arguments: Folder of the sweep, and the value of ``time.time()`` after which no trial begins.

    Returns:
        The exit code.
    """
    folder, deadline = Path(arguments[0]), float(arguments[1])
    Thread(target=_end_with_parent, name="autoprec-parent", daemon=True).start()
    said, lock = os.fdopen(os.dup(1), "w", buffering=1), Lock()
    redirect_output(folder / "workers" / f"worker-{os.getpid()}.log")

    def notify(event: dict[str, Any]) -> None:
        with lock:
            said.write(json.dumps(event) + "\n")

    from autoprec.sweep.config import SweepError
    from autoprec.sweep.reading import load_config
    from autoprec.sweep.studies import SweepStudy
    from autoprec.sweep.worker import SweepWorker
    from autoprec.target_functions import TargetError

    try:
        sweep = SweepStudy(load_config(folder / "sweep.yaml", out=folder))
        notify({"kind": "hello", "worker": sweep.worker})
        SweepWorker(sweep, notify, deadline).run()
    except (TargetError, SweepError) as error:
        notify({"kind": "error", "message": str(error), "is_users": True})
        return 2
    except Exception as error:
        traceback.print_exc()
        notify({"kind": "error", "message": f"{type(error).__name__}: {error}", "is_users": False})
        return 1
    return 0


def _end_with_parent() -> None:
    # not through `sys.stdin`, whose lock the interpreter would wait for at its end
    while os.read(0, 1):
        pass
    os._exit(1)
