"""What is the case now, read from the gateway's tables into the shapes of `views.py`.

Owns how tables become answers. Never changes anything and never waits, so that an answer is of one moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime

import greenroom
from greenroom.core.model import Device, DeviceId, ModelId, MoveKind, Slot, SlotId
from greenroom.core.state import ModelRecord, State
from greenroom.core.waitlist import Waiter, WaiterKind
from greenroom.runtime.catalog import Entry
from greenroom.server import views
from greenroom.server.gateway import Gateway
from greenroom.server.status_word import StatusWord, is_failing, status_word, tier_of

# A page of status stays readable, and small, however long the queue is.
WAITING_SHOWN_MAX = 100


class Snapshot:
    """One moment of a gateway."""

    def __init__(self, gateway: Gateway, uptime_s: float) -> None:
        self._gateway = gateway
        self._state: State = gateway.loop.scheduler.state
        self._now = gateway.clock()
        self._uptime_s = uptime_s

    # --- /v1/models -------------------------------------------------------------------------------------------------

    def card(self, entry: Entry) -> views.ModelCard:
        config, abilities = entry.config, entry.abilities
        record = self._state.models.get(entry.id)
        need = record.need if record is not None else entry.spec.need
        tier = tier_of(self._state.slots_of(entry.id)).value
        return views.ModelCard(
            id=entry.id,
            created=int(self._gateway.started_at),
            name=config.name,
            description=config.description,
            aliases=list(config.aliases),
            capabilities=None if abilities is None else sorted(ability.value for ability in abilities),
            status=self._status(entry.id),
            meta={**config.metadata, "tier": tier, "memory_mib": need.gpu_mib + need.host_mib},
        )

    def _status(self, model: ModelId) -> views.ModelStatus:
        word = status_word(self._state, model, self._now)
        moving = self._moving(self._state.slots_of(model)) if word is StatusWord.LOADING else None
        failure = self._gateway.mover.failures.get(model)
        return views.ModelStatus(
            value=word,
            eta_s=None if moving is None else moving.eta_s,
            retry_in_s=self._retry_in_s(self._state.models.get(model)),
            last_error=None if failure is None else failure.message,
        )

    # --- /health ----------------------------------------------------------------------------------------------------

    def health(self) -> views.Health:
        state = self._state
        return views.Health(
            status=self._health_word(),
            uptime=int(self._uptime_s),
            modelsLoaded=sum(self.word(entry) is StatusWord.LOADED for entry in self._gateway.catalog),
            queueDepth=state.waitlist.depth,
        )

    def _health_word(self) -> views.HealthWord:
        state, catalog = self._state, self._gateway.catalog
        if self._gateway.is_draining:
            return "draining"
        if state.waitlist.depth >= state.limits.queue_depth_max:
            return "saturated"
        # Only while they are backed off: were it longer, nobody would ask and find out that they work again.
        if len(catalog) and all(self.word(entry) is StatusWord.FAILED for entry in catalog):
            return "failed"
        return "healthy"

    def word(self, entry: Entry) -> StatusWord:
        return status_word(self._state, entry.id, self._now)

    # --- /api/v1/status ---------------------------------------------------------------------------------------------

    def status(self) -> views.StatusView:
        gateway, state = self._gateway, self._state
        callers = [waiter for waiter in state.waitlist if waiter.kind is WaiterKind.REQUEST]
        waiting = Counter(waiter.model for waiter in callers)
        free = state.ledger.free_mib(frozenset())
        known = {entry.id for entry in gateway.catalog}
        return views.StatusView(
            version=greenroom.__version__,
            started=datetime.fromtimestamp(gateway.started_at, UTC).isoformat(timespec="seconds"),
            uptime_s=round(self._uptime_s, 3),
            draining=gateway.is_draining,
            addresses=list(gateway.edge.addresses),
            queue=self._queue(),
            devices=[self._device(device, free) for device in state.ledger.devices.values()],
            models=[self._model(entry, waiting[entry.id]) for entry in gateway.catalog],
            other_slots=[self._slot(slot) for slot in state.slots.values() if slot.model not in known],
            waiting=[self._waiting(waiter, place) for place, waiter in enumerate(callers[:WAITING_SHOWN_MAX], 1)],
            counters=asdict(state.counters),
            connections=views.ConnectionsView(open=gateway.edge.connections, stats=asdict(gateway.edge.stats)),
        )

    def _queue(self) -> views.QueueView:
        state = self._state
        avg_wait_ms = None if state.avg_wait_s is None else round(state.avg_wait_s * 1000, 1)
        return views.QueueView(depth=state.waitlist.depth, max=state.limits.queue_depth_max, avg_wait_ms=avg_wait_ms)

    def _device(self, device: Device, free: dict[DeviceId, int]) -> views.DeviceView:
        ledger = self._state.ledger
        return views.DeviceView(
            id=device.id,
            kind=device.kind.value,
            capacity_mib=device.capacity_mib,
            margin_mib=device.margin_mib,
            used_mib=sum(holding.on(device.id) for holding in ledger.holdings.values()),
            free_mib=max(0, free[device.id]),
            foreign_mib=ledger.foreign.get(device.id, 0),
        )

    def _model(self, entry: Entry, waiting: int) -> views.ModelView:
        slots = self._state.slots_of(entry.id)
        record = self._state.models.get(entry.id)
        slot_views = [self._slot(slot) for slot in slots]
        used = [view.last_used_s_ago for view in slot_views if view.last_used_s_ago is not None]
        return views.ModelView(
            id=entry.id,
            tier=tier_of(slots).value,
            status=self.word(entry),
            engine=entry.engine.name,
            revision=entry.spec.revision,
            pinned=entry.spec.pinned,
            priority=entry.spec.priority,
            ttl_s=entry.spec.ttl_s,
            in_flight=sum(view.in_flight for view in slot_views),
            waiting=waiting,
            concurrency=slots[0].concurrency if slots else entry.spec.concurrency,
            last_used_s_ago=min(used, default=None),
            memory=self.memory(entry.id),
            moving=self._moving(slots),
            slots=slot_views,
            failures=record.failures if record is not None else 0,
            retry_in_s=self._retry_in_s(record),
            last_error=self._last_error(entry.id),
            pid=next((view.pid for view in slot_views if view.pid is not None), None),
        )

    def _slot(self, slot: Slot) -> views.SlotView:
        return views.SlotView(
            id=slot.id,
            model=slot.model,
            revision=slot.spec.revision,
            tier=slot.tier.value,
            moving=self._moving([slot]),
            leaving_to=None if slot.leaving_to is None else slot.leaving_to.value,
            in_flight=len(slot.in_flight),
            concurrency=slot.concurrency,
            last_used_s_ago=round(max(0.0, self._now - slot.last_used), 3) if slot.last_used else None,
            memory={str(device): mib for device, mib in self._state.ledger.held_by(slot.id).items()},
            pid=self._pid(slot.id),
        )

    def memory(self, model: ModelId) -> dict[str, int]:
        total: Counter[str] = Counter()
        for slot in self._state.slots_of(model):
            total.update(self._state.ledger.held_by(slot.id))
        return dict(sorted(total.items()))

    def _moving(self, slots: list[Slot]) -> views.MovingView | None:
        """The first move that is under way, else the first that is planned."""
        for slot in slots:
            if slot.move is not None:
                since_s = max(0.0, self._now - slot.move.started)
                eta_s = self._eta_s(slot.model, slot.move.kind, since_s)
                return views.MovingView(kind=slot.move.kind.value, since_s=round(since_s, 3), eta_s=eta_s)
        planned = next((slot.planned for slot in slots if slot.planned is not None), None)
        return None if planned is None else views.MovingView(kind=planned.value, since_s=None, eta_s=None)

    def _eta_s(self, model: ModelId, kind: MoveKind, since_s: float) -> float | None:
        record = self._state.models.get(model)
        learned_s = None if record is None else record.learned_s.get(kind)
        return None if learned_s is None else round(max(0.0, learned_s - since_s), 1)

    def _retry_in_s(self, record: ModelRecord | None) -> float | None:
        if record is None or not is_failing(record, self._now):
            return None
        return round(record.retry_at - self._now, 1)

    def _last_error(self, model: ModelId) -> views.LastError | None:
        failure = self._gateway.mover.failures.get(model)
        return None if failure is None else views.LastError(code=failure.code, message=failure.message)

    def _pid(self, slot: SlotId) -> int | None:
        live = self._gateway.slots.live.get(slot)
        return None if live is None else live.child.pid

    def _waiting(self, waiter: Waiter, position: int) -> views.WaitingView:
        return views.WaitingView(
            id=waiter.id,
            position=position,
            model=waiter.model,
            tenant=waiter.tenant,
            waited_s=round(max(0.0, self._now - waiter.arrived), 3),
        )
