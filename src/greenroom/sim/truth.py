"""The ground truth about slots and memory, against which every effect of the scheduler is checked.

Owns the tier of every slot, what each device holds, and the meters of the run. Never looks into the scheduler. An
effect that is impossible or forbidden raises Violation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from greenroom.core.model import (
    LEGAL_MOVES,
    NO_CLAIM,
    Claim,
    Device,
    DeviceId,
    DeviceKind,
    ModelId,
    Move,
    MoveKind,
    OtherLease,
    Outcome,
    SlotId,
    Tier,
    larger,
)
from greenroom.sim.records import SimCall, SimPlace, Violation

LEAVING = (MoveKind.SLEEP, MoveKind.UNLOAD)


class GroundTruth:
    """Devices, places and moves as they really are."""

    def __init__(self) -> None:
        self.devices: dict[DeviceId, Device] = {}
        self.foreign_mib: dict[DeviceId, int] = {}
        # Held through other gateways.
        self.others_mib: dict[DeviceId, int] = {}
        # The sum of what all places hold, kept so that a check costs nothing.
        self.held_mib: dict[DeviceId, int] = {}
        self.places: dict[SlotId, SimPlace] = {}
        self.moving: dict[str, Move] = {}
        # Models that were ready at some time.
        self._been_ready: set[ModelId] = set()
        # Models that last left though no other needed their room: they were idle.
        self._left_idle: set[ModelId] = set()
        self.meters = Meters()

    def set_devices(self, devices: Iterable[Device]) -> None:
        self.devices = {device.id: device for device in devices}
        for device in self.devices:
            self.held_mib.setdefault(device, 0)

    def set_foreign(self, foreign_mib: Mapping[DeviceId, int]) -> None:
        self.foreign_mib.update(foreign_mib)

    def set_others(self, leases: Iterable[OtherLease]) -> None:
        self.others_mib = {}
        for lease in leases:
            for device, mib in lease.claim.items():
                self.others_mib[device] = self.others_mib.get(device, 0) + mib

    # --- memory -------------------------------------------------------------------------------------------------------

    def hold(self, place: SimPlace, claim: Claim) -> None:
        """Set what this place holds."""
        for device, mib in place.holds.items():
            self.held_mib[device] -= mib
        for device, mib in claim.items():
            self.held_mib[device] = self.held_mib.get(device, 0) + mib
        place.holds = claim

    def take(self, place: SimPlace, claim: Claim) -> None:
        """Set what this place holds. Raises Violation if that is not free, by all the scheduler was told."""
        for device, mib in claim.items():
            more = mib - place.holds.get(device, 0)
            if more > 0 and self.held_mib[device] + more > self.usable_mib(device):
                raise Violation(f"{place.id} ({place.model}) takes {mib} MiB of {device}, which is not free")
        self.hold(place, claim)

    def usable_mib(self, device: DeviceId) -> int:
        """What places may use of a device: its capacity without foreign processes and other gateways."""
        there = self.devices.get(device)
        outside_mib = self.foreign_mib.get(device, 0) + self.others_mib.get(device, 0)
        return 0 if there is None else there.usable_mib - outside_mib

    def drop(self, place: SimPlace) -> None:
        self.hold(place, NO_CLAIM)
        del self.places[place.id]

    # --- moves --------------------------------------------------------------------------------------------------------

    def begin(self, move: Move, now: float) -> SimPlace:
        """A move starts. Raises Violation unless it is legal from its slot's tier and its memory is free."""
        place = self.places.get(move.slot)
        if place is None:
            place = self.places[move.slot] = SimPlace(move.slot, move.model, move.revision)
        if place.move is not None:
            raise Violation(f"{place.id} is to {move.kind.value} while it still has to {place.move.kind.value}")
        if place.tier not in LEGAL_MOVES[move.kind][0]:
            raise Violation(f"{place.id} is {place.tier.value} and is to {move.kind.value}")
        if move.kind in LEAVING:
            _require_idle(place)
            self._note_leaving(place, move)
        place.held = place.holds
        if move.kind is not MoveKind.UNLOAD:
            self.take(place, larger(place.holds, move.claim))
        place.move, place.moving_since = move, now
        self.moving[move.id] = move
        self.meters.move_began(place, now)
        self.meters.tiers_changed(self.places.values(), now)
        return place

    def _note_leaving(self, place: SimPlace, move: Move) -> None:
        if place.tier is Tier.READY and move.makes_room_for is None:
            self._left_idle.add(place.model)

    def end(self, move: Move, outcome: Outcome, seen: Claim | None, now: float) -> SimPlace:
        """A move has ended. After a failure nothing is left, except that a slot that slept still sleeps."""
        place = self.places[move.slot]
        del self.moving[move.id]
        self.meters.move_ended(place, now)
        # The move may be reported as done although the process died meanwhile.
        is_done = outcome is Outcome.DONE and not place.fell
        is_untouched = move.kind in LEAVING and outcome is Outcome.NO_LEASE and not place.fell
        place.move, place.fell = None, False
        if is_untouched:
            self.hold(place, place.held)
        elif move.kind is MoveKind.UNLOAD:
            place.tier = Tier.COLD
        elif is_done:
            self._arrive(place, move, seen, now)
        elif place.tier is Tier.ASLEEP:
            self.hold(place, place.asleep_claim)
        if place.tier is Tier.COLD:
            self.drop(place)
        self.meters.tiers_changed(self.places.values(), now)
        return place

    def _arrive(self, place: SimPlace, move: Move, seen: Claim | None, now: float) -> None:
        place.tier, claim = LEGAL_MOVES[move.kind][1], move.claim
        if place.tier is Tier.READY:
            place.ready_claim, place.ready_since = claim, now
            place.first_load_s = 0.0 if place.model in self._been_ready else now - place.moving_since
            place.idle_load_s = now - place.moving_since if place.model in self._left_idle else 0.0
            self._been_ready.add(place.model)
            self._left_idle.discard(place.model)
        else:
            # Folded weights take less host memory than planned, until the model is loaded again.
            told = {on: mib for on, mib in (seen or NO_CLAIM).items() if self._is_host(on)}
            claim = place.asleep_claim = {on: min(mib, told.get(on, mib)) for on, mib in claim.items()}
        self.hold(place, larger(claim, seen) if seen else claim)

    def _is_host(self, device: DeviceId) -> bool:
        return device in self.devices and self.devices[device].kind is DeviceKind.HOST

    # --- requests -----------------------------------------------------------------------------------------------------

    def serve(self, call: SimCall, slot: SlotId, now: float) -> SimPlace:
        """A request is granted. Raises Violation unless the slot is ready and has room for it."""
        place = self.places.get(slot)
        if place is None or place.tier is not Tier.READY or place.move is not None:
            raise Violation(f"{call.id} is granted {slot}, which is not ready")
        if place.model not in call.candidates:
            raise Violation(f"{call.id} is granted {place.model}, which it did not ask for")
        if len(place.running) >= place.concurrency:
            raise Violation(f"{call.id} is granted {slot}, which serves {len(place.running)} already")
        place.running[call.id] = call
        call.not_there_s = max(0.0, place.ready_since - call.arrived)
        call.first_load_s = min(call.not_there_s, place.first_load_s)
        call.idle_load_s = min(call.not_there_s, place.idle_load_s)
        if len(place.running) == 1:
            self.meters.became_busy(place, now)
        return place

    def stop_serving(self, call: SimCall, now: float) -> int:
        """A request has left its slot, which may be gone by now. Returns how many that slot still serves."""
        place = self.places.get(call.slot) if call.slot is not None else None
        if place is None:
            return 0
        if place.running.pop(call.id, None) is not None and not place.running:
            self.meters.became_idle(place, now)
        return len(place.running)

    def lose(self, place: SimPlace, asleep_claim: Claim | None, now: float) -> list[SimCall]:
        """A process dies; its host copy may survive. Returns the requests it served."""
        calls = list(place.running.values())
        if place.move is not None:
            place.fell = True
            return calls
        if place.running:
            self.meters.became_idle(place, now)
        if asleep_claim is None:
            self.drop(place)
        else:
            place.running.clear()
            place.tier, place.asleep_claim = Tier.ASLEEP, asleep_claim
            self.hold(place, asleep_claim)
        self.meters.tiers_changed(self.places.values(), now)
        return calls

    # --- questions ----------------------------------------------------------------------------------------------------

    def tier_of(self, model: ModelId) -> Tier:
        """The best tier this model is on."""
        tiers = {place.tier for place in self.places.values() if place.model == model}
        return next((tier for tier in Tier if tier in tiers), Tier.COLD)

    def is_there(self, model: ModelId) -> bool:
        """True while a slot of this model is ready, and not about to leave."""
        places = (place for place in self.places.values() if place.model == model)
        return any(place.tier is Tier.READY and place.move is None for place in places)

    def is_first_load(self, model: ModelId) -> bool:
        """True while a model is on its way to be ready for the first time."""
        return model not in self._been_ready and self._is_moving(model)

    def is_idle_load(self, model: ModelId) -> bool:
        """True while a model leaves because it is idle, or is on its way back from that."""
        return model in self._left_idle and self._is_moving(model)

    def _is_moving(self, model: ModelId) -> bool:
        return any(move.model == model for move in self.moving.values())


