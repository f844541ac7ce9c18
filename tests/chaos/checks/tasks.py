"""Requests for tasks: each of their models is asked once, and a remote one only if no local one could serve.

What a local model could do is asked of the scheduler, model by model; what follows from that is decided here again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from greenroom.core import events as ev
from greenroom.core.decide.arrival import Option, waiter_for, weigh
from greenroom.core.decide.placement import Places
from greenroom.core.decide.plan import Refuse
from greenroom.core.effects import Reason, Rejection
from greenroom.core.model import LeaseId, ModelId, Move, MoveId, Outcome, RequestId, SlotId
from greenroom.core.plain import EQUAL
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check, state_of


@dataclass(slots=True)
class Asked:
    """A request for a task, and which models have failed it: by an answer that was lost, or by a load since it came."""

    event: ev.RequestArrived
    choice: ev.Choice
    at: ModelId | None = None
    lost_at: set[ModelId] = field(default_factory=set)
    not_loaded: set[ModelId] = field(default_factory=set)
    was_busy: bool = False
    # The last model that lost it was the only one of its candidates left: like a model alone, it is asked once more.
    was_alone: bool = False


class LastResort(Check):
    def __init__(self, is_equal: bool = False) -> None:
        self.judged = 0
        # To the plain scheduler each request is as urgent as any other.
        self._is_equal = is_equal
        self._now = 0.0
        self._open: dict[str, Asked] = {}
        self._moves: dict[MoveId, Move] = {}
        self._fallen: set[SlotId] = set()

    def tell(self, event: ev.Event) -> None:
        self._now = event.now

    def request_arrived(self, event: ev.RequestArrived) -> None:
        if event.choice is not None and len(event.candidates) > 1:
            asked = replace(event, priority=EQUAL) if self._is_equal else event
            self._open.setdefault(event.request, Asked(asked, event.choice))

    def request_gone(self, event: ev.RequestGone) -> None:
        self._open.pop(event.request, None)

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        self._open.pop(request, None)

    def serve_done(self, event: ev.ServeDone) -> None:
        asked = self._open.get(event.request)
        if asked is None:
            return
        if not event.lost_before_first_byte:
            del self._open[event.request]
        elif asked.at is not None:
            assert self.world is not None
            known = state_of(self.world).models
            asked.was_alone = not any(name in known and name != asked.at for name in asked.event.candidates)
            asked.lost_at.add(asked.at)
            asked.was_busy = asked.was_busy or event.was_busy

    def move(self, move: Move, reason: Reason) -> None:
        self._moves[move.id] = move

    def move_done(self, event: ev.MoveDone) -> None:
        move = self._moves.get(event.move)
        if move is None:
            return
        if event.outcome is not Outcome.DONE or move.slot in self._fallen:
            self._not_loaded(move.model)

    def move_asked(self, event: ev.MoveAsked) -> None:
        """An operator who unloads a model rejects the requests that wait for it."""
        self._not_loaded(event.model)

    def config_changed(self, event: ev.ConfigChanged) -> None:
        for model in event.removed:
            self._not_loaded(model)

    def slots_lost(self, event: ev.SlotsLost) -> None:
        assert self.world is not None
        slots = state_of(self.world).slots
        self._fallen.update(event.slots)
        for slot in event.slots:
            if slot in slots:
                self._not_loaded(slots[slot].model)

    def _not_loaded(self, model: ModelId) -> None:
        for asked in self._open.values():
            asked.not_loaded.add(model)

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        asked = self._open.get(request)
        if asked is None:
            return
        assert self.world is not None
        model = state_of(self.world).slots[slot].model
        if model in asked.lost_at and not asked.was_alone:
            raise Violation(f"{request} is sent to {model} again, which has failed it")
        asked.at = model
        if model in asked.choice.last_resort:
            self._expect_no_other(request, asked, model)

    def _expect_no_other(self, request: str, asked: Asked, model: ModelId) -> None:
        assert self.world is not None
        self.judged += 1
        if asked.was_busy:
            raise Violation(f"{request} falls to {model} because a local model was busy")
        state, failed = state_of(self.world), asked.lost_at | asked.not_loaded | {*asked.choice.last_resort}
        for name in asked.event.candidates:
            if name in failed or name not in state.models:
                continue
            alone = waiter_for(replace(asked.event, now=self._now, candidates=(name,)), 2**62)
            # What decisions go by: callers are told a later time where memory has to come free first.
            (option,) = weigh(state, alone, self._now, Places())
            if not isinstance(option.plan, Refuse) and (asked.choice.pin_primary or self._is_in_time(option, asked)):
                raise Violation(f"{request} falls to {model} though {name} could serve it: {option.plan}")

    def _is_in_time(self, option: Option, asked: Asked) -> bool:
        """By a swap at least: the request has left its queue by now, which makes estimates of others shorter."""
        assert self.world is not None
        answer_by, state = asked.event.answer_by, state_of(self.world)
        if answer_by is None:
            return True
        if option.is_late or option.begins_s == inf:
            # Where it is not known when it begins, what is known may be too long even so: a load, for example.
            return not option.is_late
        takes_s = option.begins_s + (state.models[option.model].service_s or 0.0) + (state.avg_swap_s or 0.0)
        return self._now + takes_s <= answer_by
