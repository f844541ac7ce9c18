from __future__ import annotations

from typing import Any

import pytest

from greenroom.config.diff import Changes
from greenroom.core.model import ModelId, MoveKind, Tier
from greenroom.errors import ConfigError, LoadFailed, Unsupported
from tests.api.management_rig import Client, FakeGateway, model

ORG = ModelId("org/name")


def _gateway() -> FakeGateway:
    return FakeGateway({"a": model(aliases=("first",)), "a/b": model(), "org/name": model(), "org/name:q4": model()})


# --- load and unload ------------------------------------------------------------------------------------------------


async def test_load_answers_when_the_model_is_ready() -> None:
    gateway = _gateway()

    def done() -> None:
        gateway.add_slot("a", Tier.READY)
        gateway.now += 1.25

    gateway.operations.then = done
    answer = await Client(gateway).post("/api/v1/models/a/load")
    assert answer.status == 200
    assert answer.json == {"model": "a", "tier": "ready", "took_s": 1.25, "memory": {"gpu0": 100}}
    assert gateway.operations.asked == [(MoveKind.LOAD, "a", (), None)]


async def test_unload_answers_when_the_model_is_gone() -> None:
    gateway = _gateway()
    slot = gateway.add_slot("a", Tier.READY)
    gateway.operations.then = lambda: gateway.state.drop_slot(slot)
    answer = await Client(gateway).post("/api/v1/models/a/unload", {"grace_s": 2})
    assert answer.json == {"model": "a", "tier": "cold", "took_s": 0.0, "memory": {}}
    assert gateway.operations.asked == [(MoveKind.UNLOAD, "a", (), 2.0)]


async def test_unload_leaves_the_grace_to_the_model_when_none_is_said() -> None:
    gateway = _gateway()
    client = Client(gateway)
    await client.post("/api/v1/models/a/unload")
    await client.post("/api/v1/models/a/unload", {})
    assert [asked[3] for asked in gateway.operations.asked] == [None, None]


async def test_sleep_answers_when_the_model_is_in_the_green_room() -> None:
    gateway = _gateway()
    slot = gateway.add_slot("a", Tier.READY)

    def done() -> None:
        slot.tier = Tier.ASLEEP
        gateway.state.ledger.hold(slot.id, {})
        gateway.now += 0.25

    gateway.operations.then = done
    answer = await Client(gateway).post("/api/v1/models/first/sleep", {"grace_s": 2})
    assert answer.json == {"model": "a", "tier": "asleep", "took_s": 0.25, "memory": {}}
    assert gateway.operations.asked == [(MoveKind.SLEEP, "a", (), 2.0)]


async def test_prepare_takes_the_models_that_must_leave_for_it() -> None:
    gateway = _gateway()
    gateway.operations.then = lambda: gateway.add_slot("a", Tier.ASLEEP) and None
    answer = await Client(gateway).post("/api/v1/models/a/prepare", {"evict": ["org/name"]})
    assert (answer.status, answer.json["tier"]) == (200, "asleep")
    assert gateway.operations.asked == [(MoveKind.PREPARE, "a", ("org/name",), None)]


@pytest.mark.parametrize("order", ["sleep", "prepare"])
async def test_an_engine_that_keeps_nothing_asleep_is_a_callers_mistake(order: str) -> None:
    gateway = _gateway()
    gateway.operations.error = Unsupported("a runs on command, which keeps no model asleep.", param="model")
    answer = await Client(gateway).post(f"/api/v1/models/a/{order}")
    assert (answer.status, answer.error["code"]) == (422, "unsupported")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("grace_s", [-1, "soon", 1e9])
async def test_a_grace_that_is_none_is_refused_before_anything_moves(grace_s: object) -> None:
    gateway = _gateway()
    answer = await Client(gateway).post("/api/v1/models/a/sleep", {"grace_s": grace_s})
    assert (answer.status, answer.error["param"]) == (400, "grace_s")
    assert gateway.operations.asked == []


