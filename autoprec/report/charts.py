"""Figures for plotly, as plain data: lines, points with intervals, bars, and formats over steps.

Colours are those of Okabe and Ito, which people with any kind of colour vision tell apart, on light and dark paper.
Fonts, paper and grids are the page's. Text in figures may hold marks of HTML, so every name is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoprec.formats import FORMATS

BLUE, SKY, GREEN, ORANGE, RED, PURPLE, GREY = (
    *("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"),
    "#8C8C8C",
)
FORMAT_COLOURS = {"fp32": BLUE, "tf32": SKY, "bf16": GREEN, "fp16": ORANGE, "fp8": RED, "int8": PURPLE}
STEERED = (GREEN, "#4CC3A0", "#00694D")
STATIC = (BLUE, ORANGE, SKY, PURPLE, RED, GREY)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_ROW_PX, _LEAST_PX, _MOST_PX, _AROUND_PX = 20, 150, 1400, 120
_LONGEST_NAME = 26
_MOST_POINTS = 3000  # of a line: more than a screen has columns, and a page of them opens at once

Numbers = Sequence[float | int | None]


def escape(text: str) -> str:
    """Returns a text that plotly shows as it is.

    Args:
        text: The text.
    """
    return html.escape(text, quote=False)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart.

    Args:
        name: In the legend.
        x: Positions.
        y: Values.
        low: Lower edge of a band around it.
        high: Upper edge.
        colour: Its colour.
        is_step: Whether a value holds until the next one.
        is_bold: Whether it stands out.
        dash: Index of its dashes, 0 for none.
        unit: What values are counted in.
    """

    name: str
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    colour: str = BLUE
    is_step: bool = False
    is_bold: bool = True
    dash: int = 0
    unit: str = ""


def lines(
    lines_: Sequence[Line], x_title: str, y_title: str, *, is_log: bool = False, starts_at_0: bool = False
) -> dict[str, Any]:
    """Returns a figure of lines.

    Args:
        lines_: The lines.
        x_title: Title of the horizontal axis.
        y_title: Title of the vertical axis.
        is_log: Whether the vertical axis is logarithmic.
        starts_at_0: Whether it starts at 0.
    """
    traces: list[dict[str, Any]] = []
    for line in map(_thinned, lines_):
        if line.low is not None and line.high is not None:
            traces.append(_band(line, line.low, line.high))
        is_sparse = len(line.x) <= 40
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if is_sparse else "lines",
                "name": escape(line.name),
                "x": list(line.x),
                "y": list(line.y),
                "line": {
                    "color": line.colour,
                    "width": 3 if line.is_bold else 1.8,
                    "dash": _DASHES[line.dash % len(_DASHES)],
                    "shape": "hv" if line.is_step else "linear",
                },
                "marker": {"color": line.colour, "size": 5},
                "hovertemplate": f"%{{x}}: %{{y:.5g}} {escape(line.unit)}<extra>{escape(line.name)}</extra>",
            }
        )
    y_axis: dict[str, Any] = {"title": {"text": escape(y_title)}, "type": "log" if is_log else "linear"}
    if is_log:
        y_axis |= {"exponentformat": "power", "dtick": 1}
    elif starts_at_0:
        y_axis["rangemode"] = "tozero"
    layout = {"xaxis": {"title": {"text": escape(x_title)}}, "yaxis": y_axis, "showlegend": len(lines_) > 1}
    return {"data": traces, "layout": layout}


