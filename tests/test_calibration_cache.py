"""Results on disk: what is read back, what is left out of account with a note, and several runs at once.

Time budget: 20 s (two processes).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.calibration import cache as cache_module
from autoprec.calibration.cache import Cache, cache_folder, key_of
from autoprec.calibration.layer_runs import Measured

KEY = {"device": "a chip", "threads": "1"}
COST = Measured(1.5, 1e-3, 100, 20)


def path_in(folder: Path) -> Path:
    Cache(KEY, folder).add({"a": COST})
    (path,) = folder.glob("*.json")
    return path


def test_what_was_added_is_read_back(tmp_path: Path) -> None:
    Cache(KEY, tmp_path / "new" / "folder").add({"a": COST})
    again = Cache(KEY, tmp_path / "new" / "folder")
    assert (again.entries, again.note) == ({"a": COST}, None)
    assert not list(tmp_path.rglob("*.tmp"))


def test_nothing_is_written_for_nothing(tmp_path: Path) -> None:
    Cache(KEY, tmp_path / "folder").add({})
    assert not (tmp_path / "folder").exists()


def test_another_device_has_a_file_of_its_own(tmp_path: Path) -> None:
    path_in(tmp_path)
    other = Cache({**KEY, "device": "another"}, tmp_path)
    assert (other.entries, other.note) == ({}, None)


def test_the_key_holds_what_results_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key_of(torch.device("cpu"))
    assert {"device", "driver", "torch", "kernels", "threads"} <= plain.keys()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert key_of(torch.device("cpu")) != plain
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert key_of(torch.device("cpu")) != plain
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == Path(os.environ["AUTOPREC_CACHE_DIR"])
    monkeypatch.delenv("AUTOPREC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache_folder() == tmp_path / "autoprec"


def good() -> dict[str, Any]:
    return {"version": 1, "key": dict(KEY), "entries": {"a": COST._asdict()}}


def with_entry(**fields: Any) -> dict[str, Any]:
    return {**good(), "entries": {"a": {**COST._asdict(), **fields}}}


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "truncated": json.dumps(good()).encode()[:-20],
    "not JSON": b"\x80\x04\x95pickle",
    "not text": bytes(range(256)),
    "foreign JSON": b'{"name": "somebody else"}',
    "a list": b"[1, 2, 3]",
    "deep": b"[" * 100_000,
    "another version": json.dumps({**good(), "version": 2}).encode(),
    "another device": json.dumps({**good(), "key": {"device": "other"}}).encode(),
    "unknown field": json.dumps({**good(), "more": 1}).encode(),
    "entries as list": json.dumps({**good(), "entries": []}).encode(),
    "NaN": json.dumps(with_entry(ms=float("nan"))).encode(),
    "infinite": json.dumps(with_entry(ms=float("inf"))).encode(),
    "negative": json.dumps(with_entry(ms=-1.0)).encode(),
    "zero": json.dumps(with_entry(ms=0.0)).encode(),
    "text for a number": json.dumps(with_entry(ms="1.5")).encode(),
    "null": json.dumps(with_entry(error=None)).encode(),
    "fraction of bytes": json.dumps(with_entry(copy_bytes=0.5)).encode(),
    "huge number": json.dumps(with_entry(copy_bytes=1 << 60)).encode(),
    "missing field": json.dumps({**good(), "entries": {"a": {"ms": 1.0}}}).encode(),
    "too many": json.dumps({**good(), "entries": {str(i): COST._asdict() for i in range(4097)}}).encode(),
    "too large": b" " * (cache_module.MOST_BYTES + 1),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_left_out_of_account(content: bytes, tmp_path: Path) -> None:
    path = path_in(tmp_path)
    path.write_bytes(content)
    cache = Cache(KEY, tmp_path)
    assert cache.entries == {}
    assert cache.note is not None
    assert path.name in cache.note
    assert "left out of account" in cache.note
    assert len(cache.note) < 500
    cache.add({"b": COST})
    again = Cache(KEY, tmp_path)
    assert (again.entries, again.note) == ({"b": COST}, None), "the next run finds a whole file"


def test_a_good_file_is_not_broken(tmp_path: Path) -> None:
    """Else the test above says nothing."""
    path_in(tmp_path).write_text(json.dumps(good()))
    cache = Cache(KEY, tmp_path)
    assert (cache.entries, cache.note) == ({"a": COST}, None)


def test_a_folder_where_a_file_should_be(tmp_path: Path) -> None:
    path = path_in(tmp_path)
    path.unlink()
    path.mkdir()
    cache = Cache(KEY, tmp_path)
    assert cache.note is not None
    cache.add({"a": COST})
    assert cache.entries == {"a": COST}
    assert "could not be kept" in cache.note


@pytest.mark.skipif(os.name != "posix", reason="permissions work otherwise")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(KEY, tmp_path / "file" / "folder")
    cache.add({"a": COST})
    assert cache.entries == {"a": COST}
    assert cache.note is not None
    assert "could not be kept" in cache.note


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    path_in(tmp_path)
    tmp_path.chmod(0o500)
    try:
        cache = Cache(KEY, tmp_path)
        cache.add({"b": COST})
    finally:
        tmp_path.chmod(0o700)
    assert cache.entries == {"a": COST, "b": COST}
    assert cache.note is not None
    assert "Permission denied" in cache.note


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path_in(tmp_path)
    cache = Cache(KEY, tmp_path)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autoprec.calibration.cache.os.replace", full)
    cache.add({"b": COST})
    assert cache.note is not None
    assert "No space left" in cache.note
    assert Cache(KEY, tmp_path).entries == {"a": COST}
    assert not list(tmp_path.glob("*.tmp"))


def test_the_oldest_results_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MOST_ENTRIES", 3)
    Cache(KEY, tmp_path).add(dict.fromkeys("abc", COST))
    Cache(KEY, tmp_path).add(dict.fromkeys("de", COST))
    assert list(Cache(KEY, tmp_path).entries) == list("cde")


def test_the_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MOST_BYTES", 1000)
    Cache(KEY, tmp_path).add({f"{i:03}": COST for i in range(100)})
    again = Cache(KEY, tmp_path)
    assert again.note is None
    assert 0 < len(again.entries) < 100
    assert "099" in again.entries


def test_a_second_cache_keeps_what_the_first_has_written_meanwhile(tmp_path: Path) -> None:
    first, second = Cache(KEY, tmp_path), Cache(KEY, tmp_path)
    first.add({"a": COST})
    second.add({"b": COST})
    assert Cache(KEY, tmp_path).entries == {"a": COST, "b": COST}


WRITER = """
import sys
from pathlib import Path
from autoprec.calibration.cache import Cache
from autoprec.calibration.layer_runs import Measured

key = {"device": "a chip", "threads": "1"}
for index in range(40):
    Cache(key, Path(sys.argv[1])).add({f"{sys.argv[2]}{index}": Measured(1.0 + index, 0.0, 0, 0)})
"""


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], env=environment) for name in "ab"]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    cache = Cache(KEY, tmp_path)
    assert cache.note is None
    assert cache.entries.keys() == {f"{name}{index}" for name in "ab" for index in range(40)}


def test_a_process_that_never_ends_its_turn_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped while it wrote, for instance. Training goes on, without results on disk."""
    fcntl = pytest.importorskip("fcntl")
    before = path_in(tmp_path).read_bytes()
    monkeypatch.setattr(cache_module, "_TRIES", 3)
    cache = Cache(KEY, tmp_path)
    (lock,) = tmp_path.glob("*.lock")
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.add({"b": COST})
    assert cache.note is not None
    assert "another process has been writing" in cache.note
    assert cache.entries == {"a": COST, "b": COST}
    assert path_in(tmp_path).read_bytes() == before
    cache.add({"c": COST})
    assert Cache(KEY, tmp_path).entries == {"a": COST, "c": COST}
