from __future__ import annotations

from greenroom.core.model import DeviceId, ModelId, Move, MoveId, MoveKind, Outcome, SlotId
from greenroom.runtime.observer import Residency

GPU, HOST = DeviceId("gpu0"), DeviceId("host")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _move(kind: MoveKind, claim: dict[DeviceId, int], slot: str = "s1") -> Move:
    return Move(MoveId("m"), kind, SlotId(slot), ModelId("a"), 1, claim, 0.0)


def _play(residency: Residency, clock: Clock, move: Move, outcome: Outcome = Outcome.DONE) -> None:
    """Five seconds of rest, then a move of two seconds."""
    clock.now += 5
    residency.moving(move, "a", {"why": "asked_for"})
    clock.now += 2
    residency.moved(move, "a", outcome)


def _shown(residency: Residency, since: float = 0.0) -> list[tuple[str, float, float | None, dict[str, int]]]:
    return [(one.phase, one.began, one.ended, dict(one.devices)) for one in residency.spans(since, {"s1", "s2"})]


def test_a_span_is_as_long_as_it_was_whatever_the_wall_clock_does() -> None:
    wall, clock = Clock(), Clock()
    residency = Residency(wall, clock)
    for kind, jump_s in ((MoveKind.LOAD, 3_600.0), (MoveKind.SLEEP, -7_200.0), (MoveKind.WAKE, 3_600.0)):
        residency.moving(_move(kind, {GPU: 10}), "a", {})
        clock.now += 2
        wall.now += jump_s + 2
        residency.moved(_move(kind, {GPU: 10}), "a", Outcome.DONE)
        clock.now += 5
        wall.now += 5
    lasted = [ended - began for _, began, ended, _ in _shown(residency, -1e6) if ended is not None]
    assert lasted == [2, 5, 2, 5, 2]


def test_a_swap_to_the_green_room_and_back() -> None:
    clock = Clock()
    residency = Residency(clock, clock)
    _play(residency, clock, _move(MoveKind.LOAD, {GPU: 10}))
    _play(residency, clock, _move(MoveKind.SLEEP, {HOST: 10}))
    _play(residency, clock, _move(MoveKind.WAKE, {GPU: 10}))
    _play(residency, clock, _move(MoveKind.UNLOAD, {}))
    assert _shown(residency) == [
        ("load", 105.0, 107.0, {"gpu0": 10}),
        ("ready", 107.0, 112.0, {"gpu0": 10}),
        # What leaves is shown where it was.
        ("sleep", 112.0, 114.0, {"gpu0": 10}),
        ("asleep", 114.0, 119.0, {"host": 10}),
        ("wake", 119.0, 121.0, {"gpu0": 10}),
        ("ready", 121.0, 126.0, {"gpu0": 10}),
        ("unload", 126.0, 128.0, {"gpu0": 10}),
    ]


def test_a_load_that_fails_leads_nowhere_and_a_wake_back_to_sleep() -> None:
    clock = Clock()
    residency = Residency(clock, clock)
    _play(residency, clock, _move(MoveKind.LOAD, {GPU: 10}), Outcome.FAILED)
    assert [one.outcome for one in residency.spans(0.0, {"s1"})] == ["failed"]
    _play(residency, clock, _move(MoveKind.WAKE, {GPU: 10}), Outcome.ABORTED)
    assert [phase for phase, *_ in _shown(residency)] == ["load", "wake", "asleep"]


def test_a_lost_engine_ends_its_span() -> None:
    clock = Clock()
    residency = Residency(clock, clock)
    _play(residency, clock, _move(MoveKind.LOAD, {GPU: 10}))
    residency.lost("s1")
    residency.lost("s1")
    assert [(one.phase, one.outcome) for one in residency.spans(0.0, {"s1"})] == [("load", "done"), ("ready", "lost")]


def test_a_move_that_ends_after_its_engine_was_lost_leads_nowhere() -> None:
    clock = Clock()
    residency = Residency(clock, clock)
    wake = _move(MoveKind.WAKE, {GPU: 10})
    residency.moving(wake, "a", {})
    residency.lost("s1")
    residency.moved(wake, "a", Outcome.FAILED)
    assert [(one.phase, one.outcome) for one in residency.spans(0.0, {"s1"})] == [("wake", "lost")]


def test_a_slot_that_is_gone_without_a_word_ends_where_it_is_noticed() -> None:
    clock = Clock()
    residency = Residency(clock, clock)
    _play(residency, clock, _move(MoveKind.LOAD, {GPU: 10}, "s9"))
    clock.now = 200.0
    assert [(phase, ended) for phase, _, ended, _ in _shown(residency)] == [("load", 107.0), ("ready", 200.0)]


def test_spans_are_bounded_and_old_ones_left_out() -> None:
    clock = Clock()
    residency = Residency(clock, clock, spans_max=4)
    for _ in range(10):
        _play(residency, clock, _move(MoveKind.LOAD, {GPU: 10}))
    assert len(list(residency.spans(0.0, {"s1"}))) == 5
    assert [phase for phase, *_ in _shown(residency, since=clock.now)] == ["load", "ready"]
