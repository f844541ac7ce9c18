"""One lease as the gateway keeps it: its record, its place in the queue, and how long it outlasts a restart.

Owns what is known of a lease and how it is shown; what it can be given, by device and memory; and the errors that
refuse it, with their numbers. Never decides: the scheduler grants, `local.py` ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from greenroom.core.effects import RejectCode, Rejection
from greenroom.core.model import Claim, DeviceId, DeviceKind, SlotId
from greenroom.core.view import LedgerFacts
from greenroom.errors import BadRequest, GreenroomError, LeaseDenied, LeaseTooLarge, ShuttingDown, StoreDown
from greenroom.features.leases.journal import Kept
from greenroom.leases.records import Lease, LeaseAsk, taken
from greenroom.runtime.memory.devices import HOST, DeviceNames
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.scheduler_loop import SchedulerLoop

# The lease was reported to several calls, or to one without a name: if one of them leaves, another may hold it.
SEVERAL: Final = ""


@dataclass(slots=True, eq=False)
class LeaseEntry:
    ask: LeaseAsk
    # Done when the lease is held; an error if it never will be.
    settled: asyncio.Future[None]
    # How many calls wait for it, and which call was told that it is held. Without either it is given up.
    askers: int = 0
    told_to: str | None = None
    # When the wait ends, and whether the scheduler was asked: not while it queues behind another lease.
    give_up_at: float | None = None
    is_asked: bool = False
    token: int = 0
    claim: Mapping[str, int] = field(default_factory=dict)
    slot: SlotId | None = None
    is_held: bool = False
    # How long it lasts at first: what is left of its TTL, for a lease of an earlier run.
    lasts_s: float | None = None
    expires_at: float = 0.0
    # How long this process had stood still in all when that was last set.
    stood_still_s: float = 0.0
    # When a renewal was last journaled.
    written_at: float = 0.0
    recall_at: float | None = None
    # Timers: has it expired, and did its holder leave when recalled?
    watch: asyncio.TimerHandle | None = None
    overdue: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self.ask.id

    @property
    def is_waiting(self) -> bool:
        """Neither held nor about to be."""
        return self.slot is None

    def check_same(self, again: LeaseAsk) -> None:
        """The same holder may ask again for the same. Raises LeaseTaken for any other request. Two programs with one
        lease would use its memory twice."""
        first = self.ask
        if first.holder != again.holder:
            of = "another program" if first.holder is None else f"process {first.holder.pid} on {first.holder.host}"
            raise taken(again.id, f"that of {of}")
        if (first.mib, first.gpus) != (again.mib, again.gpus):
            each = f" on each of {first.gpus} GPUs" if first.gpus > 1 else ""
            raise taken(again.id, f"another one, of {first.mib:,} MiB{each}")
        is_there = set(self.claim) <= set(again.devices) or not again.devices
        if not is_there if self.claim else first.devices != again.devices:
            raise taken(again.id, f"another one, on {', '.join(sorted(self.claim) or first.devices) or 'any GPU'}")

    def settle(self, error: GreenroomError | None = None) -> None:
        """Tell the calls that wait for it: it is held, or why it never will be. Only the first time counts."""
        if self.settled.done():
            return
        if error is None:
            self.settled.set_result(None)
        else:
            self.settled.set_exception(error)

    def shown(self, now: float) -> Lease:
        ask = self.ask
        return Lease(
            id=ask.id,
            name=ask.name,
            token=self.token,
            claim=self.claim,
            priority=ask.priority,
            preemptible=ask.preemptible,
            state="held" if self.is_held else "waiting",
            ttl_s=ask.ttl_s,
            expires_in_s=max(0.0, self.expires_at - now) if self.is_held else ask.ttl_s,
            recall_in_s=None if self.recall_at is None else self.recall_at - now,
            holder=ask.holder,
            kind="program",
        )

    def forget_timers(self) -> None:
        for timer in (self.watch, self.overdue):
            if timer is not None:
                timer.cancel()
        self.watch = self.overdue = None


def ask_again(kept: Kept, settled: asyncio.Future[None], lasts_s: float) -> LeaseEntry:
    """Ask again for a lease of an earlier run, on the same devices. Without a renewal it ends after `lasts_s`."""
    # By its claim, which was checked; the rest of a damaged line may say anything.
    mib, gpus = max(kept.claim.values()), len(kept.claim)
    ask = replace(kept.ask, mib=mib, gpus=gpus, devices=tuple(sorted(kept.claim)), wait_s=0.0)
    return LeaseEntry(ask, settled, told_to=SEVERAL, token=kept.token, lasts_s=lasts_s)


def is_behind(entry: LeaseEntry, in_order: Iterable[LeaseEntry]) -> bool:
    """Whether this lease must wait for an earlier one of `in_order`. It need not be among them yet."""
    for other in in_order:
        if other is entry:
            return False
        if _goes_first(other, entry):
            return True
    return False


def may_ask(in_order: Iterable[LeaseEntry]) -> list[LeaseEntry]:
    """Leases that no longer queue behind another one and were not asked for yet, most urgent first."""
    # Held leases block none. They are dropped first: there may be hundreds for each one that waits.
    waiting = [entry for entry in in_order if entry.is_waiting]
    free = [entry for entry in waiting if not entry.is_asked and not is_behind(entry, waiting)]
    return sorted(free, key=lambda entry: entry.ask.priority)


def _goes_first(earlier: LeaseEntry, later: LeaseEntry) -> bool:
    """Whether the earlier lease waits too, is at least as urgent, and could use the same GPU."""
    if not earlier.is_waiting or earlier.ask.priority > later.ask.priority:
        return False
    mine, others = set(later.ask.devices), set(earlier.ask.devices)
    return not mine or not others or not mine.isdisjoint(others)


# Half the TTL: our clients renew every third of it.
GRACE_SHARE: Final = 0.5
# Clients retry every second while the gateway is away, and a restart takes some seconds.
GRACE_MIN_S: Final = 10.0


def restart_grace_s(ttl_s: float) -> float:
    return max(GRACE_MIN_S, ttl_s * GRACE_SHARE)


def lasts_s(kept: Kept, wall_s: float) -> float:
    """Seconds from the start of this run until a lease of an earlier run expires without a renewal. At most its TTL, so
    a clock that jumped cannot extend it."""
    ttl_s = kept.ask.ttl_s
    left_s = max(0.0, kept.heard_at + ttl_s - wall_s)
    return min(ttl_s, left_s + restart_grace_s(ttl_s))


def must_journal_renewal(ttl_s: float, since_s: float) -> bool:
    """True if this renewal must be journaled. Where the grace is at least the TTL, none must be."""
    grace_s = restart_grace_s(ttl_s)
    return grace_s < ttl_s and since_s >= grace_s


# --- what a lease can be given ----------------------------------------------------------------------------------------


class LeasableMemory:
    """The memory that leases can be given: by name, by the scheduler's ledger, and as it is really free."""

    def __init__(self, loop: SchedulerLoop, names: DeviceNames, watch: MemoryWatch) -> None:
        self._state = loop.view
        self.names = names
        self.watch = watch

    def claim_of(self, slot: SlotId) -> Claim:
        """What the scheduler gave this slot."""
        return self._state.slots[slot].claim

    def free_mib(self) -> dict[str, int]:
        """What leases can be given now: on each GPU, or on the host where there is none."""
        ledger = self._state.ledger
        free = ledger.free_mib(frozenset())
        return {str(device): max(0, free[device]) for device in _leasable(ledger)}

    def most_mib(self) -> dict[str, int]:
        """What leases could be given if every slot that may ever leave had left."""
        most = self._state.most_mib()
        return {str(device): max(0, most[device]) for device in _leasable(self._state.ledger)}

    def usable_mib(self) -> dict[str, int]:
        """The same if pinned models had left, too."""
        ledger = self._state.ledger
        return {str(device): ledger.devices[device].usable_mib for device in _leasable(ledger)}


