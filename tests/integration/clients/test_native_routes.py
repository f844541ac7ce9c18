"""llama.cpp's own routes, as its clients use them, against real models on llama.cpp."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway, tiny
from tests.integration.facts import is_ready
from tests.integration.raw import http
from tests.models import tiny as tiny_model
from tests.models import tiny_embedding
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    models = {
        "alpha": tiny(tiny_model("alpha"), parallel=2),
        "bravo": tiny(tiny_model("bravo")),
        "bag": tiny(tiny_embedding(), embedding=True),
        "any": fake("any"),
    }
    server = {"default_model": "alpha"}
    async with gateway(tmp_path_factory.mktemp("native"), models, budget_mib=1000, server=server) as app:
        yield app


async def test_a_completion_goes_to_the_default_model_or_the_one_it_names(app: App) -> None:
    answer = await http(app, "POST", "/completion", {"prompt": "hi", "n_predict": 20})
    assert answer.json()["content"] == " alpha says hello" and answer.json()["stop"] is True
    answer = await http(app, "POST", "/completion", {"model": "bravo", "prompt": "hi", "n_predict": 20, "stream": True})
    assert "".join(event["content"] for event in answer.data) == " bravo says hello"


async def test_its_tokens_are_counted_and_tenants_are_kept_apart(app: App) -> None:
    # A tenant that names a slot does not choose it.
    asked = {"prompt": "secret words of a tenant", "n_predict": 4, "id_slot": 0, "cache_prompt": True}
    for tenant in ("one", "two", "one"):
        answer = await http(app, "POST", "/completion", asked, headers={"X-Tenant-ID": tenant})
        record = (await http(app, "GET", f"/api/v1/requests/{answer.headers['x-request-id']}")).json()
        assert (record["tenant"], record["route"], record["completion_tokens"]) == (tenant, "completion", 4)
        if tenant == "two":
            assert answer.headers["x-cache-hit"] == "false" and answer.json()["timings"]["cache_n"] == 0


async def test_texts_become_tokens_and_tokens_texts(app: App) -> None:
    tokens = (await http(app, "POST", "/tokenize", {"content": " alpha says"})).json()["tokens"]
    assert len(tokens) > 1
    again = await http(app, "POST", "/detokenize", {"tokens": tokens})
    # This model spells a space as its vocabulary does.
    assert again.json()["content"].replace("▁", " ").strip() == "alpha says"
    # The fields of vLLM, for a model on llama.cpp.
    of_vllm = await http(
        app, "POST", "/tokenize", {"model": "alpha", "prompt": " alpha says", "add_special_tokens": False}
    )
    assert of_vllm.json() == {"count": len(tokens), "tokens": tokens}
    shown = await http(app, "POST", "/apply-template", {"messages": [{"role": "user", "content": "hi"}]})
    assert "hi" in shown.json()["prompt"]


async def test_what_the_engine_does_not_have_is_refused_by_name(app: App) -> None:
    answer = await http(app, "POST", "/pooling", {"model": "alpha", "input": "hi"})
    assert answer.status == 400 and "/completion" in answer.error["message"] and answer.error["code"] == 400
    answer = await http(app, "POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert answer.status == 400 and "messages" in answer.error["message"]
    # A program of which nothing is known is asked.
    assert (await http(app, "POST", "/pooling", {"model": "any", "input": "hi"})).json()["asked"]["input"] == "hi"
    media = {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}]}]
    }
    assert (await http(app, "POST", "/apply-template", media)).error["message"].startswith("url")


async def test_props_and_slots_load_nothing_and_show_no_prompt(app: App) -> None:
    props = (await http(app, "GET", "/props?model=bag")).json()
    assert props["total_slots"] >= 1 and props["modalities"] == {"vision": False, "audio": False}
    assert not is_ready(app, "bag") and (await http(app, "GET", "/slots?model=bag")).json() == []
    await http(app, "POST", "/completion", {"prompt": "a secret prompt", "n_predict": 2})
    slots = await http(app, "GET", "/slots")
    assert len(slots.json()) == 2 and b"secret" not in slots.body
    assert set(slots.json()[0]) == {"id", "n_ctx", "is_processing"}
    assert (await http(app, "GET", "/props?model=nobody")).status == 404


async def test_models_are_loaded_and_unloaded_as_by_its_router(app: App) -> None:
    assert (await http(app, "POST", "/models/load", {"model": "bag"})).json() == {"success": True}
    await until(lambda: is_ready(app, "bag"), "it is loaded")
    states = {one["id"]: one["status"]["value"] for one in (await http(app, "GET", "/models")).json()["data"]}
    assert states["bag"] == "loaded"
    assert (await http(app, "POST", "/models/unload", {"model": "bag"})).json() == {"success": True}
    await until(lambda: not is_ready(app, "bag"), "it is unloaded")
    assert (await http(app, "POST", "/models/load", {"model": "nobody"})).status == 404


async def test_without_a_default_a_model_must_be_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with gateway(tmp_path_factory.mktemp("nameless"), {"any": fake("any")}) as app:
        answer = await http(app, "POST", "/completion", {"prompt": "hi"})
        assert answer.status == 400 and "default_model" in answer.error["message"]
        assert json.loads((await http(app, "POST", "/completion", {"model": "any"})).body)["content"] == "any"
