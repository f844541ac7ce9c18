"""Which devices could hold a need, as claims. The swapper chooses among these options.

Owns the rule that a machine without GPUs uses host memory, the split over several GPUs in proportion, in equal shares
or in whole parts (`packing.py`), the same need on each of several GPUs, and where a slot sleeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Final

from greenroom.core.model import Claim, Device, DeviceId, DeviceKind, ModelSpec, Need
from greenroom.core.packing import pack

Mib = Mapping[DeviceId, int]
Shape = tuple[tuple[DeviceId, ...], int, bool, tuple[int, ...], tuple[int, ...], int, int, int]

# How many sets of GPUs are tried for a lease on several: all of them with 8 GPUs; with more, the freest.
SETS_MAX: Final = 100
# Number of remembered shapes: more than most configurations have models.
SHAPES_MAX: Final = 1_024


# One is created for every question about a sleeper, so it is not frozen: that takes longer. Never modified.
@dataclass(slots=True)
class Way:
    """A placement: the claim there when ready, and what the move needs beyond what the slot already holds."""

    claim: Claim
    wants: Claim
    on: frozenset[DeviceId]  # devices where `wants` is positive


def way_to(claim: Claim, wants: Claim) -> Way:
    return Way(claim, wants, frozenset([device for device, mib in wants.items() if mib > 0]))


class Ways:
    """The placements of a model: each of them, and what they have in common. Models of the same shape share one."""

    def __init__(self, each: list[Way]) -> None:
        self.each = each
        self.wants = tuple([way.wants for way in each])
        self.on = each[0].on if len(each) == 1 else frozenset[DeviceId]().union(*[way.on for way in each])
        # The last answer of `apart_from`: most models of a round ask the same.
        self._kept: Set[DeviceId] = frozenset()
        self._apart: Ways | None = None

    def __bool__(self) -> bool:
        return bool(self.each)

    def apart_from(self, kept: Set[DeviceId]) -> Ways:
        """Those that use none of these devices."""
        if self._apart is None or self._kept != kept:
            self._kept, self._apart = kept, Ways([way for way in self.each if kept.isdisjoint(way.on)])
        return self._apart


class Places:
    """Remembers the placements of each shape while devices and their upper limits stay the same.

    A cache of a pure function. It belongs to the caller, not to the state: answers are the same without it.
    """

    def __init__(self) -> None:
        self._devices: Mapping[DeviceId, Device] = {}
        self._most_mib: Mib = {}
        self._ways: dict[Shape, Ways] = {}

    def ways(self, shape: Shape, devices: Mapping[DeviceId, Device], most_mib: Mib) -> Ways | None:
        """The remembered placements; None if this shape is unknown under these limits."""
        if self._devices is not devices or self._most_mib != most_mib or len(self._ways) > SHAPES_MAX:
            self._devices, self._most_mib, self._ways = devices, most_mib, {}
        return self._ways.get(shape)

    def remember(self, shape: Shape, ways: Ways) -> None:
        self._ways[shape] = ways


def shape(spec: ModelSpec, need: Need) -> Shape:
    """All that `options` reads of a model: models of the same shape have the same options."""
    split = (spec.can_split, spec.split_counts, spec.parts, spec.beside_mib)
    return (spec.devices, spec.gpus, *split, need.gpu_mib, need.host_mib)


def options(
    spec: ModelSpec,
    need: Need,
    devices: Sequence[Device],
    free_mib: Mib,
    most_mib: Mib,
    likely_mib: Mib | None = None,
) -> list[Claim]:
    """Every claim that could hold this need if all that may leave had left (`most_mib`); empty if there is none.

    `likely_mib` is the same without what undeclared processes and leases hold now, which leave only when they choose
    to.
    """
    gpus, host = _gpus(spec, devices), _host(devices)
    if not gpus:
        # 1. No GPU: everything on the host, unless the operator named GPUs that are not there.
        elsewhere = spec.gpus > 1 or (bool(spec.devices) and (host is None or host.id not in spec.devices))
        return [] if elsewhere else _holding([_claim({}, host, need.gpu_mib + need.host_mib)], most_mib)
    if spec.gpus > 1:
        # 2. On each of several, all or nothing.
        return _on_each(spec.gpus, need, gpus, host, free_mib, most_mib)
    # 3. On one GPU, if one can hold it and the operator did not name several.
    fitting = _holding([_claim({gpu.id: need.gpu_mib}, host, need.host_mib) for gpu in gpus], most_mib)
    if not spec.can_split or (fitting and len(spec.devices) <= 1):
        return fitting
    if spec.split_counts:
        # 4. In equal shares.
        return _in_equal_shares(spec, need, gpus, host, free_mib, most_mib) or fitting
    if spec.parts:
        # 5. In whole parts, by the first of these figures that is enough.
        return _in_whole_parts(spec, need, gpus, host, (free_mib, likely_mib or most_mib, most_mib)) or fitting
    # 6. Split over all that may be used, by what is free if that is enough, else by what could become free: by what is
    #    likely to, or by what could at the very most.
    if (split := _split(need, gpus, host, free_mib)) is not None:
        return _holding([split], most_mib)
    splits = [_split(need, gpus, host, mib) for mib in (likely_mib or most_mib, most_mib)]
    return _holding([split for split in splits if split is not None], most_mib)


def _on_each(
    count: int, need: Need, gpus: Sequence[Device], host: Device | None, free_mib: Mib, most_mib: Mib
) -> list[Claim]:
    """This need on each GPU of every set of so many that could hold it, the freest sets first."""
    able = [gpu for gpu in gpus if need.gpu_mib <= most_mib.get(gpu.id, 0)]
    able.sort(key=lambda gpu: (-free_mib.get(gpu.id, 0), gpu.id))
    sets = islice(combinations(able, count), SETS_MAX)
    claims = [_claim({gpu.id: need.gpu_mib for gpu in chosen}, host, need.host_mib) for chosen in sets]
    return _holding(claims, most_mib)


def _in_equal_shares(
    spec: ModelSpec, need: Need, gpus: Sequence[Device], host: Device | None, free_mib: Mib, most_mib: Mib
) -> list[Claim]:
    """On as few GPUs as can hold it; on as many as may be used if the operator named several."""
    for count in sorted(spec.split_counts, reverse=len(spec.devices) > 1):
        share = Need(-(-need.gpu_mib // count), need.host_mib)
        if claims := _on_each(count, share, gpus, host, free_mib, most_mib):
            return claims
    return []


def _in_whole_parts(
    spec: ModelSpec, need: Need, gpus: Sequence[Device], host: Device | None, figures: Sequence[Mib]
) -> list[Claim]:
    """On as few GPUs as can hold the parts; on as many as may be used if the operator named several.

    `figures` are what is free on each GPU, best first; the last is what could become free at the very most.
    """
    each_mib, most_mib = spec.rest_mib(need), figures[-1]
    # The same on each of them: which of these GPUs is freest decides which sets are tried first.
    freest = sorted(gpus, key=lambda gpu: (-figures[0].get(gpu.id, 0), gpu.id))
    counts = range(2, min(len(gpus), len(spec.parts)) + 1)
    for count in sorted(counts, reverse=len(spec.devices) > 1):
        found: list[Claim] = []
        for chosen in islice(combinations(freest, count), SETS_MAX):
            on_gpus = _packed(spec.parts, each_mib, chosen, figures)
            if on_gpus is not None:
                found.append(_claim(on_gpus, host, need.host_mib))
        if claims := _holding(found, most_mib):
            return claims
    return []


def _packed(
    parts: Sequence[int], each_mib: int, gpus: Sequence[Device], figures: Sequence[Mib]
) -> dict[DeviceId, int] | None:
    """MiB on each of these GPUs; None if they cannot hold the parts."""
    for mib in figures:
        places = pack(parts, [mib.get(gpu.id, 0) - each_mib for gpu in gpus])
        if places is not None:
            held = [sum(part for part, at in zip(parts, places, strict=True) if at == one) for one in range(len(gpus))]
            return {gpu.id: size + each_mib for gpu, size in zip(gpus, held, strict=True) if size}
    return None


def _split(need: Need, gpus: Sequence[Device], host: Device | None, mib: Mib) -> Claim | None:
    """Split in proportion to this memory; None if it is too small in total."""
    weights = {gpu.id: max(0, mib.get(gpu.id, 0)) for gpu in gpus}
    if sum(weights.values()) < need.gpu_mib:
        return None
    return _claim(_shares(need.gpu_mib, weights), host, need.host_mib)


def asleep(need: Need, claim: Claim, devices: Sequence[Device]) -> Claim:
    """What a slot with this claim holds when asleep: the same proportion on the same GPUs, and its part on the host."""
    weights = {
        device.id: claim[device.id] for device in devices if device.kind is DeviceKind.GPU and device.id in claim
    }
    if not weights:
        return _claim({}, _host(devices), need.gpu_mib + need.host_mib)
    return _claim(_shares(need.gpu_mib, weights), _host(devices), need.host_mib)


def shortfall(spec: ModelSpec, need: Need, devices: Sequence[Device], mib: Mib) -> tuple[int, int, int]:
    """What is needed, how much of `mib` is there for it, and how much memory in all; on the GPUs or the host."""
    all_mib = {device.id: device.usable_mib for device in devices}
    gpus, host = _gpus(spec, devices), _host(devices)
    if not gpus:
        nowhere = bool(spec.devices) or spec.gpus > 1
        on_host = (0, 0) if nowhere else (_on_host(host, mib), _on_host(host, all_mib))
        return (need.gpu_mib + need.host_mib, *on_host)
    needed_mib, on_gpus, of_mib = need.gpu_mib, _on_gpus(spec, gpus, mib), _on_gpus(spec, gpus, all_mib)
    if spec.can_split and spec.parts and len(gpus) > 1:
        needed_mib, count = _spread_mib(spec, need, gpus, mib)
        on_gpus, of_mib = (sum(_largest(gpus, figures)[:count]) for figures in (mib, all_mib))
    if needed_mib > on_gpus or need.host_mib <= _on_host(host, mib):
        return needed_mib, on_gpus, of_mib
    return need.host_mib, _on_host(host, mib), _on_host(host, all_mib)


def _on_gpus(spec: ModelSpec, gpus: Sequence[Device], mib: Mib) -> int:
    """MiB on all GPUs together if the need can be split, else on the best, or on the last of as many as are needed.

    In equal shares, the smallest of those GPUs counts for each of them.
    """
    each = _largest(gpus, mib)
    if spec.can_split and spec.split_counts:
        return max((count * each[count - 1] for count in (1, *spec.split_counts) if count <= len(each)), default=0)
    if spec.can_split:
        return sum(each)
    return each[spec.gpus - 1] if spec.gpus <= len(each) else 0


def _largest(gpus: Sequence[Device], mib: Mib) -> list[int]:
    return sorted((max(0, mib.get(gpu.id, 0)) for gpu in gpus), reverse=True)


def _spread_mib(spec: ModelSpec, need: Need, gpus: Sequence[Device], mib: Mib) -> tuple[int, int]:
    """MiB that parts need, and on how many GPUs: the largest on one if none can hold it, else all with their rests."""
    each_mib = spec.rest_mib(need)
    if (largest_mib := max(spec.parts) + each_mib) > _largest(gpus, mib)[0]:
        return largest_mib, 1
    count = min(len(gpus), len(spec.parts))
    return sum(spec.parts) + count * each_mib, count


def _on_host(host: Device | None, mib: Mib) -> int:
    return 0 if host is None else max(0, mib.get(host.id, 0))


def bounded(spec: ModelSpec, need: Need, devices: Sequence[Device], most_mib: Mib) -> Need:
    """This need, limited to what could ever be free. None on GPUs for parts that they could not hold then."""
    gpus, host_mib = _gpus(spec, devices), _on_host(_host(devices), most_mib)
    if spec.parts and gpus and not options(spec, Need(need.gpu_mib), devices, most_mib, most_mib):
        return Need(0, min(need.host_mib, host_mib))
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
    return [claim for claim in claims if fits(claim, most_mib)]


def fits(claim: Claim, mib: Mib) -> bool:
    return all(part <= mib.get(device, 0) for device, part in claim.items())


def _shares(mib: int, weights: Mib) -> dict[DeviceId, int]:
    """Shares in proportion to the weights, each rounded up."""
    total = max(1, sum(weights.values()))
    return {device: -(-mib * weight // total) for device, weight in weights.items()}
