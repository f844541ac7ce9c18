"""Attributes used GPU memory to our slots, to leases and to strangers.

`attribute` is pure arithmetic on one reading; `MemoryOwners` lists what was given memory, from the scheduler's tables.
Never looks at a process: `watch.py` does, in a thread. Where processes cannot be seen, use beyond all declared claims
counts as strangers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from greenroom.core.model import Claim, DeviceId, SlotId
from greenroom.core.view import HoldingFacts, SchedulerView, SlotFacts
from greenroom.runtime.memory.devices import WORKER_GPU_MIB
from greenroom.runtime.memory.readings import GpuReading, Reading
from greenroom.runtime.slots import LiveSlots
from greenroom.runtime.workers.hosted_slots import HostedSlots


@dataclass(frozen=True, slots=True)
class Owner:
    """A slot, a lease or a worker that was given memory.

    `roots` are pids: these processes and their descendants belong to it. `held` is what it was last seen to use, or its
    claim if that was never measured. A `hidden` owner runs where its processes look like strangers' (a container of a
    daemon). `claim` is what it was given; owners with the same process share its use by their claims. An owner that
    `is_host` is a process in which others live: they name it as `host`, and `told` is what it says that each holds.
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
    seen: Mapping[str, Claim] = field(default_factory=dict)  # By owner; only devices where its processes were seen.
    strangers: Mapping[DeviceId, Mapping[int, int]] = field(default_factory=dict)  # MiB by pid.
    unseen: frozenset[DeviceId] = frozenset()  # Devices that show no processes.
    # What workers use beyond what they say that their slots hold.
    own_mib: Mapping[DeviceId, int] = field(default_factory=dict)


