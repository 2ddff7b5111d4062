"""Sends metrics to where nobody scrapes them from: a push gateway, a file for node_exporter.

A thread of its own does so in intervals, so that a slow network costs training nothing. What fails is kept for the
training thread to say, and tried again at the next interval.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, push_to_gateway, write_to_textfile

from autoprec.monitoring.config import MonitorConfig

JOB = "autoprec"
_TIMEOUT_S = 5.0
_JOIN_S = 2 * _TIMEOUT_S


class Sender:
    """Sends a registry in intervals, and once more at the end.

    Args:
        config: Where to, and how often.
        registry: What is sent.
        labels: What tells this run from others in a push gateway.
    """

    def __init__(self, config: MonitorConfig, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._config = config
        self._registry = registry
        self._labels = dict(labels)
        self._textfile = Path(config.textfile or "").absolute()  # whoever changes the working directory meanwhile
        self._faults: dict[str, str] = {}
        self._told: set[str] = set()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoprec-monitor-sender", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closing.wait(self._config.interval_s):
            self._send()
        self._send()

    def _send(self) -> None:
        if self._config.push_url is not None:
            self._try(self._config.push_url, self._push)
        if self._config.textfile is not None:
            self._try(str(self._config.textfile), self._write)

    def _try(self, target: str, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:  # of the network, of the disk; said by the training thread
            self._faults[target] = f"{type(error).__name__}: {error}"

    def _push(self) -> None:
        push_to_gateway(str(self._config.push_url), JOB, self._registry, self._labels, timeout=_TIMEOUT_S)

    def _write(self) -> None:
        path = self._textfile
        with suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(path), self._registry)

    def faults(self) -> list[str]:
        """Returns what failed for the first time since the last call, in words."""
        new = {target: error for target, error in tuple(self._faults.items()) if target not in self._told}
        self._told.update(new)
        return [f"metrics could not be sent to {target}: {error}" for target, error in new.items()]

    def close(self) -> None:
        """Sends once more and ends the thread."""
        self._is_closing.set()
        self._thread.join(_JOIN_S)
