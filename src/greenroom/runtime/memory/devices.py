"""The devices to plan with: their ids and names, what is set aside on them, and which of them an engine may see.

Owns the id of a device: the UUID of a GPU; gpu0, gpu1 … for simulated ones; `host` for this machine's memory. Never
looks at GPUs: a reading says which there are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from greenroom.config.schema import Config
from greenroom.core.model import Claim, Device, DeviceId, DeviceKind
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.readings import THIS_MACHINE, GpuReading, Reading, named

HOST = DeviceId("host")
# The share of host memory that models may use, unless it is configured.
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
    """Names by which people mean a device: host, gpu0, a UUID, or its beginning."""

    gpus: tuple[GpuReading, ...] = ()

    def id_of(self, name: str) -> DeviceId | None:
        """The device that is meant; None if there is no such device, or more than one."""
        if name == HOST:
            return HOST
        number = name.removeprefix(_NUMBERED)
        gpu = named(self.gpus, number if number != name and number.isdigit() else name)
        return None if gpu is None else DeviceId(gpu.uuid)

    def expected(self, name: str) -> DeviceId:
        """The device with this name. An unknown one keeps its name as its id; nothing will ever fit on it."""
        device = self.id_of(name)
        if device is None:
            _log.warning("there is no such device name=%s devices=%s", name, ",".join(gpu.uuid for gpu in self.gpus))
        return device or DeviceId(name)


# What a worker needs on a GPU for itself: a CUDA context, the kernels of torch and the workspace of cuBLAS.
WORKER_GPU_MIB: Final = 800


def set_aside(entries: Iterable[Entry], devices: Iterable[Device]) -> dict[DeviceId, int]:
    """MiB kept free for workers, on each GPU that a hosted model may use."""
    gpus = [device.id for device in devices if device.kind is DeviceKind.GPU]
    hosted = [entry for entry in entries if entry.engine.hosted and entry.config.device != "cpu"]
    wanted = {gpu for entry in hosted for gpu in (entry.spec.devices or gpus)}
    return {gpu: WORKER_GPU_MIB for gpu in gpus if gpu in wanted}


def without(devices: Iterable[Device], kept_mib: Mapping[DeviceId, int]) -> tuple[Device, ...]:
    """The same devices with their margins raised by `kept_mib`."""
    return tuple(
        replace(device, margin_mib=device.margin_mib + kept_mib.get(device.id, 0)) if device.id in kept_mib else device
        for device in devices
    )


def visible_gpus(entry: Entry, claim: Claim, devices: Iterable[Device]) -> tuple[DeviceId, ...] | None:
    """The GPUs that an engine may see, in the order of its claim. None if there are no GPUs to plan with."""
    gpus = [device.id for device in devices if device.kind is DeviceKind.GPU]
    if not gpus:
        return None
    # 1. The GPUs of its claim.
    if claimed := tuple(device for device in claim if device in gpus):
        return claimed
    # 2. Its need is unknown: it may use all GPUs that the operator allows, and is measured there for the next time.
    if _is_unknown(entry, claim):
        return tuple(gpu for gpu in gpus if not entry.spec.devices or gpu in entry.spec.devices)
    # 3. It is known to need none.
    return ()


def _is_unknown(entry: Entry, claim: Claim) -> bool:
    """Whether its GPU need is unknown. A command may have been measured when it had no GPU to use."""
    config = entry.config
    if config.device == "cpu" or config.memory_mib == 0:
        return False
    return not claim or (config.engine == "command" and config.memory_mib is None)
