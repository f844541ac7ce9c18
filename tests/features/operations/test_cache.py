"""Which callers may flush which prefix caches, and what is reported of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.access.keys import Caller
from greenroom.core.model import TenantId, Tier
from greenroom.errors import EngineLost
from greenroom.runtime.slots import LiveSlot
from tests.api.management_rig import Client, FakeGateway, model

PATH = "/v1/cache/flush"
LAB = Caller(name="lab", tenant=TenantId("lab"), priority_max=0, admin=False)


def gateway(tmp_path: Path) -> FakeGateway:
    """Three models with a cache, of which one sleeps, and one whose engine keeps none."""
    hosted = {"engine": "transformers", "path": str(tmp_path), "cmd": None}
    models = {"a": model(**hosted, aliases=("first",)), "b": model(**hosted), "c": model(), "d": model(**hosted)}
    made = FakeGateway(models)
    for name, tier in {"a": Tier.READY, "b": Tier.ASLEEP, "c": Tier.READY, "d": Tier.READY}.items():
        slot, entry = made.add_slot(name, tier), made.catalog.find(name)
        made.slots.live[slot.id] = cast(LiveSlot, SimpleNamespace(id=slot.id, entry=entry, figures=None, prompts=None))
    return made


async def test_all_reaches_every_model_that_has_a_cache_now(tmp_path: Path) -> None:
    made = gateway(tmp_path)
    answer = await Client(made).post(PATH, {"scope": "all", "tenantId": None, "modelId": None, "verifiedOpToken": "x"})
    said = dict(answer.json)
    assert " c " in said.pop("reason"), "a command may keep what it was asked"
    assert said == {"flushed": False, "entriesRemoved": 6, "memoryFreedMB": 10.0}
    assert made.flushed == [("s-a", None, None), ("s-d", None, None)]
    shown = (await Client(made).get("/metrics")).body
    assert b'greenroom_cache_flushed_bytes_total{model="a"} 5.24288e+06' in shown


@pytest.mark.parametrize(
    ("order", "asked"),
    [
        ({"scope": "model", "modelId": "first"}, [("s-a", None, None)]),
        ({"scope": "model", "modelId": "b"}, []),
        ({"scope": "tenant", "tenantId": "lab"}, [("s-a", "lab", None), ("s-d", "lab", None)]),
        ({"scope": "tenant", "tenantId": "lab", "modelId": "d"}, [("s-d", "lab", None)]),
        ({"scope": "tenant", "tenantId": "Z\u00fcrich 5%", "modelId": "a"}, [("s-a", "Z%C3%BCrich%205%25", None)]),
        ({"scope": "tag", "tag": "session-1"}, [("s-a", None, "session-1"), ("s-d", None, "session-1")]),
        ({"scope": "tag", "tag": "t", "tenantId": "lab", "modelId": "a"}, [("s-a", "lab", "t")]),
    ],
)
async def test_an_admin_says_what_is_forgotten(tmp_path: Path, order: dict[str, Any], asked: list[Any]) -> None:
    made = gateway(tmp_path)
    answer = await Client(made).post(PATH, order)
    assert answer.status == 200 and answer.json["entriesRemoved"] == 3 * len(asked)
    assert made.flushed == asked


@pytest.mark.parametrize(
    ("order", "param"),
    [
        ({"scope": "model"}, "modelId"),
        ({"scope": "tenant"}, "tenantId"),
        ({"scope": "tag"}, "tag"),
        ({"scope": "tag", "tag": "x" * 65}, "tag"),
        ({"scope": "tag", "tag": "a\nb"}, "tag"),
        ({"scope": "tag", "tag": "\u00fc"}, "tag"),
        ({"scope": "everything"}, "scope"),
        ({"scope": "all", "modelID": "a"}, "modelID"),
        ({}, "scope"),
    ],
)
async def test_what_cannot_be_meant_is_refused_and_nothing_forgotten(
    tmp_path: Path, order: dict[str, Any], param: str
) -> None:
    made = gateway(tmp_path)
    answer = await Client(made).post(PATH, order)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert made.flushed == []


async def test_a_model_that_is_not_there_or_keeps_no_cache_is_told_apart(tmp_path: Path) -> None:
    client = Client(gateway(tmp_path))
    assert (await client.post(PATH, {"scope": "model", "modelId": "x"})).error["code"] == "model_not_found"
    answer = await client.post(PATH, {"scope": "model", "modelId": "c"})
    assert (answer.status, answer.json["flushed"]) == (200, False) and " c " in answer.json["reason"]


async def test_a_tenants_key_flushes_its_own_tenant_whatever_it_does_not_say(tmp_path: Path) -> None:
    made = gateway(tmp_path)
    client = Client(made, is_admin=False, caller=LAB)
    for order in ({"scope": "tenant"}, {"scope": "tenant", "tenantId": "lab"}, {"scope": "tag", "tag": "t"}):
        assert (await client.post(PATH, order)).status == 200
    assert {asked[1] for asked in made.flushed} == {"lab"}
    assert [asked[2] for asked in made.flushed] == [None, None, None, None, "t", "t"]


@pytest.mark.parametrize(
    "order",
    [
        {"scope": "all"},
        {"scope": "model", "modelId": "a"},
        {"scope": "tenant", "tenantId": "other"},
        {"scope": "tag", "tag": "t", "tenantId": "other"},
    ],
)
async def test_a_tenants_key_never_reaches_another_tenants_cache(tmp_path: Path, order: dict[str, Any]) -> None:
    made = gateway(tmp_path)
    answer = await Client(made, is_admin=False, caller=LAB).post(PATH, order)
    assert (answer.status, answer.error["code"]) == (403, "not_allowed")
    assert made.flushed == []


async def test_a_worker_that_is_lost_meanwhile_has_forgotten_everything(tmp_path: Path) -> None:
    made = gateway(tmp_path)
    made.flush_error = EngineLost("The worker ended.")
    assert (await Client(made).post(PATH, {"scope": "model", "modelId": "a"})).status == 502
    made.before_flush = made.slots.live.clear
    answer = await Client(made).post(PATH, {"scope": "model", "modelId": "a"})
    assert answer.json == {"flushed": True, "entriesRemoved": 0, "memoryFreedMB": 0.0}
