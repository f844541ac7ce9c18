"""Models that no configuration names, asked for by callers that mean no good, or all at once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from greenroom.app import App
from greenroom.config.diff import diff
from greenroom.core.model import Need
from greenroom.errors import ModelNotFound
from greenroom.runtime.adhoc_model import ModelOptions
from greenroom.runtime.memory.needs import MeasuredModel
from tests.harness import gateway, tiny
from tests.integration.raw import CHAT, Answer, http
from tests.models import tiny as tiny_model
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("abuse")
    (folder / "models").mkdir()
    (folder / "more").mkdir()
    for name in ("alpha", "beta"):
        shutil.copy(tiny_model(name), folder / "models" / f"{name}.gguf")
    shutil.copy(tiny_model("delta"), folder / "models" / "new\nline.gguf")
    shutil.copy(tiny_model("gamma"), folder / "more" / "gamma.gguf")
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(shelf: Path) -> AsyncIterator[App]:
    library = {"roots": [str(shelf / "models"), str(shelf / "more")], "adhoc_models_max": 2}
    async with gateway(shelf, {"configured": tiny(shelf / "models" / "alpha.gguf")}, library=library) as app:
        yield app


async def say(app: App, model: str, **more: Any) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **more}
    return await http(app, "POST", CHAT, body)


@pytest.mark.parametrize("layers", ["--1", "-", "", "-+1", "1" * 5_000, "²"])
async def test_words_that_are_no_number_of_layers_are_refused(app: App, layers: str) -> None:
    answer = await say(app, "beta.gguf", n_gpu_layers=layers)
    assert (answer.status, answer.error["param"]) == (400, "n_gpu_layers")


async def test_many_at_once_are_answered_or_told_that_there_are_too_many(app: App) -> None:
    asked = [say(app, f"{'beta' if n % 2 else 'alpha'}.gguf", n_gpu_layers=n % 9) for n in range(60)]
    answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} <= {200, 503}
    assert any(answer.status == 200 for answer in answers)


@pytest.mark.slow
async def test_nothing_is_kept_of_models_that_are_forgotten(app: App) -> None:
    for layers in range(6):
        assert (await say(app, "beta.gguf", n_gpu_layers=layers)).status == 200
    for layers in range(100, 200):
        await app.resolver.named("beta.gguf", ModelOptions(n_gpu_layers=layers))
    await until(lambda: len(app.loop.scheduler.view.slots) <= 2)
    known = {entry.id for entry in app.catalog}
    assert len(known) == 3
    assert app.slots._logs.keys() | app.mover.failures.keys() | app.catalog._revisions.keys() <= known
    await app.learned.write()
    assert app.learned._identities.keys() <= known
    assert len(app.inference._reader._rewrites) <= 2 * len(known) + 1


async def test_an_id_has_no_control_characters_whatever_the_file_is_called(app: App) -> None:
    assert "delta says" in (await say(app, "new\nline.gguf", backend="llamacpp")).body.decode()
    assert all(entry.public_id.isprintable() for entry in app.catalog)


async def test_a_file_that_is_gone_is_not_found_and_one_that_came_in_its_place_is_served(app: App, shelf: Path) -> None:
    repository = shelf / "models" / "models--org--name"
    for commit, name in (("a" * 40, "alpha"), ("b" * 40, "beta")):
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        shutil.copy(tiny_model(name), folder / "model.gguf")
        await app.library.refresh()
        assert f"{name} says" in (await say(app, "org/name")).body.decode(), "an update is served"
    shutil.rmtree(repository)
    await app.library.refresh()
    assert "beta says" in (await say(app, "org/name")).body.decode(), "what is in memory serves on"
    assert (await http(app, "POST", "/v1/models/unload", {"modelId": "org/name"})).status == 200
    assert (await say(app, "org/name")).status == 404


def slow_look(app: App, monkeypatch: pytest.MonkeyPatch, meanwhile: asyncio.Event) -> asyncio.Event:
    """The next look at a model's files waits until `meanwhile` is set. Returns what tells that it waits."""
    loop, looks, need_of = asyncio.get_running_loop(), asyncio.Event(), app.catalog.needs.need_of

    def slow(model: MeasuredModel) -> tuple[Need, str]:
        need = need_of(model)
        monkeypatch.setattr(app.catalog.needs, "need_of", need_of)
        loop.call_soon_threadsafe(looks.set)
        asyncio.run_coroutine_threadsafe(meanwhile.wait(), loop).result(PATIENCE_S)
        return need

    monkeypatch.setattr(app.catalog.needs, "need_of", slow)
    return looks


async def test_a_model_configured_during_a_look_keeps_its_name(
    app: App, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(tiny_model("alpha"), shelf / "models" / "mine.gguf")
    meanwhile = asyncio.Event()
    looks = slow_look(app, monkeypatch, meanwhile)
    asked = asyncio.create_task(app.resolver.named(str(shelf / "models" / "mine.gguf")))
    await asyncio.wait_for(looks.wait(), PATIENCE_S)
    await change(app, shelf, lambda whole: whole["models"].update({"mine.gguf": tiny(shelf / "more" / "gamma.gguf")}))
    meanwhile.set()
    found = await asked
    configured = app.catalog.find("mine.gguf")
    assert configured is not None and not configured.is_adhoc
    assert found.is_adhoc and found.public_id != "mine.gguf"


async def test_a_root_removed_during_a_look_serves_no_more(
    app: App, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile = asyncio.Event()
    looks = slow_look(app, monkeypatch, meanwhile)
    asked = asyncio.create_task(app.resolver.named("gamma.gguf"))
    await asyncio.wait_for(looks.wait(), PATIENCE_S)
    await change(app, shelf, lambda whole: whole["library"].update({"roots": [str(shelf / "models")]}))
    meanwhile.set()
    with pytest.raises(ModelNotFound):
        await asked
    assert app.catalog.find("gamma.gguf") is None


async def test_a_model_that_leaves_while_a_reload_reads_files_stays_away(app: App) -> None:
    await app.resolver.named("beta.gguf")
    draft = app.catalog.draft(app.config, diff(app.config, app.config))
    for layers in range(300, 303):
        await app.resolver.named("beta.gguf", ModelOptions(n_gpu_layers=layers))
    app.catalog.take(draft)
    assert sum(entry.is_adhoc for entry in app.catalog) == 2


async def test_a_load_never_makes_the_model_itself_leave(app: App) -> None:
    assert (await say(app, "beta.gguf")).status == 200
    (slot,) = app.loop.scheduler.view.slots_of((await app.resolver.named("beta.gguf")).id)
    body = {"modelId": "beta.gguf", "evictModel": "./beta.gguf"}
    answer = await http(app, "POST", "/v1/models/load", body)
    assert answer.status == 202
    await until(lambda: app.loads.get(answer.json()["taskId"]).status.is_over)
    assert [slot.id] == [one.id for one in app.loop.scheduler.view.slots_of(slot.model)]


async def change(app: App, shelf: Path, edit: Any) -> None:
    file = shelf / "greenroom.yaml"
    whole = yaml.safe_load(file.read_text())
    edit(whole)
    file.write_text(yaml.safe_dump(whole))
    await app.reload()
