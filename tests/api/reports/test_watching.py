from __future__ import annotations

import dataclasses

import pytest

import greenroom
from greenroom.api.reports.snapshot import WAITING_SHOWN_MAX
from greenroom.api.views import RequestView
from greenroom.core.model import LeaseId, ModelId, ModelSpec, Move, MoveId, MoveKind, RequestId, Slot, SlotId, Tier
from greenroom.core.queue.waitlist import WaiterKind
from greenroom.errors import LeaseDenied, LoadFailed
from greenroom.http import edge
from greenroom.telemetry.activity import Record
from greenroom.telemetry.logs import lost_lines
from tests.api.management_rig import GPU, NOW, Client, FakeGateway, FakeStore, model

A = ModelId("a")


def _fail(gateway: FakeGateway, name: str) -> None:
    record = gateway.state.models[ModelId(name)]
    record.failures, record.retry_at = 1, NOW + 5


# --- health ---------------------------------------------------------------------------------------------------------


async def test_health_is_ok_while_something_can_be_served() -> None:
    gateway = FakeGateway({"a": model(), "b": model()})
    client = Client(gateway)
    gateway.add_slot("a", Tier.READY)
    _fail(gateway, "b")
    gateway.add_waiter("a", 1)
    gateway.now += 12.34
    answer = await client.get("/health")
    assert answer.status == 200
    assert answer.json == {
        "status": "healthy",
        "leaseStore": None,
        "keyFile": None,
        "uptime": 12,
        "modelsLoaded": 1,
        "queueDepth": 1,
    }


async def test_health_is_ok_without_any_models() -> None:
    assert (await Client(FakeGateway()).get("/health")).status == 200


async def test_health_says_that_the_gateway_drains() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.is_draining = True
    answer = await Client(gateway).get("/health")
    assert (answer.status, answer.json["status"]) == (503, "draining")


async def test_health_says_that_every_model_fails_until_one_may_be_tried_again() -> None:
    gateway = FakeGateway({"a": model(), "b": model()})
    _fail(gateway, "a")
    _fail(gateway, "b")
    client = Client(gateway)
    answer = await client.get("/health")
    assert (answer.status, answer.json["status"]) == (503, "failed")
    gateway.now += 5
    assert (await client.get("/health")).status == 200


async def test_health_says_for_a_minute_that_the_scheduler_failed() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.add_slot("a", Tier.READY)
    gateway.loop.failed_at = NOW
    client = Client(gateway)
    gateway.now = NOW + 59
    answer = await client.get("/health")
    assert (answer.status, answer.json["status"]) == (503, "failed")
    gateway.now = NOW + 60
    assert (await client.get("/health")).status == 200


async def test_health_says_that_the_queue_is_full() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.state.limits = dataclasses.replace(gateway.state.limits, queue_depth_max=2)
    client = Client(gateway)
    gateway.add_waiter("a", 1)
    assert (await client.get("/health")).status == 200
    gateway.add_waiter("a", 2)
    answer = await client.get("/health")
    assert (answer.status, answer.json["status"], answer.json["queueDepth"]) == (503, "saturated", 2)


async def test_a_shared_store_that_is_down_is_told_and_matters_where_nothing_is_loaded() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.sharing = FakeStore(since=NOW - 3)
    client = Client(gateway)
    assert (await client.get("/health")).json["leaseStore"] == "up"
    assert "greenroom_lease_store_up 1.0" in (await client.get("/metrics")).body.decode()
    gateway.sharing.failure, gateway.sharing.slots_without_lease = "it cannot be reached", 2
    health = await client.get("/health")
    assert (health.status, health.json["status"], health.json["leaseStore"]) == (503, "failed", "down")
    gateway.add_slot("a", Tier.READY)
    health = await client.get("/health")
    assert (health.status, health.json["status"], health.json["leaseStore"]) == (200, "healthy", "down")
    assert (await client.get("/api/v1/status")).json["lease_store"] == {
        "up": False,
        "since_s": 3.0,
        "why": "it cannot be reached",
        "grace_left_s": 0.0,
        "slots_without_lease": 2,
    }
    text = (await client.get("/metrics")).body.decode()
    assert "greenroom_lease_store_up 0.0" in text and "greenroom_slots_without_lease 2.0" in text


async def test_without_a_shared_store_nothing_is_told_of_one() -> None:
    client = Client(FakeGateway())
    assert (await client.get("/api/v1/status")).json["lease_store"] is None
    assert "\ngreenroom_lease_store_up " not in (await client.get("/metrics")).body.decode()


# --- metrics --------------------------------------------------------------------------------------------------------


