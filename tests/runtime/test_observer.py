"""Decisions are kept with their reasons, their number and their time; and where models are is told as it changes."""

from __future__ import annotations

from greenroom.core.effects import RejectCode, Rejection, because
from greenroom.core.model import DeviceId, LeaseId, ModelId, Move, MoveId, MoveKind, Outcome, SlotId, lease_name
from greenroom.runtime.observer import DECISIONS_MAX, Hub, Observer, Residency
from greenroom.telemetry.exposition import Gauges, render
from greenroom.telemetry.metrics import Metrics


def unload(number: int) -> Move:
    return Move(MoveId(f"m-{number}"), MoveKind.UNLOAD, SlotId("s-1"), ModelId("a"), 1, {}, 0.0)


def test_decision_is_kept_with_number_time_and_reason() -> None:
    observer = Observer(Hub(), Metrics(), wall=lambda: 1_700_000_000.12345)
    observer.moving(unload(1), because("evicted", model="a", for_model="b", for_request="r-7"))
    observer.cut("r-8", "a", because("budget"))
    assert list(observer.decisions) == [
        {
            "seq": 1,
            "at": 1_700_000_000.123,
            "what": "unload",
            "model": "a",
            "slot": "s-1",
            "move": "m-1",
            "why": "evicted",
            "for_model": "b",
            "for_request": "r-7",
        },
        {"seq": 2, "at": 1_700_000_000.123, "what": "cut", "request": "r-8", "model": "a", "why": "budget"},
    ]


def test_departure_of_a_busy_model_is_counted_by_its_cause() -> None:
    metrics = Metrics()
    observer = Observer(Hub(), metrics)
    observer.moving(unload(1), because("leaving", model="a", cause="evicted", for_model="b"))
    observer.moving(unload(2), because("ttl", model="a"))
    shown, _ = render(metrics, Gauges())
    assert b'evictions_total{model="a",reason="evicted"} 1.0' in shown
    assert b'evictions_total{model="a",reason="ttl"} 1.0' in shown
    assert b"leaving" not in shown


def test_only_the_last_decisions_are_kept() -> None:
    observer = Observer(Hub(), Metrics())
    for number in range(DECISIONS_MAX + 5):
        observer.moving(unload(number), because("evicted"))
    assert [decision["seq"] for decision in observer.decisions] == list(range(6, DECISIONS_MAX + 6))


def test_rejected_requests_push_out_no_eviction() -> None:
    observer = Observer(Hub(), Metrics())
    observer.moving(unload(1), because("evicted"))
    for number in range(DECISIONS_MAX + 5):
        observer.rejected(f"r-{number}", Rejection(RejectCode.TOO_LARGE, ModelId("b")), because("too_large"))
    observer.moving(unload(2), because("ttl"))
    told = [(decision["seq"], decision["what"]) for decision in observer.decisions]
    assert told == [
        (1, "unload"),
        *((number, "reject") for number in range(7, DECISIONS_MAX + 7)),
        (DECISIONS_MAX + 7, "unload"),
    ]


def test_abort_says_whose_move_it_ends() -> None:
    observer = Observer(Hub(), Metrics())
    observer.moving(unload(1), because("ttl"))
    observer.aborting(MoveId("m-1"), because("shutdown"))
    observer.moved(unload(1), Outcome.ABORTED, 0.5)
    observer.aborting(MoveId("m-1"), because("late"))
    assert [decision["model"] for decision in observer.decisions if decision["what"] == "abort"] == ["a", None]


def test_a_lease_is_called_by_its_own_name_wherever_it_is_told_of() -> None:
    observer, lease = Observer(Hub(), Metrics()), lease_name(LeaseId("lease:train"))
    observer.moving(unload(1), because("evicted", for_model=lease, for_request="lease:train"))
    observer.rejected("lease:train", Rejection(RejectCode.TOO_LARGE, lease), because("too_large"))
    evicted, rejected = observer.decisions
    assert (evicted["for_model"], rejected["model"], rejected["request"]) == ("lease:train",) * 3


async def test_a_wake_is_told_with_its_bytes_and_its_rate() -> None:
    hub, metrics = Hub(), Metrics()
    observer, told = Observer(hub, metrics), hub.subscribe()
    observer.woke("a", 16_000_000_000, 0.32)
    observer.prepared("a", 1_000, 0.0)
    observer.worker_started("w-1", spare=True)
    observer.worker_lost("w-1", 2, "signal 9")
    observer.prefetched("a", 4096, 0.1)
    hub.close()
    first, second, *rest = [event async for event in told]
    assert first.data == {"model": "a", "bytes": 16_000_000_000, "took_s": 0.32, "gb_per_s": 50.0}
    assert (first.kind, second.kind, second.data["gb_per_s"]) == ("woke", "prepared", None)
    assert [event.kind for event in rest] == ["worker_started", "worker_lost"]
    shown, _ = render(metrics, Gauges())
    assert b'wake_bytes_total{model="a"} 1.6e+10' in shown
    assert b"worker_losses_total 1.0" in shown
    assert b'prefetch_bytes_total{model="a"} 4096.0' in shown


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
