"""The figures of a run: waits, swaps, fairness, use of devices. `verdict.py` and `report.py` put them into words.

Owns the definitions. A wait is from arrival to the grant that served; a swap is a load or a wake, whether or not
another model had to leave.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import ceil, inf
from typing import Any, NamedTuple

from greenroom.core.model import DeviceKind, ModelId, MoveKind, TenantId
from greenroom.sim.records import EndedCall, Fate
from greenroom.sim.truth import Delays, Tiers
from greenroom.sim.world import World

CLASS_NAMES = {0: "high", 1: "normal", 2: "low"}

# Stretches of time for which waits are summed up.
MOMENTS = 60
# Points of a curve that are kept.
CURVE_MAX = 400


def class_name(priority: int) -> str:
    return CLASS_NAMES.get(priority, str(priority))


@dataclass(frozen=True, slots=True)
class Waits:
    """How long requests waited, in seconds."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    # Waits and the share of requests that waited at most so long: some points of the curve, where it is plotted.
    curve: tuple[tuple[float, float], ...]


NO_WAITS = Waits(0, 0.0, 0.0, 0.0, 0.0, 0.0, ())


def waits_of(values: Iterable[float]) -> Waits:
    ordered = sorted(values)
    if not ordered:
        return NO_WAITS
    mean = sum(ordered) / len(ordered)
    p50, p95, p99 = (quantile(ordered, share) for share in (0.50, 0.95, 0.99))
    return Waits(len(ordered), mean, p50, p95, p99, ordered[-1], _curve(ordered))