async def test_metrics_tell_counts_and_the_moment() -> None:
    gateway = FakeGateway({"a": model(), "b": model()})
    gateway.add_slot("a", Tier.READY, in_flight={RequestId("r-9"): None})
    gateway.add_slot("a", Tier.READY, slot_id="second")
    gateway.add_waiter("b", 1)
    gateway.add_waiter("b", 2, kind=WaiterKind.PRELOAD)
    gateway.state.ledger.set_foreign({GPU: 192})
    gateway.metrics.looked_up("a", hit=True)
    with gateway.hub.subscribe():
        answer = await Client(gateway).get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.body.decode().splitlines()
    for line in (
        'greenroom_model_lookups_total{model="a",result="hit"} 1.0',
        'greenroom_queue_depth{model="a"} 0.0',
        'greenroom_queue_depth{model="b"} 1.0',
        'greenroom_in_flight{model="a"} 1.0',
        'greenroom_in_flight{model="b"} 0.0',
        'greenroom_slots{model="a",tier="ready"} 2.0',
        'greenroom_model_memory_mib{device="gpu0",model="a"} 200.0',
        'greenroom_device_capacity_mib{device="gpu0"} 8192.0',
        f'greenroom_device_free_mib{{device="gpu0"}} {8192.0 - 512 - 200 - 192}',
        'greenroom_device_foreign_mib{device="gpu0"} 192.0',
        "greenroom_connections 3.0",
        "greenroom_event_listeners 1.0",
        "# TYPE greenroom_log_lines_lost_total counter",
        f"greenroom_log_lines_lost_total {float(lost_lines())}",
        "greenroom_uptime_seconds 0.0",
    ):
        assert _same_series(line) in {_same_series(other) for other in lines}, line


async def test_a_lease_is_counted_and_is_no_model() -> None:
    gateway = FakeGateway({"a": model()})
    assert (await Client(gateway).post("/api/v1/leases", {"mib": 300, "id": "x"})).status == 201
    waits, slots = dataclasses.replace(gateway.leasing.held["x"], id="y", state="waiting"), gateway.leasing.held["x"]
    gateway.leasing.held |= {"y": waits, "z": dataclasses.replace(slots, id="z", kind="slot")}
    gateway.leasing.error = LeaseDenied("no")
    assert (await Client(gateway).post("/api/v1/leases", {"mib": 300})).status == 503
    slot = Slot(SlotId("s1"), ModelSpec(ModelId(" lease:x")), {GPU: 300}, tier=Tier.READY, lease=LeaseId("x"))
    gateway.state.add_slot(slot)
    gateway.state.ledger.hold(slot.id, slot.claim)
    slot.in_flight[RequestId("x")] = None
    text = (await Client(gateway).get("/metrics")).body.decode()
    assert "\ngreenroom_leases 1.0\n" in text and "\ngreenroom_leases_waiting 1.0\n" in text
    assert '\ngreenroom_lease_asks_total{outcome="granted"} 1.0\n' in text
    assert '\ngreenroom_lease_asks_total{outcome="denied"} 1.0\n' in text
    assert '\ngreenroom_lease_memory_mib{device="gpu0"} 300.0\n' in text
    assert "lease:x" not in text


@pytest.mark.parametrize("is_admin", [True, False])
async def test_metrics_name_tenants_to_admins_only(is_admin: bool) -> None:
    gateway = FakeGateway({"a": model()})
    for tenant in ("lab", "office"):
        gateway.metrics.tokens("a", tenant, prompt=3, completion=2, cached=0)
    text = (await Client(gateway, is_admin=is_admin).get("/metrics")).body.decode()
    assert ("lab" in text, "office" in text) == (is_admin, is_admin)
    total = 'greenroom_tokens_total{kind="prompt",model="a",tenant="all"} 6.0'
    assert (_same_series(total) in {_same_series(line) for line in text.splitlines()}) is not is_admin


def _same_series(line: str) -> tuple[str, frozenset[str], str]:
    """A series whatever the order of its labels."""
    name, _, value = line.rpartition(" ")
    name, _, labels = name.rstrip("}").partition("{")
    return name, frozenset(labels.split(",")), value


# --- status ---------------------------------------------------------------------------------------------------------


async def test_status_of_an_empty_gateway() -> None:
    status = (await Client(FakeGateway()).get("/api/v1/status")).json
    assert status["version"] == greenroom.__version__
    assert status["build"] == ("pure" if edge.__file__.endswith(".py") else "compiled")
    assert status["started"] == "2023-11-14T22:13:20+00:00"
    assert status["addresses"] == ["127.0.0.1:8210"]
    assert status["queue"] == {"depth": 0, "max": 1000, "avg_wait_ms": None}
    assert status["models"] == status["other_slots"] == status["waiting"] == []
    assert status["connections"]["open"] == 3
    assert status["connections"]["stats"]["accepted"] == 7
    assert status["counters"]["grants"] == 0
    assert status["draining"] is False


