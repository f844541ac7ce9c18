"""Memory for other programs: granted, waited for, recalled, given back."""

from __future__ import annotations

from greenroom.core import events as ev
from greenroom.core.effects import RejectCode
from greenroom.core.model import DeviceId, LeaseId, MoveKind, Need, Outcome, RequestId, lease_name
from tests.core.decide.test_memory import victims
from tests.core.queue.test_order import ready

from .world import Fate, World, gpu, host, model

GPU0, GPU1 = DeviceId("gpu0"), DeviceId("gpu1")


def test_a_lease_is_granted_at_once_when_memory_is_free_and_models_keep_off_it() -> None:
    world = World([model("a", 6_000)])
    assert world.ask_lease("train", 4_000).fate is Fate.GRANTED
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.WAITING
    world.end_lease("train")
    world.run()
    assert world.fate("r") is Fate.SERVED


def test_a_lease_makes_idle_models_leave_and_is_granted_when_they_have_left() -> None:
    world = World([model("a", 6_000)])
    ready(world, "a")
    world.ask_lease("train", 4_000)
    assert world.fate("train") is Fate.WAITING and world.kinds()[-1] == "unload a"
    world.run()
    assert world.fate("train") is Fate.GRANTED and victims(world) == ["a"]


def test_a_lease_waits_for_a_busy_model_and_keeps_its_place() -> None:
    world = World([model("a", 6_000, concurrency=9)])
    ready(world, "a")
    world.arrive("running", "a")
    lease = world.ask_lease("train", 4_000)
    for number in range(9):
        world.arrive(f"r{number}", "a", takes_s=1.0)
    assert world.fate("r7") is Fate.GRANTED and world.fate("r8") is Fate.WAITING
    world.finish("running")
    world.run()
    assert lease.fate is Fate.GRANTED


def claims_of(world: World) -> list[dict[DeviceId, int]]:
    return [dict(slot.claim) for slot in world.scheduler.state.slots.values() if slot.lease is not None]


def test_a_lease_is_held_on_one_gpu_where_it_fits_or_where_it_was_asked_for() -> None:
    world = World([], devices=(gpu(0, 8_000), gpu(1, 8_000)))
    world.ask_lease("named", 3_000, devices=(GPU1,))
    world.ask_lease("any", 5_000)
    assert claims_of(world) == [{GPU1: 3_000}, {GPU0: 5_000}]
    assert world.ask_lease("wide", 12_000).fate is Fate.REJECTED, "a program is not split over GPUs behind its back"


def test_a_lease_that_waited_for_the_host_where_no_gpu_was_gets_a_gpu_that_comes_back() -> None:
    machine = (gpu(0, 8_000), host(8_000))
    world = World([model("a", 6_000)], devices=machine[1:])
    ready(world, "a")
    lease = world.ask_lease("train", 4_000)
    assert lease.fate is Fate.WAITING and claims_of(world) == [{machine[1].id: 4_000}]
    world.config(devices=machine)
    assert lease.fate is Fate.GRANTED and claims_of(world) == [{GPU0: 4_000}]


def test_a_lease_over_several_gpus_has_its_memory_on_each_of_them() -> None:
    world = World([], devices=(gpu(0, 8_000), gpu(1, 6_000), gpu(2, 8_000), gpu(3, 8_000)))
    world.ask_lease("first", 7_000, devices=(DeviceId("gpu2"),))
    world.ask_lease("pair", 7_000, gpus=2)
    assert claims_of(world)[1] == {DeviceId("gpu0"): 7_000, DeviceId("gpu3"): 7_000}
    assert list(claims_of(world)[1]) == sorted(claims_of(world)[1])


def test_a_lease_over_several_gpus_waits_for_all_of_them_and_takes_none_meanwhile() -> None:
    world = World([model("a", 6_000, devices=(GPU1,)), model("b", 8_000)], devices=(gpu(0, 8_000), gpu(1, 8_000)))
    ready(world, "a")
    world.arrive("running", "a")
    world.ask_lease("pair", 4_000, gpus=2, within_s=20.0)
    assert world.fate("pair") is Fate.WAITING and not world.scheduler.state.ledger.promises
    ready(world, "b")
    world.finish("running")
    world.run()
    assert world.fate("pair") is Fate.GRANTED and sorted(victims(world)) == ["a", "b"]
    assert claims_of(world) == [{DeviceId("gpu0"): 4_000, GPU1: 4_000}]


def test_a_lease_over_more_gpus_than_can_hold_it_is_refused_with_numbers() -> None:
    world = World([], devices=(gpu(0, 8_000), gpu(1, 5_000)))
    for name, gpus, free_mib, capacity_mib in [("two", 2, 5_000, 5_000), ("three", 3, 0, 0)]:
        rejection = world.ask_lease(name, 6_000, gpus=gpus).rejection
        assert rejection is not None and rejection.code is RejectCode.TOO_LARGE
        assert (rejection.needs_mib, rejection.free_mib, rejection.capacity_mib) == (6_000, free_mib, capacity_mib)
    bare = World([], devices=(host(64_000),))
    assert bare.ask_lease("pair", 1_000, gpus=2).fate is Fate.REJECTED, "the host is not two GPUs"


def test_of_very_many_gpus_the_freest_are_looked_at() -> None:
    devices = tuple(gpu(number, 8_000) for number in range(20))
    world = World([], devices=devices)
    for number in range(10):
        world.ask_lease(f"l{number}", 7_000, devices=(DeviceId(f"gpu{number}"),))
    world.ask_lease("half", 4_000, gpus=10)
    assert world.fate("half") is Fate.GRANTED
    assert set(claims_of(world)[-1]) == {DeviceId(f"gpu{number}") for number in range(10, 20)}


