"""Where a study is kept: SQLite made safe for many processes, a journal file, another database, or a gRPC proxy.

SQLite is the default: it needs no server, every tool of Optuna opens its file, it has heartbeats, and what a trial has
written is on disk when the call returns. Its one weakness, ``database is locked`` between processes, is met by a long
timeout and by trying again. A journal file is for shared file systems on which SQLite's locks do not hold.
"""

from __future__ import annotations

import functools
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.exc import IntegrityError, OperationalError

from autoprec.sweep.config import SweepError

HEARTBEAT_S = 20
"""Seconds between signs of life of a trial."""
GRACE_S = 120
"""Seconds without one after which a trial of another machine counts as dead."""
SEEN = "seen"
"""User attribute with the time of the last sign of life, where the storage has no heartbeats."""
_BUSY_S = 60
_PATIENCE_S = 180.0
_ATTEMPTS = 20
_BLOCK = 65536
_BUSY = ("locked", "busy")


def open_storage(url: str | None, folder: Path, max_retry: int) -> BaseStorage:
    """Opens a storage.

    Args:
        url: An SQLAlchemy URL, ``journal:<file>`` or ``grpc://host:port``; ``None`` for SQLite in the folder.
        folder: Folder of the sweep, which exists.
        max_retry: Times that a trial is tried again whose worker died.

    Raises:
        SweepError: If it cannot be opened; the message says why.
    """
    url = url or default_url(folder).replace("{", "{{").replace("}", "}}")  # Optuna fills its version into braces
    try:
        with quiet_optuna():
            if url.startswith("journal:"):
                path = Path(url.removeprefix("journal:").removeprefix("//"))
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = JournalFileOpenLock(str(path))
                _cut_torn_line(path, lock)
                return JournalStorage(JournalFileBackend(str(path), lock))
            if url.startswith("grpc://"):
                return _proxy(url)
            return _database(url, max_retry)
    except SweepError:
        raise
    except Exception as error:  # of SQLAlchemy, of drivers and of gRPC: each has classes of its own
        raise SweepError(
            f"Cannot open the storage `{url}`: {next(iter(str(error).splitlines()), type(error).__name__)}. It is an"
            " SQLAlchemy URL such as `sqlite:///study.db` or `postgresql://user@host/name` (with its driver"
            " installed), `journal:<file>`, or `grpc://host:port` of a proxy that runs."
        ) from error


def default_url(folder: Path) -> str:
    """Returns the URL of the storage in the folder of a sweep.

    Args:
        folder: The folder.
    """
    path = str(folder.resolve() / "study.db")
    if "?" in path or "%" in path:  # would begin options of the URL, or stand for another sign
        path = f"file:{quote(quote(path))}?uri=true"  # SQLAlchemy and SQLite each take one quoting away
    return f"sqlite:///{path}"


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna without its line for each trial and its words on experimental parts, and as before afterwards."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            warnings.filterwarnings("ignore", "Heartbeat of storage is supposed to be used with Study.optimize")
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def retried(error: BaseException) -> bool:
    """Returns whether an error of a storage passes by itself: another process holds the lock of its file.

    Args:
        error: The error.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OperationalError) and any(word in str(cause).lower() for word in _BUSY):
            return True
        cause = cause.__cause__
    return False


def _patiently(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        ends, wait_s = time.monotonic() + _PATIENCE_S, 0.05
        while True:
            try:
                return method(*arguments, **options)
            except (StorageInternalError, OperationalError) as error:
                if not retried(error) or time.monotonic() > ends:
                    raise
                time.sleep(wait_s * random.random())
                wait_s = min(2 * wait_s, 2.0)

    return call


class PatientStorage(RDBStorage):
    """A database whose calls wait while another process holds the lock of its file."""


for _name in (*BaseStorage.__abstractmethods__, "record_heartbeat", "_get_stale_trial_ids", "get_trial_params"):
    if callable(getattr(RDBStorage, _name, None)):
        setattr(PatientStorage, _name, _patiently(getattr(RDBStorage, _name)))


def _cut_torn_line(path: Path, lock: JournalFileOpenLock) -> None:
    """Takes away the last line of a journal where its writer was killed in the middle or the disk was full.

    The next line would be written behind it, and Optuna could not read the journal any more.
    """
    if not path.is_file() or _whole_bytes(path) == path.stat().st_size:
        return
    lock.acquire()  # whoever writes has it
    try:
        os.truncate(path, _whole_bytes(path))
    finally:
        lock.release()


def _whole_bytes(path: Path) -> int:
    """How many bytes of a file whole lines are."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def _database(url: str, max_retry: int) -> RDBStorage:
    is_sqlite = url.startswith("sqlite")
    options = {"connect_args": {"timeout": _BUSY_S}} if is_sqlite else {"pool_pre_ping": True}
    make = functools.partial(
        PatientStorage,
        url,
        engine_kwargs=options,
        heartbeat_interval=HEARTBEAT_S,
        grace_period=GRACE_S,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=max_retry),
    )
    for attempt in range(_ATTEMPTS):
        try:
            storage: RDBStorage = _patiently(make)()
            return storage
        except (IntegrityError, OperationalError) as error:
            # several processes were about to make the tables; one of them has
            if attempt == _ATTEMPTS - 1 or not (isinstance(error, IntegrityError) or "already exists" in str(error)):
                raise
            time.sleep(0.2 * random.random())
    raise AssertionError("the last attempt returns or raises")


def _proxy(url: str) -> GrpcStorageProxy:
    host, colon, port = url.removeprefix("grpc://").partition(":")
    if not host or not colon or not port.isdigit():
        raise SweepError(f"Passed the storage `{url}`. Write `grpc://host:port`, as `grpc://10.0.0.1:13000`.")
    proxy = GrpcStorageProxy(host=host, port=int(port))
    proxy.wait_server_ready(timeout=20)
    return proxy
