"""What a comparison of cases says, in words: each change by itself, what requests wait for, and the bottom line.

Owns the judgement. Requests that are refused or given up count first, waits second: a machine that turns requests away
serves the rest quickly. The first case is usually the machine as it is; every other is a change to it. Every sentence
names its figures. Nothing here depends on what hardware costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import reduce
from itertools import pairwise
from typing import Any

from greenroom.sim.cases import Case, CaseResult
from greenroom.sim.results.stats import Stats, Waits
from greenroom.sim.truth import Delays

# Waits below this are not noticed; differences below this share do not count.
FELT_S = 0.1
SHARE = 0.1
# A change in the share of requests that are not served counts from here on.
LOST_SHARE = 0.005
# With a p95 wait and a mean delay up to this, and all requests served, a machine is good enough: answers take longer.
ENOUGH_S = 1.0

# Models that are named in one sentence.
NAMED_MAX = 5
# Up to so many cases, all of them are worth a closer look.
CHOSEN_MAX = 4

NEXT_GPU = {2: "a second", 3: "a third", 4: "a fourth", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth"}


# --- one change -------------------------------------------------------------------------------------------------------


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
    return _on_served(old, new) or _on_seconds(old.waits.p95_s, new.waits.p95_s) or _on_seconds(*means)


def _on_served(old: Stats, new: Stats) -> Effect:
    """Agents ask again after each answer, so both the share and the number of requests served may change."""
    if new.lost_share > old.lost_share + LOST_SHARE:
        return Effect.WORSE
    fewer_lost = new.lost_share < old.lost_share - LOST_SHARE
    if fewer_lost or new.served > old.served * (1 + SHARE):
        is_much = new.lost_share < old.lost_share / 2 if fewer_lost else new.served > old.served * 1.5
        return Effect.MUCH_BETTER if is_much else Effect.BETTER
    return Effect.WORSE if new.served < old.served * (1 - SHARE) else Effect.NONE


def _on_seconds(before_s: float, after_s: float) -> Effect:
    if abs(before_s - after_s) <= max(SHARE * before_s, FELT_S):
        return Effect.NONE
    if after_s > before_s:
        return Effect.WORSE
    return Effect.MUCH_BETTER if after_s < before_s / 2 else Effect.BETTER


@dataclass(frozen=True, slots=True)
class Change:
    """Two cases that differ in one option, and what that would be."""

    what: str
    old: CaseResult
    new: CaseResult

    def sentence(self) -> str:
        figures = _figures(self.old.stats, self.new.stats)
        return f"{_capital(self.what)} would {figures}: {_verdict(self.old.stats, self.new.stats)}."


def _verdict(old: Stats, new: Stats) -> str:
    found = effect(old, new)
    if not found and old.served and not any(_is_felt(stats) for stats in (old, new)):
        return "hardly any request waits either way"
    return WORDS[found]


def _is_felt(stats: Stats) -> bool:
    delays = stats.all_delays
    return max(stats.waits.p95_s, delays.mean_s(delays.total_s)) >= FELT_S


def _figures(old: Stats, new: Stats) -> str:
    """`take the p95 wait from 60 s to 20 s, and leave swaps at 12`; figures that read alike are the same."""
    known = list(_compared(old, new))
    taken = [f"{name} from {before} to {after}" for name, before, after in known if before != after]
    left = [f"{name} at {after}" for name, before, after in known if before == after]
    parts = [f"{verb} {', '.join(names)}" for verb, names in (("take", taken), ("leave", left)) if names]
    return ", and ".join(parts)


def _compared(old: Stats, new: Stats) -> Iterator[tuple[str, str, str]]:
    """The name of each figure, and its values."""
    if old.lost or new.lost or old.served != new.served:
        yield "requests served", _of_all(old), _of_all(new)
    before, after = old.waits, new.waits
    yield "the p95 wait", waited(before, before.p95_s), waited(after, after.p95_s)
    yield "the mean", waited(before, before.mean_s), waited(after, after.mean_s)
    slow_s, then_s = (stats.all_delays.mean_s(stats.all_delays.slow_s) for stats in (old, new))
    if _on_seconds(slow_s, then_s):
        yield "what sharing a GPU adds to an answer", seconds(slow_s), seconds(then_s)
    yield "swaps", f"{old.swaps:,}", f"{new.swaps:,}"


# --- what requests wait for -------------------------------------------------------------------------------------------


class Cause(Enum):
    NOT_THERE = "not there"
    FULL = "full"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Remedy:
    """What may help, and the options of a case that try it by larger values; none if no case can."""

    words: str
    options: frozenset[str] = frozenset()


MORE_MEMORY = Remedy("more GPU memory", frozenset({"gpus", "gpu_mib"}))
BOTTLENECKS = {
    Cause.NOT_THERE: (
        "models are not there, or there is no room for them",
        (MORE_MEMORY, Remedy("a larger green room", frozenset({"green_room_mib"}))),
    ),
    Cause.FULL: ("models are there but full", (Remedy("a higher concurrency", frozenset({"concurrency"})),)),
    # A further GPU is no remedy by itself: models stay together while one GPU holds them.
    Cause.SLOW: (
        "answers share the compute of a GPU and are slow",
        (Remedy("faster GPUs"), Remedy("busy models on GPUs of their own (devices)")),
    ),
}
FIRST_LOADS = (
    "models are loaded for the first time",
    (Remedy("preloading them (preload: true)"), Remedy("faster loads, but not more memory")),
)
IDLE_LOADS = (
    "models leave when they are idle and have to come back",
    (
        Remedy("keeping them ready for longer (ttl_s, stay_warm)"),
        Remedy("letting them sleep in a larger green room", frozenset({"green_room_mib"})),
    ),
)
TOO_LARGE = ("models fit on no GPU that they may use", (Remedy("larger GPUs", frozenset({"gpu_mib"})),))


def bottleneck(delays: Delays) -> Cause | None:
    """What costs requests most: by those not served where there are some, else by time. None: hardly anything does."""
    if _loses(delays):
        return Cause.NOT_THERE if delays.lost_not_there >= delays.lost_full else Cause.FULL
    if delays.mean_s(delays.total_s) < FELT_S:
        return None
    by_cause = ((delays.not_there_s, Cause.NOT_THERE), (delays.full_s, Cause.FULL), (delays.slow_s, Cause.SLOW))
    return max(by_cause, key=lambda pair: pair[0])[1]


def _loses(delays: Delays) -> bool:
    return delays.lost > LOST_SHARE * (delays.served + delays.lost)


def _why(result: CaseResult, results: Sequence[CaseResult], begins: str = "The bottleneck") -> str:
    """What requests wait for in this case, and what may help against it, unless it was tried and does not."""
    delays = result.stats.all_delays
    cause = bottleneck(delays)
    if cause is None:
        return "Hardly any request waits."
    why, remedies = BOTTLENECKS[cause]
    if delays.lost_too_large > delays.lost / 2:
        why, remedies = TOO_LARGE
    elif cause is Cause.NOT_THERE:
        why, remedies = _why_not_there(delays)
    left = [remedy.words for remedy in remedies if not _failed(remedy, result, results)]
    what_helps = f" What may help: {' or '.join(left)}." if left else ""
    return f"{begins}: {why} ({_shares(delays)}).{what_helps}"


def _failed(remedy: Remedy, result: CaseResult, results: Sequence[CaseResult]) -> bool:
    """True if there are cases with more of it than this one, and none of them is better."""
    tried = [other for other in results if _has_more(other.case, result.case, remedy.options)]
    return bool(tried) and not any(effect(result.stats, other.stats) > 0 for other in tried)


def _has_more(case: Case, than: Case, options: Collection[str]) -> bool:
    """True if the cases differ in these options alone, and none of the values is smaller."""
    before = {name: getattr(than, name) for name in options}
    if case == than or replace(case, **before) != than:
        return False
    return all((getattr(case, name) or 0) >= (value or 0) for name, value in before.items())


def _why_not_there(delays: Delays) -> tuple[str, tuple[Remedy, ...]]:
    """No room, unless models are not there mostly because they never were, or left when idle."""
    first, idle, whole = delays.first_load_s, delays.idle_load_s, delays.not_there_s
    if _loses(delays):
        first, idle, whole = delays.lost_first_load, delays.lost_idle_load, delays.lost_not_there
    if first + idle <= whole / 2:
        return BOTTLENECKS[Cause.NOT_THERE]
    return FIRST_LOADS if first >= idle else IDLE_LOADS


def _shares(delays: Delays) -> str:
    """What the bottleneck was found by: requests that are lost, or the seconds of those served."""
    if _loses(delays):
        not_there = delays.lost_not_there - delays.lost_too_large
        lost = (("not there", not_there), ("full", delays.lost_full), ("too large", delays.lost_too_large))
        return "requests lost: " + ", ".join(f"{name} {count:,}" for name, count in lost if count)
    parts = (("not there", delays.not_there_s), ("full", delays.full_s), ("slow", delays.slow_s))
    return "on average " + ", ".join(f"{name} {seconds(delays.mean_s(value))}" for name, value in parts)


def _too_large(stats: Stats) -> list[str]:
    """Which models can never be served, if there are some."""
    lost = {model: delays.lost_too_large for model, delays in stats.delays.items() if delays.lost_too_large}
    if not lost:
        return []
    fit, they, them = ("fits", "it", "it") if len(lost) == 1 else ("fit", "they", "them")
    requests = counted(sum(lost.values()), "request")
    return [f"{_named(lost)} {fit} on no GPU that {they} may use: {requests} for {them} cannot be served."]


def _never_served(stats: Stats) -> list[str]:
    """Which models fit, but were not served once, if there are some."""
    lost = {
        model: delays.lost
        for model, delays in stats.delays.items()
        if delays.lost and not (delays.served or delays.lost_too_large)
    }
    return [f"None of the {counted(sum(lost.values()), 'request')} for {_named(lost)} is served."] if lost else []


def _named(lost: Mapping[str, int]) -> str:
    """The models with the most lost requests."""
    first = sorted(lost, key=lambda model: (-lost[model], model))[:NAMED_MAX]
    more = f" and {len(lost) - NAMED_MAX} more" if len(lost) > NAMED_MAX else ""
    return f"{', '.join(first)}{more}"


# --- the whole comparison ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advice:
    """What to say at the end, and a sentence for each change that was tried.

    `best` names the best change, if one helps; it begins a sentence of the bottom line. `chosen` are the cases worth a
    closer look: the first, that of the best change, the best of all; or all if they are few.
    """

    bottom_line: list[str]
    changes: list[str]
    best: str | None
    chosen: list[CaseResult]


def advice(results: Sequence[CaseResult], wait_max_s: float | None = None) -> Advice:
    """Callers that do not stream are refused after `wait_max_s`, if that is given."""
    first = results[0]
    said = [
        _first_case(first),
        *_too_late(first.stats, wait_max_s),
        _why(first, results),
        *_too_large(first.stats),
        *_never_served(first.stats),
    ]
    if len(results) == 1:
        return Advice(said, [], None, [first])
    known = {result.case: result for result in results}
    steps = [step for option in OPTIONS for step in _steps(option, first, known)]
    single = [change for option in OPTIONS for change in _worthwhile(option, first, known)]
    best = reduce(_better, single) if single else None
    whole = _best_of_all(first if best is None else best.new, results)
    lines = _best_buy(results, best, single, whole)
    if any((one.case.gpus, one.case.gpu_mib) != (first.case.gpus, first.case.gpu_mib) for one in results):
        lines.append("What hardware costs is not known here.")
    chosen = list({one.case: one for one in (first, best.new if best else first, whole)}.values())
    return Advice(
        [*said, *lines],
        [step.sentence() for step in steps],
        best_change(best) if best else None,
        list(results) if len(results) <= CHOSEN_MAX else chosen,
    )


@dataclass(frozen=True, slots=True)
class CaseField:
    """A field of `Case`, and how a change of it is called."""

    name: str
    words: Callable[[Any, Any], str]


def _more_gpus(old: int, new: int) -> str:
    return f"{NEXT_GPU[new]} GPU" if new == old + 1 and new in NEXT_GPU else f"{counted(new, 'GPU')} instead of {old}"


def _green_room(old: int, new: int) -> str:
    return f"{_room(new)} instead of {f'{old:,} MiB' if old else 'none'}"


def _room(mib: int) -> str:
    return f"a green room of {mib:,} MiB" if mib else "no green room"


OPTIONS = (
    CaseField("gpus", _more_gpus),
    CaseField("gpu_mib", lambda old, new: f"GPUs of {new:,} MiB instead of {old:,}"),
    CaseField("green_room_mib", _green_room),
    CaseField("concurrency", lambda old, new: f"a concurrency of {new} instead of {old}"),
    CaseField("policy", lambda old, new: f"the policy {new} instead of {old}"),
)


def _values(option: CaseField, known: Mapping[Case, CaseResult]) -> list[Any]:
    """In the order in which they were given."""
    return list(dict.fromkeys(getattr(case, option.name) for case in known))


def _change(option: CaseField, first: CaseResult, old: Any, new: Any, known: Mapping[Case, CaseResult]) -> Change:
    """From one value of this option to another; the rest is as in the first case."""
    before, after = (known[replace(first.case, **{option.name: value})] for value in (old, new))
    return Change(option.words(old, new), before, after)


def _steps(option: CaseField, first: CaseResult, known: Mapping[Case, CaseResult]) -> list[Change]:
    return [_change(option, first, old, new, known) for old, new in pairwise(_values(option, known))]


def best_change(change: Change) -> str:
    return f"The best single change: {change.what}."


def _best_buy(
    results: Sequence[CaseResult], best: Change | None, single: Sequence[Change], whole: CaseResult
) -> list[str]:
    """The best of single changes, others that are as good, and the best of all cases if that is better still."""
    first = results[0]
    if best is None:
        needless = is_enough(first.stats)
        lines = [f"None of the changes tried {'is needed' if needless else 'helps noticeably by itself'}."]
    else:
        lines = [f"{best_change(best)} It would {_figures(first.stats, best.new.stats)}."]
        others = [other.what for other in single if other is not best and not effect(best.new.stats, other.new.stats)]
        lines += [f"About as good: {', or '.join(others)}."] if others else []
    if whole is not (first if best is None else best.new):
        p95 = waited(whole.stats.waits, whole.stats.waits.p95_s)
        lines.append(
            f"Better still, the best of all cases: {whole.case.label}. It serves {served(whole.stats)} with a p95 "
            f"wait of {p95}."
        )
    if whole is not first and not is_enough(whole.stats) and bottleneck(whole.stats.all_delays):
        lines.append(_why(whole, results, "The bottleneck then"))
    return lines


def _worthwhile(option: CaseField, first: CaseResult, known: Mapping[Case, CaseResult]) -> list[Change]:
    """The smallest change of this option that is good enough, or that no further one improves on; if it helps."""
    start = getattr(first.case, option.name)
    changes = [_change(option, first, start, value, known) for value in _values(option, known)[1:]]
    found: Change | None = None
    for change in changes:
        reached = first if found is None else found.new
        if not is_enough(reached.stats) and _improves(reached, change.new, first):
            found = change
    return [] if found is None else [found]


def is_enough(stats: Stats) -> bool:
    delays = stats.all_delays
    slowest_s = max(stats.waits.p95_s, delays.mean_s(delays.total_s))
    return stats.lost_share <= LOST_SHARE and slowest_s <= ENOUGH_S


def _improves(one: CaseResult, other: CaseResult, first: CaseResult) -> bool:
    """True if the other is better than both: many steps must not add up to what a single one may not cost."""
    return effect(one.stats, other.stats) > 0 and effect(first.stats, other.stats) > 0


def _better(one: Change, other: Change) -> Change:
    return other if effect(one.new.stats, other.new.stats) > 0 else one


def _best_of_all(best: CaseResult, results: Sequence[CaseResult]) -> CaseResult:
    """This one, unless it is not good enough and another is noticeably better."""
    if is_enough(best.stats):
        return best
    return reduce(lambda one, other: other if _improves(one, other, results[0]) else one, results, best)


def _first_case(result: CaseResult) -> str:
    stats, which = result.stats, "As it is" if result.is_as_configured else "In the first case"
    if not stats.requests:
        return f"{which} ({result.case.label}), no request arrives."
    verb = "is" if 1 in (stats.served, stats.requests) else "are"
    with_swaps = f"with {counted(stats.swaps, 'swap')}"
    return f"{which} ({result.case.label}), {served(stats)} {verb} served{_how_long(stats.waits)}, {with_swaps}."


def _too_late(stats: Stats, wait_max_s: float | None) -> list[str]:
    waits = stats.waits
    if wait_max_s is None or waits.max_s <= wait_max_s:
        return []
    late = 1.0 - max((share for wait_s, share in waits.curve if wait_s <= wait_max_s), default=0.0)
    how_many = f"About {late:.0%}" if late >= 0.01 else "Fewer than 1%"
    return [
        f"{how_many} of those served wait for more than {seconds(wait_max_s)}: a caller that does not stream is "
        "refused by then."
    ]


def _how_long(waits: Waits) -> str:
    """Empty if no request was served."""
    if waits.count <= 1:
        return f"; it waits {seconds(waits.max_s)}" if waits.count else ""
    return f"; half of them wait at most {seconds(waits.p50_s)}, 95 of 100 at most {seconds(waits.p95_s)}"


# --- words ------------------------------------------------------------------------------------------------------------


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


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
