"""The figures of a run: waits, swaps, fairness, use of devices. `verdict.py` and `report.py` put them into words.

Owns the definitions. A wait is from arrival to the grant that served; a swap is a load or a wake, whether or not
another model had to leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from greenroom.core.model import DeviceKind, MoveKind
from greenroom.sim.records import Fate, SimCall
from greenroom.sim.truth import Tiers
from greenroom.sim.world import World

CLASS_NAMES = {0: "high", 1: "normal", 2: "low"}

Key = TypeVar("Key", bound=Hashable)


def class_name(priority: int) -> str:
    return CLASS_NAMES.get(priority, str(priority))


@dataclass(frozen=True, slots=True)
class Waits:
    """How long requests waited, in seconds; sorted values are kept for the plots."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    sorted_s: tuple[float, ...]


NO_WAITS = Waits(0, 0.0, 0.0, 0.0, 0.0, 0.0, ())


def waits_of(values: Iterable[float]) -> Waits:
    ordered = sorted(values)
    if not ordered:
        return NO_WAITS
    mean = sum(ordered) / len(ordered)
    p50, p95, p99 = (quantile(ordered, share) for share in (0.50, 0.95, 0.99))
    return Waits(len(ordered), mean, p50, p95, p99, ordered[-1], tuple(ordered))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values do not exceed."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: 1 if all are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Shares of a device's memory and time: serving requests, and moving between tiers."""

    busy: float
    moving: float


@dataclass(frozen=True, slots=True)
class Stats:
    requests: int
    served: int
    broken: int
    gone: int
    rejected: Mapping[str, int]
    waits: Waits
    by_class: Mapping[str, Waits]
    by_tenant: Mapping[str, Waits]
    by_model: Mapping[str, Waits]
    # Over tenants: seconds of service per second from arrival to the end of the answer.
    jain: float
    loads: int
    wakes: int
    sleeps: int
    unloads: int
    devices: Mapping[str, DeviceUse]
    ends_s: float  # when the last request ended
    makespan_s: float  # from the first arrival to that
    served_per_s: float
    tokens_per_s: float
    tiers: tuple[Tiers, ...]
    swaps_at: tuple[float, ...]
    events: int

    @property
    def lost(self) -> int:
        """Requests that were not served: refused, or given up by their callers."""
        return self.requests - self.served

    @property
    def lost_share(self) -> float:
        return self.lost / self.requests if self.requests else 0.0

    @property
    def swaps(self) -> int:
        return self.loads + self.wakes

    @property
    def swaps_per_request(self) -> float:
        return self.swaps / self.served if self.served else 0.0

    @property
    def busy(self) -> float:
        """Mean over GPUs, or over all devices where there are none."""
        return sum(use.busy for use in self.devices.values()) / len(self.devices) if self.devices else 0.0


def stats_of(world: World) -> Stats:
    """The figures of a world that has run."""
    calls = [call for call in world.ended if not call.is_lease]
    served = [call for call in calls if call.fate is Fate.SERVED]
    moves, ends_s = world.truth.meters.moves, max((call.ended_at for call in calls), default=0.0)
    makespan_s = ends_s - min((call.arrived for call in calls), default=0.0)
    per_s = 1.0 / makespan_s if makespan_s > 0 else 0.0
    return Stats(
        requests=len(calls) + sum(not call.is_lease for call in world.calls.values()),
        served=len(served),
        broken=sum(call.was_broken for call in served),
        gone=sum(call.fate is Fate.GONE for call in calls),
        rejected=dict(sorted(Counter(call.code.value for call in calls if call.code is not None).items())),
        waits=waits_of(call.wait_s for call in served),
        by_class={class_name(priority): waits for priority, waits in _split(served, lambda call: call.priority)},
        by_tenant=dict(_split(served, lambda call: str(call.tenant))),
        by_model=dict(_split(served, lambda call: str(call.model))),
        jain=jain([_swiftness(group) for _, group in _groups(served, lambda call: call.tenant)]),
        loads=moves[MoveKind.LOAD],
        wakes=moves[MoveKind.WAKE],
        sleeps=moves[MoveKind.SLEEP],
        unloads=moves[MoveKind.UNLOAD],
        devices=_devices(world, ends_s),
        ends_s=ends_s,
        makespan_s=makespan_s,
        served_per_s=len(served) * per_s,
        tokens_per_s=sum(call.output_len for call in served) * per_s,
        tiers=tuple(world.truth.meters.tiers),
        swaps_at=tuple(world.truth.meters.swaps_at),
        events=world.events_told,
    )


def _groups(calls: Iterable[SimCall], key: Callable[[SimCall], Key]) -> list[tuple[Key, list[SimCall]]]:
    groups: dict[Key, list[SimCall]] = {}
    for call in calls:
        groups.setdefault(key(call), []).append(call)
    return sorted(groups.items(), key=lambda pair: str(pair[0]))


def _split(calls: Iterable[SimCall], key: Callable[[SimCall], Key]) -> list[tuple[Key, Waits]]:
    return [(name, waits_of(call.wait_s for call in group)) for name, group in _groups(calls, key)]


def _swiftness(calls: Sequence[SimCall]) -> float:
    """Seconds of service per second in the system: 1 if no request waited."""
    spent_s = sum(call.ended_at - call.arrived for call in calls)
    return sum(call.ended_at - call.granted_at for call in calls) / spent_s if spent_s > 0 else 1.0


def _devices(world: World, until: float) -> dict[str, DeviceUse]:
    devices = list(world.truth.devices.values())
    gpus = [device for device in devices if device.kind is DeviceKind.GPU]
    meters, uses = world.truth.meters, {}
    for device in gpus or devices:
        whole = max(1, device.usable_mib) * until if until > 0 else 1.0
        busy, moving = meters.busy_mib_s(device.id, until), meters.moving_mib_s(device.id, until)
        uses[str(device.id)] = DeviceUse(min(1.0, busy / whole), min(1.0, moving / whole))
    return uses
