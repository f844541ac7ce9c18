"""Models that need memory which other gateways hold: they wait in the store like any program.

Owns which of our models wait there, and their granted leases until a load takes them over. A model waits only if it
would not fit even with all of our slots evicted, but would if those of other gateways were evicted too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from greenroom.core.model import ModelId, Move
from greenroom.core.view import KeptOut, SchedulerView
from greenroom.errors import GreenroomError, LeaseDenied
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.leases.shared.store import Membership
from greenroom.telemetry.logs import get_logger

_log = get_logger("sharing")

# Our own scheduler finds room for a request within this, if it can.
AFTER_S: Final = 1.0
# Models of ours that wait in the store at once.
WANTS_MAX: Final = 8
# A wait in the store ends with the queue of the model; this is only a bound.
LINE_S: Final = 3_600.0
# A load takes over a granted lease at once, or not at all. Then it is released, and the model asks again later.
UNUSED_S: Final = 15.0
REST_S: Final = 5.0


@dataclass(slots=True, eq=False)
class Want:
    model: ModelId
    id: str
    task: asyncio.Task[Lease]
    lease: Lease | None = None
    held_at: float = 0.0


class WaitingModels:
    """`on_held` is called when a lease was granted, so that the scheduler learns of the room."""

    def __init__(
        self, member: Membership, state: SchedulerView, clock: Callable[[], float], *, on_held: Callable[[], None]
    ) -> None:
        self._store = member.store
        self._gateway = member.gateway
        self._state = state
        self._clock = clock
        self._ttl_s = member.ttl_s
        self._holder = member.holder
        self._on_held = on_held
        self._wants: dict[ModelId, Want] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._number = 0
        # Models that did not use their lease, and when they may ask again.
        self._rests_until: dict[ModelId, float] = {}

    @property
    def held(self) -> frozenset[str]:
        """Ids of granted leases that no slot has taken over yet."""
        return frozenset(want.id for want in self._wants.values() if want.lease is not None)

    def adopted(self, move: Move) -> Lease | None:
        """The lease that was granted for this model, if any; it belongs to the slot from now on."""
        want = self._wants.get(move.model)
        if want is None or want.lease is None:
            return None
        del self._wants[move.model]
        return want.lease

    def follow(self) -> None:
        """Ask for leases for the models that need one, and give up the others."""
        now, needy = self._clock(), self._needy()
        for want in list(self._wants.values()):
            if want.model not in needy if want.lease is None else self._is_useless(want, now):
                self._give_up(want)
                if want.lease is not None:
                    self._rests_until[want.model] = now + REST_S
        self._rests_until = {model: at for model, at in self._rests_until.items() if at > now}
        for model, one in needy.items():
            is_new = model not in self._wants and model not in self._rests_until
            if is_new and len(self._wants) < WANTS_MAX:
                self._stand(model, one)

    async def renew(self) -> None:
        """Raises StoreDown."""
        held = [want.lease for want in self._wants.values() if want.lease is not None]
        if held:
            await self._store.renew_all([(lease.id, lease.token) for lease in held])

    async def close(self) -> None:
        for want in list(self._wants.values()):
            self._give_up(want)
        if self._leaving:
            await asyncio.wait(self._leaving)

    # --- which models -----------------------------------------------------------------------------------------------

    def _needy(self) -> dict[ModelId, KeptOut]:
        return self._state.kept_out_by_others(AFTER_S, self._clock())

    def _is_useless(self, want: Want, now: float) -> bool:
        """Whether no request waits for the model any more, or no load took the lease over in time."""
        is_waited_for, is_coming = self._state.is_waited_for(want.model), self._state.is_coming(want.model)
        return now >= want.held_at + UNUSED_S or not (is_waited_for or is_coming)

    # --- the line ---------------------------------------------------------------------------------------------------

    def _stand(self, model: ModelId, needy: KeptOut) -> None:
        place = {str(device): mib for device, mib in needy.place.items()}
        is_split = len(place) > 1
        self._number += 1
        ask = LeaseAsk(
            id=f"{self._gateway}/line{self._number}",
            name=model,
            mib=max(place.values()),
            gpus=len(place),
            # On one GPU any will do that it may use; a split one names its share of each.
            devices=tuple(place) if is_split else tuple(str(device) for device in needy.spec.devices),
            shares=place if is_split else {},
            priority=needy.priority,
            ttl_s=self._ttl_s,
            wait_s=LINE_S,
            holder=self._holder,
        )
        _log.info("standing in line for a model", model=model, lease=ask.id, mib=sum(place.values()))
        task = asyncio.get_running_loop().create_task(self._store.acquire(ask, kind="slot"), name=f"line {model}")
        want = self._wants[model] = Want(model, ask.id, task)
        task.add_done_callback(lambda _: self._settled(want))

    def _settled(self, want: Want) -> None:
        if want.task.cancelled():
            return
        error = want.task.exception()
        if error is None:
            want.lease, want.held_at = want.task.result(), self._clock()
            if self._wants.get(want.model) is want:
                self._on_held()
            else:
                self._release_later(want.id)
            return
        if self._wants.get(want.model) is want:
            del self._wants[want.model]
        if not isinstance(error, LeaseDenied):
            _log.warning("standing in line failed", model=want.model, error=str(error))

    def _give_up(self, want: Want) -> None:
        del self._wants[want.model]
        if want.lease is None:
            # A cancelled `acquire` is forgotten by the store.
            want.task.cancel()
        else:
            self._release_later(want.id)

    def _release_later(self, id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._release(id), name=f"leave line {id}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _release(self, id: str) -> None:
        try:
            await self._store.release(id, kind="slot")
        except GreenroomError:
            # It is no longer renewed, and expires.
            return
