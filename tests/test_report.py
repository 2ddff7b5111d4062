"""What a report says about runs, comparisons and sweeps, and the page that it becomes.

Time budget: 15 s.
"""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autoprec import Decision
from autoprec.progress_reading import RunTotals
from autoprec.record_writer import RecordWriter
from autoprec.report import Prices, Report, ReportError, build, write_html
from autoprec.report.charts import Line, format_map, lines
from autoprec.report.page_data import Chart, Code, Table, Text, finite
from autoprec.report.timeline import timeline_of
from autoprec.run_record import read_record
from tests.report_data import EVIL, GUARD, comparison, cost, info, reading, record, sweep

PRICES = Prices(per_hour=36.0, energy=0.5, currency="EUR")


def blocks(report: Report, section: str) -> list[Any]:
    (found,) = [each for each in report.chapters[0].sections if each.name == section]
    return list(found.blocks)


def texts(report: Report, section: str) -> str:
    """Everything that tables and texts of a section say."""
    words: list[str] = []
    for block in blocks(report, section):
        if isinstance(block, Table):
            words += [f"{cell.text} {cell.detail}" for row in block.rows for cell in row]
        elif isinstance(block, Text):
            words += block.lines
        elif isinstance(block, Code):
            words.append(block.text)
    return "\n".join(words)


def charts(report: Report) -> list[Chart]:
    parts = [block for chapter in report.chapters for section in chapter.sections for block in section.blocks]
    return [block for block in parts if isinstance(block, Chart)]


# ---- runs ----


def test_run_says_how_it_ended(tmp_path: Path) -> None:
    chapter = build(record(tmp_path)).chapters[0]
    assert chapter.kind == "run"
    assert chapter.tone == "good"
    assert "Training finished, after 49 applied steps." in chapter.headline
    assert "50% bf16" in chapter.headline
    assert "1 step was skipped as non-finite. The guard has raised 1 layer." in chapter.headline
    assert dict(chapter.facts)["steps skipped"] == "1"


def test_run_that_was_killed_is_reported(tmp_path: Path) -> None:
    chapter = build(record(tmp_path, ends=False)).chapters[0]
    assert "it is under way, or it was killed" in chapter.headline
    assert chapter.tone == "plain"


def test_timeline_has_changes_raises_overflows_and_skips(tmp_path: Path) -> None:
    timeline = timeline_of(read_record(record(tmp_path)))
    assert timeline is not None
    assert timeline.edges == (0, 10, 15, 20, 25, 30, 50)
    assert timeline.cells == (
        ("fp32", "bf16", "bf16", "bf16", "bf16", "bf16"),
        ("fp32", "fp32", "fp16", "fp16", "fp32", "fp32"),
    )
    assert [(event.window, event.unit) for event in timeline.raises] == [(25, EVIL)]
    assert [(event.window, event.unit) for event in timeline.overflows] == [(30, EVIL)]
    assert [event.window for event in timeline.skipped] == [30]
    assert GUARD in timeline.raises[0].text


def test_what_was_refused_is_said_with_the_reason(tmp_path: Path) -> None:
    said = texts(build(record(tmp_path)), "refused")
    assert "int8 does not pay" in said
    assert "not offered to policies" not in said
    assert "must be positive" in said
    assert "the batch size knob" in said
    assert "the loader has its own" in said


def test_costs_are_a_table_with_the_fastest_marked(tmp_path: Path) -> None:
    costs = {"0": {"fp32": cost(4.0), "bf16": cost(1.0, implementation="cpu", error=0.002)}, EVIL: {"fp32": cost(9.0)}}
    (table,) = blocks(build(record(tmp_path, costs=costs)), "costs")
    assert table.columns == ("unit", "fp32", "bf16")
    assert [row[0].text for row in table.rows] == [EVIL, "0"]
    slow, fast = table.rows[1][1:]
    assert (slow.is_best, fast.is_best) == (False, True)
    assert fast.detail == "cpu, error 0.002"


