"""Which devices: where a need could go, as claims. Best fit and eviction are chosen by the swapper from these options.

Owns the rule that a machine without GPUs uses its host's memory, the split over several GPUs, the same need on each of
several, and where a slot sleeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from greenroom.core.model import Claim, Device, DeviceId, DeviceKind, ModelSpec, Need

Mib = Mapping[DeviceId, int]
Shape = tuple[tuple[DeviceId, ...], int, bool, int, int]

# How many sets of GPUs are looked at for who wants several: all of them with 8 GPUs; with more, those that are freest.
SETS_MAX = 100
# Shapes that are remembered: more than most configurations have models.
SHAPES_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Way:
    """A place where a model could be: its claim there when ready, and what its move wants beyond what it holds."""

    claim: Claim
    wants: Claim
    on: frozenset[DeviceId]  # where it wants any


def way_to(claim: Claim, wants: Claim) -> Way:
    return Way(claim, wants, frozenset(device for device, mib in wants.items() if mib > 0))


class Places:
    """Remembers every way of a shape for as long as devices and the memory there could be at most stay the same.

    A memo of a pure function, which belongs to who asks and not to the state: without it each answer is the same.
    """

    def __init__(self) -> None:
        self._devices: Mapping[DeviceId, Device] = {}
        self._most_mib: Mib = {}
        self._ways: dict[Shape, list[Way]] = {}

    def ways(self, shape: Shape, devices: Mapping[DeviceId, Device], most_mib: Mib) -> list[Way] | None:
        """What was remembered; None if nothing is known under these circumstances."""
        if self._devices is not devices or self._most_mib != most_mib or len(self._ways) > SHAPES_MAX:
            self._devices, self._most_mib, self._ways = devices, most_mib, {}
        return self._ways.get(shape)

    def remember(self, shape: Shape, ways: list[Way]) -> None:
        self._ways[shape] = ways


def shape(spec: ModelSpec, need: Need) -> Shape:
    """All that `options` goes by of a model: those of the same shape have the same options."""
    return (spec.devices, spec.gpus, spec.can_split, need.gpu_mib, need.host_mib)


def options(
    spec: ModelSpec,
    need: Need,
    devices: Sequence[Device],
    free_mib: Mib,
    most_mib: Mib,
    likely_mib: Mib | None = None,
) -> list[Claim]:
    """Every claim that could hold this need if all who may leave had left (`most_mib`); empty when none could.

    `likely_mib` is the same without what strangers and holders of leases have now, who leave when they like.
    """
    gpus, host = _gpus(spec, devices), _host(devices)
    if not gpus:
        # 1. No GPU: everything on the host, unless the operator named GPUs that are not there.
        elsewhere = spec.gpus > 1 or (bool(spec.devices) and (host is None or host.id not in spec.devices))
        return [] if elsewhere else _holding([_claim({}, host, need.gpu_mib + need.host_mib)], most_mib)
    if spec.gpus > 1:
        # 2. On each of several, all or nothing.
        return _on_several(spec, need, gpus, host, free_mib, most_mib)
    # 3. On one GPU, if one can hold it and the operator did not name several.
    fitting = _holding([_claim({gpu.id: need.gpu_mib}, host, need.host_mib) for gpu in gpus], most_mib)
    if not spec.can_split or (fitting and len(spec.devices) <= 1):
        return fitting
    # 4. Split over all that may be used, by what is free if that is enough, else by what could become free: by what is
    #    likely to, or by what could at the very most.
    if (split := _split(need, gpus, host, free_mib)) is not None:
        return _holding([split], most_mib)
    splits = [_split(need, gpus, host, mib) for mib in (likely_mib or most_mib, most_mib)]
    return _holding([split for split in splits if split is not None], most_mib)


def _on_several(
    spec: ModelSpec, need: Need, gpus: Sequence[Device], host: Device | None, free_mib: Mib, most_mib: Mib
) -> list[Claim]:
    able = [gpu for gpu in gpus if need.gpu_mib <= most_mib.get(gpu.id, 0)]
    able.sort(key=lambda gpu: (-free_mib.get(gpu.id, 0), gpu.id))
    sets = islice(combinations(able, spec.gpus), SETS_MAX)
    claims = [_claim({gpu.id: need.gpu_mib for gpu in chosen}, host, need.host_mib) for chosen in sets]
    return _holding(claims, most_mib)


def _split(need: Need, gpus: Sequence[Device], host: Device | None, mib: Mib) -> Claim | None:
    """In proportion to this memory; None if all of it together is not enough."""
    weights = {gpu.id: max(0, mib.get(gpu.id, 0)) for gpu in gpus}
    if sum(weights.values()) < need.gpu_mib:
        return None
    return _claim(_shares(need.gpu_mib, weights), host, need.host_mib)


def asleep(need: Need, claim: Claim, devices: Sequence[Device]) -> Claim:
    """What a slot placed there holds when asleep: on the same GPUs in the same proportion, and on the host."""
    weights = {
        device.id: claim[device.id] for device in devices if device.kind is DeviceKind.GPU and device.id in claim
    }
    if not weights:
        return _claim({}, _host(devices), need.gpu_mib + need.host_mib)
    return _claim(_shares(need.gpu_mib, weights), _host(devices), need.host_mib)


def shortfall(spec: ModelSpec, need: Need, devices: Sequence[Device], mib: Mib) -> tuple[int, int, int]:
    """What is needed, how much of this memory there is for it, and of all memory; where it is too small."""
    all_mib = {device.id: device.usable_mib for device in devices}
    gpus, host = _gpus(spec, devices), _host(devices)
    if not gpus:
        nowhere = bool(spec.devices) or spec.gpus > 1
        on_host = (0, 0) if nowhere else (_on_host(host, mib), _on_host(host, all_mib))
        return (need.gpu_mib + need.host_mib, *on_host)
    on_gpus = _on_gpus(spec, gpus, mib)
    if need.gpu_mib > on_gpus or need.host_mib <= _on_host(host, mib):
        return need.gpu_mib, on_gpus, _on_gpus(spec, gpus, all_mib)
    return need.host_mib, _on_host(host, mib), _on_host(host, all_mib)


def _on_gpus(spec: ModelSpec, gpus: Sequence[Device], mib: Mib) -> int:
    """On all of them together if it can be split, else on the best, or on the last of as many as are wanted."""
    each = sorted((max(0, mib.get(gpu.id, 0)) for gpu in gpus), reverse=True)
    if spec.can_split:
        return sum(each)
    return each[spec.gpus - 1] if spec.gpus <= len(each) else 0


def _on_host(host: Device | None, mib: Mib) -> int:
    return 0 if host is None else max(0, mib.get(host.id, 0))


def bounded(spec: ModelSpec, need: Need, devices: Sequence[Device], most_mib: Mib) -> Need:
    """As much of this need as there could ever be."""
    gpus, host_mib = _gpus(spec, devices), _on_host(_host(devices), most_mib)
    on_host = min(need.host_mib, host_mib)
    gpu_mib = _on_gpus(spec, gpus, most_mib) if gpus else host_mib - on_host
    return Need(min(need.gpu_mib, gpu_mib), on_host)


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
