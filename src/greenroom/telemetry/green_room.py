"""What is counted of the green room: bytes that go in and out, how fast, and the processes that host models.

Owns these counts. Never measures anything itself: the runtime says what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric

from greenroom.telemetry import table
from greenroom.telemetry.series import Counter, Histogram


class GreenRoomCounts:
    """What goes into the green room and comes out of it. `label` says by which name a model is counted."""

    def __init__(self, label: Callable[[str], str]) -> None:
        self._label = label
        self._woken, self._wake_rate = Counter(table.WAKE_BYTES), Histogram(table.WAKE_RATE)
        self._read, self._read_rate = Counter(table.PREPARE_BYTES), Histogram(table.PREPARE_RATE)
        self._starts, self._losses = Counter(table.WORKER_STARTS), Counter(table.WORKER_LOSSES)
        self._flushed, self._prefetched = Counter(table.FLUSHED_BYTES), Counter(table.PREFETCH_BYTES)
        # Shown from the start, so that the first loss is an increase.
        self._losses.at()

    def woke(self, model: str, size_bytes: int, seconds: float) -> None:
        """So many bytes of weights were copied to a device in so long."""
        _add_copy(self._woken, self._wake_rate, self._label(model), size_bytes, seconds)

    def prepared(self, model: str, size_bytes: int, seconds: float) -> None:
        """So many bytes of weights were read from disk in so long."""
        _add_copy(self._read, self._read_rate, self._label(model), size_bytes, seconds)

    def worker_started(self, *, spare: bool) -> None:
        self._starts.at("spare" if spare else "needed").add()

    def worker_lost(self) -> None:
        self._losses.at().add()

    def flushed(self, model: str, size_bytes: int) -> None:
        self._flushed.at(self._label(model)).add(size_bytes)

    def prefetched(self, model: str, size_bytes: int) -> None:
        self._prefetched.at(self._label(model)).add(size_bytes)

    def families(self) -> Iterator[Metric]:
        for counted in (self._woken, self._read, self._starts, self._losses, self._flushed, self._prefetched):
            yield counted.family()
        for measured in (self._wake_rate, self._read_rate):
            yield measured.family()


def _add_copy(total: Counter, rate: Histogram, label: str, size_bytes: int, seconds: float) -> None:
    total.at(label).add(size_bytes)
    # What took no time was not copied, and has no rate.
    if size_bytes > 0 and seconds > 0:
        rate.at(label).add(size_bytes / seconds)
