"""The base of every gateway: its tables, the scheduler and the way events reach it.

Owns how these are made. They know nothing of memory, moves or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from greenroom.config import plugins
from greenroom.config.schema import Server
from greenroom.core.events import Event
from greenroom.core.scheduler import Scheduler
from greenroom.core.view import SchedulerView
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.effects import AsyncEffects
from greenroom.runtime.loop import SchedulerLoop
from greenroom.runtime.observer import Observer
from greenroom.runtime.record.recording import EventRecorder
from greenroom.runtime.slots import LiveSlots
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.telemetry.activity import Activity
from greenroom.telemetry.hub import Hub
from greenroom.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class CommonParts:
    catalog: Catalog
    slots: LiveSlots
    hosted_slots: HostedSlots
    hub: Hub
    metrics: Metrics
    activity: Activity
    observer: Observer
    effects: AsyncEffects
    loop: SchedulerLoop
    post: Callable[[Event], None]
    """Posts an event, and records it where recording is configured. Every event goes through it."""
    events_file: EventRecorder | None
    clock: Callable[[], float]
    state_dir: StateDir

    @property
    def state(self) -> SchedulerView:
        return self.loop.scheduler.view


def wire_common(
    server: Server, state_dir: StateDir, clock: Callable[[], float], is_named_tenant: Callable[[str], bool]
) -> CommonParts:
    catalog, slots, hub = Catalog(), LiveSlots(), Hub()
    metrics = Metrics(catalog.is_known, is_named_tenant)
    observer = Observer(hub, metrics)
    effects = AsyncEffects(slots, observer, clock)
    recorder = EventRecorder(Path(server.record_events)) if server.record_events else None
    seen_effects = effects if recorder is None else recorder.watching(effects)
    loop = SchedulerLoop(Scheduler(seen_effects, plugins.POLICIES, plugins.SWAPPERS_BY_NAME))
    return CommonParts(
        catalog=catalog,
        slots=slots,
        hosted_slots=HostedSlots(),
        hub=hub,
        metrics=metrics,
        activity=Activity(),
        observer=observer,
        effects=effects,
        loop=loop,
        post=loop.post if recorder is None else recorder.posting(loop.post),
        events_file=recorder,
        clock=clock,
        state_dir=state_dir,
    )
