"""Models that no configuration names: asked for by path, by id and by hub id, on the real llama.cpp."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from greenroom.app import App
from greenroom.library.library import Library
from tests.harness import gateway, tiny, url
from tests.integration.raw import CHAT, Answer, http
from tests.later import Later
from tests.models import tiny as tiny_model
from tests.models import tiny_hf
from tests.waiting import until

openai = Later("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADMIN, USER = "an-admin", "a-user"
KEYS = [{"name": "root", "key": ADMIN, "admin": True}, {"name": "someone", "key": USER}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adhoc")
    root = folder / "models"
    (root / "beta").mkdir(parents=True)
    (root / "empty").mkdir()
    shutil.copy(tiny_model("alpha"), root / "alpha.gguf")
    shutil.copy(tiny_model("beta"), root / "beta" / "beta-Q8_0.gguf")
    snapshot = root / "models--org--gamma" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (root / "models--org--gamma" / "refs").mkdir()
    (root / "models--org--gamma" / "refs" / "main").write_text(snapshot.name)
    shutil.copy(tiny_model("gamma"), snapshot / "gamma-F16.gguf")
    shutil.copy(tiny_model("alpha"), folder / "outside.gguf")
    (root / "link.gguf").symlink_to(folder / "outside.gguf")
    os.mkfifo(root / "fifo.gguf")
    shutil.copytree(tiny_hf("alpha"), root / "folder")
    (root / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(shelf: Path) -> AsyncIterator[App]:
    library = {"roots": [str(shelf / "models")], "adhoc_models_max": 5}
    models = {"configured": tiny(shelf / "outside.gguf", aliases=["usual"])}
    async with gateway(shelf, models, library=library, server={"api_keys": KEYS}) as app:
        yield app


async def say(app: App, model: str, key: str = USER, **more: Any) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **more}
    return await post(app, CHAT, body, key)


async def post(app: App, path: str, body: dict[str, Any], key: str = ADMIN) -> Answer:
    return await http(app, "POST", path, body, headers={"authorization": f"Bearer {key}"})


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    said: str = answer.json()["choices"][0]["message"]["content"]
    return said


def adhoc(app: App) -> list[str]:
    return [entry.public_id for entry in app.catalog if entry.is_adhoc]


async def test_a_path_an_id_and_a_hub_id_name_models_and_the_answer_repeats_the_name(app: App, shelf: Path) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url(app)}/v1", api_key=USER)
    names = {
        str(shelf / "models" / "alpha.gguf"): "alpha",
        "alpha.gguf": "alpha",
        "beta": "beta",
        str(shelf / "models" / "beta"): "beta",
        "org/gamma": "gamma",
        "usual": "alpha",
    }
    for name, who in names.items():
        answer = await client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=8
        )
        assert f"{who} says" in (answer.choices[0].message.content or "")
        assert answer.model == (name if name != "usual" else "configured")
    await client.close()
    known = [id for id in adhoc(app) if id.startswith(("alpha", "beta", "org/gamma"))]
    assert sorted(known) == ["alpha.gguf", "beta/beta-Q8_0.gguf", "org/gamma"], "each once, whatever it was called"


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside.gguf", "./../outside.gguf", "/nowhere/x.gguf", "~/x.gguf"])
async def test_paths_that_are_not_below_a_root_do_not_exist(app: App, name: str) -> None:
    answer = await say(app, name)
    assert answer.status == 404
    assert answer.error["message"] == f"Model path does not exist: {name}"
    assert (answer.error["type"], answer.error["param"]) == ("not_found_error", "model")


async def test_links_that_lead_out_and_pipes_are_no_models(app: App, shelf: Path) -> None:
    for name in ("link.gguf", "fifo.gguf"):
        assert (await say(app, name)).status == 404
        assert (await say(app, str(shelf / "models" / name))).status == 404


async def test_only_admins_learn_where_was_looked(app: App, shelf: Path) -> None:
    for name in ("/nowhere/x.gguf", "org/nothing"):
        assert str(shelf).encode() not in (await say(app, name)).body
        assert str(shelf / "models") in (await say(app, name, ADMIN)).error["details"]


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"backend": "ollama"}, "Invalid backend: must be llamacpp, transformers,", "backend"),
        ({"backend": 7}, "backend is a string", "backend"),
        ({"device": "tpu"}, "device is cuda or cpu", "device"),
        ({"n_gpu_layers": -2}, "n_gpu_layers is a whole number", "n_gpu_layers"),
        ({"n_gpu_layers": True}, "n_gpu_layers is a whole number", "n_gpu_layers"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is a number", "gpu_memory_utilization"),
        ({"ttl": -1}, "ttl is a number of seconds", "ttl"),
        ({"backend": "transformers", "n_gpu_layers": 3}, "transformers does not take", "n_gpu_layers"),
    ],
)
async def test_wrong_options_are_refused_by_name(app: App, more: dict[str, Any], message: str, param: str) -> None:
    answer = await say(app, "alpha.gguf", **more)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]


@pytest.mark.parametrize(
    ("name", "more", "status", "words"),
    [
        ("empty", {}, 400, "Field 'backend' is required"),
        ("alpha.gguf", {"backend": "invalid"}, 400, "Invalid backend: must be"),
        ("/models/nonexistent", {"backend": "llamacpp"}, 404, "Model path does not exist: /models/nonexistent"),
        ("folder", {"backend": "vllm"}, 503, "vllm"),
        ("broken.gguf", {"backend": "llamacpp"}, 503, "could not be loaded"),
    ],
)
async def test_each_error_has_its_status_and_words(
    app: App, name: str, more: dict[str, Any], status: int, words: str
) -> None:
    answer = await say(app, name, ADMIN, **more)
    assert answer.status == status, answer.body
    assert words in answer.error["message"]
    assert answer.error["type"] == {400: "invalid_request_error", 404: "not_found_error"}.get(status, "engine_error")


async def test_a_damaged_file_is_called_so_and_admins_learn_why(app: App, shelf: Path) -> None:
    (shelf / "models" / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    answer = await say(app, "damaged.gguf", ADMIN)
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "damaged or incomplete" in answer.error["message"] and answer.error["details"]
    assert (await say(app, "damaged.gguf")).error["details"] is None


async def test_options_make_another_configuration_and_only_one_of_a_path_is_in_memory(app: App) -> None:
    assert "alpha says" in text(await say(app, "alpha.gguf"))
    assert "alpha says" in text(await say(app, "alpha.gguf", device="cpu", ttl=0))
    # Said again in other words: the backend that is inferred anyway, a number of seconds.
    assert "alpha says" in text(await say(app, "alpha.gguf", device="cpu", backend="llamacpp", ttl=60))
    assert adhoc(app).count("alpha.gguf") == 2
    entry = app.catalog.find("alpha.gguf")
    assert entry is not None and entry.config.device == "cpu", "its name means what was asked for last"
    assert entry.spec.ttl_s == 60, "the last that was said counts, and the process stayed"
    serving = [slot for slot in app.loop.scheduler.view.slots.values() if slot.is_serving]
    assert [slot.model for slot in serving if slot.spec.exclusive == entry.real_path] == [entry.id]


@pytest.mark.slow
async def test_a_hundred_mixed_requests_never_have_both_in_memory(app: App) -> None:
    seen: list[int] = []

    async def watch() -> None:
        while True:
            slots = app.loop.scheduler.view.slots.values()
            seen.append(sum(slot.model.startswith("alpha.gguf") for slot in slots if slot.tier.value != "cold"))
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    asked = [say(app, "alpha.gguf", **({"device": "cpu"} if number % 3 == 0 else {})) for number in range(100)]
    answers = await asyncio.gather(*asked)
    watching.cancel()
    assert all("alpha says" in text(answer) for answer in answers)
    assert max(seen) == 1


@pytest.mark.slow
async def test_the_one_not_used_for_longest_makes_room(app: App) -> None:
    for layers in range(7):
        assert "beta says" in text(await say(app, "beta", device="cpu", n_gpu_layers=layers))
    assert len(adhoc(app)) == 5 and [*app.catalog][-1].config.n_gpu_layers == 6
    assert "alpha says" in text(await say(app, "alpha.gguf")), "one that left comes back"


async def test_a_new_file_can_be_asked_for_at_once_and_a_changed_one_is_looked_at_again(app: App, shelf: Path) -> None:
    shutil.copy(tiny_model("delta"), shelf / "models" / "new.gguf")
    assert "delta says" in text(await say(app, "new.gguf"))
    before = app.catalog.find("new.gguf")
    shutil.copy(tiny_model("alpha", layers=4), shelf / "models" / "other.gguf")
    os.replace(shelf / "models" / "other.gguf", shelf / "models" / "new.gguf")
    await app.library.refresh()
    assert "alpha says" in text(await say(app, "new.gguf"))
    after = app.catalog.find("new.gguf")
    assert before is not None and after is not None and after.spec.revision > before.spec.revision


async def test_a_reload_keeps_them_and_a_configured_model_takes_its_name_over(app: App, shelf: Path) -> None:
    shutil.copy(tiny_model("alpha"), shelf / "models" / "mine.gguf")
    assert "gamma says" in text(await say(app, "org/gamma"))
    assert "alpha says" in text(await say(app, "mine.gguf"))
    file = shelf / "greenroom.yaml"
    whole = yaml.safe_load(file.read_text())
    whole["models"]["mine.gguf"] = tiny(shelf / "models" / "beta" / "beta-Q8_0.gguf")
    file.write_text(yaml.safe_dump(whole))
    await app.reload()
    assert "org/gamma" in adhoc(app) and "mine.gguf" not in adhoc(app)
    assert "gamma says" in text(await say(app, "org/gamma"))
    assert "beta says" in text(await say(app, "mine.gguf"))
    assert "alpha says" in text(await say(app, str(shelf / "models" / "mine.gguf"))), "by its path it is still there"


async def test_operators_order_them_about_by_any_name(app: App) -> None:
    answer = await post(app, "/api/v1/models/beta/load", {})
    assert answer.status == 200 and answer.json()["model"] == "beta/beta-Q8_0.gguf"
    answer = await post(app, "/api/v1/explain", {"model": "org/gamma"})
    assert answer.status == 200
    answer = await post(app, "/api/v1/models/beta/beta-Q8_0.gguf/unload", {})
    assert answer.status == 200
    entry = app.catalog.find(answer.json()["model"])
    assert entry is not None and not app.loop.scheduler.view.slots_of(entry.id)
    assert (await post(app, "/api/v1/models/nothing/load", {})).status == 404


async def test_a_request_before_the_first_look_waits(
    tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Library.refresh

    async def late(library: Library) -> None:
        await asyncio.sleep(0.5)
        await look(library)

    monkeypatch.setattr(Library, "refresh", late)
    async with gateway(tmp_path, {}, library={"roots": [str(shelf / "models")]}) as app:
        assert (await say(app, "org/nothing")).status == 404
    async with gateway(tmp_path, {}, library={"roots": [str(shelf / "models")]}) as app:
        assert "gamma says" in text(await say(app, "org/gamma"))


async def test_without_roots_only_what_is_configured_is_served(tmp_path: Path) -> None:
    shutil.copy(tiny_model("alpha"), tmp_path / "alpha.gguf")
    async with gateway(tmp_path, {}) as app:
        answer = await say(app, str(tmp_path / "alpha.gguf"))
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")


@pytest.mark.slow
async def test_a_model_whose_files_are_gone_leaves_the_list_once_it_is_not_in_memory(app: App, shelf: Path) -> None:
    shutil.copy(tiny_model("beta"), shelf / "models" / "passing.gguf")
    assert (await say(app, "passing.gguf")).status == 200
    (shelf / "models" / "passing.gguf").unlink()
    await app.library.refresh()
    # What is in memory serves on.
    assert "passing.gguf" in adhoc(app) and (await say(app, "passing.gguf")).status == 200
    assert (await post(app, "/v1/models/unload", {"modelId": "passing.gguf"})).status == 200
    await until(lambda: "passing.gguf" not in adhoc(app))
    missing = await say(app, "passing.gguf")
    assert missing.status == 404 and "`greenroom models`" in missing.error["message"]
