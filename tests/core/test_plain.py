"""The plain scheduler: the order of arrival decides, and nothing else does."""

from __future__ import annotations

from greenroom.core.events import Limits, TimerKind
from greenroom.core.model import DeviceId, MoveKind, Need, Tier
from greenroom.core.plain import PlainScheduler
from tests.core.world import HOST, Fate, World, gpu, host, model

GPU0 = DeviceId("gpu0")


def several(*names: str, gpus: int = 1, **said: object) -> World:
    models = [model(name, 6_000) for name in names]
    devices = tuple(gpu(number, 8_000) for number in range(gpus))
    return World(models, **{"devices": devices, **said}, scheduler=PlainScheduler)  # type: ignore[arg-type]


def test_models_come_in_the_order_of_the_oldest_request_for_each() -> None:
    world = several("a", "b", "c")
    for number, name in enumerate("abcab"):
        world.later(number * 0.5, lambda number=number, name=name: world.arrive(f"{number}{name}", name, takes_s=3.0))
    world.run()
    assert world.granted() == ["0a", "1b", "2c", "3a", "4b"]


def test_a_model_that_comes_serves_all_that_wait_for_it_as_many_at_once_as_it_can() -> None:
    world = World([model(name, 6_000, concurrency=2) for name in "ab"], scheduler=PlainScheduler)
    for number, name in enumerate("abab"):
        world.arrive(f"{number}{name}", name, takes_s=3.0)
    world.run()
    assert world.granted() == ["0a", "2a", "1b", "3b"]


def test_a_model_in_use_leaves_for_an_older_request_and_ends_its_answers_first() -> None:
    world = several("a", "b")
    world.arrive("runs", "a", takes_s=20.0)
    world.run(10.0)
    world.arrive("b", "b", takes_s=1.0)
    world.arrive("later", "a", takes_s=1.0)
    world.run()
    assert world.granted() == ["runs", "b", "later"] and not world.calls_by_id["runs"].was_cut


def test_a_model_that_older_requests_wait_for_stays() -> None:
    world = several("a", "b")
    for number in range(4):
        world.arrive(f"a{number}", "a", takes_s=10.0)
    world.run(6.0)
    world.arrive("b", "b", takes_s=1.0)
    world.run()
    assert world.granted() == ["a0", "a1", "a2", "a3", "b"]


def test_priorities_and_tenants_count_for_nothing() -> None:
    world = several("a", limits=Limits(policy="fifo"))
    world.arrive("runs", "a", takes_s=9.0)
    world.arrive("late", "a", takes_s=1.0, priority=2, tenant="t")
    world.arrive("flood", "a", takes_s=1.0, tenant="t")
    world.arrive("urgent", "a", takes_s=1.0, priority=0)
    asked = world.scheduler.view.explanation(world.asking("most urgent", "a", priority=-1))
    assert asked.position == 5
    world.run()
    assert world.granted() == ["runs", "late", "flood", "urgent"]


def test_nothing_younger_comes_where_an_older_one_waits_for_moves_to_end() -> None:
    wide = model("wide", 14_000, can_split=True)
    world = World([model("a", 6_000), model("b", 6_000), model("c", 6_000), wide], (gpu(0, 8_000), gpu(1, 8_000)),
                  scheduler=PlainScheduler)  # fmt: skip
    world.arrive("a", "a", takes_s=1.0)
    world.later(1.0, lambda: world.arrive("wide", "wide", takes_s=1.0))
    world.later(2.0, lambda: world.arrive("c", "c", takes_s=1.0))
    world.run()
    assert world.granted() == ["a", "wide", "c"]


def test_what_waits_for_memory_of_strangers_keeps_no_other_out() -> None:
    world = several("large", "small", gpus=1)
    world.config(model("small", 1_000))
    world.memory({GPU0: 4_000})
    world.arrive("large", "large", within_s=100.0)
    world.arrive("small", "small", takes_s=1.0)
    world.run()
    assert (world.fate("small"), world.fate("large")) == (Fate.SERVED, Fate.REJECTED)


def test_two_that_sleep_and_are_asked_for_at_the_same_time_both_come() -> None:
    asleep = Need(0, 2_000)
    models = [model(name, 6_000, asleep=asleep) for name in "ab"]
    world = World(models, (gpu(0, 8_000), host(2_500)), scheduler=PlainScheduler)
    world.ask("prepare", MoveKind.PREPARE, "a")
    world.run(10.0)
    for name in "ab":
        world.arrive(name, name, takes_s=1.0)
    world.run()
    assert world.granted() == ["a", "b"]


def hindered() -> World:
    """A model sleeps where strangers have taken the memory, and a request has come for it."""
    world = World([model("a", 6_000, asleep=Need(500, 2_000))], (gpu(0, 8_000), gpu(1, 8_000), host(8_000)),
                  scheduler=PlainScheduler)  # fmt: skip
    world.ask("prepare", MoveKind.PREPARE, "a")
    world.run(10.0)
    (slot,) = world.scheduler.state.slots.values()
    world.memory({on: 6_500 for on in slot.claim if on != HOST})
    world.arrive("a", "a", takes_s=1.0)
    assert world.tier("a") is Tier.ASLEEP and [timer.kind for timer in world.timers] == [TimerKind.SWITCH]
    return world


def test_a_sleeper_that_cannot_wake_where_it_sleeps_is_loaded_elsewhere_after_a_while() -> None:
    world = hindered()
    world.run()
    assert (world.fate("a"), world.kinds()[1:]) == (Fate.SERVED, ["unload a", "load a"])


def test_a_sleeper_wakes_at_once_when_the_memory_is_given_back() -> None:
    world = hindered()
    world.memory(dict.fromkeys(world.foreign, 0))
    assert world.kinds()[1:] == ["wake a"] and not world.timers
    world.run()
    assert world.fate("a") is Fate.SERVED


def test_what_an_operator_prepares_waits_for_host_memory() -> None:
    world = World([model("a", 6_000, asleep=Need(0, 2_000))], (gpu(0, 8_000), host(8_000)), scheduler=PlainScheduler)
    world.memory({HOST: 7_000})
    world.ask("prepare", MoveKind.PREPARE, "a")
    assert world.kinds() == []
    world.memory({HOST: 0})
    assert world.kinds() == ["prepare a"]
