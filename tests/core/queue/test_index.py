"""Kept orders equal a fresh sort after any change, and every key is refreshed in turn."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.queue.index import (
    LEADING_MIN,
    REFRESHED_AT_ONCE_MAX,
    REFRESHED_BY_FIRST,
    REFRESHED_BY_LEADING,
    TURNS_FRESH_S,
    KeptOrder,
    Least,
    TurnIndex,
)

KEYS = st.sampled_from("abcdefghij")
NUMBERS = st.integers(0, 5).map(float)


@settings(deadline=None)
@given(st.lists(st.tuples(KEYS, st.one_of(st.none(), NUMBERS)), max_size=60))
def test_the_order_is_that_of_what_was_last_seen(steps: list[tuple[str, float | None]]) -> None:
    order: KeptOrder[str] = KeptOrder()
    seen: dict[str, tuple[float, ...]] = {}
    for key, number in steps:
        if number is None:
            order.drop(key)
            seen.pop(key, None)
        else:
            order.put(key, (number,))
            seen[key] = (number,)
        keys = [key for _, key in order.entries]
        assert keys == sorted(seen, key=lambda one: (seen[one], one)) and len(order) == len(seen)
        assert order.seen == seen


def test_those_come_to_light_first_that_were_not_seen_for_longest() -> None:
    order: KeptOrder[str] = KeptOrder()
    for key in "abcd":
        order.put(key, (1.0,))
    order.put("a", (0.0,))
    order.put("b", (1.0,))
    assert order.longest_unseen(3) == ["c", "d", "a"], "a key that was put unchanged counts as seen"
    order.drop("c")
    assert order.longest_unseen(9) == ["d", "a", "b"]
    order.clear()
    assert not order and order.longest_unseen(1) == []


def test_a_key_that_is_not_there_can_be_dropped() -> None:
    order: KeptOrder[str] = KeptOrder()
    order.put("a", (1.0,))
    order.drop("b")
    assert order.entries == [((1.0,), "a")]


def test_a_group_without_keys_is_forgotten() -> None:
    least: Least[str] = Least()
    least.put(0, 1.0, "a")
    least.put(1, 2.0, "b")
    assert least.of_groups(lambda number, key: key == "b") == [(1, 2.0)] and len(least) == 1
    assert least.of_groups(lambda number, key: True) == [(1, 2.0)]


def test_an_item_that_comes_or_changes_later_has_its_turn_at_once() -> None:
    index: TurnIndex[str, float] = TurnIndex(few=2)
    for number, key in enumerate("cdef"):
        index.put(key, float(number))
    assert index.first(lambda item: (item,), 0.0) == 0.0
    index.put("b", -1.0)
    assert index.first(lambda item: (item,), 0.0) == -1.0
    index.put("f", -2.0)
    assert index.first(lambda item: (item,), 0.0) == -2.0


def test_every_key_is_refreshed_in_turn() -> None:
    order: KeptOrder[int] = KeptOrder()
    for key in range(100):
        order.put(key, (0.0,))
    looked_at = set()
    for _ in range(10):
        for key in order.longest_unseen(10):
            looked_at.add(key)
            order.put(key, (float(key % 7),))
    assert looked_at == set(range(100))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), KEYS, st.one_of(st.none(), NUMBERS)), max_size=60))
def test_the_least_of_each_group_is_that_of_its_present_keys(
    steps: list[tuple[int, str, float | None]],
) -> None:
    least: Least[tuple[int, str]] = Least()
    there: dict[tuple[int, str], float] = {}
    for group, name, number in steps:
        key = (group, name)
        if number is None:
            there.pop(key, None)
        else:
            there[key] = number
            least.put(group, number, key)
        found = dict(least.of_groups(lambda number, key: there.get(key) == number))
        groups = {group for group, _ in there}
        assert found == {group: min(number for key, number in there.items() if key[0] == group) for group in groups}
    assert len(least) >= len({group for group, _ in there})
    there.clear()
    assert least.of_groups(lambda number, key: key in there) == [] and len(least) == 0


# --- the index ------------------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(KEYS, st.one_of(st.none(), NUMBERS)), max_size=60)


@settings(deadline=None)
@given(STEPS, st.integers(0, 12))
def test_few_or_many_the_first_is_the_same(steps: list[tuple[str, float | None]], few: int) -> None:
    index: TurnIndex[str, tuple[float, str]] = TurnIndex(few)
    for key, number in steps:
        if number is None and key in index.items:
            index.drop(key)
        elif number is not None:
            index.put(key, (number, key))
        assert index.first(lambda item: (item[0], float(ord(item[1]))), 0.0) == min(index.items.values(), default=None)


@settings(deadline=None)
@given(STEPS, st.integers(0, 12))
def test_few_or_many_those_that_lead_are_the_same(steps: list[tuple[str, float | None]], few: int) -> None:
    index: TurnIndex[str, tuple[float, str]] = TurnIndex(few)
    for key, number in steps:
        if number is None and key in index.items:
            index.drop(key)
        elif number is not None:
            index.put(key, (number, key))
        found = index.leading(lambda item, now: (item[0],), lambda item, now: item[0] > 0.0, 0.0)
        leading = [item for item in found if item[0] > 0.0]
        numbers = sorted(item[0] for item in index.items.values() if item[0] > 0.0)
        assert [item[0] for item in leading] == numbers, "there are fewer than are refreshed at once"


def test_of_very_many_each_is_returned_now_and_then() -> None:
    index: TurnIndex[int, int] = TurnIndex(8)
    for number in range(100):
        index.put(number, number)
    seen: set[int] = set()
    for _ in range(2 * 100 // REFRESHED_BY_LEADING + 2):
        found = index.leading(lambda item, now: (float(item),), lambda item, now: True, 0.0)
        assert len(found) <= LEADING_MIN + REFRESHED_BY_LEADING
        seen.update(found)
    assert seen == set(range(100)) and found[:LEADING_MIN] == list(range(LEADING_MIN))


def test_those_that_lead_are_the_same_when_many_have_become_few() -> None:
    index: TurnIndex[int, int] = TurnIndex(8)
    for number in range(9):
        index.put(number, number)
    assert index.leading(lambda item, now: (-float(item),), lambda item, now: True, 0.0)[0] == 8
    for number in range(4, 9):
        index.drop(number)
    assert index.leading(lambda item, now: (-float(item),), lambda item, now: item != 2, 0.0) == [3, 1, 0]


class Name:
    def __init__(self, number: int) -> None:
        self.number = number

    def __lt__(self, other: object) -> bool:
        return isinstance(other, Name) and self.number < other.number


@pytest.mark.parametrize("count", [24, REFRESHED_AT_ONCE_MAX + 36])
def test_what_has_left_is_forgotten_after_a_while_though_it_never_came_first(count: int) -> None:
    index: TurnIndex[Name, int] = TurnIndex(8)
    names = [Name(number) for number in range(count)]
    for name in names:
        index.put(name, name.number)
    assert index.first(lambda item: (float(item),), 0.0) == 0
    last = ref(names[-1])
    index.drop(names.pop())
    del name
    assert index.first(lambda item: (float(item),), 0.5) == 0
    gc.collect()
    assert last() is not None, "its turn is still good enough"
    for _ in range(1 if count <= REFRESHED_AT_ONCE_MAX else -(-count // REFRESHED_BY_FIRST)):
        assert index.first(lambda item: (float(item),), TURNS_FRESH_S) == 0
    gc.collect()
    assert last() is None


def test_of_many_items_only_a_few_are_looked_at() -> None:
    index: TurnIndex[int, int] = TurnIndex(8)
    for key in range(1_000):
        index.put(key, key)
    looked_at = []

    def counts(item: int, now: float) -> bool:
        looked_at.append(item)
        return True

    for _ in range(100):
        index.leading(lambda item, now: (float(item),), counts, 0.0)
    looked_at.clear()
    index.leading(lambda item, now: (float(item),), counts, 0.0)
    assert len(looked_at) <= REFRESHED_BY_LEADING + LEADING_MIN


def test_what_has_left_or_does_not_count_never_leads() -> None:
    index: TurnIndex[int, int] = TurnIndex(8)
    for key in range(40):
        index.put(key, key)
    for _ in range(10):
        index.leading(lambda item, now: (float(item),), lambda item, now: True, 0.0)
    index.drop(0)
    leading = index.leading(lambda item, now: (float(item),), lambda item, now: item != 2, 0.0)
    assert leading[:LEADING_MIN] == [1, 3, 4, 5]
    few = index.leading(lambda item, now: (float(item),), lambda item, now: item == 30, 0.0)
    assert few[0] == 30 and 0 not in few