def attribute(reading: Reading, owners: Mapping[str, Owner], owner_of: Mapping[int, str]) -> Attribution:
    """`owner_of` names the owner of each pid; all other pids are strangers."""
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
    """Attribute the use of workers: to their slots what the worker says, and the rest to the worker itself."""
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
    """Owners that share a process: a program may hold several leases, and its use of each cannot be seen."""
    groups: dict[frozenset[int], list[str]] = {}
    for name, owner in owners.items():
        if owner.roots:
            groups.setdefault(owner.roots, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _share(group: Sequence[str], owners: Mapping[str, Owner], seen: dict[str, dict[DeviceId, int]]) -> None:
    """Attribute the use of one process to each owner up to its claim, and the rest to the last owner."""
    for device in {device for name in group for device in seen[name]}:
        left = sum(seen[name].pop(device, 0) for name in group)
        *others, last = [name for name in group if owners[name].claim.get(device)] or [group[-1]]
        for name in others:
            seen[name][device] = min(left, owners[name].claim[device])
            left -= seen[name][device]
        seen[last][device] = left


def _foreign_mib(gpu: GpuReading, strangers_mib: int, hidden_mib: int) -> int:
    """Use that no visible process explains counts as strangers' too: another container, or a process that ends."""
    assert gpu.processes is not None
    ours_mib = sum(gpu.processes.values()) - strangers_mib
    return max(0, max(strangers_mib, gpu.used_mib - ours_mib) - hidden_mib)


def _hidden_mib(device: DeviceId, owners: Mapping[str, Owner], seen: Mapping[str, Claim]) -> int:
    """What hidden owners hold here: it must not count as strangers' too."""
    return sum(owner.held.get(device, 0) for name, owner in owners.items() if owner.hidden and device not in seen[name])


def _sorted(claim: Claim) -> Claim:
    return {device: claim[device] for device in sorted(claim)}


# How much of a stopped slot's memory may stay in use: drivers keep a little, and figures are rounded.
KEPT_SHARE = 0.05
KEPT_MIB = 64


def not_back(before: Reading, now: Reading, released: Claim) -> Claim:
    """MiB of `released` that are still used, by GPU, beyond what drivers may keep."""
    then = {gpu.uuid: gpu for gpu in before.gpus}
    found: dict[DeviceId, int] = {}
    for gpu in now.gpus:
        mib = released.get(DeviceId(gpu.uuid), 0)
        if mib and gpu.uuid in then and (away_mib := away(then[gpu.uuid], gpu, mib)):
            found[DeviceId(gpu.uuid)] = away_mib
    return found


def away(before: GpuReading, now: GpuReading, mib: int) -> int:
    """MiB of this memory that are still used on one GPU; 0 if that is no more than drivers may keep."""
    away_mib = min(mib, now.used_mib - (before.used_mib - mib) - _grown_mib(before, now))
    return away_mib if away_mib > max(KEPT_MIB, mib * KEPT_SHARE) else 0


def short_of(now: Reading, claim: Claim) -> Claim:
    """MiB of this claim that are not free, by GPU. A GPU that cannot be seen counts as free."""
    free = {DeviceId(gpu.uuid): max(0, gpu.total_mib - gpu.used_mib) for gpu in now.gpus}
    return {device: mib - free[device] for device, mib in claim.items() if device in free and mib > free[device]}


def _grown_mib(before: GpuReading, now: GpuReading) -> int:
    """What other processes took meanwhile, as far as they can be seen."""
    then = before.processes or {}
    return sum(max(0, mib - then.get(pid, 0)) for pid, mib in (now.processes or {}).items())


# The pids of holders of leases, by the slot of each: only known processes of this machine.
LeasePids = Callable[[], Mapping[SlotId, int]]

# No slot id begins with this.
OTHER_WORD = "other gateway's "


class MemoryOwners:
    def __init__(
        self,
        state: SchedulerView,
        slots: LiveSlots,
        lease_pids: LeasePids,
        identity: str,
        hosted: HostedSlots | None = None,
    ) -> None:
        """`identity` is the common prefix of the identities of all slots of this run."""
        self._state = state
        self._slots = slots
        self.lease_pids = lease_pids
        self._identity = identity
        self._hosted = hosted or HostedSlots()

    def __call__(self) -> dict[str, Owner]:
        """Every slot and lease that holds memory now, also those of other gateways."""
        slots, ledger = self._state.slots, self._state.ledger
        lease_pids = self.lease_pids() if any(slot.lease is not None for slot in slots.values()) else {}
        ours: dict[str, Owner] = {
            slot_id: self._owner(slots[slot_id], holding, lease_pids)
            for slot_id, holding in ledger.holdings.items()
            if slot_id in slots
        }
        # Their use looks like strangers', and is in the ledger already.
        others = {f"{OTHER_WORD}{lease.id}": Owner(lease.claim, hidden=True) for lease in ledger.others}
        return {**ours, **others, **self._workers()}

    def _workers(self) -> dict[str, Owner]:
        """Processes in which slots live. A worker that cannot be seen counts with what is set aside for it."""
        own = {
            worker.id: {} if worker.key is None else dict.fromkeys(worker.key.gpus or (), WORKER_GPU_MIB)
            for worker in self._hosted.workers.values()
        }
        return {
            worker.id: Owner(own[worker.id], frozenset({worker.pid}), is_host=True)
            for worker in self._hosted.workers.values()
        }

    def by_identity(self, identity: str) -> str | None:
        """The slot with this identity. Each attempt to start it has its own number after a dot."""
        if not identity.startswith(self._identity):
            return None
        return identity[len(self._identity) :].rpartition(".")[0] or None

    def _owner(self, slot: SlotFacts, holding: HoldingFacts, lease_pids: Mapping[SlotId, int]) -> Owner:
        # On each device what was seen, or the claim where nothing was ever seen.
        held: Claim = {**holding.claim, **holding.seen}
        hosted = self._hosted.there.get(slot.id)
        if hosted is not None:
            worker = hosted.worker
            return Owner(held, host="" if worker is None else worker.id, told=hosted.told)
        if slot.lease is None:
            return Owner(held, self._roots(slot.id), hidden=self._is_hidden(slot.id))
        pid = lease_pids.get(slot.id)
        return Owner(held, hidden=True) if pid is None else Owner(held, frozenset({pid}), claim=holding.claim)

    def _roots(self, slot: SlotId) -> frozenset[int]:
        """The pid of a live slot. Processes of a slot that is being loaded are found by their identity."""
        live = self._slots.live.get(slot)
        pid = None if live is None or live.child is None else live.child.pid
        return frozenset() if pid is None else frozenset({pid})

    def _is_hidden(self, slot: SlotId) -> bool:
        """Whether the engine may run elsewhere, in a container of a daemon: it need not hold its port itself."""
        live = self._slots.live.get(slot)
        return live is not None and live.entry.config.listener == "any"
