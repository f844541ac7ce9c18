"""What preparing ahead would gain: models asked for at this hour on earlier days are read into the green room.

Plays days in which every model has its own hours, with the gateway as it is and with a preparer beside it. Five minutes
before each hour the preparer orders `prepare` for the models most asked for in that hour on earlier days, as long as
the green room has free memory. It evicts nothing.

- Days are regular (each model at its hours, every day) or loose (a model rests on four days of ten, begins up to 90
  minutes early or late, and a third of all requests come at any time).
- In a roomy green room all models can sleep, in a tight one a third of them.
- Models are never unloaded, or all of them at 4:00, as by a restart every night.
- The machine has one GPU, or two of half the size.

Both sides get the same requests. The first two days, from which the preparer learns, are not counted. A request is cold
if no copy of its model is in memory when it arrives. Preparing helps if cold requests fall by a third or the mean wait
by 5 %; it hurts if the mean or a percentile grows by more than 2 % and 50 ms.

The result and what follows from it: docs/adr/0019-nothing-is-prepared-ahead.md.

    python -m benchmarks.scheduling.ahead [--days 9] [--seeds 1]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.rig.result import Run, options_of
from benchmarks.scheduling.grid.machines import Machine, gib
from greenroom.core import events as ev
from greenroom.core.model import DeviceKind, ModelId, MoveKind, Tier
from greenroom.sim.config import SimConfig
from greenroom.sim.hooks import Watcher
from greenroom.sim.records import Fate, SimArrival, SimPlace
from greenroom.sim.results.stats import waits_of
from greenroom.sim.workloads import Recorded
from greenroom.sim.world import World

HOUR_S, DAY_S = 3_600.0, 86_400.0
LEARNED_DAYS = 2
RESTART_AT_S = 4 * HOUR_S
# Long enough to read several models from disk.
AHEAD_S = 300.0

MODELS_MIB = 3 * gib(4, 8, 8, 12, 16, 16, 20, 24)
GPUS_MIB = {"1 GPU": gib(96), "2 GPUs": gib(48, 48)}
ROOMS_MIB = {"tight": sum(MODELS_MIB) // 3, "roomy": sum(MODELS_MIB)}
# Host memory beyond the green room: a model can fall asleep before the one that it replaces has left.
BESIDE_MIB = 2 * max(MODELS_MIB)
TTL_S = 300.0

FALLS_BY, MEAN_FALLS_BY = 1 / 3, 0.05
GROWS_BY, GROWS_S = 0.02, 0.05
GOALS = {"helped_share_min": 0.5, "hurt_max": 0}
TO_SLEEP = (MoveKind.SLEEP, MoveKind.PREPARE)


# --- days with a rhythm -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rhythm:
    """When one model is asked for. Loose days differ from each other."""

    model: ModelId
    begins_s: float
    lasts_s: float
    per_hour: float
    is_loose: bool

    def day(self, random: Random) -> Iterator[float]:
        """Seconds of one day at which requests come, in no order."""
        rests, shift_s = random.random() < 0.4, random.uniform(-1.5, 1.5) * HOUR_S
        for _ in range(int(self.per_hour * self.lasts_s / HOUR_S)):
            at = self.begins_s + random.random() * self.lasts_s
            if not self.is_loose:
                yield at % DAY_S
            elif random.random() < 1 / 3:
                yield random.random() * DAY_S
            elif not rests:
                yield (at + shift_s) % DAY_S


def rhythms(is_loose: bool, random: Random) -> list[Rhythm]:
    """Each model is in use for one to five hours that begin between 7:00 and 20:00."""
    return [
        Rhythm(
            ModelId(f"m{number}"),
            random.uniform(7, 20) * HOUR_S,
            random.uniform(1, 5) * HOUR_S,
            random.choice((4.0, 8.0, 20.0, 40.0)),
            is_loose,
        )
        for number in range(len(MODELS_MIB))
    ]


def days_of(days: int, is_loose: bool, seed: int) -> Recorded:
    random, rows = Random(f"{seed}:ahead"), list[SimArrival]()
    drawn = rhythms(is_loose, random)
    for day, rhythm in product(range(days), drawn):
        for at in rhythm.day(random):
            prompt_len, output_len = (1 + int(random.expovariate(1.0 / mean)) for mean in (300, 200))
            rows.append(SimArrival(day * DAY_S + at, rhythm.model, prompt_len, output_len))
    return Recorded(sorted(rows))


# --- the preparer -------------------------------------------------------------------------------------------------


class Preparer(Watcher):
    """Counts requests by hour and model and, if it is active, orders moves as an operator would."""

    def __init__(self, is_active: bool) -> None:
        self._is_active = is_active
        self._asked: Counter[tuple[int, ModelId]] = Counter()
        self._asleep_mib: dict[ModelId, int] = {}
        self._world: World | None = None
        self.cold: list[tuple[float, bool]] = []  # of each request: when it came, and if it was cold

    def begin(self, world: World, hours: int) -> None:
        self._world = world
        specs = [model.spec for model in world.config.models]
        self._asleep_mib = {spec.id: spec.need_asleep.host_mib for spec in specs if spec.need_asleep is not None}
        for hour in range(1, hours) if self._is_active else ():
            world.after(hour * HOUR_S - AHEAD_S, self._prepare)

    def _prepare(self, world: World) -> None:
        free_mib = self._free_mib(world)
        for model in self._expected(world.now + AHEAD_S):
            is_cold = all(place.model != model for place in world.truth.places.values())
            if is_cold and self._asleep_mib[model] <= free_mib:
                free_mib -= self._asleep_mib[model]
                world.ask_move(MoveKind.PREPARE, model)

    def _expected(self, at: float) -> list[ModelId]:
        """Models asked for in this hour on earlier days, the most asked for first."""
        counts = [(-count, model) for (hour, model), count in self._asked.items() if hour == _hour(at)]
        return [model for _, model in sorted(counts)]

    def _free_mib(self, world: World) -> int:
        sleepers = [place.model for place in world.truth.places.values() if _is_in_green_room(place)]
        return (world.config.limits.green_room_mib or 0) - sum(self._asleep_mib[model] for model in sleepers)

    def told(self, event: ev.Event) -> None:
        if isinstance(event, ev.RequestArrived) and self._world is not None:
            model = event.candidates[0]
            self._asked[_hour(event.now), model] += 1
            self.cold.append((event.now, self._world.truth.tier_of(model) is Tier.COLD))


def _hour(at: float) -> int:
    return int(at % DAY_S // HOUR_S)


def _is_in_green_room(place: SimPlace) -> bool:
    return place.tier is Tier.ASLEEP or (place.move is not None and place.move.kind in TO_SLEEP)


# --- runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """One run; of several runs, the mean of each figure."""

    cold: float  # share of requests
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    prepares: float  # of all days

    def helps(self, today: Figures) -> bool:
        fell = self.cold < today.cold and self.cold <= today.cold * (1 - FALLS_BY)
        return fell or self.mean_s < today.mean_s * (1 - MEAN_FALLS_BY)

    def hurts(self, today: Figures) -> list[str]:
        """The waits that grew."""
        waits = ("mean_s", "p50_s", "p95_s", "p99_s")
        pairs = {name: (getattr(today, name), getattr(self, name)) for name in waits}
        return [name for name, (was, now) in pairs.items() if now > was * (1 + GROWS_BY) and now > was + GROWS_S]


def config_of(gpus_mib: tuple[int, ...], room_mib: int) -> SimConfig:
    machine = Machine(len(gpus_mib), gpus_mib[0], MODELS_MIB, green_room_mib=room_mib)
    models = tuple(replace(model, spec=replace(model.spec, ttl_s=TTL_S)) for model in machine.sim_models())
    devices = tuple(
        device if device.kind is DeviceKind.GPU else replace(device, capacity_mib=room_mib + BESIDE_MIB)
        for device in machine.devices()
    )
    return SimConfig(models, devices, machine.limits(), loads_at_once=1)


def unload_all(world: World) -> None:
    for model in sorted({place.model for place in world.truth.places.values()}):
        world.ask_move(MoveKind.UNLOAD, model, grace_s=0.0)


def play(config: SimConfig, days: int, is_loose: bool, restarts: bool, prepares: bool, seed: int) -> Figures:
    preparer = Preparer(prepares)
    world = World(config, seed, watchers=(preparer,))
    days_of(days, is_loose, seed).begin(world)
    preparer.begin(world, days * 24)
    for day in range(1, days) if restarts else ():
        world.after(day * DAY_S + RESTART_AT_S, unload_all)
    world.run()
    counts_from = LEARNED_DAYS * DAY_S
    cold = [is_cold for at, is_cold in preparer.cold if at >= counts_from]
    waits = waits_of(call.wait_s for call in world.ended if call.arrived >= counts_from and call.fate is Fate.SERVED)
    moves = world.truth.meters.moves[MoveKind.PREPARE]
    return Figures(fmean(cold), waits.mean_s, waits.p50_s, waits.p95_s, waits.p99_s, moves)


def mean_of(runs: list[Figures]) -> Figures:
    return Figures(*(round(fmean(getattr(run, field.name) for run in runs), 4) for field in fields(Figures)))


def compare(name: str, config: SimConfig, days: int, seeds: int, is_loose: bool, restarts: bool) -> dict[str, Any]:
    """Both sides of one comparison, printed as soon as they are known."""
    today, ahead = (
        mean_of([play(config, days, is_loose, restarts, prepares, seed) for seed in range(seeds)])
        for prepares in (False, True)
    )
    helps, grew = ahead.helps(today), ahead.hurts(today)
    print(f"{name}: {'helps' if helps else 'does not help'}{', longer: ' + ' '.join(grew) if grew else ''}")
    for side, one in (("today", today), ("ahead", ahead)):
        print(f"  {side}  " + "  ".join(f"{key} {value:7.3f}" for key, value in asdict(one).items()), flush=True)
    return {"today": asdict(today), "ahead": asdict(ahead), "helps": helps, "grew": grew}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--days", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    run, cells = Run("ahead", options), dict[str, dict[str, Any]]()
    for gpus, days, room, ends in product(GPUS_MIB, ("regular", "loose"), ROOMS_MIB, ("steady", "restarts")):
        name, config = f"{gpus}, {days}, {room}, {ends}", config_of(GPUS_MIB[gpus], ROOMS_MIB[room])
        cells[name] = compare(name, config, options.days, options.seeds, days == "loose", ends == "restarts")
    helped = round(fmean(cell["helps"] for cell in cells.values()), 3)
    hurt = sum(bool(cell["grew"]) for cell in cells.values())
    met = helped >= GOALS["helped_share_min"] and hurt <= GOALS["hurt_max"]
    run.report({"helped_share": helped, "hurt": hurt, "cells": cells}, GOALS, met)


if __name__ == "__main__":
    main()
