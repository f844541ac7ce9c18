"""What the management API says of GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from greenroom.core.events import ConfigChanged, MemoryChanged
from greenroom.core.model import Device, DeviceId, DeviceKind, LeaseId, Move, MoveId, MoveKind, SlotId, Tier
from greenroom.runtime.memory.readings import Attribution
from greenroom.runtime.memory.watch import MemoryLook
from tests.api.management_rig import GPU, NOW, Client, FakeGateway, FakeWatch, model
from tests.runtime.memory.readings import reading, used


@pytest.fixture
def gateway() -> FakeGateway:
    """One GPU: a model that was measured, a lease that was not, and two strangers."""
    gateway = FakeGateway({"llm": model()})
    gateway.add_slot("llm", Tier.READY)
    gateway.add_slot("llm", Tier.READY, slot_id="s-lease", lease=LeaseId("lease:trainer"))
    gateway.loop.scheduler.handle(MemoryChanged(NOW, {GPU: 705}, {SlotId("s-llm"): {GPU: 130}}))
    seen = used("gpu0", {11: 130, 12: 5, 13: 700}, total_mib=8192, name="H200", utilisation=37, temperature_c=61)
    shares = Attribution({GPU: 705}, {"s-llm": {GPU: 130}, "s-lease": {}}, {GPU: {12: 5, 13: 700}})
    gateway.memory_watch = FakeWatch(MemoryLook(NOW - 2.5, reading(seen), shares, {13: "blender"}), kind="nvml")
    return gateway


async def test_a_gpu_is_shown_with_its_figures_holders_and_strangers(gateway: FakeGateway) -> None:
    answer = await Client(gateway).get("/api/v1/gpus")
    assert answer.status == 200
    assert answer.json["gpus"] == [
        {
            "id": "gpu0",
            "index": 0,
            "name": "H200",
            "total_mib": 8192,
            "used_mib": 835,
            "foreign_mib": 705,
            "free_mib": 8192 - 512 - 705 - 130 - 100,
            "weights_mib": 0,
            "kv_mib": 0,
            "other_mib": 835,
            "utilisation": 37,
            "temperature_c": 61,
            "holders": [
                {"slot": "s-llm", "model": "llm", "lease": None, "claim_mib": 100, "seen_mib": 130},
                {"slot": "s-lease", "model": None, "lease": "trainer", "claim_mib": 100, "seen_mib": None},
            ],
            "strangers": [
                {"pid": 13, "name": "blender", "used_mib": 700},
                {"pid": 12, "name": None, "used_mib": 5},
            ],
        }
    ]
    assert answer.json["host"]["total_mib"] == 64_000


async def test_the_probe_says_what_it_is_and_what_it_cannot_see(gateway: FakeGateway) -> None:
    gateway.memory_watch.failure = "the driver is gone"
    gateway.memory_watch.sees_pids = False
    assert (await Client(gateway).get("/api/v1/status")).json["probe"] == {
        "kind": "nvml",
        "looked_s_ago": 2.5,
        "failure": "the driver is gone",
        "pids_visible": False,
    }


async def test_status_has_the_figures_of_gpus_alone(gateway: FakeGateway) -> None:
    (shown,) = (await Client(gateway).get("/api/v1/status")).json["gpus"]
    assert (shown["used_mib"], shown["temperature_c"]) == (835, 61)
    assert "strangers" not in shown


async def test_gpus_are_probed_on_request_but_not_again_while_the_reading_is_fresh(gateway: FakeGateway) -> None:
    await Client(gateway).get("/api/v1/gpus")
    assert gateway.memory_watch.looks == 1
    gateway.memory_watch.last = MemoryLook(NOW, gateway.memory_watch.last.reading)
    await Client(gateway).get("/api/v1/gpus")
    assert gateway.memory_watch.looks == 1


async def test_metrics_have_the_figures_and_leave_out_what_is_unknown(gateway: FakeGateway) -> None:
    text = (await Client(gateway).get("/metrics")).body.decode()
    assert 'greenroom_gpu_used_mib{device="gpu0"} 835.0' in text
    assert 'greenroom_gpu_total_mib{device="gpu0"} 8192.0' in text
    (shown,) = (await Client(gateway).get("/api/v1/gpus")).json["gpus"]
    for kind in ("weights", "kv", "other"):
        assert f'greenroom_gpu_split_mib{{device="gpu0",kind="{kind}"}} {float(shown[f"{kind}_mib"])}' in text
    assert 'greenroom_gpu_utilisation_percent{device="gpu0"} 37.0' in text
    assert 'greenroom_gpu_temperature_celsius{device="gpu0"} 61.0' in text
    gateway.memory_watch.last = MemoryLook(NOW, reading(used("gpu0", {})))
    text = (await Client(gateway).get("/metrics")).body.decode()
    assert 'greenroom_gpu_used_mib{device="gpu0"} 0.0' in text
    assert "greenroom_gpu_temperature_celsius{device" not in text


async def test_a_simulated_gpu_is_used_as_far_as_models_and_leases_hold_it() -> None:
    gateway = FakeGateway({"llm": model()})
    gateway.memory_watch = FakeWatch(kind="simulated")
    gateway.add_slot("llm", Tier.READY)
    gateway.add_slot("llm", Tier.READY, slot_id="s-lease", lease=LeaseId("lease:trainer"))
    client = Client(gateway)
    (shown,) = (await client.get("/api/v1/gpus")).json["gpus"]
    assert (shown["used_mib"], shown["other_mib"], shown["foreign_mib"]) == (200, 200, 0)
    assert (await client.get("/api/v1/status")).json["gpus"][0]["used_mib"] == 200
    assert b'greenroom_gpu_used_mib{device="gpu0"} 200.0' in (await client.get("/metrics")).body
    for _ in range(2):
        gateway.history.look()
        gateway.now += 10
    assert (await client.get("/api/v1/history")).json["used_mib"] == {"gpu0": [200.0]}


# --- the green room ---------------------------------------------------------------------------------------------------

HOST = DeviceId("host")


def green_room_gateway(size_mib: int | None = None) -> FakeGateway:
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
    made = green_room_gateway()
    holds(made, "a", Tier.READY, 3_000, 2_500)
    holds(made, "b", Tier.ASLEEP, 0, 1_500)
    assert await green_room(made) == {"size_mib": None, "used_mib": 1_500, "free_mib": 5_000, "models": ["b"]}


async def test_its_bound_is_its_size_and_what_is_left_of_it_is_free() -> None:
    made = green_room_gateway(size_mib=4_000)
    holds(made, "b", Tier.ASLEEP, 0, 1_500)
    assert await green_room(made) == {"size_mib": 4_000, "used_mib": 1_500, "free_mib": 2_500, "models": ["b"]}


async def test_a_model_that_is_being_prepared_counts_but_is_not_listed_yet() -> None:
    made = green_room_gateway()
    holds(made, "a", Tier.COLD, 0, 2_000)
    (slot,) = made.state.slots.values()
    slot.move = Move(MoveId("m-1"), MoveKind.PREPARE, slot.id, slot.model, 1, {HOST: 2_000}, NOW)
    shown = await green_room(made)
    assert (shown["used_mib"], shown["models"]) == (2_000, [])


async def test_a_gateway_that_plans_with_no_host_memory_cannot_say_what_is_free() -> None:
    assert await green_room(FakeGateway()) == {"size_mib": None, "used_mib": 0, "free_mib": None, "models": []}


async def test_metrics_show_size_and_use() -> None:
    made = green_room_gateway(size_mib=4_000)
    holds(made, "b", Tier.ASLEEP, 0, 1_500)
    shown = (await Client(made).get("/metrics")).body
    assert b"greenroom_green_room_size_mib 4000.0" in shown
    assert b"greenroom_green_room_used_mib 1500.0" in shown
    assert b'greenroom_slots{model="b",tier="asleep"} 1.0' in shown
