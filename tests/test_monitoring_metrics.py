"""What of a run becomes which sample, without a run, and what a scrape may touch.

Time budget: 5 s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from torch.overrides import TorchFunctionMode

from autoprec.monitoring.collector import RunCollector, step_histogram
from autoprec.monitoring.metrics import METRICS, PREFIX, RunValues, exported_names, samples
from autoprec.monitoring.values import StepValues
from autoprec.progress_reading import ProgressReading, RunInfo, UnitInfo
from tests.monitored import Scraped

ROOT = Path(__file__).resolve().parents[1]
UNITS = tuple(
    UnitInfo(name=name, kind="linear", parameter_count=count, left_alone=reason, emulated=("fp16",))
    for name, count, reason in (
        ("first", 10, None),
        ("alone", 900, "is frozen"),
        ("second", 30, None),
        ("third", 20, None),
    )
)
INFO = RunInfo(
    model="Net", started_at="", command="", versions={"autoprec": "1"}, device="a chip", device_type="cpu", machine={},
    policy="rule", interval=50, knobs=(), masked={}, settings={}, base_precision="32-true", units=UNITS, formats={},
    parameter_count=960,
)  # fmt: skip
STEP = StepValues(
    at=100.0, applied=5, skipped=2, undone=3, rollbacks=1, lost_windows=0, loss_scale=2.0, loss_scale_floor=1.0,
    grad_norm=0.5, clip_threshold=1.0, batch_size=4, accumulate=2, overflows={"second": 7},
    formats={"first": "bf16", "alone": "fp32", "second": "fp16", "third": "bf16"},
)  # fmt: skip
READING = ProgressReading(
    window=10, global_step=10, epoch=1, elapsed_s=1.0, loss=0.25, samples_per_s=8.0, memory_bytes=1000,
    activation_amax={"first": 3.0, "third": math.inf}, grad_norms={"second": 0.1},
)  # fmt: skip


def run(max_units: int = 2, **changes: Any) -> RunValues:
    values = RunValues(INFO, max_units, started_at=50.0, progress=0.5)
    values.step, values.reading = STEP, READING
    for name, value in changes.items():
        setattr(values, name, value)
    return values


def scraped(values: RunValues, device: str = "cpu") -> Scraped:
    registry = CollectorRegistry()
    registry.register(RunCollector(values, torch.device(device), ("a run", device)))
    step_histogram(registry, ("a run", device)).observe(0.02)
    return Scraped(generate_latest(registry).decode())


def test_values() -> None:
    seen = scraped(run())
    assert seen.value("applied_steps_total") == 8, "a counter must not go back when the run does"
    assert seen.value("undone_steps_total") == 3
    assert seen.value("loss") == 0.25
    assert seen.value("units", format="bf16", emulated="false") == 2
    assert seen.value("units", format="fp16", emulated="true") == 1
    assert seen.value("parameters", format="bf16", emulated="false") == 30
    assert seen.value("parameters", format="fp32", emulated="false") == 0, "what is left alone is not steered"
    assert seen.value("unit_series_omitted") == 1
    assert seen.value("unit_overflows_total", unit="second") == 7
    assert seen.value("unit_overflows_total", unit="third") == 0
    assert seen.value("unit_activation_amax", unit="third") == math.inf
    assert seen.value("step_seconds_bucket", le="0.025") == 1


@pytest.mark.parametrize(("max_units", "shown"), [(0, []), (1, ["second"]), (2, ["second", "third"])])
def test_the_largest_units_are_shown(max_units: int, shown: list[str]) -> None:
    assert [each["unit"] for each in scraped(run(max_units)).all("unit_format_info")] == shown


ABSENT: Mapping[str, tuple[dict[str, Any], set[str]]] = {
    "nothing yet": ({"step": None, "reading": None}, {"applied_steps_total", "epoch", "units", "unit_grad_norm"}),
    "no loss scale": ({"step": STEP._replace(loss_scale=None)}, {"loss_scale", "loss_scale_floor"}),
    "no clipping": ({"step": STEP._replace(clip_threshold=math.inf)}, {"clip_threshold"}),
    "no norm": ({"step": STEP._replace(grad_norm=None)}, {"grad_norm"}),
    "no batch size": ({"step": STEP._replace(batch_size=None)}, {"batch_size"}),
    "no end": ({"progress": math.nan}, {"progress_ratio"}),
    "no loss": ({"reading": replace(READING, loss=math.nan, samples_per_s=None)}, {"loss", "samples_per_second"}),
    "over": ({"is_running": False}, {"utilization_ratio"}),
}


@pytest.mark.parametrize("case", ABSENT)
def test_what_is_not_known_is_absent(case: str) -> None:
    changes, names = ABSENT[case]
    full = {f"{PREFIX}{name}" for name in names}
    assert full <= scraped(run()).names
    assert full.isdisjoint(scraped(run(**changes)).names)


def test_every_metric_is_exported_and_none_else() -> None:
    known = {name for name, *_ in samples(run())} | {"step_seconds", "utilization_ratio", "memory_bytes"}
    assert known == set(METRICS)
    assert scraped(run()).names == exported_names()


def test_labels_are_those_that_are_declared() -> None:
    for name, labels, _ in samples(run()):
        assert len(labels) == len(METRICS[name].labels), name


class Untouched(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a scrape has called {func}")


def test_a_scrape_touches_no_tensor() -> None:
    registry = CollectorRegistry()
    registry.register(RunCollector(run(), torch.device("cpu"), ("a run", "cpu")))
    with Untouched():
        assert generate_latest(registry)
        with pytest.raises(AssertionError, match="a scrape has called"):
            torch.ones(1).item()


# ---- what is sampled when somebody asks ----


def missing(device: Any) -> int:
    raise Exception("NVML Shared Library Not Found")  # its errors are of no narrower kind


@pytest.mark.parametrize(("utilization", "expected"), [(lambda device: 37, [0.37]), (missing, [])])
def test_a_gpu(utilization: Callable[[Any], int], expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on one: what the driver says is replaced, and no other function of torch.cuda may be called."""
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    seen = scraped(run(), "cuda:0")
    assert [seen.value("utilization_ratio") for _ in seen.all("utilization_ratio")] == expected
    assert seen.value("memory_bytes", device="cuda:0") == 1000