def _require_idle(place: SimPlace) -> None:
    if place.running:
        raise Violation(f"{place.id} ({place.model}) leaves while it serves {', '.join(place.running)}")


@dataclass(slots=True)
class Delays:
    """Why requests took longer than alone on a GPU, in seconds over all that were served; and those that were not.

    *Not there*: until its slot was ready; parts of that are the model's first load and loads after it left because it
    was idle, which no GPU memory would spare.
    *Full*: the slot was ready, but served as many as it can. *Slow*: beside others, its answer took longer. A request
    that was not served counts by what it would have waited for then.
    """

    served: int = 0
    not_there_s: float = 0.0
    full_s: float = 0.0
    slow_s: float = 0.0
    lost_not_there: int = 0
    lost_full: int = 0
    # Of those not there: refused because the model is larger than any GPU.
    lost_too_large: int = 0
    # Of those not there: refused because pinned models leave too little room for it.
    lost_kept_out: int = 0
    # Of those not there: their model was loaded for the first time.
    first_load_s: float = 0.0
    lost_first_load: int = 0
    # Of those not there: their model had left because it was idle.
    idle_load_s: float = 0.0
    lost_idle_load: int = 0
    # Of those not there: refused because `devices` of the model names no GPU that is there.
    lost_no_gpu: int = 0
    # No delay: what the answers would have taken alone on a GPU.
    work_s: float = 0.0

    def add(self, call: SimCall) -> None:
        """A served request has ended."""
        self.served += 1
        not_there_s = min(call.not_there_s, call.wait_s)
        self.not_there_s += not_there_s
        self.first_load_s += call.first_load_s
        self.idle_load_s += call.idle_load_s
        self.full_s += call.wait_s - not_there_s
        self.slow_s += max(0.0, call.ended_at - call.granted_at - call.work_s)
        self.work_s += call.work_s

    def lose(self, is_there: bool, is_first_load: bool, is_idle_load: bool) -> None:
        """A request that waited was refused, or its caller gave up."""
        self.lost_full += is_there
        self.lost_not_there += not is_there
        self.lost_first_load += is_first_load
        self.lost_idle_load += is_idle_load

    @property
    def lost_for_good(self) -> int:
        """Those not there whose model could not come, however long they waited."""
        return self.lost_too_large + self.lost_kept_out + self.lost_no_gpu

    @property
    def lost_in_wait(self) -> int:
        """Those not there whose model could have come."""
        return self.lost_not_there - self.lost_for_good

    @property
    def lost(self) -> int:
        return self.lost_not_there + self.lost_full

    @property
    def total_s(self) -> float:
        return self.not_there_s + self.full_s + self.slow_s

    def mean_s(self, seconds: float) -> float:
        """This sum for each request that was served."""
        return seconds / self.served if self.served else 0.0


