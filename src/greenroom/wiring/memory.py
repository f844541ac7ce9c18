"""Memory: the watch over it, what models need of it, and the devices to plan with.

Owns how these are made and joined.
"""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.schema import Config
from greenroom.core.model import Device, DeviceId
from greenroom.runtime.memory.attribution import MemoryOwners
from greenroom.runtime.memory.book import NeedBook
from greenroom.runtime.memory.devices import DeviceNames, devices, set_aside, without
from greenroom.runtime.memory.needs import Needs, warn
from greenroom.runtime.memory.probes.base import Probe, Reading
from greenroom.runtime.memory.slot_memory import Growth, SlotMemory
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.record.line_file import replace_file
from greenroom.wiring.common import CommonParts


@dataclass(frozen=True, slots=True)
class MemoryParts:
    common: CommonParts
    device_names: DeviceNames
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
    catalog, post, clock = common.catalog, common.post, common.clock
    names = DeviceNames(seen.gpus)
    catalog.device_of = names.expected
    run = common.state_dir.identity("")
    owners = MemoryOwners(common.state, common.slots, dict, run, common.hosted_slots)
    watch = MemoryWatch(probe, owners, post, clock, config.memory.look_every_s, seen, common.hosted_slots)
    kinds = {DeviceId(gpu.uuid): gpu.name for gpu in seen.gpus}
    needs = catalog.needs = Needs(NeedBook(common.state_dir.path, replace_file, warn), kinds)
    slot_memory = SlotMemory(common.state, catalog, needs, watch, post, clock)
    growth = Growth(common.slots, watch.peak_of, slot_memory.grew, clock)
    watch.on_look = growth.look
    return MemoryParts(common, names, owners, watch, needs, slot_memory)
