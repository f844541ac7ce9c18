"""What a comparison of cases says, in words: the bottom line, then each change by itself.

Owns the judgement. Requests that are refused or given up count first, waits second: a machine that turns requests away
serves the rest quickly. Every sentence names its figures. Nothing here knows what hardware costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import pairwise

from greenroom.sim.cases import Case, Result
from greenroom.sim.stats import Stats, Waits

# Waits below this are not noticed; differences below this share do not count.
FELT_S = 0.1
SHARE = 0.1
# A change in the share of requests that are not served counts from here on.
LOST_SHARE = 0.005

NEXT_GPU = {2: "a second", 3: "a third", 4: "a fourth", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth"}


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
    """How much better the new case is. Waits decide only if about as many requests are served."""
    return _on_served(old, new) or _on_waits(old.waits, new.waits)


def _on_served(old: Stats, new: Stats) -> Effect:
    """Agents ask again after each answer, so both the share and the number of requests served may change."""
    if new.lost_share > old.lost_share + LOST_SHARE:
        return Effect.WORSE
    fewer_lost = new.lost_share < old.lost_share - LOST_SHARE
    if fewer_lost or new.served > old.served * (1 + SHARE):
        is_much = new.lost_share < old.lost_share / 2 if fewer_lost else new.served > old.served * 1.5
        return Effect.MUCH_BETTER if is_much else Effect.BETTER
    return Effect.WORSE if new.served < old.served * (1 - SHARE) else Effect.NONE


def _on_waits(before: Waits, after: Waits) -> Effect:
    if abs(before.p95_s - after.p95_s) <= max(SHARE * before.p95_s, FELT_S):
        return Effect.NONE
    if after.p95_s > before.p95_s:
        return Effect.WORSE
    return Effect.MUCH_BETTER if after.p95_s < before.p95_s / 2 else Effect.BETTER


def advice(results: Sequence[Result]) -> list[str]:
    """What matters for planning hardware, most important first."""
    known = {result.case: result for result in results}
    # Hardware is compared under the first policy only; policies are compared on every machine.
    first = [result for result in results if result.case.policy == results[0].case.policy]
    sentences = [*_gpus(first, known), *_green_rooms(first, known), *_policies(results, known)]
    return sentences or [_alone(result) for result in results]


def _gpus(results: Sequence[Result], known: dict[Case, Result]) -> Iterable[str]:
    counts = sorted({result.case.gpus for result in results if result.case.gpus is not None})
    for fewer, more in pairwise(counts):
        for case in _cases(results, gpus=more):
            is_next = more == fewer + 1 and more in NEXT_GPU
            what = f"{NEXT_GPU[more]} GPU" if is_next else f"{more} GPUs instead of {fewer}"
            yield _compared(what, known[replace(case, gpus=fewer)], known[case], _beside(case, results, "gpus"))


def _green_rooms(results: Sequence[Result], known: dict[Case, Result]) -> Iterable[str]:
    sizes = sorted({result.case.green_room_mib for result in results if result.case.green_room_mib is not None})
    for smaller, larger in pairwise(sizes):
        for case in _cases(results, green_room_mib=larger):
            before = f"{smaller:,} MiB" if smaller else "none"
            what = f"a green room of {larger:,} MiB instead of {before}"
            old = known[replace(case, green_room_mib=smaller)]
            yield _compared(what, old, known[case], _beside(case, results, "green_room_mib"))


def _policies(results: Sequence[Result], known: dict[Case, Result]) -> Iterable[str]:
    names = list(dict.fromkeys(result.case.policy for result in results))
    for other in names[1:]:
        for case in _cases(results, policy=names[0]):
            what = f"the policy {names[0]} instead of {other}"
            old = known[replace(case, policy=other)]
            yield _compared(what, old, known[case], _beside(case, results, "policy"))


def _cases(results: Sequence[Result], **fixed: object) -> list[Case]:
    return [
        result.case for result in results if all(getattr(result.case, name) == value for name, value in fixed.items())
    ]


def _beside(case: Case, results: Sequence[Result], without: str) -> str:
    """The case that a sentence is about, in parentheses; empty if there is only one."""
    parts = []
    if without != "gpus" and case.gpus is not None and len({result.case.gpus for result in results}) > 1:
        parts.append(f"{case.gpus} GPU{'s' if case.gpus > 1 else ''}")
    if without != "green_room_mib" and len({result.case.green_room_mib for result in results}) > 1:
        parts.append(f"green room {case.green_room_mib:,} MiB" if case.green_room_mib else "no green room")
    return f" ({', '.join(parts)})" if parts else ""


def _compared(what: str, old: Result, new: Result, beside: str) -> str:
    figures = ", ".join(_figures(old.stats, new.stats))
    return f"{what[0].upper()}{what[1:]} would take {figures}{beside}: {_verdict(old.stats, new.stats)}."


def _figures(old: Stats, new: Stats) -> Iterable[str]:
    before, after = old.waits, new.waits
    if old.lost or new.lost or old.served != new.served:
        yield f"requests served from {served(old)} to {served(new)}"
    yield f"the p95 wait from {waited(before, before.p95_s)} to {waited(after, after.p95_s)}"
    yield f"the mean from {waited(before, before.mean_s)} to {waited(after, after.mean_s)}"
    yield f"swaps from {old.swaps:,} to {new.swaps:,}"


def _verdict(old: Stats, new: Stats) -> str:
    found = effect(old, new)
    if not found and max(old.waits.p95_s, new.waits.p95_s) < FELT_S:
        return "no request waits either way"
    return WORDS[found]


def _alone(result: Result) -> str:
    stats = result.stats
    return (
        f"{stats.served:,} of {stats.requests:,} requests were served; half of them waited at most "
        f"{seconds(stats.waits.p50_s)}, 95 of 100 at most {seconds(stats.waits.p95_s)}, with {stats.swaps:,} swaps."
    )


def served(stats: Stats) -> str:
    """`6,696 of 9,960`, or the number alone if that is all."""
    return f"{stats.served:,} of {stats.requests:,}" if stats.lost else f"{stats.served:,}"


def waited(waits: Waits, value: float) -> str:
    """A wait in words; `-` if no request was served, which is not the same as 0."""
    return seconds(value) if waits.count else "-"


def seconds(value: float) -> str:
    """`0.4 s`, `12 s`, `3.5 min`, `2.1 h`."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.1f} min" if value < 7_200 else f"{value / 3_600:.1f} h"
