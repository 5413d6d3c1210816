"""The Prometheus registry, made from `names.METRICS`. Owned by the front process; one event loop writes to it.

What other rooms count themselves (engine, media plane, caches) is not mirrored: their `stats()` are read at scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from triptych.metrics.names import BY_NAME, CACHE_METRICS, METRICS, PREFIX, STATE_METRICS, Kind, Metric, sample_for

Snapshot = Mapping[str, float]
T = TypeVar("T", Counter, Gauge)


class Metrics:
    """Counts what happens in the front process, and renders it with the other rooms' snapshots."""

    def __init__(self) -> None:
        disable_created_metrics()  # nobody asks for them, and they double the exposition
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._snapshots: dict[str, Snapshot] = {}
        at_scrape = {metric.name for metric in STATE_METRICS + CACHE_METRICS}
        own = [metric for metric in METRICS if metric.name not in at_scrape]
        self._counters = {m.name: _make(Counter, m, self.registry) for m in own if m.kind is Kind.COUNTER}
        self._gauges = {m.name: _make(Gauge, m, self.registry) for m in own if m.kind is Kind.GAUGE}
        self._histograms = {m.name: _histogram(m, self.registry) for m in own if m.kind is Kind.HISTOGRAM}
        self.registry.register(_SnapshotCollector(self._snapshots))

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put `value` into histogram `name`. `labels` in the table's order."""
        self._histograms[name].labels(*labels).observe(value)

    def count(self, name: str, amount: float, *labels: str) -> None:
        """Add `amount` (0 or more) to counter `name`."""
        self._counters[name].labels(*labels).inc(amount)

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Move gauge `name` by `amount`."""
        self._gauges[name].labels(*labels).inc(amount)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set gauge `name`."""
        self._gauges[name].labels(*labels).set(value)

    def render(self, snapshots: Mapping[str, Snapshot]) -> bytes:
        """The text exposition. `snapshots`: statistics by model (or `front`), by the names of `names.sample_for`."""
        self._snapshots.clear()
        self._snapshots.update(snapshots)
        return generate_latest(self.registry)


def _make(kind: type[T], metric: Metric, registry: CollectorRegistry) -> T:
    return kind(PREFIX + metric.name, metric.help, metric.labels, registry=registry)


def _histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    return Histogram(PREFIX + metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)


class _SnapshotCollector:
    def __init__(self, snapshots: dict[str, Snapshot]) -> None:
        self._snapshots = snapshots

    def describe(self) -> Iterable[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for model, snapshot in self._snapshots.items():
            for stat, value in snapshot.items():
                sample = sample_for(stat)
                if sample is None:
                    continue
                family = families.setdefault(sample.metric.name, _family(sample.metric))
                labels = {"model": model, **sample.labels}
                family.add_metric([labels[label] for label in sample.metric.labels], value)
        return iter(families.values())


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return kind(PREFIX + metric.name, metric.help, labels=list(BY_NAME[metric.name].labels))
