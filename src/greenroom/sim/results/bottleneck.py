"""What requests wait for in a case, what may help against it, and which models are not served at all. Owns the causes
and their remedies. A remedy that another case has tried in vain is not named."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from greenroom.sim.cases import Case, CaseResult
from greenroom.sim.results.effect import FELT_S, LOST_SHARE, SHARE, counted, effect, seconds
from greenroom.sim.results.stats import Stats
from greenroom.sim.truth import Delays

# Models that are named in one sentence.
NAMED_MAX = 5
# A cause of less than this share of what requests wait for, or are lost by, has no remedies of its own.
WEIGHTY = 0.25


class Cause(Enum):
    NOT_THERE = "not there"
    FULL = "full"
    SLOW = "slow"
    TOO_LARGE = "too large"
    KEPT_OUT = "kept out"
    NO_GPU = "no such GPU"


# Of requests that could be served; the others never can be.
OF_WAITS = (Cause.NOT_THERE, Cause.FULL, Cause.SLOW)


@dataclass(frozen=True, slots=True)
class Remedy:
    """What may help, and the options of a case that try it by larger values; none if no case can."""

    words: str
    options: frozenset[str] = frozenset()


HIGHER_CONCURRENCY = Remedy("a higher concurrency", frozenset({"concurrency"}))
MORE_GPUS = Remedy("more GPUs", frozenset({"gpus"}))
LARGER_GPUS = Remedy("larger GPUs", frozenset({"gpu_mib"}))
OTHER_GPUS = Remedy("letting models use other GPUs (devices)")
MORE_COMPUTE = (Remedy("faster GPUs"), MORE_GPUS, OTHER_GPUS)
GREEN_ROOM = frozenset({"green_room_mib"})
PRELOADING = Remedy("preloading models (preload: true)")
BOTTLENECKS = {
    Cause.NOT_THERE: (
        "models are not there, or there is no room for them",
        (MORE_GPUS, LARGER_GPUS, Remedy("a larger green room", GREEN_ROOM), OTHER_GPUS),
    ),
    Cause.FULL: ("models are there but full", (HIGHER_CONCURRENCY,)),
    Cause.SLOW: ("answers share the compute of a GPU and are slow", MORE_COMPUTE),
    Cause.KEPT_OUT: (
        "models find no room beside pinned ones",
        (Remedy("more or larger GPUs", MORE_GPUS.options | LARGER_GPUS.options), Remedy("unpinning models (pinned)")),
    ),
    Cause.TOO_LARGE: (
        "models fit on no GPU that they may use",
        (LARGER_GPUS, OTHER_GPUS),
    ),
    # What to do is said with the names of the models (`without_room`).
    Cause.NO_GPU: ("models may use only GPUs that are not there", ()),
}
FULL_AS_SLOW = (
    "models are there but full, as answers share the compute of a GPU and are slow",
    (*MORE_COMPUTE, HIGHER_CONCURRENCY),
)
FIRST_LOADS = (
    "models are loaded for the first time",
    (PRELOADING, Remedy("faster loads")),
)
IDLE_LOADS = (
    "models leave when they are idle and have to come back",
    (
        Remedy("keeping models ready for longer (ttl_s, stay_warm)"),
        Remedy("letting models sleep in a larger green room", GREEN_ROOM),
    ),
)


def bottleneck(delays: Delays) -> Cause | None:
    """What costs requests most: by those not served where there are some, else by time. None: hardly anything does."""
    if not _loses(delays) and delays.mean_s(delays.total_s) < FELT_S:
        return None
    return max(_weights(delays), key=lambda pair: pair[0])[1]


def _weights(delays: Delays) -> tuple[tuple[float, Cause], ...]:
    """What each cause costs: requests that are lost where there are some, else seconds of those served."""
    if _loses(delays):
        return _lost(delays)
    return ((delays.not_there_s, Cause.NOT_THERE), (delays.full_s, Cause.FULL), (delays.slow_s, Cause.SLOW))


def _lost(delays: Delays) -> tuple[tuple[int, Cause], ...]:
    """How many requests were lost by each cause."""
    return (
        (delays.lost_in_wait, Cause.NOT_THERE),
        (delays.lost_full, Cause.FULL),
        (delays.lost_too_large, Cause.TOO_LARGE),
        (delays.lost_kept_out, Cause.KEPT_OUT),
        (delays.lost_no_gpu, Cause.NO_GPU),
    )


def _loses(delays: Delays) -> bool:
    return delays.lost > LOST_SHARE * (delays.served + delays.lost)


def why(result: CaseResult, results: Sequence[CaseResult], begins: str = "The bottleneck") -> str:
    """What requests wait for in this case, and what may help against it, unless it was tried and does not."""
    delays = result.stats.all_delays
    cause = bottleneck(delays)
    if cause is None:
        return "Hardly any request waits."
    what, remedies = _explained(cause, delays)
    others = [_explained(other, delays)[1] for other in _others_that_count(cause, delays)]
    left = dict.fromkeys(
        remedy.words for some in (remedies, *others) for remedy in some if not _is_in_vain(remedy, result, results)
    )
    return f"{begins}: {what} ({_shares(delays)}).{_what_helps([*left])}"


def _others_that_count(cause: Cause, delays: Delays) -> list[Cause]:
    """A model that is full keeps others out: against that helps what makes it less full, and so on."""
    if cause not in OF_WAITS:
        return []
    weights = [(weight, other) for weight, other in _weights(delays) if other in OF_WAITS]
    least = WEIGHTY * sum(weight for weight, _ in weights)
    return [other for weight, other in weights if other is not cause and weight >= least and weight > 0]


def _explained(cause: Cause, delays: Delays) -> tuple[str, tuple[Remedy, ...]]:
    """What requests wait for, and what may help."""
    if cause is Cause.NOT_THERE:
        return _why_not_there(delays)
    if cause is Cause.FULL and delays.slow_s >= delays.work_s > 0:
        # Answers take twice as long as alone, or longer: a model that is full would be less so.
        return FULL_AS_SLOW
    what, remedies = BOTTLENECKS[cause]
    if cause is Cause.FULL and delays.slow_s >= SHARE * delays.work_s > 0:
        remedies = (*remedies, *MORE_COMPUTE)
    return what, remedies


def _what_helps(words: Sequence[str]) -> str:
    """A sentence, or nothing."""
    if not words:
        return ""
    *others, last = words
    return f" What may help: {', '.join(others)} or {last}." if others else f" What may help: {last}."


def _is_in_vain(remedy: Remedy, result: CaseResult, results: Sequence[CaseResult]) -> bool:
    """True if there are cases with more of it than this one, and none is better; where none is, if nothing uses it."""
    could = result.prospects
    # Where no model may use further GPUs, these were not tried.
    options = remedy.options if could.more_gpus else remedy.options - {"gpus"}
    tried = [other for other in results if _has_more(other.case, result.case, options)]
    if tried:
        return not any(effect(result.stats, other.stats) > 0 for other in tried)
    if remedy is OTHER_GPUS:
        return not could.other_gpus
    if remedy is PRELOADING:
        return not could.preloading
    if remedy is MORE_GPUS:
        return len(result.stats.delays) == 1 or not could.spreading
    return remedy.options == GREEN_ROOM and not could.green_room


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
        first, idle, whole = delays.lost_first_load, delays.lost_idle_load, delays.lost_in_wait
    if first + idle <= whole / 2:
        return BOTTLENECKS[Cause.NOT_THERE]
    return FIRST_LOADS if first >= idle else IDLE_LOADS


def _shares(delays: Delays) -> str:
    """What the bottleneck was found by: requests that are lost, or the seconds of those served."""
    if _loses(delays):
        return "requests lost: " + ", ".join(f"{cause.value} {count:,}" for count, cause in _lost(delays) if count)
    parts = (("not there", delays.not_there_s), ("full", delays.full_s), ("slow", delays.slow_s))
    return "on average " + ", ".join(f"{name} {seconds(delays.mean_s(value))}" for name, value in parts)


def without_room(result: CaseResult) -> list[str]:
    """Which models no GPU can hold, or none beside pinned models, or name no GPU that is there, if there are some."""
    models = result.stats.delays.items()
    large = {model: delays.lost_too_large for model, delays in models if delays.lost_too_large}
    kept_out = {model: delays.lost_kept_out for model, delays in models if delays.lost_kept_out}
    return [
        *_in_vain(large, "fits on no GPU that it may use", "fit on no GPU that they may use"),
        *_in_vain(kept_out, "finds no room beside pinned models", "find no room beside pinned models"),
        *_without_gpus(result),
    ]


def _without_gpus(result: CaseResult) -> list[str]:
    lost = {model: delays.lost_no_gpu for model, delays in result.stats.delays.items() if delays.lost_no_gpu}
    absent = dict.fromkeys(gpu for model in lost for gpu in result.prospects.absent_gpus.get(model, ()))
    what = f"only GPUs that this machine does not have ({', '.join(absent)})"
    their = "its" if len(lost) == 1 else "their"
    return [
        f"{sentence} Change {their} devices, or the GPUs."
        for sentence in _in_vain(lost, f"names {what}", f"name {what}")
    ]


def _in_vain(lost: Mapping[str, int], of_one: str, of_many: str) -> list[str]:
    if not lost:
        return []
    why, them = (of_one, "it") if len(lost) == 1 else (of_many, "them")
    return [f"{_named(lost)} {why}: {counted(sum(lost.values()), 'request')} for {them} cannot be served."]


def never_served(stats: Stats) -> list[str]:
    """Which models fit, but were not served once, if there are some."""
    delays = stats.delays
    lost = {model: delays[model].lost for model in stats.starved if not delays[model].lost_for_good}
    return [f"No request for {_named(lost)} is served ({sum(lost.values()):,} lost)."] if lost else []


def _named(lost: Mapping[str, int]) -> str:
    """The models with the most lost requests."""
    first = sorted(lost, key=lambda model: (-lost[model], model))[:NAMED_MAX]
    more = f" and {len(lost) - NAMED_MAX} more" if len(lost) > NAMED_MAX else ""
    return f"{', '.join(first)}{more}"
