"""Memory for other programs. A lease is a model nobody can ask for, with one waiter and a load that takes no time.

Owns the two lease events. Planning, eviction and recall are those of every other waiter.
"""

from __future__ import annotations

from greenroom.core.apply import Actions
from greenroom.core.events import LeaseAsked, LeaseGone
from greenroom.core.model import LeaseId, ModelId, ModelSpec
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.state import ModelRecord, State


def model_of(lease: LeaseId) -> ModelId:
    """No configured model's id begins with a space, so the two cannot be taken for each other."""
    return ModelId(f" lease:{lease}")


class Leases:
    def __init__(self, state: State, act: Actions) -> None:
        self._state = state
        self._act = act

    def asked(self, event: LeaseAsked) -> None:
        state, model = self._state, model_of(event.lease)
        if state.knows(event.lease):
            state.counters.ignored += 1
            return
        state.models[model] = ModelRecord(_spec(event, model), event.need, is_lease=True)
        number = state.next_number()
        waiter = Waiter(
            event.lease,
            WaiterKind.LEASE,
            number,
            model,
            (model,),
            event.priority,
            event.now if event.waits_since is None else event.waits_since,
            give_up_at=event.give_up_at,
        )
        self._act.settle(waiter, event.now)

    def gone(self, event: LeaseGone) -> None:
        """The holder has left, or no longer waits."""
        model = model_of(event.lease)
        if model not in self._state.models:
            self._state.counters.ignored += 1
            return
        self._act.forget(event.lease)
        self._act.end_lease(model)


def _spec(event: LeaseAsked, model: ModelId) -> ModelSpec:
    return ModelSpec(
        model,
        need=event.need,
        devices=event.devices,
        gpus=max(1, event.gpus),
        priority=event.priority,
        grace_s=event.grace_s,
        pinned=not event.preemptible,
    )
