"""What a run used: moves counted, memory that worked and moved over time, tiers over time.

Owns sums that grow while the world runs, so that nothing has to be recorded and replayed for the figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from greenroom.core.model import Claim, DeviceId, MoveKind, Tier
from greenroom.sim.records import Place

# A run that moves more often than this keeps counting, but no longer keeps when.
MARKS_MAX = 200_000


class Tiers(NamedTuple):
    """How many slots are where from this moment on."""

    at: float
    ready: int
    asleep: int
    moving: int


class Level:
    """An amount that changes, and its integral over time."""

    __slots__ = ("_area", "_level", "_since")

    def __init__(self) -> None:
        self._level = 0
        self._since = 0.0
        self._area = 0.0

    def add(self, amount: int, now: float) -> None:
        self._area += self._level * (now - self._since)
        self._since = now
        self._level += amount

    def area(self, now: float) -> float:
        return self._area + self._level * (now - self._since)


class Meters:
    def __init__(self) -> None:
        self.moves: dict[MoveKind, int] = dict.fromkeys(MoveKind, 0)
        # When each move that brings a model to a GPU began.
        self.swaps_at: list[float] = []
        self.tiers: list[Tiers] = []
        self._moving = 0
        self._busy_mib: dict[DeviceId, Level] = {}
        self._moving_mib: dict[DeviceId, Level] = {}
        # What each busy place was counted with, because its claim may change meanwhile.
        self._counted: dict[str, Claim] = {}

    def move_began(self, place: Place, now: float) -> None:
        assert place.move is not None
        kind = place.move.kind
        self.moves[kind] += 1
        self._moving += 1
        if kind in (MoveKind.LOAD, MoveKind.WAKE) and len(self.swaps_at) < MARKS_MAX:
            self.swaps_at.append(now)
        self._count(self._moving_mib, place, now)

    def move_ended(self, place: Place, now: float) -> None:
        self._moving -= 1
        self._uncount(self._moving_mib, place, now)

    def became_busy(self, place: Place, now: float) -> None:
        self._count(self._busy_mib, place, now)

    def became_idle(self, place: Place, now: float) -> None:
        self._uncount(self._busy_mib, place, now)

    def tiers_changed(self, places: Iterable[Place], now: float) -> None:
        if len(self.tiers) >= MARKS_MAX:
            return
        ready = asleep = 0
        for place in places:
            if place.move is None:
                ready += place.tier is Tier.READY
                asleep += place.tier is Tier.ASLEEP
        self.tiers.append(Tiers(now, ready, asleep, self._moving))

    def busy_mib_s(self, device: DeviceId, now: float) -> float:
        """Memory of slots that were serving, times how long."""
        return self._busy_mib[device].area(now) if device in self._busy_mib else 0.0

    def moving_mib_s(self, device: DeviceId, now: float) -> float:
        """Memory of slots that were on their way, times how long."""
        return self._moving_mib[device].area(now) if device in self._moving_mib else 0.0

    def _count(self, levels: dict[DeviceId, Level], place: Place, now: float) -> None:
        # A slot never serves and moves at once, so one entry for each is enough.
        self._counted[place.id] = place.holds
        for device, mib in place.holds.items():
            levels.setdefault(device, Level()).add(mib, now)

    def _uncount(self, levels: dict[DeviceId, Level], place: Place, now: float) -> None:
        for device, mib in self._counted.pop(place.id, {}).items():
            levels[device].add(-mib, now)
