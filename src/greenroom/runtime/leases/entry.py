"""One lease as the gateway keeps it, from the asking to its end.

Owns what is known of it and how it is shown. Never decides: the scheduler grants, `leasing.py` ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from greenroom.core.model import LeaseId, SlotId
from greenroom.leases.journal import Kept
from greenroom.leases.records import Lease, LeaseAsk

# It was told to more than one call, or to one that has no name: whoever of them leaves, another may hold it.
SEVERAL: Final = ""


def core_id(lease: str) -> LeaseId:
    """The id by which the scheduler knows it. Requests have ids beside it, and a caller may call a lease anything."""
    return LeaseId(f"lease:{lease}")


@dataclass(slots=True, eq=False)
class LeaseEntry:
    ask: LeaseAsk
    # Done when it is held, with the error if it never will be.
    settled: asyncio.Future[None]
    # How many calls wait for it, and which was told that it is held: when there is neither, it is given up.
    askers: int = 0
    told_to: str | None = None
    # Until when it is waited for, and whether the scheduler knows of it: not while it stands behind another lease.
    give_up_at: float | None = None
    is_asked: bool = False
    token: int = 0
    claim: Mapping[str, int] = field(default_factory=dict)
    slot: SlotId | None = None
    is_held: bool = False
    # How long it lasts at first: the rest of its time, where it is of an earlier run.
    lasts_s: float | None = None
    expires_at: float = 0.0
    # When that it was heard of was last written down.
    written_at: float = 0.0
    recall_at: float | None = None
    # The next look at whether it was heard of in time, and at whether it left when it was asked to.
    watch: asyncio.TimerHandle | None = None
    overdue: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        return self.ask.id

    @property
    def is_waiting(self) -> bool:
        """Neither held nor about to be."""
        return self.slot is None

    def kept(self, heard_at: float) -> Kept:
        """As it is written down, heard of at this time of the wall clock."""
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
    """The lease of an earlier run, to be asked for on the same devices; it lasts so long if it is not heard of."""
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
    """Whether it stands behind another of these, which are in the order they came; it need not be among them yet."""
    for other in in_order:
        if other is entry:
            return False
        if _goes_first(other, entry):
            return True
    return False


def may_ask(in_order: Iterable[LeaseEntry]) -> list[LeaseEntry]:
    """Who stood behind another and does so no longer; the most urgent first."""
    # Nobody stands behind one that is held; hundreds of those must not be passed again for each that waits.
    waiting = [entry for entry in in_order if entry.is_waiting]
    free = [entry for entry in waiting if not entry.is_asked and not is_behind(entry, waiting)]
    return sorted(free, key=lambda entry: entry.ask.priority)


def _goes_first(earlier: LeaseEntry, later: LeaseEntry) -> bool:
    """It waits too, is as urgent, and could use the same GPU."""
    if not earlier.is_waiting or earlier.ask.priority > later.ask.priority:
        return False
    mine, others = set(later.ask.devices), set(earlier.ask.devices)
    return not mine or not others or not mine.isdisjoint(others)


# Half its TTL: who renews every third of it, as our clients do, is heard of well within.
GRACE_SHARE: Final = 0.5
# Clients ask again every second while the gateway is away, and the fastest machine takes some to be back.
GRACE_MIN_S: Final = 10.0


def restart_grace_s(ttl_s: float) -> float:
    return max(GRACE_MIN_S, ttl_s * GRACE_SHARE)


def lasts_s(kept: Kept, wall_s: float) -> float:
    """From the start of this run until it is lost, if its holder is not heard of. A clock that jumped costs nobody more
    than the time that was left."""
    if kept.heard_at is None:
        return kept.ttl_s
    left_s = max(0.0, kept.heard_at + kept.ttl_s - wall_s)
    return min(kept.ttl_s, left_s + restart_grace_s(kept.ttl_s))


def must_journal_renewal(ttl_s: float, since_s: float) -> bool:
    """Whether a renewal is, so long after the last that was. Where the grace is a whole TTL none has to be."""
    grace_s = restart_grace_s(ttl_s)
    return grace_s < ttl_s and since_s >= grace_s
