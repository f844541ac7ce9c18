"""Decisions are kept with their reasons, their number and their time; the oldest go first."""

from __future__ import annotations

from greenroom.core.effects import RejectCode, Rejection, because
from greenroom.core.model import LeaseId, ModelId, Move, MoveId, MoveKind, Outcome, SlotId, lease_name
from greenroom.runtime.observer import DECISIONS_MAX, Hub, Observer
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
