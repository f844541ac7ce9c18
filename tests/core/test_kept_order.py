"""Orders that are kept: whatever changes, they say what sorting anew would say, and everybody is seen in turn."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.queue.kept_order import KeptOrder, Least

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
        assert list(order) == sorted(seen, key=lambda one: (seen[one], one)) and len(order) == len(seen)
        assert {one: order.turn(one) for one in order} == seen and all(
            (one in order) == (one in seen) for one in "abcj"
        )
    if seen:
        assert order.first == min((turn, key) for key, turn in seen.items())


def test_those_come_to_light_first_that_were_not_seen_for_longest() -> None:
    order: KeptOrder[str] = KeptOrder()
    for key in "abcd":
        order.put(key, (1.0,))
    order.put("a", (0.0,))
    order.put("b", (1.0,))
    assert order.longest_unseen(3) == ["c", "d", "a"], "also who was seen to be as before was seen"
    order.drop("c")
    assert order.longest_unseen(9) == ["d", "a", "b"]
    order.clear()
    assert not order and order.longest_unseen(1) == []


def test_everybody_is_seen_in_turn_however_few_are_looked_at_each_time() -> None:
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
def test_the_least_of_each_group_is_that_of_those_who_are_still_there(
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
