"""The state of the gateway at one moment, read from its tables into the shapes of `views.py`.

Owns how tables become answers. Never changes anything and never waits, so that an answer is of one moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final, Literal

import greenroom
from greenroom.access.keys import ANYONE, Caller
from greenroom.api import views
from greenroom.api.overview import Overview
from greenroom.api.reports.memory import GpuPicture, cache_view, green_room_view
from greenroom.api.views import StatusWord
from greenroom.core.model import Device, DeviceId, ModelId, MoveKind, Need, SlotId, Tier
from greenroom.core.view import ModelFacts, SchedulerView, SlotFacts, WaitingCaller
from greenroom.errors import LoadOutOfMemory
from greenroom.http import edge
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.needs import Account
from greenroom.serving import render

# Whether the hot path is Python or machine code.
BUILD: Final[Literal["pure", "compiled"]] = "pure" if edge.__file__.endswith(".py") else "compiled"
# A page of status stays readable, and small, however long the queue is.
WAITING_SHOWN_MAX = 100
# A scheduler that raised counts as failed for so long; what the next request will meet is not known.
SCHEDULER_FAILED_S = 60.0


class Snapshot:
    """One moment of a gateway."""

    def __init__(self, gateway: Overview) -> None:
        self._gateway = gateway
        self._state: SchedulerView = gateway.shell.loop.scheduler.view
        self._now = gateway.shell.clock()

    # --- /v1/models -------------------------------------------------------------------------------------------------

    def card(self, entry: Entry, *, to_operator: bool) -> views.ModelCard:
        config = entry.config
        record = self._state.models.get(entry.id)
        need = record.need if record is not None else entry.spec.need
        tier, told = tier_of(self._state.slots_of(entry.id)).value, entry.facts.quantization
        return views.ModelCard(
            id=entry.shown_id(to_operator=to_operator),
            created=int(self._gateway.started_at),
            name=config.name,
            description=config.description,
            aliases=list(config.aliases),
            capabilities=_capabilities(entry),
            status=self._status(entry.id, to_operator),
            meta={**config.metadata, "tier": tier, "quantization": told, "memory_mib": need.gpu_mib + need.host_mib},
        )

    def _status(self, model: ModelId, to_operator: bool) -> views.ModelStatus:
        word = status_word(self._state, model, self._now)
        moving = self._moving(self._state.slots_of(model)) if word is StatusWord.LOADING else None
        failure = self._last_error(model, to_operator)
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
            leaseStore=None if self._gateway.sharing is None else "up" if self._is_store_up else "down",
            keyFile=self._key_file(),
            uptime=int(self._now - self._gateway.began),
            modelsLoaded=sum(self.word(entry) is StatusWord.LOADED for entry in self._gateway.shell.catalog),
            queueDepth=state.waitlist.depth,
        )

    def _key_file(self) -> Literal["ok", "stale"] | None:
        keys = self._gateway.keys
        return None if keys.path is None else "stale" if keys.problems else "ok"

    def _health_word(self) -> views.HealthWord:
        state, catalog = self._state, self._gateway.shell.catalog
        if self._gateway.shell.is_draining:
            return "draining"
        if state.waitlist.depth >= state.limits.queue_depth_max:
            return "saturated"
        if self._now - self._gateway.shell.loop.failed_at < SCHEDULER_FAILED_S:
            return "failed"
        if not self._is_store_up and not any(self.word(entry) is StatusWord.LOADED for entry in catalog):
            return "failed"
        # Only during the back-off: later, requests must come through to find out whether models load again.
        if len(catalog) and all(self.word(entry) is StatusWord.FAILED for entry in catalog):
            return "failed"
        if any(self._is_out_of_memory(entry) for entry in catalog):
            return "out_of_memory"
        return "healthy"

    def _is_out_of_memory(self, entry: Entry) -> bool:
        failure = self._gateway.mover.failures.get(entry.id)
        return isinstance(failure, LoadOutOfMemory) and self.word(entry) is StatusWord.FAILED

    def ready(self) -> views.ProbeAnswer:
        """Whether requests are accepted."""
        state = self._state
        if self._gateway.shell.is_draining:
            return views.ProbeAnswer(status="draining")
        if self._gateway.shell.is_starting:
            return views.ProbeAnswer(status="starting")
        models, catalog = self._gateway.shell.config.models, self._gateway.shell.catalog
        if any(model.versions is not None and not catalog.is_known(name) for name, model in models.items()):
            return views.ProbeAnswer(status="no_version")
        if self._gateway.is_catching_up:
            return views.ProbeAnswer(status="catching_up")
        is_full = state.waitlist.depth >= state.limits.queue_depth_max
        return views.ProbeAnswer(status="saturated" if is_full else "ok")

    @property
    def _is_store_up(self) -> bool:
        return self._gateway.sharing is None or self._gateway.sharing.failure is None

    def word(self, entry: Entry) -> StatusWord:
        return status_word(self._state, entry.id, self._now)

    def is_serving(self, entry: Entry) -> bool:
        """True if it takes requests: not while it leaves."""
        return any(slot.is_serving for slot in self._state.slots_of(entry.id))

    # --- /api/v1/status ---------------------------------------------------------------------------------------------

    def status(self, *, with_models: bool = True) -> views.StatusView:
        gateway, state = self._gateway, self._state
        callers = self._callers()
        free = state.ledger.free_mib(frozenset())
        known = {entry.id for entry in gateway.shell.catalog.shown}
        picture = GpuPicture(gateway)
        return views.StatusView(
            version=greenroom.__version__,
            build=BUILD,
            started=datetime.fromtimestamp(gateway.started_at, UTC).isoformat(timespec="seconds"),
            uptime_s=round(self._now - gateway.began, 3),
            draining=gateway.shell.is_draining,
            addresses=list(gateway.edge.addresses),
            queue=self._queue(),
            lease_store=self._lease_store(),
            key_problems=list(self._gateway.keys.problems),
            devices=[self._device(device, free) for device in state.ledger.devices.values()],
            green_room=green_room_view(state),
            probe=picture.probe(),
            gpus=picture.gpus(),
            models=self.models(to_operator=True) if with_models else [],
            other_slots=[
                self._slot(slot, to_operator=True) for slot in state.slots.values() if slot.model not in known
            ],
            waiting=[self._waiting(waiter, place) for place, waiter in enumerate(callers[:WAITING_SHOWN_MAX], 1)],
            counters=state.counters,
            connections=views.ConnectionsView(open=gateway.edge.connections, stats=asdict(gateway.edge.stats)),
        )

    def models(self, caller: Caller = ANYONE, *, to_operator: bool) -> list[views.ModelView]:
        """All models that it may see for operators; for others without those that are `unlisted`."""
        waiting = Counter(waiter.model for waiter in self._callers())
        seen = (entry for entry in self._gateway.shell.catalog.shown if caller.sees(entry.base_id))
        shown = (entry for entry in seen if to_operator or not entry.config.unlisted)
        return [self._model(entry, waiting[entry.id], to_operator) for entry in shown]

    def model(self, entry: Entry, *, to_operator: bool, waiting: int | None = None) -> views.ModelView:
        """`waiting` is how many requests wait for it, where that was counted already."""
        if waiting is None:
            waiting = sum(waiter.model == entry.id for waiter in self._callers())
        return self._model(entry, waiting, to_operator)

    def _callers(self) -> list[WaitingCaller]:
        return list(self._state.callers())

    def _queue(self) -> views.QueueView:
        state = self._state
        avg_wait_ms = None if state.avg_wait_s is None else round(state.avg_wait_s * 1000, 1)
        return views.QueueView(depth=state.waitlist.depth, max=state.limits.queue_depth_max, avg_wait_ms=avg_wait_ms)

    def _lease_store(self) -> views.LeaseStoreView | None:
        sharing = self._gateway.sharing
        if sharing is None:
            return None
        return views.LeaseStoreView(
            up=sharing.failure is None,
            since_s=round(max(0.0, self._now - sharing.since), 3),
            why=sharing.failure,
            grace_left_s=round(sharing.grace_left_s, 3),
            slots_without_lease=sharing.slots_without_lease,
        )

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

    def _model(self, entry: Entry, waiting: int, to_operator: bool) -> views.ModelView:
        slots = self._state.slots_of(entry.id)
        record = self._state.models.get(entry.id)
        slot_views = [self._slot(slot, to_operator=to_operator) for slot in slots]
        used = [view.last_used_s_ago for view in slot_views if view.last_used_s_ago is not None]
        return views.ModelView(
            id=entry.shown_id(to_operator=to_operator),
            tier=tier_of(slots).value,
            status=self.word(entry),
            engine=entry.engine.name,
            capabilities=_capabilities(entry),
            quantization=entry.facts.quantization,
            revision=entry.spec.revision,
            pinned=entry.spec.pinned,
            priority=entry.spec.priority,
            ttl_s=entry.spec.ttl_s,
            in_flight=sum(view.in_flight for view in slot_views),
            waiting=waiting,
            concurrency=slots[0].concurrency if slots else entry.spec.concurrency,
            last_used_s_ago=min(used, default=None),
            memory=self.memory(entry.id),
            need=self._need(entry),
            unload_in_s=max((view.unload_in_s for view in slot_views if view.unload_in_s is not None), default=None),
            moving=self._moving(slots),
            slots=slot_views,
            failures=record.failures if record is not None else 0,
            retry_in_s=self._retry_in_s(record),
            last_error=self._last_error(entry.id, to_operator),
            missing=entry.engine.missing(entry.config) if to_operator and not slots else None,
            cache=cache_view(self._gateway.shell.slots, slots),
            no_sleep=_no_sleep(entry),
            versioned=self._is_versioned(entry.id),
            pid=next((view.pid for view in slot_views if view.pid is not None), None),
        )

    def _is_versioned(self, model: ModelId) -> bool:
        """False for a version that is on its way: it has the configuration of its model, under a name of its own."""
        configured = self._gateway.shell.config.models.get(model)
        return configured is not None and configured.versions is not None

    def _slot(self, slot: SlotFacts, *, to_operator: bool) -> views.SlotView:
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
            last_priority=slot.last_priority if slot.last_used else None,
            memory={str(device): mib for device, mib in self._state.ledger.held_by(slot.id).items()},
            unload_in_s=self._unload_in_s(slot),
            pid=self._pid(slot.id) if to_operator else None,
        )

    def _unload_in_s(self, slot: SlotFacts) -> float | None:
        if not slot.is_serving or not slot.is_idle or slot.idle_s is None:
            return None
        return round(max(0.0, slot.last_used + slot.idle_s - self._now), 1)

    def _need(self, entry: Entry) -> views.NeedView:
        catalog, record = self._gateway.shell.catalog, self._state.models.get(entry.id)
        need = record.need if record is not None else entry.spec.need
        if not catalog.fits_memory:
            return need_view(need, None)
        return need_view(need, catalog.needs.account_of(entry))

    def memory(self, model: ModelId) -> dict[str, int]:
        total: Counter[str] = Counter()
        for slot in self._state.slots_of(model):
            total.update(self._state.ledger.held_by(slot.id))
        return dict(sorted(total.items()))

    def _moving(self, slots: Sequence[SlotFacts]) -> views.MovingView | None:
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

    def _retry_in_s(self, record: ModelFacts | None) -> float | None:
        if record is None or not is_failing(record, self._now):
            return None
        return round(record.retry_at - self._now, 1)

    def _last_error(self, model: ModelId, to_operator: bool) -> views.LastError | None:
        failure = self._gateway.mover.failures.get(model)
        if failure is None:
            return None
        told = render.words(failure, "", to_operator=to_operator)
        return views.LastError(code=failure.code, message=told.message)

    def _pid(self, slot: SlotId) -> int | None:
        live = self._gateway.shell.slots.live.get(slot)
        return None if live is None or live.child is None else live.child.pid

    def _waiting(self, waiter: WaitingCaller, position: int) -> views.WaitingView:
        return views.WaitingView(
            id=waiter.id,
            position=position,
            model=waiter.model,
            tenant=waiter.tenant,
            waited_s=round(max(0.0, self._now - waiter.arrived), 3),
        )


def status_word(state: SchedulerView, model: ModelId, now: float) -> StatusWord:
    slots = [slot for slot in state.slots_of(model) if not slot.lost]
    # 1. Takes requests.
    if any(slot.is_serving for slot in slots):
        return StatusWord.LOADED
    # 2. Will take requests without another order. An older revision may still be leaving meanwhile.
    if any(slot.is_arriving or _is_preparing(slot) for slot in slots):
        return StatusWord.LOADING
    # 3. Takes no more requests, but has its memory and may still be answering.
    if any(slot.tier is Tier.READY for slot in slots):
        return StatusWord.LOADED
    # 4. Waits in host memory.
    if any(slot.tier is Tier.ASLEEP for slot in slots):
        return StatusWord.SLEEPING
    # 5. Not there; asking for it now would be refused, or would load it.
    return StatusWord.FAILED if is_failing(state.models.get(model), now) else StatusWord.UNLOADED


def tier_of(slots: Sequence[SlotFacts]) -> Tier:
    """The best tier of a model's slots."""
    tiers = {slot.tier for slot in slots if not slot.lost}
    return next((tier for tier in (Tier.READY, Tier.ASLEEP) if tier in tiers), Tier.COLD)


