"""What slots may and may not do: one move at a time, memory that is free, the current revision, and no way back.

Each class keeps its own table of slots from moves and their ends.
"""

from __future__ import annotations

from greenroom.core import events as ev
from greenroom.core.effects import OpOutcome, Reason
from greenroom.core.model import (
    ARRIVING,
    LeaseId,
    ModelId,
    ModelSpec,
    Move,
    MoveId,
    MoveKind,
    OpId,
    Outcome,
    RequestId,
    SlotId,
)
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check

LEAVING = (MoveKind.SLEEP, MoveKind.UNLOAD)


class OneMove(Check):
    """One move a slot at a time."""

    def __init__(self) -> None:
        self._moving: dict[SlotId, MoveId] = {}
        self._slot_of: dict[MoveId, SlotId] = {}

    def move(self, move: Move, reason: Reason) -> None:
        if move.slot in self._moving:
            raise Violation(f"{move.slot} is to {move.kind.value} while {self._moving[move.slot]} is under way")
        self._moving[move.slot] = move.id
        self._slot_of[move.id] = move.slot

    def move_done(self, event: ev.MoveDone) -> None:
        if (slot := self._slot_of.pop(event.move, None)) is not None:
            del self._moving[slot]

    def at_rest(self) -> None:
        if self._moving:
            raise Violation(f"{sorted(self._moving)} still move")


class Memory(Check):
    """No move takes more than is free, added up anew from what every place holds by all that was told."""

    def move(self, move: Move, reason: Reason) -> None:
        if self.world is None or move.kind is MoveKind.UNLOAD:
            return
        truth = self.world.truth
        own = truth.places.get(move.slot)
        for device, mib in move.claim.items():
            more = mib - (own.holds.get(device, 0) if own is not None else 0)
            usable = truth.usable_mib(device)
            held = sum(place.holds.get(device, 0) for place in truth.places.values())
            if more > 0 and held + more > usable:
                raise Violation(f"{move.slot} takes {more} MiB more of {device}: {held} of {usable} are held")


class Apart(Check):
    """Models that are configurations of one thing are never ready together, nor on their way there."""

    def __init__(self) -> None:
        self.judged = 0
        self._specs: dict[ModelId, ModelSpec] = {}
        self._ready: dict[SlotId, ModelId] = {}
        self._moves: dict[MoveId, Move] = {}

    def config_changed(self, event: ev.ConfigChanged) -> None:
        self._specs.update({spec.id: spec for spec in event.models})

    def move(self, move: Move, reason: Reason) -> None:
        self._moves[move.id] = move
        word = self._specs[move.model].exclusive if move.model in self._specs else ""
        if not word or move.kind not in (MoveKind.LOAD, MoveKind.WAKE):
            return
        self.judged += 1
        others = {model for model in self._ready.values() if model != move.model}
        if beside := sorted(model for model in others if self._specs[model].exclusive == word):
            raise Violation(f"{move.model} is to {move.kind.value} beside {beside}, which it excludes")
        self._ready[move.slot] = move.model

    def move_done(self, event: ev.MoveDone) -> None:
        move = self._moves.pop(event.move, None)
        if move is not None and (move.kind in LEAVING or event.outcome is not Outcome.DONE):
            self._ready.pop(move.slot, None)

    def slots_lost(self, event: ev.SlotsLost) -> None:
        for slot in event.slots:
            self._ready.pop(slot, None)


class Revisions(Check):
    """What comes is of the revision that is configured, and only that is granted."""

    def __init__(self) -> None:
        self._current: dict[ModelId, int] = {}
        self._of: dict[SlotId, tuple[ModelId, int]] = {}

    def config_changed(self, event: ev.ConfigChanged) -> None:
        for model in event.removed:
            self._current.pop(model, None)
        for spec in event.models:
            self._current[spec.id] = spec.revision

    def move(self, move: Move, reason: Reason) -> None:
        self._of[move.slot] = (move.model, move.revision)
        if move.kind in ARRIVING and self._current.get(move.model) != move.revision:
            raise Violation(f"{move.model} comes with revision {move.revision}, not {self._current.get(move.model)}")

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        if slot in self._of:
            model, revision = self._of[slot]
            if self._current.get(model) != revision:
                raise Violation(f"{request} is granted revision {revision} of {model}")


