"""Prometheus' classes around the samples; imported on use, because prometheus_client comes with the extra ``monitor``.

What is sampled when somebody asks: how busy the processor is and, on a CPU, how much memory the process holds. On a GPU
the driver's management library is asked for the former, which waits for no kernel; its memory is that of the latest
decision point.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import prometheus_client
import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from autoprec.machine_load import MachineLoad
from autoprec.monitoring.metrics import (
    METRICS,
    PREFIX,
    RUN_LABELS,
    STEP_BUCKETS,
    STEP_SECONDS,
    Metric,
    RunValues,
    samples,
)
from autoprec.resident_memory import resident_bytes

_FAMILIES: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "info": InfoMetricFamily,
}
_FRESH_S = 5.0  # two scrapers must not leave each other slices of time too short to mean anything


class RunCollector(Collector):
    """Makes metric families of a run's values when it is asked.

    Args:
        values: The run.
        device: Where it trains.
        labels: Values of the labels that every metric has.
    """

    def __init__(self, values: RunValues, device: torch.device, labels: tuple[str, ...]) -> None:
        self._values = values
        self._labels = labels
        self._device = device
        self._load = MachineLoad(device)
        self._lock = threading.Lock()
        self._utilization = math.nan
        self._sampled_at = time.monotonic()

    def collect(self) -> Iterable[prometheus_client.Metric]:
        """Returns the families that have a sample, in the order of ``METRICS``."""
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for name, labels, value in samples(self._values):
            found.setdefault(name, []).append((labels, value))
        for name, reading in (("utilization_ratio", self._busy()), ("memory_bytes", self._memory())):
            if reading is not None and not math.isnan(reading):
                found[name] = [((), reading)]
        return [self._family(name, metric, found[name]) for name, metric in METRICS.items() if name in found]

    def _family(
        self, name: str, metric: Metric, points: Iterable[tuple[tuple[str, ...], float]]
    ) -> prometheus_client.Metric:
        family: prometheus_client.Metric = _FAMILIES[metric.kind](f"{PREFIX}{name}", metric.help)
        for labels, value in points:
            named = dict(zip((*RUN_LABELS, *metric.labels), (*self._labels, *labels), strict=True))
            family.add_sample(f"{PREFIX}{name}{metric.suffix}", named, value)
        return family

    def _busy(self) -> float:
        with self._lock:
            if not self._values.is_running:
                return math.nan
            now = time.monotonic()
            if now - self._sampled_at >= _FRESH_S or math.isnan(self._utilization):
                self._sampled_at = now
                try:
                    self._utilization = self._load.utilization()
                except Exception:  # NVML raises errors of its own, and what a scrape cannot have it leaves out
                    self._utilization = math.nan
            return self._utilization

    def _memory(self) -> float | None:
        if self._device.type != "cuda":
            return resident_bytes()
        return None if self._values.reading is None else self._values.reading.memory_bytes


def step_histogram(registry: CollectorRegistry, labels: tuple[str, ...]) -> prometheus_client.Histogram:
    """Returns the histogram of step times.

    Args:
        registry: Where it is shown.
        labels: Values of the labels that every metric has.
    """
    metric = METRICS[STEP_SECONDS]
    histogram = prometheus_client.Histogram(
        f"{PREFIX}{STEP_SECONDS}", metric.help, RUN_LABELS, registry=registry, buckets=STEP_BUCKETS
    )
    return histogram.labels(*labels)