def _curve(ordered: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """At most `CURVE_MAX` points, evenly spaced over the requests, the first and the last included."""
    last = len(ordered) - 1
    stride = max(1.0, last / (CURVE_MAX - 1))
    ranks = [round(number * stride) for number in range(min(len(ordered), CURVE_MAX))]
    return tuple((ordered[rank], (rank + 1) / len(ordered)) for rank in ranks)


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


class Moment(NamedTuple):
    """Requests that arrived in one stretch of time: its middle, how many were served and lost, the served ones' p95."""

    at: float
    served: int
    lost: int
    p95_s: float


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
    # Requests that were not served; only classes and tenants that have some.
    lost_by_class: Mapping[str, int]
    lost_by_tenant: Mapping[str, int]
    # Why requests took longer than they had to, by model.
    delays: Mapping[str, Delays]
    # Over tenants: seconds of service per second from arrival to the end, also of requests that waited in vain.
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
    over_time: tuple[Moment, ...]
    events: int

    @property
    def lost(self) -> int:
        """Requests that were not served: refused, or given up by their callers."""
        return self.requests - self.served

    @property
    def lost_share(self) -> float:
        return self.lost / self.requests if self.requests else 0.0

    @property
    def starved(self) -> dict[str, int]:
        """Models of which no request was served, and how many were lost."""
        return {model: one.lost for model, one in self.delays.items() if one.lost and not one.served}

    @property
    def all_delays(self) -> Delays:
        """Summed over models."""
        sums = [sum(getattr(one, field.name) for one in self.delays.values()) for field in fields(Delays)]
        return Delays(*sums)

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


def with_lost(served: Mapping[str, Waits], lost: Mapping[str, int]) -> dict[str, tuple[Waits, int]]:
    """For each group its waits, and how many requests were lost; also groups of which none was served."""
    return {key: (served.get(key, NO_WAITS), lost.get(key, 0)) for key in dict.fromkeys((*served, *lost))}


def stats_of(world: World) -> Stats:
    """The figures of a world that has run."""
    tally = _Tally()
    for call in world.ended:
        if not call.is_lease:
            tally.add(call)
    moves, makespan_s = world.truth.meters.moves, tally.ends_s - min(tally.begins_s, tally.ends_s)
    per_s = 1.0 / makespan_s if makespan_s > 0 else 0.0
    return Stats(
        requests=tally.fates.total() + sum(not call.is_lease for call in world.calls.values()),
        served=tally.fates[Fate.SERVED],
        broken=tally.broken,
        gone=tally.fates[Fate.GONE],
        rejected=dict(sorted(tally.rejected.items())),
        waits=waits_of(chain.from_iterable(tally.waits.values())),
        by_class={class_name(priority): waits for priority, waits in tally.waits_by("priority")},
        # There may be many tenants and models, and no plot shows the curves of each.
        by_tenant={key: replace(waits, curve=()) for key, waits in tally.waits_by("tenant")},
        by_model={key: replace(waits, curve=()) for key, waits in tally.waits_by("model")},
        lost_by_class={class_name(priority): tally.lost_by_class[priority] for priority in sorted(tally.lost_by_class)},
        lost_by_tenant=dict(sorted(tally.lost_by_tenant.items())),
        delays=dict(sorted(world.truth.meters.delays.items())),
        jain=jain([shares.swiftness for _, shares in sorted(tally.shares.items())]),
        loads=moves[MoveKind.LOAD],
        wakes=moves[MoveKind.WAKE],
        sleeps=moves[MoveKind.SLEEP],
        unloads=moves[MoveKind.UNLOAD],
        devices=_devices(world, tally.ends_s),
        ends_s=tally.ends_s,
        makespan_s=makespan_s,
        served_per_s=tally.fates[Fate.SERVED] * per_s,
        tokens_per_s=tally.tokens * per_s,
        tiers=world.truth.meters.tiers.means(tally.ends_s),
        over_time=_over_time(world.ended, tally.arrives_s),
        events=world.events_told,
    )


class _Kind(NamedTuple):
    model: ModelId
    priority: int
    tenant: TenantId


class _Tally:
    """Sums over ended requests; waits are kept once and as plain numbers, because there may be millions."""

    def __init__(self) -> None:
        self.fates: Counter[Fate] = Counter()
        self.rejected: Counter[str] = Counter()
        self.broken = 0
        self.tokens = 0
        self.begins_s = inf
        self.ends_s = 0.0
        # When the last arrived.
        self.arrives_s = 0.0
        self.waits: defaultdict[_Kind, array[float]] = defaultdict(lambda: array("d"))
        self.lost_by_class: Counter[int] = Counter()
        self.lost_by_tenant: Counter[str] = Counter()
        self.shares: defaultdict[str, _Share] = defaultdict(_Share)

    def add(self, call: EndedCall) -> None:
        self.fates[call.fate] += 1
        self.begins_s, self.ends_s = min(self.begins_s, call.arrived), max(self.ends_s, call.ended_at)
        self.arrives_s = max(self.arrives_s, call.arrived)
        if call.code is not None:
            self.rejected[call.code.value] += 1
        if call.fate is Fate.SERVED:
            self._add_served(call)
        else:
            self._add_lost(call)

    def _add_served(self, call: EndedCall) -> None:
        self.broken += call.was_broken
        self.tokens += call.output_len
        self.waits[_Kind(call.model, call.priority, call.tenant)].append(call.wait_s)
        share = self.shares[call.tenant]
        share.served_s += call.ended_at - call.granted_at
        share.spent_s += call.ended_at - call.arrived

    def _add_lost(self, call: EndedCall) -> None:
        self.lost_by_class[call.priority] += 1
        self.lost_by_tenant[str(call.tenant)] += 1
        # A request that is refused at once takes no time.
        if call.ended_at > call.arrived:
            self.shares[call.tenant].spent_s += call.ended_at - call.arrived

    def waits_by(self, field: str) -> Iterator[tuple[Any, Waits]]:
        """By one field of `_Kind`."""
        groups: defaultdict[Any, list[array[float]]] = defaultdict(list)
        for kind, waits in self.waits.items():
            groups[getattr(kind, field)].append(waits)
        for key in sorted(groups, key=str):
            yield key, waits_of(chain.from_iterable(groups[key]))


@dataclass(slots=True)
class _Share:
    """How long a tenant's requests were served, of how long they were in the system."""

    served_s: float = 0.0
    spent_s: float = 0.0

    @property
    def swiftness(self) -> float:
        """Seconds of service per second in the system: 1 if no request waited."""
        return self.served_s / self.spent_s if self.spent_s > 0 else 1.0


def _over_time(ended: Iterable[EndedCall], arrives_s: float) -> tuple[Moment, ...]:
    """Requests by the time of arrival, the last of which is given, in stretches of equal length."""
    width = (arrives_s or 1.0) / MOMENTS
    stretches: list[array[float]] = [array("d") for _ in range(MOMENTS)]
    lost = [0] * MOMENTS
    for call in ended:
        if not call.is_lease:
            number = min(MOMENTS - 1, int(call.arrived / width))
            if call.fate is Fate.SERVED:
                stretches[number].append(call.wait_s)
            else:
                lost[number] += 1
    return tuple(
        Moment((number + 0.5) * width, len(waits), lost[number], quantile(sorted(waits), 0.95) if waits else 0.0)
        for number, waits in enumerate(stretches)
    )


def _devices(world: World, until: float) -> dict[str, DeviceUse]:
    devices = list(world.truth.devices.values())
    gpus = [device for device in devices if device.kind is DeviceKind.GPU]
    meters, uses = world.truth.meters, {}
    for device in gpus or devices:
        whole = max(1, device.usable_mib) * until if until > 0 else 1.0
        busy, moving = meters.busy_mib_s(device.id, until), meters.moving_mib_s(device.id, until)
        uses[str(device.id)] = DeviceUse(min(1.0, busy / whole), min(1.0, moving / whole))
    return uses
