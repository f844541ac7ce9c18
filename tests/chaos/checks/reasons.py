"""Every refusal has a reason that holds at that moment."""

from __future__ import annotations

from greenroom.core import events as ev
from greenroom.core.effects import Reason, RejectCode, Rejection
from greenroom.core.model import ARRIVING, LeaseId, ModelId, Move, MoveId, MoveKind, Outcome, RequestId, SlotId
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check

NEVER = float("-inf")


class Reasons(Check):
    def __init__(self) -> None:
        self.judged = 0
        self._limits = ev.Limits()
        # The longest pauses that were ever configured: a change does not shorten one that has begun.
        self._backoff_max_s = self._replan_s = 0.0
        self._models: set[ModelId] = set()
        self._moves: dict[MoveId, Move] = {}
        self._model_of: dict[SlotId, ModelId] = {}
        self._fallen: set[MoveId] = set()
        self._failed_at: dict[ModelId, float] = {}
        self._store_down_at: dict[ModelId, float] = {}
        self._waiting: dict[str, ev.RequestArrived] = {}
        self._all: dict[str, ev.RequestArrived | ev.LeaseAsked] = {}
        self._is_over = False
        self._event: ev.Event = ev.ConfigChanged(0.0)

    # --- what is known ------------------------------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        self._event = event

    def config_changed(self, event: ev.ConfigChanged) -> None:
        self._limits = event.limits or self._limits
        self._backoff_max_s = max(self._backoff_max_s, self._limits.backoff_max_s)
        self._replan_s = max(self._replan_s, self._limits.replan_s)
        self._models -= set(event.removed)
        self._models |= {spec.id for spec in event.models}

    def request_arrived(self, event: ev.RequestArrived) -> None:
        self._waiting[event.request] = self._all[event.request] = event

    def lease_asked(self, event: ev.LeaseAsked) -> None:
        self._all[event.lease] = event

    def request_gone(self, event: ev.RequestGone) -> None:
        self._forget(event.request)

    def serve_done(self, event: ev.ServeDone) -> None:
        asked = self._all.get(event.request)
        if not event.lost_before_first_byte:
            self._forget(event.request)
        elif isinstance(asked, ev.RequestArrived):
            self._waiting[event.request] = asked

    def lease_gone(self, event: ev.LeaseGone) -> None:
        self._forget(event.lease)

    def shutdown_asked(self, event: ev.ShutdownAsked) -> None:
        self._is_over = True

    def move(self, move: Move, reason: Reason) -> None:
        self._moves[move.id] = move
        self._model_of[move.slot] = move.model

    def move_done(self, event: ev.MoveDone) -> None:
        move = self._moves.pop(event.move, None)
        fell = event.move in self._fallen
        self._fallen.discard(event.move)
        if move is None or move.kind not in ARRIVING:
            return
        if event.outcome is Outcome.STORE_DOWN:
            self._store_down_at[move.model] = event.now
        elif event.outcome is not Outcome.DONE or fell:
            self._failed_at[move.model] = event.now

    def slots_lost(self, event: ev.SlotsLost) -> None:
        for slot in event.slots:
            if slot in self._model_of:
                self._failed_at[self._model_of[slot]] = event.now
                # If it moves, its end will be bad news too, and the back-off begins there.
                for move in [one for one in self._moves.values() if one.slot == slot]:
                    self._fallen.add(move.id)

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        self._waiting.pop(request, None)

    def settled(self, event: ev.Event) -> None:
        """No request may join a full queue."""
        is_new = isinstance(event, ev.RequestArrived) and event.request in self._waiting
        if is_new and len(self._waiting) > self._limits.queue_depth_max:
            raise Violation(f"{len(self._waiting)} wait, and no more than {self._limits.queue_depth_max} may")

    def _forget(self, who: str) -> None:
        self._waiting.pop(who, None)
        self._all.pop(who, None)

    # --- what is judged -----------------------------------------------------------------------------------------------

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        self.judged += 1
        asked = self._all.get(request)
        self._forget(request)
        if asked is not None and not self._is_right(asked, rejection):
            raise Violation(f"{request} is rejected with {rejection.code.value} for {rejection.model}, which is not so")

    def _is_right(self, asked: ev.RequestArrived | ev.LeaseAsked, rejection: Rejection) -> bool:
        event, now = self._event, self._event.now
        named = asked.candidates if isinstance(asked, ev.RequestArrived) else ()
        match rejection.code:
            case RejectCode.UNKNOWN_MODEL:
                # Of several models the first one's refusal is told.
                return not self._models.issuperset(named)
            case RejectCode.QUEUE_FULL:
                return len(self._waiting) >= self._limits.queue_depth_max
            case RejectCode.TENANT_QUEUE_FULL:
                return bool(self._limits.tenant_depths) or self._limits.tenant_depth_max is not None
            case RejectCode.LOAD_FAILED:
                return any(now <= self._failed_at.get(name, NEVER) + self._backoff_max_s for name in named)
            case RejectCode.STORE_DOWN:
                return any(now <= self._store_down_at.get(name, NEVER) + self._replan_s for name in named)
            case RejectCode.UNLOADED:
                return isinstance(event, ev.MoveAsked) and event.kind in (MoveKind.SLEEP, MoveKind.UNLOAD)
            case RejectCode.REMOVED:
                return isinstance(event, ev.ConfigChanged) and bool(set(event.removed).intersection(named))
            case RejectCode.LOST:
                return isinstance(event, ev.ServeDone) and event.lost_before_first_byte
            case RejectCode.SHUTTING_DOWN:
                return self._is_over
            case RejectCode.EXPIRED:
                has_budget = isinstance(asked, ev.RequestArrived) and asked.answer_by is not None
                return has_budget or asked.give_up_at is not None
            case _:
                return self._is_too_large(named)

    def _is_too_large(self, named: tuple[ModelId, ...]) -> bool:
        """Judged only where pins, splits and raised needs cannot matter: a small model, and nothing pinned."""
        world = self.world
        if world is None or not named or any(model.spec.pinned for model in world.models.values()):
            return True
        usable = [device.usable_mib for device in world.truth.devices.values()]
        is_small = all(
            name in world.models and 3 * (world.models[name].spec.need.gpu_mib + 500) < min(usable) for name in named
        )
        return not is_small
