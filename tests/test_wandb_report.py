"""The report in Weights & Biases: its whole specification, with the network replaced. Time budget: 5 s."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec import metric_names
from autoprec.wandb_logging import JOB_TYPES, VERDICT_COLUMNS
from autoprec.wandb_report import METRICS, TABLES, ReportError, RunFigures, build_report, publish, verdict_table

wandb = pytest.importorskip("wandb")
pytest.importorskip("wandb_workspaces")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydantic's, in wandb-workspaces

PLACE = ("team", "project", "group one")
RUNS = (
    RunFigures(name="a", job_type="amp-bf16", summary={metric_names.STEP_MS: 10.0, "val_loss": 0.5}),
    RunFigures(name="b", job_type="amp-bf16", summary={metric_names.STEP_MS: 12.0, "val_loss": 0.7}),
    RunFigures(
        name="c",
        job_type="autoprec",
        summary={metric_names.STEP_MS: 5.5, "val_loss": 0.6, metric_names.PEAK_BYTES: 2.0**30},
    ),
    RunFigures(name="verdict", job_type="comparison"),
)


class Server:
    """Answers in the place of Weights & Biases and keeps what it is sent."""

    def __init__(self, runs: Any = RUNS) -> None:
        self.sent: list[dict[str, Any]] = []
        self.api = SimpleNamespace(
            default_entity="team",
            projects=lambda entity: [SimpleNamespace(name="project")],
            runs=self.find,
            client=SimpleNamespace(app_url="https://wandb.test"),
        )
        self.runs = runs

    def find(self, path: str, filters: dict[str, str]) -> Any:
        assert (path, filters) == ("team/project", {"group": PLACE[2]})
        return [SimpleNamespace(name=run.name, job_type=run.job_type, summary=run.summary) for run in self.runs]

    def execute(self, api: Any, query: Any, variables: dict[str, Any]) -> dict[str, Any]:
        if "spec" not in variables:
            return {"project": {"internalId": "id"}}
        self.sent.append(variables)
        view = {**variables, "id": "view", "project": {"name": "project", "entityName": "team"}}
        return {"upsertView": {"view": view}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from wandb_workspaces.reports.v2 import interface

    found = Server()
    monkeypatch.setattr(interface, "_get_api", lambda: found.api)
    monkeypatch.setattr(interface, "execute_graphql", found.execute)
    monkeypatch.setattr(wandb, "Api", lambda: found.api)
    monkeypatch.setattr(wandb, "login", lambda **options: True)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    before = set(os.environ)
    yield found
    for name in set(os.environ) - before:
        del os.environ[name]


def specification(server: Server) -> dict[str, Any]:
    (sent,) = server.sent
    document: dict[str, Any] = json.loads(sent["spec"])
    return document


def grids(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]


def panels(grid: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = grid["panelBankSectionConfig"]["panels"]
    return found


def test_the_whole_specification(server: Server) -> None:
    url = publish(*PLACE)
    assert url.startswith("https://wandb.test/team/project/reports/autoprec-and-bf16-mixed")
    (sent,) = server.sent
    assert (sent["entityName"], sent["projectName"], sent["type"]) == ("team", "project", "runs")
    assert sent["displayName"] == "autoprec and bf16-mixed: group one"

    verdict, everything, steered = grids(specification(server))
    lines = {panel["config"]["chartTitle"]: panel["config"] for panel in panels(everything)}
    assert {title: (config.get("xAxis"), config["metrics"]) for title, config in lines.items()} == {
        "Training loss over steps": (metric_names.STEP, [metric_names.LOSS]),
        "Training loss over seconds": (metric_names.ELAPSED_S, [metric_names.LOSS]),
        "val_loss over steps": (metric_names.STEP, ["val_loss"]),
        "val_loss over seconds": (metric_names.ELAPSED_S, ["val_loss"]),
        "Milliseconds of a step": (metric_names.STEP, [metric_names.STEP_MS]),
        "Samples per second": (metric_names.STEP, [metric_names.SAMPLES_PER_S]),
        "Memory in bytes": (metric_names.STEP, [metric_names.MEMORY_BYTES]),
        "Peak memory in bytes": (None, [metric_names.PEAK_BYTES]),
        "Skipped steps": (None, [metric_names.SKIPPED_STEPS]),
    }
    assert {config["groupBy"] for config in lines.values()} == {"jobType"}
    areas = [panel["config"] for panel in panels(steered) if panel["config"].get("plotType") == "stacked-area"]
    prefixes = (metric_names.PARAMETER_SHARE, metric_names.UNIT_SHARE)
    assert [config["metrics"] for config in areas] == [list(metric_names.share_names(prefix)) for prefix in prefixes]
    assert metric_names.VERDICT in json.dumps(panels(verdict))
    for table in (metric_names.FORMAT_MAP, metric_names.HISTORY):
        assert table in json.dumps(panels(steered))
    overlaps = [grid for grid in (everything, steered) if _overlap([panel["layout"] for panel in panels(grid)])]
    assert overlaps == []


def _overlap(layouts: list[dict[str, int]]) -> bool:
    cells = [
        (x, y) for at in layouts for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    return len(cells) != len(set(cells))


def test_sets_of_runs(server: Server) -> None:
    publish(*PLACE)
    verdict, everything, steered = grids(specification(server))
    for grid in (verdict, everything, steered):
        (runset,) = grid["runSets"]
        assert runset["project"]["name"] == "project"
        text = json.dumps(runset["filters"])
        assert '"group"' in text
        assert '"group one"' in text
        assert '"jobType"' in text
    assert [key["name"] for key in everything["runSets"][0]["grouping"]] == ["jobType"]
    for job_type in JOB_TYPES.values():
        assert f'"{job_type}"' in json.dumps(steered["runSets"][0]["filters"])


def test_every_metric_is_one_that_is_logged(server: Server) -> None:
    publish(*PLACE)
    named = set(re.findall(r'"(autoprec/[\w/]+)"', server.sent[0]["spec"]))
    assert named == {*METRICS, *TABLES}
    documented = {*metric_names.AT_LOG_STEPS, *metric_names.AT_DECISIONS, *metric_names.AT_END}
    plain = {re.sub(r"(_share/).*", r"\1<format>", name) for name in METRICS}
    assert plain <= documented


def test_the_held_out_metric_is_found(server: Server) -> None:
    server.runs = (RunFigures(name="a", summary={"valid/loss": 1.0, "loss": 2.0}),)
    publish(*PLACE, static="16-mixed")
    assert '"valid/loss"' in server.sent[0]["spec"]
    assert metric_names.VERDICT not in server.sent[0]["spec"]  # no run of `autoprec compare` in this group


def test_the_report_is_built_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "Api", None)
    report = build_report(*PLACE, static="32-true")
    assert report.title == "autoprec and 32-true: group one"


def test_the_table() -> None:
    lines = verdict_table(RUNS, "amp-bf16", "val_loss").splitlines()
    assert lines[0] == (
        "| runs of | number | val_loss | step time / amp-bf16 | step ms | samples/s | peak MiB | skipped steps |"
    )
    assert lines[2] == "| amp-bf16 | 2 | 0.6 (0.5 to 0.7) | 1.000 | 11 (10 to 12) |  |  |  |"
    assert lines[3] == "| autoprec | 1 | 0.6 | 0.500 | 5.5 |  | 1024 |  |"
    assert len([line for line in lines if line.startswith("|")]) == 4
    assert "has the job type `fp32` to compare with" in verdict_table(RUNS, "fp32", "val_loss")


def test_the_verdict_has_its_columns() -> None:
    from autoprec.compare.verdict import judge
    from autoprec.compare.wandb_runs import verdict_rows
    from tests.comparisons import arm_runs, comparison

    verdict = judge(
        comparison(arm_runs("bf16-mixed", 10.0, 1.0), arm_runs("autoprec", 8.0, 1.0)),
        metric="val_loss",
        mode="min",
        margin=0.05,
    )
    rows = [dict(zip(VERDICT_COLUMNS, row, strict=True)) for row in verdict_rows(verdict)]
    assert [row["arm"] for row in rows] == ["bf16-mixed", "autoprec"]
    assert rows[1]["seeds"] == "4"
    assert re.fullmatch(r"0\.\d+ \(0\.\d+ to 0\.\d+\)", rows[1]["time_ratio"])


# what is missing


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_offline_the_html_report_is_named(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(ReportError, match=f"WANDB_MODE={mode}.*`autoprec report FOLDER`.*no network"):
        publish(*PLACE)


def test_without_a_login(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "login", lambda **options: False)
    with pytest.raises(ReportError, match="Run `wandb login`.*`autoprec report FOLDER`"):
        publish(*PLACE)


def test_without_the_group(server: Server) -> None:
    server.runs = ()
    with pytest.raises(ReportError, match="`team/project` has no runs of it"):
        publish(*PLACE)


@pytest.mark.parametrize("error", [wandb.errors.CommError("no such host"), ValueError("project not found.")])
def test_without_a_network_or_a_project(error: Exception, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, filters: Any) -> Any:
        raise error

    server.api.runs = fail
    with pytest.raises(ReportError, match="^Weights & Biases: (no such host|project not found)\\. `autoprec report"):
        publish(*PLACE)


@pytest.mark.parametrize("name", ["wandb", "wandb_workspaces"])
def test_without_the_packages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda asked, *rest: None if asked == name else object())
    for call in (build_report, publish):
        with pytest.raises(ReportError, match=rf"needs {name}\. Run `pip install 'autoprec\[wandb\]'`"):
            call(*PLACE)
