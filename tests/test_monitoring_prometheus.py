"""Metrics, rules and settings before a real Prometheus, where Debian's package (or any other) is installed.

Time budget: 5 s; the live run, marked slow, 30 s.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from lightning.pytorch import Callback

from autoprec import Action, AutoPrecisionCallback, ScriptedController
from autoprec.monitoring.files import DATA, write_files
from tests.monitored import Scraper
from tests.small_fits import Plain, loader, quiet
from tests.test_monitoring_files import panels

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
LABELS = '{run="r", device="cpu", job="autoprec", instance="i"}'


def promtool(*arguments: object, stdin: str = "") -> str:
    command = [str(PROMTOOL), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- files ----


@needs_promtool
def test_rules_are_right() -> None:
    assert "5 rules found" in promtool("check", "rules", DATA / "autoprec_rules.yml")


@needs_promtool
def test_settings_are_right(tmp_path: Path) -> None:
    write_files(tmp_path, (9001, 9002))
    assert "5 rules found" in promtool("check", "config", tmp_path / "prometheus.yml")


@needs_promtool
def test_metrics_are_right() -> None:
    callback = AutoPrecisionCallback(interval=2, verbose=False, monitor=0)
    scraper = Scraper(callback, 8)
    quiet(max_steps=8, callbacks=[callback, scraper]).fit(Plain(), loader())
    assert promtool("check", "metrics", stdin=scraper.seen.text) == ""
    with pytest.raises(AssertionError, match="counter metrics should have"):
        promtool("check", "metrics", stdin="# TYPE a counter\na 1\n")


# ---- rules, each where it fires and where it does not ----

SERIES = Mapping[str, str]
RUNNING = {"running": "1x60"}
# metrics minute by minute, in promtool's notation: start+step x times
CASES: Mapping[str, tuple[str, SERIES, str, bool]] = {
    "idle for 11 minutes": ("LowUtilization", {"utilization_ratio": "0.2x60"}, "11m", True),
    "idle for 9 minutes": ("LowUtilization", {"utilization_ratio": "0.2x60"}, "9m", False),
    "idle with a busy minute": ("LowUtilization", {"utilization_ratio": "0.2x8 0.9 0.2x8"}, "16m", False),
    "busy": ("LowUtilization", {"utilization_ratio": "0.31x60"}, "30m", False),
    "one step in two skipped": (
        "OverflowBurst",
        {"skipped_steps_total": "0+6x60", "applied_steps_total": "0+6x60"},
        "6m",
        True,
    ),
    "a few at the start": (
        "OverflowBurst",
        {"skipped_steps_total": "0 3x60", "applied_steps_total": "0+9x60"},
        "4m",
        False,
    ),
    "one in a hundred": (
        "OverflowBurst",
        {"skipped_steps_total": "0+6x60", "applied_steps_total": "0+600x60"},
        "10m",
        False,
    ),
    "went back": ("Rollback", {"rollbacks_total": "0x3 1x60"}, "6m", True),
    "went back long ago": ("Rollback", {"rollbacks_total": "0x3 1x60"}, "30m", False),
    "never went back": ("Rollback", {"rollbacks_total": "0x60"}, "6m", False),
    "at the floor": ("LossScaleAtFloor", {"loss_scale": "1x60", "loss_scale_floor": "1x60"}, "6m", True),
    "at the floor for a minute": (
        "LossScaleAtFloor",
        {"loss_scale": "1x2 2x60", "loss_scale_floor": "1x60"},
        "6m",
        False,
    ),
    "above the floor": ("LossScaleAtFloor", {"loss_scale": "2x60", "loss_scale_floor": "1x60"}, "20m", False),
    "no loss scale": ("LossScaleAtFloor", {"loss_scale_floor": "1x60"}, "20m", False),
    "no step for 11 minutes": ("NoProgress", {"last_step_timestamp_seconds": "60x60"}, "12m", True),
    "no step for 9 minutes": ("NoProgress", {"last_step_timestamp_seconds": "60x60"}, "10m", False),
    "steps": ("NoProgress", {"last_step_timestamp_seconds": "0+60x60"}, "40m", False),
    "over, in a push gateway": (
        "NoProgress",
        {"running": "1x5 0x60", "last_step_timestamp_seconds": "60x60"},
        "30m",
        False,
    ),
}


def rule_test(alert: str, series: SERIES, at: str, fires: bool) -> Mapping[str, Any]:
    (rule,) = (
        rule
        for group in yaml.safe_load((DATA / "autoprec_rules.yml").read_text())["groups"]
        for rule in group["rules"]
        if rule["alert"] == f"Autoprec{alert}"
    )
    inputs = {**RUNNING, **series}
    return {
        "interval": "1m",
        "input_series": [
            {"series": f"autoprec_{name}{LABELS}", "values": re.sub(r"(?<![+\d])(\d+(?:\.\d+)?)x", r"\1+0x", text)}
            for name, text in inputs.items()
        ],
        # promtool compares annotations too, so it is asked for the alert's own series instead
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{rule["alert"]}", alertstate="firing"}})',
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


def check_rules(folder: Path, tests: Sequence[Mapping[str, Any]]) -> str:
    shutil.copy(DATA / "autoprec_rules.yml", folder)
    document = {"rule_files": ["autoprec_rules.yml"], "evaluation_interval": "1m", "tests": list(tests)}
    path = folder / "tests.yml"
    path.write_text(yaml.safe_dump(document))
    return promtool("test", "rules", path)


@needs_promtool
@pytest.mark.parametrize("case", CASES)
def test_a_rule(case: str, tmp_path: Path) -> None:
    assert "SUCCESS" in check_rules(tmp_path, [rule_test(*CASES[case])])


@needs_promtool
def test_the_check_can_fail(tmp_path: Path) -> None:
    alert, series, at, fires = CASES["went back"]
    with pytest.raises(AssertionError, match="FAILED"):
        check_rules(tmp_path, [rule_test(alert, series, at, not fires)])


def test_every_rule_is_seen_firing_and_not() -> None:
    seen = {(alert, fires) for alert, _, _, fires in CASES.values()}
    names = {rule["alert"] for rule in yaml.safe_load((DATA / "autoprec_rules.yml").read_text())["groups"][0]["rules"]}
    assert seen == {(name.removeprefix("Autoprec"), fires) for name in names for fires in (True, False)}


# ---- a live run ----


class Server:
    """A Prometheus that scrapes one port, ten times a second."""

    def __init__(self, folder: Path, port: int) -> None:
        settings, *_ = write_files(folder, (port,))
        settings.write_text(settings.read_text().replace("5s", "100ms"))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        options = [f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}"]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [str(PROMETHEUS), *options, f"--web.listen-address={self.url.removeprefix('http://')}"],
                stdout=log,
                stderr=log,
            )

    def query(self, expression: str) -> list[Mapping[str, Any]]:
        with urlopen(f"{self.url}/api/v1/query?{urlencode({'query': expression})}", timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return list(found["data"]["result"])

    def wait_for(self, expression: str, limit_s: float = 60.0) -> list[Mapping[str, Any]]:
        """Returns what a query gives as soon as it gives something."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            try:
                if found := self.query(expression):
                    return found
            except URLError:  # it is starting
                pass
            time.sleep(0.1)
        raise AssertionError(f"{expression} has no result")


