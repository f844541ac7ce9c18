"""What one seed draws: machine, models, callers and limits, and how often what goes wrong.

Owns every number of a run. Three kinds of scenario: a *storm* has faults of every kind; a *calm* has none, so that the
promises about waiting can be held against it; a *duel* keeps tenants backlogged on one model, for fairness.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random

from greenroom.core.contract import SchedulerFactory
from greenroom.core.events import Choice, Limits
from greenroom.core.model import Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need, TenantId
from greenroom.core.plain import PlainScheduler
from greenroom.core.policy.coresidency import Group, Rules
from greenroom.core.policy.matrix import Matrix
from greenroom.sim.config import SimConfig, SimModel, Timings

HOST = DeviceId("host")
REMOTE = ModelId("remote")
# The longest that an idle model stays, unless it stays for good.
STAY_MAX_S = 30.0
# A storm of tasks has so many times fewer callers than others, and most of them ask for tasks.
TASK_STORM_SHARE, TASKED_IN_A_TASK_STORM = 25, 0.7
TENANTS = tuple(TenantId(name) for name in ("ada", "bert", "cleo", "dora", "emil"))


class Kind(Enum):
    STORM = "storm"
    CALM = "calm"
    DUEL = "duel"


@dataclass(frozen=True, slots=True)
class Task:
    candidates: tuple[ModelId, ...]
    choice: Choice


@dataclass(frozen=True, slots=True)
class Traffic:
    """The callers. `rate` is requests a second over all models; then shares of callers with a budget, and so on."""

    arrivals: int
    rate: float
    weights: dict[ModelId, float]
    tenants: dict[TenantId, float]
    priorities: dict[int, float]
    prompt_len: float
    output_len: float
    burst: int = 1  # so many come at once
    leaving: float = 0.0
    budgeted: float = 0.0
    impatient: float = 0.0
    choosy: float = 0.0
    # How many say how long the model should stay for them, and what they say.
    keeping: float = 0.0
    stays_s: tuple[float, ...] = (0.0,)
    # How many ask for a task instead of a model.
    tasked: float = 0.0
    tasks: tuple[Task, ...] = ()
    # Closed loops: this many callers of each tenant ask again as soon as they were answered.
    loops: int = 0


@dataclass(frozen=True, slots=True)
class Odds:
    """How likely it is that a move or an answer goes wrong, and how many other things happen a second."""

    move: float = 0.0
    answer: float = 0.0
    # That an engine has no room for a request that could be served by another model.
    busy: float = 0.0
    disturbance_rate: float = 0.0
    shuts_down: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    kind: Kind
    config: SimConfig
    traffic: Traffic
    odds: Odds = field(default_factory=Odds)
    # To which shares of their size copies on the host are folded when they have been filled; empty: none is.
    folded: tuple[float, ...] = ()


def draw_scenario(seed: int, folding: bool = True, exclusives: bool = True, tasks: bool = True) -> Scenario:
    """The scenario of this seed, always the same.

    Without `folding` it is what it was before copies could be folded, without `exclusives` before models could be, and
    without `tasks` before callers asked for tasks.
    """
    random = Random(f"{seed}:scene")
    kind = random.choices((Kind.STORM, Kind.CALM, Kind.DUEL), (0.78, 0.12, 0.1))[0]
    if kind is Kind.STORM:
        storm = _storm(seed, random)
        storm = _folding(storm) if folding else storm
        storm = _exclusives(storm) if exclusives else storm
        # Drawn apart, too.
        random = Random(f"{seed}:tasks")
        return _with_tasks(storm, random) if tasks and random.random() <= 1 / 3 else storm
    return _calm(seed, random) if kind is Kind.CALM else _duel(seed, random)


def under_plain(scenario: Scenario, scheduler: SchedulerFactory = PlainScheduler) -> Scenario:
    """The same for the plain scheduler, or another without swappers to choose from."""
    config = scenario.config
    limits = replace(config.limits, swapper="memory")
    return replace(scenario, config=replace(config, limits=limits, scheduler=scheduler))


def draw_task_storm(seed: int) -> Scenario:
    """A short storm in which callers ask for tasks."""
    storm = _with_tasks(_storm(seed, Random(f"{seed}:scene")), Random(f"{seed}:tasks"))
    arrivals = storm.traffic.arrivals // TASK_STORM_SHARE
    return replace(storm, traffic=replace(storm.traffic, arrivals=arrivals, tasked=TASKED_IN_A_TASK_STORM))


# --- storms -----------------------------------------------------------------------------------------------------------


def _storm(seed: int, random: Random) -> Scenario:
    devices = _devices(random)
    biggest = max(device.usable_mib for device in devices if device.kind is DeviceKind.GPU)
    models = tuple(_model(random, number, biggest) for number in range(random.randint(2, 8)))
    limits = draw_limits(random)
    rules = draw_rules(random, [model.spec.id for model in models])
    if rules is None:
        models = tuple(_with_pins(random, model, biggest) for model in models)
    policy = "fifo" if random.random() < 0.15 else "default"
    # Under the coordinator an urgent model keeps others out as long as it stays: so none stays for ever.
    if random.random() < 0.15:
        limits = replace(limits, swapper="coordinator")
        models = tuple(relabelled(model, ttl_s=model.spec.ttl_s or 5.0) for model in models)
    config = SimConfig(
        models,
        devices,
        _under(limits, rules),
        policy,
        jitter=random.choice((0.0, 0.1, 0.5)),
        loads_at_once=random.choice((None, None, 1, 2)),
        knows_times=random.random() < 0.7,
    )
    odds = Odds(
        move=random.choice((0.02, 0.1, 0.3)),
        answer=random.choice((0.003, 0.01, 0.03)),
        disturbance_rate=random.choice((0.02, 0.1, 0.2)),
        shuts_down=random.random() < 0.1,
    )
    return Scenario(seed, Kind.STORM, config, _traffic(random, models, limits), odds)


def _folding(scenario: Scenario) -> Scenario:
    """In a third of them workers host the models: a copy stays on the host while ready, smaller than planned.

    Drawn apart, so that nothing else of the scenario is drawn differently.
    """
    random = Random(f"{scenario.seed}:folding")
    if random.random() > 1 / 3:
        return scenario
    config = replace(scenario.config, models=tuple(map(_hosted, scenario.config.models)))
    return replace(scenario, config=config, folded=random.choice(((0.75,), (1.0, 0.75, 0.3))))


def _exclusives(scenario: Scenario) -> Scenario:
    """In a fifth of them some models are configurations of one thing. Drawn apart, too."""
    random = Random(f"{scenario.seed}:exclusives")
    if random.random() > 0.2:
        return scenario
    models = tuple(relabelled(one, exclusive=random.choice(("", "x", "x", "y"))) for one in scenario.config.models)
    return replace(scenario, config=replace(scenario.config, models=models))


def _with_tasks(scenario: Scenario, random: Random) -> Scenario:
    """Some callers ask for tasks, with a remote model as their last resort."""
    names = [model.spec.id for model in scenario.config.models]
    tasks = tuple(_task(random, names) for _ in range(3))
    at_once = random.choice((1, 4, 10_000))
    spec = ModelSpec(REMOTE, need=Need(0), concurrency=at_once, pinned=True, preload=True, is_remote=True)
    remote = SimModel(spec, Timings(load_s=0.01, unload_s=0.01, concurrency=at_once))
    config = replace(scenario.config, models=(*scenario.config.models, remote))
    traffic = replace(scenario.traffic, tasked=random.choice((0.05, 0.3)), tasks=tasks)
    odds = replace(scenario.odds, busy=random.choice((0.0, 0.02, 0.1)))
    return replace(scenario, config=config, traffic=traffic, odds=odds)


def _task(random: Random, names: list[ModelId]) -> Task:
    """Some local models, and after the first of them perhaps the remote one."""
    candidates = random.sample(names, random.randint(1, min(3, len(names))))
    if random.random() < 0.8:
        candidates.insert(random.randint(1, len(candidates)), REMOTE)
    is_pinned, prefer_first_s = random.random() < 0.3, random.choice((0.0, 1.0, 30.0))
    return Task(tuple(candidates), Choice(prefer_first_s, is_pinned, (REMOTE,)))


def _hosted(model: SimModel) -> SimModel:
    need, asleep = model.spec.need, model.spec.need_asleep
    return model if asleep is None else relabelled(model, need=need.or_more(Need(0, asleep.host_mib)))


def _devices(random: Random) -> tuple[Device, ...]:
    count = random.choice((1, 1, 1, 2, 2, 3))
    capacity = random.choice((4_000, 8_000, 16_000))
    gpus = [
        Device(DeviceId(f"gpu{number}"), DeviceKind.GPU, capacity if random.random() < 0.7 else capacity // 2, 500)
        for number in range(count)
    ]
    host = [Device(HOST, DeviceKind.HOST, random.choice((2_000, 8_000, 30_000)))] if random.random() < 0.85 else []
    return (*gpus, *host)


def _model(random: Random, number: int, biggest_mib: int) -> SimModel:
    gpu_mib = int(biggest_mib * random.choice((0.1, 0.2, 0.3, 0.45, 0.6, 0.95)))
    if random.random() < 0.03:
        gpu_mib = biggest_mib * 4
    spec = ModelSpec(
        ModelId(f"m{number}"),
        need=Need(gpu_mib, random.choice((0, 0, 200))),
        need_asleep=_asleep(random, gpu_mib),
        can_split=random.random() < 0.1,
        sizes_itself=random.random() < 0.1,
        concurrency=random.choice((None, None, 1, 2, 4, 8)),
        priority=random.choice((0, 1, 1, 2)),
        ttl_s=random.choice((0.0, 0.0, 3.0, 30.0)),
        grace_s=random.choice((0.0, 2.0, 30.0)),
        preload=random.random() < 0.15,
    )
    return SimModel(spec, draw_timings(random))


def _asleep(random: Random, gpu_mib: int) -> Need | None:
    return None if random.random() < 0.4 else Need(random.choice((0, 0, 100)), max(1, gpu_mib // 2))


def draw_timings(random: Random) -> Timings:
    load_s = random.choice((0.3, 1.0, 3.0, 10.0))
    return Timings(
        load_s=load_s,
        wake_s=load_s * random.choice((0.05, 0.2)),
        sleep_s=load_s * random.choice((0.02, 0.2)),
        unload_s=random.choice((0.05, 0.5, 1.0)),
        concurrency=random.choice((1, 2, 4, 16)),
    )


def _with_pins(random: Random, model: SimModel, biggest_mib: int) -> SimModel:
    """Small ones only: a large model that is pinned leaves nothing to simulate."""
    if model.spec.need.gpu_mib > biggest_mib * 0.3 or random.random() > 0.2:
        return model
    return relabelled(model, pinned=True)


def relabelled(model: SimModel, **changes: object) -> SimModel:
    return SimModel(replace(model.spec, **changes), model.timings)  # type: ignore[arg-type]


def draw_limits(random: Random) -> Limits:
    """Small numbers more often than in real life, so that every limit is reached."""
    high_s = random.choice((1.0, 5.0))
    return Limits(
        tenant_weights={TENANTS[0]: random.choice((0.5, 1.0, 4.0))} if random.random() < 0.3 else {},
        queue_depth_max=random.choice((8, 60, 1_000)),
        away_share=random.choice((0.1, 0.5, 1.0)),
        lift_s=random.choice((5.0, 20.0, 60.0)),
        deadlines_s=(high_s, high_s * random.choice((3.0, 12.0)), high_s * 48.0),
        recency_s=random.choice((30.0, 600.0)),
        backoff_s=random.choice((0.5, 5.0)),
        backoff_max_s=random.choice((2.0, 20.0)),
        replan_s=random.choice((0.2, 1.0)),
        green_room_mib=random.choice((None, None, 0, 1_000, 3_000, 10_000)),
    )


def _under(limits: Limits, rules: Rules | None) -> Limits:
    return replace(limits, company=rules)


def draw_rules(random: Random, models: list[ModelId]) -> Rules | None:
    """Mostly none; else groups, or a matrix of sets that name each model."""
    drawn = random.random()
    if drawn < 0.85 or len(models) < 3:
        return None
    half = len(models) // 2
    one, other = tuple(models[:half]), tuple(models[half:])
    if drawn < 0.93:
        swap, exclusive, persistent = (random.random() < 0.5 for _ in range(3))
        return (Group("one", one, swap, exclusive, persistent), Group("other", other, not swap))
    return Matrix((("one", " & ".join(one)), ("other", " | ".join(other)), ("both", f"{models[0]} & {models[-1]}")))


def draws_stay(limits: Limits) -> bool:
    """True if a model may stay for good without keeping others out for good."""
    return limits.swapper != "coordinator"


def _traffic(random: Random, models: tuple[SimModel, ...], limits: Limits) -> Traffic:
    tenants = TENANTS[: random.randint(1, len(TENANTS))]
    names = [model.spec.id for model in models]
    random.shuffle(names)
    skew = random.choice((1.0, 2.0, 3.0, 4.0, 4.0))
    priorities = random.choice(({1: 1.0}, {0: 1.0, 1: 4.0, 2: 1.0}, {-1: 0.2, 0: 1.0, 1: 1.0, 2: 1.0, 5: 0.3}))
    return Traffic(
        arrivals=random.randint(4_500, 7_700),
        rate=random.choice((2.0, 5.0, 10.0)),
        weights={name: 1.0 / rank**skew for rank, name in enumerate(names, start=1)},
        tenants={tenant: random.choice((0.1, 1.0, 3.0)) for tenant in tenants},
        priorities=priorities,
        prompt_len=random.choice((50.0, 400.0)),
        output_len=random.choice((3.0, 10.0, 30.0)),
        burst=random.choice((1, 1, 5, 20)),
        leaving=random.choice((0.0, 0.02, 0.1)),
        budgeted=random.choice((0.0, 0.1)),
        impatient=random.choice((0.0, 0.1)),
        choosy=random.choice((0.0, 0.0, 0.02)),
        keeping=random.choice((0.0, 0.05, 0.5)),
        stays_s=(0.0, 0.5, 4.0, STAY_MAX_S, *((-1.0,) if draws_stay(limits) else ())),
    )


# --- calms and duels --------------------------------------------------------------------------------------------------


def _calm(seed: int, random: Random) -> Scenario:
    """Equal slots, the numbers of a real machine made smaller, and no fault: what is promised about waiting holds."""
    places, count = random.randint(1, 3), random.randint(2, 6)
    swap_s = random.choice((0.4, 1.0, 5.0))
    timings = Timings(swap_s, swap_s / 4, swap_s / 10, swap_s / 10, concurrency=random.choice((1, 2, 4)))
    sleeps = Need(0, 1_000) if random.random() < 0.5 else None
    specs = [ModelSpec(ModelId(f"m{n}"), need=Need(1_000), need_asleep=sleeps) for n in range(count)]
    models = tuple(SimModel(spec, timings) for spec in specs)
    devices = [Device(DeviceId("gpu0"), DeviceKind.GPU, places * 1_000)]
    if sleeps is not None:
        devices.append(Device(HOST, DeviceKind.HOST, random.choice((1_000, 10_000))))
    lift_s, away_share = random.choice((10.0, 60.0)), random.choice((0.5, 1.0))
    limits = Limits(queue_depth_max=10_000, lift_s=lift_s, deadlines_s=(2.0, 10.0, 40.0), away_share=away_share)
    output_len = random.choice((10.0, 40.0, 120.0))
    capacity = places * timings.concurrency / timings.service_s(100, int(output_len))
    # Half of them are saturated by one model, which would keep the others out for ever if nothing were promised.
    is_hot = random.random() < 0.5
    weights = {spec.id: (100.0 if is_hot and rank == 1 else 1.0) / rank for rank, spec in enumerate(specs, start=1)}
    traffic = Traffic(
        arrivals=random.randint(2_500, 4_000),
        rate=capacity * (1.1 if is_hot else random.choice((0.3, 0.6, 0.9))),
        weights=weights,
        tenants=dict.fromkeys(TENANTS[:2], 1.0),
        priorities=random.choice(({1: 1.0}, {0: 1.0, 1: 4.0, 2: 1.0})),
        prompt_len=100.0,
        output_len=output_len,
        burst=random.choice((1, 5)),
    )
    return Scenario(seed, Kind.CALM, SimConfig(models, tuple(devices), limits), traffic)


def _duel(seed: int, random: Random) -> Scenario:
    """Two or three tenants that always wait for the same model, answers of very different length, and long lifts."""
    timings = Timings(2.0, 0.2, 0.1, 0.1, concurrency=random.choice((1, 2, 4)))
    spec = ModelSpec(ModelId("m0"), need=Need(1_000))
    limits = Limits(
        queue_depth_max=10_000,
        lift_s=1e6,
        tenant_weights={TENANTS[0]: random.choice((1.0, 2.0, 0.5))},
    )
    tenants = TENANTS[: random.randint(2, 3)]
    traffic = Traffic(
        arrivals=random.randint(5_000, 7_000),
        rate=1.0,
        weights={spec.id: 1.0},
        tenants={tenant: 1.0 * 3**place for place, tenant in enumerate(tenants)},
        priorities={1: 1.0},
        prompt_len=100.0,
        output_len=40.0,
        loops=random.randint(16, 24),
    )
    devices = (Device(DeviceId("gpu0"), DeviceKind.GPU, 1_000),)
    return Scenario(seed, Kind.DUEL, SimConfig((SimModel(spec, timings),), devices, limits), traffic)
