"""Who was given memory, as the scheduler's tables say it, for those who look at whose memory it really is.

Owns the way from slots and leases to pids. Never looks at a process: that takes time and is done beside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from greenroom.core.ledger import Holding
from greenroom.core.model import Claim, Device, DeviceId, DeviceKind, Slot, SlotId
from greenroom.core.state import State
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.attribution import Owner
from greenroom.runtime.slots import Slots
from greenroom.runtime.workers.hosted_slots import HostedSlots

# Who holds leases, by the slot of each: only processes of this machine that are known.
LeasePids = Callable[[], Mapping[SlotId, int]]

# No slot is called so.
OTHER_WORD = "other gateway's "


class MemoryOwners:
    def __init__(
        self, state: State, slots: Slots, lease_pids: LeasePids, identity: str, hosted: HostedSlots | None = None
    ) -> None:
        """`identity` is what the identities of all slots of this run begin with."""
        self._state = state
        self._slots = slots
        self._lease_pids = lease_pids
        self._identity = identity
        self._hosted = hosted or HostedSlots()

    def __call__(self) -> dict[str, Owner]:
        """Every slot and lease that holds memory now, also those of other gateways."""
        slots, ledger, lease_pids = self._state.slots, self._state.ledger, self._lease_pids()
        ours: dict[str, Owner] = {
            slot_id: self._owner(slots[slot_id], holding, lease_pids)
            for slot_id, holding in ledger.holdings.items()
            if slot_id in slots
        }
        # What they use looks like strangers' and is in the ledger already.
        others = {f"{OTHER_WORD}{lease.id}": Owner(lease.claim, hidden=True) for lease in ledger.others}
        return {**ours, **others, **self._workers()}

    def _workers(self) -> dict[str, Owner]:
        """Processes in which slots live. Where they cannot be seen, each is taken to use what is set aside for one."""
        own = {
            worker.id: {} if worker.key is None else dict.fromkeys(worker.key.gpus or (), WORKER_GPU_MIB)
            for worker in self._hosted.workers.values()
        }
        return {
            worker.id: Owner(own[worker.id], frozenset({worker.pid}), is_host=True)
            for worker in self._hosted.workers.values()
        }

    def by_identity(self, identity: str) -> str | None:
        """The slot with this identity. Each try to start one has a number of its own behind a dot."""
        if not identity.startswith(self._identity):
            return None
        return identity[len(self._identity) :].rpartition(".")[0] or None

    def _owner(self, slot: Slot, holding: Holding, lease_pids: Mapping[SlotId, int]) -> Owner:
        # Per device what was seen, or the claim where nothing ever was.
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
        """Of a slot that is only being loaded the processes are known by their identity."""
        live = self._slots.live.get(slot)
        pid = None if live is None else live.child.pid
        return frozenset() if pid is None else frozenset({pid})

    def _is_hidden(self, slot: SlotId) -> bool:
        """An engine that need not hold its port itself may run elsewhere, in a container of a daemon."""
        live = self._slots.live.get(slot)
        return live is not None and live.entry.config.listener == "any"


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


# Growth beyond this share is written down at once: so many steps lead from one size to twice that one, and no more.
STEP: Final = 0.01
# What grows by less is written down as often as this.
EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Noted:
    """The peak of a slot that was remembered last."""

    mib: int
    at: float


class Growth:
    """`peak_of` is the most a slot was seen to use; `remember` writes it down for its model."""

    def __init__(
        self,
        slots: Slots,
        peak_of: Callable[[SlotId], Claim],
        remember: Callable[[SlotId, Entry], None],
        clock: Callable[[], float],
    ) -> None:
        self._slots = slots
        self._peak_of = peak_of
        self._remember = remember
        self._clock = clock
        self._noted: dict[SlotId, Noted] = {}

    def look(self) -> None:
        """Memory was looked at."""
        now, live = self._clock(), self._slots.live
        self._noted = {slot: noted for slot, noted in self._noted.items() if slot in live}
        for slot, one in list(live.items()):
            peak_mib = sum(self._peak_of(slot).values())
            if _is_worth_it(peak_mib, self._noted.get(slot), now):
                self._noted[slot] = Noted(peak_mib, now)
                self._remember(slot, one.entry)


def _is_worth_it(peak_mib: int, noted: Noted | None, now: float) -> bool:
    if noted is None:
        return peak_mib > 0
    is_much = peak_mib > noted.mib * (1 + STEP)
    return is_much or (peak_mib > noted.mib and now >= noted.at + EVERY_S)
