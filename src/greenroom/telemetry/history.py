"""The last hour in figures: a sample of what was counted and of what is held, every ten seconds. Owns the samples.
Rates are the differences between them. Nothing is done per request: a sample sums up what the metrics count anyway."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from greenroom.config.part import Part

EVERY_S: Final = 10.0
SAMPLES_MAX: Final = 361


@dataclass(frozen=True, slots=True)
class Totals:
    """Counted since the start."""

    requests: int = 0
    errors: int = 0
    """Answered with 5xx."""
    refused: int = 0
    """Answered with 4xx."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    waits: int = 0
    wait_s: float = 0.0
    seconds: float = 0.0
    swaps: int = 0
    """Loads and wakes that succeeded."""
    swap_s: float = 0.0
    hits: int = 0
    """Requests that found their model ready and with room."""


@dataclass(slots=True)
class ModelCounts:
    """How often a model was there when it was asked for, and what was done to have it there."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    load_s: float = 0.0
    evictions: int = 0

    def add(self, other: ModelCounts) -> None:
        self.hits += other.hits
        self.misses += other.misses
        self.loads += other.loads
        self.load_s += other.load_s
        self.evictions += other.evictions


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Unix time."""
    clock: float
    """The same moment by the clock that is never set: rates go by it."""
    totals: Totals
    queue: int
    in_flight: int
    connections: int
    green_room_mib: float
    ready: int
    asleep: int
    used_mib: Mapping[str, float] = field(default_factory=dict)
    """By device: as the driver reports it, or what models and leases hold."""
    utilisation: Mapping[str, float] = field(default_factory=dict)
    """By GPU, in percent."""


class History(Part):
    def __init__(self, take: Callable[[], Sample], every_s: float = EVERY_S) -> None:
        self._take = take
        self.every_s = every_s
        self._timer: asyncio.TimerHandle | None = None
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    def begin(self) -> None:
        # First, so that one look that fails is not the last.
        self._timer = asyncio.get_running_loop().call_later(self.every_s, self.begin)
        self.look()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Take a sample now. If the clock was set back, earlier samples move with it: times always ascend."""
        sample = self._take()
        if self._samples and self._samples[-1].at >= sample.at:
            step = self._samples[-1].at + self.every_s - sample.at
            moved = [replace(one, at=round(one.at - step, 3)) for one in self._samples]
            self._samples = deque(moved, maxlen=SAMPLES_MAX)
        self._samples.append(sample)

    def since(self, at: float) -> list[Sample]:
        """Samples after this time, the oldest first, and the one before them: rates need it. All of them if the newest
        is older than this time, which was read before the clock was set back."""
        samples = list(self._samples)
        if samples and samples[-1].at < at:
            return samples
        later = next((place for place, sample in enumerate(samples) if sample.at > at), len(samples))
        return samples[max(0, later - 1) :]
