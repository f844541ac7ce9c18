"""Events at random times: foreign memory, other gateways, configurations, operators, leases, crashes.

Owns the timed faults of a storm, and undoes them before the liveness phase.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from greenroom.core import events as ev
from greenroom.core.model import (
    DeviceKind,
    LeaseId,
    ModelId,
    MoveId,
    MoveKind,
    Need,
    OtherLease,
    Outcome,
    RequestId,
    SlotId,
    Tier,
)
from greenroom.sim.config import SimModel
from greenroom.sim.world import World
from tests.chaos.fault_plan import FaultCounts, FaultPlan
from tests.chaos.scenario import Scenario, draw_limits, draw_timings, draws_stay

CLOCK_STEP_MAX_S = 20.0
STORE_DOWN_MAX_S = 4.0
LEASE_MAX_S = 30.0
# How long a model, a device or free memory stays away.
AWAY_MAX_S = 10.0


def named(world: World) -> list[ModelId]:
    """The models that are no versions on their way."""
    return sorted(name for name, model in world.models.items() if model.spec.version_of is None)


class Disturbances:
    def __init__(self, scenario: Scenario, faults: FaultPlan, counts: FaultCounts) -> None:
        self._scenario = scenario
        self._faults = faults
        self._counts = counts
        self._random = Random(f"{scenario.seed}:turmoil")
        self._is_over = False
        # Revisions only grow, also of a model that was removed and comes back.
        self._revision = 1
        self._others = 0
        self._kinds = (
            self.foreign_memory,
            self.other_gateways,
            self.need_measured,
            self.clock_steps,
            self.operator_moves,
            self.operator_moves,
            self.lease_asked,
            self.slots_crash,
            self.store_goes_down,
            self.stray_word,
            self.model_removed,
            self.new_revision,
            self.relabelled,
            self.other_limits,
            self.other_devices,
        )

    def begin(self, world: World) -> None:
        if self._scenario.odds.disturbance_rate:
            world.after(self._random.expovariate(self._scenario.odds.disturbance_rate), self._strike)

    def stop(self, world: World) -> None:
        """End all disturbances: foreign memory goes, devices come back, leases end."""
        self._is_over = True
        for lease in list(world.leases):
            world.end_lease(lease)
        world.change_config(devices=self._scenario.config.devices)
        world.change_memory(dict.fromkeys((device.id for device in self._scenario.config.devices), 0))
        world.change_others(())

    def _strike(self, world: World) -> None:
        if self._is_over:
            return
        happening = self._random.choice(self._kinds)
        self._counts.count(happening.__name__)
        happening(world)
        self.begin(world)

    # --- the machine --------------------------------------------------------------------------------------------------

    def foreign_memory(self, world: World) -> None:
        random = self._random
        device = random.choice(self._scenario.config.devices)
        world.change_memory({device.id: int(device.capacity_mib * random.choice((0.0, 0.2, 0.6)))})
        # Foreign processes leave again before long.
        world.after(AWAY_MAX_S * random.random(), lambda world: world.change_memory({device.id: 0}))

    def other_gateways(self, world: World) -> None:
        """They hold more, less or nothing; they release it before long."""
        random, self._others = self._random, self._others + 1
        number = self._others
        leases = [self._lease_elsewhere(place) for place in range(random.choice((0, 1, 2)))]
        world.change_others(leases)
        world.after(AWAY_MAX_S * random.random(), lambda world: self._others_leave(world, number))

    def _lease_elsewhere(self, place: int) -> OtherLease:
        random = self._random
        devices = random.sample(self._scenario.config.devices, random.randint(1, len(self._scenario.config.devices)))
        claim = {device.id: int(device.capacity_mib * random.choice((0.1, 0.5))) for device in devices}
        return OtherLease(LeaseId(f"x{place}"), "elsewhere", claim, random.choice((0, 1, 2)), random.random() < 0.5)

    def _others_leave(self, world: World, number: int) -> None:
        if number == self._others:
            world.change_others(())

    def clock_steps(self, world: World) -> None:
        world.step_clock(self._random.uniform(-CLOCK_STEP_MAX_S, CLOCK_STEP_MAX_S))

    def slots_crash(self, world: World) -> None:
        """One process, or all at once: idle, busy, asleep or in the middle of a move."""
        slots = [place.id for place in world.truth.places.values() if place.has_engine]
        lost = slots if self._random.random() < 0.2 else self._random.sample(slots, min(1, len(slots)))
        is_calm = all(world.truth.places[slot].move is None for slot in lost)
        survives = is_calm and self._faults.copies_survive and self._random.random() < 0.3
        world.crash(lost, Tier.ASLEEP if survives else Tier.COLD)

    def store_goes_down(self, world: World) -> None:
        self._faults.store_down_until = world.now + STORE_DOWN_MAX_S * self._random.random()

    def stray_word(self, world: World) -> None:
        """An event that was posted before, or for an unknown id. It must be ignored."""
        told = world.clock.told
        words: list[ev.Event] = [
            ev.ServeDone(told, RequestId("nobody")),
            ev.RequestGone(told, RequestId("nobody")),
            ev.LeaseGone(told, LeaseId("nobody")),
            ev.MoveDone(told, MoveId("nothing"), self._random.choice(list(Outcome))),
            ev.SlotsLost(told, (SlotId("nowhere"),)),
            ev.TimerFired(told, ev.Timer(ev.TimerKind.GRACE, "nobody")),
        ]
        world.post(self._random.choice(words))

    def need_measured(self, world: World) -> None:
        """A model was seen to use somewhat more or less than it was thought to."""
        if model := self._any(world):
            need, factor = model.spec.need, self._random.choice((0.7, 0.9, 1.05, 1.1))
            # Never so much that it fits nowhere any more.
            gpu_mib = min(int(need.gpu_mib * factor), max(need.gpu_mib, self._largest_mib()))
            world.change_config(needs={model.spec.id: Need(gpu_mib, need.host_mib)})

    def _largest_mib(self) -> int:
        gpus = [device for device in self._scenario.config.devices if device.kind is DeviceKind.GPU]
        return min(device.usable_mib for device in gpus) // 2

    # --- people -------------------------------------------------------------------------------------------------------

    def operator_moves(self, world: World) -> None:
        random, models = self._random, named(world)
        if not models:
            return
        evict = tuple(random.sample(models, min(1, len(models)))) if random.random() < 0.2 else ()
        world.ask_move(
            random.choice(list(MoveKind)),
            random.choice([*models, ModelId("unknown")]),
            evict,
            random.choice((None, 0.0, 5.0)),
        )

    def lease_asked(self, world: World) -> None:
        random = self._random
        gpus = [device for device in self._scenario.config.devices if device.kind is DeviceKind.GPU]
        lease = world.ask_lease(
            Need(int(gpus[0].usable_mib * random.choice((0.1, 0.4, 0.9)))),
            priority=random.choice((0, 1, 3)),
            devices=(gpus[0].id,) if random.random() < 0.3 else (),
            preemptible=random.random() < 0.6,
            grace_s=5.0 * random.random(),
            patience_s=10.0 if random.random() < 0.5 else None,
            gpus=random.choice((1, 1, 2, 3)),
        )
        world.after(LEASE_MAX_S * random.random(), lambda world: world.end_lease(lease))

    # --- the configuration --------------------------------------------------------------------------------------------

    def model_removed(self, world: World) -> None:
        """One goes; it, or another of its name, is added again before long."""
        if len(named(world)) < 2:
            return
        name = self._random.choice(named(world))
        model = world.models[name]
        world.change_config(removed=(name,))
        world.after(AWAY_MAX_S * self._random.random(), lambda world: self._add(world, model))

    def _add(self, world: World, model: SimModel) -> None:
        self._counts.count("model_added")
        world.change_config([SimModel(replace(model.spec, revision=self._next_revision(), held=False), model.timings)])

    def new_revision(self, world: World) -> None:
        if model := self._any(world):
            ttl_s = self._random.choice((0.0 if draws_stay(self._scenario.config.limits) else 1.0, 5.0))
            spec = replace(model.spec, revision=self._next_revision(), ttl_s=ttl_s)
            world.change_config([SimModel(spec, draw_timings(self._random))])

    def relabelled(self, world: World) -> None:
        """Nothing that needs another process."""
        if model := self._any(world):
            spec = replace(
                model.spec,
                ttl_s=self._random.choice((0.0 if draws_stay(self._scenario.config.limits) else 1.0, 2.0, 20.0)),
                concurrency=self._random.choice((model.spec.concurrency, 1, 4)),
                preload=self._random.random() < 0.2,
                grace_s=self._random.choice((0.0, 10.0)),
                pinned=self._may_pin(model) and self._random.random() < 0.2,
            )
            world.change_config([SimModel(spec, model.timings)])

    def _may_pin(self, model: SimModel) -> bool:
        """A pinned model must leave room, and be allowed together with every other."""
        smallest = min(device.usable_mib for device in self._scenario.config.devices)
        return self._scenario.config.limits.company is None and 5 * model.spec.need.gpu_mib < smallest

    def other_limits(self, world: World) -> None:
        policy = self._random.choice(("default", "default", "fifo"))
        drawn, now = draw_limits(self._random), self._scenario.config.limits
        world.change_config(limits=replace(drawn, policy=policy, company=now.company, swapper=now.swapper))

    def other_devices(self, world: World) -> None:
        """A GPU is gone or smaller; it comes back before long."""
        devices = list(self._scenario.config.devices)
        place = self._random.randrange(len(devices))
        if self._random.random() < 0.5:
            devices[place] = replace(devices[place], capacity_mib=devices[place].capacity_mib // 2)
        elif len(devices) > 1:
            del devices[place]
            self._faults.copies_survive = False
        world.change_config(devices=devices)
        world.after(AWAY_MAX_S * self._random.random(), self._devices_return)

    def _devices_return(self, world: World) -> None:
        world.change_config(devices=self._scenario.config.devices)

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def _any(self, world: World) -> SimModel | None:
        names = named(world)
        return world.models[self._random.choice(names)] if names else None
