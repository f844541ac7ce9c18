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

from greenroom.app import App
from greenroom.config.diff import diff
from greenroom.core.model import Need
from greenroom.errors import ModelNotFound
from greenroom.library.library import Library
from greenroom.runtime.adhoc_model import ModelOptions
from greenroom.runtime.memory.needs import MeasuredModel
from tests.harness import gateway, tiny, url
from tests.integration.facts import edit
from tests.integration.raw import CHAT, Answer, http
from tests.later import Later
from tests.models import tiny as tiny_model
from tests.models import tiny_hf
from tests.waiting import PATIENCE_S, until

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
    other = tiny(shelf / "models" / "beta" / "beta-Q8_0.gguf")
    edit(shelf, lambda whole: whole["models"].update({"mine.gguf": other}))
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


# --- callers that mean no good, or all at once ------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def low_shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("abuse")
    (folder / "models").mkdir()
    (folder / "more").mkdir()
    for name in ("alpha", "beta"):
        shutil.copy(tiny_model(name), folder / "models" / f"{name}.gguf")
    shutil.copy(tiny_model("delta"), folder / "models" / "new\nline.gguf")
    shutil.copy(tiny_model("gamma"), folder / "more" / "gamma.gguf")
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def abused(low_shelf: Path) -> AsyncIterator[App]:
    library = {"roots": [str(low_shelf / "models"), str(low_shelf / "more")], "adhoc_models_max": 2}
    async with gateway(low_shelf, {"configured": tiny(low_shelf / "models" / "alpha.gguf")}, library=library) as abused:
        yield abused


async def say_here(abused: App, model: str, **more: Any) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **more}
    return await http(abused, "POST", CHAT, body)


@pytest.mark.parametrize("layers", ["--1", "-", "", "-+1", "1" * 5_000, "²"])
async def test_words_that_are_no_number_of_layers_are_refused(abused: App, layers: str) -> None:
    answer = await say_here(abused, "beta.gguf", n_gpu_layers=layers)
    assert (answer.status, answer.error["param"]) == (400, "n_gpu_layers")


async def test_many_at_once_are_answered_or_told_that_there_are_too_many(abused: App) -> None:
    asked = [say_here(abused, f"{'beta' if n % 2 else 'alpha'}.gguf", n_gpu_layers=n % 9) for n in range(60)]
    answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} <= {200, 503}
    assert any(answer.status == 200 for answer in answers)


@pytest.mark.slow
async def test_nothing_is_kept_of_models_that_are_forgotten(abused: App) -> None:
    for layers in range(6):
        assert (await say_here(abused, "beta.gguf", n_gpu_layers=layers)).status == 200
    for layers in range(100, 200):
        await abused.resolver.named("beta.gguf", ModelOptions(n_gpu_layers=layers))
    await until(lambda: len(abused.loop.scheduler.view.slots) <= 2)
    known = {entry.id for entry in abused.catalog}
    assert len(known) == 3
    assert abused.slots._logs.keys() | abused.mover.failures.keys() | abused.catalog._revisions.keys() <= known
    await abused.learned.write()
    assert abused.learned._identities.keys() <= known
    assert len(abused.inference._reader._rewrites) <= 2 * len(known) + 1


async def test_an_id_has_no_control_characters_whatever_the_file_is_called(abused: App) -> None:
    assert "delta says" in (await say_here(abused, "new\nline.gguf", backend="llamacpp")).body.decode()
    assert all(entry.public_id.isprintable() for entry in abused.catalog)


async def test_a_file_that_is_gone_is_not_found_and_one_that_came_in_its_place_is_served(
    abused: App, low_shelf: Path
) -> None:
    repository = low_shelf / "models" / "models--org--name"
    for commit, name in (("a" * 40, "alpha"), ("b" * 40, "beta")):
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        shutil.copy(tiny_model(name), folder / "model.gguf")
        await abused.library.refresh()
        assert f"{name} says" in (await say_here(abused, "org/name")).body.decode(), "an update is served"
    shutil.rmtree(repository)
    await abused.library.refresh()
    assert "beta says" in (await say_here(abused, "org/name")).body.decode(), "what is in memory serves on"
    assert (await http(abused, "POST", "/v1/models/unload", {"modelId": "org/name"})).status == 200
    assert (await say_here(abused, "org/name")).status == 404


def slow_look(abused: App, monkeypatch: pytest.MonkeyPatch, meanwhile: asyncio.Event) -> asyncio.Event:
    """The next look at a model's files waits until `meanwhile` is set. Returns what tells that it waits."""
    loop, looks, need_of = asyncio.get_running_loop(), asyncio.Event(), abused.catalog.needs.need_of

    def slow(model: MeasuredModel) -> tuple[Need, str]:
        need = need_of(model)
        monkeypatch.setattr(abused.catalog.needs, "need_of", need_of)
        loop.call_soon_threadsafe(looks.set)
        asyncio.run_coroutine_threadsafe(meanwhile.wait(), loop).result(PATIENCE_S)
        return need

    monkeypatch.setattr(abused.catalog.needs, "need_of", slow)
    return looks


async def test_a_model_configured_during_a_look_keeps_its_name(
    abused: App, low_shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(tiny_model("alpha"), low_shelf / "models" / "mine.gguf")
    meanwhile = asyncio.Event()
    looks = slow_look(abused, monkeypatch, meanwhile)
    asked = asyncio.create_task(abused.resolver.named(str(low_shelf / "models" / "mine.gguf")))
    await asyncio.wait_for(looks.wait(), PATIENCE_S)
    edit(low_shelf, lambda whole: whole["models"].update({"mine.gguf": tiny(low_shelf / "more" / "gamma.gguf")}))
    await abused.reload()
    meanwhile.set()
    found = await asked
    configured = abused.catalog.find("mine.gguf")
    assert configured is not None and not configured.is_adhoc
    assert found.is_adhoc and found.public_id != "mine.gguf"


async def test_a_root_removed_during_a_look_serves_no_more(
    abused: App, low_shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile = asyncio.Event()
    looks = slow_look(abused, monkeypatch, meanwhile)
    asked = asyncio.create_task(abused.resolver.named("gamma.gguf"))
    await asyncio.wait_for(looks.wait(), PATIENCE_S)
    edit(low_shelf, lambda whole: whole["library"].update({"roots": [str(low_shelf / "models")]}))
    await abused.reload()
    meanwhile.set()
    with pytest.raises(ModelNotFound):
        await asked
    assert abused.catalog.find("gamma.gguf") is None


async def test_a_model_that_leaves_while_a_reload_reads_files_stays_away(abused: App) -> None:
    await abused.resolver.named("beta.gguf")
    draft = abused.catalog.draft(abused.config, diff(abused.config, abused.config))
    for layers in range(300, 303):
        await abused.resolver.named("beta.gguf", ModelOptions(n_gpu_layers=layers))
    abused.catalog.take(draft)
    assert sum(entry.is_adhoc for entry in abused.catalog) == 2


async def test_a_load_never_makes_the_model_itself_leave(abused: App) -> None:
    assert (await say_here(abused, "beta.gguf")).status == 200
    (slot,) = abused.loop.scheduler.view.slots_of((await abused.resolver.named("beta.gguf")).id)
    body = {"modelId": "beta.gguf", "evictModel": "./beta.gguf"}
    answer = await http(abused, "POST", "/v1/models/load", body)
    assert answer.status == 202
    await until(lambda: abused.loads.get(answer.json()["taskId"]).status.is_over)
    assert [slot.id] == [one.id for one in abused.loop.scheduler.view.slots_of(slot.model)]