def _leasable(ledger: LedgerFacts) -> list[DeviceId]:
    return [one.id for one in ledger.devices.values() if one.kind is DeviceKind.GPU] or list(ledger.devices)


def devices_meant(ask: LeaseAsk, names: DeviceNames) -> tuple[str, ...]:
    """The ids of the devices that this request names. Raises BadRequest."""
    meant = {name: names.id_of(name) for name in ask.devices}
    if unknown := [name for name, device in meant.items() if device is None]:
        raise BadRequest(f"There is no device {unknown[0]}; `greenroom gpus` lists them.", param="devices")
    if HOST in meant.values():
        raise BadRequest("A lease is for GPUs; the host's memory is not leased.", param="devices")
    devices = tuple(sorted({str(device) for device in meant.values()}))
    if devices and len(devices) < ask.gpus:
        raise BadRequest(f"{ask.gpus} GPUs are wanted and {len(devices)} named.", param="devices")
    return devices


# Models leave within seconds once they are idle; when they become idle is not known.
RETRY_AFTER_S = 5.0


def refusal(ask: LeaseAsk, rejection: Rejection, free_mib: Mapping[str, int]) -> GreenroomError:
    """The error that this rejection means to the caller of `acquire`."""
    match rejection.code:
        case RejectCode.TOO_LARGE if ask.gpus > len(free_mib):
            return _too_many(ask, len(free_mib), free_mib)
        case RejectCode.TOO_LARGE:
            return _too_much(ask, rejection.needs_mib, rejection.free_mib, free_mib, bool(rejection.pinned))
        case RejectCode.SHUTTING_DOWN:
            return ShuttingDown("The gateway is shutting down; ask again when it is back.", retry_after_s=5.0)
        case RejectCode.STORE_DOWN:
            return StoreDown("The lease store does not answer; ask again.", retry_after_s=RETRY_AFTER_S)
        case _:
            return not_free(ask, free_mib)


