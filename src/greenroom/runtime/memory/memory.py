"""The memory of this machine: the devices to plan with, what is seen of their use, and what models need of it."""

from __future__ import annotations

from greenroom.config.limits import limits_of
from greenroom.config.part import Part
from greenroom.config.schema import Config
from greenroom.core.events import ConfigChanged
from greenroom.core.model import Device, DeviceKind
from greenroom.runtime.memory.devices import WORKER_GPU_MIB, devices, set_aside, without
from greenroom.runtime.memory.readings import Probe, Reading
from greenroom.runtime.memory.slot_memory import MemoryOwners, SlotMemory
from greenroom.runtime.memory.watch import Growth, MemoryWatch
from greenroom.runtime.shell import Shell


class Memory(Part):
    """`seen` is the first reading of the probe."""

    name = "the memory watch"

    def __init__(self, shell: Shell, probe: Probe, seen: Reading) -> None:
        self._shell = shell
        config, loop, times = shell.config, shell.loop, shell.timeouts.memory
        run = shell.state_dir.identity("")
        self.needs = shell.catalog.needs
        self.owners = MemoryOwners(loop.view, shell.slots, dict, run, shell.hosted_slots)
        self.watch = MemoryWatch(probe, self.owners, loop, config.memory.look_every_s, seen, shell.hosted_slots, times)
        # Beside a model of a worker the worker itself needs room; on simulated GPUs nothing is set aside.
        kept = 0 if config.gpus else WORKER_GPU_MIB
        gpus = [device for device in devices(config, seen) if device.kind is DeviceKind.GPU]
        self.needs.usable_mib = {gpu.id: gpu.usable_mib - kept for gpu in gpus}
        self.slot_memory = SlotMemory(loop, shell.catalog, self.needs, self.watch, times)
        self.watch.on_look = Growth(shell.slots, self.watch, self.slot_memory, loop).look

    def begin(self) -> None:
        """Tell the scheduler of the devices. What others use of them is known before any model is."""
        config, loop = self._shell.config, self._shell.loop
        loop.post(ConfigChanged(loop.clock(), devices=self.devices(config), limits=limits_of(config)))
        self.watch.start()

    def devices(self, config: Config) -> tuple[Device, ...]:
        """The devices to plan with, without what is set aside for workers. On simulated GPUs nothing is."""
        known = devices(config, self.watch.last.reading)
        kept = {} if config.gpus else set_aside(self._shell.catalog, known)
        self.watch.set_aside_mib = kept
        return without(known, kept)

    async def close(self) -> None:
        await self.watch.close()
