"""A model that was ordered is the model of that name: for chats, states, lists and unloads, whatever the order said."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import gateway, tiny
from tests.integration.facts import over
from tests.integration.faults import first_events
from tests.integration.raw import CHAT, Answer, Raw, http, request_bytes
from tests.models import tiny as tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADMIN, USER, LOADER, NARROW = "an-admin", "a-user", "may-load", "sees-one-file"
# Capabilities are kept for a while for each key.
LOOKERS = itertools.cycle([f"looker-{number}" for number in range(40)])
KEYS = [
    {"name": "root", "key": ADMIN, "admin": True},
    {"name": "someone", "key": USER, "tenant": "lab"},
    {"name": "loader", "key": LOADER, "tenant": "lab", "verbs": ["load"]},
    {"name": "narrow", "key": NARROW, "tenant": "elsewhere", "models": ["org/gamma:Q4_K_M"], "verbs": ["load"]},
    *({"name": f"looker-{number}", "key": f"looker-{number}", "admin": True} for number in range(40)),
]
LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"
HUB = "org/gamma"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ordered") / "models"
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = root / "models--org--gamma"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(tiny_model("alpha"), root / "alpha.gguf")
    shutil.copy(tiny_model("beta"), root / "beta,fast.gguf")
    shutil.copy(tiny_model("delta"), root / "delta.gguf")
    shutil.copy(tiny_model("gamma"), repo / "snapshots" / commit / "gamma-Q4_K_M.gguf")
    shutil.copy(tiny_model("gamma", layers=3), repo / "snapshots" / commit / "gamma-Q8_0.gguf")
    (root / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    return root


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(root: Path) -> AsyncIterator[App]:
    models = {"own,fast": tiny(root / "beta,fast.gguf", aliases=["own"])}
    async with gateway(root.parent, models, library={"roots": [str(root)]}, server={"api_keys": KEYS}) as app:
        yield app


@pytest_asyncio.fixture(loop_scope="module")
async def app(running: App) -> AsyncIterator[App]:
    yield running
    for name in ("alpha.gguf", "delta.gguf", HUB, "beta,fast.gguf", "own,fast"):
        await unloaded(running, name)
    assert in_memory(running) == []


async def ask(app: App, method: str, path: str, body: Any = None, key: str = ADMIN) -> Answer:
    return await http(app, method, path, body, headers={"authorization": f"Bearer {key}"})


async def say(app: App, model: str, key: str = USER, **more: Any) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
    answer = await ask(app, "POST", CHAT, body, key)
    assert answer.status == 200, answer.body
    return answer


async def ordered(app: App, name: str, **order: Any) -> dict[str, Any]:
    """The task of this load, once it has ended."""
    taken = await ask(app, "POST", LOAD, {"modelId": name, **order})
    assert taken.status == 202, taken.body
    return await ended(app, taken)


async def ended(app: App, taken: Answer) -> dict[str, Any]:
    return await over(app, taken.headers["location"], {"authorization": f"Bearer {ADMIN}"})


async def unloaded(app: App, name: str) -> dict[str, Any]:
    answer = await ask(app, "POST", UNLOAD, {"modelId": name})
    assert answer.status == 200, answer.body
    said: dict[str, Any] = answer.json()
    return said


def in_memory(app: App) -> list[str]:
    return [slot.id for slot in app.loop.scheduler.view.slots.values()]


async def loaded(app: App, key: str | None = None) -> dict[str, Any]:
    """The context of each model that capabilities call loaded."""
    told = (await ask(app, "GET", "/v1/capabilities", key=key or next(LOOKERS))).json()
    return {one["id"]: one["contextLength"] for one in told["models"]["loaded"]}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("alpha.gguf", {"maxContextLength": 256, "gpuMemoryBudgetMB": 900}),
        ("{root}/alpha.gguf", {"maxContextLength": 256, "gpuMemoryBudgetMB": 900}),
        ("{root}/alpha.gguf", {"maxContextLength": 256, "device": "cpu"}),
        (HUB, {"maxContextLength": 256, "quantization": "q8_0"}),
    ],
)
async def test_all_that_is_done_by_one_name_is_of_one_slot(
    app: App, root: Path, name: str, order: dict[str, Any]
) -> None:
    name = name.format(root=root)
    done = await ordered(app, name, **order)
    assert (done["status"], done["modelId"]) == ("completed", name)
    [slot] = in_memory(app)
    assert (await say(app, name)).json()["model"] == name
    streamed = (await say(app, name, stream=True)).data
    assert {one["model"] for one in streamed if one != "[DONE]"} == {name}
    assert await loaded(app) == {name: 256}
    for path in ("/v1/models", "/api/v1/models"):
        shown = await ask(app, "GET", f"{path}/{quote(name, safe='')}")
        assert shown.status == 200 and shown.json()["id"] == name
    assert [one["id"] for one in shown.json()["slots"]] == [slot]
    listed = (await ask(app, "GET", "/v1/models/loaded")).json()["data"]
    assert [(one["id"], one["tier"]) for one in listed] == [(name, "ready")]
    running = (await ask(app, "GET", "/running")).json()["running"]
    assert [(one["model"], one["state"]) for one in running] == [(name, "ready")]
    assert (await ask(app, "GET", f"/props?model={quote(name, safe='')}")).json()["model_alias"] == name
    assert in_memory(app) == [slot], "it was never loaded anew"
    gone = await unloaded(app, name)
    assert gone == {"modelId": name, "gpuMemoryFreedMB": done["gpuMemoryUsedMB"], "kvCacheFlushed": True}
    assert in_memory(app) == []
    rows = (await ask(app, "GET", "/api/v1/operations?limit=2")).json()["data"]
    assert [(row["kind"], row["model"]) for row in rows] == [("unload", name), ("load", name)]


async def test_paths_are_not_shown_to_those_who_did_not_say_them(app: App, root: Path) -> None:
    await ordered(app, str(root / "alpha.gguf"), maxContextLength=256)
    assert await loaded(app, USER) == {"alpha.gguf": 256}
    for path in ("/v1/models", "/v1/models/loaded", "/api/v1/models", "/metrics"):
        assert str(root).encode() not in (await ask(app, "GET", path, key=USER)).body, path
    for order in ("load", "load?wait=false", "sleep", "unload"):
        answer = await ask(app, "POST", f"/api/v1/models/alpha.gguf/{order}", key=LOADER)
        task = answer.headers.get("location") or f"{LOAD}/{answer.json().get('taskId')}"
        assert str(root).encode() not in answer.body + (await ask(app, "GET", task, key=LOADER)).body, order


async def test_an_order_stands_by_every_name_until_the_model_is_unloaded(app: App, root: Path) -> None:
    await ordered(app, "alpha.gguf", maxContextLength=256)
    slots = in_memory(app)
    await say(app, str(root / "alpha.gguf"))
    assert (await ordered(app, "alpha.gguf"))["status"] == "completed"
    assert (await ask(app, "POST", "/api/v1/models/alpha.gguf/load")).status == 200
    await say(app, "alpha.gguf", backend="llamacpp", device="cuda")
    assert in_memory(app) == slots, "what says nothing else means what was ordered"
    await unloaded(app, str(root / "alpha.gguf"))
    await say(app, "alpha.gguf")
    assert await loaded(app) != {"alpha.gguf": 256}


async def test_an_order_survives_that_its_model_was_evicted(app: App) -> None:
    await ordered(app, "alpha.gguf", maxContextLength=256)
    assert (await ordered(app, "delta.gguf", evictModel="alpha.gguf"))["status"] == "completed"
    assert list(await loaded(app)) == ["delta.gguf"]
    await say(app, "alpha.gguf")
    assert (await loaded(app))["alpha.gguf"] == 256


async def test_options_of_a_request_change_nothing_for_others(app: App) -> None:
    await ordered(app, "alpha.gguf", maxContextLength=256)
    other = await say(app, "alpha.gguf", device="cpu", n_gpu_layers=0)
    assert other.json()["model"] == "alpha.gguf"
    shown = (await ask(app, "GET", "/api/v1/models/alpha.gguf")).json()
    assert shown["tier"] == "ready" and list(await loaded(app)) == ["alpha.gguf"]
    await say(app, "alpha.gguf")
    assert await loaded(app) == {"alpha.gguf": 256} and len(in_memory(app)) == 1
    assert (await ask(app, "POST", LOAD, {"modelId": "alpha.gguf"}, USER)).status == 403


async def test_what_requests_have_loaded_with_options_leaves_by_its_name(app: App) -> None:
    await say(app, "alpha.gguf", gpu_memory_utilization=0.5)
    await unloaded(app, "alpha.gguf")
    assert in_memory(app) == []
    await say(app, "alpha.gguf", gpu_memory_utilization=0.5)
    await ordered(app, "delta.gguf", evictModel="alpha.gguf")
    assert list(await loaded(app)) == ["delta.gguf"]


@pytest.mark.parametrize("exclusive", [True, False])
async def test_the_last_order_stands_and_others_leave_nothing(tmp_path: Path, root: Path, exclusive: bool) -> None:
    library = {"roots": [str(root)], "exclusive": exclusive}
    async with gateway(tmp_path, {}, library=library, server={"api_keys": KEYS}) as app:
        for orders in ([256, 512, 384], [512, 640]):
            taken = [await ask(app, "POST", LOAD, {"modelId": "alpha.gguf", "maxContextLength": n}) for n in orders]
            tasks = [await ended(app, one) for one in taken]
            assert tasks[-1]["status"] == "completed" and {one["modelId"] for one in tasks} == {"alpha.gguf"}
            await say(app, "alpha.gguf")
            assert await loaded(app) == {"alpha.gguf": orders[-1]}, [one["error"] for one in tasks]
            assert len(in_memory(app)) == 1
        await ordered(app, HUB, quantization="q8_0")
        await ordered(app, HUB, quantization="q4_k_m")
        assert (await say(app, HUB)).json()["model"] == HUB and list(await loaded(app)) == ["alpha.gguf", HUB]
        assert len(in_memory(app)) == 2


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("first", [{"maxContextLength": 256}, {}])
async def test_an_order_does_not_take_a_pinned_model_from_its_name_unless_it_is_forced(
    tmp_path: Path, root: Path, first: dict[str, int], exclusive: bool
) -> None:
    library = {"roots": [str(root)], "exclusive": exclusive}
    async with gateway(tmp_path, {}, library=library, server={"api_keys": KEYS}) as app:
        assert (await ordered(app, "alpha.gguf", **first))["status"] == "completed"
        pin = "/api/v1/models/alpha.gguf/pin"
        assert (await ask(app, "POST", pin, {})).status == 200
        order = {"modelId": "alpha.gguf", "maxContextLength": 512}
        stays = first or exclusive
        if stays:
            refused = await ask(app, "POST", LOAD, order)
            assert (refused.status, refused.error["code"]) == (409, "model_pinned")
            await say(app, "alpha.gguf")
            assert (
                len(in_memory(app)) == 1 and (await ask(app, "POST", pin, {"pinned": False})).json()["pinned"] is False
            )
            assert (await ask(app, "POST", pin, {})).status == 200
        assert (await ordered(app, "alpha.gguf", maxContextLength=512, force=True))["status"] == "completed"
        await say(app, "alpha.gguf")
        assert len(in_memory(app)) == (1 if stays else 2)


async def test_orders_for_one_name_at_the_same_time_are_all_taken_and_one_stands(tmp_path: Path, root: Path) -> None:
    library = {"roots": [str(root)], "exclusive": False}
    async with gateway(tmp_path, {}, library=library, server={"api_keys": KEYS}) as app:
        orders = [{"modelId": "alpha.gguf", "maxContextLength": n} for n in (256, 512, 384, 640)]
        taken = await asyncio.gather(*(ask(app, "POST", LOAD, order) for order in orders))
        assert [one.status for one in taken] == [202] * 4, [one.body for one in taken]
        tasks = [await ended(app, one) for one in taken]
        assert {"completed"} <= {one["status"] for one in tasks}
        slots = in_memory(app)
        await say(app, "alpha.gguf")
        assert in_memory(app) == slots and len(slots) == 1


async def test_an_order_about_a_configured_model_loads_it(app: App) -> None:
    for order in ({"device": "cpu"}, {"backend": "llamacpp"}):
        assert (await ordered(app, "own", **order))["status"] == "completed"


async def test_an_order_for_another_file_holds_for_its_name_alone(app: App) -> None:
    await ordered(app, HUB, quantization="q8_0")
    callers = ((HUB, USER), ("org/gamma:Q4_K_M", USER), (HUB, NARROW), ("Org/Gamma", USER))
    for name, key in callers:
        await say(app, name, key)
    rows = (await ask(app, "GET", f"/api/v1/requests?limit={len(callers)}")).json()["requests"]
    slots = [row["slot"] for row in reversed(rows)]
    assert slots[0] == slots[3] and slots[1] == slots[2] != slots[0]
    taken = await ask(app, "POST", LOAD, {"modelId": HUB, "maxContextLength": 256}, NARROW)
    assert (await ended(app, taken))["status"] == "completed"
    assert slots[0] in in_memory(app), "an order of a key that does not see it leaves it alone"
    await unloaded(app, "org/gamma:Q4_K_M")


async def test_an_ordered_model_has_its_name_again_after_it_was_forgotten(tmp_path: Path, root: Path) -> None:
    library = {"roots": [str(root)], "adhoc_models_max": 1}
    async with gateway(tmp_path, {}, library=library, server={"api_keys": KEYS}) as app:
        await ordered(app, str(root / "alpha.gguf"), maxContextLength=256)
        for name in ("delta.gguf", "alpha.gguf"):
            await say(app, name)
        assert await loaded(app) == {str(root / "alpha.gguf"): 256}


async def test_an_order_ends_when_the_file_that_it_chose_is_deleted(tmp_path: Path, root: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "models")
    async with gateway(tmp_path, {}, library={"roots": [str(copy)]}, server={"api_keys": KEYS}) as app:
        await ordered(app, HUB, quantization="q8_0")
        await ordered(app, "delta.gguf", evictModel=HUB)
        assert (await ask(app, "DELETE", "/v1/models/inventory/org/gamma:Q8_0")).status == 200
        await say(app, HUB)
        await unloaded(app, HUB)


async def test_a_name_with_a_comma_is_one_name(app: App) -> None:
    assert (await say(app, "beta,fast.gguf", device="cpu", n_gpu_layers=0)).json()["model"] == "beta,fast.gguf"
    for name in ("own,fast", "own"):
        assert (await say(app, name)).json()["model"] == "own,fast"


async def test_no_answer_has_an_id_that_only_this_process_knows(app: App, root: Path) -> None:
    await ordered(app, "alpha.gguf", maxContextLength=256)
    await say(app, "alpha.gguf", device="cpu", n_gpu_layers=0)
    await say(app, str(root / "alpha.gguf"))
    await ordered(app, "delta.gguf", maxContextLength=256, evictModel="alpha.gguf")
    broken = await ordered(app, "broken.gguf", backend="llamacpp", maxContextLength=256)
    refused = await ask(app, "POST", CHAT, {"model": "broken.gguf", "messages": [{"role": "user", "content": "hi"}]})
    explained = [await ask(app, "POST", "/api/v1/explain", {"model": name}) for name in ("alpha.gguf", "broken.gguf")]
    digests = [entry.id[-8:] for entry in app.catalog if entry.is_adhoc]
    assert broken["status"] == "failed" and refused.status == 503 and len(digests) >= 4
    names = ("/api/v1/models/alpha.gguf", "/props?model=alpha.gguf", "/running", "/api/ps", "/api/tags", "/logs")
    answers = {path: await ask(app, "GET", path) for path in (*await pages(app), *names)}
    assert {"/api/v1/decisions", "/api/v1/status", "/api/v1/requests"} < {*answers}
    answers |= {"refused": refused, "explained": explained[0], "explained too": explained[1]}
    async with await Raw.open(app) as raw:
        raw.send(request_bytes("GET", "/api/v1/events?after=0&state=true", None, {"authorization": f"Bearer {ADMIN}"}))
        events = await first_events(raw, 20)
    told = {path: answer.body for path, answer in answers.items()} | {"task": json.dumps(broken).encode(), "": events}
    for path, body in told.items():
        assert not [one for one in digests if one.encode() in body], (path, body)


async def pages(app: App) -> list[str]:
    """The paths that can be read as they are and end."""
    schema = (await ask(app, "GET", "/api/v1/openapi.json")).json()["paths"]
    readable = {path: one["get"]["responses"].get("200", {}) for path, one in schema.items() if "get" in one}
    return [path for path, one in readable.items() if "{" not in path and "text/event-stream" not in str(one)]
