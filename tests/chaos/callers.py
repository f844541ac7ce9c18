"""The callers of a scenario: they arrive alone or in bursts, lose patience, leave, or ask again in loops.

Owns the arrivals and the clients that leave by themselves, and has random numbers of its own.
"""

from __future__ import annotations

from random import Random

from greenroom.core.model import ModelId, TenantId
from greenroom.sim.records import SimCall
from greenroom.sim.workloads import Draw
from greenroom.sim.world import World
from tests.chaos.fault_plan import FaultCounts
from tests.chaos.scenario import Scenario, Task, Traffic


class Callers:
    def __init__(self, scenario: Scenario, counts: FaultCounts) -> None:
        self._traffic: Traffic = scenario.traffic
        self._random = Random(f"{scenario.seed}:callers")
        # Of its own, so that nothing else is drawn differently where there are tasks.
        self._tasks = Random(f"{scenario.seed}:asked tasks")
        self._counts = counts
        self._models = Draw({str(model): weight for model, weight in self._traffic.weights.items()})
        self._tenants = Draw({str(tenant): weight for tenant, weight in self._traffic.tenants.items()})
        self._priorities = Draw({str(priority): weight for priority, weight in self._traffic.priorities.items()})
        self.left = self._traffic.arrivals

    @property
    def is_done(self) -> bool:
        return self.left <= 0

    def begin(self, world: World) -> None:
        if not self._traffic.loops:
            self._come_later(world)
            return
        for tenant in self._traffic.tenants:
            for _ in range(self._traffic.loops):
                self._ask(world, TenantId(tenant))

    # --- open: they know nothing of each other ------------------------------------------------------------------------

    def _come_later(self, world: World) -> None:
        traffic = self._traffic
        if not self.is_done:
            world.after(self._random.expovariate(traffic.rate / traffic.burst), self._come)

    def _come(self, world: World) -> None:
        for _ in range(min(self.left, self._random.randint(1, 2 * self._traffic.burst - 1))):
            self._arrive(world, self._candidates(world), self._task())
        self._come_later(world)

    def _candidates(self, world: World) -> tuple[ModelId, ...]:
        """Mostly one model; now and then one that does not, or no longer, exist."""
        first = ModelId(self._models.one(self._random))
        if self._random.random() >= self._traffic.choosy:
            return (first,)
        return tuple(dict.fromkeys((first, ModelId(self._models.one(self._random)))))

    def _task(self) -> Task | None:
        is_one = self._traffic.tasks and self._tasks.random() < self._traffic.tasked
        return self._tasks.choice(self._traffic.tasks) if is_one else None

    def _arrive(self, world: World, candidates: tuple[ModelId, ...], task: Task | None) -> None:
        random, traffic = self._random, self._traffic
        self.left -= 1
        call = world.arrive(
            candidates if task is None else task.candidates,
            1 + int(random.expovariate(1.0 / traffic.prompt_len)),
            1 + int(random.expovariate(1.0 / traffic.output_len)),
            TenantId(self._tenants.one(random)),
            int(self._priorities.one(random)),
            patience_s=self._drawn(traffic.impatient, 4.0),
            budget_s=self._drawn(traffic.budgeted, 6.0),
            keep_alive_s=random.choice(traffic.stays_s) if random.random() < traffic.keeping else None,
            choice=None if task is None else task.choice,
        )
        if random.random() < traffic.leaving:
            # At once, while its model loads, or in the middle of the answer.
            world.after(random.choice((0.0, 0.1, 1.0, 5.0)) * random.random(), lambda world: self._leave(world, call))

    def _drawn(self, odds: float, mean_s: float) -> float | None:
        return self._random.expovariate(1.0 / mean_s) if self._random.random() < odds else None

    def _leave(self, world: World, call: SimCall) -> None:
        if call.id in world.calls:
            self._counts.count("client_leaves")
            world.leave(call)

    # --- closed: they ask again when they were answered ---------------------------------------------------------------

    def _ask(self, world: World, tenant: TenantId) -> None:
        random, traffic = self._random, self._traffic
        if self.is_done:
            return
        self.left -= 1
        output_len = 1 + int(random.expovariate(1.0 / (traffic.output_len * traffic.tenants[tenant])))
        model = ModelId(self._models.one(random))
        world.arrive(model, 1, output_len, tenant, on_end=lambda call: self._ask(world, tenant))
