"""What a comparison of cases says, in words: each change by itself, and the bottom line.

Owns the advice. The first case is usually the machine as it is; every other is a change to it. `effect.py` says which
of two is better, `bottleneck.py` what requests wait for. Every sentence names its figures. Nothing here depends on what
hardware costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

from greenroom.sim.cases import Case, CaseResult
from greenroom.sim.results.bottleneck import bottleneck, never_served, why, without_room
from greenroom.sim.results.effect import counted, effect, figures, is_enough, judgement, seconds, served
from greenroom.sim.results.stats import Stats, Waits

# Up to so many cases, all of them are worth a closer look.
CHOSEN_MAX = 4

NEXT_GPU = {2: "a second", 3: "a third", 4: "a fourth", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth"}


# --- one change -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """Two cases that differ in one option, and what that would be."""

    what: str
    old: CaseResult
    new: CaseResult

    def sentence(self) -> str:
        old, new = self.old.stats, self.new.stats
        return f"{_capital(self.what)} would {figures(old, new)}: {judgement(old, new)}."


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


# --- the whole comparison ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advice:
    """What to say at the end, and a sentence for each change that was tried. `best` names the best change, if one
    helps; it begins a sentence of the bottom line. `chosen` are the cases worth a closer look: the first, that of the
    best change, the best of all; or all if they are few."""

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
        why(first, results),
        *without_room(first),
        *never_served(first.stats),
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


def _more_gpus(old: int, new: int) -> str:
    return f"{NEXT_GPU[new]} GPU" if new == old + 1 and new in NEXT_GPU else f"{counted(new, 'GPU')} instead of {old}"


def _green_room(old: int, new: int) -> str:
    return f"{_room(new)} instead of {f'{old:,} MiB' if old else 'none'}"


def _room(mib: int) -> str:
    return f"a green room of {mib:,} MiB" if mib else "no green room"


# Fields of `Case`, and how a change of each is called.
OPTIONS: Mapping[str, Callable[[Any, Any], str]] = {
    "gpus": _more_gpus,
    "gpu_mib": lambda old, new: f"GPUs of {new:,} MiB instead of {old:,}",
    "green_room_mib": _green_room,
    "concurrency": lambda old, new: f"a concurrency of {new} instead of {old}",
    "policy": lambda old, new: f"the policy {new} instead of {old}",
}


def _values(option: str, known: Mapping[Case, CaseResult]) -> list[Any]:
    """In the order in which they were given."""
    return list(dict.fromkeys(getattr(case, option) for case in known))


def _change(option: str, first: CaseResult, old: Any, new: Any, known: Mapping[Case, CaseResult]) -> Change:
    """From one value of this option to another; the rest is as in the first case."""
    before, after = (known[replace(first.case, **{option: value})] for value in (old, new))
    return Change(OPTIONS[option](old, new), before, after)


def _steps(option: str, first: CaseResult, known: Mapping[Case, CaseResult]) -> list[Change]:
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
        lines = [f"{best_change(best)} It would {figures(first.stats, best.new.stats)}."]
        others = [other.what for other in single if other is not best and not effect(best.new.stats, other.new.stats)]
        lines += [f"About as good: {', or '.join(others)}."] if others else []
    if whole is not (first if best is None else best.new):
        p95, delays = seconds(whole.stats.waits.p95_s), whole.stats.all_delays
        begins = "Better still" if best else "Together they do"
        lines.append(
            f"{begins}, the best of all cases: {whole.case.label}. It serves {served(whole.stats)} with a p95 "
            f"wait of {p95} and a mean delay of {seconds(delays.mean_s(delays.total_s))}."
        )
    if whole is not first and not is_enough(whole.stats) and bottleneck(whole.stats.all_delays):
        lines.append(why(whole, results, "The bottleneck then"))
    return lines


def _worthwhile(option: str, first: CaseResult, known: Mapping[Case, CaseResult]) -> list[Change]:
    """The smallest change of this option that is good enough, or that no further one improves on; if it helps."""
    start = getattr(first.case, option)
    changes = [_change(option, first, start, value, known) for value in _values(option, known)[1:]]
    found: Change | None = None
    for change in changes:
        reached = first if found is None else found.new
        if not is_enough(reached.stats) and _improves(reached, change.new, first):
            found = change
    return [] if found is None else [found]


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
