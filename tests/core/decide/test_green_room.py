"""The green room: how much host memory may sleep, and which sleeping model leaves for which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greenroom.core.decide import green_room
from greenroom.core.decide.green_room import Shortfall
from greenroom.core.effects import OpOutcome
from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, ModelId, ModelSpec, MoveKind, Need, Outcome, Tier
from greenroom.core.plain import PlainScheduler
from greenroom.core.scheduler import DefaultScheduler
from tests.core.queue.test_order import ready
from tests.core.world import HOST, Engine, Fate, World, gpu, host, model

DEVICES = (gpu(0, 8_000), host(64_000))
TWO_GPUS = (gpu(0, 4_000), gpu(1, 4_000), host(64_000))
LIMITS = Limits(green_room_mib=5_000)


def sleeper(name: str, mib: int = 2_000, **more: object) -> ModelSpec:
    return model(name, 2_000, asleep=Need(0, mib), **more)


def asleep(world: World, *names: str) -> None:
    """These have been asked for and were then sent to sleep, in this order."""
    for name in names:
        ready(world, name)
        world.ask(f"sleep {name}", MoveKind.SLEEP, name)
        world.run(5.0)


def tiers(world: World, names: str) -> str:
    return "".join(world.tier(name).value[0] for name in names)


def test_without_a_limit_the_hosts_memory_is_the_limit() -> None:
    world = World([sleeper(name, 30_000) for name in "abc"], DEVICES)
    asleep(world, "a", "b", "c")
    assert tiers(world, "abc") == "aac"


def test_a_model_that_falls_asleep_evicts_the_least_valuable_sleeper() -> None:
    world = World([sleeper(name) for name in "abc"], DEVICES, LIMITS)
    asleep(world, "a", "b", "c")
    assert tiers(world, "abc") == "caa"
    assert world.reasons[world.moves[-1].id].why == "green_room"


def test_the_least_valuable_is_unloaded_rather_than_put_to_sleep() -> None:
    world = World([sleeper(name) for name in "abc"], DEVICES, LIMITS)
    for number in range(9):
        world.arrive(f"a{number}", "a", takes_s=0.0)
        world.arrive(f"b{number}", "b", takes_s=0.0)
    world.run(20.0)
    asleep(world, "a", "b", "c")
    assert tiers(world, "abc") == "aac" and world.ops["sleep c"] is OpOutcome.FAILED
    assert world.kinds("c") == ["load c", "unload c"]


def hosted(name: str, mib: int = 2_000) -> ModelSpec:
    """As workers host models: what sleeps on the host is there when it is ready too."""
    return model(name, 2_000, host_mib=mib + 500, asleep=Need(0, mib))


def folding(models: str, mib: int) -> World:
    """These say that they take so much of the host when they sleep."""
    world = World([hosted(name) for name in "abc"], DEVICES, LIMITS)
    for name in models:
        world.engines[name].seen_asleep = {HOST: mib}
    return world


def on_host(world: World) -> int:
    """What all slots take of the host, by the ledger."""
    return sum(world.scheduler.state.ledger.held_by(slot).get(HOST, 0) for slot in world.scheduler.state.slots)


@pytest.mark.parametrize(("folds", "stay"), [("", "caa"), ("ab", "aaa")])
def test_sleepers_that_take_less_than_planned_leave_room_for_one_more(folds: str, stay: str) -> None:
    world = folding(folds, 1_500)
    asleep(world, "a", "b", "c")
    assert tiers(world, "abc") == stay


def test_what_a_sleeper_does_not_take_is_free_for_others() -> None:
    world = folding("a", 1_500)
    ready(world, "a")
    assert on_host(world) == 2_500
    world.plays = False
    world.ask("o", MoveKind.SLEEP, "a")
    assert on_host(world) == 2_500, "until it has arrived it holds what it was planned with"
    world.end_move(world.moves[-1].id, Outcome.DONE)
    assert on_host(world) == 1_500
    assert world.scheduler.state.ledger.free_mib(frozenset())[HOST] == 64_000 - 1_500


def test_one_that_slept_in_less_wakes_with_less() -> None:
    world = folding("a", 1_500)
    # Of the host's memory strangers leave just what it needs now, which is less than it needed when it was loaded.
    asleep(world, "a")
    world.memory({HOST: 64_000 - 2_000})
    ready(world, "a")
    wake = world.moves[-1]
    assert (wake.kind, wake.claim) == (MoveKind.WAKE, {gpu(0, 0).id: 2_000, HOST: 2_000})
    assert on_host(world) == 2_000
    asleep(world, "a")
    assert world.tier("a") is Tier.ASLEEP and on_host(world) == 1_500


def test_what_slept_in_less_is_planned_as_before_when_it_comes_anew() -> None:
    world = folding("a", 1_500)
    asleep(world, "a")
    world.ask("away", MoveKind.UNLOAD, "a")
    world.run(5.0)
    world.plays = False
    world.ask("again", MoveKind.PREPARE, "a")
    assert (world.moves[-1].kind, world.moves[-1].claim) == (MoveKind.PREPARE, {HOST: 2_000})
    assert on_host(world) == 2_000, "while it is filled it takes all of it"
    world.end_move(world.moves[-1].id, Outcome.DONE)
    assert on_host(world) == 1_500


def test_a_choice_that_waits_for_the_green_room_comes_when_another_turns_out_smaller() -> None:
    world = World([hosted("a", 4_000), hosted("b", 4_000)], DEVICES, replace(LIMITS, green_room_mib=5_500), plays=False)
    world.engines["a"].seen_asleep = {HOST: 1_500}
    world.ask("o", MoveKind.PREPARE, "a")
    world.ask("p", MoveKind.PREPARE, "b")
    assert world.kinds() == ["prepare a"]
    world.end_move(world.moves[0].id, Outcome.DONE)
    assert world.kinds() == ["prepare a", "prepare b"]


def test_when_ready_it_keeps_no_less_than_its_copy_takes() -> None:
    """Planned with less host memory ready than asleep: sparing it asleep lowers both, never below the copy itself."""
    world = World([model("a", 2_000, host_mib=1_800, asleep=Need(0, 2_000))], DEVICES)
    world.engines["a"].seen_asleep = {HOST: 1_500}
    asleep(world, "a")
    assert world.scheduler.state.slots_of(world.moves[0].model)[0].claim[HOST] == 1_500
    world.engines["a"].seen_asleep = {HOST: 100}
    ready(world, "a")
    asleep(world, "a")
    assert world.scheduler.state.slots_of(world.moves[0].model)[0].claim[HOST] == 100


@pytest.mark.parametrize("seen", [{HOST: 2_600}, {gpu(0, 0).id: 20}, {}])
def test_what_is_seen_elsewhere_or_beyond_leaves_claims_as_they_are(seen: dict[DeviceId, int]) -> None:
    world = World([model("a", 2_000, host_mib=2_500, asleep=Need(100, 2_000))], DEVICES)
    world.engines["a"].seen_asleep = seen
    asleep(world, "a")
    slot = world.scheduler.state.slots_of(world.moves[0].model)[0]
    assert (slot.claim, slot.claim_asleep) == ({gpu(0, 0).id: 2_000, HOST: 2_500}, {gpu(0, 0).id: 100, HOST: 2_000})
    assert on_host(world) == max(2_000, seen.get(HOST, 0))


def test_size_counts_and_as_few_leave_as_are_needed() -> None:
    world = World([sleeper("large", 4_000), sleeper("small", 1_000), sleeper("new", 3_000)], DEVICES, LIMITS)
    asleep(world, "large", "small", "new")
    assert [world.tier(name) for name in ("large", "small", "new")] == [Tier.COLD, Tier.ASLEEP, Tier.ASLEEP]


def test_what_is_larger_than_the_green_room_never_sleeps() -> None:
    world = World([sleeper("a", 6_000)], DEVICES, LIMITS)
    asleep(world, "a")
    assert world.tier("a") is Tier.COLD
    world.ask("o", MoveKind.PREPARE, "a")
    assert world.ops["o"] is OpOutcome.TOO_LARGE


def test_what_takes_no_host_memory_always_may() -> None:
    world = World([model("a", 2_000, asleep=Need(100)), sleeper("b")], DEVICES, replace(LIMITS, green_room_mib=0))
    asleep(world, "a", "b")
    assert tiers(world, "ab") == "ac"
    world.config(limits=replace(LIMITS, green_room_mib=0))
    world.ask("o", MoveKind.PREPARE, "a")
    world.run(5.0)
    assert world.tier("a") is Tier.ASLEEP and world.ops["o"] is OpOutcome.DONE


def test_a_swap_counts_with_what_the_green_room_takes() -> None:
    """A model that cannot sleep goes cold and frees all its memory."""
    world = World([model("old", 6_000, asleep=Need(3_000, 6_000)), model("new", 5_000)], DEVICES, LIMITS)
    ready(world, "old")
    world.arrive("r", "new", takes_s=0.0)
    world.run(20.0)
    assert world.kinds("old") == ["load old", "unload old"] and world.fate("r") is Fate.SERVED


def test_an_operators_choice_comes_whatever_it_is_worth() -> None:
    world = World([sleeper(name) for name in "abc"], DEVICES, LIMITS)
    asleep(world, "a", "b")
    world.ask("o", MoveKind.PREPARE, "c")
    world.run(10.0)
    assert tiers(world, "abc") == "caa" and world.ops["o"] is OpOutcome.DONE


def test_a_model_about_to_wake_no_longer_counts_in_the_green_room() -> None:
    world = World([sleeper("a", 4_000), sleeper("b", 4_000)], DEVICES, LIMITS)
    asleep(world, "a")
    world.plays = False
    world.arrive("r", "a")
    world.ask("o", MoveKind.PREPARE, "b")
    assert world.kinds()[-2:] == ["wake a", "prepare b"]


def test_a_waking_model_and_its_sleeping_victim_change_places() -> None:
    world = World(
        [model("a", 6_000, asleep=Need(0, 4_000)), model("b", 6_000, asleep=Need(0, 4_000))],
        DEVICES,
        LIMITS,
    )
    asleep(world, "a")
    ready(world, "b")
    world.arrive("r", "a", takes_s=0.0)
    world.run(10.0)
    assert tiers(world, "ab") == "ra" and world.kinds("b") == ["load b", "sleep b"]


def on_each_gpu(*names: str) -> list[ModelSpec]:
    return [model(name, devices=(DeviceId(f"gpu{number}"),)) for number, name in enumerate(names)]


def beside_busy(others: str, **more: object) -> World:
    """a sleeps on the first GPU, where b is ready, and c on the second. The `others` answer for a minute."""
    world = World([model("a", 4_000, asleep=Need(0, 4_000), **more), *on_each_gpu("b", "c")], TWO_GPUS, LIMITS)
    asleep(world, "a")
    ready(world, "b", "c")
    for name in others:
        world.arrive(f"{name} busy", name, takes_s=60.0)
    world.run(1.0)
    return world


def test_a_model_wakes_although_its_victim_must_be_unloaded() -> None:
    """The victim has a place in the green room only once the other has woken, and would keep too much of the GPU."""
    models = [model("a", 7_000, asleep=Need(0, 4_000)), model("b", 6_000, asleep=Need(1_500, 4_000))]
    world = World(models, DEVICES, LIMITS)
    for _ in range(3):
        ready(world, "a")
    asleep(world, "a")
    ready(world, "b")
    world.arrive("r", "a", takes_s=0.0)
    world.run(60.0)
    assert (world.fate("r"), world.kinds()[-2:]) == (Fate.SERVED, ["unload b", "wake a"])


def waits_beside_one_in_use(*, wake_s: float) -> float:
    """How long b waits for a, which loads in 5 s, wakes in that time and is asked for all the time."""
    world = World([model("a", 6_000, asleep=Need(0, 4_000), concurrency=2), model("b", 6_000)], DEVICES, LIMITS)
    world.engines["a"] = Engine(load_s=5.0, wake_s=wake_s)
    asleep(world, "a")
    world.arrive("wakes a", "a", takes_s=0.0)
    world.run(100.0)
    for number in range(500):
        world.later(2.0 * number, lambda name=f"a {number}": world.arrive(name, "a", takes_s=3.0))
    world.run(30.0)
    call = world.arrive("b", "b", takes_s=1.0)
    world.run(900.0)
    return call.granted_at - call.arrived


def test_a_model_that_wakes_more_slowly_than_it_loads_leaves_as_soon_as_one_that_cannot_sleep() -> None:
    assert waits_beside_one_in_use(wake_s=60.0) == waits_beside_one_in_use(wake_s=5.0)


def test_a_sleeper_whose_gpu_is_busy_is_loaded_on_another_one_and_its_copy_leaves() -> None:
    world = beside_busy("b")
    call = world.arrive("a now", "a", takes_s=1.0)
    world.run(30.0)
    assert call.granted_at - call.arrived < 30.0
    assert world.kinds("a")[-2:] == ["unload a", "load a"] and tiers(world, "abc") == "rrc"


def test_a_sleeper_waits_for_its_gpu_for_as_long_as_a_load_elsewhere_would_take_longer() -> None:
    world = World([model("a", 4_000, asleep=Need(0, 4_000)), *on_each_gpu("b", "c")], TWO_GPUS, LIMITS)
    world.engines["a"] = Engine(load_s=10.0, wake_s=1.0)
    asleep(world, "a")
    ready(world, "b", "c")
    for takes_s, comes_by in ((8.5, "wake a"), (9.5, "load a")):
        world.arrive(f"b for {takes_s}", "b", takes_s=takes_s)
        call = world.arrive(f"a beside {takes_s}", "a", takes_s=1.0)
        world.run(30.0)
        assert world.kinds("a")[-1] == comes_by and call.granted_at - call.arrived < 9.0 + 10.0 + 2.0
        world.ask(f"back after {takes_s}", MoveKind.SLEEP, "a")
        world.run(30.0)
        ready(world, "b")


def waits_s(may_sleep: bool, held_by: str, load_s: float = 60.0, others: int = 0) -> float:
    """How long `a` waits, whose GPU is held, while `b` is in constant use on the other GPU that `a` may use.

    As many others as said are in constant use on GPUs that it may not use.
    """
    gpu0, gpu1 = DeviceId("gpu0"), DeviceId("gpu1")
    models = [
        model("a", 7_000, asleep=Need(0, 4_000) if may_sleep else None, devices=(gpu0, gpu1)),
        model("b", 7_000, devices=(gpu1,)),
        *(model(f"o{number}", 7_000, devices=(DeviceId(f"gpu{number + 2}"),)) for number in range(others)),
    ]
    world = World(models, (*(gpu(number, 8_000) for number in range(others + 2)), host(64_000)))
    world.engines["a"] = Engine(load_s=load_s, wake_s=1.0)
    world.arrive("first", "a", takes_s=0.0)
    world.run(200.0)
    world.ask("o", MoveKind.SLEEP if may_sleep else MoveKind.UNLOAD, "a")
    world.run(10.0)
    if held_by == "a lease":
        world.ask_lease("train", 7_000, devices=(gpu0,))
    else:
        world.memory({gpu0: 5_000})
    for name in ("b", *(f"o{number}" for number in range(others))):
        world.keep_busy(name, 20.0, for_s=2_000.0)
    world.run(60.0)
    waits = world.arrive("r", "a", takes_s=1.0)
    world.run(1_900.0)
    assert waits.fate is Fate.SERVED
    return waits.granted_at - waits.arrived


@pytest.mark.parametrize("held_by", ["a lease", "an undeclared process"])
def test_a_sleeper_whose_gpu_is_held_for_good_comes_elsewhere_like_one_that_is_cold(held_by: str) -> None:
    """There the model in constant use is closed for it at the price of a load, which is due later than a wake."""
    asleep_s, cold_s = waits_s(True, held_by), waits_s(False, held_by)
    assert asleep_s == pytest.approx(cold_s, abs=1.0) and cold_s > 500.0


def test_models_on_gpus_that_it_may_not_use_do_not_matter_to_a_sleeper_whose_own_is_held() -> None:
    assert waits_s(True, "a lease", load_s=5.0, others=4) == pytest.approx(
        waits_s(True, "a lease", load_s=5.0), abs=5.0
    )


def test_a_sleeper_waits_for_a_model_on_its_gpu_that_may_soon_be_closed() -> None:
    """Its own GPU and the other one have models in constant use: a wake is worth to wait for, and one of them stays."""
    gpu0, gpu1 = DeviceId("gpu0"), DeviceId("gpu1")
    world = World(
        [
            model("a", 7_000, asleep=Need(0, 4_000), devices=(gpu0, gpu1)),
            model("b", 7_000, devices=(gpu0,)),
            model("c", 7_000, devices=(gpu1,)),
        ],
        (gpu(0, 8_000), gpu(1, 8_000), host(64_000)),
    )
    world.engines["a"] = Engine(load_s=60.0, wake_s=1.0)
    world.arrive("first", "a", takes_s=0.0)
    world.run(200.0)
    world.ask("o", MoveKind.SLEEP, "a")
    world.run(10.0)
    for name in "bc":
        world.keep_busy(name, 20.0, for_s=2_000.0)
    world.run(60.0)
    waits = world.arrive("r", "a", takes_s=1.0)
    world.run(1_900.0)
    assert waits.fate is Fate.SERVED and world.kinds("a")[2:] == ["wake a", "sleep a"]
    assert "unload c" not in world.kinds() and "unload b" in world.kinds()


def test_a_sleeper_that_is_preloaded_beside_a_busy_model_is_loaded_elsewhere() -> None:
    world = World([model("a", 4_000, asleep=Need(0, 4_000)), *on_each_gpu("b")], TWO_GPUS, LIMITS)
    asleep(world, "a")
    ready(world, "b")
    world.arrive("b busy", "b", takes_s=600.0)
    world.config(model("a", 4_000, asleep=Need(0, 4_000), preload=True))
    world.run(60.0)
    assert tiers(world, "ab") == "rr"


@pytest.mark.parametrize(("others", "more"), [("bc", {}), ("b", {"pinned": True})])
def test_a_sleeper_wakes_where_it_sleeps_if_all_gpus_are_busy_or_it_is_pinned(
    others: str, more: dict[str, object]
) -> None:
    world = beside_busy(others, **more)
    world.arrive("a now", "a", takes_s=1.0)
    world.run(120.0)
    assert world.kinds("a")[-1] == "wake a"


def test_two_choices_that_do_not_fit_together_come_one_after_the_other() -> None:
    world = World([sleeper("a", 4_000), sleeper("b", 4_000)], DEVICES, LIMITS, plays=False)
    world.ask("o", MoveKind.PREPARE, "a")
    world.ask("p", MoveKind.PREPARE, "b")
    assert world.kinds() == ["prepare a"]
    world.end_move(world.moves[0].id, Outcome.DONE)
    assert world.kinds() == ["prepare a", "prepare b", "unload a"]


def test_a_choice_that_has_to_wait_for_memory_finds_its_place_taken() -> None:
    """Its place in the green room was free when it was planned, and is not when its memory is."""
    world = World(
        [
            sleeper("a", 4_000),
            model("b", 2_000, host_mib=30_000, asleep=Need(0, 4_000)),
            model("c", 2_000, host_mib=30_000),
        ],
        (gpu(0, 8_000), host(32_000)),
        LIMITS,
        plays=False,
    )
    world.arrive("r", "c")
    world.end_move(world.moves[-1].id, Outcome.DONE)
    world.finish("r")
    world.ask("o", MoveKind.PREPARE, "b")
    assert world.kinds() == ["load c", "unload c"]
    world.ask("p", MoveKind.PREPARE, "a")
    world.end_move(world.moves[1].id, Outcome.DONE)
    moved = world.kinds()[2:]
    for _ in range(3):
        while world.moving:
            world.end_move(next(iter(world.moving)), Outcome.DONE)
    assert moved and world.ops == {"o": OpOutcome.DONE, "p": OpOutcome.DONE}


def test_pinned_sleepers_stay_and_what_they_leave_is_all_there_is() -> None:
    world = World([sleeper("a", 3_000, pinned=True), sleeper("b", 3_000)], DEVICES, LIMITS)
    asleep(world, "a", "b")
    assert tiers(world, "ab") == "ac"
    rejection = world.scheduler
    world.ask("o", MoveKind.PREPARE, "b")
    assert world.ops["o"] is OpOutcome.TOO_LARGE and rejection is world.scheduler


@pytest.mark.parametrize("limit_mib", [4_000, 2_000, 0])
def test_a_lower_limit_makes_sleepers_leave_at_once(limit_mib: int) -> None:
    world = World([sleeper(name) for name in "ab"], DEVICES, LIMITS)
    asleep(world, "a", "b")
    world.config(limits=replace(LIMITS, green_room_mib=limit_mib))
    world.run(5.0)
    assert tiers(world, "ab") == {4_000: "aa", 2_000: "ca", 0: "cc"}[limit_mib]


def test_a_crash_that_leaves_a_copy_is_trimmed_too() -> None:
    world = World([sleeper(name, 3_000) for name in "ab"], DEVICES, LIMITS)
    asleep(world, "a")
    ready(world, "b")
    world.lose(world.slot_of("b"), left_in=Tier.ASLEEP)
    world.run(5.0)
    assert tiers(world, "ab") == "ca"


def test_a_wake_that_is_refused_is_trimmed_again() -> None:
    world = World([sleeper(name, 3_000) for name in "ab"], DEVICES, replace(LIMITS, green_room_mib=6_000))
    asleep(world, "a", "b")
    world.plays = False
    world.arrive("r", "a")
    world.config(limits=replace(LIMITS, green_room_mib=0))
    assert world.kinds()[-2:] == ["wake a", "unload b"], "a waking model cannot leave"
    world.go("r")
    world.end_move(next(move.id for move in world.moves if move.kind is MoveKind.WAKE), Outcome.NO_LEASE)
    assert world.kinds()[-1] == "unload a"


def test_a_model_is_unloaded_if_the_green_room_shrinks_while_it_falls_asleep() -> None:
    world = World([sleeper("a", 3_000)], DEVICES, LIMITS)
    ready(world, "a")
    world.plays = False
    world.ask("o", MoveKind.SLEEP, "a")
    world.config(limits=replace(LIMITS, green_room_mib=0))
    assert world.kinds()[-1] == "sleep a"
    world.end_move(world.moves[-1].id, Outcome.DONE)
    assert world.kinds()[-1] == "unload a"


def test_a_machine_whose_host_is_gone_has_no_green_room_to_keep() -> None:
    world = World([sleeper("a", 4_000)], DEVICES, LIMITS)
    asleep(world, "a")
    world.config(devices=(gpu(0, 8_000),), limits=replace(LIMITS, green_room_mib=0))
    assert world.tier("a") is Tier.ASLEEP
    world.config(devices=DEVICES)
    world.run(5.0)
    assert world.tier("a") is Tier.COLD and world.devices[HOST].capacity_mib == 64_000


def test_a_sleeper_of_a_model_that_is_gone_is_worth_nothing() -> None:
    world = World([sleeper(name, 2_000) for name in "ab"], DEVICES, LIMITS, plays=False)
    for name in "ab":
        world.arrive(name, name)
        world.end_move(world.moves[-1].id, Outcome.DONE)
        world.finish(name)
    world.ask("o", MoveKind.SLEEP, "a")
    world.config(removed=("a",))
    world.end_move(world.moves[-1].id, Outcome.DONE)
    world.ask("p", MoveKind.SLEEP, "b")
    assert world.kinds()[-2:] == ["unload a", "sleep b"]


def test_why_a_model_can_never_sleep_is_told_in_numbers() -> None:
    pinned, large = sleeper("a", 4_000, pinned=True), sleeper("b", 3_000)
    world = World([pinned, large, model("c", 2_000)], DEVICES, LIMITS)
    state = world.scheduler.state
    assert green_room.shortfall(state, large) is None
    assert green_room.shortfall(state, sleeper("b", 6_000)) == Shortfall(6_000, 5_000, 0)
    assert green_room.shortfall(state, state.models[ModelId("c")].spec) is None
    asleep(world, "a")
    assert green_room.shortfall(state, large) == Shortfall(3_000, 5_000, 4_000)


def test_without_a_limit_a_model_can_lack_the_hosts_memory_alone() -> None:
    assert green_room.shortfall(World([], DEVICES).scheduler.state, sleeper("a", 64_001)) == Shortfall(
        64_001, 64_000, 0
    )
    assert green_room.shortfall(World([], DEVICES[:1]).scheduler.state, sleeper("a", 64_001)) is None


@pytest.mark.parametrize("scheduler", [DefaultScheduler, PlainScheduler])
def test_what_leaves_the_green_room_makes_room_for_what_waits_at_once(scheduler: type[PlainScheduler]) -> None:
    models = (model("old", 6_000, asleep=Need(500, 4_000), concurrency=1), model("large", 7_000), model("other", 800))
    world = World(models, DEVICES, plays=False, scheduler=scheduler, limits=Limits(policy="fifo"))
    world.arrive("first", "old")
    world.end_move(next(iter(world.moving)), Outcome.DONE)
    world.arrive("second", "large")
    world.arrive("third", "other")
    world.config(limits=Limits(policy="fifo", green_room_mib=3_000))
    # Its last answer is not reported as ended yet, so its sleeping copy stays for now; and it exceeds the green room.
    world.lose(next(iter(world.places)), left_in=Tier.ASLEEP)
    assert {world.tier(name) for name in ("large", "other")} == {Tier.COLD}
    coming = {slot.model for slot in world.scheduler.state.slots.values() if slot.is_arriving}
    assert coming == {"large", "other"}
