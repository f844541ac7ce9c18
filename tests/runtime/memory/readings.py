"""Readings for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.runtime.memory.readings import GpuReading, HostReading, Reading

HOST_READING = HostReading(total_mib=64_000, available_mib=32_000, shm_total_mib=8_000, shm_free_mib=8_000)


def gpu(uuid: str = "GPU-a", index: int = 0, **facts: Any) -> GpuReading:
    plain: dict[str, Any] = {"name": "fake", "total_mib": 24_000, "used_mib": 0, "processes": {}}
    return GpuReading(uuid, index, **{**plain, **facts})


def used(uuid: str, processes: Mapping[int, int], *, besides: int = 0, **facts: Any) -> GpuReading:
    """A GPU with these processes on it, and memory that no process is seen to use."""
    return gpu(uuid, used_mib=sum(processes.values()) + besides, processes=dict(processes), **facts)


def reading(*gpus: GpuReading) -> Reading:
    return Reading(gpus, HOST_READING)
