"""Plays the scheduler's effects in virtual time: every move, answer and lease, from its effect to its end.

Owns the clock, the callers and the truth about slots and memory (`truth.py`). Every effect is checked against that
truth, never against the scheduler's tables; a wrong one raises Violation. Effects only schedule what follows: no event
is posted while the scheduler handles another. `world.py` begins things, `hooks.py` makes them fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from typing import NoReturn

from greenroom.core import events as ev
from greenroom.core.decide.placement import asleep
from greenroom.core.effects import OpOutcome, Reason, RejectCode, Rejection
from greenroom.core.events import Timer
from greenroom.core.model import (
    Claim,
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
    Tier,
)
from greenroom.sim.compute import Clock, Compute
from greenroom.sim.config import DEFAULT_TIMINGS, SimConfig, SimModel, Timings, absent_gpus
from greenroom.sim.hooks import Ending, Faults, MoveFate, ServeFate, Watcher
from greenroom.sim.records import NO_MODEL, EndedCalls, Fate, SimCall, SimPlace, Violation
from greenroom.sim.truth import Delays, GroundTruth

# The delay between a cut, an abort or a crash and what follows from it.
SOON_S = 0.01
# Moves that read the model from disk.
READING = frozenset({MoveKind.LOAD, MoveKind.PREPARE})


class Player:
    """Implements Effects."""

    def __init__(self, config: SimConfig, seed: int, faults: Faults | None, watchers: Sequence[Watcher]) -> None:
        self.config = config
        self.clock = Clock()
        self.truth = GroundTruth()
        self.models: dict[ModelId, SimModel] = {}
        self.calls: dict[str, SimCall] = {}  # waiting or served
        self.ended = EndedCalls()
        self.leases: dict[LeaseId, SimCall] = {}
        self.ops: dict[OpId, OpOutcome | None] = {}
        self.events_told = 0
        self._specs: dict[tuple[ModelId, int], ModelSpec] = {}  # slots of old revisions keep their spec
        self._random = Random(f"{seed}:world")
        self._faults = faults or Faults()
        # Bound methods, looked up once: they are called millions of times.
        self._tell = tuple(watcher.told for watcher in watchers)
        self._show = tuple(watcher.asked for watcher in watchers)
        self._settle = tuple(watcher.settled for watcher in watchers)
        self._timers: dict[Timer, tuple[float, int]] = {}
        self._numbers = 0
        # Where speed is constant, the end of an answer is known when it begins.
        is_constant = all(model.timings.speed is None for model in config.models)
        self._compute = None if is_constant else Compute(self.clock, self._answered)
        self._disk_free_at = [0.0] * (config.loads_at_once or 0)
        self.scheduler = config.scheduler_for(self)

    def post(self, event: ev.Event) -> None:
        """Post an event to the scheduler. The truth must be changed before."""
        self.events_told += 1
        for tell in self._tell:
            tell(event)
        self.scheduler.handle(event)
        for settle in self._settle:
            settle(event)

    # --- effects ------------------------------------------------------------------------------------------------------

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        self._note("grant", request, slot, reason)
        call = self.calls.get(request)
        if call is None or call.fate is not Fate.WAITING:
            self._object(f"{request} is granted though it is {call.fate.value if call else 'gone'}")
        now = self.clock.now
        call.fate, call.slot, call.granted_at = Fate.GRANTED, slot, now
        call.grants += 1
        if call.is_lease:
            self._place_lease(call, slot)
            return
        place = self.truth.serve(call, slot, now)
        call.model = place.model
        timings = self._timings(place.model)
        usual_s = call.work_s = timings.service_s(call.prompt_len, call.output_len)
        fate = self._faults.on_grant(call, usual_s)
        if fate is not None:
            self.clock.arrange(fate.after_s, self._meet, (call, call.grants, fate))
        elif self._compute is not None:
            self._compute.begin(place, call, usual_s, timings.speed, self.truth.devices)
        else:
            self.clock.arrange(usual_s, self._answered, (call, call.grants))

    def _place_lease(self, call: SimCall, slot: SlotId) -> None:
        # The effect does not carry the claim, which the holder must know: the one look into the scheduler's view.
        claim = self.scheduler.view.slots[slot].claim
        place = self.truth.places[slot] = SimPlace(slot, NO_MODEL, 1)
        place.tier = Tier.READY
        self.truth.take(place, claim)

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        self._note("reject", request, rejection, reason)
        call = self.calls.get(request)
        if call is None or call.fate is not Fate.WAITING:
            self._object(f"{request} is rejected though it is {call.fate.value if call else 'gone'}")
        call.code = rejection.code
        call.is_kept_out = rejection.code is RejectCode.TOO_LARGE and rejection.needs_mib <= rejection.capacity_mib
        self._end(call, Fate.REJECTED)
        self.leases.pop(LeaseId(request), None)
        if call.on_end is not None:
            # A caller may ask again at once, which must not happen inside an effect.
            self.clock.arrange(0.0, self._tell_end, call)

    def cut(self, request: RequestId, reason: Reason) -> None:
        self._note("cut", request, reason)
        call = self.calls.get(request)
        if call is None or call.fate is not Fate.GRANTED or call.was_cut:
            self._object(f"{request} is cut though it is not being served, or was cut before")
        call.was_cut = True
        self.clock.arrange(SOON_S, self._answered, (call, call.grants))

    def move(self, move: Move, reason: Reason) -> None:
        self._note("move", move, reason)
        self.truth.begin(move, self.clock.now)
        if not self._specs[move.model, move.revision].is_remote:
            self.truth.meters.moves[move.kind] += 1
        timings = self._timings(move.model)
        took_s = self._stray(timings.move_s(move.kind))
        if move.kind in READING and self._disk_free_at:
            took_s += self._wait_for_disk(took_s)
        usual = MoveFate(Outcome.DONE, took_s)
        fate = self._faults.on_move(move, usual)
        self.clock.arrange(fate.took_s, self._end_move, (move, fate))

    def _wait_for_disk(self, took_s: float) -> float:
        """The seconds that this load waits for earlier loads to finish reading."""
        starts = max(self.clock.now, heappop(self._disk_free_at))
        heappush(self._disk_free_at, starts + took_s)
        return starts - self.clock.now

    def abort(self, move: MoveId, reason: Reason) -> None:
        self._note("abort", move, reason)
        moving = self.truth.moving.get(move)
        if moving is None:
            self._object(f"{move} is aborted though it is not under way")
        if self._faults.on_abort(move):
            self.clock.arrange(SOON_S, self._end_move, (moving, MoveFate(Outcome.ABORTED, SOON_S)))

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        self._note("answer", op, outcome, reason)
        if self.ops.get(op, outcome) is not None:
            self._object(f"{op} is answered though no caller asks, or twice")
        self.ops[op] = outcome

    def recall(self, lease: LeaseId, deadline: float, reason: Reason) -> None:
        self._note("recall", lease, deadline, reason)
        call = self.leases.get(lease)
        if call is None or call.fate is not Fate.GRANTED:
            self._object(f"{lease} is recalled though it is not held")
        after_s = self._faults.on_recall(lease, max(0.0, deadline - self.clock.told))
        self.clock.arrange(after_s, self.end_lease, lease)

    def set_timer(self, timer: Timer, at: float | None, reason: Reason) -> None:
        self._note("set_timer", timer, at, reason)
        if at is None:
            self._timers.pop(timer, None)
            return
        number = self._next_number()
        self._timers[timer] = (at, number)
        self.clock.arrange_when_told(at, self._fire, (timer, number))

    # --- how things end -----------------------------------------------------------------------------------------------

    def leave(self, call: SimCall) -> None:
        """A client goes away while it waits or is served; does nothing if its request has ended."""
        if call.fate is Fate.WAITING or call.fate is Fate.GRANTED:
            self._end(call, Fate.GONE)
            self.post(ev.RequestGone(self.clock.told, RequestId(call.id)))
            self._tell_end(call)

    def crash(self, slots: Sequence[SlotId], left_in: Tier = Tier.COLD, cause: str = "crash") -> None:
        """A process dies and takes these slots with it. Its requests break off a moment later."""
        places = self.truth.places
        # A lease has no engine that could die.
        there = [places[slot] for slot in slots if slot in places and places[slot].has_engine]
        if not there:
            return
        for place in there:
            for call in self.truth.lose(place, self._asleep_claim(place, left_in), self.clock.now):
                self.clock.arrange(SOON_S, self._break_off, (call, call.grants))
        self.post(ev.SlotsLost(self.clock.told, tuple(place.id for place in there), left_in, cause))

    def _asleep_claim(self, place: SimPlace, left_in: Tier) -> Claim | None:
        """The claim of the copy that is left when a slot's process dies; None: nothing is left."""
        if place.tier is Tier.ASLEEP:
            return place.asleep_claim if left_in is Tier.ASLEEP else None
        model = self.models.get(place.model)
        need = model.spec.need_asleep if model is not None else None
        if left_in is not Tier.ASLEEP or need is None:
            return None
        # A slot that has slept before is as large as it was then.
        return place.asleep_claim or asleep(need, place.ready_claim, list(self.truth.devices.values()))

    def end_lease(self, lease: LeaseId) -> None:
        """The holder leaves, or no longer waits; does nothing if the lease is gone."""
        call = self.leases.pop(lease, None)
        if call is None:
            return
        if call.slot is not None:
            self.truth.drop(self.truth.places[call.slot])
        self._end(call, Fate.SERVED if call.fate is Fate.GRANTED else Fate.GONE)
        self.post(ev.LeaseGone(self.clock.told, lease))

    def _answered(self, served: tuple[SimCall, int]) -> None:
        """The answer ends, unless the request was granted anew since."""
        call, grants = served
        if call.fate is Fate.GRANTED and call.grants == grants:
            self._end(call, Fate.SERVED)
            self.post(ev.ServeDone(self.clock.told, RequestId(call.id)))
            self._tell_end(call)

    def _meet(self, served: tuple[SimCall, int, ServeFate]) -> None:
        """The answer ends in the way that was drawn for it."""
        call, grants, fate = served
        if call.fate is not Fate.GRANTED or call.grants != grants:
            return
        if fate.ending is Ending.CLIENT_GOES:
            self.leave(call)
        elif fate.ending is Ending.LOST_EARLY or fate.ending is Ending.BUSY:
            self._lose_early(call, was_busy=fate.ending is Ending.BUSY)
        elif fate.ending is Ending.CRASH and call.slot in self.truth.places:
            self.crash((call.slot,), fate.left_in)
        else:
            self._answered((call, grants))

    def _break_off(self, served: tuple[SimCall, int]) -> None:
        """Its engine is gone: before the first byte the request waits again, after it the answer stays broken."""
        call, grants = served
        if call.fate is not Fate.GRANTED or call.grants != grants:
            return
        if self.clock.now < call.granted_at + self._timings(call.model).prefill_s(call.prompt_len):
            self._lose_early(call)
        else:
            call.was_broken = True
            self._answered(served)

    def _lose_early(self, call: SimCall, was_busy: bool = False) -> None:
        call.fate = Fate.WAITING
        self._stop_serving(call)
        call.slot = None
        self.post(ev.ServeDone(self.clock.told, RequestId(call.id), lost_before_first_byte=True, was_busy=was_busy))

    def _end_move(self, ending: tuple[Move, MoveFate]) -> None:
        """Post exactly one `MoveDone` for each move: the first ending counts."""
        move, fate = ending
        if move.id not in self.truth.moving:
            return
        place = self.truth.end(move, fate.outcome, fate.seen, self.clock.now)
        if place.tier is Tier.READY:
            place.concurrency = self._specs[move.model, move.revision].concurrency or 1
        self.post(ev.MoveDone(self.clock.told, move.id, fate.outcome, fate.seen))

    def _fire(self, due: tuple[Timer, int]) -> None:
        timer, number = due
        known = self._timers.get(timer)
        # After the clock was set back, a timer is due later than it was scheduled for.
        if known is not None and known[1] == number and known[0] <= self.clock.told:
            del self._timers[timer]
            self.post(ev.TimerFired(self.clock.told, timer))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _end(self, call: SimCall, fate: Fate) -> None:
        was, call.fate, call.ended_at = call.fate, fate, self.clock.now
        if not call.is_lease:
            self._count(call, was)
        call.slot = None
        del self.calls[call.id]
        self.ended.add(call)

    def _count(self, call: SimCall, was: Fate) -> None:
        if was is Fate.GRANTED:
            self._stop_serving(call)
        if call.fate is Fate.SERVED:
            self.truth.meters.delays[call.model].add(call)
        elif was is Fate.WAITING:
            truth, model = self.truth, call.model
            delays = truth.meters.delays[model]
            delays.lose(truth.is_there(model), truth.is_first_load(model), truth.is_idle_load(model))
            if call.code is RejectCode.TOO_LARGE:
                self._count_too_large(call, delays)

    def _count_too_large(self, call: SimCall, delays: Delays) -> None:
        model = self.models.get(call.model)
        if call.is_kept_out:
            delays.lost_kept_out += 1
        elif model is not None and absent_gpus(model.spec, self.truth.devices.values()):
            delays.lost_no_gpu += 1
        else:
            delays.lost_too_large += 1

    def _stop_serving(self, call: SimCall) -> None:
        """Its fate is another by now."""
        assert call.slot is not None
        batch = self.truth.stop_serving(call, self.clock.now)
        if self._compute is not None:
            self._compute.left(call.slot, batch)

    def _tell_end(self, call: SimCall) -> None:
        if call.on_end is not None:
            call.on_end(call)

    def _timings(self, model: ModelId) -> Timings:
        known = self.models.get(model)
        return known.timings if known is not None else DEFAULT_TIMINGS

    def _stray(self, usual_s: float) -> float:
        jitter = self.config.jitter
        return usual_s * (1.0 + jitter * (2.0 * self._random.random() - 1.0)) if jitter else usual_s

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _note(self, effect: str, *details: object) -> None:
        for show in self._show:
            show(effect, *details)

    def _object(self, what: str) -> NoReturn:
        raise Violation(what)
