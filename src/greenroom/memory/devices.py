"""Which devices there are to plan with: simulated GPUs from the configuration, and this machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

from greenroom.config.schema import Config
from greenroom.core.model import Device, DeviceId, DeviceKind

HOST = DeviceId("host")
# Models may use this share of the machine unless the operator says how much; the rest is for everybody else.
HOST_SHARE = 0.75
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MIB = 1024 * 1024


def devices(config: Config) -> tuple[Device, ...]:
    gpus = tuple(
        Device(DeviceId(f"gpu{number}"), DeviceKind.GPU, gpu.memory_mib, gpu.margin_mib)
        for number, gpu in enumerate(config.gpus)
    )
    memory_mib = config.host.memory_mib or int(_machine_mib() * HOST_SHARE)
    return (*gpus, Device(HOST, DeviceKind.HOST, memory_mib, config.host.margin_mib))


def _machine_mib() -> int:
    """Physical memory, or the container's limit where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(_CGROUP_LIMIT.read_text())
    except (OSError, ValueError):
        # No limit is written as "max"; other layouts of cgroups have no such file.
        limit = physical
    return min(physical, limit) // _MIB
