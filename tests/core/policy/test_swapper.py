"""Which models leave: the cheapest set that makes room, idle and less urgent first, within rules of coresidency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.events import Limits
from greenroom.core.model import Claim, DeviceId, ModelId, Need, SlotId, Tier
from greenroom.core.policy.coordinator import Coordinator
from greenroom.core.policy.coresidency import Group, coresidency_under
from greenroom.core.policy.matrix import Matrix
from greenroom.core.policy.swapper import EXACT_MAX, ByMemory, Eviction, PlaceRank, Resident, Swapper, Target
from tests.core.queue.test_order import ready
from tests.core.world import HOST, Fate, World, gpu, host, model

G0, G1, G2 = (DeviceId(f"gpu{number}") for number in range(3))


def there(
    name: str,
    gives: Claim | int,
    *,
    loss: float = 1.0,
    priority: int = 1,
    last_used: float = 0.0,
    busy: bool = False,
    fixed: bool = False,
) -> Resident:
    gives_mib = {G0: gives} if isinstance(gives, int) else gives
    slot, to = SlotId(f"s-{name}"), Tier.ASLEEP if any(mib < 0 for mib in gives_mib.values()) else Tier.COLD
    return Resident(slot, ModelId(name), gives_mib, to, priority, last_used, busy, fixed, loss=loss)


def wanting(*options: Claim | int, priority: int = 1, name: str = "new") -> Target:
    claims = tuple({G0: option} if isinstance(option, int) else option for option in options)
    return Target(ModelId(name), claims, priority)


def victims(target: Target, residents: Sequence[Resident], room: Mapping[DeviceId, int] | int = 0) -> list[str] | None:
    found = ByMemory().eviction_for(target, residents, {G0: room} if isinstance(room, int) else room)
    return None if found is None else [str(one.model) for one in found.victims]


# --- one device -----------------------------------------------------------------------------------------------------


LOW = [there("u", 4_000, priority=0), there("e", 4_000), there("l", 4_000, priority=2)]
BUSY = [there("busy", 4_000, loss=0.0, priority=2, busy=True), there("a", 2_000), there("b", 2_000, priority=0)]
FIXED = there("fixed", 4_000, loss=0.0, fixed=True)
# How much is wanted of one device, what is there, and what leaves: None where that is not enough.
SENTENCES: dict[str, list[tuple[int, list[Resident], list[str] | None]]] = {
    "room that is missing is made by the smallest loss": [
        (4_000, [there("dear", 4_000, loss=5.0), there("cheap", 4_000, loss=1.0)], ["cheap"])
    ],
    "two cheap ones leave rather than a dear one": [
        (
            4_000,
            [there("dear", 4_000, loss=5.0), there("one", 2_000, loss=2.0), there("two", 2_000, loss=2.0)],
            ["one", "two"],
        )
    ],
    # The large one is cheaper for every MiB, but not as a whole.
    "a good price for a MiB is not enough when a small one will do": [
        (1_000, [there("large", 8_000, loss=4.0), there("small", 1_000, loss=1.0)], ["small"])
    ],
    "among equals the least recently used leaves": [
        (4_000, [there("recent", 4_000, last_used=9.0), there("old", 4_000, last_used=3.0)], ["old"])
    ],
    "none leave when all together are not enough": [
        (9_000, [there("a", 4_000), there("b", 4_000)], None),
        (9_000, [], None),
    ],
    "a fixed resident stays": [(4_000, [FIXED, there("b", 4_000)], ["b"]), (4_000, [FIXED], None)],
    "a resident that frees nothing there stays": [
        (4_000, [there("elsewhere", {G1: 9_000}, loss=0.0), there("here", 4_000)], ["here"])
    ],
    "the less urgent leave before equals, and equals before the more urgent, whatever they lose": [
        (4_000, [*LOW[:2], there("l", 4_000, loss=99.0, priority=2)], ["l"]),
        (4_000, LOW[:2], ["e"]),
        (4_000, LOW[:1], ["u"]),
        (8_000, LOW, ["l", "e"]),
    ],
    "many idle ones leave before one that is busy": [(4_000, BUSY, ["a", "b"]), (8_000, BUSY, ["a", "b", "busy"])],
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_those_leave_that_cost_least(sentence: str) -> None:
    for wanted, residents, leaving in SENTENCES[sentence]:
        assert victims(wanting(wanted), residents) == leaving


def test_no_model_leaves_when_there_is_room() -> None:
    assert victims(wanting(4_000), [there("a", 4_000)], 4_000) == []


def test_an_eviction_with_a_busy_victim_is_blocked() -> None:
    found = ByMemory().eviction_for(wanting(4_000), [there("a", 4_000, busy=True)], {G0: 0})
    assert found is not None and found.is_blocked
    assert not Eviction({}, (there("a", 1),)).is_blocked


# --- several devices ------------------------------------------------------------------------------------------------


def test_the_device_where_less_is_lost_is_chosen() -> None:
    residents = [there("dear", {G0: 4_000}, loss=5.0), there("cheap", {G1: 4_000}, loss=1.0)]
    found = ByMemory().eviction_for(wanting({G0: 4_000}, {G1: 4_000}), residents, {G0: 0, G1: 0})
    assert found is not None and found.claim == {G1: 4_000} and [one.model for one in found.victims] == ["cheap"]


@pytest.mark.parametrize("swapper", [ByMemory(), Coordinator()])
def test_of_devices_with_room_the_best_place_is_taken_before_any_eviction(swapper: Swapper) -> None:
    def rank(claim: Claim) -> PlaceRank:
        return (0 if G1 in claim else 1, 0, 0, 0, tuple(claim))

    target = replace(wanting({G0: 3_000}, {G1: 3_000}, {G2: 3_000}), rank=rank)
    found = swapper.eviction_for(target, [there("a", 4_000)], {G0: 0, G1: 8_000, G2: 3_500})
    assert found is not None and found.claim == {G1: 3_000} and not found.victims


def test_a_model_over_two_devices_makes_room_on_both() -> None:
    residents = [
        there("left", {G0: 4_000}),
        there("right", {G1: 4_000}),
        there("wide", {G0: 4_000, G1: 4_000}, loss=3.0),
    ]
    assert victims(wanting({G0: 4_000, G1: 4_000}), residents, {G0: 0, G1: 0}) == ["left", "right"]
    cheap = [*residents[:2], there("wide", {G0: 4_000, G1: 4_000}, loss=1.5)]
    assert victims(wanting({G0: 4_000, G1: 4_000}), cheap, {G0: 0, G1: 0}) == ["wide"]


# --- falling asleep -------------------------------------------------------------------------------------------------


def test_a_victim_that_falls_asleep_takes_host_memory_that_the_newcomer_needs_too() -> None:
    sleeper, stiff = there("sleeper", {G0: 4_000, HOST: -3_000}, loss=0.1), there("stiff", {G0: 4_000}, loss=9.0)
    target = wanting({G0: 4_000, HOST: 1_000})
    assert victims(target, [sleeper, stiff], {G0: 0, HOST: 4_000}) == ["sleeper"]
    assert victims(target, [sleeper, stiff], {G0: 0, HOST: 3_500}) == ["stiff"], "else there is too little for both"
    assert victims(target, [sleeper], {G0: 0, HOST: 3_500}) is None
    halves = [there(name, {G0: 2_000, HOST: -1_500}) for name in ("one", "other")]
    assert victims(target, halves, {G0: 0, HOST: 4_000}) == ["one", "other"]
    assert victims(target, halves, {G0: 0, HOST: 3_500}) is None


def test_a_sleeping_model_may_leave_for_a_victim_that_falls_asleep() -> None:
    residents = [there("falls", {G0: 4_000, HOST: -3_000}), there("sleeps", {HOST: 3_000})]
    assert victims(wanting({G0: 4_000, HOST: 1_000}), residents, {G0: 0, HOST: 1_500}) == ["falls", "sleeps"]


# --- exact ----------------------------------------------------------------------------------------------------------

amounts = st.integers(0, 6).map(lambda step: step * 1_000)
losses = st.integers(0, 40).map(lambda step: step / 8)


@st.composite
def a_resident(draw: st.DrawFn, name: str) -> Resident:
    gives = {G0: draw(amounts), G1: draw(amounts), HOST: draw(st.integers(-3, 3)) * 1_000}
    return there(
        name,
        gives,
        loss=draw(losses),
        priority=draw(st.integers(0, 2)),
        last_used=draw(st.integers(0, 3)),
        busy=draw(st.booleans()),
        fixed=draw(st.sampled_from([False, False, False, True])),
    )


@st.composite
def a_question(draw: st.DrawFn, most: int) -> tuple[Target, list[Resident], dict[DeviceId, int]]:
    residents = [draw(a_resident(f"m{number}")) for number in range(draw(st.integers(0, most)))]
    claims = draw(
        st.lists(st.fixed_dictionaries({}, optional={G0: amounts, G1: amounts, HOST: amounts}), min_size=1, max_size=2)
    )
    room = {G0: draw(st.integers(-1, 3)) * 1_000, G1: draw(amounts), HOST: draw(st.integers(0, 4)) * 1_000}
    return Target(ModelId("new"), tuple(claims), 1), residents, room


def level(resident: Resident, target: Target) -> tuple[bool, int]:
    urgency = 0 if resident.priority > target.priority else 1 if resident.priority == target.priority else 2
    return (resident.is_busy, urgency)


def is_enough(claim: Claim, leaving: Sequence[Resident], room: Mapping[DeviceId, int]) -> bool:
    return all(
        room[device] + sum(one.gives_mib.get(device, 0) for one in leaving) >= mib for device, mib in claim.items()
    )


def best_by_trying_all(
    target: Target, residents: Sequence[Resident], room: Mapping[DeviceId, int]
) -> tuple[tuple[bool, int], float] | None:
    """The least of (worst level, loss) over all claims and all sets of victims."""
    free = [one for one in residents if not one.is_fixed]
    sets = [chosen for size in range(len(free) + 1) for chosen in combinations(free, size)]
    return min(
        (
            (max((level(one, target) for one in chosen), default=(False, 0)), sum(one.loss for one in chosen))
            for claim in target.options
            for chosen in sets
            if is_enough(claim, chosen, room)
        ),
        default=None,
    )


@settings(max_examples=100, deadline=None)
@given(a_question(most=7))
def test_the_cheapest_set_is_found_exactly(question: tuple[Target, list[Resident], dict[DeviceId, int]]) -> None:
    target, residents, room = question
    found, best = ByMemory().eviction_for(target, residents, room), best_by_trying_all(target, residents, room)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.claim in target.options and is_enough(found.claim, found.victims, room)
        assert not any(one.is_fixed for one in found.victims) and len(set(found.victims)) == len(found.victims)
        worst = max((level(one, target) for one in found.victims), default=(False, 0))
        assert (worst, sum(one.loss for one in found.victims)) == best


@pytest.mark.slow
@settings(max_examples=1_000, deadline=None)
@given(a_question(most=7))
def test_the_cheapest_set_is_found_exactly_at_length(
    question: tuple[Target, list[Resident], dict[DeviceId, int]],
) -> None:
    test_the_cheapest_set_is_found_exactly.hypothesis.inner_test(question)


def test_it_is_exact_for_twelve() -> None:
    """Six pairs, of which one of each has to leave; together they must give a sum that greed misses."""
    residents = [
        there(f"m{number}", 1_000 + 37 * number, loss=1.0 + (number * 7 % 5) / 8) for number in range(EXACT_MAX)
    ]
    target = wanting(5_500)
    found, best = ByMemory().eviction_for(target, residents, {G0: 0}), best_by_trying_all(target, residents, {G0: 0})
    assert found is not None and best is not None and sum(one.loss for one in found.victims) == best[1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), losses), min_size=EXACT_MAX + 1, max_size=40), st.integers(1, 60))
def test_above_twelve_residents_enough_leave_and_none_leaves_for_nothing(
    sizes: list[tuple[int, float]], wanted: int
) -> None:
    residents = [there(f"m{number}", mib, loss=loss) for number, (mib, loss) in enumerate(sizes)]
    found = ByMemory().eviction_for(wanting(wanted), residents, {G0: 0})
    assert (found is None) == (sum(mib for mib, _ in sizes) < wanted)
    if found is not None:
        given_mib = sum(one.gives_mib[G0] for one in found.victims)
        assert given_mib >= wanted
        assert all(given_mib - one.gives_mib[G0] < wanted for one in found.victims)


@settings(max_examples=50, deadline=None)
@given(a_question(most=8), st.randoms(use_true_random=False))
def test_the_order_in_which_residents_are_told_does_not_matter(
    question: tuple[Target, list[Resident], dict[DeviceId, int]], random: Random
) -> None:
    target, residents, room = question
    shuffled = list(residents)
    random.shuffle(shuffled)
    assert ByMemory().eviction_for(target, residents, room) == ByMemory().eviction_for(target, shuffled, room)


# --- coresidency ----------------------------------------------------------------------------------------------------

A, B, NEW = ModelId("a"), ModelId("b"), ModelId("new")
PAIR = (Group("turns", (NEW, A), swap=True, exclusive=False), Group("free", (B,), exclusive=False))


def in_coresidency(residents: Sequence[Resident], room: int, target: Target) -> list[str] | None:
    found = ByMemory(coresidency_under(PAIR)).eviction_for(target, residents, {G0: room})
    return None if found is None else [str(one.model) for one in found.victims]


def test_models_that_the_rules_send_away_leave_though_there_is_room() -> None:
    assert in_coresidency([there("a", 2_000), there("b", 2_000)], 9_000, wanting(2_000)) == ["a"]


def test_what_they_give_counts_and_others_leave_only_for_what_is_still_missing() -> None:
    assert in_coresidency([there("a", 2_000), there("b", 2_000, loss=0.0)], 0, wanting(2_000)) == ["a"]
    assert in_coresidency([there("a", 2_000), there("b", 2_000, loss=0.0)], 0, wanting(3_000)) == ["a", "b"]


def test_the_newcomer_cannot_load_while_a_fixed_model_would_have_to_leave() -> None:
    assert in_coresidency([there("a", 2_000, fixed=True)], 9_000, wanting(2_000)) is None


def test_another_slot_of_the_newcomer_need_not_leave() -> None:
    assert in_coresidency([there("new", 2_000), there("b", 2_000)], 9_000, wanting(2_000)) == []


@pytest.mark.parametrize(("sets", "leaving"), [("new & b", ["a"]), ("new & a | b", ["b"]), ("a | b", ["a", "b"])])
def test_a_matrix_is_kept_too(sets: str, leaving: list[str]) -> None:
    company = coresidency_under(Matrix((("only", sets),)))
    found = ByMemory(company).eviction_for(wanting(1_000), [there("a", 500), there("b", 500)], {G0: 9_000})
    assert found is not None and [str(one.model) for one in found.victims] == leaving


def test_rules_apply_to_neither_leases_nor_sleeping_models() -> None:
    """A lease is another program's memory; a model that is asleep, or loads to sleep, is not ready beside others."""
    asleep = replace(there("a", 500), counts_as_ready=False)
    assert in_coresidency([asleep, there("b", 500)], 9_000, wanting(1_000)) == []
    assert in_coresidency([replace(asleep, is_fixed=True)], 9_000, wanting(1_000)) == []
    assert in_coresidency([there("a", 500)], 9_000, replace(wanting(1_000), will_be_ready=False)) == []


def test_models_that_take_turns_sleep_while_the_other_is_ready() -> None:
    turns = (Group("turns", (A, B)),)
    specs = [model(name, 2_000, asleep=Need(0, 1_000)) for name in ("a", "b")]
    world = World(specs, devices=(gpu(0, 8_000), host(8_000)), limits=Limits(company=turns))
    ready(world, "a", "b", "a", "b")
    assert world.kinds() == ["load a", "sleep a", "load b", "sleep b", "wake a", "sleep a", "wake b"]


def test_a_lease_and_a_model_that_runs_alone_do_not_disturb_each_other() -> None:
    world = World([model("a", 2_000), model("b", 2_000)], limits=Limits(company=(Group("alone", (A,)),)))
    ready(world, "a")
    assert world.ask_lease("train", 2_000).fate is Fate.GRANTED
    world.arrive("r", "b", takes_s=0.0)
    world.run()
    assert world.kinds() == ["load a", "unload a", "load b"] and world.fate("train") is Fate.GRANTED
