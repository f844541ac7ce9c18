"""A model that runs elsewhere takes no memory, and no rule of coresidency concerns it, either way."""

from __future__ import annotations

import pytest

from greenroom.core.events import Limits
from greenroom.core.model import Group, Matrix, ModelId, Rules
from tests.core.queue.test_order import ready
from tests.core.world import Fate, World, model

ALONE = (Group("here", (ModelId("a"), ModelId("b"))),)
# A model in no set comes alone.
SETS = Matrix((("each", "a | b"),))


@pytest.mark.parametrize("swapper", ["memory", "coordinator"])
@pytest.mark.parametrize("rules", [ALONE, SETS])
def test_it_stays_beside_every_model_and_every_model_beside_it(rules: Rules, swapper: str) -> None:
    far = model("far", 0, pinned=True, preload=True, is_remote=True)
    here = [model(name, 1_000) for name in "ab"]
    world = World([far, *here], limits=Limits(swapper=swapper, company=rules))
    world.run(20.0)
    slot = world.slot_of("far")
    for number, name in enumerate(("a", "far", "b", "far", "a")):
        world.arrive(f"r{number}", name, takes_s=0.0)
        world.run(20.0)
        assert world.fate(f"r{number}") is Fate.SERVED
        assert world.slot_of("far") == slot
    assert world.kinds("far") == ["load far"]


def test_it_comes_while_a_model_that_must_be_alone_is_busy() -> None:
    world = World([model("far", 0, is_remote=True), model("a", 1_000)], limits=Limits(company=SETS))
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("r", "far", takes_s=0.0)
    world.run(20.0)
    assert world.fate("r") is Fate.SERVED
    world.finish("running")
    assert world.fate("running") is Fate.SERVED
