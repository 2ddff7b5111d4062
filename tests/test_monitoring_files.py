"""Dashboard and alert rules: what a script makes is what is shipped, and it names what runs export. The command.

Time budget: 5 s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoprec.cli import main
from autoprec.monitoring.files import DATA, FILES
from autoprec.monitoring.metrics import exported_names

DASHBOARD: Mapping[str, Any] = json.loads((DATA / "autoprec_dashboard.json").read_text())
RULES: Mapping[str, Any] = yaml.safe_load((DATA / "autoprec_rules.yml").read_text())


def panels() -> Sequence[Mapping[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """Every query of the dashboard, of its variables, and of the rules."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [each["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return found + [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]


def unknown(expression: str) -> set[str]:
    """Metrics that no run exports."""
    return set(re.findall(r"\bautoprec_\w+", expression)) - exported_names()


def test_the_script_makes_what_is_there() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="its types need Python 3.11")
    from scripts.make_dashboard import make_files

    assert set(make_files()) == set(FILES)
    for name, text in make_files().items():
        assert (DATA / name).read_text(encoding="utf-8") == text, "run `python scripts/make_dashboard.py`"


def test_every_metric_is_exported() -> None:
    assert len(expressions()) > 30
    assert not set().union(*map(unknown, expressions()))
    descriptions = [rule["annotations"]["description"] for group in RULES["groups"] for rule in group["rules"]]
    assert not set().union(*map(unknown, descriptions))


def test_the_check_can_fail() -> None:
    assert unknown("rate(autoprec_applied_steps[5m]) > autoprec_loss") == {"autoprec_applied_steps"}


def test_panels_lie_side_by_side() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_panels_say_what_they_show() -> None:
    for panel in panels():
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        assert all(references)


def test_rules_are_those_that_are_promised() -> None:
    rules = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
    assert set(rules) == {
        f"Autoprec{n}" for n in ("LowUtilization", "OverflowBurst", "Rollback", "LossScaleAtFloor", "NoProgress")
    }
    assert (rules["AutoprecLowUtilization"]["for"], "< 0.3" in rules["AutoprecLowUtilization"]["expr"]) == ("10m", True)


def test_the_page_lists_every_alert() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "monitoring.md").read_text()
    listed = re.findall(r"^\| `(Autoprec\w+)` \|", page, re.MULTILINE)
    assert listed == [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]


# ---- the command ----


def test_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "watch"
    assert main(["monitoring", str(folder), "--port", "9001", "--port", "9002"]) == 0
    assert "AutoPrecisionCallback(monitor=9001)" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    (scraped,) = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == ["127.0.0.1:9001", "127.0.0.1:9002"]
    assert (folder / "autoprec_dashboard.json").read_text() == (DATA / "autoprec_dashboard.json").read_text()


def test_write_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitoring", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [str(tmp_path / name) for name in FILES], "ports": [9753]}


def test_write_over_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "prometheus.yml"
    mine.write_text("mine")
    assert main(["monitoring", str(tmp_path)]) == 1
    assert re.search(r"Already there: .*prometheus.yml.*--force", capsys.readouterr().err, re.S)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    assert main(["monitoring", str(tmp_path), "--force"]) == 0
    assert mine.read_text() == (DATA / "prometheus.yml").read_text()


def test_write_where_nobody_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["monitoring", str(tmp_path / "file" / "watch")]) == 1
    assert "Choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["x", "--port", "0"], ["x", "y"]], ids=["none", "port", "two"])
def test_wrong_usage(arguments: list[str]) -> None:
    assert main(["monitoring", *arguments]) == 2
    assert not Path("x").exists()
