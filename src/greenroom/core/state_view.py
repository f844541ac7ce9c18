"""The view of a scheduler whose tables are a `State`. Owns none of them and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Final

from greenroom.core.decide import green_room, placement
from greenroom.core.decide.arrival import Option, choose, is_able, waiter_for, weigh
from greenroom.core.decide.green_room import Shortfall
from greenroom.core.decide.placement import Mib, Places
from greenroom.core.decide.residents import Residents
from greenroom.core.events import Learned, Limits, RequestArrived
from greenroom.core.explain import Explanation, Outlook, as_told, explanation, outlook
from greenroom.core.ledger import Ledger
from greenroom.core.model import DeviceId, DeviceKind, ModelId, RequestId, Slot, SlotId
from greenroom.core.queue.waiter import NO_PRIORITY
from greenroom.core.queue.waitlist import Waiter, WaiterKind, Waitlist
from greenroom.core.state import ModelRecord, State
from greenroom.core.view import KeptOut, Movable

# The number of a request that is only asked about: it would come after all others.
_LAST: Final = 2**62


class StateView:
    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def limits(self) -> Limits:
        return self._state.limits

    @property
    def slots(self) -> Mapping[SlotId, Slot]:
        return self._state.slots

    @property
    def models(self) -> Mapping[ModelId, ModelRecord]:
        return self._state.models

    @property
    def ledger(self) -> Ledger:
        return self._state.ledger

    @property
    def waitlist(self) -> Waitlist:
        return self._state.waitlist

    @property
    def counters(self) -> dict[str, int]:
        return asdict(self._state.counters)

    @property
    def avg_wait_s(self) -> float | None:
        return self._state.avg_wait_s

    def slots_of(self, model: ModelId) -> list[Slot]:
        return self._state.slots_of(model)

    def callers(self) -> Iterator[Waiter]:
        return (waiter for waiter in self._state.waitlist if waiter.kind is WaiterKind.REQUEST)

    def is_waited_for(self, model: ModelId) -> bool:
        return model in self._state.waitlist.queues

    def most_mib(self) -> dict[DeviceId, int]:
        return self._state.most_mib(None)

    def outlook(self, request: RequestId, now: float) -> Outlook | None:
        return outlook(self._state, request, now)

    def candidates_left(self, request: RequestId, now: float) -> tuple[ModelId, ...]:
        state, grant, places = self._state, self._state.grants.get(request), Places()
        if grant is None or grant.waiter.kind is not WaiterKind.REQUEST:
            return ()
        residents = Residents(state, now, places)
        others = (name for name in grant.waiter.candidates if name != state.slots[grant.slot].model)
        return tuple(name for name in others if is_able(state, grant.waiter, name, now, places, residents))

    def learned(self) -> dict[ModelId, Learned]:
        return {
            model: Learned(dict(record.learned_s), record.service_s)
            for model, record in self._state.models.items()
            if record.learned_s or record.service_s is not None
        }

    def explanation(self, arrival: RequestArrived) -> Explanation:
        return explanation(self._state, arrival, waiter_for(arrival, _LAST), Places())

    def weigh(self, arrival: RequestArrived) -> tuple[list[Option], int]:
        waiter = waiter_for(arrival, _LAST)
        options = weigh(self._state, waiter, arrival.now, Places())
        return [as_told(self._state, waiter, one, arrival.now) for one in options], choose(options, waiter)

    def green_room_shortfall(self, model: ModelId) -> Shortfall | None:
        return green_room.shortfall(self._state, self._state.models[model].spec)

    def movable(self, now: float) -> list[Movable]:
        there = Residents(self._state, now, Places()).those(may_sleep=False, but=None)
        free = [one for one in there if not one.cannot_leave and self._state.slots[one.slot].lease is None]
        return [Movable(one.model, one.gives_mib, one.loss) for one in free]

    def kept_out_by_others(self, after_s: float, now: float) -> dict[ModelId, KeptOut]:
        state = self._state
        if state.store_is_down or state.shutting_down:
            return {}
        most = state.most_mib(None)
        with_others = {device: mib - state.ledger.foreign.get(device, 0) for device, mib in most.items()}
        without = {device: mib - state.ledger.outside_mib(device) for device, mib in most.items()}
        found: dict[ModelId, KeptOut] = {}
        for model, queue in state.waitlist.queues.items():
            # A preload has no priority here: it waits until there is room.
            if queue.oldest + after_s <= now and queue.priorities.first < NO_PRIORITY:
                record = state.models.get(model)
                if record is not None and (place := self._place(record, without, with_others)):
                    found[model] = KeptOut(record.spec, queue.priorities.first, place)
        return found

    def _place(self, record: ModelRecord, without: Mib, with_others: Mib) -> dict[DeviceId, int]:
        """Its claim on each GPU if other gateways' models left; empty if they do not keep it out."""
        spec, need, devices = record.spec, record.need, self._state.devices
        gpus = {one.id for one in devices if one.kind is DeviceKind.GPU}
        if not need.gpu_mib or not gpus or self._state.slots_of(spec.id):
            return {}
        if placement.options(spec, need, devices, without, without):
            return {}
        claims = placement.options(spec, need, devices, with_others, with_others)
        return {device: mib for device, mib in claims[0].items() if device in gpus} if claims else {}
