"""The library of a running gateway: what is on disk, what is told before its first use, and deleting."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest_asyncio

from greenroom.app import App
from greenroom.config.schema import Ability
from greenroom.library.download_locks import FOLDER, DownloadLocks
from greenroom.library.library import LOOK_TIMES
from greenroom.library.roots import Roots
from tests.harness import fake, gateway, tiny, write_config
from tests.integration.raw import asking, chat, http
from tests.library.hub_cache import add_snapshot, folder_files, put
from tests.models import tiny as tiny_gguf
from tests.models import tiny as tiny_model
from tests.models import tiny_embedding, tiny_hf, tiny_projector
from tests.waiting import until

KEYS = [{"name": "plain", "key": "plain-key"}, {"name": "admin", "key": "admin-key", "admin": True}]
PLAIN = {"Authorization": "Bearer plain-key"}
ADMIN = {"Authorization": "Bearer admin-key"}


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    root = tmp_path / "models"
    put(root / "a.gguf", tiny_gguf("a"))
    put(root / "b.gguf", tiny_gguf("b"))
    add_snapshot(root, "org/name", "c1", folder_files(tiny_hf("c")))
    models = {"alpha": tiny(root / "a.gguf"), "shy": fake("shy", unlisted=True)}
    async with gateway(tmp_path, models, model_roots=[str(root)], server={"api_keys": KEYS}) as app:
        await app.library.looked()
        yield app


async def ask(app: App, method: str, path: str, headers: dict[str, str] = ADMIN, body: Any = None) -> Any:
    answer = await http(app, method, path, body, headers=headers)
    return answer.status, answer.json()


async def test_inventory_shows_paths_to_admins_only(app: App, tmp_path: Path) -> None:
    (tmp_path / "models" / "cut.gguf").write_bytes(b"GGUF")
    await app.library.refresh()
    status, told = await ask(app, "GET", "/v1/models/inventory")
    assert status == 200
    assert {one["id"]: one["kind"] for one in told["data"]} == {
        "a.gguf": "gguf",
        "b.gguf": "gguf",
        "org/name": "safetensors",
    }
    assert {one["path"] for one in told["data"]} >= {str(tmp_path / "models" / "a.gguf")}
    assert [Path(one["path"]).name for one in told["problems"]] == ["cut.gguf"]
    status, told = await ask(app, "GET", "/v1/models/inventory", PLAIN)
    assert status == 200 and len(told["data"]) == 3
    assert str(tmp_path) not in str(told)


async def test_names_that_are_no_text_spoil_no_answer(app: App, tmp_path: Path) -> None:
    root = tmp_path / "models"
    odd = os.fsdecode(b"\xff.gguf")
    (root / odd).write_bytes(b"GGUF")
    put(root / "c", tiny_hf("c"))
    (root / "c" / odd.replace("gguf", "txt")).write_bytes(b"notes")
    await app.library.refresh()
    status, told = await ask(app, "GET", "/v1/models/inventory")
    assert status == 200 and len(told["data"]) == 4 and len(told["problems"]) == 1
    status, told = await ask(app, "DELETE", "/v1/models/inventory/c")
    assert status == 200 and not (root / "c").exists()


async def test_loaded_lists_what_is_in_memory(app: App) -> None:
    assert await ask(app, "GET", "/v1/models/loaded") == (200, {"object": "list", "data": []})
    await ask(app, "POST", "/api/v1/models/shy/load")
    _, told = await ask(app, "GET", "/v1/models/loaded")
    (one,) = told["data"]
    assert (one["id"], one["tier"], one["memory_mib"]) == ("shy", "ready", 100)
    _, told = await ask(app, "GET", "/v1/models/loaded", PLAIN)
    assert told["data"] == []


async def test_stats_count_hits_misses_and_loads(app: App) -> None:
    for _ in range(3):
        await ask(app, "POST", "/v1/chat/completions", body=asking("shy"))
    _, told = await ask(app, "GET", "/v1/models/stats")
    assert (told["hits"], told["misses"], told["loads"], told["hit_rate"]) == (2, 1, 1, 0.6667)
    assert told["load_seconds_mean"] > 0
    by_id = {one["id"]: one for one in told["models"]}
    assert by_id["shy"]["hits"] == 2 and by_id["alpha"]["hit_rate"] is None
    _, told = await ask(app, "GET", "/v1/models/stats", PLAIN)
    assert [one["id"] for one in told["models"]] == ["alpha"]


async def test_new_file_is_found_without_being_asked_for(app: App, tmp_path: Path) -> None:
    put(tmp_path / "models" / "deep" / "new.gguf", tiny_gguf("new"))
    await until(lambda: app.library.find("deep/new.gguf") is not None, every_s=0.05)
    assert LOOK_TIMES.every_s <= 5, "one look follows the other within seconds"


async def test_model_that_nothing_uses_is_deleted(app: App, tmp_path: Path) -> None:
    size = (tmp_path / "models" / "b.gguf").stat().st_size
    status, told = await ask(app, "DELETE", "/v1/models/inventory/b.gguf")
    assert (status, told) == (200, {"id": "b.gguf", "deleted": True, "bytes_freed": size, "unloaded": []})
    assert not (tmp_path / "models" / "b.gguf").exists()
    status, told = await ask(app, "DELETE", "/v1/models/inventory/b.gguf")
    assert status == 404 and told["error"]["code"] == "model_not_found"
    status, _ = await ask(app, "DELETE", "/v1/models/inventory/org%2Fname")
    assert status == 200
    assert [one.name for one in (tmp_path / "models").iterdir()] == ["a.gguf"]


async def test_what_an_update_fetched_is_locked_while_it_is_deleted(app: App, tmp_path: Path) -> None:
    root, path = tmp_path / "models", str(tmp_path / "models" / "b.gguf")
    other = DownloadLocks(lambda: Roots([str(root)]))
    other.mark(path)
    assert other.use(path)
    status, told = await ask(app, "DELETE", "/v1/models/inventory/b.gguf")
    assert status == 409 and "another gateway" in told["error"]["message"]
    other.use_only(())
    status, told = await ask(app, "DELETE", "/v1/models/inventory/b.gguf")
    assert status == 200
    # The mark is taken away under the lock.
    assert not any((root / FOLDER).iterdir())


async def test_configured_model_is_deleted_only_by_force_and_unloaded_first(app: App, tmp_path: Path) -> None:
    status, told = await ask(app, "DELETE", "/v1/models/inventory/a.gguf")
    assert status == 409 and told["error"]["code"] == "model_in_use" and "configured" in told["error"]["message"]
    await ask(app, "POST", "/api/v1/models/alpha/load")
    status, told = await ask(app, "DELETE", "/v1/models/inventory/a.gguf?force=false")
    assert status == 409 and "loaded" in told["error"]["message"]
    assert (tmp_path / "models" / "a.gguf").exists()
    status, told = await ask(app, "DELETE", "/v1/models/inventory/a.gguf?force=true")
    assert status == 200 and told["unloaded"] == ["alpha"]
    _, told = await ask(app, "GET", "/v1/models/loaded")
    assert told["data"] == []
    assert not (tmp_path / "models" / "a.gguf").exists()


async def test_a_model_whose_files_another_one_names_is_deleted_only_by_force(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root / "a.gguf", tiny_gguf("a"))
    folder = add_snapshot(root, "org/name", "c1", {"b.gguf": tiny_gguf("b"), "lora.gguf": b"GGUF"})
    models = {"alpha": {**tiny(root / "a.gguf"), "lora": {str(folder / "lora.gguf"): 1}}}
    async with gateway(tmp_path, models, model_roots=[str(root)]) as app:
        await app.library.looked()
        status, told = await ask(app, "DELETE", "/v1/models/inventory/org%2Fname")
        assert status == 409 and "alpha" in told["error"]["message"]
        assert (folder / "lora.gguf").exists()


async def test_a_revision_whose_content_another_one_has_too_can_be_deleted(tmp_path: Path) -> None:
    root, lora = tmp_path / "models", b"GGUF of both"
    old = add_snapshot(root, "org/name", "c1", {"a.gguf": tiny_gguf("a"), "lora.gguf": lora}, refs=("old",))
    new = add_snapshot(root, "org/name", "c2", {"b.gguf": tiny_gguf("b"), "lora.gguf": lora})
    models = {"alpha": {**tiny(new / "b.gguf"), "lora": {str(new / "lora.gguf"): 1}}}
    async with gateway(tmp_path, models, model_roots=[str(root)]) as app:
        await app.library.looked()
        record = app.library.find(str(old / "a.gguf"))
        assert record is not None
        status, told = await ask(app, "DELETE", f"/v1/models/inventory/{quote(record.id, safe='')}")
        assert status == 200, told
        assert not old.exists() and (new / "lora.gguf").read_bytes() == lora


async def test_a_blob_that_a_configured_model_links_to_is_deleted_only_by_force(tmp_path: Path) -> None:
    root, mine = tmp_path / "models", tmp_path / "mine.gguf"
    folder = add_snapshot(root, "org/name", "c1", {"a.gguf": tiny_gguf("a")})
    mine.symlink_to((folder / "a.gguf").resolve())
    async with gateway(tmp_path, {"alpha": tiny(mine)}, model_roots=[str(root)]) as app:
        await app.library.looked()
        status, told = await ask(app, "DELETE", "/v1/models/inventory/org%2Fname")
        assert status == 409 and "alpha" in told["error"]["message"] and mine.exists()


async def test_only_the_exact_id_deletes(app: App, tmp_path: Path) -> None:
    for name in ("org/name@main", "a", "../models/b.gguf", "%2e%2e/b.gguf", str(tmp_path / "models" / "b.gguf")[1:]):
        status, told = await ask(app, "DELETE", f"/v1/models/inventory/{name}")
        assert status == 404, (name, told)
    assert len(app.library.records) == 3


async def test_roots_follow_a_reload_and_the_library_may_be_empty(app: App, tmp_path: Path) -> None:
    put(tmp_path / "other" / "z.gguf", tiny_gguf("z"))
    keys = {"server": {"api_keys": KEYS}}
    write_config(tmp_path, {"shy": fake("shy")}, model_roots=[str(tmp_path / "other")], **keys)
    await app.reload()
    await until(lambda: [one.id for one in app.library.records] == ["z.gguf"])
    write_config(tmp_path, {"shy": fake("shy")}, **keys)
    await app.reload()
    await until(lambda: not app.library.records)
    assert await ask(app, "GET", "/v1/models/inventory") == (
        200,
        {"object": "list", "data": [], "problems": [], "looking": False},
    )


async def said(app: App, model: str) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    status, _ = await ask(app, "POST", "/v1/chat/completions", PLAIN, body)
    return int(status)


async def test_last_use_of_models_is_known_whether_they_are_configured_or_not(app: App) -> None:
    assert [record.last_used for record in app.library.records] == [None] * 3
    assert (await said(app, "alpha"), await said(app, "b.gguf")) == (200, 200)
    used = {record.id: record.last_used for record in app.library.records}
    assert used["a.gguf"] and used["b.gguf"] and used["org/name"] is None


async def test_deleted_model_that_no_configuration_names_is_not_found_any_more(app: App) -> None:
    assert await said(app, "b.gguf") == 200
    status, told = await ask(app, "DELETE", "/v1/models/inventory/b.gguf")
    assert status == 409 and told["error"]["code"] == "model_in_use"
    status, told = await ask(app, "DELETE", "/v1/models/inventory/b.gguf?force=true")
    assert status == 200 and told["unloaded"] == ["b.gguf"]
    assert await said(app, "b.gguf") == 404


async def test_reload_keeps_models_below_a_root_that_is_a_link(tmp_path: Path) -> None:
    put(tmp_path / "disk" / "a.gguf", tiny_gguf("a"))
    (tmp_path / "models").symlink_to("disk")
    async with gateway(tmp_path, {}, library={"roots": [str(tmp_path / "models")]}) as app:
        assert await said(app, "a.gguf") == 200
        write_config(tmp_path, {"shy": fake("shy")}, library={"roots": [str(tmp_path / "models")]})
        await app.reload()
        _, told = await ask(app, "GET", "/v1/models/loaded")
        assert [one["id"] for one in told["data"]] == ["a.gguf"]


async def test_projector_beside_a_model_is_used(tmp_path: Path) -> None:
    put(tmp_path / "models" / "sees" / "m.gguf", tiny_gguf("m"))
    put(tmp_path / "models" / "sees" / "mmproj-F16.gguf", tiny_projector())
    async with gateway(tmp_path, {}, library={"roots": [str(tmp_path / "models")]}) as app:
        entry = await app.resolver.named("sees")
        assert entry.config.mmproj == str(tmp_path / "models" / "sees" / "mmproj-F16.gguf")
        assert Ability.VISION in (entry.facts.abilities or ())


AWQ = {"quant_method": "awq", "bits": 4}


def packed(folder: Path) -> Path:
    """A folder of Transformers whose config says that its weights are quantized."""
    shutil.copytree(tiny_hf("alpha"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": AWQ}))
    return folder


async def told(app: App, path: str = "/v1/capabilities") -> Any:
    return (await http(app, "GET", path)).json()


async def test_a_gateway_says_what_models_on_disk_can_do_before_their_first_use(tmp_path: Path) -> None:
    (tmp_path / "shelf" / "eyes").mkdir(parents=True)
    shutil.copy(tiny_model("alpha"), tmp_path / "shelf" / "eyes" / "alpha.gguf")
    shutil.copy(tiny_projector(), tmp_path / "shelf" / "eyes" / "mmproj.gguf")
    shutil.copy(tiny_embedding(), tmp_path / "shelf" / "bag.gguf")
    packed(tmp_path / "shelf" / "packed")
    async with gateway(tmp_path, {}, library={"roots": [str(tmp_path / "shelf")]}) as app:
        await until(lambda: len(app.library.records) == 3, "the disk was looked at")
        answer = await told(app)
        assert answer["models"]["loaded"] == [] and len(answer["models"]["available"]) == 3
        can = answer["capabilities"]
        assert can["byModel"] == {
            "bag.gguf": ["embeddings"],
            "eyes/alpha.gguf": ["chat", "completions", "vision"],
            "packed": ["chat", "completions"],
        }
        assert (can["streaming"], can["prefixCaching"], can["visionInput"]) == (True, True, True)
        assert (can["audioInput"], can["functionCalling"]) == (False, False), "none of them hears, or calls tools"
        cards = {card["id"]: card for card in (await told(app, "/v1/models"))["data"]}
        assert {name: card["capabilities"] for name, card in cards.items()} == can["byModel"]
        kinds = {name: card["meta"]["quantization"] for name, card in cards.items()}
        assert kinds == {"bag.gguf": "F16", "eyes/alpha.gguf": "F16", "packed": "awq-4bit"}
    # The next run knows it from the last one.
    async with gateway(tmp_path, {}, library={"roots": [str(tmp_path / "shelf")]}) as app:
        await until(lambda: len(app.library.records) == 3, "the disk was looked at")
        assert app.library.work_done[1] == 0 and (await told(app))["capabilities"] == can


async def test_quantization_is_told_where_files_tell_it(tmp_path: Path) -> None:
    models = {
        "gguf": tiny(tiny_model("alpha")),
        "folder": {"engine": "transformers", "path": str(packed(tmp_path / "packed"))},
        "plain": {"engine": "transformers", "path": str(tiny_hf("alpha")), "dtype": "bfloat16"},
        "command": fake("command"),
    }
    expected = {"gguf": "F16", "folder": "awq-4bit", "plain": "bf16", "command": None}
    async with gateway(tmp_path, models) as app:
        cards = (await told(app, "/v1/models"))["data"]
        assert {card["id"]: card["meta"]["quantization"] for card in cards} == expected
        views = (await told(app, "/api/v1/models"))["models"]
        assert {view["id"]: view["quantization"] for view in views} == expected
        assert (await chat(app, "gguf", max_tokens=1)).status == 200
        (loaded,) = (await told(app))["models"]["loaded"]
        assert (loaded["id"], loaded["quantization"]) == ("gguf", "F16")
