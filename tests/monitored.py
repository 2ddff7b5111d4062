"""What the tests of the monitoring share: metrics read from a run, from text, and threads that are left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.request import urlopen

from lightning.pytorch import Callback
from prometheus_client.parser import text_string_to_metric_families

from autoprec import AutoPrecisionCallback

Key = tuple[str, frozenset[tuple[str, str]]]


class Scraped:
    """Samples by name and labels.

    Args:
        text: What a server has answered.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[Key, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples[sample.name, frozenset(sample.labels.items())] = sample.value

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.samples}

    def all(self, name: str, **labels: str) -> list[Mapping[str, str]]:
        """Labels of the samples with a name and some of their labels."""
        found = [dict(pairs) for known, pairs in self.samples if known == f"autoprec_{name}"]
        return [each for each in found if labels.items() <= each.items()]

    def value(self, name: str, **labels: str) -> float:
        """The value of the only sample with a name and some of its labels."""
        ((key, pairs),) = ((key, dict(key[1])) for key in self.samples if self._fits(key, name, labels))
        assert {"run", "device"} <= set(pairs)
        return self.samples[key]

    @staticmethod
    def _fits(key: Key, name: str, labels: Mapping[str, str]) -> bool:
        return key[0] == f"autoprec_{name}" and labels.items() <= dict(key[1]).items()


def scrape(url: str | None) -> Scraped:
    assert url is not None, "nothing listens"
    with urlopen(url, timeout=5) as answer:
        return Scraped(answer.read().decode())


class Scraper(Callback):
    """Scrapes a run after some of its batches, and calls what else there is to do then."""

    def __init__(self, ap: AutoPrecisionCallback, at: int, also: Callable[[], object] = bool) -> None:
        self.ap = ap
        self.at = at
        self.also = also
        self.batches = 0
        self.seen: Scraped
        self.url: str | None = None
        self.counts: tuple[int, int] = 0, 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        if self.batches == self.at:
            self.url = self.ap.monitor_url
            self.seen = scrape(self.url)
            self.counts = self.ap.applied_steps, self.ap.skipped_steps
            self.also()


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("autoprec")]
