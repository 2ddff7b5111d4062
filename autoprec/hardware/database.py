"""The capability database: the files that ship with autoprec, and the user's own on top of them.

What lives here: finding, reading and merging files, and the list of what is wrong with them. What does not: their
layout (``rows``) and which row a device gets (``detection``). Files are read on first use and kept.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.formats import nearest
from autoprec.hardware.device import Source

if TYPE_CHECKING:
    from autoprec.hardware.rows import DeviceRow, FamilyRow, SourceRow

DIRECTORY_VARIABLE = "AUTOPREC_HARDWARE_DIR"
SHIPPED = Path(__file__).parent / "data" / "families"


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file, in words for its author.

    Attributes:
        file: The file.
        row: The table in it, empty for the file as a whole.
        field: The field, empty for the table as a whole.
        message: What is wrong and what is allowed.
    """

    file: Path
    row: str
    field: str
    message: str

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.row, f"field `{self.field}`" if self.field else "") if part)
        return f"{self.file}: {where}: {self.message}" if where else f"{self.file}: {self.message}"


@dataclass(frozen=True)
class Entry:
    """One row of the database with the documents that it rests on."""

    row: DeviceRow
    sources: tuple[Source, ...]
    file: Path


@dataclass(frozen=True)
class Family:
    """One family with the documents that it rests on."""

    row: FamilyRow
    sources: tuple[Source, ...]
    alignment_sources: tuple[Source, ...]


