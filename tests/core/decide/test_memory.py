"""Where models go and which leave for them: best fit, split, eviction order, what never leaves, what never fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core import events as ev
from greenroom.core.decide.placement import options
from greenroom.core.effects import RejectCode
from greenroom.core.events import Limits
from greenroom.core.model import Device, DeviceId, ModelSpec, MoveKind, Need, Tier, cuda_name
from greenroom.core.policy.default import BoundedFirstCome
from greenroom.core.policy.swapper import Eviction, Resident, Target
from tests.core.queue.test_order import ready
from tests.core.world import HOST, Engine, Fate, World, gpu, host, model

GPU0, GPU1 = DeviceId("gpu0"), DeviceId("gpu1")


def victims(world: World) -> list[str]:
    return [str(move.model) for move in world.moves if world.reasons[move.id].why == "evicted"]


def test_the_least_recently_used_leaves() -> None:
    world = World([model(name, 2_000) for name in "abcd"] + [model("new", 2_000)])
    ready(world, "a", "b", "c", "d")
    world.arrive("again", "a", takes_s=0.0)
    world.run(1.0)
    world.arrive("r", "new", takes_s=0.0)
    world.run()
    assert victims(world) == ["b"]


@pytest.mark.parametrize(
    ("priorities", "newcomer", "leaves"),
    [
        ({"a": 0, "b": 1, "c": 2}, 1, "c"),
        ({"a": 0, "b": 1}, 1, "b"),
        ({"a": 0, "b": 0}, 1, "a"),
        ({"a": 1, "b": 2}, 0, "a"),
    ],
    ids=["lower first", "then equal", "higher last", "all lower: the least recently used"],
)
def test_residents_of_lower_priority_leave_first_then_equal_then_higher(
    priorities: Mapping[str, int], newcomer: int, leaves: str
) -> None:
    world = World([model(name, 8_000 // len(priorities)) for name in priorities] + [model("new", 2_000)])
    for name, priority in priorities.items():
        world.arrive(f"warm-{name}", name, takes_s=0.0, priority=priority)
        world.run(10.0)
    world.arrive("r", "new", priority=newcomer, takes_s=0.0)
    world.run()
    assert victims(world) == [leaves]


def test_a_busy_model_never_leaves_even_if_it_is_the_least_urgent() -> None:
    world = World([model("a", 4_000), model("b", 4_000), model("new", 4_000)])
    ready(world, "a", "b")
    world.arrive("busy", "a", priority=9)
    world.arrive("r", "new", priority=0, takes_s=0.0)
    world.run()
    assert victims(world) == ["b"] and world.fate("r") is Fate.SERVED


def test_as_few_leave_as_possible() -> None:
    world = World([model("a", 1_000), model("b", 1_000), model("c", 6_000), model("new", 6_000)])
    ready(world, "a", "b", "c")
    world.arrive("r", "new", takes_s=0.0)
    world.run()
    assert victims(world) == ["c"], "a and b are older, but their leaving would not have been enough"


def test_a_pinned_model_is_never_evicted() -> None:
    world = World([model("a", 4_000, pinned=True), model("b", 4_000), model("new", 4_000)])
    ready(world, "a", "b")
    world.arrive("r", "new", takes_s=0.0)
    world.run()
    assert victims(world) == ["b"]


def test_room_that_pinned_models_hold_is_refused_at_once_with_numbers() -> None:
    world = World([model("a", 4_000, pinned=True), model("new", 5_000)], devices=(gpu(0, 8_000, 500),))
    ready(world, "a")
    rejection = world.arrive("r", "new").rejection
    assert rejection is not None and rejection.code is RejectCode.TOO_LARGE
    assert (rejection.needs_mib, rejection.free_mib) == (5_000, 3_500)
    assert rejection.pinned == ("a",)


@pytest.mark.parametrize(
    "new",
    [model("new", 9_000), model("new", 6_000, devices=(DeviceId("gpu2"),))],
    ids=["too large for any GPU", "on a GPU that is not there"],
)
def test_a_refusal_names_no_pinned_model_that_would_not_help(new: ModelSpec) -> None:
    world = World([model("a", 4_000, pinned=True), model("b", 4_000), new], (gpu(0, 8_000), gpu(1, 8_000)))
    ready(world, "a", "b")
    rejection = world.arrive("r", "new").rejection
    assert rejection is not None and (rejection.code, rejection.pinned) == (RejectCode.TOO_LARGE, ())


def test_a_refusal_names_no_pinned_model_that_holds_nothing_where_memory_is_missing() -> None:
    sleeps = model("sleeps", 3_000, asleep=Need(0, 3_000), pinned=True)
    world = World([sleeps, model("ready", 4_000, pinned=True), model("new", 6_000)], (gpu(0, 8_000), host(64_000)))
    ready(world, "sleeps", "ready")
    world.ask("o", MoveKind.SLEEP, "sleeps")
    world.run(10.0)
    rejection = world.arrive("r", "new").rejection
    assert rejection is not None and rejection.pinned == ("ready",)


def test_a_refusal_names_no_pinned_model_where_nothing_is_missing() -> None:
    models = [model("a", 4_000, pinned=True), model("on host", 0, host_mib=500, pinned=True)]
    world = World([*models, model("new", 6_000, host_mib=1_000)], (gpu(0, 8_000), host(12_000)))
    ready(world, "a", "on host")
    rejection = world.arrive("r", "new").rejection
    assert rejection is not None and (rejection.code, rejection.pinned) == (RejectCode.TOO_LARGE, ("a",))


def test_a_refusal_names_pinned_models_only_where_their_memory_would_help() -> None:
    first, second = (DeviceId("gpu0"),), (DeviceId("gpu1"),)
    world = World(
        [
            model("here", 4_000, pinned=True, devices=first),
            model("there", 4_000, pinned=True, devices=second),
            model("new", 6_000, devices=second),
        ],
        (gpu(0, 8_000), gpu(1, 8_000)),
    )
    ready(world, "here", "there")
    rejection = world.arrive("r", "new").rejection
    assert rejection is not None and (rejection.code, rejection.pinned) == (RejectCode.TOO_LARGE, ("there",))


def test_a_pinned_model_that_is_leaving_blocks_no_request_for_good() -> None:
    world = World([model("a", 6_000, pinned=True), model("new", 6_000)])
    ready(world, "a")
    world.ask("o", MoveKind.UNLOAD, "a")
    world.arrive("r", "new", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED


def test_a_sleeping_pinned_model_can_wake_on_a_device_that_it_fills() -> None:
    world = World([model("a", 8_000, pinned=True, asleep=Need(0, 4_000))], devices=(gpu(0, 8_000), host(4_000)))
    ready(world, "a")
    world.ask("o", MoveKind.SLEEP, "a")
    world.run()
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.kinds() == ["load a", "sleep a", "wake a"] and world.fate("r") is Fate.SERVED


@pytest.mark.parametrize(
    ("spec", "devices", "needs_mib", "free_mib"),
    [
        (model("m", 9_000), (gpu(0, 8_000), gpu(1, 6_000), host(64_000)), 9_000, 8_000),
        (model("m", 15_000, can_split=True), (gpu(0, 8_000), gpu(1, 6_000)), 15_000, 14_000),
        (model("m", 15_000, can_split=True, split_counts=(2, 4)), (gpu(0, 8_000), gpu(1, 6_000)), 15_000, 12_000),
        (model("m", 15_000, can_split=True, split_counts=(2, 4)), (gpu(0, 9_000), gpu(1, 3_000)), 15_000, 9_000),
        (model("m", 1_000, host_mib=5_000), (gpu(0, 8_000), host(4_000)), 5_000, 4_000),
        (model("m", 3_000, host_mib=2_000), (host(4_000),), 5_000, 4_000),
        (model("m", 1_000, devices=(DeviceId("gone"),)), (gpu(0, 8_000), host(9_000)), 1_000, 0),
        (model("m", 1_000), (gpu(0, 0),), 1_000, 0),
        (model("m", 1_000, can_split=True), (gpu(0, 0), gpu(1, 0)), 1_000, 0),
        (model("m", 1_000, devices=(DeviceId("gone"),)), (), 1_000, 0),
    ],
    ids=[
        "gpu",
        "split",
        "equal",
        "equal, best alone",
        "host",
        "no gpu",
        "devices gone",
        "nothing",
        "nothing to split",
        "no devices",
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers_of_what_is_too_small(
    spec: ModelSpec, devices: tuple[Device, ...], needs_mib: int, free_mib: int
) -> None:
    world = World([spec], devices)
    rejection = world.arrive("r", "m").rejection
    assert rejection is not None and rejection.code is RejectCode.TOO_LARGE
    assert (rejection.needs_mib, rejection.free_mib) == (needs_mib, free_mib)


def test_of_two_gpus_the_one_that_leaves_the_smaller_gap_is_chosen() -> None:
    world = World([model("a", 3_000), model("b", 6_000)], devices=(gpu(0, 8_000), gpu(1, 4_000)))
    ready(world, "a", "b")
    assert [dict(move.claim) for move in world.moves] == [{GPU1: 3_000}, {GPU0: 6_000}]


def test_a_gpu_that_needs_no_eviction_is_preferred() -> None:
    world = World([model("a", 4_000), model("b", 3_000)], devices=(gpu(0, 9_000), gpu(1, 4_000)))
    ready(world, "a", "b")
    assert world.kinds() == ["load a", "load b"] and world.moves[1].claim == {GPU0: 3_000}


def test_a_model_that_fits_no_single_gpu_is_split_in_proportion_to_free_memory() -> None:
    world = World(
        [model("small", 2_000, devices=(GPU0,)), model("wide", 9_000, can_split=True)],
        devices=(gpu(0, 8_000), gpu(1, 6_000)),
    )
    ready(world, "small", "wide")
    assert world.moves[1].claim == {GPU0: 4_500, GPU1: 4_500}


def test_a_split_that_needs_others_to_leave_counts_with_what_can_become_free() -> None:
    world = World(
        [
            model("kept", 6_000, devices=(GPU0,), pinned=True),
            model("small", 3_000, devices=(GPU1,)),
            model("wide", 9_000, can_split=True),
        ],
        devices=(gpu(0, 8_000), gpu(1, 8_000)),
    )
    ready(world, "kept", "small", "wide")
    assert world.moves[-1].claim == {GPU0: 1_800, GPU1: 7_200}
    assert victims(world) == ["small"]


EQUAL: Mapping[str, object] = {"can_split": True, "split_counts": (2, 4, 8)}


def claim_of(world: World, name: str) -> dict[DeviceId, int]:
    return dict(next(move.claim for move in reversed(world.moves) if move.model == name))


def test_a_model_that_needs_equal_shares_gets_them_on_as_few_gpus_as_can_hold_it() -> None:
    gpus = tuple(gpu(number, 8_000) for number in range(4))
    world = World([model("small", 1_000, **EQUAL), model("wide", 15_001, **EQUAL)], devices=gpus)
    ready(world, "small")
    assert claim_of(world, "small") == {GPU0: 1_000}, "one is enough"
    ready(world, "wide")
    assert claim_of(world, "wide") == {GPU1: 7_501, DeviceId("gpu2"): 7_501}, "where nothing has to leave"


def test_equal_shares_take_four_gpus_where_two_cannot_hold_them_and_never_three() -> None:
    gpus = tuple(gpu(number, 6_000) for number in range(5))
    world = World([model("wide", 15_000, **EQUAL)], devices=gpus)
    ready(world, "wide")
    assert sorted(claim_of(world, "wide").values()) == [3_750] * 4


def test_equal_shares_make_others_leave() -> None:
    world = World([model("a", 6_000), model("wide", 12_000, **EQUAL)], devices=(gpu(0, 8_000), gpu(1, 8_000)))
    ready(world, "a", "wide")
    assert victims(world) == ["a"] and claim_of(world, "wide") == {GPU0: 6_000, GPU1: 6_000}


def test_equal_shares_lie_on_all_named_devices_that_may_be_used() -> None:
    gpus, named = tuple(gpu(number, 8_000) for number in range(4)), (GPU0, GPU1, DeviceId("gpu2"))
    world = World([model("both", 4_000, devices=named, **EQUAL)], devices=gpus)
    ready(world, "both")
    assert claim_of(world, "both") == {GPU0: 2_000, GPU1: 2_000}, "three are named, and two divide it"
    alone = World([model("odd", 4_000, devices=(GPU0, GPU1), can_split=True, split_counts=(4,))], devices=gpus)
    ready(alone, "odd")
    assert claim_of(alone, "odd") in ({GPU0: 4_000}, {GPU1: 4_000}), "one holds it, and two are too few for it"


def test_equal_shares_sleep_in_equal_shares() -> None:
    devices = (gpu(0, 6_000), gpu(1, 6_000), host(4_000))
    world = World([model("wide", 9_000, asleep=Need(901, 2_000), **EQUAL)], devices)
    ready(world, "wide")
    world.ask("o", MoveKind.SLEEP, "wide")
    world.run()
    assert world.moves[-1].claim == {GPU0: 451, GPU1: 451, HOST: 2_000}


@given(
    need=st.integers(1, 100_000),
    sizes=st.lists(st.integers(0, 50_000), min_size=1, max_size=9),
    used=st.lists(st.integers(0, 50_000), min_size=9, max_size=9),
    counts=st.sets(st.sampled_from((2, 3, 4, 8)), min_size=1),
    named=st.booleans(),
)
def test_equal_shares_are_equal_of_an_allowed_number_and_never_too_large(
    need: int, sizes: list[int], used: list[int], counts: set[int], named: bool
) -> None:
    gpus = [gpu(number, size) for number, size in enumerate(sizes)]
    most = {one.id: one.capacity_mib for one in gpus}
    free = {one.id: max(0, one.capacity_mib - taken) for one, taken in zip(gpus, used, strict=False)}
    devices = tuple(one.id for one in gpus) if named else ()
    spec = model("m", need, can_split=True, split_counts=tuple(counts), devices=devices)
    claims = options(spec, spec.need, gpus, free, most)
    for claim in claims:
        assert len(set(claim.values())) == 1 and len(claim) in {1, *counts}
        assert need <= sum(claim.values()) < need + len(claim)
        assert all(mib <= most[device] for device, mib in claim.items())
    ordered = sorted(sizes, reverse=True)
    could = [count for count in (1, *counts) if count <= len(sizes) and ordered[count - 1] * count >= need]
    assert bool(claims) is bool(could)


def test_devices_named_by_the_operator_are_the_only_ones_used() -> None:
    world = World(
        [model("one", 3_000, devices=(GPU1,)), model("both", 4_000, devices=(GPU0, GPU1), can_split=True)],
        devices=(gpu(0, 8_000), gpu(1, 8_000)),
    )
    ready(world, "one", "both")
    assert world.moves[0].claim == {GPU1: 3_000}
    assert set(world.moves[1].claim) == {GPU0, GPU1}, "two named: split though one would do"


def test_several_named_devices_without_splitting_are_a_choice() -> None:
    world = World([model("a", 3_000, devices=(GPU0, GPU1))], devices=(gpu(0, 8_000), gpu(1, 4_000), gpu(2, 3_000)))
    ready(world, "a")
    assert world.moves[0].claim == {GPU1: 3_000}


def test_without_gpus_the_hosts_memory_is_the_budget() -> None:
    world = World([model("a", 3_000, host_mib=1_000), model("b", 3_000)], devices=(host(5_000),))
    ready(world, "a")
    assert world.moves[0].claim == {HOST: 4_000}
    world.arrive("r", "b", takes_s=0.0)
    world.run()
    assert victims(world) == ["a"]


def test_a_model_placed_on_the_host_by_name_uses_no_gpu() -> None:
    world = World([model("a", 3_000, devices=(HOST,))], devices=(gpu(0, 8_000), host(5_000)))
    ready(world, "a")
    assert world.moves[0].claim == {HOST: 3_000}


def test_a_remote_model_needs_no_memory_and_evicts_none() -> None:
    world = World([model("a", 8_000), model("remote", 0)])
    ready(world, "a", "remote")
    assert world.moves[1].claim == {} and world.tier("a") is Tier.READY


def test_memory_of_strangers_makes_a_load_wait_and_its_return_wakes_it() -> None:
    world = World([model("a", 6_000), model("small", 1_000)])
    world.memory({GPU0: 5_000})
    world.arrive("r", "a", takes_s=0.0)
    assert world.kinds() == []
    world.arrive("other", "small", takes_s=0.0)
    world.run()
    assert world.fate("other") is Fate.SERVED, "a request that waits for foreign memory blocks no other"
    world.memory({GPU0: 1_000})
    world.run()
    assert world.fate("r") is Fate.SERVED


def test_a_promise_that_strangers_broke_is_taken_back_and_planned_again() -> None:
    world = World([model("a", 5_000), model("b", 5_000)])
    ready(world, "a")
    world.arrive("r", "b", takes_s=0.0)
    world.memory({GPU0: 4_000})
    world.run()
    assert world.fate("r") is Fate.WAITING and not world.scheduler.state.slots
    world.memory({GPU0: 0})
    world.run()
    assert world.fate("r") is Fate.SERVED


def test_what_a_slot_was_seen_to_use_counts_when_it_is_more_than_its_claim() -> None:
    world = World([model("a", 4_000), model("b", 4_000)])
    world.engines["a"] = Engine(seen={GPU0: 5_000})
    ready(world, "a")
    world.arrive("r", "b", takes_s=0.0)
    world.run()
    assert world.kinds() == ["load a", "unload a", "load b"]


def test_a_slot_that_uses_more_than_its_claim_gives_back_all_of_it() -> None:
    """Counting only its claim would leave the newcomer waiting for ever."""
    world = World([model("a", 4_000), model("b", 8_000)])
    ready(world, "a")
    world.memory({}, {world.slot_of("a"): {GPU0: 6_000}})
    world.arrive("r", "b", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED


def test_figures_for_a_slot_that_has_left_are_forgotten() -> None:
    world = World([model("a")])
    ready(world, "a")
    slot = world.slot_of("a")
    world.ask("o", MoveKind.UNLOAD, "a")
    world.run()
    world.post(ev.MemoryChanged(world.now, {}, {slot: {GPU0: 1}}))
    assert not world.scheduler.state.ledger.holdings


def test_a_memory_promised_to_a_waking_model_is_not_promised_again() -> None:
    """The sleeper waits for a resident to leave; the newcomer may not slip into the same gap."""
    world = World(
        [model("sleeper", 5_000, asleep=Need(0, 1_000)), model("resident", 8_000), model("newcomer", 5_000)],
        devices=(gpu(0, 8_000), host(4_000)),
    )
    ready(world, "sleeper")
    world.ask("o", MoveKind.SLEEP, "sleeper")
    world.run()
    ready(world, "resident")
    world.arrive("first", "sleeper")
    world.arrive("second", "newcomer")
    planned = [slot.model for slot in world.scheduler.state.slots.values() if slot.planned]
    assert planned == ["sleeper"]
    world.run()
    assert world.fate("first") is Fate.GRANTED and world.fate("second") is Fate.WAITING


# --- the green room --------------------------------------------------------------------------------------------------


def asleep_world(host_mib: int = 8_000, **sizes: int) -> World:
    specs = [model(name, mib, asleep=Need(500, mib)) for name, mib in sizes.items()]
    return World(specs, devices=(gpu(0, 8_000), host(host_mib)))


def test_an_evicted_model_sleeps_while_the_green_room_has_room() -> None:
    world = asleep_world(a=5_000, b=5_000)
    ready(world, "a", "b")
    assert world.kinds() == ["load a", "sleep a", "load b"] and world.tier("a") is Tier.ASLEEP


def test_a_sleeping_model_wakes_where_it_slept() -> None:
    world = asleep_world(a=5_000, b=5_000)
    ready(world, "a", "b")
    slot = world.slot_of("a")
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.kinds()[-1] == "wake a" and world.moves[-1].slot == slot and world.moves[-1].claim == {GPU0: 5_000}


def test_an_evicted_model_goes_cold_when_the_green_room_is_full() -> None:
    world = asleep_world(host_mib=4_000, a=5_000, b=5_000)
    ready(world, "a", "b")
    assert world.kinds() == ["load a", "unload a", "load b"]


def test_models_go_cold_when_their_sleep_would_not_make_enough_room() -> None:
    world = asleep_world(a=5_000, b=8_000)
    ready(world, "a", "b")
    assert world.kinds() == ["load a", "unload a", "load b"]


def test_an_idle_model_goes_cold_rather_than_making_the_newcomer_wait_for_a_busy_one() -> None:
    world = asleep_world(a=4_000, busy=4_000, new=4_000)
    ready(world, "a", "busy")
    world.arrive("running", "busy")
    world.arrive("r", "new", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED and world.kinds("a") == ["load a", "unload a"]


def test_when_all_are_busy_the_newcomer_waits_for_a_sleep() -> None:
    world = asleep_world(a=5_000, new=5_000)
    ready(world, "a")
    world.arrive("running", "a", takes_s=5.0)
    world.arrive("r", "new", takes_s=0.0)
    world.run()
    assert world.kinds() == ["load a", "sleep a", "load new"]


def test_a_sleeping_model_leaves_the_green_room_for_one_that_needs_it() -> None:
    world = World(
        [model("a", 5_000, asleep=Need(0, 5_000)), model("b", 1_000, host_mib=5_000)],
        devices=(gpu(0, 8_000), host(8_000)),
    )
    ready(world, "a")
    world.ask("o", MoveKind.SLEEP, "a")
    world.run()
    ready(world, "b")
    assert world.kinds() == ["load a", "sleep a", "unload a", "load b"]


def test_while_it_falls_asleep_a_slot_holds_its_memory_on_both_tiers() -> None:
    world = asleep_world(a=5_000, b=5_000)
    ready(world, "a")
    world.arrive("r", "b")
    held = world.scheduler.state.ledger.held_by(world.slot_of("a"))
    assert held == {GPU0: 5_000, HOST: 5_000}
    world.run()
    assert world.scheduler.state.ledger.held_by(world.slot_of("a")) == {GPU0: 500, HOST: 5_000}


def test_gpu_memory_that_a_sleeping_model_keeps_is_promised_to_no_other() -> None:
    world = asleep_world(a=5_000, b=5_000, c=2_800)
    ready(world, "a")
    world.arrive("b", "b")
    world.arrive("c", "c")
    world.run()
    assert world.kinds()[:3] == ["load a", "sleep a", "load b"], (
        "c would have fitted for a moment, and broken the promise"
    )


def test_a_slot_may_fall_asleep_though_strangers_have_taken_more_than_there_is() -> None:
    """It asks for nothing more on the GPU: it gives some back."""
    world = asleep_world(a=5_000)
    ready(world, "a")
    world.memory({GPU0: 6_000})
    world.ask("o", MoveKind.SLEEP, "a")
    world.run()
    assert world.kinds() == ["load a", "sleep a"]


def test_what_was_seen_still_counts_while_a_slot_falls_asleep() -> None:
    world = asleep_world(a=5_000, b=2_500)
    world.engines["a"] = Engine(seen={GPU0: 6_000})
    ready(world, "a")
    world.ask("o", MoveKind.SLEEP, "a")
    world.arrive("r", "b", takes_s=0.0)
    assert "load b" not in world.kinds(), "it would not fit beside what is really there"
    world.run()
    assert world.fate("r") is Fate.SERVED


def test_a_model_that_cannot_wake_where_it_sleeps_is_loaded_elsewhere() -> None:
    world = World(
        [model("a", 5_000, asleep=Need(0, 1_000)), model("kept", 5_000, pinned=True, devices=(GPU0,))],
        devices=(gpu(0, 8_000), gpu(1, 9_000), host(4_000)),
    )
    ready(world, "a")
    world.ask("o", MoveKind.SLEEP, "a")
    world.run()
    ready(world, "kept")
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED
    assert world.moves[-1].kind is MoveKind.LOAD and world.moves[-1].claim == {GPU1: 5_000}


def test_a_split_model_sleeps_on_the_gpus_it_was_split_over() -> None:
    world = World(
        [model("wide", 9_000, can_split=True, asleep=Need(900, 2_000))], (gpu(0, 6_000), gpu(1, 6_000), host(4_000))
    )
    ready(world, "wide")
    world.ask("o", MoveKind.SLEEP, "wide")
    world.run()
    assert world.moves[-1].claim == {GPU0: 450, GPU1: 450, HOST: 2_000}


def test_a_model_on_the_host_sleeps_on_the_host() -> None:
    world = World([model("a", 5_000, asleep=Need(100, 900))], devices=(host(8_000),))
    ready(world, "a")
    world.ask("o", MoveKind.SLEEP, "a")
    world.run()
    assert world.moves[-1].claim == {HOST: 1_000}


def test_a_model_may_sleep_on_a_host_whose_memory_is_not_counted() -> None:
    """Only GPUs are counted on this machine, so a sleeping copy on the host claims nothing."""
    world = World([model("a", 5_000, asleep=Need(0, 5_000)), model("b", 5_000)])
    ready(world, "a", "b")
    assert world.kinds() == ["load a", "sleep a", "load b"]


# --- devices that change, engines that size themselves ---------------------------------------------------------------


def test_a_device_that_goes_away_is_planned_with_no_more_and_what_is_on_it_can_leave() -> None:
    world = World(
        [model("a", 3_000, asleep=Need(0, 3_000)), model("b", 7_000)],
        devices=(gpu(0, 8_000), gpu(1, 4_000), host(8_000)),
    )
    ready(world, "a")
    assert world.moves[0].claim == {GPU1: 3_000}
    world.config(devices=(gpu(0, 8_000), host(8_000)))
    world.ask("o", MoveKind.SLEEP, "a")
    world.run()
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED and world.moves[-1].claim == {GPU0: 3_000}


def test_a_planned_load_whose_device_goes_away_is_planned_elsewhere() -> None:
    world = World([model("a", 4_000), model("b", 4_000)], devices=(gpu(0, 4_000), gpu(1, 3_000)))
    ready(world, "a")
    world.arrive("r", "b", takes_s=0.0)
    world.config(devices=(gpu(1, 4_000),))
    world.run()
    assert world.fate("r") is Fate.SERVED and world.moves[-1].claim == {GPU1: 4_000}


def test_engines_that_size_themselves_start_alone_on_their_gpu() -> None:
    world = World(
        [model(name, 2_000, sizes_itself=True, devices=(GPU0,)) for name in "ab"]
        + [model("c", 2_000, devices=(GPU0,)), model("elsewhere", 2_000, devices=(GPU1,), host_mib=10)],
        devices=(gpu(0, 8_000), gpu(1, 8_000), host(8_000)),
    )
    for name in ("a", "b", "c", "elsewhere"):
        world.arrive(name, name, takes_s=0.0)
    assert world.kinds() == ["load a", "load elsewhere"]
    world.run(5.0)
    assert world.kinds() == ["load a", "load elsewhere", "load b"]
    world.run()
    assert world.kinds()[-1] == "load c" and world.is_at_rest()


def test_an_engine_that_sizes_itself_waits_until_a_leaving_one_has_left() -> None:
    world = World([model("a", 2_000), model("b", 2_000, sizes_itself=True)])
    ready(world, "a")
    world.ask("o", MoveKind.UNLOAD, "a")
    world.arrive("r", "b", takes_s=0.0)
    assert world.kinds() == ["load a", "unload a"]
    world.run()
    assert world.fate("r") is Fate.SERVED


def test_others_may_leave_while_an_engine_sizes_itself() -> None:
    world = World([model("a", 2_000, ttl_s=1.0), model("b", 2_000, sizes_itself=True)])
    ready(world, "b")
    world.ask("o", MoveKind.UNLOAD, "b")
    world.arrive("r", "a", takes_s=0.0)
    assert world.kinds()[-1] == "load a", "only its start is exclusive"
    world.run()


def test_a_model_that_ends_its_answers_first_says_for_which_model_and_request_it_leaves() -> None:
    world = World([model("busy", 6_000), model("new", 6_000)])
    world.arrive("long", "busy", takes_s=40.0)
    world.run(20.0)
    world.arrive("urgent", "new", priority=0)
    world.run(60.0)
    (left,) = [move for move in world.moves if move.kind is MoveKind.UNLOAD]
    reason = world.reasons[left.id]
    assert reason.why == "leaving", "it had to end its answer"
    assert dict(reason.facts) == {"model": "busy", "cause": "evicted", "for_model": "new", "for_request": "urgent"}


def test_a_swapper_may_evict_all_other_models() -> None:
    class Alone:
        """One model at a time, whatever fits."""

        def eviction_for(
            self, target: Target, residents: Sequence[Resident], room_mib: Mapping[DeviceId, int]
        ) -> Eviction | None:
            if any(resident.is_fixed for resident in residents):
                return None
            return Eviction(target.options[0], tuple(residents))

    world = World(
        [model("a", 1_000), model("b", 1_000)],
        policies={"default": lambda limits, _: BoundedFirstCome(limits, Alone())},
        limits=Limits(),
    )
    for name in ("r1", "r2"):
        world.arrive(name, "a" if name == "r1" else "b", takes_s=0.0)
    world.run()
    assert world.kinds() == ["load a", "unload a", "load b"] and world.is_at_rest()


def test_cuda_knows_a_gpu_by_its_uuid_and_a_simulated_one_by_its_number() -> None:
    assert [cuda_name(name) for name in ("GPU-3fa2", "gpu1", "gpux")] == ["GPU-3fa2", "1", "gpux"]


def test_a_pinned_model_that_comes_leaves_less_for_those_asked_for_after_it_in_the_same_round() -> None:
    world = World([model("x", 8_000), model("p", 5_000, pinned=True), model("q", 6_000)], (gpu(0, 8_000),))
    ready(world, "x")
    world.arrive("x busy", "x")
    world.arrive("p", "p")
    world.arrive("q", "q")
    assert world.fate("q") is Fate.WAITING
    world.finish("x busy")
    assert world.fate("q") is Fate.REJECTED and world.code("q") is RejectCode.TOO_LARGE
