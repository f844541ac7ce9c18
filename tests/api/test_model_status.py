"""Models as operators see them: what each needs and where that figure comes from, and how long it stays."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.api.reports.snapshot import need_view
from greenroom.core.events import ConfigChanged
from greenroom.core.model import ModelId, Need, RequestId, Tier
from greenroom.engines.estimates.estimate import Estimate, EstimatePart
from greenroom.runtime.memory.book import Measured
from greenroom.runtime.memory.needs import Account
from tests.api.management_rig import NOW, Client, FakeGateway, model


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