async def test_load_takes_the_models_that_must_leave_by_id_or_alias() -> None:
    gateway = _gateway()
    answer = await Client(gateway).post("/api/v1/models/org/name/load", {"evict": ["first", "a/b"]})
    assert answer.status == 200
    assert gateway.operations.asked == [(MoveKind.LOAD, "org/name", ("a", "a/b"), None)]


async def test_load_refuses_to_evict_a_stranger() -> None:
    gateway = _gateway()
    answer = await Client(gateway).post("/api/v1/models/a/load", {"evict": ["stranger"]})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "evict")
    assert gateway.operations.asked == []


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("a", "a"),
        ("first", "a"),
        ("a/b", "a/b"),
        ("a%2Fb", "a/b"),
        ("org/name", "org/name"),
        ("org%2Fname", "org/name"),
        ("org/name:q4", "org/name:q4"),
        ("org%2Fname%3Aq4", "org/name:q4"),
    ],
)
@pytest.mark.parametrize("order", ["load", "unload", "sleep", "prepare"])
async def test_orders_reach_the_model_that_was_named(target: str, name: str, order: str) -> None:
    gateway = _gateway()
    assert (await Client(gateway).post(f"/api/v1/models/{target}/{order}")).status == 200
    assert gateway.operations.asked == [(MoveKind(order), name, (), None)]


@pytest.mark.parametrize(
    "target",
    ["b", "a/x", "a%2Fx", "", "/", "a/", "a%00", "a%0A", "a%0D%0Aevil", "%ff", "A", "a%2Fb%2F", "..%2Fa", "x" * 3000],
)
async def test_orders_for_strangers_are_not_found(target: str) -> None:
    gateway = _gateway()
    for order in ("load", "unload", "sleep", "prepare"):
        answer = await Client(gateway).post(f"/api/v1/models/{target}/{order}")
        assert (answer.status, answer.error["type"]) == (404, "not_found_error")
    assert gateway.operations.asked == []


@pytest.mark.parametrize("raw", ["a%2Fload", "a/load%0A", "a%2Fb%2Fload", "a/b%2Fload", "a/load/"])
async def test_an_order_is_never_part_of_an_encoded_id(raw: str) -> None:
    gateway = _gateway()
    assert (await Client(gateway).post(f"/api/v1/models/{raw}")).status == 404
    assert (await Client(gateway).post("/api/v1/models%2Fa/load")).status == 404
    assert gateway.operations.asked == []


async def test_a_failed_load_says_why_with_the_engines_last_lines() -> None:
    gateway = _gateway()
    gateway.operations.error = LoadFailed(
        "a could not be loaded.", details="line 1\nout of \x1b[31mmemory", retry_after_s=5
    )
    answer = await Client(gateway).post("/api/v1/models/a/load")
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert answer.error["code"] == "model_load_failed"
    assert answer.error["details"] == "line 1\nout of memory"


@pytest.mark.parametrize("target", ["models/a/load", "models/a/unload", "reload"])
async def test_a_gateway_that_drains_takes_no_orders(target: str) -> None:
    gateway = _gateway()
    gateway.is_draining = True
    answer = await Client(gateway).post(f"/api/v1/{target}")
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert gateway.operations.asked == []


@pytest.mark.parametrize(
    ("target", "order", "param"),
    [
        ("load", {"evict": "a"}, "evict"),
        ("load", {"evict": [1]}, "evict.0"),
        ("load", {"evict": ["a"] * 101}, "evict"),
        ("load", {"evict": ["a" * 300]}, "evict.0"),
        ("load", {"evcit": ["a"]}, "evcit"),
        ("load", [], "body"),
        ("unload", {"grace_s": -1}, "grace_s"),
        ("unload", {"grace_s": 3601}, "grace_s"),
        ("unload", {"grace_s": float("nan")}, "grace_s"),
        ("unload", {"grace_s": float("inf")}, "grace_s"),
        ("unload", {"grace_s": "soon"}, "grace_s"),
        ("unload", {"grace": 1}, "grace"),
    ],
)
async def test_an_order_that_makes_no_sense_is_refused(target: str, order: Any, param: str) -> None:
    gateway = _gateway()
    answer = await Client(gateway).post(f"/api/v1/models/a/{target}", order)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert answer.error["param"] == param
    assert gateway.operations.asked == []


