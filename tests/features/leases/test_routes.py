"""Leases over HTTP: how they are asked for, shown, renewed and given back."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from typing import Any

import pytest

from greenroom.access.keys import Caller
from greenroom.core.model import Tier
from greenroom.errors import LeaseDenied, LeaseTooLarge
from greenroom.leases.records import LeaseAsk, holder_of
from tests.api.management_rig import Call, Client, FakeGateway, model, scope
from tests.waiting import until

PATH = "/api/v1/leases"
HOLDER = {"host": "far", "pid": 7, "start_ticks": 5, "pid_ns": 9}


async def test_a_lease_is_asked_for_by_its_memory_alone_and_everything_else_has_a_default() -> None:
    gateway = FakeGateway()
    answer = await Client(gateway).post(PATH, {"mib": 4_000})
    assert answer.status == 201
    (asked,) = gateway.leasing.asked
    assert asked == LeaseAsk(id=asked.id, name="lease", mib=4_000)
    assert answer.json == {
        "id": asked.id,
        "name": "lease",
        "kind": "program",
        "state": "held",
        "token": 7,
        "claim": {"gpu0": 4_000},
        "cuda_visible_devices": "0",
        "priority": 1,
        "preemptible": False,
        "ttl_s": 30.0,
        "expires_in_s": 30.0,
        "recall_in_s": None,
        "overdue": False,
        "holder": None,
    }


async def test_everything_that_is_said_is_passed_on() -> None:
    gateway = FakeGateway()
    order = {
        "mib": 5,
        "gpus": 2,
        "name": "fine tune",
        "devices": ["gpu0", "GPU-a"],
        "priority": "low",
        "id": "my.run-1",
        "preemptible": True,
        "grace_s": 5,
        "ttl_s": 10,
        "wait_s": 60,
        "holder": HOLDER,
    }
    answer = await Client(gateway).post(PATH, order)
    assert (answer.status, answer.json["holder"]) == (201, HOLDER)
    (asked,) = gateway.leasing.asked
    assert (asked.id, asked.name, asked.gpus, asked.devices) == ("my.run-1", "fine tune", 2, ("gpu0", "GPU-a"))
    assert (asked.priority, asked.preemptible, asked.grace_s, asked.ttl_s, asked.wait_s) == (2, True, 5.0, 10.0, 60.0)


async def test_a_pid_is_that_of_a_process_on_this_machine() -> None:
    gateway = FakeGateway()
    client = Client(gateway)
    assert (await client.post(PATH, {"mib": 1, "pid": os.getpid()})).status == 201
    assert gateway.leasing.asked[-1].holder == holder_of(os.getpid())
    # No process has the largest number there can be while a test runs.
    answer = await client.post(PATH, {"mib": 1, "pid": 2**22})
    assert (answer.status, answer.error["param"]) == (400, "pid")


async def test_a_pid_from_elsewhere_is_not_taken_for_one_of_ours() -> None:
    gateway = FakeGateway()
    call = Call(json.dumps({"mib": 1, "pid": os.getpid()}).encode())
    asked = {**scope("POST", PATH, {"content_type": "application/json"}), "client": ("192.0.2.7", 0)}
    await Client(gateway).app(asked, call.receive, call.send)
    assert (call.answer.status, call.answer.error["param"]) == (400, "pid")


async def test_a_lease_is_not_more_urgent_than_its_key_may_be() -> None:
    gateway = FakeGateway()
    asked = scope("POST", PATH, {"content_type": "application/json"})
    asked["state"]["caller"] = Caller(name="nightly", tenant=None, priority_max=1, admin=True)
    for priority in ("high", "low"):
        call = Call(json.dumps({"mib": 1, "priority": priority}).encode())
        await Client(gateway).app(asked, call.receive, call.send)
        assert call.answer.status == 201
    assert [ask.priority for ask in gateway.leasing.asked] == [1, 2]


@pytest.mark.parametrize(
    ("order", "param"),
    [
        ({}, "mib"),
        ({"mib": 0}, "mib"),
        ({"mib": True}, "mib"),
        ({"mib": 1, "gpus": 0}, "gpus"),
        ({"mib": 1, "wait_s": -1}, "wait_s"),
        ({"mib": 1, "ttl_s": 0.5}, "ttl_s"),
        ({"mib": 1, "ttl_s": 1e9}, "ttl_s"),
        ({"mib": 1, "id": "a/b"}, "id"),
        ({"mib": 1, "id": ""}, "id"),
        ({"mib": 1, "name": "a\nb"}, "name"),
        ({"mib": 1, "priority": "urgent"}, "priority"),
        ({"mib": 1, "priority": True}, "priority"),
        ({"mib": 1, "surprise": 1}, "surprise"),
        ({"mib": 1, "holder": {"pid": 1}}, "holder.host"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(order: dict[str, Any], param: str) -> None:
    gateway = FakeGateway()
    answer = await Client(gateway).post(PATH, order)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert gateway.leasing.asked == []


async def test_a_denial_has_its_numbers_and_says_when_to_ask_again() -> None:
    gateway = FakeGateway()
    gateway.leasing.error = LeaseDenied("No.", retry_after_s=4.2, beside={"needed_mib": 9, "free_mib": {"gpu0": 3}})
    answer = await Client(gateway).post(PATH, {"mib": 9})
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert (answer.error["code"], answer.error["needed_mib"]) == ("lease_denied", 9)
    assert answer.error["free_mib"] == {"gpu0": 3} and "x-should-retry" not in answer.headers
    gateway.leasing.error = LeaseTooLarge("Never.")
    answer = await Client(gateway).post(PATH, {"mib": 9})
    assert (answer.status, answer.error["code"], answer.headers["x-should-retry"]) == (503, "lease_denied", "false")


async def test_a_client_that_disconnects_while_it_waits_gives_up_its_lease() -> None:
    gateway = FakeGateway()
    gateway.leasing.may_answer = asyncio.Event()
    await _asked_and_left(gateway)
    await until(lambda: gateway.leasing.given_up == 1)
    assert gateway.leasing.held == {}
    assert b'greenroom_lease_asks_total{outcome="given_up"} 1.0' in (await Client(gateway).get("/metrics")).body


async def test_a_lease_granted_to_a_disconnected_client_is_released() -> None:
    gateway = FakeGateway()
    gateway.leasing.may_answer = may_answer = asyncio.Event()
    await _asked_and_left(gateway, may_answer.set)
    await until(lambda: gateway.leasing.held == {})


async def _asked_and_left(gateway: FakeGateway, meanwhile: Any = lambda: None) -> None:
    """Ask, wait until that is known, and leave; in the same turn of the loop something else happens."""
    call = Call(json.dumps({"mib": 1, "wait_s": 60}).encode())
    headers = {"content_type": "application/json"}
    asking = asyncio.ensure_future(Client(gateway).app(scope("POST", PATH, headers), call.receive, call.send))
    await until(lambda: bool(gateway.leasing.asked))
    meanwhile()
    call.left.set()
    async with asyncio.timeout(20):
        await asking


async def test_the_list_has_programs_and_models() -> None:
    gateway = FakeGateway({"a": model(pinned=True)})
    gateway.add_slot("a", Tier.READY)
    client = Client(gateway)
    await client.post(PATH, {"mib": 1, "id": "x", "name": "train"})
    answer = await client.get(PATH)
    shown = [(one["id"], one["name"], one["kind"], one["claim"]) for one in answer.json["leases"]]
    assert shown == [("x", "train", "program", {"gpu0": 1}), ("s-a", "a", "slot", {"gpu0": 100})]


async def test_one_lease_is_shown_renewed_and_given_back() -> None:
    gateway = FakeGateway()
    client = Client(gateway)
    await client.post(PATH, {"mib": 1, "id": "x"})
    gateway.leasing.held["x"] = replace(gateway.leasing.held["x"], recall_in_s=-1.25)
    shown = (await client.get(f"{PATH}/x")).json
    assert (shown["recall_in_s"], shown["overdue"]) == (-1.25, True)
    assert (await client.post(f"{PATH}/x/renew", {"token": 7})).json == shown
    assert (await client.ask("DELETE", f"{PATH}/x?token=6")).status == 204 and "x" in gateway.leasing.held
    for _ in range(2):
        answer = await client.ask("DELETE", f"{PATH}/x?token=7")
        assert (answer.status, answer.body) == (204, b"")
    assert gateway.leasing.held == {}


async def test_a_lease_that_is_not_there_or_not_ones_own_is_said_so() -> None:
    gateway = FakeGateway()
    client = Client(gateway)
    answer = await client.get(f"{PATH}/x")
    assert (answer.status, answer.error["code"]) == (404, "lease_unknown")
    await client.post(PATH, {"mib": 1, "id": "x"})
    answer = await client.post(f"{PATH}/x/renew", {"token": 6})
    assert (answer.status, answer.error["code"]) == (409, "lease_lost")
    assert (await client.post(f"{PATH}/x/renew")).status == 400
    assert (await client.get(f"{PATH}/a%0Ab")).status == 404