def test_a_lease_that_has_waited_elsewhere_keeps_its_place() -> None:
    world = World([model("a", 6_000)], plays=False)
    world.arrive("r", "a")
    world.end_move(world.moves[-1].id, Outcome.DONE)
    world.run(10.0)
    world.ask_lease("here", 6_000)
    world.ask_lease("there", 6_000, waits_since=world.now - 100.0)
    world.finish("r")
    world.end_move(world.moves[-1].id, Outcome.DONE)
    assert (world.fate("there"), world.fate("here")) == (Fate.GRANTED, Fate.WAITING)


def test_a_lease_that_can_never_fit_is_rejected_and_forgotten() -> None:
    world = World([])
    assert world.ask_lease("train", 9_000).fate is Fate.REJECTED
    assert world.code("train") is RejectCode.TOO_LARGE and not world.scheduler.state.leases


def test_a_preemptible_lease_is_recalled_once_for_more_urgent_requests() -> None:
    world = World([model("a", 6_000)])
    world.ask_lease("train", 6_000, priority=2, preemptible=True)
    world.arrive("r1", "a", takes_s=0.0)
    world.arrive("r2", "a", takes_s=0.0)
    assert list(world.recalled) == ["train"]
    world.run()
    assert world.fate("r2") is Fate.SERVED and world.fate("train") is Fate.SERVED


def test_a_recall_names_the_time_by_which_to_leave_and_keeps_the_place_of_the_asker() -> None:
    world = World([model("a", 6_000), model("b", 6_000)], plays=False)
    world.ask_lease("train", 6_000, priority=2, preemptible=True)
    world.arrive("first", "a")
    world.arrive("second", "b")
    assert world.recalled == {"train": 30.0}
    world.end_lease("train")
    assert world.kinds() == ["load a"]


def test_memory_of_a_recalled_lease_beyond_need_goes_to_waiters_at_once() -> None:
    world = World([model("a", 2_000)], plays=False)
    world.ask_lease("train", 8_000, preemptible=True)
    world.ask_lease("small", 1_000)
    world.arrive("urgent", "a", priority=0)
    assert len(world.scheduler.state.ledger.promises) == 2
    world.end_lease("train")
    assert world.fate("small") is Fate.GRANTED and world.kinds() == ["load a"]


def test_leases_are_not_recalled_for_equals_nor_if_they_did_not_offer_it() -> None:
    for priority, preemptible in [(1, True), (2, False)]:
        world = World([model("a", 6_000)])
        world.ask_lease("train", 6_000, priority=priority, preemptible=preemptible)
        world.arrive("r", "a")
        assert not world.recalled and world.fate("r") is Fate.WAITING


def test_a_lease_that_no_longer_waits_gives_back_what_it_was_promised() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "a")
    world.ask_lease("train", 6_000)
    assert world.scheduler.state.ledger.promises
    world.end_lease("train")
    assert not world.scheduler.state.ledger.promises
    ready(world, "b")


def test_a_shutdown_rejects_leases_that_wait_and_leaves_those_that_hold() -> None:
    world = World([model("a", 5_000)])
    ready(world, "a")
    world.ask_lease("holds", 3_000)
    world.ask_lease("waits", 5_000)
    world.shut_down(0.0)
    assert world.code("waits") is RejectCode.SHUTTING_DOWN
    assert world.code(world.ask_lease("late", 1).id) is RejectCode.SHUTTING_DOWN
    world.run()
    assert [slot.lease for slot in world.scheduler.state.slots.values()] == ["holds"]
    world.end_lease("holds")
    assert not world.scheduler.state.slots


def test_ids_are_one_space_and_what_is_known_is_ignored_and_counted() -> None:
    world = World([model("a")])
    world.ask_lease("x", 1_000)
    world.post(ev.LeaseAsked(0.0, LeaseId("x"), Need(1_000)))
    world.post(ev.RequestArrived(0.0, RequestId("x"), (world.specs[next(iter(world.specs))].id,)))
    world.post(ev.LeaseGone(0.0, LeaseId("nobody")))
    assert world.scheduler.state.counters.ignored == 3


def test_the_end_of_a_request_does_not_end_a_lease_of_that_id() -> None:
    world = World([model("a", 6_000)])
    world.ask_lease("holds", 3_000)
    world.ask_lease("waits", 6_000)
    for name in ("holds", "waits"):
        world.post(ev.ServeDone(0.0, RequestId(name)))
        world.post(ev.RequestGone(0.0, RequestId(name)))
    assert world.scheduler.state.counters.ignored == 4
    assert (world.fate("holds"), world.fate("waits")) == (Fate.GRANTED, Fate.WAITING)
    world.post(ev.SlotsLost(0.0, tuple(world.scheduler.state.slots)))
    assert world.scheduler.state.counters.ignored == 5


def test_a_lease_cannot_be_asked_for_as_if_it_were_a_model() -> None:
    world = World([])
    world.ask_lease("x", 1_000)
    world.arrive("r", lease_name(LeaseId("x")))
    world.ask("o", MoveKind.UNLOAD, lease_name(LeaseId("x")))
    world.ask("p", MoveKind.LOAD, lease_name(LeaseId("x")))
    assert world.code("r") is RejectCode.UNKNOWN_MODEL
    assert {outcome.value for outcome in world.ops.values() if outcome} == {"unknown_model"}


def test_waits_of_leases_do_not_count_as_waits_of_callers() -> None:
    world = World([model("a", 6_000)])
    ready(world, "a")
    average = world.scheduler.state.avg_wait_s
    world.ask_lease("train", 6_000)
    world.run()
    assert world.scheduler.state.avg_wait_s == average and world.scheduler.state.waitlist.depth == 0