@pytest.mark.parametrize(
    "body", [b"{", b"nonsense", b"\xff\xfe", b"[" * 500_000, b'{"evict":' * 100_000, b"1" * 10_000]
)
async def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    gateway = _gateway()
    answer = await Client(gateway).ask("POST", "/api/v1/models/a/load", body, {"content_type": "application/json"})
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert gateway.operations.asked == []


async def test_a_body_of_another_type_is_refused_with_a_hint() -> None:
    headers = {"content_type": "application/x-www-form-urlencoded"}
    answer = await Client(_gateway()).ask("POST", "/api/v1/models/a/unload", b'{"grace_s": 1}', headers)
    assert answer.status == 400
    assert "Content-Type: application/json" in answer.error["message"]


# --- logs -----------------------------------------------------------------------------------------------------------


async def test_logs_are_the_last_lines() -> None:
    gateway = _gateway()
    ring = gateway.slots.log(ORG)
    for number in range(300):
        ring.write(b"line %d\n" % number)
    client = Client(gateway)
    answer = (await client.get("/api/v1/models/org%2Fname/logs")).json
    assert answer["model"] == "org/name"
    assert answer["lines"] == [f"line {number}" for number in range(100, 300)]
    assert (await client.get("/api/v1/models/org/name/logs?lines=1")).json["lines"] == ["line 299"]
    assert (await client.get("/api/v1/models/org/name/logs?lines=0")).json["lines"] == []


async def test_a_model_that_printed_nothing_has_no_lines() -> None:
    assert (await Client(_gateway()).get("/api/v1/models/a/logs")).json == {"model": "a", "lines": []}


async def test_logs_cannot_steer_a_terminal() -> None:
    gateway = _gateway()
    gateway.slots.log(ORG).write(b"\x1b]0;owned\x07a\x1b[2Jb\x1b[31mc\x9b\x07\td\xff\n")
    assert (await Client(gateway).get("/api/v1/models/org/name/logs")).json["lines"] == ["abc\ufffd\td\ufffd"]


@pytest.mark.parametrize("path", ["logs", "logs/stream"])
async def test_logs_of_strangers_are_not_found(path: str) -> None:
    answer = await Client(_gateway()).get(f"/api/v1/models/stranger/{path}")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["logs", "logs/stream"])
@pytest.mark.parametrize("lines", ["-1", "2001", "x"])
async def test_lines_out_of_bounds_are_refused(path: str, lines: str) -> None:
    answer = await Client(_gateway()).get(f"/api/v1/models/a/{path}?lines={lines}")
    assert (answer.status, answer.error["param"]) == (400, "lines")


# --- reload ---------------------------------------------------------------------------------------------------------


async def test_reload_answers_with_what_changed() -> None:
    gateway = _gateway()
    gateway.changes = Changes(("new",), ("a",), ("org/name",), ("old",), ("server.drain_s",), ())
    assert (await Client(gateway).post("/api/v1/reload")).json == {
        "added": ["new"],
        "changed": ["a"],
        "relabelled": ["org/name"],
        "removed": ["old"],
        "at_once": ["server.drain_s"],
        "took_s": 0.0,
    }


async def test_a_reload_that_is_refused_says_why() -> None:
    gateway = _gateway()
    gateway.reload_error = ConfigError("greenroom.yaml:7: models.a.pth is not known; did you mean path?")
    answer = await Client(gateway).post("/api/v1/reload")
    assert (answer.status, answer.error["code"]) == (422, "invalid_config")
    assert "greenroom.yaml:7" in answer.error["message"]


async def test_the_configuration_itself_is_never_shown() -> None:
    """Only what can be changed while the gateway runs."""
    answer = await Client(_gateway()).get("/api/v1/config")
    assert (answer.status, answer.json) == (200, {"allowCloudFallback": True})