async def test_status_of_a_model_that_is_ready() -> None:
    gateway = FakeGateway({"a": model(pinned=True, priority="high", ttl_s=60)})
    gateway.add_slot("a", Tier.READY, pid=42, in_flight={RequestId("r-1"): None}, last_used=NOW - 7.5, concurrency=4)
    gateway.add_waiter("a", 1)
    gateway.add_waiter("a", 2, kind=WaiterKind.OP)
    status = (await Client(gateway).get("/api/v1/status")).json
    (shown,) = status["models"]
    (slot,) = shown.pop("slots")
    assert shown == {
        "id": "a",
        "tier": "ready",
        "status": "loaded",
        "engine": "command",
        "capabilities": None,
        "quantization": None,
        "revision": 1,
        "pinned": True,
        "priority": 0,
        "ttl_s": 60.0,
        "in_flight": 1,
        "waiting": 1,
        "concurrency": 4,
        "last_used_s_ago": 7.5,
        "memory": {"gpu0": 100},
        "need": {
            "gpu_mib": 100,
            "host_mib": 0,
            "source": "declared",
            "measured_gpu_mib": None,
            "measured_host_mib": None,
            "estimated_gpu_mib": None,
            "estimated_host_mib": None,
            "estimate_error": None,
        },
        "unload_in_s": None,
        "moving": None,
        "failures": 0,
        "retry_in_s": None,
        "last_error": None,
        "missing": None,
        "cache": None,
        "no_sleep": None,
        "versioned": False,
        "pid": 42,
    }
    assert slot["id"] == "s-a"
    assert slot["pid"] == 42
    assert slot["memory"] == {"gpu0": 100}
    assert status["devices"] == [
        {
            "id": "gpu0",
            "kind": "gpu",
            "capacity_mib": 8192,
            "margin_mib": 512,
            "used_mib": 100,
            "free_mib": 7580,
            "foreign_mib": 0,
        }
    ]


async def test_status_of_a_model_that_moves() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.add_slot("a", Tier.COLD, move=Move(MoveId("m"), MoveKind.LOAD, SlotId("s-a"), A, 1, {}, NOW - 2))
    gateway.state.models[A].learned_s[MoveKind.LOAD] = 1.5
    (shown,) = (await Client(gateway).get("/api/v1/status")).json["models"]
    assert shown["moving"] == shown["slots"][0]["moving"] == {"kind": "load", "since_s": 2.0, "eta_s": 0.0}
    assert shown["last_used_s_ago"] is None
    assert shown["pid"] is None


async def test_status_of_a_model_that_waits_for_memory() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.add_slot("a", Tier.COLD, planned=MoveKind.LOAD)
    (shown,) = (await Client(gateway).get("/api/v1/status")).json["models"]
    assert shown["moving"] == {"kind": "load", "since_s": None, "eta_s": None}


async def test_status_of_a_model_that_fails() -> None:
    gateway = FakeGateway({"a": model()})
    _fail(gateway, "a")
    gateway.mover.failures[A] = LoadFailed("a could not be loaded.")
    (shown,) = (await Client(gateway).get("/api/v1/status")).json["models"]
    assert shown["status"] == "failed"
    assert shown["failures"] == 1
    assert shown["retry_in_s"] == 5.0
    assert shown["last_error"] == {"code": "model_load_failed", "message": "a could not be loaded."}


async def test_status_shows_what_a_removed_model_still_holds() -> None:
    gateway = FakeGateway()
    slot = Slot(SlotId("s1"), ModelSpec(ModelId("gone")), {GPU: 300}, tier=Tier.READY, leaving_to=Tier.COLD)
    gateway.state.add_slot(slot)
    gateway.state.ledger.hold(slot.id, slot.claim)
    status = (await Client(gateway).get("/api/v1/status")).json
    (shown,) = status["other_slots"]
    assert (shown["model"], shown["leaving_to"], shown["memory"]) == ("gone", "cold", {"gpu0": 300})
    assert status["devices"][0]["used_mib"] == 300


async def test_status_lists_the_first_waiting_requests_and_counts_all() -> None:
    gateway = FakeGateway({"a": model()})
    gateway.state.avg_wait_s = 0.25
    for number in range(WAITING_SHOWN_MAX + 50):
        gateway.add_waiter("a", number, arrived=NOW - 3)
    status = (await Client(gateway).get("/api/v1/status")).json
    assert status["queue"] == {"depth": WAITING_SHOWN_MAX + 50, "max": 1000, "avg_wait_ms": 250.0}
    assert len(status["waiting"]) == WAITING_SHOWN_MAX
    assert status["waiting"][1] == {"id": "r-1", "position": 2, "model": "a", "tenant": "lab", "waited_s": 3.0}


