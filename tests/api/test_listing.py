from __future__ import annotations

from typing import Any

import pytest

from greenroom.api.reports.snapshot import need_view
from greenroom.core.events import ConfigChanged
from greenroom.core.model import ModelId, Move, MoveId, MoveKind, Need, RequestId, SlotId, Tier
from greenroom.engines.estimates.estimate import Estimate, EstimatePart
from greenroom.errors import LoadFailed
from greenroom.runtime.memory.book import Measured
from greenroom.runtime.memory.needs import Account
from tests.api.management_rig import GPU, NOW, Client, FakeGateway, model

NAMES = ["a", "a/b", "org/name", "org/name:q4", "a/b/c/d", "ünï/cödé", "50% off"]


def _gateway(*names: str) -> FakeGateway:
    return FakeGateway({name: model() for name in names or NAMES})


async def test_models_are_listed_in_openais_shape() -> None:
    gateway = FakeGateway(
        {"a": model(name="A", description="The first.", aliases=("first",), metadata={"family": "x", "tier": "mine"})}
    )
    answer = await Client(gateway).get("/v1/models")
    assert answer.status == 200
    assert answer.json == {
        "object": "list",
        "data": [
            {
                "id": "a",
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "greenroom",
                "name": "A",
                "description": "The first.",
                "aliases": ["first"],
                "capabilities": None,
                "status": {"value": "unloaded", "eta_s": None, "retry_in_s": None, "last_error": None},
                "meta": {"family": "x", "tier": "cold", "quantization": None, "memory_mib": 100},
            }
        ],
    }


async def test_the_short_address_lists_the_same() -> None:
    client = Client(_gateway("a"))
    assert (await client.get("/models")).json == (await client.get("/v1/models")).json


async def test_an_engine_that_knows_says_what_it_can_do() -> None:
    gateway = FakeGateway({"vectors": model(cmd=None, path="/nowhere/vectors.gguf", embedding=True)})
    assert (await Client(gateway).get("/v1/models/vectors")).json["capabilities"] == ["embeddings"]


async def test_unlisted_models_are_hidden_and_found() -> None:
    client = Client(FakeGateway({"a": model(), "secret": model(unlisted=True)}))
    assert [card["id"] for card in (await client.get("/v1/models")).json["data"]] == ["a"]
    assert (await client.get("/v1/models/secret")).json["id"] == "secret"


async def test_a_loading_model_says_how_long_it_may_take() -> None:
    gateway = _gateway("a")
    gateway.add_slot("a", Tier.COLD, move=Move(MoveId("m"), MoveKind.LOAD, SlotId("s-a"), ModelId("a"), 1, {}, NOW - 2))
    gateway.state.models[ModelId("a")].learned_s[MoveKind.LOAD] = 5.0
    status = (await Client(gateway).get("/v1/models/a")).json["status"]
    assert (status["value"], status["eta_s"]) == ("loading", 3.0)


async def test_a_failed_model_says_why_and_when_it_is_tried_again() -> None:
    gateway = _gateway("a")
    record = gateway.state.models[ModelId("a")]
    record.failures, record.retry_at = 2, NOW + 10
    gateway.mover.failures[ModelId("a")] = LoadFailed("a could not be loaded.", details="secret lines")
    status = (await Client(gateway).get("/v1/models/a")).json["status"]
    assert status == {"value": "failed", "eta_s": None, "retry_in_s": 10.0, "last_error": "a could not be loaded."}


@pytest.mark.parametrize(("tier", "word"), [(Tier.READY, "loaded"), (Tier.ASLEEP, "sleeping")])
async def test_a_model_that_is_there_says_so(tier: Tier, word: str) -> None:
    gateway = _gateway("a")
    gateway.add_slot("a", tier)
    card = (await Client(gateway).get("/v1/models/a")).json
    assert (card["status"]["value"], card["meta"]["tier"]) == (word, tier.value)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("a", "a"),
        ("a/b", "a/b"),
        ("a%2Fb", "a/b"),
        ("a%2fb", "a/b"),
        ("a/b/c/d", "a/b/c/d"),
        ("a%2Fb%2Fc%2Fd", "a/b/c/d"),
        ("org/name", "org/name"),
        ("org%2Fname", "org/name"),
        ("org/name:q4", "org/name:q4"),
        ("org%2Fname%3Aq4", "org/name:q4"),
        ("%C3%BCn%C3%AF/c%C3%B6d%C3%A9", "ünï/cödé"),
        ("50%25%20off", "50% off"),
    ],
)
async def test_an_id_is_read_from_the_raw_path(target: str, name: str) -> None:
    assert (await Client(_gateway()).get(f"/v1/models/{target}")).json["id"] == name


async def test_an_alias_finds_its_model() -> None:
    client = Client(FakeGateway({"a": model(aliases=("org/first",))}))
    assert (await client.get("/v1/models/org/first")).json["id"] == "a"
    assert (await client.get("/v1/models/org%2Ffirst")).json["id"] == "a"


@pytest.mark.parametrize(
    "target",
    [
        *("", "b", "a/", "a//b", "A", "a/x", "a%20", "a%252Fb", "..", "a/..", "../a", "%2e%2e"),
        *("a%", "a%2", "a%zz", "a%0A", "a%0a/b", "%00", "a%00", "%ff", "\N{RIGHT-TO-LEFT OVERRIDE}"),
        *("x" * 5000, "a/" * 2000),
    ],
)
async def test_what_is_no_id_is_not_found(target: str) -> None:
    answer = await Client(_gateway()).get(f"/v1/models/{target}")
    assert answer.status == 404
    assert answer.error["code"] in ("model_not_found", "not_found")
    assert len(answer.body) < 4096


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x00", r"'a\x00'"),
        ("a\x1b[2Jb", r"'a\x1b[2Jb'"),
        ("a\u202eb", r"'a\u202eb'"),
        ("x" * 200, "x" * 128 + "… (200 characters)"),
        ("\x00" * 200, r"\x00" * 128 + "'… (200 characters)"),
    ],
)
async def test_an_unknown_name_is_shown_escaped_and_bounded(name: str, shown: str) -> None:
    answer = await Client(_gateway("a")).post("/api/v1/explain", {"model": name})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert f"{shown}. GET /v1/models" in answer.error["message"]


