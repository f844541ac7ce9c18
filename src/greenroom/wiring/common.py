"""The base of every gateway: its tables, the scheduler, the way events reach it, and the watch over memory.

Owns how these are made and joined. They know nothing of moves or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from greenroom.config import limits
from greenroom.config.live import GatewayState
from greenroom.config.schema import Config
from greenroom.core.model import Device, DeviceId, DeviceKind
from greenroom.core.view import SchedulerView
from greenroom.library.records import Version
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.loop import AsyncEffects
from greenroom.runtime.memory.book import MemoryNeedsStore
from greenroom.runtime.memory.devices import WORKER_GPU_MIB, DeviceNames, devices, set_aside, without
from greenroom.runtime.memory.needs import Needs, warn
from greenroom.runtime.memory.readings import Probe, Reading
from greenroom.runtime.memory.slot_memory import MemoryOwners, SlotMemory
from greenroom.runtime.memory.watch import Growth, MemoryWatch
from greenroom.runtime.observer import Hub, Observer
from greenroom.runtime.record.recording import EventRecorder
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlots
from greenroom.runtime.timeouts import Timeouts
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.telemetry.activity import Activity
from greenroom.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class CommonParts:
    device_names: DeviceNames
    catalog: Catalog
    slots: LiveSlots
    hosted_slots: HostedSlots
    hub: Hub
    metrics: Metrics
    activity: Activity
    observer: Observer
    effects: AsyncEffects
    loop: SchedulerLoop
    events_file: EventRecorder | None
    clock: Callable[[], float]
    gateway: GatewayState
    state_dir: StateDir
    timeouts: Timeouts

    @property
    def state(self) -> SchedulerView:
        return self.loop.scheduler.view


def wire_common(
    gateway: GatewayState,
    state_dir: StateDir,
    clock: Callable[[], float],
    is_named_tenant: Callable[[str], bool],
    timeouts: Timeouts,
    seen: Reading,
    version_of: Callable[[str], Version | None],
) -> CommonParts:
    """`seen` is the first reading of the probe."""
    config, server, names = gateway.config, gateway.config.server, DeviceNames(seen.gpus)
    needs = Needs(MemoryNeedsStore(state_dir.path, warn), {DeviceId(gpu.uuid): gpu.name for gpu in seen.gpus})
    catalog, slots = Catalog(needs, names.expected, version_of), LiveSlots()
    hub = Hub(begins_after=int(time.time()) * 1_000_000)
    with_aliases = server.metrics_aliases is not None
    metrics = Metrics(catalog.is_known, is_named_tenant, catalog.is_adhoc, with_aliases=with_aliases)
    observer = Observer(hub, metrics)
    effects = AsyncEffects(slots, observer, clock)
    recorder = EventRecorder(Path(server.record_events)) if server.record_events else None
    seen_effects = effects if recorder is None else recorder.watching(effects)
    loop = SchedulerLoop(limits.make_scheduler(config.scheduler.implementation, seen_effects), clock, recorder)
    return CommonParts(
        device_names=names,
        catalog=catalog,
        slots=slots,
        hosted_slots=HostedSlots(),
        hub=hub,
        metrics=metrics,
        activity=Activity(),
        observer=observer,
        effects=effects,
        loop=loop,
        events_file=recorder,
        clock=clock,
        gateway=gateway,
        state_dir=state_dir,
        timeouts=timeouts,
    )


@dataclass(frozen=True, slots=True)
class MemoryParts:
    common: CommonParts
    owners: MemoryOwners
    watch: MemoryWatch
    needs: Needs
    slot_memory: SlotMemory

    def devices(self, config: Config) -> tuple[Device, ...]:
        """The devices to plan with, without what is set aside for workers. On simulated GPUs nothing is."""
        known = devices(config, self.watch.last.reading)
        kept = {} if config.gpus else set_aside(self.common.catalog, known)
        self.watch.set_aside_mib = kept
        return without(known, kept)


def wire_memory(common: CommonParts, config: Config, probe: Probe, seen: Reading) -> MemoryParts:
    """`seen` is the first reading of the probe."""
    catalog, loop, times = common.catalog, common.loop, common.timeouts.memory
    run = common.state_dir.identity("")
    owners = MemoryOwners(common.state, common.slots, dict, run, common.hosted_slots)
    watch = MemoryWatch(probe, owners, loop, config.memory.look_every_s, seen, common.hosted_slots, times)
    # Beside a model of a worker the worker itself needs room; on simulated GPUs nothing is set aside.
    kept = 0 if config.gpus else WORKER_GPU_MIB
    gpus = [device for device in devices(config, seen) if device.kind is DeviceKind.GPU]
    catalog.needs.usable_mib = {gpu.id: gpu.usable_mib - kept for gpu in gpus}
    slot_memory = SlotMemory(loop, catalog, catalog.needs, watch, times)
    growth = Growth(common.slots, watch, slot_memory, loop)
    watch.on_look = growth.look
    return MemoryParts(common, owners, watch, catalog.needs, slot_memory)