@pytest.fixture
def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[Server]:
    server = Server(tmp_path, port)
    yield server
    server.process.terminate()
    server.process.wait(20)


class Asks(Callback):
    """Holds the run after a batch until Prometheus has seen it, then asks everything that the dashboard asks."""

    def __init__(self, server: Server, at: int) -> None:
        self.server = server
        self.at = at
        self.batches = 0
        self.steps: Sequence[Mapping[str, Any]] = ()
        self.answers: dict[str, list[Mapping[str, Any]]] = {}

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        if self.batches != self.at:
            time.sleep(0.02)  # so that it is scraped in between
            return
        self.steps = self.server.wait_for(f"autoprec_applied_steps_total == {self.at}")
        for panel in panels():
            for target in panel["targets"]:
                expression = target["expr"].replace("$run", ".*").replace("$__rate_interval", "5s").replace("5m", "10s")
                self.answers[expression] = self.server.query(expression)


@pytest.mark.slow
@needs_prometheus
def test_a_live_run(server: Server, port: int) -> None:
    server.wait_for("up == 0")
    policy = ScriptedController({2: Action(precision={"*": "fp16"}, loss_scale=1024.0), 12: Action(clip=0.5)})
    callback = AutoPrecisionCallback(policy, interval=4, verbose=False, monitor=port)
    asks = Asks(server, 30)
    quiet(max_epochs=5, callbacks=[callback, asks]).fit(Plain(), loader())
    (steps,) = asks.steps
    assert steps["metric"] == {
        "__name__": "autoprec_applied_steps_total",
        "device": "cpu",
        "instance": f"127.0.0.1:{port}",
        "job": "autoprec",
        "run": "Plain",
    }
    empty = {expression for expression, answer in asks.answers.items() if not answer}
    # nothing overflowed in this run, and nothing was undone
    assert {re.findall(r"autoprec_\w+", expression)[0] for expression in empty} <= {"autoprec_unit_overflows_total"}
    formats = [answer for expression, answer in asks.answers.items() if expression.startswith("max by")]
    assert {float(each["value"][1]) for each in formats[0]} == {9.0}, "fp16, emulated, which is the tenth"
    assert not server.query('ALERTS{alertstate="firing"}')
    server.wait_for("up == 0")