@dataclass(frozen=True)
class Database:
    """Everything that is known.

    Attributes:
        families: By name.
        entries: Rows by family, in the order of their files; the user's last.
        problems: What was left out of the user's files, and why.
    """

    families: dict[str, Family] = field(default_factory=dict)
    entries: dict[str, list[Entry]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def user_directories() -> tuple[Path, ...]:
    """Where files of the user's are looked for, the one that wins last."""
    import platformdirs

    own = Path(platformdirs.user_config_dir("autoprec", appauthor=False)) / "hardware"
    named = os.environ.get(DIRECTORY_VARIABLE)
    return (own, Path(named).expanduser()) if named else (own,)


@functools.cache
def shipped() -> Database:
    """Returns the database as it ships, without the user's rows.

    Raises:
        AssertionError: If a shipped file is broken.
    """
    return _read_shipped()


def _read_shipped() -> Database:
    database = Database()
    for path in sorted(SHIPPED.glob("*.toml")):
        _add(database, path)
    assert not database.problems, "\n".join(map(str, database.problems))
    return database


@functools.cache
def load() -> Database:
    """Returns the shipped database with the user's rows on top.

    Raises:
        AssertionError: If a shipped file is broken.
    """
    database = _read_shipped()
    for directory in user_directories():
        for path in _files(directory, database.problems):
            _add(database, path)
    return database


def _files(directory: Path, problems: list[Problem]) -> list[Path]:
    """The files in a folder of the user's; it need not exist, unless it was named."""
    try:
        if directory.is_dir():
            return sorted(path for path in directory.iterdir() if path.suffix == ".toml")
    except OSError as error:
        problems.append(Problem(directory, "", "", f"Cannot be read: {error.strerror}."))
        return []
    if str(directory) == os.path.expanduser(os.environ.get(DIRECTORY_VARIABLE, "")):
        problems.append(Problem(directory, "", "", f"{DIRECTORY_VARIABLE} names it, and it is not a directory."))
    return []


def check(path: Path) -> list[Problem]:
    """Returns what is wrong with one file, if it came on top of the shipped ones.

    Args:
        path: The file.
    """
    database = _read_shipped()
    _add(database, path)
    return database.problems


def _add(database: Database, path: Path) -> None:
    """Puts the rows of one file on top; what is broken goes into ``problems``, the rest counts."""
    document = _read(path, database.problems)
    if document is None:
        return
    reader = _Reader(path, database.problems)
    if not reader.header(document):
        return
    sources = dict(reader.sources(document.get("sources", {})))
    family = reader.family(document.get("family"), sources)
    if family is not None:
        database.families[family.row.name] = family
        database.entries.setdefault(family.row.name, [])
    for entry, family_name in reader.entries(document, sources, family, database.families):
        _merge(database.entries[family_name], entry)


def read_toml(path: Path) -> dict[str, Any]:
    """Returns a TOML file as plain data.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no UTF-8 text or no TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return document


def _read(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    try:
        return read_toml(path)
    except OSError as error:
        problems.append(Problem(path, "", "", f"Cannot be read: {error.strerror}."))
    except UnicodeDecodeError:
        problems.append(Problem(path, "", "", "Is not UTF-8 text."))
    except ValueError as error:
        problems.append(Problem(path, "", "", f"Is not TOML: {error}."))
    return None


def _merge(entries: list[Entry], entry: Entry) -> None:
    """Adds a row, or lays it over the one of the same name: what it leaves out stays."""
    for index, known in enumerate(entries):
        if known.row.name.casefold() == entry.row.name.casefold():
            given = entry.row.model_dump(exclude_unset=True)
            merged = _over(known.row.model_dump(exclude_unset=True), given)
            sources = tuple(dict.fromkeys((*entry.sources, *known.sources)))
            entries[index] = Entry(type(entry.row).model_validate(merged), sources, entry.file)
            return
    entries.append(entry)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        merged[key] = _over(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


class _Reader:
    """Reads the tables of one file and notes what is wrong with them."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self._path = path
        self._problems = problems

    def _complain(self, row: str, field: str, message: str) -> None:
        self._problems.append(Problem(self._path, row, field, message))

    def _parse(self, kind: type[Any], data: Any, row: str) -> Any:
        from autoprec.hardware.rows import parse_row

        parsed, complaints = parse_row(kind, data)
        for field_name, message in complaints:
            self._complain(row, field_name, message)
        return None if complaints else parsed

    def header(self, document: Mapping[str, Any]) -> bool:
        from autoprec.hardware.rows import SCHEMA

        if document.get("schema") != SCHEMA:
            got = f"Got {document['schema']!r}. " if "schema" in document else "Is missing. "
            self._complain("", "schema", f"{got}This version of autoprec reads `schema = {SCHEMA}`.")
            return False
        known = ["device", "family", "schema", "sources"]
        for name in document:
            if name not in known:
                self._complain("", name, f"Is no table of this file. Known: {known}.{nearest(name, known)}")
        return True

    def sources(self, tables: Any) -> Iterator[tuple[str, Source]]:
        from autoprec.hardware.rows import SourceRow

        if not isinstance(tables, Mapping):
            self._complain("", "sources", "Must hold tables such as [sources.datasheet].")
            return
        for key, data in tables.items():
            row: SourceRow | None = self._parse(SourceRow, data, f"[sources.{key}]")
            if row is not None:
                yield key, Source(title=row.title, url=row.url)

    def family(self, data: Any, sources: Mapping[str, Source]) -> Family | None:
        from autoprec.hardware.rows import FamilyRow

        if data is None:
            return None
        row: FamilyRow | None = self._parse(FamilyRow, data, "[family]")
        if row is None:
            return None
        keys = {"source": [row.source], "alignment_sources": row.alignment_sources}
        found = {key: self._find(names, sources, "[family]", key) for key, names in keys.items()}
        if None in found.values():
            return None
        return Family(row, found["source"] or (), found["alignment_sources"] or ())

    def entries(
        self,
        document: Mapping[str, Any],
        sources: Mapping[str, Source],
        family: Family | None,
        families: Mapping[str, Family],
    ) -> Iterator[tuple[Entry, str]]:
        from autoprec.hardware.rows import DeviceRow

        tables = document.get("device", [])
        if not isinstance(tables, list):
            self._complain("", "device", "Must be a list of tables: write [[device]] with two brackets.")
            return
        for number, data in enumerate(tables, 1):
            name = data.get("name") if isinstance(data, Mapping) else None
            where = f"device {name!r}" if isinstance(name, str) else f"device number {number}"
            row: DeviceRow | None = self._parse(DeviceRow, data, where)
            if row is None:
                continue
            home = self._home(row, family, families, where)
            documents = self._find([row.source] if row.source else [], sources, where, "source")
            if home is not None and documents is not None:
                yield Entry(row, documents, self._path), home

    def _home(self, row: DeviceRow, family: Family | None, families: Mapping[str, Family], where: str) -> str | None:
        name = row.family or (family.row.name if family else None)
        if name in families:
            return name
        got = f"Got {name!r}. " if name else "Is missing. "
        hint = nearest(name, families) if name else ""
        self._complain(where, "family", f"{got}Known families: {sorted(families)}.{hint}")
        return None

    def _find(
        self, keys: Iterable[str], sources: Mapping[str, Source], where: str, field_name: str
    ) -> tuple[Source, ...] | None:
        unknown = [key for key in keys if key not in sources]
        for key in unknown:
            message = f"Got {key!r}, which is no source of this file. Known: {sorted(sources)}.{nearest(key, sources)}"
            self._complain(where, field_name, message)
        return None if unknown else tuple(sources[key] for key in keys)