def is_failing(record: ModelFacts | None, now: float) -> bool:
    """Its last load failed and it is refused until the back-off ends."""
    return record is not None and record.failures > 0 and record.pausing is None and now < record.retry_at


def _is_preparing(slot: SlotFacts) -> bool:
    under_way = slot.planned or (slot.move.kind if slot.move is not None else None)
    return under_way is MoveKind.PREPARE and slot.leaving_to is None


def need_view(need: Need, account: Account | None) -> views.NeedView:
    """`account` is None if models take no memory, so that there is no estimate."""
    measured = None if account is None else account.measured
    seen = measured if measured is not None and measured.is_seen else None
    estimate = None if account is None or account.estimate is None else account.estimate.need
    error = None if account is None else account.estimate_error
    return views.NeedView(
        gpu_mib=need.gpu_mib,
        host_mib=need.host_mib,
        source="unknown" if account is None else account.source,
        measured_gpu_mib=None if seen is None else seen.gpu_mib,
        measured_host_mib=None if seen is None else seen.host_mib,
        estimated_gpu_mib=None if estimate is None else estimate.gpu_mib,
        estimated_host_mib=None if estimate is None else estimate.host_mib,
        estimate_error=None if error is None else round(error, 4),
    )


def _no_sleep(entry: Entry) -> str | None:
    if entry.facts.kept_awake_by is not None:
        return f"does not survive sleep with {entry.facts.kept_awake_by}: stopped instead"
    is_kept_from_it = entry.facts.sleeps_off_gpu_only and not entry.facts.can_sleep
    return "runs on the host, where sleep frees nothing: stopped instead" if is_kept_from_it else None


def _capabilities(entry: Entry) -> list[str] | None:
    abilities = entry.facts.abilities
    return None if abilities is None else sorted(abilities)
