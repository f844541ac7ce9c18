from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from greenroom.core.model import ModelId
from greenroom.sim.records import Fate, SimArrival
from greenroom.sim.workloads import Agents, Bursty, Draw, Mix, Poisson, Recorded, zipf
from greenroom.sim.world import World
from tests.sim.settings import names, setting, sim_model

MIX = Mix(zipf(names(4)), tenants={"x": 3.0, "y": 1.0}, priorities={0: 1.0, 2: 1.0})


def test_poisson_brings_as_many_as_its_rate_says() -> None:
    rows = list(Poisson(MIX, rate=5.0, seconds=1_000.0, seed=1).arrivals())
    assert len(rows) == pytest.approx(5_000, rel=0.06)
    gaps = [after.at - before.at for before, after in pairwise(rows)]
    assert min(gaps) >= 0 and rows[-1].at < 1_000.0
    # Exponential gaps stray from their mean by their mean.
    spread = (sum((gap - 0.2) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(0.2, rel=0.15)


def test_the_mix_sets_the_shares_of_models_tenants_and_classes() -> None:
    rows = list(Poisson(MIX, rate=10.0, seconds=1_000.0).arrivals())
    models = Counter(row.model for row in rows)
    assert [name for name, _ in models.most_common()] == names(4)
    assert models["m0"] / models["m3"] == pytest.approx(4.0, rel=0.25)
    tenants, classes = Counter(row.tenant for row in rows), Counter(row.priority for row in rows)
    assert tenants["x"] / tenants["y"] == pytest.approx(3.0, rel=0.2) and set(classes) == {0, 2}
    assert sum(row.output_len for row in rows) / len(rows) == pytest.approx(200, rel=0.1)
    assert min(row.prompt_len for row in rows) >= 1


def test_a_draw_is_that_of_the_standard_library_so_that_seeds_keep_what_they_draw() -> None:
    weights = {"a": 0.1, "b": 3.0, "c": 1.0}
    one, other, draw = Random(3), Random(3), Draw(weights)
    ours = [draw.one(one) for _ in range(500)]
    assert ours == [other.choices(list(weights), list(weights.values()))[0] for _ in range(500)]
    assert set(ours) == set(weights)


def test_a_model_with_a_priority_of_its_own_keeps_it() -> None:
    mix = Mix(zipf(names(2)), priority_of={"m0": 0})
    rows = list(Poisson(mix, rate=5.0, seconds=100.0).arrivals())
    assert {(row.model, row.priority) for row in rows} == {("m0", 0), ("m1", 1)}


def test_bursts_come_at_the_same_mean_rate_but_together() -> None:
    rows = list(Bursty(MIX, rate=2.0, seconds=20_000.0, seed=3).arrivals())
    assert len(rows) == pytest.approx(40_000, rel=0.15)
    in_tens = Counter(int(row.at // 10) for row in rows)
    empty = 2_000 - len(in_tens)
    # Poisson arrivals of this rate would leave no ten seconds in a million empty.
    assert empty > 200 and max(in_tens.values()) > 60


@pytest.mark.parametrize("kind", [Poisson, Bursty])
def test_the_same_seed_brings_the_same_callers(kind: type[Poisson] | type[Bursty]) -> None:
    def rows(seed: int) -> list[SimArrival]:
        return list(kind(MIX, 1.0, 200.0, seed).arrivals())

    assert rows(7) == rows(7) != rows(8)


def test_agents_alternate_models_and_wait_for_each_answer() -> None:
    world = World(setting(*(sim_model(name) for name in names(4)), mib=4_000))
    Agents(MIX, agents=1, seconds=300.0, think_s=1.0, seed=2).begin(world)
    world.run()
    asked = [call.model for call in world.ended]
    assert len(asked) > 20 and len(set(asked)) == 2
    assert all(before != after for before, after in pairwise(asked))
    assert all(after.arrived > before.ended_at for before, after in pairwise(world.ended))


def test_agents_ask_again_when_they_are_refused() -> None:
    world = World(setting(sim_model("m0")))
    Agents(Mix({"nobody": 1.0}), agents=2, seconds=50.0, think_s=1.0).begin(world)
    world.run()
    assert len(world.ended) > 20 and {call.fate for call in world.ended} == {Fate.REJECTED}


def test_a_recording_can_be_stretched() -> None:
    rows = [SimArrival(at, ModelId("m0"), 1, 1) for at in (0.0, 1.0, 2.5)]
    recorded = Recorded(rows, stretch=4.0)
    assert [row.at for row in recorded.arrivals()] == [0.0, 4.0, 10.0] and recorded.seconds == 10.0
    assert list(Recorded(rows).arrivals()) == rows and Recorded([]).seconds == 0.0