def test_cost_of_a_run_and_its_estimated_saving(tmp_path: Path) -> None:
    costs = {"0": {"fp32": cost(4.0), "bf16": cost(1.0)}, EVIL: {"fp32": cost(2.0), "fp16": cost(3.0)}}
    report = build(record(tmp_path, costs=costs), prices=PRICES)
    (table, said) = blocks(report, "money")
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["the run"] == ["5 s", "100%", "0.05 EUR"]
    # 40 windows in bf16 save 3 ms each, 10 in fp16 cost 1 ms each
    assert rows["estimated saving against static 32-true"][0] == "0.11 s"
    assert "an estimate, not a measurement" in said.lines[0]
    assert any("36 EUR, as you have said" in line for line in said.lines)


def test_no_saving_is_claimed_without_costs(tmp_path: Path) -> None:
    (table, said) = blocks(build(record(tmp_path)), "money")
    assert [row[0].text for row in table.rows][-1].startswith("of it decisions")
    assert "No saving is shown: costs of formats were not measured" in said.lines[0]
    assert "No price was given" in said.lines[-1]


def test_a_long_run_of_a_large_model_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    units = [f"blocks.{number}" for number in range(300)]
    writer = RecordWriter(tmp_path)
    writer.started(info(units))
    guards = [Decision(n, "precision", units[n % 300], "fp16", "fp32", "fp32", "applied", GUARD) for n in range(6000)]
    refused = [
        Decision(n, "clip", None, 1.0, float(n if n < 300 else 7), 1.0, "refused", f"{n if n < 300 else 7} is no good")
        for n in range(600)
    ]
    writer.decided([*guards, *refused])
    for window in range(10, 1010, 10):
        writer.progressed(reading(window, overflows=dict.fromkeys(units, 1)))
    report = build(tmp_path)
    (chart,) = [each for each in charts(report) if each.title == "Formats over the run"]
    marks = {str(trace.get("name")).split(",")[0]: trace for trace in chart.figure["data"]}
    for name in ("raised by the guard", "output overflowed"):
        assert len(marks[name]["x"]) <= 4000
        assert set(marks[name]["y"]) == set(units)
        assert " of 6,000" in marks[name]["name"] or " of 30,000" in marks[name]["name"]
    said = texts(report, "refused")
    assert said.count("is no good") == 200
    assert "7 is no good 301 times" in said


def test_a_long_line_keeps_its_spikes_and_gaps() -> None:
    values: list[float | None] = [1.0] * 50_000
    values[12_345], values[23_456], values[34_567] = 1e6, -1e6, None
    (trace,) = lines([Line(name="loss", x=list(range(50_000)), y=values)], "window", "loss")["data"]
    assert len(trace["x"]) < 4000
    assert trace["x"] == sorted(trace["x"])
    assert {(12_345, 1e6), (23_456, -1e6), (34_567, None)} <= set(zip(trace["x"], trace["y"], strict=True))


