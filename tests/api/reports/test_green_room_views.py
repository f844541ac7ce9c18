"""The green room in `/api/v1/status` and in metrics: its size, what is used of it, and which models are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from greenroom.core.events import ConfigChanged
from greenroom.core.model import Device, DeviceId, DeviceKind, Move, MoveId, MoveKind, Tier
from tests.api.management_rig import GPU, NOW, Client, FakeGateway, model

HOST = DeviceId("host")


def gateway(size_mib: int | None = None) -> FakeGateway:
    made = FakeGateway({"a": model(), "b": model(), "c": model()})
    devices = (Device(GPU, DeviceKind.GPU, 8192, 512), Device(HOST, DeviceKind.HOST, 10_000, 1_000))
    limits = replace(made.state.limits, green_room_mib=size_mib)
    made.loop.scheduler.handle(ConfigChanged(NOW, devices=devices, limits=limits))
    return made


def holds(made: FakeGateway, name: str, tier: Tier, gpu_mib: int, host_mib: int, **facts: Any) -> None:
    slot = made.add_slot(name, tier, **facts)
    made.state.ledger.hold(slot.id, {GPU: gpu_mib, HOST: host_mib})


async def green_room(made: FakeGateway) -> dict[str, Any]:
    shown: dict[str, Any] = (await Client(made).get("/api/v1/status")).json["green_room"]
    return shown


async def test_only_sleeping_models_are_in_the_green_room() -> None:
    made = gateway()
    holds(made, "a", Tier.READY, 3_000, 2_500)
    holds(made, "b", Tier.ASLEEP, 0, 1_500)
    assert await green_room(made) == {"size_mib": None, "used_mib": 1_500, "free_mib": 5_000, "models": ["b"]}


async def test_its_bound_is_its_size_and_what_is_left_of_it_is_free() -> None:
    made = gateway(size_mib=4_000)
    holds(made, "b", Tier.ASLEEP, 0, 1_500)
    assert await green_room(made) == {"size_mib": 4_000, "used_mib": 1_500, "free_mib": 2_500, "models": ["b"]}


async def test_a_model_that_is_being_prepared_counts_but_is_not_listed_yet() -> None:
    made = gateway()
    holds(made, "a", Tier.COLD, 0, 2_000)
    (slot,) = made.state.slots.values()
    slot.move = Move(MoveId("m-1"), MoveKind.PREPARE, slot.id, slot.model, 1, {HOST: 2_000}, NOW)
    shown = await green_room(made)
    assert (shown["used_mib"], shown["models"]) == (2_000, [])


async def test_a_gateway_that_plans_with_no_host_memory_cannot_say_what_is_free() -> None:
    assert await green_room(FakeGateway()) == {"size_mib": None, "used_mib": 0, "free_mib": None, "models": []}


async def test_metrics_show_size_and_use() -> None:
    made = gateway(size_mib=4_000)
    holds(made, "b", Tier.ASLEEP, 0, 1_500)
    shown = (await Client(made).get("/metrics")).body
    assert b"greenroom_green_room_size_mib 4000.0" in shown
    assert b"greenroom_green_room_used_mib 1500.0" in shown
    assert b'greenroom_slots{model="b",tier="asleep"} 1.0' in shown
