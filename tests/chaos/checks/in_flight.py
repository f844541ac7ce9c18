"""In-flight equals grants minus dones, slot by slot, and nothing leaves while it is busy."""

from __future__ import annotations

from greenroom.core import events as ev
from greenroom.core.effects import Reason
from greenroom.core.model import LeaseId, Move, MoveKind, RequestId, SlotId
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check, state_of


class InFlight(Check):
    """Counts by what was said, and compares with what the scheduler believes of the slot that was spoken of."""

    def __init__(self) -> None:
        self._slot_of: dict[str, SlotId] = {}
        self._busy: dict[SlotId, int] = {}
        self._spoken_of: SlotId | None = None

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        if request in self._slot_of:
            raise Violation(f"{request} is granted {slot} and has {self._slot_of[request]}")
        self._slot_of[request] = self._spoken_of = slot
        self._busy[slot] = self._busy.get(slot, 0) + 1

    def serve_done(self, event: ev.ServeDone) -> None:
        self._end(event.request)

    def request_gone(self, event: ev.RequestGone) -> None:
        self._end(event.request)

    def lease_gone(self, event: ev.LeaseGone) -> None:
        self._end(event.lease)

    def _end(self, who: str) -> None:
        slot = self._slot_of.pop(who, None)
        if slot is None:
            return
        self._spoken_of = slot
        if self._busy[slot] == 1:
            del self._busy[slot]
        else:
            self._busy[slot] -= 1

    def settled(self, event: ev.Event) -> None:
        if self.world is None:
            return
        state = state_of(self.world)
        if len(state.grants) != len(self._slot_of):
            raise Violation(f"{len(self._slot_of)} are in flight, but {len(state.grants)} are granted")
        slot = self._spoken_of
        if slot is not None:
            self._spoken_of = None
            known = state.slots.get(slot)
            counted = 0 if known is None else len(known.in_flight)
            if counted != self._busy.get(slot, 0):
                raise Violation(f"{slot} serves {self._busy.get(slot, 0)}, but counts {counted}")
        if state.counters.grants - state.counters.dones != len(self._slot_of):
            raise Violation("grants minus dones is not what is in flight")

    def at_rest(self) -> None:
        if self._slot_of:
            raise Violation(f"{sorted(self._slot_of)} are still in flight")


class BusyStay(Check):
    """Nothing busy is put to sleep or unloaded."""

    def __init__(self) -> None:
        self._slot_of: dict[str, SlotId] = {}
        self._serves: dict[SlotId, set[str]] = {}

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        self._slot_of[request] = slot
        self._serves.setdefault(slot, set()).add(request)

    def serve_done(self, event: ev.ServeDone) -> None:
        self._end(event.request)

    def request_gone(self, event: ev.RequestGone) -> None:
        self._end(event.request)

    def _end(self, request: RequestId) -> None:
        slot = self._slot_of.pop(request, None)
        if slot is not None:
            served = self._serves[slot]
            served.discard(request)
            if not served:
                del self._serves[slot]

    def slots_lost(self, event: ev.SlotsLost) -> None:
        """Its requests end later; the slot itself is gone, or only its copy is left."""
        for slot in event.slots:
            self._serves.pop(slot, None)
            for request in [request for request, where in self._slot_of.items() if where == slot]:
                del self._slot_of[request]

    def move(self, move: Move, reason: Reason) -> None:
        if move.kind in (MoveKind.SLEEP, MoveKind.UNLOAD) and move.slot in self._serves:
            raise Violation(f"{move.slot} is to {move.kind.value} while it serves {len(self._serves[move.slot])}")
