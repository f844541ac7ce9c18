"""Workloads of machines with equal slots and of the single goals, by name.

All are drawn from the cell's seed, so that every policy gets the same requests. Stretching makes the time between
arrivals longer and leaves the answers as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import merge

from greenroom.sim.records import SimArrival
from greenroom.sim.workloads import Agents, Bursty, Mix, Poisson, Recorded, Workload, zipf

RATE, SECONDS, MODELS = 2.5, 240.0, 12
BURST_S, SILENCE_S = 10.0, 30.0
AGENTS, THINK_S = 12, 2.0
# One in ten is urgent.
HIGH_SHARE = 0.1

# A slot answers 16 at a time, in 3.5 s on average: 4.6 a second. This is more.
SATURATING_RATE, SATURATED_S = 6.0, 600.0
RARE_RATE, SOME_RATE = 1 / 20, 1 / 2
# Short answers: five times as many a second, and a slot drains five times as fast.
SHORT_TIMES, SHORT_LEN = 5, 40
# The busy model is ready first, so that the other one has to wait.
HEAD_START_S = 20.0
# Several other tenants share a hundredth of all requests.
FLOOD_S, FLOOD_SHARE, OTHERS = 1_200.0, 0.99, 5
FLOODER = "flooder"

BUSY_MODEL, COLD_MODEL = "m0", "m1"


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"m{number}" for number in range(count))


# --- equal slots --------------------------------------------------------------------------------------------------


def _poisson(stretch: float, seed: int) -> Workload:
    return Poisson(Mix(zipf(_names(MODELS))), RATE / stretch, SECONDS * stretch, seed)


def _bursty(stretch: float, seed: int) -> Workload:
    mix = Mix(zipf(_names(MODELS)))
    return Bursty(mix, RATE / stretch, SECONDS * stretch, seed, BURST_S * stretch, SILENCE_S * stretch)


def _agents(stretch: float, seed: int) -> Workload:
    return Agents(Mix(zipf(_names(MODELS))), AGENTS, SECONDS * stretch, THINK_S * stretch, seed)


# --- single goals -------------------------------------------------------------------------------------------------


def _classes(stretch: float, seed: int) -> Workload:
    """Some requests are urgent, whatever their model."""
    mix = Mix(zipf(_names(MODELS)), priorities={0: HIGH_SHARE, 1: 1 - HIGH_SHARE})
    return Poisson(mix, RATE / stretch, SECONDS * stretch, seed)


def _stream(model: str, rate: float, seconds: float, seed: int, output_len: float = 200.0) -> Iterable[SimArrival]:
    # The streams of one run must differ.
    mix = Mix({model: 1.0}, prompt_len=1.5 * output_len, output_len=output_len)
    arrivals = Poisson(mix, rate, seconds, seed * 1_000 + int(model[1:])).arrivals()
    return (one for one in arrivals if model == BUSY_MODEL or one.at > HEAD_START_S)


def _starve_rare(stretch: float, seed: int) -> Workload:
    """One model gets more requests than it can serve; another gets one now and then."""
    return _together(
        _stream(BUSY_MODEL, SATURATING_RATE / stretch, SATURATED_S * stretch, seed),
        _stream(COLD_MODEL, RARE_RATE / stretch, SATURATED_S * stretch, seed),
    )


def _starve_some(stretch: float, seed: int) -> Workload:
    """One model gets more requests than it can serve; another gets one every other second."""
    return _together(
        _stream(BUSY_MODEL, SATURATING_RATE / stretch, SATURATED_S * stretch, seed),
        _stream(COLD_MODEL, SOME_RATE / stretch, SATURATED_S * stretch, seed),
    )


def _starve_short(stretch: float, seed: int) -> Workload:
    """One model gets more requests than it can serve, with short answers; another gets one now and then."""
    seconds = SATURATED_S * stretch
    return _together(
        _stream(BUSY_MODEL, SHORT_TIMES * SATURATING_RATE / stretch, seconds, seed, SHORT_LEN),
        _stream(COLD_MODEL, RARE_RATE / stretch, seconds, seed, SHORT_LEN),
    )


def _others(model: str, stretch: float, seed: int) -> Iterable[SimArrival]:
    tenants = {f"tenant{number}": 1.0 for number in range(OTHERS)}
    rate = SATURATING_RATE * (1 - FLOOD_SHARE) / stretch
    return Poisson(Mix({model: 1.0}, tenants), rate, FLOOD_S * stretch, seed).arrivals()


def _calm(model: str) -> Callable[[float, int], Workload]:
    """The other tenants alone."""
    return lambda stretch, seed: _together(_others(model, stretch, seed))


def _flood(model: str) -> Callable[[float, int], Workload]:
    """The other tenants beside one that sends the busy model more requests than it can serve."""

    def together(stretch: float, seed: int) -> Workload:
        mix = Mix({BUSY_MODEL: 1.0}, {FLOODER: 1.0})
        flood = Poisson(mix, SATURATING_RATE * FLOOD_SHARE / stretch, FLOOD_S * stretch, seed + 1_000)
        return _together(_others(model, stretch, seed), flood.arrivals())

    return together


def _together(*streams: Iterable[SimArrival]) -> Recorded:
    return Recorded(tuple(merge(*streams, key=lambda arrival: arrival.at)))


GRID = {"poisson": _poisson, "bursty": _bursty, "agents": _agents}
SINGLE: dict[str, Callable[[float, int], Workload]] = {
    "classes": _classes,
    "starve-rare": _starve_rare,
    "starve-some": _starve_some,
    "starve-short": _starve_short,
    "calm-ready": _calm(BUSY_MODEL),
    "calm-cold": _calm(COLD_MODEL),
    "flood-ready": _flood(BUSY_MODEL),
    "flood-cold": _flood(COLD_MODEL),
}
GENERATED = GRID | SINGLE


def generated(name: str, stretch: float, seed: int) -> tuple[Workload, tuple[str, ...]]:
    """A workload and the models that its requests name."""
    models = _names(MODELS) if name in GRID or name == "classes" else (BUSY_MODEL, COLD_MODEL)
    return GENERATED[name](stretch, seed), models
