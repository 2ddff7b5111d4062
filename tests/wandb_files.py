"""Reads what wandb has written offline: the records of a `.wandb` file as plain data.

The file begins with `:W&B`, a magic number and a version, and goes on as a LevelDB log: blocks of 32768 bytes with
chunks of records, each chunk with its CRC, length and type (whole, first, middle, last).
"""

from __future__ import annotations

import importlib
import json
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PATIENCE_S = 30.0
_BLOCK, _FILE_HEADER, _CHUNK_HEADER = 32768, struct.Struct("<4sHB"), struct.Struct("<IHB")


@dataclass
class OfflineRun:
    """Everything that one run has stored.

    ``history`` has a dictionary for each row, in order; ``artifacts`` the type, name and file names of each artifact.
    """

    project: str = ""
    group: str = ""
    job_type: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    step_metrics: dict[str, str] = field(default_factory=dict)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    files: Path = Path()
    exit_code: int | None = None

    def rows(self, metric: str) -> list[dict[str, Any]]:
        """The rows that hold a metric."""
        return [row for row in self.history if metric in row]

    def table(self, key: str) -> dict[str, Any]:
        """A table that was logged, from its file: ``columns`` and ``data``."""
        (row,) = self.rows(key)
        document: dict[str, Any] = json.loads((self.files / row[key]["path"]).read_text())
        return document


def read_runs(folder: Path, count: int) -> list[OfflineRun]:
    """Reads every run below a folder.

    Offline, `finish` returns before the service has written all records, and even before it has made the file.

    Args:
        folder: The folder.
        count: How many runs there are to be, all of them finished.
    """
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        runs = [read_run(path) for path in sorted(folder.rglob("*.wandb"))]
        if len(runs) >= count and all(run.exit_code is not None for run in runs):
            break
        assert time.monotonic() < give_up, f"{[run.exit_code for run in runs]} in place of {count} finished runs"
        time.sleep(0.02)
    assert len(runs) == count
    return runs


def read_run(path: Path) -> OfflineRun:
    """Reads what one file holds so far."""
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    run = OfflineRun(files=path.parent / "files")
    for payload in _payloads(path.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(payload)
        _take(run, record)
    return run


def _take(run: OfflineRun, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        found = record.run
        run.project, run.group, run.job_type = found.project, found.run_group, found.job_type
        run.name = found.display_name
        _update(run.config, found.config.update)
    elif kind == "config":
        _update(run.config, record.config.update)
    elif kind == "summary":
        _update(run.summary, record.summary.update)
    elif kind == "history":
        row: dict[str, Any] = {}
        _update(row, record.history.item)
        run.history.append(row)
    elif kind == "metric":
        run.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    elif kind == "artifact":
        found = record.artifact
        names = [entry.path for entry in found.manifest.contents]
        run.artifacts.append({"type": found.type, "name": found.name, "files": names, "metadata": found.metadata})
    elif kind == "exit":
        run.exit_code = record.exit.exit_code


def _update(target: dict[str, Any], items: Iterable[Any]) -> None:
    for item in items:
        keys = [item.key] if item.key else list(item.nested_key)
        place = target
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = json.loads(item.value_json)


def _payloads(data: bytes) -> Iterator[bytes]:
    if len(data) < _FILE_HEADER.size:
        return
    ident, _, _ = _FILE_HEADER.unpack_from(data)
    assert ident == b":W&B", ident
    position, parts = _FILE_HEADER.size, b""
    while position + _CHUNK_HEADER.size <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK_HEADER.size:
            position += left
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(data, position)
        position += _CHUNK_HEADER.size
        if position + length > len(data):  # is being written
            return
        parts += data[position : position + length]
        position += length
        if kind in (1, 4):
            yield parts
            parts = b""
