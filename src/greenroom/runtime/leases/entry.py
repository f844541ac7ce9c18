"""One lease as the gateway keeps it: its record, its place in the queue, and how long it outlasts a restart.

Owns what is known of a lease and how it is shown. Never decides: the scheduler grants, `local.py` ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from greenroom.core.model import LeaseId, SlotId
from greenroom.errors import GreenroomError
from greenroom.leases.records import Lease, LeaseAsk, taken
from greenroom.runtime.leases.journal import Kept

# The lease was reported to several calls, or to one without a name: if one of them leaves, another may hold it.
SEVERAL: Final = ""


def core_id(lease: str) -> LeaseId:
    """The scheduler's id of this lease. The prefix keeps it apart from request ids: a caller may choose any id."""
    return LeaseId(f"lease:{lease}")


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
        """The same holder may ask again for the same. Raises LeaseTaken for any other request.

        Two programs with one lease would use its memory twice.
        """
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

    def kept(self, heard_at: float) -> Kept:
        """The record for the journal; `heard_at` is the wall-clock time of the last renewal."""
        ask = self.ask
        return Kept(
            id=ask.id,
            name=ask.name,
            token=self.token,
            claim=self.claim,
            priority=ask.priority,
            preemptible=ask.preemptible,
            grace_s=ask.grace_s,
            ttl_s=ask.ttl_s,
            holder=ask.holder,
            heard_at=heard_at,
        )

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
    return LeaseEntry(
        LeaseAsk(
            id=kept.id,
            name=kept.name,
            mib=max(kept.claim.values(), default=0),
            gpus=max(1, len(kept.claim)),
            devices=tuple(sorted(kept.claim)),
            priority=kept.priority,
            preemptible=kept.preemptible,
            grace_s=kept.grace_s,
            ttl_s=kept.ttl_s,
            holder=kept.holder,
        ),
        settled,
        told_to=SEVERAL,
        token=kept.token,
        lasts_s=lasts_s,
    )


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
    """Seconds from the start of this run until a lease of an earlier run expires without a renewal.

    At most its TTL, so a clock that jumped cannot extend it.
    """
    if kept.heard_at is None:
        return kept.ttl_s
    left_s = max(0.0, kept.heard_at + kept.ttl_s - wall_s)
    return min(kept.ttl_s, left_s + restart_grace_s(kept.ttl_s))


def must_journal_renewal(ttl_s: float, since_s: float) -> bool:
    """True if this renewal must be journaled. Where the grace is at least the TTL, none must be."""
    grace_s = restart_grace_s(ttl_s)
    return grace_s < ttl_s and since_s >= grace_s
