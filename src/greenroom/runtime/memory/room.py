"""Whether memory is really there: what a stopped slot has not given back, and what a claim is short of.

Pure arithmetic on looks, by what the driver says is used; no ledger is asked.
"""

from __future__ import annotations

from greenroom.core.model import Claim, DeviceId
from greenroom.runtime.memory.probes.base import GpuReading, Reading

# How much of a stopped slot's memory may stay away: drivers keep a little, and figures are rounded.
KEPT_SHARE = 0.05
KEPT_MIB = 64


def not_back(before: Reading, now: Reading, released: Claim) -> Claim:
    """What of `released` is still used, per GPU, beyond what drivers may keep."""
    then = {gpu.uuid: gpu for gpu in before.gpus}
    found: dict[DeviceId, int] = {}
    for gpu in now.gpus:
        mib = released.get(DeviceId(gpu.uuid), 0)
        if mib and gpu.uuid in then and (away_mib := away(then[gpu.uuid], gpu, mib)):
            found[DeviceId(gpu.uuid)] = away_mib
    return found


def away(before: GpuReading, now: GpuReading, mib: int) -> int:
    """What of this memory of one GPU is still used; 0 if that is no more than drivers may keep."""
    away_mib = min(mib, now.used_mib - (before.used_mib - mib) - _grown_mib(before, now))
    return away_mib if away_mib > max(KEPT_MIB, mib * KEPT_SHARE) else 0


def short_of(now: Reading, claim: Claim) -> Claim:
    """What of this claim is not free, per GPU. One that cannot be seen is taken to have it."""
    free = {DeviceId(gpu.uuid): max(0, gpu.total_mib - gpu.used_mib) for gpu in now.gpus}
    return {device: mib - free[device] for device, mib in claim.items() if device in free and mib > free[device]}


def _grown_mib(before: GpuReading, now: GpuReading) -> int:
    """What others took meanwhile, as far as they can be seen."""
    then = before.processes or {}
    return sum(max(0, mib - then.get(pid, 0)) for pid, mib in (now.processes or {}).items())
