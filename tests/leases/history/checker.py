"""What a history must show. Pure: events in, sentences about what is wrong out.

A program believes in a lease from the moment it is told, until it begins to release it, is told that it is lost, or its
TTL has passed by its own clock since it last began to renew. One that goes on after that is fenced off by its token, so
only these beliefs may not add up to more than there is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.leases.history.events import Event

SHOWN_MAX = 20


@dataclass(frozen=True, slots=True)
class Belief:
    lease: str
    token: int
    claim: Mapping[str, int]
    starts_at: float
    ends_at: float


def check(events: Sequence[Event], capacity: Mapping[str, int]) -> list[str]:
    """Everything that is wrong with this history; nothing, if it is a good one."""
    ordered = sorted(events, key=lambda event: event.at)
    found = [*overlaps(beliefs(ordered), capacity), *lost_releases(ordered), *tokens_that_went_back(ordered)]
    found += [*full_books(ordered, capacity), *stuck_leases(ordered)]
    return found[:SHOWN_MAX]


def beliefs(events: Iterable[Event]) -> list[Belief]:
    by_lease: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    pending: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.op == "acquire" and event.phase == "invoke":
            pending[event.client, event.lease].append(event)
        elif event.op == "acquire" and event.phase == "ok":
            key = (event.client, event.lease, event.token)
            by_lease[key] += [*pending.pop((event.client, event.lease), []), event]
        elif event.op in ("renew", "release"):
            by_lease[event.client, event.lease, event.token].append(event)
    return [belief for history in by_lease.values() for belief in _beliefs_in(history)]


def _beliefs_in(history: Sequence[Event]) -> Iterator[Belief]:
    """One lease as its holder saw it. Each answer is worth a TTL from the moment at which it was asked for."""
    asked_at: dict[str, float] = {}
    for number, event in enumerate(history):
        if event.phase == "invoke":
            asked_at[event.op] = event.at
        elif event.phase == "ok" and event.op in ("acquire", "renew"):
            ends_at = asked_at[event.op] + event.ttl_s
            for later in history[number + 1 :]:
                is_end = (later.op, later.phase) in (("release", "invoke"), ("renew", "refused"))
                ends_at = min(ends_at, later.at) if is_end else ends_at
            if ends_at > event.at:
                yield Belief(event.lease, event.token, event.claim, event.at, ends_at)


def overlaps(held: Iterable[Belief], capacity: Mapping[str, int]) -> Iterator[str]:
    """Where the leases believed to be held add up to too much; each such combination is named once."""
    ordered = sorted(held, key=lambda belief: belief.starts_at)
    for device, mib in capacity.items():
        together: list[Belief] = []
        named: set[frozenset[str]] = set()
        for belief in (one for one in ordered if device in one.claim):
            # The sum can only become too high where some belief begins.
            together = [one for one in together if one.ends_at > belief.starts_at] + [belief]
            # A lease that is renewed early is believed in twice, and counts once.
            company = {one.lease: one for one in together}
            total = sum(one.claim[device] for one in company.values())
            if total > mib and frozenset(company) not in named:
                named.add(frozenset(company))
                names = ", ".join(f"{one.lease} (token {one.token})" for one in company.values())
                yield f"{device}: {total} of {mib} MiB at {belief.starts_at:.3f}: {names}"


def lost_releases(events: Sequence[Event]) -> Iterator[str]:
    """A lease that was released and answered must not be seen by a later look."""
    released = {
        (event.lease, event.token): event.at for event in events if (event.op, event.phase) == ("release", "ok")
    }
    for event in _looks(events):
        gone_at = released.get((event.lease, event.token))
        if gone_at is not None and float(event.text) > gone_at:
            yield f"{event.lease} (token {event.token}) was released at {gone_at:.3f} and seen at {event.at:.3f}"


def tokens_that_went_back(events: Sequence[Event]) -> Iterator[str]:
    """A grant that was asked for after another was answered has a higher token."""
    highest: Event | None = None
    floor_of: dict[tuple[str, str], Event | None] = {}
    for event in events:
        if event.op != "acquire":
            continue
        if event.phase == "invoke":
            floor_of[event.client, event.lease] = highest
        elif event.phase == "ok":
            before = floor_of.get((event.client, event.lease))
            if before is not None and event.token <= before.token:
                yield f"{event.lease} has token {event.token} after {before.lease} had {before.token}"
            highest = event if highest is None or event.token > highest.token else highest


def full_books(events: Sequence[Event], capacity: Mapping[str, int]) -> Iterator[str]:
    """A look at all leases at once never shows more than there is."""
    looks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for event in _looks(events):
        for device, mib in event.claim.items():
            looks[event.text][device] += mib
    for look, taken in looks.items():
        for device, mib in taken.items():
            if mib > capacity[device]:
                yield f"{device}: {mib} of {capacity[device]} MiB in the book at {look}"


def stuck_leases(events: Sequence[Event]) -> Iterator[str]:
    """When all programs have ended and their TTLs have passed, nothing is left and everything can be had."""
    ends = [event for event in events if event.op == "end"]
    if not ends:
        yield "the history has no end: it was not checked whether anything was left"
    for event in ends:
        if event.phase != "ok":
            yield f"at the end: {event.text}"


def _looks(events: Iterable[Event]) -> Iterator[Event]:
    """Each lease seen by a listing of all of them; `text` is when that listing began."""
    return (event for event in events if event.op == "seen")
