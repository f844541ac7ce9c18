"""How one case compares with another: by requests that are not served, then by seconds; and its figures in words.

Owns what counts as a difference. Requests that are refused or given up count first, waits second: a machine that turns
requests away serves the rest quickly.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from math import floor

from greenroom.sim.results.stats import Stats

# Waits below this are not noticed; differences below this share do not count.
FELT_S = 0.1
SHARE = 0.1
# A change in the share of requests that are not served counts from here on.
LOST_SHARE = 0.005
# With a p95 wait and a mean delay up to this, and requests served, a machine is good enough: answers take longer.
ENOUGH_S = 1.0


class Effect(IntEnum):
    WORSE = -1
    NONE = 0
    BETTER = 1
    MUCH_BETTER = 2


WORDS = {
    Effect.WORSE: "worse",
    Effect.NONE: "hardly a difference",
    Effect.BETTER: "it helps",
    Effect.MUCH_BETTER: "it helps a lot",
}


def effect(old: Stats, new: Stats) -> Effect:
    """How much better the new case is. Waits decide only if about as many are served, means only if p95s are alike."""
    means = [delays.mean_s(delays.total_s) for delays in (old.all_delays, new.all_delays)]
    on_requests = _on_served(old, new) or _on_starved(old, new)
    return on_requests or _on_seconds(old.waits.p95_s, new.waits.p95_s) or _on_seconds(*means)


def _on_served(old: Stats, new: Stats) -> Effect:
    """Agents ask again after each answer, so both the share and the number of requests served may change."""
    if new.lost_share > old.lost_share + LOST_SHARE:
        return Effect.WORSE
    fewer_lost = new.lost_share < old.lost_share - LOST_SHARE
    if fewer_lost or new.served > old.served * (1 + SHARE):
        is_much = new.lost_share < old.lost_share / 2 if fewer_lost else new.served > old.served * 1.5
        return Effect.MUCH_BETTER if is_much else Effect.BETTER
    return Effect.WORSE if new.served < old.served * (1 - SHARE) else Effect.NONE


def _on_starved(old: Stats, new: Stats) -> Effect:
    """A model that is never served counts, however few requests are for it."""
    before, after = len(old.starved), len(new.starved)
    if before == after:
        return Effect.NONE
    return Effect.BETTER if after < before else Effect.WORSE


def _on_seconds(before_s: float, after_s: float) -> Effect:
    if abs(before_s - after_s) <= max(SHARE * before_s, FELT_S):
        return Effect.NONE
    if after_s > before_s:
        return Effect.WORSE
    return Effect.MUCH_BETTER if after_s < before_s / 2 else Effect.BETTER


def is_enough(stats: Stats) -> bool:
    """True if hardly any request is lost, every model is served, and waits are short."""
    delays = stats.all_delays
    slowest_s = max(stats.waits.p95_s, delays.mean_s(delays.total_s))
    return stats.lost_share <= LOST_SHARE and not stats.starved and slowest_s <= ENOUGH_S


# --- in words ---------------------------------------------------------------------------------------------------------


def judgement(old: Stats, new: Stats) -> str:
    found = effect(old, new)
    if not found and old.served and old.lost == new.lost and not any(_is_felt(stats) for stats in (old, new)):
        return "hardly any request waits either way"
    return WORDS[found]


def _is_felt(stats: Stats) -> bool:
    delays = stats.all_delays
    return max(stats.waits.p95_s, delays.mean_s(delays.total_s)) >= FELT_S


def figures(old: Stats, new: Stats) -> str:
    """`take the p95 wait from 60 s to 20 s, and leave swaps at 12`; figures that read alike are the same."""
    known = list(_compared(old, new))
    taken = [f"{name} from {before} to {after}" for name, before, after in known if before != after]
    left = [f"{name} at {after}" for name, before, after in known if before == after]
    parts = [f"{verb} {', '.join(names)}" for verb, names in (("take", taken), ("leave", left)) if names]
    return ", and ".join(parts) + _waits_of_one(old, new)


def _compared(old: Stats, new: Stats) -> Iterator[tuple[str, str, str]]:
    """The name of each figure, and its values."""
    if old.lost or new.lost or old.served != new.served:
        yield "requests served", _of_all(old), _of_all(new)
    if old.served and new.served:
        yield from _compared_seconds(old, new)
    yield "swaps", f"{old.swaps:,}", f"{new.swaps:,}"


def _compared_seconds(old: Stats, new: Stats) -> Iterator[tuple[str, str, str]]:
    """Both serve requests."""
    yield "the p95 wait", seconds(old.waits.p95_s), seconds(new.waits.p95_s)
    yield "the mean", seconds(old.waits.mean_s), seconds(new.waits.mean_s)
    slow_s, then_s = (stats.all_delays.mean_s(stats.all_delays.slow_s) for stats in (old, new))
    if _on_seconds(slow_s, then_s):
        yield "what sharing a GPU adds to an answer", seconds(slow_s), seconds(then_s)


def _waits_of_one(old: Stats, new: Stats) -> str:
    """The waits of the case that serves requests, where the other serves none; else nothing."""
    if new.served and not old.served:
        p95, mean = seconds(new.waits.p95_s), seconds(new.waits.mean_s)
        return f", with a p95 wait of {p95} and a mean of {mean} where none was served before"
    if old.served and not new.served:
        return f"; none is served then, where the p95 wait was {seconds(old.waits.p95_s)}"
    return ""


def counted(count: int, noun: str) -> str:
    """`1 swap`, `1,802 swaps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def served(stats: Stats) -> str:
    """`6,696 of 9,960 requests`, `all 9,960 requests` or `the only request`."""
    if stats.requests == 1 and not stats.lost:
        return "the only request"
    return f"{_of_all(stats)} request{'' if stats.requests == 1 else 's'}"


def _of_all(stats: Stats) -> str:
    return f"{stats.served:,} of {stats.requests:,}" if stats.lost else f"all {stats.served:,}"


def seconds(value: float) -> str:
    """`0.4 s`, `12 s`, `3.5 min`, `2.1 h`. Rounds the tenths that tables show, and halves of them up."""
    tenths_s = round(value, 1)
    if tenths_s < 10:
        return f"{tenths_s:.1f} s"
    if tenths_s < 120:
        return f"{floor(tenths_s + 0.5)} s"
    count, unit = (tenths_s / 6, "min") if tenths_s < 7_200 else (tenths_s / 360, "h")
    return f"{floor(count + 0.5) / 10:.1f} {unit}"