def test_what_a_later_version_may_write_is_shown_or_left_out(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.started(info(formats={"0": "fp4", EVIL: "fp32"}))
    writer.progressed(reading(10, changed={"0": "fp4"}))
    writer.ended(RunTotals(ended="finished", window=10, applied=10, formats={"0": "fp4", EVIL: "fp32"}))
    whole: dict[str, Any] = {
        **Decision(1, "clip", None, math.inf, 1.0, 1.0, "applied", "why").to_dict(),
        "before": "inf",
    }
    wrong: list[dict[str, Any]] = [
        {"step": None},
        {"step": "1"},
        {"unit": 3},
        {"reason": None},
        {"applied": [1]},
        {"knob": "new"},
    ]
    rows = [whole, *(whole | each for each in wrong), [], 3]
    (tmp_path / "history.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (chart,) = [each for each in charts(build(tmp_path)) if each.title == "Formats over the run"]
    assert {"fp4", "fp32"} <= {trace.get("name") for trace in chart.figure["data"]}
    found = read_record(tmp_path)
    assert len(found.decisions) == 1
    assert found.damaged_lines == len(rows) - 1


def test_a_command_that_is_no_text_is_reported(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.started(info(command="python caf\udce9.py"))
    writer.ended(RunTotals(ended="finished"))
    page = write_html(build(tmp_path), tmp_path / "report.html").read_text(encoding="utf-8")
    assert "python caf\\udce9.py" in page


def test_the_log_folder_will_do(tmp_path: Path) -> None:
    record(tmp_path / "autoprec")
    assert build(tmp_path).chapters[0].kind == "run"


# ---- comparisons and sweeps ----


def test_comparison_has_verdict_intervals_and_the_formats_of_autoprec(tmp_path: Path) -> None:
    report = build(comparison(tmp_path), prices=PRICES)
    chapter = report.chapters[0]
    assert chapter.headline.startswith("Use autoprec: ")
    assert chapter.tone == "good"
    rows = {row[0].text: row for row in blocks(report, "arms")[0].rows}
    assert float(rows["autoprec"][1].text) == pytest.approx(0.8, abs=0.01)
    assert " to " in rows["autoprec"][3].detail
    assert rows["autoprec"][1].is_best
    assert {section.name for section in chapter.sections} >= {"loss", "speed", "formats", "knobs", "refused", "again"}
    assert "16-mixed" in texts(report, "refused")


def test_comparison_counts_money_and_energy(tmp_path: Path) -> None:
    report = build(comparison(tmp_path), prices=PRICES)
    (table, said) = blocks(report, "money")
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["bf16-mixed"][1] == "1.01 EUR"  # two kilowatt-hours and 0.6 s
    assert rows["autoprec"][2] == "0.501 EUR"
    assert "would take 20 hours less (720.00 EUR)" in said.lines[0]
    assert any("joules are those of a counter" in line for line in said.lines)


def test_a_tie_is_no_saving(tmp_path: Path) -> None:
    (_, said) = blocks(build(comparison(tmp_path, ours_ms=10.0), prices=PRICES), "money")
    assert "it is no saving and no loss" in said.lines[0]


def test_comparison_says_how_to_run_it_again(tmp_path: Path) -> None:
    said = texts(build(comparison(tmp_path / "out")), "again")
    assert "autoprec compare train.py --arms 32-true,bf16-mixed,autoprec --seeds 3" in said
    assert f"-- --name '{EVIL}'" in said


def test_a_damaged_record_does_not_cost_the_comparison(tmp_path: Path) -> None:
    folder = comparison(tmp_path)
    (path,) = folder.glob("records/*/run.json")
    path.write_text("{")
    assert build(folder).chapters[0].headline.startswith("Use autoprec")


def test_sweep_has_winner_front_and_failures(tmp_path: Path) -> None:
    report = build(sweep(tmp_path))
    assert report.chapters[0].headline == "Best: trial 1."
    (chart, table) = blocks(report, "front")
    assert {trace["name"] for trace in chart.figure["data"]} == {"static", "winner"}
    assert [row[0].detail for row in table.rows] == ["on the front", "winner", "breaks a constraint"]
    assert EVIL in texts(report, "refused")


def test_autoprec_that_was_tried_first_is_not_called_static(tmp_path: Path) -> None:
    path = sweep(tmp_path) / "pareto.json"
    document = json.loads(path.read_text())
    document["trials"].append({**document["trials"][1], "number": 4, "values": [3.0, 3.0], "baseline": "autoprec"})
    path.write_text(json.dumps(document))
    (chart, _) = blocks(build(tmp_path), "front")
    assert {trace["name"]: len(trace["x"]) for trace in chart.figure["data"]} == {"trial": 1, "static": 1, "winner": 1}


# ---- folders that do not work ----


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "It must be a folder with `run.json`"),
        ({"demo.json": "{}"}, "holds results of `autoprec demo`"),
        ({"comparison.json": "{"}, "cannot be read"),
        ({"comparison.json": '{"version": 9}'}, "not a comparison of version 1"),
        ({"pareto.json": '{"objectives": []}'}, "cannot be used: objectives"),
        ({"run.json": '{"version": 9}'}, "reads version 1"),
        ({"sweep.yaml": ""}, "has no `pareto.json` yet"),
        ({"inner/run.json": ""}, "Did you mean `.*inner`"),
    ],
    ids=["empty", "demo", "cut off", "newer", "no objective", "newer record", "no trial", "above it"],
)
def test_says_what_is_wrong_with_a_folder(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(ReportError, match=said):
        build(tmp_path)


def test_says_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="does not exist"):
        build(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="is a file"):
        build(tmp_path / "file")


