"""Metrics that are pushed or written, for jobs that nobody scrapes.

Time budget: 10 s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from autoprec import AutoPrecisionCallback, MonitorConfig
from tests.monitored import Scraped, our_threads
from tests.small_fits import Plain, loader, quiet


class Gateway(HTTPServer):
    """Keeps what is pushed to it: method, path and body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Kept)
        self.pushed: list[tuple[str, str, str]] = []
        self.has_pushed = threading.Event()


class Kept(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        assert isinstance(self.server, Gateway)
        self.server.pushed.append((self.command, self.path, body))
        self.server.has_pushed.set()
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fit(*callbacks: Callback) -> None:
    quiet(max_steps=8, callbacks=list(callbacks)).fit(Plain(), loader())
    assert not our_threads()


def test_a_run_that_changes_its_folder_writes_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Moves(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                (tmp_path / "elsewhere").mkdir()
                monkeypatch.chdir(tmp_path / "elsewhere")

    monkeypatch.chdir(tmp_path)
    fit(AutoPrecisionCallback(verbose=False, monitor=MonitorConfig(port=None, textfile="run.prom")), Moves())
    assert "autoprec_running" in (tmp_path / "run.prom").read_text()
    assert not list((tmp_path / "elsewhere").iterdir())


class Wait(Callback):
    """Waits once for something that another thread does."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.event.wait(20)


def test_push(gateway: Gateway) -> None:
    url = f"http://127.0.0.1:{gateway.server_port}"
    config = MonitorConfig(port=None, push_url=url, interval_s=0.1, run="a/b")
    callback = AutoPrecisionCallback(interval=2, verbose=False, monitor=config)
    fit(callback, Wait(gateway.has_pushed))
    assert callback.monitor_url is None
    (method, path, first), *_, (*_, last) = gateway.pushed
    assert (method, path.split("/")[:4]) == ("PUT", ["", "metrics", "job", "autoprec"])
    assert "run@base64" in path, "a slash in the name must not end the group"
    assert Scraped(first).value("running") == 1
    assert Scraped(last).value("running") == 0
    assert Scraped(last).value("applied_steps_total") == 8


def test_nobody_takes_it() -> None:
    config = MonitorConfig(port=None, push_url="http://127.0.0.1:1", interval_s=0.1)
    callback = AutoPrecisionCallback(interval=2, verbose=False, monitor=config)
    with pytest.warns(UserWarning, match="could not be sent to http://127.0.0.1:1: URLError") as warned:
        fit(callback)
    assert len([each for each in warned if "could not be sent" in str(each.message)]) == 1
    assert callback.applied_steps == 8


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.prom"
    config = MonitorConfig(port=None, textfile=path)
    fit(AutoPrecisionCallback(interval=2, verbose=False, monitor=config))
    seen = Scraped(path.read_text())
    assert (seen.value("running"), seen.value("applied_steps_total")) == (0, 8)
    assert [each.name for each in path.parent.iterdir()] == ["run.prom"]


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = MonitorConfig(port=None, textfile=tmp_path / "file" / "run.prom")
    callback = AutoPrecisionCallback(interval=2, verbose=False, monitor=config)
    with pytest.warns(UserWarning, match="could not be sent to .*run.prom: NotADirectoryError"):
        fit(callback)
    assert callback.applied_steps == 8


@pytest.mark.slow
def test_spawned(tmp_path: Path) -> None:
    """The process that trains opens and closes everything; the parent's callback knows of nothing."""
    path = tmp_path / "run.prom"
    callback = AutoPrecisionCallback(interval=2, verbose=False, monitor=MonitorConfig(port=0, textfile=path))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):  # the launcher sets some
            patch.setenv(name, "")
            patch.delenv(name)
        fit_in = {"strategy": "ddp_spawn", "devices": 1, "use_distributed_sampler": False}
        quiet(max_steps=8, callbacks=[callback], **fit_in).fit(Plain(), loader())
    assert callback.monitor_url is None
    assert not our_threads()
    assert Scraped(path.read_text()).value("applied_steps_total") == 8
