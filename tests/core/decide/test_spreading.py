"""Several GPUs: where a model comes if more than one of them has room."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, LeaseId, ModelSpec, MoveKind, Need, OtherLease
from tests.core.queue.test_order import ready
from tests.core.world import Fate, World, gpu, host, model

GPU0, GPU1 = DeviceId("gpu0"), DeviceId("gpu1")
TWO_GPUS = (gpu(0, 8_000), gpu(1, 8_000), host(64_000))


def on(world: World, name: str) -> DeviceId:
    (device,) = (one for one in world.scheduler.state.slots[world.slot_of(name)].claim if one.startswith("gpu"))
    return device


def pool(world: World, names: Iterable[str]) -> list[DeviceId]:
    return [on(world, name) for name in names]


@pytest.mark.parametrize("swapper", ["memory", "coordinator"])
def test_models_that_fit_on_one_gpu_are_spread_over_all(swapper: str) -> None:
    world = World([model(name, 2_000) for name in "abcd"], TWO_GPUS, Limits(swapper=swapper))
    ready(world, *"abcd")
    assert pool(world, "abcd") == [GPU0, GPU1, GPU0, GPU1]


def test_models_that_are_asked_for_at_once_are_spread_too() -> None:
    world = World([model(name, 2_000) for name in "abcd"], TWO_GPUS)
    for name in "abcd":
        world.arrive(f"r {name}", name, takes_s=60.0)
    world.run(30.0)
    assert pool(world, "abcd") == [GPU0, GPU1, GPU0, GPU1]


def test_a_model_comes_where_none_is_busy_however_many_idle_ones_are_there() -> None:
    world = World([model(name, 2_000, devices=(GPU0,)) for name in "ab"] + [model("c", 2_000), model("d")], TWO_GPUS)
    world.config(model("c", 2_000, devices=(GPU1,)))
    ready(world, *"abc")
    world.arrive("c busy", "c", takes_s=600.0)
    ready(world, "d")
    assert on(world, "d") == GPU0


def test_of_gpus_with_as_many_busy_models_the_one_with_fewer_requests_is_taken() -> None:
    world = World([model("a", 4_000), model("b", 2_000), model("c", 2_000)], TWO_GPUS)
    ready(world, "a", "b")
    for number in range(12):
        world.arrive(f"a {number}", "a", takes_s=600.0)
    world.arrive("b 0", "b", takes_s=600.0)
    ready(world, "c")
    assert pool(world, "abc") == [GPU0, GPU1, GPU1]


def test_a_lease_counts_as_a_busy_model() -> None:
    world = World([model("idle", 1_000, devices=(GPU1,)), model("a", 2_000)], TWO_GPUS)
    ready(world, "idle")
    world.ask_lease("train", 1_000, devices=(GPU0,))
    ready(world, "a")
    assert on(world, "a") == GPU1


def test_so_does_what_another_gateway_holds() -> None:
    world = World([model("idle", 1_000, devices=(GPU1,)), model("a", 2_000)], TWO_GPUS)
    ready(world, "idle")
    world.memory({}, leases=(OtherLease(LeaseId("l"), "finetune", {GPU0: 1_000}, priority=2, preemptible=True),))
    ready(world, "a")
    assert on(world, "a") == GPU1


def sleeper(name: str) -> ModelSpec:
    return model(name, 2_000, asleep=Need(0, 2_000))


def test_models_that_come_to_sleep_are_spread_since_they_wake_where_they_sleep() -> None:
    world = World([sleeper(name) for name in "abcd"], TWO_GPUS)
    for name in "abcd":
        world.ask(f"prepare {name}", MoveKind.PREPARE, name)
        world.run(30.0)
    assert pool(world, "abcd") == [GPU0, GPU1, GPU0, GPU1]


def test_a_model_that_leaves_no_longer_counts() -> None:
    world = World([model("a", 2_000), model("b", 2_000), model("c", 2_000)], TWO_GPUS)
    ready(world, "a", "b")
    world.arrive("a busy", "a", takes_s=600.0)
    world.ask("unload a", MoveKind.UNLOAD, "a")
    ready(world, "c")
    assert pool(world, "bc") == [GPU1, GPU0]


def test_of_gpus_that_are_equally_used_the_one_with_least_room_is_taken() -> None:
    world = World([model("small", 2_000), model("large", 8_000)], (gpu(0, 8_000), gpu(1, 4_000)))
    ready(world, "small", "large")
    assert pool(world, ["small", "large"]) == [GPU1, GPU0] and world.kinds() == ["load small", "load large"]


def test_no_model_has_to_leave_so_that_another_has_a_gpu_of_its_own() -> None:
    world = World([model("a", 2_000, devices=(GPU0,)), model("b", 8_000), model("c", 2_000)], TWO_GPUS)
    ready(world, "a", "b")
    world.arrive("a busy", "a", takes_s=600.0)
    ready(world, "c")
    assert on(world, "c") == GPU0 and "unload b" not in world.kinds()


def test_what_is_on_a_gpu_that_has_disappeared_counts_nowhere() -> None:
    world = World([model("a", 2_000, devices=(DeviceId("gpu2"),)), model("b", 2_000)], (*TWO_GPUS, gpu(2, 8_000)))
    ready(world, "a")
    world.arrive("a busy", "a", takes_s=600.0)
    world.config(devices=TWO_GPUS)
    world.memory({}, leases=(OtherLease(LeaseId("l"), "far", {DeviceId("gpu9"): 1_000}, priority=2, preemptible=True),))
    ready(world, "b")
    assert on(world, "b") == GPU0


@pytest.mark.parametrize(("policy", "fate"), [("default", Fate.SERVED), ("fifo", Fate.WAITING)])
def test_a_large_model_waits_for_busy_small_ones_that_are_spread_as_long_as_for_any_others(
    policy: str, fate: Fate
) -> None:
    """The price of spreading: together on one GPU, the small ones would leave the other one to it."""
    world = World([model("a", 2_000), model("b", 2_000), model("large", 7_000)], TWO_GPUS, Limits(policy=policy))
    for name in "ab":
        world.keep_busy(name, 20.0, for_s=1_500.0)
    large = world.arrive("r", "large", takes_s=1.0)
    world.run(1_500.0)
    assert large.fate is fate
    if fate is Fate.SERVED:
        assert 240.0 < large.granted_at < 400.0