def _thinned(line: Line) -> Line:
    """Returns a line of few points: of each stretch the least and the largest value, and where the line breaks."""
    count = len(line.x)
    if count <= _MOST_POINTS or line.low is not None:
        return line
    size = math.ceil(count / (_MOST_POINTS // 3))
    kept: list[int] = []
    for begin in range(0, count, size):
        known, breaks = {}, []
        for at in range(begin, min(begin + size, count)):
            value = line.y[at]
            if value is None or not math.isfinite(value):
                breaks.append(at)
            else:
                known[at] = value
        ends = {min(known, key=known.__getitem__), max(known, key=known.__getitem__)} if known else set()
        kept += sorted(ends.union(breaks[:1]))
    return replace(line, x=[line.x[at] for at in kept], y=[line.y[at] for at in kept])


def _band(line: Line, low: Numbers, high: Numbers) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*line.x, *reversed(line.x)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "fillcolor": line.colour,
        "opacity": 0.15,
        "line": {"width": 0, "color": line.colour},
        "hoverinfo": "skip",
        "showlegend": False,
    }


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value with its interval.

    Args:
        name: Whose it is.
        value: The value.
        low: Lower end, ``None`` without an interval.
        high: Upper end.
        colour: Its colour.
        is_hollow: Whether it counts for less.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: str = BLUE
    is_hollow: bool = False


def points(
    points_: Sequence[Point], x_title: str, *, centre: float, band: float, band_name: str, form: str = ".3f"
) -> dict[str, Any]:
    """Returns a figure of values with intervals, one row each, about a line with a band of no difference.

    Args:
        points_: The values.
        x_title: Title of the horizontal axis.
        centre: Where the line is.
        band: Half the width of the band.
        band_name: What the band is.
        form: How numbers beside the points are written.
    """
    names = [escape(point.name) for point in points_]
    errors = [(0.0, 0.0) if p.low is None or p.high is None else (p.high - p.value, p.value - p.low) for p in points_]
    trace = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [point.value for point in points_],
        "y": names,
        "text": [format(point.value, form) for point in points_],
        "textposition": "top center",
        "cliponaxis": False,
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [above for above, _ in errors],
            "arrayminus": [below for _, below in errors],
            "thickness": 2,
            "width": 6,
            "color": GREY,
        },
        "marker": {
            "size": 12,
            "color": [point.colour for point in points_],
            "symbol": ["circle-open" if point.is_hollow else "circle" for point in points_],
        },
        "hovertemplate": "%{y}: %{x:.5g}<extra></extra>",
        "showlegend": False,
    }
    region = {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": centre - band,
        "x1": centre + band,
        "y0": 0,
        "y1": 1,
        "fillcolor": GREY,
        "opacity": 0.25,
        "line": {"width": 0},
        "layer": "below",
    }
    layout = {
        "xaxis": {"title": {"text": escape(f"{x_title}; grey: {band_name}")}},
        "yaxis": {**_categories(names), "range": [len(names) - 0.5, -0.8]},
        "shapes": [region],
    }
    return {"data": [trace], "layout": layout}


