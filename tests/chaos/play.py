"""Plays one seed: a safety phase with faults, a liveness phase without, then everything must be at rest.

Whatever is wrong (an order that cannot be, a broken property, an exception of the core itself) becomes a Failure that
names the seed, the number of the event and what was said last.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from greenroom.core import events as ev
from greenroom.core.model import ModelId
from greenroom.sim.hooks import TraceHash, Watcher
from greenroom.sim.records import Violation
from greenroom.sim.world import World
from tests.chaos.callers import Callers
from tests.chaos.checks import checks_for, checks_with_versions
from tests.chaos.checks.base import Checkers
from tests.chaos.disturbances import Disturbances
from tests.chaos.fault_plan import HANG_MAX_S, FaultCounts, FaultPlan
from tests.chaos.scenario import STAY_MAX_S, Scenario, draw_scenario, draws_stay, under_plain
from tests.chaos.version_changes import VersionChanges

RECENT_MAX = 30
# The safety phase is looked at this often to see whether all callers have come.
STEP_S = 20.0
# A load that is drawn long, a drain, a hang: nothing that is under way takes longer than this when faults have ended.
SETTLING_S = 3 * HANG_MAX_S
# After the faults each model is asked for this often; all of it must be served.
PROOFS = 3
EVENTS_MAX = 400_000
# A run that is shut down is so when this share of its callers has yet to come.
CLOSED_AT = 0.3
DRAIN_S = 5.0
# Real clocks do not start at zero, and one that is set back must not go below it.
CLOCK_STARTS_AT_S = 10_000.0


@dataclass(frozen=True, slots=True)
class Played:
    """What came of one seed."""

    seed: int
    kind: str
    events: int
    faults: Counter[str]
    fates: Counter[str]
    trace: str = ""
    judged: Counter[str] = field(default_factory=Counter)


class Failure(AssertionError):
    """A seed that failed. Its text is all that is needed to see what happened."""

    def __init__(self, seed: int, checker: str, what: str, event: int, recent: list[str]) -> None:
        super().__init__(seed, checker, what, event, recent)
        self.seed, self.checker, self.what, self.event, self.recent = seed, checker, what, event, recent

    def __str__(self) -> str:
        lines = "\n".join(f"  {line}" for line in self.recent)
        return f"seed {self.seed}, event {self.event}: {self.checker}: {self.what}\nwhat was said last:\n{lines}"


class Recent(Watcher):
    """Remembers the last things said."""

    def __init__(self) -> None:
        self._said: deque[ev.Event | tuple[str, tuple[object, ...]]] = deque(maxlen=RECENT_MAX)
        self.events = 0

    def told(self, event: ev.Event) -> None:
        self.events += 1
        self._said.append(event)

    def asked(self, effect: str, *details: object) -> None:
        self._said.append((effect, details))

    def lines(self) -> list[str]:
        return [f"    {said[0]} {said[1]}" if isinstance(said, tuple) else f"{said}" for said in self._said]


def play(
    seed: int,
    hashed: bool = False,
    folding: bool = True,
    exclusives: bool = True,
    tasks: bool = True,
    versions: bool = False,
    plain: bool = False,
) -> Played:
    """Play this seed to its end; with `versions`, models are updated meanwhile. Raises Failure.

    With `plain`, the plain scheduler plays it.
    """
    scenario = draw_scenario(seed, folding, exclusives, tasks and not versions)
    return Play(under_plain(scenario) if plain else scenario, hashed, versions).to_the_end()


class Play:
    def __init__(self, scenario: Scenario, hashed: bool = False, versions: bool = False) -> None:
        self.scenario = scenario
        self.counts = FaultCounts()
        self.recent = Recent()
        self.checkers = Checkers(checks_with_versions() if versions else checks_for(scenario))
        self._versions = VersionChanges(scenario, self.counts) if versions else None
        self._hash = TraceHash() if hashed else None
        self._faults = FaultPlan(scenario, self.counts)
        self._disturbances = Disturbances(scenario, self._faults, self.counts)
        self._callers = Callers(scenario, self.counts)

    def to_the_end(self) -> Played:
        try:
            world = self._begun()
            self._safety(world)
            self._liveness(world)
            self._rest(world)
        except Exception as problem:
            raise self._failure(problem) from problem
        judged = Counter({type(check).__name__: getattr(check, "judged", 0) for check in self.checkers.checks})
        fates = Counter(call.fate.value for call in world.ended)
        trace = self._hash.hex() if self._hash is not None else ""
        return Played(
            self.scenario.seed, self.scenario.kind.value, world.events_told, self.counts.faults, fates, trace, judged
        )

    def _begun(self) -> World:
        watchers: list[Watcher] = [self.recent, self.checkers]
        if self._hash is not None:
            watchers.append(self._hash)
        world = World(self.scenario.config, self.scenario.seed, self._faults, watchers)
        self._faults.attach(world)
        self.checkers.attach(world)
        world.step_clock(CLOCK_STARTS_AT_S)
        self._callers.begin(world)
        self._disturbances.begin(world)
        if self._versions is not None:
            self._versions.begin(world)
        return world

    def _safety(self, world: World) -> None:
        """Callers come, things go wrong. Some runs are shut down in the middle of it."""
        is_closed = False
        while not self._callers.is_done:
            world.run(until=world.now + STEP_S)
            if (
                self.scenario.odds.shuts_down
                and not is_closed
                and self._callers.left < self.scenario.traffic.arrivals * CLOSED_AT
            ):
                is_closed = True
                self._shut_down(world)
            if world.events_told > EVENTS_MAX:
                raise Violation(f"more than {EVENTS_MAX} events before all callers have come")
        if self.scenario.odds.shuts_down and not is_closed:
            self._shut_down(world)

    def _shut_down(self, world: World) -> None:
        self.counts.count("shut_down")
        world.shut_down(DRAIN_S)

    def _liveness(self, world: World) -> None:
        """No more faults: what is left drains, and new requests are served."""
        self._faults.stop()
        if self._versions is not None:
            self._versions.stop(world)
        self._disturbances.stop(world)
        world.run(until=world.now + SETTLING_S)
        if not self.scenario.odds.shuts_down:
            self._prove(world)

    def _prove(self, world: World) -> None:
        for name in sorted(world.models):
            for _ in range(PROOFS):
                world.arrive(ModelId(name), 10, 10)

    def _rest(self, world: World) -> None:
        """Everything ends in bounded time by itself; after the shutdown nothing is left."""
        within_s = self._drain_bound_s(world)
        world.run(until=world.now + within_s)
        if not world.is_at_rest:
            waiting = [call.id for call in world.waiting()]
            raise Violation(f"it does not drain within {within_s:.0f} s: {waiting} wait, {world.ops} asked")
        world.run()
        if not self.scenario.odds.shuts_down:
            world.shut_down(1.0)
        world.run()
        self.checkers.at_rest()

    def _drain_bound_s(self, world: World) -> float:
        """Each turn of a model serves at least one waiting request, and takes no longer than `turn_s`."""
        timings = [model.timings for model in (*world.models.values(), *self.scenario.config.models)]
        swap_s = max(one.load_s + one.sleep_s + one.unload_s for one in timings) * (1.0 + self.scenario.config.jitter)
        limits = world.scheduler.view.limits
        service_s = max((usual.service_s(10_000, 2_000) for usual in timings), default=0.0)
        turn_s = swap_s * 2.0 + service_s
        if not draws_stay(limits):
            # A more urgent model may stay until it leaves by itself.
            turn_s += STAY_MAX_S
        due_s = max(limits.deadlines_s[2], 2 * turn_s / limits.away_share)
        # Devices are kept for a model once all others may leave within a share of the time that it has waited.
        turns_s = turn_s * (2 + len(world.calls))
        return due_s + limits.backoff_max_s + turns_s / limits.away_share

    def _failure(self, problem: Exception) -> Failure:
        """Which checker spoke, from where the exception was raised: a checker's module, the world, or the core."""
        trace, source = problem.__traceback__, ""
        while trace is not None:
            source = trace.tb_frame.f_globals.get("__name__", source)
            trace = trace.tb_next
        checker = source.removeprefix("greenroom.")
        what = str(problem) if isinstance(problem, AssertionError) else f"{type(problem).__name__}: {problem}"
        return Failure(self.scenario.seed, checker, what, self.recent.events, self.recent.lines())
