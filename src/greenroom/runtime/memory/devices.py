"""Which devices there are to plan with, and what people call them.

Owns what a device's id is: a GPU's UUID as its driver says it; gpu0, gpu1 … for simulated ones; `host` for this
machine's memory. Never looks at anything itself but the host: what there is of GPUs is said by a reading.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from greenroom.config.schema import Config
from greenroom.core.model import Device, DeviceId, DeviceKind
from greenroom.runtime.memory.host import THIS_MACHINE
from greenroom.runtime.memory.probes.base import GpuReading, Reading
from greenroom.runtime.memory.probes.visible import named

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