class NoReturn(Check):
    """A slot that an operator, a changed configuration or the end sends away is not granted any more."""

    def __init__(self) -> None:
        self._specs: dict[ModelId, ModelSpec] = {}
        self._slots: dict[ModelId, set[SlotId]] = {}
        self._closed: set[SlotId] = set()
        # What the last order closed for a newcomer.
        self._evicted: set[SlotId] = set()
        self._is_over = False

    def config_changed(self, event: ev.ConfigChanged) -> None:
        for model in event.removed:
            self._specs.pop(model, None)
            self._close(model)
        for spec in event.models:
            old = self._specs.get(spec.id)
            if old is not None and old.revision != spec.revision:
                self._close(spec.id)
            self._specs[spec.id] = spec

    def move_asked(self, event: ev.MoveAsked) -> None:
        spec = self._specs.get(event.model)
        cannot = event.kind in (MoveKind.PREPARE, MoveKind.SLEEP) and spec is not None and spec.need_asleep is None
        if spec is None or cannot:
            return
        before = set(self._closed)
        for model in event.evict if event.kind in ARRIVING else (event.model,):
            self._close(model)
        self._evicted = self._closed - before if event.kind in ARRIVING else set()

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        if outcome is OpOutcome.TOO_LARGE:
            # None leaves for a model that can never fit.
            self._closed -= self._evicted
        self._evicted = set()

    def _close(self, model: ModelId) -> None:
        self._closed |= self._slots.get(model, set())

    def move(self, move: Move, reason: Reason) -> None:
        self._slots.setdefault(move.model, set()).add(move.slot)
        if move.kind in LEAVING:
            self._evicted.discard(move.slot)
        if move.kind is MoveKind.WAKE:
            self._closed.discard(move.slot)

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        if self._is_over:
            raise Violation(f"{request} is granted though all is shutting down")
        if slot in self._closed:
            raise Violation(f"{request} is granted {slot}, which was told to leave")

    def shutdown_asked(self, event: ev.ShutdownAsked) -> None:
        self._is_over = True


class PinnedStay(Check):
    """Pinned slots leave only by an operator's word, a changed configuration, a crash or shutdown."""

    def __init__(self) -> None:
        self.judged = 0
        self._specs: dict[ModelId, ModelSpec] = {}
        self._model_of: dict[SlotId, ModelId] = {}
        self._move_of: dict[MoveId, Move] = {}
        self._moving: set[SlotId] = set()
        self._busy: dict[SlotId, set[str]] = {}
        self._slot_of: dict[str, SlotId] = {}
        self._excused: set[SlotId] = set()

    def config_changed(self, event: ev.ConfigChanged) -> None:
        for model in event.removed:
            self._specs.pop(model, None)
            self._excuse(model)
        for spec in event.models:
            old = self._specs.get(spec.id)
            if old is not None and old.revision != spec.revision:
                self._excuse(spec.id)
            elif old is None or (spec.pinned and not old.pinned):
                # One that is busy or moves may have been on its way out before it was pinned.
                self._excused |= {slot for slot in self._slots(spec.id) if slot in self._moving or slot in self._busy}
            self._specs[spec.id] = spec

    def move_asked(self, event: ev.MoveAsked) -> None:
        for model in (event.model, *event.evict):
            self._excuse(model)

    def slots_lost(self, event: ev.SlotsLost) -> None:
        self._excused |= set(event.slots)

    def shutdown_asked(self, event: ev.ShutdownAsked) -> None:
        self._excused |= set(self._model_of)

    def move_done(self, event: ev.MoveDone) -> None:
        move = self._move_of.pop(event.move, None)
        if move is not None:
            self._moving.discard(move.slot)
            if event.outcome is not Outcome.DONE:
                self._excused.add(move.slot)

    def move(self, move: Move, reason: Reason) -> None:
        spec = self._specs.get(move.model)
        self._model_of[move.slot] = move.model
        self._move_of[move.id] = move
        self._moving.add(move.slot)
        if move.kind not in LEAVING:
            self._excused.discard(move.slot)
        elif spec is not None and spec.pinned:
            self.judged += 1
            if move.slot not in self._excused:
                raise Violation(f"{move.slot} is to {move.kind.value} though {move.model} is pinned")

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        self._slot_of[request] = slot
        self._busy.setdefault(slot, set()).add(request)
        self._excused.discard(slot)

    def serve_done(self, event: ev.ServeDone) -> None:
        self._end(event.request)

    def request_gone(self, event: ev.RequestGone) -> None:
        self._end(event.request)

    def _end(self, request: str) -> None:
        if (slot := self._slot_of.pop(request, None)) is not None:
            busy = self._busy[slot]
            busy.discard(request)
            if not busy:
                del self._busy[slot]

    def _slots(self, model: ModelId) -> set[SlotId]:
        return {slot for slot, its in self._model_of.items() if its == model}

    def _excuse(self, model: ModelId) -> None:
        self._excused |= self._slots(model)
