from __future__ import annotations

from greenroom.sim.player import Clock


def test_things_happen_in_order_of_time_and_then_of_arrangement() -> None:
    clock, seen = Clock(), []
    for after_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        clock.arrange(after_s, seen.append, name)
    while clock.advance(10.0):
        pass
    assert seen == ["first", "second", "late"] and clock.now == 2.0 and clock.is_empty


def test_nothing_beyond_the_given_time_happens() -> None:
    clock, seen = Clock(), []
    clock.arrange(5.0, seen.append, "later")
    assert not clock.advance(4.9) and not seen and not clock.is_empty
    assert clock.advance(5.0) and seen == ["later"]


def test_what_is_arranged_for_the_past_happens_at_once() -> None:
    clock, seen = Clock(), []
    clock.pass_to(10.0)
    clock.arrange_at(3.0, seen.append, "overdue")
    assert clock.advance(10.0) and seen == ["overdue"] and clock.now == 10.0


def test_a_stepped_clock_tells_another_time_than_passes() -> None:
    clock, told = Clock(), []
    clock.pass_to(10.0)
    clock.step(-4.0)
    assert (clock.now, clock.told) == (10.0, 6.0)
    clock.arrange_when_told(8.1, lambda _: told.append(clock.told), None)
    clock.advance(100.0)
    assert 8.1 <= told[0] < 8.11 and 12.0 < clock.now < 12.2
