"""A run shows its metrics while it trains, and leaves nothing behind, however it ends.

Time budget: 30 s.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from autoprec import Action, AutoPrecisionCallback, MonitorConfig
from autoprec.monitoring import monitor as monitor_module
from autoprec.monitoring.values import StepReader, StepValues
from tests.monitored import Scraped, Scraper, our_threads, scrape
from tests.small_fits import Plain, assert_identical, loader, outcome, quiet, seed
from tests.support import Lin, cpu, scripted, squares_but


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not our_threads()


def watched(at: int = 6, monitor: Any = 0, **options: Any) -> tuple[AutoPrecisionCallback, Scraper]:
    callback = AutoPrecisionCallback(interval=2, verbose=False, monitor=monitor, **options)
    return callback, Scraper(callback, at)


def fit(callbacks: list[Callback], module: pl.LightningModule | None = None, **options: Any) -> pl.LightningModule:
    module = Plain() if module is None else module
    quiet(**{"max_steps": 8, "callbacks": callbacks, **options}).fit(module, loader())
    return module


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# ---- what is shown ----


def test_a_run_under_way() -> None:
    """Also steps between two decisions, and skipped ones, which no decision follows."""
    callback = scripted(
        {0: Action(precision={"*": "fp16"}), 3: Action(clip=0.5)}, interval=100, verbose=False, monitor=0
    )
    then: list[Any] = []
    scraper = Scraper(callback, 6, lambda: then.extend([callback.loss_scale, callback.precision_map()]))
    cpu(callbacks=[callback, scraper]).fit(
        Lin(64, 8, loss=lambda net, batch, index: squares_but(net, batch, index, bad=[4]))
    )
    seen, (applied, skipped) = scraper.seen, scraper.counts
    assert (applied, skipped) == (5, 1)
    assert (seen.value("applied_steps_total"), seen.value("skipped_steps_total")) == (applied, skipped)
    scale, formats = then
    assert seen.value("loss_scale") == scale
    assert seen.value("loss_scale_floor") == 1.0
    assert seen.value("clip_threshold") == 0.5
    assert seen.value("batch_size") == 8
    assert seen.value("step_seconds_count") == 6
    assert seen.value("running") == 1
    assert 0 < seen.value("grad_norm") < 100
    assert seen.value("memory_bytes") > 1e6
    assert seen.value("progress_ratio") == 0.0  # as it was when training began: no decision was due yet
    assert seen.value("last_step_timestamp_seconds") >= seen.value("start_timestamp_seconds") > 1.7e9
    made = [row for row in callback.history if row.step < 6 and (row.knob, row.outcome) == ("precision", "applied")]
    assert seen.value("decisions_total", knob="precision", outcome="applied") == len(made) > 0
    assert seen.value("decisions_total", knob="rollback", outcome="applied") == 0
    (unit,) = seen.all("unit_format_info")
    assert (unit["unit"], unit["format"]) == ("net", formats["net"])
    emulated = "true" if formats["net"] == "fp16" else "false"
    assert seen.value("units", format=formats["net"], emulated=emulated) == 1
    assert seen.value("parameters", format=formats["net"], emulated=emulated) == 5


def test_what_decisions_measure() -> None:
    callback, scraper = watched(at=8)
    fit([callback, scraper])
    seen = scraper.seen
    assert seen.value("samples_per_second") > 0
    assert seen.value("loss") > 0
    assert seen.value("epoch") == 0
    assert 0 < seen.value("progress_ratio") < 1
    assert {each["unit"] for each in seen.all("unit_grad_norm")} == {"net.0", "net.2"}
    assert not seen.all("loss_scale"), "nothing needs one"
    (run,) = seen.all("run_info")
    assert (run["run"], run["model"], run["policy"]) == ("Plain", "Plain", "rule")


def test_a_step_is_a_whole_accumulation() -> None:
    callback, scraper = watched(at=6)
    fit([callback, scraper], accumulate_grad_batches=2)
    assert scraper.seen.value("step_seconds_count") == scraper.seen.value("applied_steps_total") == 3
    assert scraper.seen.value("accumulate_grad_batches") == 2


class Wide(Plain):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.more = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])

    def loss(self, batch: Any) -> Any:
        return super().loss([self.more(batch[0]), batch[1]])


def test_series_are_bounded() -> None:
    """The largest units have series of their own; all of them count."""
    callback, scraper = watched(monitor=MonitorConfig(max_units=1))
    fit([callback, scraper], Wide(6))
    seen = scraper.seen
    assert [each["unit"] for each in seen.all("unit_format_info")] == ["net.0"]
    assert seen.value("unit_series_omitted") == 7
    assert sum(seen.value("units", format=name, emulated="false") for name in ("fp32", "bf16")) == 8
    assert len(seen.samples) < 100


@pytest.mark.parametrize("run", [None, "mine"])
def test_name_of_the_run(tmp_path: Path, run: str | None) -> None:
    callback, scraper = watched(monitor=MonitorConfig(run=run))
    fit([callback, scraper], logger=CSVLogger(tmp_path, name="digits", version=3))
    (labels,) = scraper.seen.all("running")
    assert labels == {"run": run or "digits/version_3", "device": "cpu"}


def test_names_that_are_no_text_are_shown(tmp_path: Path) -> None:
    class Odd(Lin):
        __qualname__ = "Net\udce8"

    callback, scraper = watched(monitor=MonitorConfig())
    cpu(callbacks=[callback, scraper], logger=CSVLogger(tmp_path, name="", version="caf\udce9")).fit(Odd(64, 8))
    (labels,) = scraper.seen.all("run_info")
    assert labels["run"] == "caf\\udce9"
    assert labels["model"] == "Net\\udce8"


@pytest.mark.parametrize("knobs", [(), ("precision", "loss_scale", "clip")])
def test_training_is_the_same(knobs: tuple[str, ...]) -> None:
    def run(**options: Any) -> Any:
        seed()
        module = Plain()
        trainer = quiet(
            max_steps=8, callbacks=[AutoPrecisionCallback(interval=2, knobs=knobs, verbose=False, **options)]
        )
        trainer.fit(module, loader())
        return outcome(trainer, module)

    assert_identical(run(), run(monitor=0))


# ---- how it ends ----


class Stop(Exception):
    pass


ENDS: dict[str, tuple[str, type[BaseException]]] = {
    "exception in a batch": ("on_train_batch_end", Stop),
    "interrupt": ("on_train_batch_end", KeyboardInterrupt),
    "exception when training starts": ("on_train_start", Stop),
    "exception at the end": ("on_fit_end", Stop),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left(end: str) -> None:
    hook, kind = ENDS[end]
    port = free_port()
    callback, _ = watched(monitor=port)
    was_listening: list[bool] = []

    def stop(trainer: Any, *args: Any) -> None:
        was_listening.append(is_listening(port))
        raise kind("stop")

    with pytest.raises((kind, SystemExit)):
        fit([callback, LambdaCallback(**{hook: stop})])
    assert was_listening[0] == (hook != "on_fit_end"), "the test is of no use if nothing listened"
    assert not is_listening(port)
    assert callback.monitor_url is None


def test_again_on_the_same_port() -> None:
    port = free_port()
    callback, scraper = watched(monitor=port)
    for _ in range(2):
        scraper.batches = 0
        fit([callback, scraper])
        assert scraper.url == f"http://127.0.0.1:{port}/metrics"
        assert scraper.seen.value("applied_steps_total") == 6
        assert not is_listening(port)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes are not forked here")
def test_forked_workers_do_not_hold_the_port() -> None:
    port = free_port()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    try:
        callback, scraper = watched(monitor=port)
        scraper.also = worker.start
        fit([callback, scraper])
        assert worker.is_alive()
        assert not is_listening(port)
        callback, scraper = watched(monitor=port)
        fit([callback, scraper])
        assert scraper.seen.value("running") == 1
    finally:
        worker.kill()
        worker.join()


def test_a_client_that_says_nothing_is_let_go() -> None:
    callback, scraper = watched(monitor=(port := free_port()))
    with socket.socket() as client:
        scraper.also = lambda: client.connect(("127.0.0.1", port))
        fit([callback, scraper])
        assert client.recv(1) == b""


def test_two_runs_in_one_process() -> None:
    outer, outer_scraper = watched(at=4)
    inner, inner_scraper = watched()
    outer_scraper.also = lambda: fit([inner, inner_scraper], Wide(1))
    fit([outer, outer_scraper, late := Scraper(outer, 8)])
    assert outer_scraper.url == late.url != inner_scraper.url
    assert inner_scraper.seen.all("running") == [{"run": "Wide", "device": "cpu"}]
    assert late.seen.value("applied_steps_total", run="Plain") == 8


def test_before_and_after_it_can_be_copied() -> None:
    callback, scraper = watched()
    for _ in range(2):
        assert pickle.loads(pickle.dumps(callback)).monitor == copy.deepcopy(callback).monitor == MonitorConfig()
        fit([callback, scraper])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_commands_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "monitoring.md").read_text()
    commands = re.findall(r"^    (curl .*?)(?:  +# .*)?$", page, re.MULTILINE)
    commands += re.findall(r'^    watch -n 2 "(curl [^"]*)"', page, re.MULTILINE)
    assert len(commands) == 3
    callback, scraper = watched(monitor=(port := free_port()))
    answers: list[str] = []

    def ask() -> None:
        for command in commands:
            words = ["bash", "-c", command.replace("localhost:9753", f"127.0.0.1:{port}")]
            answers.append(subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout)

    scraper.also = ask
    fit([callback, scraper])
    everything, some, formats = (answer.splitlines() for answer in answers)
    assert len(everything) > len(some) == 3
    assert len(formats) == 2, "a line for each unit"


# ---- what goes wrong ----


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        callback, _ = watched(monitor=port)
        with pytest.warns(UserWarning, match=f"nothing can listen on 127.0.0.1 port {port}") as warned:
            fit([callback])
    assert len([each for each in warned if "autoprec" in str(each.message)]) == 1
    assert callback.applied_steps == 8


def test_address_that_is_not_ours() -> None:
    callback, _ = watched(monitor=MonitorConfig(address="192.0.2.1"))
    with pytest.warns(UserWarning, match="nothing can listen on 192.0.2.1 port 0"):
        fit([callback])
    assert callback.applied_steps == 8


def test_a_fault_of_ours_does_not_cost_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> str:
        raise RuntimeError("no name")

    monkeypatch.setattr(monitor_module, "run_name", fail)
    callback, _ = watched()
    with pytest.warns(UserWarning, match="Monitor failed .*no name.* is off from here on"):
        fit([callback])
    assert callback.applied_steps == 8


def test_a_fault_in_a_step_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, _ = watched()

    def fail(self: StepReader) -> StepValues:
        if callback.applied_steps == 3:
            raise RuntimeError("no values")
        return read(self)

    read = StepReader.read
    monkeypatch.setattr(StepReader, "read", fail)
    with pytest.warns(UserWarning, match="metrics are off from here on, .*no values") as warned:
        fit([callback])
    assert len([each for each in warned if "metrics are off" in str(each.message)]) == 1
    assert callback.applied_steps == 8


@pytest.mark.parametrize("options", [{"barebones": True}, {"fast_dev_run": 6}], ids=str)
def test_trainers_that_write_nothing(options: dict[str, Any]) -> None:
    callback, scraper = watched()
    plain: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    Trainer(**plain, **options, callbacks=[callback, scraper]).fit(Plain(), loader())
    assert scraper.seen.all("running") == [{"run": "Plain", "device": "cpu"}]


# ---- how it is asked for ----


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPREC_MONITOR_PORT", raising=False)
    callback = AutoPrecisionCallback(verbose=False)
    seen: list[tuple[Any, list[str]]] = []
    fit([callback, LambdaCallback(on_train_batch_end=lambda *args: seen.append((callback.monitor_url, our_threads())))])
    assert seen == [(None, [])] * 8


@pytest.mark.parametrize("value", ["", "off", " 0 "])
def test_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC_MONITOR_PORT", value)
    callback = AutoPrecisionCallback(verbose=False)
    urls: list[str | None] = []
    fit([callback, LambdaCallback(on_train_batch_end=lambda *args: urls.append(callback.monitor_url))])
    assert all((url is not None) == (value.strip() == "0") for url in urls)


@pytest.mark.parametrize("value", ["yes", "70000", "-1"])
def test_environment_that_is_not_a_port(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC_MONITOR_PORT", value)
    callback = AutoPrecisionCallback(verbose=False)
    with pytest.warns(UserWarning, match=f"AUTOPREC_MONITOR_PORT='{value}': it must be an int from 0"):
        fit([callback])
    assert callback.applied_steps == 8


def test_the_argument_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC_MONITOR_PORT", str(free_port()))
    callback, scraper = watched(monitor=(port := free_port()))
    fit([callback, scraper])
    assert scraper.url == f"http://127.0.0.1:{port}/metrics"


WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: AutoPrecisionCallback(monitor=True), TypeError, "Passed `AutoPrecisionCallback(monitor=True)`"),
    (lambda: AutoPrecisionCallback(monitor="9753"), TypeError, "must be a port"),  # type: ignore[arg-type]
    (lambda: AutoPrecisionCallback(monitor=70000), ValueError, "`port` must be an int from 0 (a free port) to 65535"),
    (lambda: MonitorConfig(port=True), TypeError, "Passed `MonitorConfig(port=True)`"),
    (lambda: MonitorConfig(address=""), ValueError, "`address` must be a host name or an IP address"),
    (lambda: MonitorConfig(run=""), ValueError, "`run` must be a name"),
    (lambda: MonitorConfig(max_units=-1), ValueError, "`max_units` must be an int >= 0"),
    (lambda: MonitorConfig(push_url="gateway:9091"), ValueError, "`push_url` must be a URL as http://"),
    (lambda: MonitorConfig(textfile="metrics.txt"), ValueError, "`textfile` must be a path that ends in .prom"),
    (lambda: MonitorConfig(interval_s=0.0), ValueError, "`interval_s` must be a number >= 0.1"),
]


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_wrong_settings(index: int) -> None:
    make, kind, words = WRONG[index]
    with pytest.raises(kind, match=re.escape(words)):
        make()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'autoprec[monitor]'")):
        AutoPrecisionCallback(monitor=0)
    monkeypatch.setenv("AUTOPREC_MONITOR_PORT", "0")
    callback = AutoPrecisionCallback(verbose=False)
    with pytest.warns(UserWarning, match="`prometheus_client` is not installed"):
        fit([callback])
    assert callback.applied_steps == 8


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    callback, scraper = watched(monitor=MonitorConfig(address="::1"))
    fit([callback, scraper])
    assert str(scraper.url).startswith("http://[::1]:")


def test_any_path() -> None:
    """As with prometheus_client's own server."""
    callback, scraper = watched()
    answers: list[Scraped] = []
    scraper.also = lambda: answers.append(scrape(str(callback.monitor_url).replace("/metrics", "/")))
    fit([callback, scraper])
    assert answers[0].names == scraper.seen.names
