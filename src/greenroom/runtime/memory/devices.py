"""Which devices there are to plan with, and what people call them.

Owns what a device's id is: a GPU's UUID as its driver says it; gpu0, gpu1 … for simulated ones; `host` for this
machine's memory. Never looks at anything itself but the host: what there is of GPUs is said by a reading.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from greenroom.config.schema import Config
from greenroom.core.model import Claim, Device, DeviceId, DeviceKind
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.probes.base import GpuReading, Reading, named
from greenroom.runtime.memory.probes.host import THIS_MACHINE

HOST = DeviceId("host")
# Models may use this share of the machine unless the operator says how much; the rest is for everybody else.
HOST_SHARE = 0.75
_NUMBERED = "gpu"

_log = logging.getLogger(__name__)


def devices(config: Config, reading: Reading | None = None) -> tuple[Device, ...]:
    """GPUs and the host. Without a reading only simulated GPUs are known."""
    host = THIS_MACHINE.look() if reading is None else reading.host
    memory_mib = config.host.memory_mib or int(host.total_mib * HOST_SHARE)
    gpus = _simulated(config) if config.gpus or reading is None else _real(config, reading.gpus)
    return (*gpus, Device(HOST, DeviceKind.HOST, memory_mib, config.host.margin_mib))


def _simulated(config: Config) -> tuple[Device, ...]:
    return tuple(
        Device(DeviceId(f"{_NUMBERED}{number}"), DeviceKind.GPU, gpu.memory_mib, gpu.margin_mib)
        for number, gpu in enumerate(config.gpus)
    )


def _real(config: Config, gpus: Sequence[GpuReading]) -> tuple[Device, ...]:
    margin_mib = config.memory.gpu_margin_mib
    return tuple(Device(DeviceId(gpu.uuid), DeviceKind.GPU, gpu.total_mib, margin_mib) for gpu in gpus)


@dataclass(frozen=True, slots=True)
class DeviceNames:
    """What people may write for a device: host, gpu0, a UUID, or the beginning of one."""

    gpus: tuple[GpuReading, ...] = ()

    def id_of(self, name: str) -> DeviceId | None:
        """The device that is meant; None if there is no such device, or more than one."""
        if name == HOST:
            return HOST
        number = name.removeprefix(_NUMBERED)
        gpu = named(self.gpus, number if number != name and number.isdigit() else name)
        return None if gpu is None else DeviceId(gpu.uuid)

    def expected(self, name: str) -> DeviceId:
        """What an operator calls a device. One that is not there keeps its name; nothing will ever fit on it."""
        device = self.id_of(name)
        if device is None:
            _log.warning("there is no such device name=%s devices=%s", name, ",".join(gpu.uuid for gpu in self.gpus))
        return device or DeviceId(name)


# A context of CUDA and the kernels of torch, loaded when first used, and the workspace of cuBLAS.
WORKER_GPU_MIB: Final = 800


def set_aside(entries: Iterable[Entry], devices: Iterable[Device]) -> dict[DeviceId, int]:
    """What is kept on each GPU."""
    gpus = [device.id for device in devices if device.kind is DeviceKind.GPU]
    hosted = [entry for entry in entries if entry.engine.hosted and entry.config.device != "cpu"]
    wanted = {gpu for entry in hosted for gpu in (entry.spec.devices or gpus)}
    return {gpu: WORKER_GPU_MIB for gpu in gpus if gpu in wanted}


def without(devices: Iterable[Device], kept_mib: Mapping[DeviceId, int]) -> tuple[Device, ...]:
    """The same devices, to be planned with as if this were not there."""
    return tuple(
        replace(device, margin_mib=device.margin_mib + kept_mib.get(device.id, 0)) if device.id in kept_mib else device
        for device in devices
    )


def visible_gpus(entry: Entry, claim: Claim, devices: Iterable[Device]) -> tuple[DeviceId, ...] | None:
    """In the order of the claim. None: there are no GPUs to plan with, and nothing is to be said about them."""
    gpus = [device.id for device in devices if device.kind is DeviceKind.GPU]
    if not gpus:
        return None
    # 1. What it was given.
    if claimed := tuple(device for device in claim if device in gpus):
        return claimed
    # 2. Nobody knows what it needs: it may use what the operator allows, is measured there, and fitted the next time.
    if _is_unknown(entry, claim):
        return tuple(gpu for gpu in gpus if not entry.spec.devices or gpu in entry.spec.devices)
    # 3. It is known to need none.
    return ()


def _is_unknown(entry: Entry, claim: Claim) -> bool:
    """Also where host memory alone is known: a program may have been measured when it had no GPU to use."""
    config = entry.config
    if config.device == "cpu" or config.memory_mib == 0:
        return False
    return not claim or (config.engine == "command" and config.memory_mib is None)