# --- requests and decisions -----------------------------------------------------------------------------------------


def _record(number: int, name: str = "a") -> Record:
    return Record(id=f"r-{number}", model=name, asked_as="first", tenant="lab", route="chat", arrived_at=1.5)


async def test_a_request_is_found_by_its_id_while_it_runs_and_after() -> None:
    gateway = FakeGateway()
    record = _record(1)
    gateway.activity.begin(record)
    client = Client(gateway)
    assert (await client.get("/api/v1/requests/r-1")).json["state"] == "waiting"
    gateway.activity.end(record)
    shown = (await client.get("/api/v1/requests/r-1")).json
    assert shown == record.as_dict()
    assert shown["state"] == "done"


def test_every_fact_of_a_request_is_published() -> None:
    assert set(RequestView.model_fields) == set(_record(1).as_dict())


async def test_an_unknown_request_is_not_found() -> None:
    answer = await Client(FakeGateway()).get("/api/v1/requests/r-none")
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert "r-none" in answer.error["message"]


async def test_recent_requests_are_listed_newest_first() -> None:
    gateway = FakeGateway({"a": model(aliases=("first",))})
    for number, name in enumerate(["a", "b", "a", "a"]):
        gateway.activity.begin(_record(number, name))
    client = Client(gateway)

    async def ids(query: str) -> list[str]:
        return [shown["id"] for shown in (await client.get(f"/api/v1/requests{query}")).json["requests"]]

    assert await ids("") == ["r-3", "r-2", "r-1", "r-0"]
    assert await ids("?limit=2") == ["r-3", "r-2"]
    assert await ids("?model=a&limit=2") == ["r-3", "r-2"]
    assert await ids("?model=first") == ["r-3", "r-2", "r-0"]
    assert await ids("?model=nobody") == []


async def test_decisions_are_listed_newest_last_and_may_be_narrowed() -> None:
    gateway = FakeGateway({"a": model(aliases=("first",)), "b": model()})
    told = [
        {"seq": 1, "at": 10.0, "what": "load", "model": "a", "why": "asked"},
        {"seq": 2, "at": 11.0, "what": "unload", "model": "b", "for_model": "a", "why": "evicted"},
        {"seq": 3, "at": 12.0, "what": "abort", "move": "m-9", "why": "shutdown"},
        {"seq": 4, "at": 13.0, "what": "load", "model": "b", "why": "asked", "device": None},
    ]
    gateway.observer.decisions.extend(told)
    client = Client(gateway)

    async def listed(query: str) -> list[int]:
        return [decision["seq"] for decision in (await client.get(f"/api/v1/decisions{query}")).json["decisions"]]

    assert (await client.get("/api/v1/decisions")).json["decisions"] == told
    assert await listed("?limit=2") == [3, 4]
    assert await listed("?since=2") == [3, 4]
    assert await listed("?since=1&limit=1") == [4]
    # Of a model: what happened to it, and what happened for its sake.
    assert await listed("?model=a") == await listed("?model=first") == [1, 2]
    assert await listed("?model=b&since=2") == [4]
    assert await listed("?what=load") == [1, 4]
    assert await listed("?model=a&what=unload&limit=1") == [2]
    assert await listed("?model=nobody") == []
    assert (await client.get("/api/v1/decisions?since=-1")).error["param"] == "since"


@pytest.mark.parametrize("word", ["evict", "Load", "", "leaving"])
async def test_a_kind_of_decision_that_there_is_not_is_refused(word: str) -> None:
    answer = await Client(FakeGateway()).get(f"/api/v1/decisions?what={word}")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", "what")
    assert all(f"'{kind}'" in answer.error["message"] for kind in ("load", "unload", "reject", "cut", "recall"))


async def test_every_kind_of_decision_can_be_asked_for() -> None:
    """Whatever the observer keeps; the API's description lists the same words."""
    client = Client(FakeGateway())
    for kind in (*(kind.value for kind in MoveKind), "abort", "reject", "cut", "recall"):
        assert (await client.get(f"/api/v1/decisions?what={kind}")).status == 200
    described = (await client.get("/api/v1/openapi.json")).json["paths"]["/api/v1/decisions"]["get"]["parameters"]
    (what,) = (one for one in described if one["name"] == "what")
    assert {"load", "abort"} <= set(what["schema"]["anyOf"][0]["enum"])


@pytest.mark.parametrize("path", ["requests", "decisions"])
@pytest.mark.parametrize("limit", ["0", "-1", "x", "1e9", "999999999999999999999", "", "1.5"])
async def test_a_limit_out_of_bounds_is_refused(path: str, limit: str) -> None:
    answer = await Client(FakeGateway()).get(f"/api/v1/{path}?limit={limit}")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", "limit")
