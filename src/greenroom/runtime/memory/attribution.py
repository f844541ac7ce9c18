"""Whose memory it is: a look at the GPUs, shared out between our slots, leases, and strangers.

Pure arithmetic. Who a process belongs to is found out elsewhere and handed in. Where processes cannot be seen, what is
used beyond all that was declared is a stranger's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from greenroom.core.model import Claim, DeviceId
from greenroom.runtime.memory.probes.base import GpuReading, Reading


@dataclass(frozen=True, slots=True)
class Owner:
    """Somebody who was given memory: a slot, or whoever holds a lease.

    `roots` are pids: they and all below them are his. `held` is what he was last seen to use, or his claim if that was
    never measured. A `hidden` one runs where his processes cannot be told from strangers' (a container of a daemon).
    `claim` is what he was given; by it those share who hold memory with the same process. One that `is_host` is a
    process in which others live: they name it as their `host`, and its word on what each of them holds is `told`.
    """

    held: Claim
    roots: frozenset[int] = frozenset()
    hidden: bool = False
    claim: Claim = field(default_factory=dict)
    is_host: bool = False
    host: str | None = None
    told: Claim = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attribution:
    foreign_mib: Mapping[DeviceId, int] = field(default_factory=dict)
    seen: Mapping[str, Claim] = field(default_factory=dict)  # By owner; only devices where his processes were seen.
    strangers: Mapping[DeviceId, Mapping[int, int]] = field(default_factory=dict)  # MiB by pid.
    unseen: frozenset[DeviceId] = frozenset()  # Devices whose processes cannot be seen.
    # What processes in which several live use beside what they say that those hold.
    own_mib: Mapping[DeviceId, int] = field(default_factory=dict)


def attribute(reading: Reading, owners: Mapping[str, Owner], owner_of: Mapping[int, str]) -> Attribution:
    """`owner_of` says whose a process is; those it does not name are strangers."""
    foreign: dict[DeviceId, int] = {}
    strangers: dict[DeviceId, Mapping[int, int]] = {}
    seen: dict[str, dict[DeviceId, int]] = {owner: {} for owner in owners}
    for gpu in reading.gpus:
        device = DeviceId(gpu.uuid)
        if gpu.processes is None:
            foreign[device] = max(0, gpu.used_mib - sum(owner.held.get(device, 0) for owner in owners.values()))
            continue
        ours = {pid: owner_of[pid] for pid in gpu.processes if owner_of.get(pid) in owners}
        for pid, owner in ours.items():
            seen[owner][device] = seen[owner].get(device, 0) + gpu.processes[pid]
        strangers[device] = {pid: mib for pid, mib in gpu.processes.items() if pid not in ours}
        foreign[device] = _foreign_mib(gpu, sum(strangers[device].values()), _hidden_mib(device, owners, seen))
    for group in _with_the_same_roots(owners):
        _share(group, owners, seen)
    own = _own_mib(owners, seen)
    unseen = frozenset(DeviceId(gpu.uuid) for gpu in reading.gpus if gpu.processes is None)
    return Attribution(foreign, {owner: _sorted(claim) for owner, claim in seen.items()}, strangers, unseen, own)


def _own_mib(owners: Mapping[str, Owner], seen: dict[str, dict[DeviceId, int]]) -> dict[DeviceId, int]:
    """Share out what processes use in which others live: by their word, and the rest is their own."""
    own: dict[DeviceId, int] = {}
    for guest, owner in owners.items():
        if owner.host is not None:
            seen[guest] = dict(owner.told)
    for name in [name for name, owner in owners.items() if owner.is_host]:
        guests = [owner for owner in owners.values() if owner.host == name]
        for device, mib in seen.pop(name).items():
            said_mib = sum(guest.told.get(device, 0) for guest in guests)
            own[device] = own.get(device, 0) + max(0, mib - said_mib)
    return own


def _with_the_same_roots(owners: Mapping[str, Owner]) -> list[list[str]]:
    """One program may hold several leases; it cannot be seen for which of them it uses what."""
    groups: dict[frozenset[int], list[str]] = {}
    for name, owner in owners.items():
        if owner.roots:
            groups.setdefault(owner.roots, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _share(group: Sequence[str], owners: Mapping[str, Owner], seen: dict[str, dict[DeviceId, int]]) -> None:
    """Each has what he was given as far as it is used, and the last what is used beyond all of that."""
    for device in {device for name in group for device in seen[name]}:
        left = sum(seen[name].pop(device, 0) for name in group)
        *others, last = [name for name in group if owners[name].claim.get(device)] or [group[-1]]
        for name in others:
            seen[name][device] = min(left, owners[name].claim[device])
            left -= seen[name][device]
        seen[last][device] = left


def _foreign_mib(gpu: GpuReading, strangers_mib: int, hidden_mib: int) -> int:
    """What no process of ours explains is a stranger's too: one in another container, or one that is just ending."""
    assert gpu.processes is not None
    ours_mib = sum(gpu.processes.values()) - strangers_mib
    return max(0, max(strangers_mib, gpu.used_mib - ours_mib) - hidden_mib)


def _hidden_mib(device: DeviceId, owners: Mapping[str, Owner], seen: Mapping[str, Claim]) -> int:
    """What owners hold here whose processes look like strangers': it must not count twice."""
    return sum(owner.held.get(device, 0) for name, owner in owners.items() if owner.hidden and device not in seen[name])


def _sorted(claim: Claim) -> Claim:
    return {device: claim[device] for device in sorted(claim)}


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
