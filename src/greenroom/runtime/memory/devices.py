"""The devices to plan with: their ids and names, and what is set aside on them.

Owns the id of a device: the UUID of a GPU; gpu0, gpu1 … for simulated ones; `host` for this machine's memory. Never
looks at GPUs: a reading says which there are.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from greenroom.config.schema import Config
from greenroom.core.model import Device, DeviceId, DeviceKind
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
    if config.gpus or reading is None:
        gpus = [(f"{_NUMBERED}{number}", gpu.memory_mib, gpu.margin_mib) for number, gpu in enumerate(config.gpus)]
    else:
        gpus = [(gpu.uuid, gpu.total_mib, config.memory.gpu_margin_mib) for gpu in reading.gpus]
    return (
        *(Device(DeviceId(id), DeviceKind.GPU, mib, margin_mib) for id, mib, margin_mib in gpus),
        Device(HOST, DeviceKind.HOST, memory_mib, config.host.margin_mib),
    )


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


def name_of(device: DeviceId, gpus: Iterable[GpuReading]) -> str:
    """What people call it: gpu0, gpu1 … for a GPU of this reading; its id otherwise."""
    return next((f"{_NUMBERED}{gpu.index}" for gpu in gpus if gpu.uuid == device), device)


def none_there(entry: Entry, there: Collection[DeviceId], gpus: Sequence[GpuReading]) -> str:
    """That this model may use only devices that are not there, and what to do; empty if that is not so."""
    if not entry.spec.devices or not set(entry.spec.devices).isdisjoint(there):
        return ""
    only, has = _list(entry.config.devices), _list([name_of(device, gpus) for device in there])
    return (
        f"{entry.id} may use only {only} (`devices`), and this machine has {has}. "
        "Name what is there, or leave `devices` out."
    )


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


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
    return tuple(replace(device, margin_mib=device.margin_mib + kept_mib.get(device.id, 0)) for device in devices)
