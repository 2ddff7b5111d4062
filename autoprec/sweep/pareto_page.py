"""The page of a sweep: the Pareto front or the history, importances and parameters, in one file without network."""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from optuna import Study
from optuna.trial import FrozenTrial

from autoprec.json_files import write_whole
from autoprec.sweep.results import SweepResult, TrialRecord
from autoprec.sweep.storage import quiet_optuna

_PLACES = ("top center", "bottom center", "middle left", "middle right")
_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c2024; --line: #d9dde2; }
@media (prefers-color-scheme: dark) { :root { --back: #16191d; --text: #e6e8eb; --line: #3a4048; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--back); color: var(--text); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2), td:last-child, th:last-child { text-align: left; }
.chart { background: #ffffff; border: 1px solid var(--line); border-radius: 6px; margin: 1rem 0; overflow-x: auto; }
.chart > div { min-width: 36rem; }
pre { white-space: pre-wrap; }
"""


def write_page(study: Study, result: SweepResult, path: Path) -> None:
    """Writes the page.

    Args:
        study: The study.
        result: What it gave.
        path: File to write.
    """
    from plotly.offline import get_plotlyjs

    charts = [
        figure.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True, "displaylogo": False})
        for figure in _figures(study, result)
    ]
    title = html.escape(f"Sweep {result.study}")
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        "<link rel='icon' href='data:,'>",
        f"<style>{_STYLE}</style>",
        f"<script>{get_plotlyjs()}</script>" if charts else "",
        f"</head><body><h1>{title}</h1><pre>{html.escape(result.message)}</pre>",
        f"<p>{html.escape(counts_text(result))}.</p>",
        *(f"<div class='chart'>{chart}</div>" for chart in charts),
        "<h2>Trials</h2><div class='scroll'>",
        _table(result),
        "</div></body></html>\n",
    ]
    write_whole(path, "".join(parts).encode())


def counts_text(result: SweepResult) -> str:
    """Returns how many trials ended how, in words.

    Args:
        result: What the sweep gave.
    """
    names = ("complete", "pruned", "failed")
    said = ", ".join(f"{result.counts[name]} {name}" for name in names if result.counts.get(name))
    return f"{len(result.trials)} trials: {said}" if said else "no trials"


def _figures(study: Study, result: SweepResult) -> Iterator[Any]:
    from optuna import visualization

    usable = [trial for trial in result.trials if trial.state == "complete"]
    if not usable:
        return
    names = [one.name for one in result.objectives]
    with quiet_optuna():
        if len(names) in (2, 3):
            yield _with_baselines(visualization.plot_pareto_front(study, target_names=names), usable, len(names))
        elif len(names) == 1:
            yield _laid_out(visualization.plot_optimization_history(study, target_name=names[0]))
        for index, one in enumerate(result.objectives):
            # importances of several objectives are those for low values
            importances, slices = visualization.plot_param_importances, visualization.plot_slice
            for plot, sign in ((importances, -1.0 if one.aim == "maximize" else 1.0), (slices, 1.0)):
                target = partial(_signed_value, index, sign) if len(names) > 1 else None
                figure = _tried(plot, study, one.name, target)
                if figure is not None:
                    yield _laid_out(figure, f"{figure.layout.title.text}: {one.name}")


def _signed_value(index: int, sign: float, trial: FrozenTrial) -> float:
    return sign * float(trial.values[index])


def _tried(plot: Callable[..., Any], study: Study, name: str, target: Callable[[FrozenTrial], float] | None) -> Any:
    """A figure, ``None`` where there are too few trials or parameters for it."""
    options = {} if target is None else {"target": target}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PED-ANOVA says that it looks at low values
            return plot(study, target_name=name, **options)
    except (ValueError, RuntimeError, ImportError):
        return None


def _with_baselines(figure: Any, trials: list[TrialRecord], dimensions: int) -> Any:
    import plotly.graph_objects as graph

    known = [trial for trial in trials if trial.baseline is not None]
    axes = dict(zip("xyz", zip(*(trial.values for trial in known), strict=True), strict=False))
    if known:
        kind = graph.Scatter if dimensions == 2 else graph.Scatter3d
        marker = {"symbol": "diamond-open", "size": 12 if dimensions == 2 else 6, "color": "#c2410c"}
        labels = [trial.baseline for trial in known]
        places = [_PLACES[index % len(_PLACES)] for index in range(len(known))]  # they are often close together
        options = {"mode": "markers+text", "text": labels, "textposition": places, "name": "tried first"}
        figure.add_trace(kind(**axes, marker=marker, **options))
    figure.update_traces(marker_showscale=False)
    return _laid_out(figure)


def _laid_out(figure: Any, title: str | None = None) -> Any:
    figure.update_layout(autosize=True, width=None, height=460, template="plotly_white", legend={"orientation": "h"})
    if title is not None:
        figure.update_layout(title=title)
    return figure


def _table(result: SweepResult) -> str:
    heads = ["trial", "arm", *(one.name for one in result.objectives), "state", "values"]
    rows = [
        [str(trial.number), trial.arm, *_values(trial, len(result.objectives)), _state(trial, result), _said(trial)]
        for trial in result.trials
    ]
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _values(trial: TrialRecord, count: int) -> list[str]:
    return [f"{value:.6g}" for value in trial.values] or ["-"] * count


def _state(trial: TrialRecord, result: SweepResult) -> str:
    if result.best is not None and trial.number == result.best.number:
        return "best"
    if trial.number in result.front:
        return "Pareto front"
    return trial.state if trial.is_usable or trial.state != "complete" else "breaks a constraint"


def _said(trial: TrialRecord) -> str:
    return trial.reason or ", ".join(f"{name} {value_text(value)}" for name, value in trial.params.items())


def value_text(value: Any) -> str:
    """Returns a parameter in short.

    Args:
        value: The value.
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)
