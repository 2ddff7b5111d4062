"""``autoprec report`` in this process, and ``autoprec compare`` as what it reports.

Time budget: 10 s; with the slow ones 60 s.
"""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from autoprec import cli
from autoprec.report import build
from autoprec.run_record import read_record
from tests.compared import TRAINING
from tests.report_data import comparison, record

pytest.importorskip("typer")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["report", *words])
    captured = capsys.readouterr()
    return code, captured.out, re.sub(r"[\s│]+", " ", captured.err)


def test_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    folders = [str(comparison(tmp_path / "compared", task="net")), str(record(tmp_path / "run"))]
    out = tmp_path / "page.html"
    code, said, _ = call(capsys, *folders, "--out", str(out), "--price-per-hour", "2", "--currency", "EUR")
    assert code == 0
    assert said.splitlines()[0].startswith("Comparison: net: Use autoprec")
    assert said.splitlines()[-1] == f"Written: {out}"
    assert "An hour of the machine costs 2 EUR" in out.read_text()


def test_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = call(capsys, str(record(tmp_path / "run")), "--json")
    assert code == 0
    assert json.loads(said)["chapters"][0]["kind"] == "run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Name a folder at least"),
        (("nowhere",), "`nowhere` does not exist"),
        (("run", "--price-per-hour", "-1"), "It must be a finite number, 0 or more"),
        (("run", "--out", "run/run.json/page.html"), "Cannot write"),
        (("--wandb", "entity", "--group", "g"), "It must be ENTITY/PROJECT"),
        (("--wandb", "entity/project"), "name it"),
        (("run", "--wandb", "entity/project", "--group", "g"), "name no folder"),
    ],
    ids=["nothing", "no folder", "price", "no file", "wandb", "no group", "wandb and folder"],
)
def test_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "run")
    code, _, error = call(capsys, *words)
    assert code == 2
    assert said in error
    assert "Traceback" not in error


def test_wandb_publishes_and_prints_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = types.ModuleType("autoprec.wandb_report")
    module.publish = lambda entity, project, group: f"https://wandb.example/{entity}/{project}/{group}"
    monkeypatch.setitem(sys.modules, "autoprec.wandb_report", module)
    code, said, _ = call(capsys, "--wandb", "team/nets", "--group", "g")
    assert (code, said) == (0, "https://wandb.example/team/nets/g\n")


@pytest.mark.parametrize("name", ["jinja2", "plotly"])
def test_names_the_extra_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    code, _, error = call(capsys, str(record(tmp_path / "run")), "--out", str(tmp_path / "page.html"))
    assert code == 1
    assert "pip install 'autoprec[report]'" in error


@pytest.mark.slow
def test_a_comparison_keeps_records_of_its_runs_with_autoprec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training.py").write_text(TRAINING)
    words = ["training.py:build", "--arms", "32-true,autoprec", "--seeds", "1", "--steps", "16", "--interval", "4"]
    assert cli.main(["compare", *words, "--out", "out"]) == 0
    capsys.readouterr()
    (found,) = (tmp_path / "out" / "records").iterdir()
    recorded = read_record(found)
    assert recorded.how_it_ended == "finished"
    assert recorded.totals is not None
    assert recorded.totals.window == 16
    assert recorded.steps
    assert "formats" in {section.name for section in build(tmp_path / "out").chapters[0].sections}
