"""Writes the record of a run while it trains; ``run_record`` says what it holds and reads it.

``run.json`` is replaced as a whole, the other two files grow by whole lines, so that a run that is killed leaves a
record that can be read. A resumed run goes on with the record that it finds. The record of another run that is in the
way is moved into a folder beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from autoprec.history import Decision
from autoprec.json_files import encoded, write_json, write_whole
from autoprec.progress_reading import ProgressReading, RunInfo, RunTotals
from autoprec.run_record import HISTORY, RUN, STEPS, VERSION, RecordedStep, RecordError, RunRecord, read_record

_STEP_FIELDS = tuple(one.name for one in fields(RecordedStep))


class RecordWriter:
    """Writes the record of one run into a folder.

    Args:
        folder: The folder, made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.name = f"the record of the run in '{folder}'"
        self._folder = folder.absolute()  # whoever changes the working directory in the middle of a run
        self._document: dict[str, Any] = {}
        self._before_s = self._before_decision_s = 0.0
        self._own_file: tuple[int, int] | None = None
        self._is_history_new = True
        self._has_all_formats = True

    def started(self, info: RunInfo) -> None:
        """Writes ``run.json``, or goes on with it.

        Args:
            info: What is known.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = self._earlier(info)
        self._document = {
            "version": VERSION,
            "status": "running",
            "info": encoded(asdict(info)),
            "resumed_at": [],
            "costs": {},
            "totals": None,
        }
        if earlier is None:
            for name in (HISTORY, STEPS):
                (self._folder / name).write_bytes(b"")
        else:
            self._go_on(earlier, info)
        self._write_run()

    def decided(self, decisions: Sequence[Decision]) -> None:
        """Adds decisions to ``history.jsonl``; the first ones of a fit are all that there are, and replace it.

        Args:
            decisions: New ones.
        """
        self._check_own()
        if self._is_history_new:
            self._is_history_new = False
            write_whole(self._folder / HISTORY, _text(map(Decision.to_dict, decisions)))
        else:
            _append(self._folder / HISTORY, map(Decision.to_dict, decisions))

    def progressed(self, reading: ProgressReading) -> None:
        """Adds a line to ``steps.jsonl``.

        Args:
            reading: The run as it is.
        """
        self._check_own()
        formats = reading.changed if self._has_all_formats else reading.formats
        self._has_all_formats = True
        line = {name: getattr(reading, name) for name in _STEP_FIELDS}
        line |= {"formats": formats, "elapsed_s": self._before_s + reading.elapsed_s}
        _append(self._folder / STEPS, [line])
        if reading.costs is not None:
            self._document["costs"] = encoded(reading.costs)
            self._write_run()

    def ended(self, totals: RunTotals) -> None:
        """Writes the decisions with what was noted on them later, and how the run ended.

        Args:
            totals: How it ended.
        """
        self._check_own()
        write_whole(self._folder / HISTORY, _text(map(Decision.to_dict, totals.history)))
        totals = replace(
            totals,
            history=(),
            wall_s=self._before_s + totals.wall_s,
            decision_s=self._before_decision_s + totals.decision_s,
        )
        self._document |= {
            "status": totals.ended,
            "totals": encoded({one.name: getattr(totals, one.name) for one in fields(totals)}),
        }
        self._write_run()

    # ---- inside ----

    def _earlier(self, info: RunInfo) -> RunRecord | None:
        """The record that this run goes on with; one of another run is moved out of the way."""
        if not (self._folder / RUN).exists():
            return None
        with suppress(RecordError):
            found = read_record(self._folder)
            units = [unit.name for unit in info.units]
            if info.window > 0 and [unit.name for unit in found.info.units] == units:
                return found
        number = 1
        while (self._folder / f"earlier-{number}").exists():
            number += 1
        target = self._folder / f"earlier-{number}"
        target.mkdir()
        for name in (RUN, HISTORY, STEPS):
            with suppress(FileNotFoundError):
                (self._folder / name).replace(target / name)
        return None

    def _go_on(self, earlier: RunRecord, info: RunInfo) -> None:
        before = [step for step in earlier.steps if step.window <= info.window]
        if before:
            self._before_s = before[-1].elapsed_s
            self._before_decision_s = sum(step.decision_ms for step in before) / 1e3
        self._document["info"] = encoded(asdict(earlier.info))
        self._document["resumed_at"] = [*earlier.run.resumed_at, info.window]
        self._document["costs"] = {
            unit: {name: cost.model_dump() for name, cost in formats.items()}
            for unit, formats in encoded(earlier.run.costs).items()
        }
        self._has_all_formats = False  # lines that changed some may be among those that are made again
        for name in (HISTORY, STEPS):
            _end_line(self._folder / name)

    def _write_run(self) -> None:
        write_json(self._folder / RUN, self._document, allow_nan=False)
        self._own_file = _identity(self._folder / RUN)

    def _check_own(self) -> None:
        """Raises where another run has begun its record in the folder meanwhile: neither could be read."""
        if _identity(self._folder / RUN) != self._own_file:
            raise RuntimeError("another run writes its record there; give each run a folder of its own")


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _text(entries: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(encoded(entry), allow_nan=False)}\n" for entry in entries).encode()


def _append(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    with path.open("ab") as file:
        file.write(_text(entries))


def _end_line(path: Path) -> None:
    """Ends a last line that was cut off, so that the next one is not lost with it."""
    with suppress(FileNotFoundError):
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")