def never_free(ask: LeaseAsk, memory: LeasableMemory) -> LeaseTooLarge | None:
    """The error of a request that no wait could satisfy; None if waiting may help."""
    most, usable, free_mib = _for(ask, memory.most_mib()), _for(ask, memory.usable_mib()), memory.free_mib()
    if ask.gpus > len(most):
        return _too_many(ask, len(most), free_mib)
    last, unpinned = max(0, most[ask.gpus - 1]), usable[ask.gpus - 1]
    return _too_much(ask, ask.mib, last, free_mib, ask.mib <= unpinned) if ask.mib > last else None


def _for(ask: LeaseAsk, mib: Mapping[str, int]) -> list[int]:
    """These figures on the devices that it may use, the largest first."""
    return sorted((mib[device] for device in mib if not ask.devices or device in ask.devices), reverse=True)


def _too_many(ask: LeaseAsk, gpus: int, free_mib: Mapping[str, int]) -> LeaseTooLarge:
    return LeaseTooLarge(
        f"{_wanted(ask)} can never be had: there are {gpus}. Ask for fewer.", beside=_numbers(ask, free_mib)
    )


def _too_much(
    ask: LeaseAsk, needs_mib: int, most_mib: int, free_mib: Mapping[str, int], may_unpin: bool
) -> LeaseTooLarge:
    return LeaseTooLarge(
        f"{_wanted(ask)} can never be had: {needs_mib:,} MiB are needed, at most {most_mib:,} MiB can be made free. "
        f"Ask for less{', or unpin a model' if may_unpin else ''}.",
        beside=_numbers(ask, free_mib),
    )


def not_free(ask: LeaseAsk, free_mib: Mapping[str, int]) -> LeaseDenied:
    shown = ", ".join(f"{device} has {mib:,} MiB free" for device, mib in free_mib.items()) or "there is no GPU"
    waited = f"not free within {ask.wait_s:g} s" if ask.wait_s else "not free now"
    return LeaseDenied(
        f"{_wanted(ask)}: {waited}; {shown}. Wait longer, ask for less, or unload a model.",
        retry_after_s=RETRY_AFTER_S,
        beside=_numbers(ask, free_mib),
    )


def not_written(ask: LeaseAsk, error: OSError) -> LeaseDenied:
    return LeaseDenied(
        f"{_wanted(ask)} could be had, but cannot be written down in the state directory "
        f"({error.strerror or error}), so it would not survive a restart. Make room there and ask again.",
        retry_after_s=30.0,
    )


def _wanted(ask: LeaseAsk) -> str:
    where = f" on each of {ask.gpus} GPUs" if ask.gpus > 1 else ""
    return f"{ask.mib:,} MiB{where} for {ask.name}"


def _numbers(ask: LeaseAsk, free_mib: Mapping[str, int]) -> dict[str, object]:
    return {"needed_mib": ask.mib, "gpus": ask.gpus, "free_mib": dict(free_mib)}