async def test_a_path_is_shown_escaped_and_bounded() -> None:
    answer = await Client(_gateway("a")).get("/v1/models/a%00")
    assert answer.status == 404
    assert r"'/v1/models/a\x00'" in answer.error["message"]


async def test_an_unknown_model_is_named_in_the_error() -> None:
    answer = await Client(_gateway("a")).get("/v1/models/org%2Fother")
    assert answer.error["code"] == "model_not_found"
    assert answer.error["param"] == "model"
    assert "org/other" in answer.error["message"]


async def test_looking_never_orders_anything() -> None:
    gateway = _gateway()
    client = Client(gateway)
    for target in ("/v1/models", "/v1/models/a", "/models", "/health", "/metrics", "/api/v1/status"):
        await client.get(target)
    assert gateway.operations.asked == []
    assert gateway.state.slots == {}
    assert gateway.state.ledger.held_by(SlotId("s-a")) == {}
    assert GPU in gateway.state.ledger.devices


# --- states -----------------------------------------------------------------------------------------------------------


async def shown(gateway: FakeGateway, name: str = "a") -> Any:
    answer = await Client(gateway).get(f"/api/v1/models/{name}")
    assert answer.status == 200, answer.body
    return answer.json


async def test_all_models_are_shown_as_in_the_status_unlisted_ones_too() -> None:
    gateway = FakeGateway({"a": model(unlisted=True), "org/b": model()})
    models = (await Client(gateway).get("/api/v1/models")).json["models"]
    assert [one["id"] for one in models] == ["a", "org/b"]
    assert models == (await Client(gateway).get("/api/v1/status")).json["models"]


@pytest.mark.parametrize("name", ["org/b", "org%2Fb", "other"])
async def test_one_model_is_found_by_id_and_alias(name: str) -> None:
    gateway = FakeGateway({"a": model(), "org/b": model(aliases=("other",))})
    gateway.add_waiter("org/b", 1)
    gateway.add_waiter("a", 2)
    found = await shown(gateway, name)
    assert (found["id"], found["waiting"]) == ("org/b", 1)


async def test_model_that_is_not_there_is_not_found() -> None:
    answer = await Client(FakeGateway({"a": model()})).get("/api/v1/models/b")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


# --- how long it stays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "keys", "left_s"),
    [
        ({"last_used": NOW - 20}, {"ttl_s": 60}, 40.0),
        ({"last_used": NOW - 80}, {"ttl_s": 60}, 0.0),
        ({"last_used": NOW - 20, "keep_alive_s": 300.0}, {"ttl_s": 60}, 280.0),
        ({"last_used": NOW - 20, "keep_alive_s": -1.0}, {"ttl_s": 60}, None),
        ({"last_used": NOW - 20}, {"ttl_s": 0}, None),
        ({"last_used": NOW - 20}, {"ttl_s": 60, "pinned": True}, None),
        ({"last_used": NOW - 20, "in_flight": {RequestId("r"): None}}, {"ttl_s": 60}, None),
        ({"last_used": NOW - 20, "leaving_to": Tier.COLD}, {"ttl_s": 60}, None),
    ],
)
async def test_it_is_told_how_long_an_idle_model_stays(
    facts: dict[str, Any], keys: dict[str, Any], left_s: float | None
) -> None:
    gateway = FakeGateway({"a": model(**keys)})
    gateway.add_slot("a", Tier.READY, **facts)
    found = await shown(gateway)
    assert found["unload_in_s"] == left_s
    assert found["slots"][0]["unload_in_s"] == left_s


async def test_model_that_is_not_ready_has_nowhere_to_leave() -> None:
    assert (await shown(FakeGateway({"a": model(ttl_s=60)})))["unload_in_s"] is None


# --- what it needs --------------------------------------------------------------------------------------------------


async def test_need_is_the_one_that_the_next_load_is_planned_with() -> None:
    gateway = FakeGateway({"a": model(memory_mib=100)})
    assert (await shown(gateway))["need"]["gpu_mib"] == 100
    gateway.loop.scheduler.handle(ConfigChanged(NOW, needs={ModelId("a"): Need(125, 7)}))
    need = (await shown(gateway))["need"]
    assert (need["gpu_mib"], need["host_mib"], need["source"]) == (125, 7, "declared")


def test_figure_is_shown_with_what_it_can_be_compared_with() -> None:
    estimate = Estimate((EstimatePart("weights", 1_000, 10), EstimatePart("KV cache", 50, 0)), "gguf")
    account = Account(Need(1_000, 20), "measured", estimate, Measured(1_000, 20))
    said = need_view(Need(1_000, 20), account)
    assert (said.source, said.gpu_mib, said.host_mib) == ("measured", 1_000, 20)
    assert (said.measured_gpu_mib, said.measured_host_mib) == (1_000, 20)
    assert (said.estimated_gpu_mib, said.estimated_host_mib, said.estimate_error) == (1_050, 10, 0.05)


def test_figure_that_was_raised_but_never_seen_has_no_measurement() -> None:
    account = Account(Need(500), "raised", None, Measured(raised=Need(500), raises=1))
    said = need_view(Need(500), account)
    assert (said.source, said.measured_gpu_mib, said.estimated_gpu_mib) == ("raised", None, None)
