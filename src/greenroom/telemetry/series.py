"""Counters and histograms as plain numbers in dicts.

Owns the arithmetic, and turns the numbers into families of prometheus_client. `metrics.py` decides labels and names.
prometheus_client's own counters take a lock for every increment, which costs more than the rest of a request's
bookkeeping; here one event loop owns the numbers, so there is no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Labels = tuple[str, ...]
_LabelsOrPair = TypeVar("_LabelsOrPair", bound=Labels)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One entry of the table of metrics. Only histograms have bucket bounds."""

    name: str
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        self.value += amount


class Spread:
    """One series of a histogram: how many values fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        # The last bucket is everything above the highest bound.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class Counter:
    """All series of one counter, by label values."""

    __slots__ = ("series", "spec")

    def __init__(self, spec: MetricSpec) -> None:
        self.spec = spec
        self.series: dict[Labels, Count] = {}

    def at(self, *labels: str) -> Count:
        """The series with these labels; made when it is first asked for."""
        found = self.series.get(labels)
        if found is None:
            found = self.series[labels] = Count()
        return found

    def summed(self, label: str, value: str) -> Counter:
        """A copy in which all values of this label are summed under `value`."""
        place = self.spec.labels.index(label)
        total = Counter(self.spec)
        for labels, count in list(self.series.items()):
            total.at(*labels[:place], value, *labels[place + 1 :]).add(count.value)
        return total

    def family(self) -> CounterMetricFamily:
        family = CounterMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        # A copy made in one step, because this may run in a thread while the loop adds series.
        for labels, count in list(self.series.items()):
            family.add_metric(labels, count.value)
        return family


class Histogram:
    """All series of one histogram, by label values."""

    __slots__ = ("_bound_names", "series", "spec")

    def __init__(self, spec: MetricSpec) -> None:
        self.spec = spec
        self.series: dict[Labels, Spread] = {}
        self._bound_names = [*(str(float(bound)) for bound in spec.buckets), "+Inf"]

    def at(self, *labels: str) -> Spread:
        """The series with these labels; made when it is first asked for."""
        found = self.series.get(labels)
        if found is None:
            found = self.series[labels] = Spread(self.spec.buckets)
        return found

    def family(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        for labels, spread in list(self.series.items()):
            family.add_metric(labels, self._cumulated(spread), spread.sum)
        return family

    def _cumulated(self, spread: Spread) -> list[tuple[str, float]]:
        """Buckets as Prometheus wants them: each includes all smaller ones."""
        below = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(self._bound_names, spread.counts, strict=True):
            below += count
            buckets.append((bound, below))
        return buckets


def gauge_family(spec: MetricSpec, values: Mapping[_LabelsOrPair, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