def bars(names: Sequence[str], values: Numbers, x_title: str, colours: Sequence[str]) -> dict[str, Any]:
    """Returns a figure of bars that lie.

    Args:
        names: Whose they are.
        values: Their lengths.
        x_title: What they mean.
        colours: Their colours.
    """
    shown = [escape(name) for name in names]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": list(values),
        "y": shown,
        "marker": {"color": list(colours)},
        "text": ["" if value is None else f"{value:.3g}" for value in values],
        "textposition": "auto",
        "hovertemplate": "%{y}: %{x:.5g}<extra></extra>",
        "showlegend": False,
    }
    layout = {
        "xaxis": {"title": {"text": escape(x_title)}, "rangemode": "tozero"},
        "yaxis": {**_categories(shown), "autorange": "reversed"},
    }
    return {"data": [trace], "layout": layout}


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Events on a map of formats.

    Args:
        name: What they are.
        windows: When.
        rows: In which row.
        texts: What is said of each.
        symbol: How they are drawn.
    """

    name: str
    windows: Sequence[int]
    rows: Sequence[str]
    texts: Sequence[str]
    symbol: str


def format_map(
    rows: Sequence[str], edges: Sequence[int], cells: Sequence[Sequence[str | None]], marks: Sequence[Marks]
) -> dict[str, Any]:
    """Returns a figure of formats: units from top to bottom, optimizer windows from left to right.

    Args:
        rows: Names of the units, then of rows for events without a unit.
        edges: First window of each column, and the end of the last one.
        cells: Format of each unit in each column, ``None`` for a row without one.
        marks: Events on top of it.
    """
    names = [escape(row) for row in rows]
    there = {name for row in cells for name in row if name is not None}
    used = [*(name for name in FORMATS if name in there), *sorted(there - FORMATS.keys())]  # of a later version
    index = {name: position for position, name in enumerate(used)}
    most = max(len(used), 1)
    scale = [
        [position / most, FORMAT_COLOURS.get(name, GREY)] for at, name in enumerate(used) for position in (at, at + 1)
    ]
    heat = {
        "type": "heatmap",
        "x": list(edges),
        "y": names,
        "z": [[None if name is None else index[name] for name in row] for row in cells],
        "text": [["" if name is None else name for name in row] for row in cells],
        "zmin": -0.5,
        "zmax": most - 0.5,
        "colorscale": scale or [[0, GREY], [1, GREY]],
        "showscale": False,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": "%{y}<br>about window %{x:.0f}: %{text}<extra></extra>",
    }
    legend = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [None],
            "y": [None],
            "marker": {"symbol": "square", "size": 12, "color": FORMAT_COLOURS.get(name, GREY)},
            "hoverinfo": "skip",
        }
        for name in used
    ]
    drawn = [_marks(each) for each in marks if each.windows]
    span = max(edges[-1] - edges[0], 1)
    layout = {
        "xaxis": {"title": {"text": "optimizer window"}, "range": [edges[0] - span * 0.01, edges[-1] + span * 0.01]},
        "yaxis": {
            **_categories(names),
            "range": [len(names) - 0.5, -0.5],
            "ticktext": [escape(_short(row)) for row in rows],
            "tickvals": names,
        },
        "showlegend": True,
    }
    return {"data": [heat, *legend, *drawn], "layout": layout}


def map_height(rows: int) -> int:
    """Returns the height of a map of formats in pixels.

    Args:
        rows: Its rows.
    """
    return min(max(rows * _ROW_PX, _LEAST_PX), _MOST_PX) + _AROUND_PX


def _marks(marks: Marks) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(marks.name),
        "x": list(marks.windows),
        "y": [escape(row) for row in marks.rows],
        "text": [escape(text) for text in marks.texts],
        "marker": {
            "symbol": marks.symbol,
            "size": 11,
            "color": "#FFFFFF",
            "line": {"color": "#000000", "width": 1.6},
        },
        "hovertemplate": "%{y}<br>window %{x}: %{text}<extra></extra>",
    }


def scatter(groups: Mapping[str, Sequence[tuple[float, float, str]]], x_title: str, y_title: str) -> dict[str, Any]:
    """Returns a figure of points in groups, each with a text.

    Args:
        groups: Points by the name of the group: position, value, text.
        x_title: Title of the horizontal axis.
        y_title: Title of the vertical axis.
    """
    symbols = ("circle", "diamond", "x-thin-open", "square")
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": escape(name),
            "x": [x for x, _, _ in found],
            "y": [y for _, y, _ in found],
            "text": [escape(text) for _, _, text in found],
            "marker": {"size": 11, "color": colour, "symbol": symbol},
            "hovertemplate": "%{text}<br>%{x:.5g}, %{y:.5g}<extra></extra>",
        }
        for (name, found), colour, symbol in zip(groups.items(), (GREY, GREEN, RED, BLUE), symbols, strict=False)
        if found
    ]
    layout = {
        "xaxis": {"title": {"text": escape(x_title)}},
        "yaxis": {"title": {"text": escape(y_title)}},
        "showlegend": True,
    }
    return {"data": traces, "layout": layout}


def _categories(names: Sequence[str]) -> dict[str, Any]:
    # names that read like numbers are names all the same
    return {"type": "category", "categoryorder": "array", "categoryarray": list(names), "automargin": True}


def _short(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    half = (_LONGEST_NAME - 1) // 2
    return f"{name[:half]}…{name[-half:]}"
