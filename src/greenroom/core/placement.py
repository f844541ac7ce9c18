"""Which devices: where a need could go, as claims. Best fit and eviction are chosen by the swapper from these options.

Owns the rule that a machine without GPUs uses its host's memory, the split over several GPUs, and where a slot sleeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greenroom.core.model import Claim, Device, DeviceId, DeviceKind, ModelSpec, Need

Mib = Mapping[DeviceId, int]


def options(spec: ModelSpec, need: Need, devices: Sequence[Device], free_mib: Mib, most_mib: Mib) -> list[Claim]:
    """Every claim that could hold this need if all who may leave had left (`most_mib`); empty when none could."""
    gpus, host = _gpus(spec, devices), _host(devices)
    if not gpus:
        # 1. No GPU: everything on the host, unless the operator named GPUs that are not there.
        elsewhere = bool(spec.devices) and (host is None or host.id not in spec.devices)
        return [] if elsewhere else _holding([_claim({}, host, need.gpu_mib + need.host_mib)], most_mib)
    # 2. On one GPU, if one can hold it and the operator did not name several.
    fitting = _holding([_claim({gpu.id: need.gpu_mib}, host, need.host_mib) for gpu in gpus], most_mib)
    if not spec.can_split or (fitting and len(spec.devices) <= 1):
        return fitting
    # 3. Split over all that may be used, by what is free if that is enough, else by what could become free.
    enough = sum(max(0, free_mib.get(gpu.id, 0)) for gpu in gpus) >= need.gpu_mib
    weights = {gpu.id: max(0, (free_mib if enough else most_mib).get(gpu.id, 0)) for gpu in gpus}
    if sum(weights.values()) < need.gpu_mib:
        return []
    return _holding([_claim(_shares(need.gpu_mib, weights), host, need.host_mib)], most_mib)


def asleep(need: Need, claim: Claim, devices: Sequence[Device]) -> Claim:
    """What a slot placed there holds when asleep: on the same GPUs in the same proportion, and on the host."""
    weights = {
        device.id: claim[device.id] for device in devices if device.kind is DeviceKind.GPU and device.id in claim
    }
    if not weights:
        return _claim({}, _host(devices), need.gpu_mib + need.host_mib)
    return _claim(_shares(need.gpu_mib, weights), _host(devices), need.host_mib)


def shortfall(spec: ModelSpec, need: Need, devices: Sequence[Device], most_mib: Mib) -> tuple[int, int]:
    """What is needed and what there could be at most, on the kind of device that is too small."""
    gpus, host = _gpus(spec, devices), _host(devices)
    on_host = max(0, most_mib.get(host.id, 0)) if host is not None else 0
    if not gpus:
        return need.gpu_mib + need.host_mib, 0 if spec.devices else on_host
    each = [max(0, most_mib.get(gpu.id, 0)) for gpu in gpus]
    on_gpus = sum(each) if spec.can_split else max(each)
    return (need.gpu_mib, on_gpus) if need.gpu_mib > on_gpus else (need.host_mib, on_host)


def _gpus(spec: ModelSpec, devices: Sequence[Device]) -> list[Device]:
    wanted = [device for device in devices if not spec.devices or device.id in spec.devices]
    return [device for device in wanted if device.kind is DeviceKind.GPU]


def _host(devices: Sequence[Device]) -> Device | None:
    return next((device for device in devices if device.kind is DeviceKind.HOST), None)


def _claim(on_gpus: Mib, host: Device | None, host_mib: int) -> Claim:
    parts = {device: mib for device, mib in on_gpus.items() if mib}
    if host is not None and host_mib:
        parts[host.id] = host_mib
    return dict(sorted(parts.items()))


def _holding(claims: list[Claim], most_mib: Mib) -> list[Claim]:
    return [claim for claim in claims if all(mib <= most_mib.get(device, 0) for device, mib in claim.items())]


def _shares(mib: int, weights: Mib) -> dict[DeviceId, int]:
    """In proportion to the weights, each share rounded up."""
    total = max(1, sum(weights.values()))
    return {device: -(-mib * weight // total) for device, weight in weights.items()}
