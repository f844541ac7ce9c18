"""How long an idle model stays: its own ttl, or what the latest request said."""

from __future__ import annotations

import pytest

from greenroom.core.events import Timer, TimerKind
from greenroom.core.model import MoveKind, Need, Outcome, Tier
from tests.core.world import Fate, World, gpu, host, model

HOUR_S = 3_600.0


def served(world: World, name: str, keep_alive_s: float | None = None, on: str = "a") -> None:
    world.arrive(name, on, takes_s=1.0, keep_alive_s=keep_alive_s)
    world.run(8.0)
    assert world.fate(name) is Fate.SERVED


def test_what_a_request_says_counts_rather_than_the_models_own_ttl() -> None:
    world = World([model("a", ttl_s=10.0)])
    served(world, "r", keep_alive_s=100.0)
    world.run(50.0)
    assert world.tier("a") is Tier.READY
    world.run(60.0)
    assert world.tier("a") is Tier.COLD and world.reasons[world.moves[-1].id].why == "ttl"


def test_zero_leaves_as_soon_as_it_is_idle() -> None:
    world = World([model("a")])
    world.arrive("first", "a", takes_s=1.0, keep_alive_s=0.0)
    world.arrive("second", "a", takes_s=1.0)
    world.run()
    assert world.fate("second") is Fate.SERVED, "waiting requests are served before it leaves"
    assert world.kinds() == ["load a", "unload a"]
    assert world.moves[1].started == pytest.approx(7.0)


def test_zero_sleeps_where_that_is_possible() -> None:
    world = World([model("a", asleep=Need(0, 2_000))], devices=(gpu(0, 8_000), host(8_000)))
    served(world, "r", keep_alive_s=0.0)
    assert world.kinds() == ["load a", "sleep a"]


def test_minus_one_stays_until_its_place_is_needed() -> None:
    world = World([model("a", 6_000, ttl_s=10.0), model("b", 6_000)])
    served(world, "r", keep_alive_s=-1.0)
    world.run(HOUR_S)
    assert world.tier("a") is Tier.READY
    served(world, "other", on="b")
    assert world.tier("a") is Tier.COLD


def test_minus_one_stops_a_timer_that_was_set_already() -> None:
    world = World([model("a", ttl_s=20.0)])
    served(world, "r1")
    assert Timer(TimerKind.IDLE, world.slot_of("a")) in world.timers
    served(world, "r2", keep_alive_s=-1.0)
    world.run(HOUR_S)
    assert world.tier("a") is Tier.READY and not world.timers


def test_the_latest_request_counts_and_one_that_says_nothing_changes_nothing() -> None:
    world = World([model("a", ttl_s=10.0)])
    served(world, "long", keep_alive_s=500.0)
    served(world, "silent")
    world.run(200.0)
    assert world.tier("a") is Tier.READY
    served(world, "short", keep_alive_s=5.0)
    world.run(10.0)
    assert world.tier("a") is Tier.COLD


def test_what_was_said_of_one_stay_does_not_hold_for_the_next() -> None:
    for spec in (model("a", ttl_s=10.0), model("a", ttl_s=10.0, asleep=Need(0, 2_000))):
        world = World([spec], devices=(gpu(0, 8_000), host(8_000)))
        served(world, "gone at once", keep_alive_s=0.0)
        assert world.tier("a") is not Tier.READY
        served(world, "again")
        assert world.tier("a") is Tier.READY
        world.run(20.0)
        assert world.tier("a") is not Tier.READY


def test_pinned_models_stay_whatever_a_request_says() -> None:
    world = World([model("a", pinned=True)])
    served(world, "r", keep_alive_s=0.0)
    world.run(HOUR_S)
    assert world.tier("a") is Tier.READY


def test_an_operators_load_stays_for_the_models_own_ttl() -> None:
    world = World([model("a", ttl_s=30.0)])
    world.ask("o", MoveKind.LOAD, "a")
    world.run(20.0)
    assert world.tier("a") is Tier.READY
    world.run(30.0)
    assert world.tier("a") is Tier.COLD


def test_a_timer_that_fires_while_it_is_busy_is_set_again_when_it_is_idle() -> None:
    world = World([model("a", concurrency=2)], plays=False)
    world.arrive("r1", "a", keep_alive_s=3.0)
    world.end_move(world.moves[0].id, Outcome.DONE)
    world.finish("r1")
    world.arrive("r2", "a")
    world.run(10.0)
    assert world.kinds() == ["load a"] and not world.timers
    world.finish("r2")
    assert world.timers == {Timer(TimerKind.IDLE, world.slot_of("a")): 13.0}
