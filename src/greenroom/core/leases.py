"""Memory for other programs. A lease has a record and one waiter of its own, and takes no time to arrive.

Owns the two lease events. Planning, eviction and recall are those of every other waiter.
"""

from __future__ import annotations

from greenroom.core.apply import Actions
from greenroom.core.events import LeaseAsked, LeaseGone
from greenroom.core.model import LeaseId, ModelId, ModelSpec
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.state import LeaseRecord, State


def name_of(lease: LeaseId) -> ModelId:
    """The name under which a lease waits and holds, in queues, slots and reasons.

    No configured model's id begins with a space, so the two cannot be taken for each other.
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
    """What it wants, in the words of placement and eviction. One that cannot be recalled is pinned."""
    return ModelSpec(
        name,
        need=event.need,
        devices=event.devices,
        gpus=max(1, event.gpus),
        priority=event.priority,
        grace_s=event.grace_s,
        pinned=not event.preemptible,
    )
