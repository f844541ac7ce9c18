"""Memory for other programs. A lease has its own record and one waiter, and is ready as soon as its memory is free.

Owns the two lease events. Leases are planned, evicted and recalled by the same code as models.
"""

from __future__ import annotations

from greenroom.core.apply import Actions
from greenroom.core.events import LeaseAsked, LeaseGone
from greenroom.core.model import LeaseId, ModelId, ModelSpec
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.state import LeaseRecord, State


def name_of(lease: LeaseId) -> ModelId:
    """The name of a lease in queues, slots and reasons.

    It begins with a space, which no configured model id does, so the two never collide.
    """
    return ModelId(f" lease:{lease}")


class Leases:
    def __init__(self, state: State, act: Actions) -> None:
        self._state = state
        self._act = act

    def asked(self, event: LeaseAsked) -> None:
        state, name = self._state, name_of(event.lease)
        if state.knows(event.lease):
            state.counters.ignored += 1
            return
        state.leases[name] = LeaseRecord(_spec(event, name), event.need)
        number = state.next_number()
        waiter = Waiter(
            event.lease,
            WaiterKind.LEASE,
            number,
            name,
            (name,),
            event.priority,
            event.now if event.waits_since is None else event.waits_since,
            give_up_at=event.give_up_at,
        )
        self._act.settle(waiter, event.now)

    def gone(self, event: LeaseGone) -> None:
        """The holder has left, or no longer waits."""
        name = name_of(event.lease)
        if name not in self._state.leases:
            self._state.counters.ignored += 1
            return
        self._act.forget(event.lease)
        self._act.end_lease(name)


def _spec(event: LeaseAsked, name: ModelId) -> ModelSpec:
    """The lease as a spec for placement and eviction. A lease that cannot be recalled is pinned."""
    return ModelSpec(
        name,
        need=event.need,
        devices=event.devices,
        gpus=max(1, event.gpus),
        priority=event.priority,
        grace_s=event.grace_s,
        pinned=not event.preemptible,
    )