def test_two_scrapers_share_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([20, 90])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(answers))
    collector = RunCollector(run(), torch.device("cuda", 0), ("a run", "cuda:0"))

    def value() -> float:
        return next(f.samples[0].value for f in collector.collect() if f.name == "autoprec_utilization_ratio")

    assert [value(), value()] == [0.2, 0.2]
    monkeypatch.setattr("autoprec.monitoring.collector._FRESH_S", 0.0)
    assert value() == 0.9


# ---- names ----


def test_names_follow_the_conventions() -> None:
    """Counters end in ``_total`` by their kind; units are base units and at the end."""
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name)
        assert not re.search(r"_(total|info|ms|milliseconds|percent|mb|mib|kb|minutes)$", name), name
        assert metric.help.endswith("."), name
        assert not set(metric.labels) & {"run", "device", "job", "instance", "le", "quantile"}, name
        if re.search("time|duration", name):
            assert name.endswith("_seconds"), name


def test_the_page_lists_every_metric() -> None:
    rows = re.findall(r"^\| `(autoprec_\w+)` \| ([^|]*) \| (\w+) \|", (ROOT / "docs/monitoring.md").read_text(), re.M)
    listed = {name: (re.findall(r"`(\w+)`", labels), kind) for name, labels, kind in rows}
    assert listed == {
        f"{PREFIX}{name}{metric.suffix}": (list(metric.labels), metric.kind) for name, metric in METRICS.items()
    }
