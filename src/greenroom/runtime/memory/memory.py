"""The memory of this machine: the devices to plan with, what is seen of their use, and what models need of it."""

from __future__ import annotations

from typing import Final

from greenroom.config.limits import limits_of
from greenroom.config.part import Part
from greenroom.config.schema import Config
from greenroom.core.events import ConfigChanged
from greenroom.core.model import Device, DeviceKind, SlotId
from greenroom.runtime.memory.devices import WORKER_GPU_MIB, devices, set_aside, without
from greenroom.runtime.memory.readings import Probe, Reading
from greenroom.runtime.memory.slot_memory import MemoryOwners, SlotMemory
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlots


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


# --- peaks that grow ------------------------------------------------------------------------------------------------

# Growth by this share is stored at once: a peak that doubles is stored about 70 times, not more.
STEP: Final = 0.01
# Smaller growth is stored at most this often.
EVERY_S: Final = 60.0


class Growth:
    """Stores peaks that grow while slots serve."""

    def __init__(self, slots: LiveSlots, watch: MemoryWatch, memory: SlotMemory, loop: SchedulerLoop) -> None:
        self._slots = slots
        self._watch = watch
        self._memory = memory
        self._loop = loop
        # The peak of each slot that was stored last, in MiB, and when.
        self._noted: dict[SlotId, tuple[int, float]] = {}

    def look(self) -> None:
        """Called after each look at memory."""
        now, live = self._loop.clock(), self._slots.live
        self._noted = {slot: noted for slot, noted in self._noted.items() if slot in live}
        for slot, one in list(live.items()):
            peak_mib = sum(self._watch.peak_of(slot).values())
            if _is_worth_it(peak_mib, self._noted.get(slot), now):
                self._noted[slot] = (peak_mib, now)
                self._memory.grew(slot, one.entry)


def _is_worth_it(peak_mib: int, noted: tuple[int, float] | None, now: float) -> bool:
    if noted is None:
        return peak_mib > 0
    before_mib, at = noted
    return peak_mib > before_mib * (1 + STEP) or (peak_mib > before_mib and now >= at + EVERY_S)
