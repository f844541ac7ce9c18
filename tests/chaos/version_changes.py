"""Updates among the faults: versions come beside their models, take their names or their places, or are given up."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from greenroom.core.effects import OpOutcome
from greenroom.core.model import ModelId, MoveKind, OpId
from greenroom.sim.config import SimModel
from greenroom.sim.world import World
from tests.chaos.disturbances import named
from tests.chaos.fault_plan import FaultCounts
from tests.chaos.scenario import Scenario, draw_timings

RATE = 0.1
LOOKED_EVERY_S = 1.0
# An update that takes longer is given up.
UPDATE_MAX_S = 60.0
PROMOTED, HOLDS = 0.8, 0.6


class VersionChanges:
    def __init__(self, scenario: Scenario, counts: FaultCounts) -> None:
        self._counts = counts
        self._random = Random(f"{scenario.seed}:versions")
        self._number = 1_000_000
        self._coming: dict[ModelId, ModelId] = {}
        self._is_over = False

    def begin(self, world: World) -> None:
        world.after(self._random.expovariate(RATE), self._strike)

    def stop(self, world: World) -> None:
        """No version is on its way any more, and nothing is held."""
        self._is_over = True
        for name in list(self._coming):
            self._give_up(world, name)
        for name in named(world):
            self._release(world, name)

    def _strike(self, world: World) -> None:
        if self._is_over:
            return
        names = [name for name in named(world) if name not in self._coming]
        if names:
            self._update(world, self._random.choice(names))
        self.begin(world)

    def _update(self, world: World, name: ModelId) -> None:
        self._counts.count("version_came")
        self._number += 1
        spec = replace(
            world.models[name].spec,
            id=ModelId(f"{name}@{self._number}"),
            revision=self._number,
            version_of=name,
            pinned=False,
            preload=False,
            exclusive="",
            held=False,
        )
        self._coming[name] = spec.id
        world.change_config([SimModel(spec, draw_timings(self._random))])
        self._wait(world, name, world.ask_move(MoveKind.LOAD, spec.id), world.now + UPDATE_MAX_S)

    def _wait(self, world: World, name: ModelId, op: OpId, until: float) -> None:
        world.after(LOOKED_EVERY_S, lambda world: self._look(world, name, op, until))

    def _look(self, world: World, name: ModelId, op: OpId, until: float) -> None:
        if self._is_over:
            return
        outcome = world.ops[op]
        if name not in world.models or (outcome is None and world.now > until):
            self._give_up(world, name)
        elif outcome is None:
            self._wait(world, name, op, until)
        elif outcome is OpOutcome.DONE and self._random.random() < PROMOTED:
            self._promote(world, name)
        elif outcome is OpOutcome.TOO_LARGE and not world.models[name].spec.held and self._random.random() < HOLDS:
            self._hold(world, name, until)
        else:
            self._give_up(world, name)

    def _promote(self, world: World, name: ModelId) -> None:
        self._counts.count("version_promoted")
        self._number += 1
        coming, old = world.models[self._coming.pop(name)], world.models[name].spec
        spec = replace(
            coming.spec,
            id=name,
            revision=self._number,
            version_of=None,
            pinned=old.pinned,
            preload=old.preload,
            exclusive=old.exclusive,
        )
        world.promote(coming.spec.id, SimModel(spec, coming.timings))

    def _hold(self, world: World, name: ModelId, until: float) -> None:
        self._counts.count("version_held")
        model = world.models[name]
        world.change_config([SimModel(replace(model.spec, held=True), model.timings)])
        self._wait(world, name, world.ask_move(MoveKind.LOAD, self._coming[name]), until)

    def _give_up(self, world: World, name: ModelId) -> None:
        self._counts.count("version_given_up")
        world.change_config(removed=(self._coming.pop(name),))
        self._release(world, name)

    def _release(self, world: World, name: ModelId) -> None:
        model = world.models.get(name)
        if model is not None and model.spec.held:
            world.change_config([SimModel(replace(model.spec, held=False), model.timings)])
