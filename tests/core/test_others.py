"""What others have a say in: strangers' memory, leases of other gateways, a store that refuses, measured needs."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from greenroom.core import events as ev
from greenroom.core.decide.plan import Wait
from greenroom.core.effects import OpOutcome, RejectCode, Rejection
from greenroom.core.events import Limits, Timer, TimerKind
from greenroom.core.explain import Outlook
from greenroom.core.ledger import Holding
from greenroom.core.model import (
    DeviceId,
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
from tests.core.decide.test_memory import victims
from tests.core.queue.test_order import ready

from .world import Fate, World, gpu, host, model

GPU0, GPU1 = DeviceId("gpu0"), DeviceId("gpu1")


def other(mib: int, on: DeviceId = GPU0, holder: str = "finetune", name: str = "l-1") -> OtherLease:
    return OtherLease(LeaseId(name), holder, {on: mib}, priority=2, preemptible=True)


def needs(world: World) -> dict[ModelId, Need]:
    return {name: record.need for name, record in world.scheduler.state.models.items()}


def rejection_of(world: World, name: str) -> Rejection:
    rejection = world.calls_by_id[name].rejection
    assert rejection is not None
    return rejection


# --- leases that others have taken -----------------------------------------------------------------------------------


def taken(world: World, *slots: SlotId) -> None:
    world.memory({}, leases=(other(6_000),))
    world.post(ev.MemoryChanged(world.now, {}, taken=slots))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_slot_whose_memory_was_granted_to_another_leaves_at_once_and_its_answers_are_cut(pinned: bool) -> None:
    world = World([model("a", 6_000, pinned=pinned)])
    ready(world, "a")
    world.arrive("r", "a", takes_s=100.0)
    (slot,) = world.places
    taken(world, slot)
    assert world.calls_by_id["r"].was_cut
    world.run(5.0)
    last = world.moves[-1]
    assert last.kind is MoveKind.UNLOAD and "lease_lost" in str(world.reasons[last.id]) and not world.places


def test_a_preloaded_model_whose_memory_was_taken_returns_when_it_is_free() -> None:
    world = World([model("a", 6_000, pinned=True, preload=True)])
    world.run(60.0)
    (slot,) = world.places
    taken(world, slot)
    world.run(60.0)
    assert not world.places
    world.memory({}, leases=())
    world.run(60.0)
    assert len(world.places) == 1 and slot not in world.places


def test_a_load_is_aborted_where_its_memory_was_granted_to_another() -> None:
    world = World([model("a", 6_000)])
    world.arrive("r", "a", takes_s=1.0)
    (slot,) = world.scheduler.state.slots
    taken(world, slot)
    world.run(60.0)
    assert not world.places and world.fate("r") is Fate.WAITING


def test_a_slot_that_is_gone_already_has_nothing_to_leave() -> None:
    world = World([model("a", 6_000)])
    ignored = world.scheduler.state.counters.ignored
    taken(world, SlotId("gone"))
    assert world.scheduler.state.counters.ignored == ignored + 1


# --- strangers --------------------------------------------------------------------------------------------------------


def test_foreign_memory_beyond_what_is_free_evicts_no_model() -> None:
    world = World([model(name, 2_500) for name in "abc"])
    ready(world, "a", "b", "c")
    for foreign_mib in (500, 8_000, 3_000, 30_000):
        world.memory({GPU0: foreign_mib})
        world.run(60.0)
    assert world.kinds() == ["load a", "load b", "load c"]
    world.arrive("r", "a", takes_s=0.0)
    assert world.fate("r") is Fate.GRANTED, "what is there goes on serving"


def test_no_model_is_evicted_for_a_newcomer_that_would_not_fit_even_then() -> None:
    world = World([model(name, 2_500) for name in "abc"] + [model("new", 4_000)])
    ready(world, "a", "b", "c")
    world.memory({GPU0: 5_000})
    world.arrive("r", "new", takes_s=0.0)
    world.run(600.0)
    assert not victims(world) and world.fate("r") is Fate.WAITING
    world.memory({GPU0: 0})
    world.run(60.0)
    assert world.fate("r") is Fate.SERVED and len(victims(world)) == 2


def test_evictions_for_a_newcomer_make_up_for_foreign_memory_too() -> None:
    world = World([model(name, 2_500) for name in "abc"] + [model("new", 2_000)])
    ready(world, "a", "b", "c")
    world.memory({GPU0: 2_500})
    world.arrive("r", "new", takes_s=0.0)
    world.run(60.0)
    assert world.fate("r") is Fate.SERVED and len(victims(world)) == 2


def test_a_split_goes_round_what_strangers_hold_for_long() -> None:
    world = World(
        [model("small", 3_000, devices=(GPU0,)), model("wide", 10_000, can_split=True)],
        (gpu(0, 8_000), gpu(1, 8_000)),
    )
    ready(world, "small")
    world.memory({GPU1: 4_000})
    world.arrive("r", "wide", takes_s=0.0)
    world.run(60.0)
    assert world.fate("r") is Fate.SERVED and victims(world) == ["small"]
    assert world.moves[-1].claim == {GPU0: 6_667, GPU1: 3_334}


def test_a_split_goes_round_what_programs_hold_by_lease() -> None:
    world = World([model("wide", 10_000, can_split=True), model("small", 1_000)], (gpu(0, 8_000), gpu(1, 8_000)))
    world.ask_lease("train", 4_000, devices=(GPU1,))
    ready(world, "small")
    world.arrive("r", "wide", takes_s=0.0)
    world.run(60.0)
    assert world.fate("r") is Fate.SERVED


# --- other gateways ---------------------------------------------------------------------------------------------------


def test_leases_of_other_gateways_are_taken_memory_until_they_are_told_to_be_gone() -> None:
    world = World([model("a", 6_000)])
    world.memory({}, leases=(other(4_000),))
    world.arrive("r", "a", takes_s=0.0)
    world.memory({GPU0: 0})
    world.run(60.0)
    assert world.fate("r") is Fate.WAITING, "nothing said of them leaves them as they were"
    world.memory({}, leases=())
    world.run(60.0)
    assert world.fate("r") is Fate.SERVED


def test_strangers_and_leases_of_others_add_up() -> None:
    world = World([model("a", 3_000), model("b", 3_000)], (gpu(0, 8_000), gpu(1, 8_000)))
    world.memory({GPU0: 3_000}, leases=(other(2_000), other(1_000, name="l-0"), other(4_000, GPU1, name="l-2")))
    ready(world, "a")
    assert world.moves[0].claim == {GPU1: 3_000}
    world.arrive("r", "b", takes_s=0.0)
    world.run(60.0)
    assert victims(world) == ["a"]


def test_a_request_that_gave_up_waiting_for_memory_is_told_how_much_and_its_holders() -> None:
    world = World([model("a", 6_000), model("b", 1_000)], (gpu(0, 8_000, 500), gpu(1, 8_000, 500)))
    world.memory({}, leases=(other(5_000), other(500, name="l-2"), other(6_500, GPU1, "render", "l-3")))
    world.arrive("r", "a", within_s=5.0)
    world.ask_lease("train", 7_000, within_s=5.0, devices=(GPU1,))
    world.run(10.0)
    numbers = [
        (said.needs_mib, said.free_mib, said.capacity_mib, said.held_by)
        for said in (rejection_of(world, name) for name in ("r", "train"))
    ]
    assert numbers == [(6_000, 2_000, 7_500, ("finetune", "render")), (7_000, 1_000, 7_500, ("render",))]


def test_a_request_that_gave_up_waiting_for_a_busy_model_is_not_told_of_memory() -> None:
    world = World([model("a", 6_000)])
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("r", "a", within_s=5.0)
    world.run(10.0)
    said = rejection_of(world, "r")
    assert (said.code, said.needs_mib, said.held_by) == (RejectCode.EXPIRED, 0, ())


def two_gpus(*leases: OtherLease) -> World:
    """`a` comes only on the first GPU, and is known to load in five seconds; so is b."""
    world = World([model("a", 6_000, devices=(GPU0,)), model("b", 6_000)], (gpu(0, 8_000), gpu(1, 8_000)))
    for record in world.scheduler.state.models.values():
        record.learned_s[MoveKind.LOAD] = 5.0
    world.memory({}, leases=leases)
    return world


def told(world: World, name: str, priority: int = 1) -> tuple[tuple[str, ...], float | None]:
    """The leases in the way of this model, and the estimate, of a request that waits and of one that would come."""
    said = world.scheduler.view.explanation(world.asking("?", name, priority=priority))
    assert isinstance(said.plan, Wait)
    world.arrive(f"r-{name}-{priority}", name, priority=priority)
    outlook = world.scheduler.view.outlook(RequestId(f"r-{name}-{priority}"), world.now)
    assert outlook is not None and outlook.eta_s == said.eta_s
    return said.leases, said.eta_s


def lasting(mib: int, on: DeviceId = GPU0, name: str = "l-1", **said: Any) -> OtherLease:
    return OtherLease(LeaseId(name), "finetune", {on: mib}, **said)


def test_an_explanation_names_the_leases_that_hold_the_memory_waited_for_and_has_no_estimate() -> None:
    world = two_gpus(lasting(4_000), lasting(1_000, GPU1, "l-2"))
    assert told(world, "a") == (("l-1",), None)
    assert world.scheduler.view.explanation(world.asking("?", "b")).eta_s == 5.0, "there is room on the other GPU"
    world.memory({}, leases=(lasting(4_000), lasting(4_000, GPU1, "l-2")))
    assert told(world, "b") == (("l-1",), None), "the end of either makes room"


def test_a_request_that_gave_up_is_told_of_the_leases_and_no_time() -> None:
    world = two_gpus(lasting(4_000))
    world.arrive("r", "a", within_s=5.0)
    world.run(10.0)
    assert (rejection_of(world, "r").leases, rejection_of(world, "r").room_s) == (("l-1",), inf)


def test_leases_of_this_gateway_are_named_too() -> None:
    world = two_gpus()
    world.ask_lease("train", 4_000, devices=(GPU0,))
    assert told(world, "a") == (("train",), None)


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("lease_priority", "preemptible", "lasts"), [(2, True, False), (2, False, True), (1, True, True), (0, True, True)]
)
def test_a_lease_that_is_recalled_for_the_request_is_not_in_its_way(
    is_own: bool, lease_priority: int, preemptible: bool, lasts: bool
) -> None:
    world = two_gpus(*([] if is_own else [lasting(4_000, priority=lease_priority, preemptible=preemptible)]))
    if is_own:
        world.ask_lease("l-1", 4_000, devices=(GPU0,), priority=lease_priority, preemptible=preemptible)
    said = world.scheduler.view.explanation(world.asking("?", "a"))
    assert (said.leases, said.eta_s) == ((("l-1",), None) if lasts else ((), 5.0))


def test_a_lease_that_leaves_already_is_not_in_the_way() -> None:
    world = two_gpus()
    world.ask_lease("train", 4_000, devices=(GPU0,), priority=1, preemptible=True)
    world.arrive("urgent", "a", priority=0)
    assert world.scheduler.view.explanation(world.asking("?", "a")).leases == ()


def test_a_more_urgent_request_for_the_same_model_counts() -> None:
    world = two_gpus(lasting(4_000, priority=1, preemptible=True))
    assert told(world, "a", priority=1) == (("l-1",), None)
    assert told(world, "a", priority=0) == ((), 5.0)
    assert world.scheduler.view.explanation(world.asking("?", "a", priority=1)).leases == (), "it comes for both"


def test_models_of_other_gateways_make_room_and_are_no_leases_in_the_way() -> None:
    assert told(two_gpus(lasting(4_000, is_model=True)), "a") == ((), 5.0)


def test_leases_beside_which_the_model_fits_once_others_have_left_are_not_in_the_way() -> None:
    world = two_gpus(lasting(1_000), lasting(8_000, GPU1, "l-2"))
    ready(world, "a")
    world.arrive("runs", "a")
    assert told(world, "b")[0] == ()


def test_leases_on_gpus_that_are_too_small_for_the_model_are_not_in_the_way() -> None:
    world = World([model("a", 7_000)], (gpu(0, 4_000), gpu(1, 8_000)))
    world.ask_lease("small", 1_000, devices=(GPU0,))
    world.ask_lease("large", 6_000, devices=(GPU1,))
    assert told(world, "a")[0] == ("large",)


def test_a_load_beside_a_lease_is_waited_for() -> None:
    world = two_gpus(lasting(8_000, GPU1, "l-2"))
    world.ask("op", MoveKind.LOAD, "a")
    world.run(2.0)
    assert told(world, "b") == ((), 3.0 + 5.0)


@pytest.mark.parametrize(("pinned", "leases"), [(False, ()), (True, ("l-1",))])
def test_a_sleeper_whose_gpu_is_leased_may_be_loaded_elsewhere_unless_it_is_pinned(
    pinned: bool, leases: tuple[str, ...]
) -> None:
    spec = model("a", 6_000, asleep=Need(0, 2_000), pinned=pinned)
    world = World([spec], (gpu(0, 8_000), gpu(1, 8_000), host(8_000)))
    ready(world, "a")
    world.ask("o", MoveKind.SLEEP, "a")
    world.run(5.0)
    (slept_on,) = [on for on in world.moves[0].claim if on != "host"]
    world.memory({}, leases=(lasting(4_000, slept_on), lasting(1_000, GPU1 if slept_on == GPU0 else GPU0, "l-2")))
    assert told(world, "a")[0] == leases


@pytest.mark.parametrize(
    ("mib", "named"),
    [
        ((4_000, 10), ("l-0",)),
        ((3_000, 4_000), ("l-1", "l-0")),
        ((1_500, 1_500, 10), ("l-0",)),
        ((900, 900, 900), ("l-0",)),
        ((1_900,), ()),
    ],
)
def test_the_fewest_leases_are_named_whose_end_would_make_room(mib: tuple[int, ...], named: tuple[str, ...]) -> None:
    """The model needs 6,000 of 8,000 MiB. What is leased elsewhere does not count."""
    on_its_own = [lasting(one, name=f"l-{number}") for number, one in enumerate(mib)]
    world = two_gpus(*on_its_own, lasting(3_000, GPU1, "elsewhere"))
    assert world.scheduler.view.explanation(world.asking("?", "a")).leases == named


def test_where_an_undeclared_process_holds_the_memory_no_time_is_told_and_no_lease_named() -> None:
    world = two_gpus(lasting(100))
    world.memory({GPU0: 4_000})
    assert told(world, "a") == ((), None)


def test_a_task_is_told_no_time_of_a_candidate_in_whose_way_is_a_lease() -> None:
    world = two_gpus(lasting(4_000))
    options, place = world.scheduler.view.weigh(world.asking("?", "a", "b"))
    assert [one.begins_s for one in options] == [inf, 5.0]
    assert place == 0, "the choice goes by its own load alone"
    ready(world, "b")
    assert world.scheduler.view.weigh(world.asking("?", "b"))[0][0].begins_s == 0.0


# --- a store that does not answer ---------------------------------------------------------------------------------


def store(world: World, is_down: bool) -> None:
    world.post(ev.MemoryChanged(world.now, {}, store_is_down=is_down))


def test_while_the_store_is_down_waiting_requests_wait_and_new_ones_are_refused() -> None:
    world = World([model("a", 6_000), model("b", 6_000), model("remote", 0)])
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("waits", "b", takes_s=0.0)
    store(world, is_down=True)
    world.finish("running")
    world.arrive("late", "b")
    assert world.fate("waits") is Fate.WAITING and world.code("late") is RejectCode.STORE_DOWN
    assert world.scheduler.view.outlook(RequestId("waits"), world.now) == Outlook(1, None), "it may be away for long"
    assert world.ask_lease("train", 1_000).fate is Fate.REJECTED
    world.memory({GPU0: 0})
    world.run(5.0)
    assert world.kinds() == ["load a"], "a report that does not mention the store leaves it down"
    store(world, is_down=False)
    world.run(60.0)
    assert world.fate("waits") is Fate.SERVED


def test_while_the_store_is_down_what_is_ready_or_needs_no_memory_serves() -> None:
    world = World([model("a", 6_000), model("remote", 0)])
    ready(world, "a")
    store(world, is_down=True)
    assert world.arrive("r", "a", takes_s=0.0).fate is Fate.GRANTED
    world.arrive("far", "remote", takes_s=0.0)
    world.run(10.0)
    assert world.fate("far") is Fate.SERVED


# --- a store that refuses ---------------------------------------------------------------------------------------------


def evicting(kind: MoveKind = MoveKind.UNLOAD, limits: Limits | None = None) -> tuple[World, MoveId]:
    """`old` has begun to leave for `new`."""
    asleep = Need(0, 2_000) if kind is MoveKind.SLEEP else None
    specs = [model("old", 6_000, asleep=asleep, ttl_s=600.0), model("new", 6_000)]
    world = World(specs, (gpu(0, 8_000), host(8_000)), limits)
    ready(world, "old")
    world.plays = False
    world.arrive("r", "new")
    assert world.moves[-1].kind is kind and world.moves[-1].makes_room_for is not None
    return world, world.moves[-1].id


@pytest.mark.parametrize("kind", [MoveKind.UNLOAD, MoveKind.SLEEP])
def test_a_victim_stays_when_the_store_refuses_the_lease_for_the_newcomer(kind: MoveKind) -> None:
    world, move = evicting(kind)
    held = dict(world.scheduler.state.ledger.held_by(world.slot_of("old")))
    world.arrive("again", "old")
    world.end_move(move, Outcome.NO_LEASE)
    assert world.fate("again") is Fate.GRANTED and world.fate("r") is Fate.WAITING
    state = world.scheduler.state
    assert not state.ledger.promises and len(state.slots) == 1
    assert set(state.ledger.held_by(world.slot_of("old"))) <= set(held)
    assert state.ledger.held_by(world.slot_of("old")) == {GPU0: 6_000}


def test_the_newcomer_asks_again_a_little_later() -> None:
    world, move = evicting(limits=Limits(replan_s=3.0))
    world.end_move(move, Outcome.NO_LEASE)
    assert world.timers[Timer(TimerKind.RETRY, "new")] == pytest.approx(world.now + 3.0)
    world.run(2.0)
    assert not world.moving
    world.run(2.0)
    assert world.kinds()[-1] == "unload old"
    world.end_move(world.moves[-1].id, Outcome.DONE)
    assert world.kinds()[-1] == "load new"


def test_an_idle_victim_that_stays_is_looked_at_when_its_time_is_over() -> None:
    world, move = evicting()
    world.end_move(move, Outcome.NO_LEASE)
    assert Timer(TimerKind.IDLE, world.slot_of("old")) in world.timers


def test_of_two_victims_each_is_told_for_itself() -> None:
    world = World([model("a", 4_000), model("b", 4_000), model("new", 8_000)])
    ready(world, "a", "b")
    world.plays = False
    world.arrive("r", "new")
    first, second = world.moves[-2:]
    assert first.makes_room_for == second.makes_room_for is not None
    world.end_move(first.id, Outcome.NO_LEASE)
    world.end_move(second.id, Outcome.NO_LEASE)
    assert world.tier("a") is world.tier("b") is Tier.READY and world.fate("r") is Fate.WAITING


def test_a_lease_whose_room_was_refused_asks_again_and_leaves_nothing_behind() -> None:
    world = World([model("old", 6_000)])
    ready(world, "old")
    world.plays = False
    world.ask_lease("train", 6_000)
    world.end_move(world.moves[-1].id, Outcome.NO_LEASE)
    assert world.fate("train") is Fate.WAITING and world.tier("old") is Tier.READY
    world.run(2.0)
    assert world.kinds()[-1] == "unload old"
    world.end_move(world.moves[-1].id, Outcome.NO_LEASE)
    world.end_lease("train")
    assert not world.timers and not world.scheduler.state.waitlist


def test_a_sleeper_that_was_not_touched_sleeps_on() -> None:
    specs = [model("old", 6_000, asleep=Need(2_500, 2_000)), model("new", 6_000)]
    world = World(specs, (gpu(0, 8_000), host(8_000)))
    ready(world, "old")
    world.ask("o", MoveKind.SLEEP, "old")
    world.run(5.0)
    world.plays = False
    world.arrive("r", "new")
    world.end_move(world.moves[-1].id, Outcome.NO_LEASE)
    assert world.tier("old") is Tier.ASLEEP and world.kinds()[-1] == "unload old"


@pytest.mark.parametrize("how", ["asked", "removed"])
def test_one_that_is_to_leave_anyway_leaves_whatever_the_store_says(how: str) -> None:
    world, move = evicting()
    if how == "asked":
        world.ask("o", MoveKind.UNLOAD, "old")
    else:
        world.config(removed=("old",))
    world.end_move(move, Outcome.NO_LEASE)
    assert world.kinds()[-2:] == ["unload old", "unload old"] and world.moves[-1].makes_room_for is None
    world.end_move(world.moves[-1].id, Outcome.DONE)
    assert world.kinds()[-1] == "load new"


def test_a_victim_whose_sleep_failed_leaves_whatever_the_store_says() -> None:
    world, move = evicting(MoveKind.SLEEP)
    world.end_move(move, Outcome.FAILED)
    assert world.moves[-1].kind is MoveKind.UNLOAD and world.moves[-1].makes_room_for is None
    world.end_move(world.moves[-1].id, Outcome.NO_LEASE)
    world.end_move(world.moves[-1].id, Outcome.DONE)
    assert world.kinds()[-3:] == ["unload old", "unload old", "load new"]


def test_a_victim_that_fell_meanwhile_is_gone() -> None:
    world, move = evicting()
    world.lose(world.slot_of("old"))
    world.end_move(move, Outcome.NO_LEASE)
    assert world.tier("old") is Tier.COLD and world.kinds()[-1] == "load new"


def test_a_store_that_refuses_one_that_leaves_by_itself_is_not_listened_to() -> None:
    world = World([model("a", ttl_s=5.0)], plays=False)
    world.arrive("r", "a", keep_alive_s=0.0)
    world.end_move(world.moves[-1].id, Outcome.DONE)
    world.finish("r")
    world.run(1.0)
    assert world.moves[-1].makes_room_for is None
    world.end_move(world.moves[-1].id, Outcome.NO_LEASE)
    assert world.kinds() == ["load a", "unload a", "unload a"]


def test_a_refused_lease_for_a_removed_model_is_not_asked_for_again() -> None:
    world, move = evicting()
    world.config(removed=("new",))
    world.end_move(move, Outcome.NO_LEASE)
    assert world.tier("old") is Tier.READY and world.code("r") is RejectCode.REMOVED
    assert Timer(TimerKind.RETRY, "new") not in world.timers


def test_a_refusal_for_an_earlier_revision_does_not_make_the_new_one_pause() -> None:
    world, move = evicting()
    world.config(model("new", 6_000, revision=2))
    world.end_move(move, Outcome.NO_LEASE)
    assert Timer(TimerKind.RETRY, "new") not in world.timers


# --- needs ------------------------------------------------------------------------------------------------------------


def test_a_measured_need_counts_from_the_next_load_on() -> None:
    world = World([model("a", 4_000), model("b", 4_000)])
    ready(world, "a")
    world.config(needs={ModelId("a"): Need(5_000), ModelId("nobody"): Need(1)})
    assert needs(world) == {"a": Need(5_000), "b": Need(4_000)}
    ready(world, "b")
    assert not victims(world), "what is there keeps its claim"
    world.ask("o", MoveKind.UNLOAD, "a")
    world.run(5.0)
    world.ask("p", MoveKind.LOAD, "a")
    world.run(10.0)
    assert world.moves[-1].claim == {GPU0: 5_000} and victims(world) == ["b"]


def test_needs_are_not_for_leases() -> None:
    world = World([])
    world.ask_lease("train", 1_000)
    name = next(iter(world.scheduler.state.leases))
    world.config(needs={name: Need(5_000)})
    assert needs(world) == {} and world.scheduler.state.leases[name].need == Need(1_000)


def test_a_need_that_changes_while_it_is_waited_for_changes_what_bringing_it_takes() -> None:
    world = World([model("a", 1_000), model("old", 8_000)], plays=False)
    world.arrive("warm", "old")
    world.end_move(world.moves[-1].id, Outcome.DONE)
    world.arrive("r", "a")
    before = world.scheduler.state.waitlist.queues[ModelId("a")].swap_s
    world.config(needs={ModelId("a"): Need(6_000)})
    assert world.scheduler.state.waitlist.queues[ModelId("a")].swap_s > before


def test_a_need_raised_for_want_of_memory_is_told_to_be_remembered() -> None:
    world = World([model("a", 4_000, host_mib=100)], (gpu(0, 8_000), host(1_000)))
    world.outcome_of = lambda move: Outcome.NO_MEMORY if len(world.moves) < 2 else Outcome.DONE
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED and needs(world) == {"a": Need(5_001, 126)}


def test_without_gpus_a_need_is_raised_as_far_as_the_host_goes() -> None:
    world = World([model("a", 3_000, host_mib=500)], (host(4_000),))
    world.outcome_of = lambda move: Outcome.NO_MEMORY if len(world.moves) < 2 else Outcome.DONE
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED and needs(world) == {"a": Need(3_374, 626)}


def test_running_out_of_memory_twice_fails_with_the_numbers() -> None:
    world = World([model("a", 4_000), model("b", 2_000)], (gpu(0, 8_000, 500), gpu(1, 4_000, 500)))
    ready(world, "b")
    world.memory({GPU0: 100}, leases=(other(200),))
    world.outcome_of = lambda move: Outcome.NO_MEMORY
    world.arrive("r", "a", takes_s=0.0)
    world.run(60.0)
    said = rejection_of(world, "r")
    assert said.code is RejectCode.LOAD_FAILED and world.kinds("a") == ["load a", "load a"]
    assert (said.needs_mib, said.capacity_mib, said.held_by) == (5_001, 7_500, ("finetune",))
    assert said.free_mib == 7_200


def test_a_load_that_fails_otherwise_says_nothing_of_memory() -> None:
    world = World([model("a", 4_000)])
    world.outcome_of = lambda move: Outcome.FAILED
    world.arrive("r", "a", takes_s=0.0)
    world.run(30.0)
    said = rejection_of(world, "r")
    assert (said.code, said.needs_mib, said.capacity_mib) == (RejectCode.LOAD_FAILED, 0, 0)


def test_what_a_holder_takes_is_the_larger_of_its_claim_and_what_was_seen() -> None:
    holding = Holding({GPU0: 2_000, GPU1: 500}, {GPU0: 2_500})
    assert [holding.on(device) for device in (GPU0, GPU1, DeviceId("gpu2"))] == [2_500, 500, 0]


def test_an_outage_refuses_new_requests_that_need_a_load_and_keeps_waiting_ones() -> None:
    world = World([model("a", 4_000), model("b", 4_000), model("c", 4_000)], plays=False)
    world.arrive("there", "a")
    world.end_move(world.moves[-1].id, Outcome.DONE)
    world.arrive("waits", "b")
    world.end_move(world.moves[-1].id, Outcome.STORE_DOWN)
    store(world, is_down=True)
    world.run(20.0)
    for name in ("b", "c"):
        world.arrive(f"new-{name}", name)
        assert world.code(f"new-{name}") is RejectCode.STORE_DOWN
    world.run(20.0)
    assert world.kinds() == ["load a", "load b"], "nothing is tried meanwhile"
    assert world.fate("waits") is Fate.WAITING and world.fate("there") is Fate.GRANTED
    store(world, is_down=False)
    assert world.kinds() == ["load a", "load b", "load b"]
    world.end_move(world.moves[-1].id, Outcome.DONE)
    assert world.fate("waits") is Fate.GRANTED


def test_an_operator_is_told_that_it_is_the_store_and_no_load_that_failed() -> None:
    world = World([model("a", 4_000), model("b", 4_000)], plays=False)
    world.ask("before", MoveKind.LOAD, "a")
    world.end_move(world.moves[-1].id, Outcome.STORE_DOWN)
    store(world, is_down=True)
    world.ask("late", MoveKind.LOAD, "b")
    assert world.ops == {"before": None, "late": OpOutcome.STORE_DOWN}, "an operation that waits already waits on"