# Stretches of time for which tiers are kept, and their length at first; a power of two keeps sums of lengths exact.
STRETCHES_MAX = 128
STRETCH_S = 2.0**-7


class Tiers(NamedTuple):
    """How many slots are in each tier, as means over a stretch of time; `at` is its middle."""

    at: float
    ready: float
    asleep: float
    moving: float


class TierTimes:
    """Tiers over time, as sums over stretches of equal length. Stretches double when time outgrows them: a run of any
    length keeps at most `STRETCHES_MAX`, which cover all of it."""

    def __init__(self) -> None:
        self._width_s = STRETCH_S
        self._sums: list[list[float]] = []
        self._counts = (0, 0, 0)
        self._since = 0.0

    def change(self, ready: int, asleep: int, moving: int, now: float) -> None:
        self._pass_to(now)
        self._counts = (ready, asleep, moving)

    def means(self, until: float) -> tuple[Tiers, ...]:
        """Of each stretch that has begun by then."""
        self._pass_to(until)
        width_s, found = self._width_s, []
        for number, sums in enumerate(self._sums):
            begins, ends = number * width_s, min((number + 1) * width_s, self._since)
            if begins < until:
                found.append(Tiers((begins + ends) / 2, *(total / (ends - begins) for total in sums)))
        return tuple(found)

    def _pass_to(self, now: float) -> None:
        while now > self._width_s * STRETCHES_MAX:
            self._double()
        number = int(self._since / self._width_s)
        while self._since < now:
            ends = min(now, (number + 1) * self._width_s)
            if number == len(self._sums):
                self._sums.append([0.0, 0.0, 0.0])
            for tier, count in enumerate(self._counts):
                self._sums[number][tier] += count * (ends - self._since)
            self._since = ends
            number += 1

    def _double(self) -> None:
        pairs = zip_longest(self._sums[::2], self._sums[1::2], fillvalue=(0.0, 0.0, 0.0))
        self._sums = [[first + second for first, second in zip(*pair, strict=True)] for pair in pairs]
        self._width_s *= 2


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
    """Sums that grow while the world runs: moves, memory that served and moved over time, tiers over time."""

    def __init__(self) -> None:
        self.moves: dict[MoveKind, int] = dict.fromkeys(MoveKind, 0)
        self.tiers = TierTimes()
        self.delays: defaultdict[ModelId, Delays] = defaultdict(Delays)
        self._moving = 0
        self._busy_mib: defaultdict[DeviceId, Level] = defaultdict(Level)
        self._moving_mib: defaultdict[DeviceId, Level] = defaultdict(Level)
        # The claim that each place was counted with: its claim may change meanwhile.
        self._counted: dict[str, Claim] = {}

    def move_began(self, place: SimPlace, now: float) -> None:
        self._moving += 1
        self._count(self._moving_mib, place, now)

    def move_ended(self, place: SimPlace, now: float) -> None:
        self._moving -= 1
        self._uncount(self._moving_mib, place, now)

    def became_busy(self, place: SimPlace, now: float) -> None:
        self._count(self._busy_mib, place, now)

    def became_idle(self, place: SimPlace, now: float) -> None:
        self._uncount(self._busy_mib, place, now)

    def tiers_changed(self, places: Iterable[SimPlace], now: float) -> None:
        ready = asleep = 0
        for place in places:
            if place.move is None:
                ready += place.tier is Tier.READY
                asleep += place.tier is Tier.ASLEEP
        self.tiers.change(ready, asleep, self._moving, now)

    def busy_mib_s(self, device: DeviceId, now: float) -> float:
        """Memory of serving slots, times how long."""
        return self._busy_mib[device].area(now)

    def moving_mib_s(self, device: DeviceId, now: float) -> float:
        """Memory of moving slots, times how long."""
        return self._moving_mib[device].area(now)

    def _count(self, levels: defaultdict[DeviceId, Level], place: SimPlace, now: float) -> None:
        # A slot never serves and moves at once, so one entry per slot is enough.
        self._counted[place.id] = place.holds
        for device, mib in place.holds.items():
            levels[device].add(mib, now)

    def _uncount(self, levels: defaultdict[DeviceId, Level], place: SimPlace, now: float) -> None:
        for device, mib in self._counted.pop(place.id, {}).items():
            levels[device].add(-mib, now)
