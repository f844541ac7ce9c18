"""Loads as tasks: ordered, polled as a client would, completed or failed; and models that are taken away."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.full_disk import full_disk
from tests.harness import gateway, tiny
from tests.integration.raw import Answer, http
from tests.models import tiny as tiny_model
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADMIN, USER = "an-admin", "a-user"
KEYS = [{"name": "root", "key": ADMIN, "admin": True}, {"name": "someone", "key": USER}]
LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"
# Never answers, so that it is on its way for as long as a test wants.
SLOW = {"cmd": [sys.executable, "-c", "import time; time.sleep(600)", "${PORT}"], "memory_mib": 50}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    folder = tmp_path_factory.mktemp("loads")
    root = folder / "models"
    root.mkdir()
    for name, quantization in (("alpha", "Q8_0"), ("beta", "Q4_K_M")):
        shutil.copy(tiny_model(name), root / f"both-{quantization}.gguf")
    broken = folder / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    models = {
        "alpha": tiny(tiny_model("alpha")),
        "beta": tiny(tiny_model("beta")),
        "broken": tiny(broken),
        "huge": tiny(tiny_model("gamma"), memory_mib=20_000),
        "slow": SLOW,
    }
    library = {"roots": [str(root)]}
    async with gateway(folder, models, library=library, server={"api_keys": KEYS}) as app:
        yield app


async def ask(app: App, method: str, path: str, body: Any = None, key: str = ADMIN) -> Answer:
    return await http(app, method, path, body, headers={"authorization": f"Bearer {key}"})


async def polled(app: App, task: str) -> dict[str, Any]:
    """As a client does: again and again until it has ended. Ours is quicker than every five seconds."""
    for _ in range(600):
        answer = await ask(app, "GET", f"{LOAD}/{task}")
        assert answer.status == 200
        said: dict[str, Any] = answer.json()
        if said["status"] != "loading":
            return said
        assert 0.0 <= said["progress"] < 1.0
        await asyncio.sleep(0.05)
    raise AssertionError("it never ended")


async def loaded(app: App, **order: Any) -> dict[str, Any]:
    answer = await ask(app, "POST", LOAD, order)
    assert answer.status == 202, answer.body
    taken = answer.json()
    assert taken["status"] == "loading" and taken["progress"] == 0.0 and "eta" in taken
    assert answer.headers["location"] == f"{LOAD}/{taken['taskId']}"
    return await polled(app, taken["taskId"])


async def test_a_load_is_ordered_polled_and_completed_and_the_model_unloaded(app: App) -> None:
    done = await loaded(app, modelId="alpha")
    assert (done["status"], done["modelId"], done["progress"]) == ("completed", "alpha", 1.0)
    assert done["loadTimeMs"] > 0 and done["gpuMemoryUsedMB"] > 0 and done["error"] is None
    answer = await ask(app, "POST", UNLOAD, {"modelId": "alpha"})
    assert answer.json() == {"modelId": "alpha", "gpuMemoryFreedMB": done["gpuMemoryUsedMB"], "kvCacheFlushed": True}
    again = await ask(app, "POST", UNLOAD, {"model": "alpha"})
    assert again.json()["gpuMemoryFreedMB"] == 0


async def test_a_load_that_fails_says_why(app: App) -> None:
    failed = await loaded(app, modelId="broken")
    assert (failed["status"], failed["errorCode"]) == ("failed", "model_load_failed") and "broken" in failed["error"]


async def test_none_leaves_for_a_model_that_does_not_fit(app: App) -> None:
    assert (await loaded(app, modelId="alpha"))["status"] == "completed"
    failed = await loaded(app, modelId="huge", evictModel="alpha")
    assert failed["status"] == "failed" and "does not fit" in failed["error"]
    assert app.loop.scheduler.view.slots_of(app.catalog.find("alpha").id)  # type: ignore[union-attr]
    assert (await loaded(app, modelId="beta", evictModel="alpha"))["status"] == "completed"
    assert not app.loop.scheduler.view.slots_of(app.catalog.find("alpha").id)  # type: ignore[union-attr]


async def test_a_quantization_chooses_among_files_or_is_refused_with_what_there_is(app: App) -> None:
    done = await loaded(app, modelId="both-Q8_0.gguf", quantization="q4_k_m", maxContextLength=256)
    assert done["modelId"] == "both-Q8_0.gguf"
    refused = await ask(app, "POST", LOAD, {"modelId": "both-Q8_0.gguf", "quantization": "awq-4bit"})
    assert (refused.status, refused.error["param"]) == (400, "quantization")
    assert "Q4_K_M, Q8_0" in refused.error["message"]


@pytest.mark.parametrize(
    ("order", "status", "words"),
    [
        ({}, 400, "say the model's name"),
        ({"modelId": "a", "model": "b"}, 400, "say the model's name"),
        ({"modelId": "nobody/nothing"}, 404, "library.download"),
        ({"modelId": "alpha", "evictModel": "nothing"}, 404, "nothing"),
        ({"modelId": "alpha", "maxContextLength": 5}, 400, "is configured"),
        ({"modelId": "alpha", "maxContextLength": 0}, 400, "maxContextLength"),
        ({"modelId": "both-Q8_0.gguf", "backend": "ollama"}, 400, "Invalid backend"),
        ({"modelId": "alpha", "strange": 1}, 400, "strange"),
    ],
)
async def test_wrong_orders_are_refused_at_once(app: App, order: dict[str, Any], status: int, words: str) -> None:
    answer = await ask(app, "POST", LOAD, order)
    assert answer.status == status and words in answer.error["message"]


async def test_a_load_by_path_can_be_left_to_itself(app: App) -> None:
    answer = await ask(app, "POST", "/api/v1/models/beta/load?wait=false", {})
    assert answer.status == 202
    assert (await polled(app, answer.json()["taskId"]))["status"] == "completed"


async def test_progress_is_marked_as_estimated_and_an_unload_ends_a_load(app: App) -> None:
    answer = await ask(app, "POST", LOAD, {"modelId": "slow"})
    task = answer.json()["taskId"]
    await until(lambda: bool(app.loop.scheduler.view.slots_of(app.catalog.find("slow").id)))  # type: ignore[union-attr]
    said = (await ask(app, "GET", f"{LOAD}/{task}")).json()
    assert (said["status"], said["estimated"]) == ("loading", True)
    assert (await ask(app, "POST", UNLOAD, {"modelId": "slow"})).status == 200
    assert (await polled(app, task))["status"] == "failed"


async def test_a_load_that_ran_when_the_gateway_shut_down_has_failed_and_is_kept(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"slow": SLOW}) as app:
        task = (await http(app, "POST", LOAD, {"modelId": "slow"})).json()["taskId"]
        await until(lambda: app.operation_table.get(task).status.value == "running")  # type: ignore[union-attr]
    async with gateway(tmp_path, {"slow": SLOW}) as app:
        said = (await http(app, "GET", f"{LOAD}/{task}")).json()
        assert (said["status"], said["errorCode"]) == ("failed", "unloaded")


async def operations(app: App, kind: str) -> list[dict[str, Any]]:
    answer = await ask(app, "GET", f"/api/v1/operations?kind={kind}")
    assert answer.status == 200, answer.body
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


@pytest.mark.parametrize("path", [UNLOAD, "/api/v1/models/alpha/unload"])
async def test_an_unload_is_a_row_of_the_table_whichever_route_ordered_it(app: App, path: str) -> None:
    held = (await loaded(app, modelId="alpha"))["gpuMemoryUsedMB"]
    before = len(await operations(app, "unload"))
    assert (await ask(app, "POST", path, {"modelId": "alpha"} if path == UNLOAD else None)).status == 200
    row, *earlier = await operations(app, "unload")
    assert len(earlier) == before
    assert (row["status"], row["model"], row["key"], row["result"]["gpu_mib"]) == ("done", "alpha", "root", held)


async def test_a_load_that_is_waited_for_is_the_same_kind_of_task(app: App) -> None:
    assert (await ask(app, "POST", "/api/v1/models/alpha/load")).json()["tier"] == "ready"
    row = (await operations(app, "load"))[0]
    assert (row["status"], row["model"]) == ("done", "alpha") and row["result"]["gpu_mib"] > 0
    assert (await ask(app, "GET", f"{LOAD}/{row['id']}")).json()["status"] == "completed"
    failed = await ask(app, "POST", "/api/v1/models/broken/load")
    # The engine's own words are told to the caller that waits, as ever.
    assert (failed.status, failed.error["code"]) == (503, "model_load_failed") and failed.error["details"]
    row = (await operations(app, "load"))[0]
    assert (row["status"], row["error"]["code"], row["result"]) == ("failed", "model_load_failed", None)


async def test_a_load_goes_on_when_the_caller_that_waits_for_it_leaves(app: App) -> None:
    caller = asyncio.create_task(ask(app, "POST", "/api/v1/models/slow/load"))
    await until(lambda: bool(app.loop.scheduler.view.slots_of(app.catalog.find("slow").id)))  # type: ignore[union-attr]
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert (await operations(app, "load"))[0]["status"] == "running"
    assert (await ask(app, "POST", UNLOAD, {"modelId": "slow"})).status == 200
    assert (await operations(app, "load"))[0]["status"] == "failed"


async def test_a_full_disk_keeps_no_model_in_memory(app: App) -> None:
    await loaded(app, modelId="alpha")
    before = len(await operations(app, "unload"))
    with full_disk():
        assert (await ask(app, "POST", UNLOAD, {"modelId": "alpha"})).json()["gpuMemoryFreedMB"] > 0
    assert len(await operations(app, "unload")) == before