@pytest.mark.parametrize("values", [{"per_hour": -1.0}, {"energy": float("nan")}, {"currency": ""}], ids=str)
def test_refuses_prices_that_are_none(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Passed `Prices\("):
        Prices(**values)


# ---- the page ----


class Reader(HTMLParser):
    """Reads a page as a browser does: which elements there are, and what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.tags.append(tag)
        self.ids += [known["id"] or ""] if "id" in known else []
        address = known.get("href") or known.get("src") or ""
        (self.links if address.startswith("#") else self.addresses).append(address)

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["script"], ["style"]):
            self.words.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    folders = [comparison(folder / "compared"), record(folder / "run"), sweep(folder / "sweep")]
    return write_html(build(folders, prices=PRICES), folder / "new" / "page.html").read_text()


def test_page_keeps_names_from_files_as_text(page: str) -> None:
    assert EVIL not in page
    reader = Reader()
    reader.feed(page)
    assert reader.tags.count("script") == 3
    assert EVIL in "".join(reader.words)


def test_page_asks_nothing_of_the_network(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert {address for address in reader.addresses if address} == {"data:,"}
    assert "@import" not in page[: page.index("</style>")]


def test_links_of_the_page_lead_somewhere(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert len(reader.links) > 20
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert len(reader.ids) == len(set(reader.ids))


def test_figures_of_the_page_are_strict_json(page: str) -> None:
    (found,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    figures = json.loads(found, parse_constant=refuse)
    assert len(figures) == page.count('class="plot"')


def test_plotly_knows_every_property_of_the_figures(tmp_path: Path) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    folders = [comparison(tmp_path / "compared"), record(tmp_path / "run"), sweep(tmp_path / "sweep")]
    figures = [finite(chart.figure) for chart in charts(build(folders))]
    assert len(figures) > 15
    for figure in figures:
        graph_objects.Figure(figure)


def test_names_in_figures_are_escaped(tmp_path: Path) -> None:
    folders = [comparison(tmp_path / "compared"), record(tmp_path / "run"), sweep(tmp_path / "sweep")]
    found = json.dumps([finite(chart.figure) for chart in charts(build(folders))])
    assert EVIL not in found
    assert "&lt;script&gt;" in found


def test_numbers_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    (loss, _) = blocks(build(record(tmp_path)), "loss")
    assert finite(loss.figure)["data"][0]["y"] == [10.0, None, pytest.approx(100 / 30), 2.5]


def test_names_that_read_like_numbers_stay_names() -> None:
    figure = format_map(["0", "1"], [0, 5], [["fp32"], ["bf16"]], [])
    assert figure["layout"]["yaxis"]["type"] == "category"


def test_json_has_everything_but_drawings(tmp_path: Path) -> None:
    document = build(comparison(tmp_path)).to_dict()
    text = json.dumps(document, allow_nan=False)
    assert '"figure"' not in text
    assert document["chapters"][0]["sections"][0]["blocks"][0]["columns"][0] == "trained with"
