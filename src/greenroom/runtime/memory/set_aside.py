"""Memory of GPUs that is kept for workers themselves, whoever lives in them.

Owns the figure and where it counts: on every GPU on which a hosted model may be placed, from the start, so that the
first one does not find its place taken by its own process. Nothing is kept on GPUs that are a budget only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from greenroom.core.model import Device, DeviceId, DeviceKind
from greenroom.runtime.catalogue import Entry

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
