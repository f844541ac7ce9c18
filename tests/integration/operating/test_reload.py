"""A changed configuration is applied as a difference, under load: what did not change does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind, Need
from greenroom.errors import ConfigError
from greenroom.process import proc
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.needs import MeasuredModel
from greenroom.runtime.timeouts import Timeouts
from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest, counters, edit, is_loading, pids
from tests.integration.faults import rest_of
from tests.integration.raw import Answer, Raw, asking, chat, http
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"stream": True, "tokens": 60, "token_s": 0.02}


def put(name: str, model: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda said: said["models"].update({name: model})


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda said: said["models"].pop(name)


async def streaming(app: App, model: str, **more: Any) -> Raw:
    """A long answer under way."""
    raw = await Raw.open(app)
    raw.ask(asking(model, **{**LONG, **more}))
    assert (await raw.head())[0] == 200
    return raw


async def end_of(stream: Raw) -> Answer:
    """What comes after the head. The connection is left then."""
    answer = await rest_of(stream)
    stream.leave()
    return answer


def is_alive(pid: int) -> bool:
    return proc.stat(pid) is not None


# --- one change at a time -------------------------------------------------------------------------------------------


async def test_unchanged_model_keeps_its_process_and_its_running_answer(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"kept": fake("kept"), "other": fake("other")}) as app:
        stream = await streaming(app, "kept")
        before = pids(app, "kept")
        edit(tmp_path, put("other", fake("other", "--tokens", "2")))
        edit(tmp_path, put("new", fake("new")))
        answer = await http(app, "POST", "/api/v1/reload")
        assert (answer.status, answer.json()["changed"], answer.json()["added"]) == (200, ["other"], ["new"])
        assert pids(app, "kept") == before
        assert (await end_of(stream)).text.startswith("kept 1 2")
        assert (await chat(app, "other")).text == "other 1"
        assert (await chat(app, "new")).text == "new 1 2 3"
        assert pids(app, "kept") == before


async def test_changed_model_drains_beside_its_successor(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"edited": fake("first")}) as app:
        stream = await streaming(app, "edited", token_s=0.1)
        (old,) = pids(app, "edited")
        edit(tmp_path, put("edited", fake("second")))
        changes = await app.reload()
        assert changes.changed == ("edited",)
        # The new one serves while the old one still answers.
        assert (await chat(app, "edited")).text == "second 1 2 3"
        assert is_alive(old)
        assert (await end_of(stream)).text.startswith("first 1 2")
        await until(lambda: not is_alive(old), "the old engine is gone")
        assert len(pids(app, "edited")) == 1


async def test_changed_model_that_does_not_fit_beside_itself_waits_for_its_own_leaving(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"edited": fake("first", *journal.switches)}, budget_mib=150) as app:
        stream = await streaming(app, "edited", tokens=20)
        edit(tmp_path, put("edited", fake("second", *journal.switches)))
        await app.reload()
        answer, old = await asyncio.gather(chat(app, "edited"), end_of(stream))
        assert (answer.text, old.text[:7]) == ("second 1 2 3", "first 1")
    assert [line["name"] for line in journal.lines("start", "term")] == ["first", "first", "second", "second"]


async def test_load_of_a_changed_model_is_not_waited_for(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    slow = fake("first", *journal.switches, "--load-s", "60")
    async with gateway(tmp_path, {"edited": slow}) as app:
        asked = asyncio.create_task(chat(app, "edited"))
        await until(lambda: is_loading(app, "edited"), "loading")
        edit(tmp_path, put("edited", fake("second", *journal.switches)))
        await app.reload()
        assert (await asked).text == "second 1 2 3"


async def test_removed_model_is_not_found_and_its_process_goes(tmp_path: Path) -> None:
    models = {"kept": fake("kept"), "gone": fake("gone", concurrency=1), "cold": fake("cold", "--load-s", "60")}
    async with gateway(tmp_path, models) as app:
        stream = await streaming(app, "gone", tokens=20)
        (old,) = pids(app, "gone")
        waiting = [asyncio.create_task(chat(app, model)) for model in ("gone", "cold")]
        await until(lambda: counters(app)["waiting"] == 2, "one waits for each")
        for name in ("gone", "cold"):
            edit(tmp_path, drop(name))
        assert (await app.reload()).removed == ("cold", "gone")
        for answer in (*await asyncio.gather(*waiting), await chat(app, "gone")):
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert (await end_of(stream)).text.startswith("gone 1 2"), "what runs may finish"
        await until(lambda: not is_alive(old) and not app.loop.scheduler.state.slots, "both are gone")
        assert (await http(app, "GET", "/api/v1/models/gone/logs")).status == 404
        await at_rest(app)


async def test_relabelled_model_keeps_its_process(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"model": fake("model")}) as app:
        stream = await streaming(app, "model", tokens=20)
        before = pids(app, "model")
        edit(tmp_path, put("model", fake("model", aliases=["also"], use_model_name="inside", description="new words")))
        assert (await app.reload()).relabelled == ("model",)
        assert (await chat(app, "also")).text == "model 1 2 3"
        assert (await http(app, "GET", "/v1/models/also")).json()["description"] == "new words"
        assert (await end_of(stream)).text.startswith("model 1 2")
        assert pids(app, "model") == before
        edit(tmp_path, put("model", fake("model")))
        await app.reload()
        assert (await chat(app, "also")).status == 404


async def test_new_stop_timeout_counts_for_an_engine_that_runs_already(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"deaf": fake("deaf", "--ignore-term", stop_timeout_s=120)}) as app:
        await chat(app, "deaf")
        edit(tmp_path, put("deaf", fake("deaf", "--ignore-term", stop_timeout_s=0.2)))
        assert (await app.reload()).relabelled == ("deaf",)
        async with asyncio.timeout(60):
            await app.operations.move(MoveKind.UNLOAD, ModelId("deaf"))


async def test_server_keys_count_from_the_next_request_on(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"model": fake("model", "--load-s", "1")}) as app:
        edit(tmp_path, lambda said: said["server"].update(wait_max_s=0.1, api_keys=[{"name": "me", "key": "secret"}]))
        assert (await app.reload()).at_once == ("server.api_keys", "server.wait_max_s")
        assert (await chat(app, "model")).status == 401
        answer = await chat(app, "model", headers={"Authorization": "Bearer secret"})
        assert (answer.status, answer.error["code"]) == (503, "model_loading")


# --- files that cannot be used --------------------------------------------------------------------------------------

BAD_FILES = {
    "empty": b"",
    "only spaces": b"  \n\n",
    "not YAML": b"models: {a: [}\n",
    "half a key": b"server:\n  port: 0\nmodels:\n  model:\n    cm",
    "half a value": b'models:\n  model:\n    cmd: "python',
    "unknown key": b"models:\n  model:\n    cmd: x ${PORT}\n    memry_mib: 3\n",
    "not a mapping": b"- 1\n- 2\n",
    "not text": b"\xff\xfe\x00models",
    "two models of one name": b"models:\n  a: {cmd: 'x ${PORT}'}\n  a: {cmd: 'y ${PORT}'}\n",
    "unknown macro": b"models:\n  a: {cmd: 'x ${PORT} ${nothing}'}\n",
}


async def test_file_that_cannot_be_used_changes_nothing_and_says_where(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"model": fake("model")}) as app:
        stream = await streaming(app, "model")
        config, before, path = app.config, pids(app, "model"), tmp_path / "greenroom.yaml"
        for what, content in BAD_FILES.items():
            path.write_bytes(content)
            answer = await http(app, "POST", "/api/v1/reload")
            assert (answer.status, answer.error["code"]) == (422, "invalid_config"), what
            assert answer.error["message"].startswith(f"{path}:"), what
            assert what in ("empty", "only spaces", "not text") or answer.error["message"][len(str(path)) + 1].isdigit()
            assert app.config is config, what
            assert pids(app, "model") == before, what
        path.unlink()
        with pytest.raises(ConfigError, match=r"greenroom\.yaml"):
            await app.reload()
        assert (await end_of(stream)).text.startswith("model 1 2")
        assert (await chat(app, "model")).text == "model 1 2 3"


async def test_reload_that_breaks_half_way_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("the disk is gone")

    async with gateway(tmp_path, {"one": fake("one")}, server={"wait_max_s": 50}) as app:
        edit(tmp_path, put("two", fake("two")))
        edit(tmp_path, lambda said: said["server"].update(wait_max_s=60))
        with monkeypatch.context() as patch:
            patch.setattr("greenroom.runtime.catalogue.engine_for", broken)
            with pytest.raises(OSError, match="the disk is gone"):
                await app.reload()
        assert list(app.config.models) == ["one"]
        assert app.inference.settings.wait_max_s == 50
        # The same file is still new to it.
        assert (await app.reload()).added == ("two",)
        assert app.inference.settings.wait_max_s == 60
        assert (await chat(app, "two")).status == 200


async def test_keys_that_only_a_restart_can_change_are_refused_and_nothing_else_is_applied(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"model": fake("model")}) as app:
        edit(tmp_path, lambda said: said["server"].update(port=1))
        edit(tmp_path, lambda said: said.update(gpus=[{"memory_mib": 77}]))
        edit(tmp_path, put("new", fake("new")))
        with pytest.raises(ConfigError, match=r"restart.*gpus, server\.port"):
            await app.reload()
        assert (await chat(app, "new")).status == 404
        assert (await chat(app, "model")).status == 200


# --- many at once ---------------------------------------------------------------------------------------------------

RELOADS = 50


async def test_50_reloads_of_good_and_truncated_files_under_load_leave_everything_right(tmp_path: Path) -> None:
    models = {"steady": fake("steady"), "edited": fake("edited-0"), "visitor": fake("visitor")}
    async with gateway(tmp_path, models) as app:
        assert (await chat(app, "steady")).status == 200
        before = pids(app, "steady")
        stream = await streaming(app, "steady", tokens=100_000, token_s=0.01)
        load = Load(app)
        refused = await reload_often(app, tmp_path)
        answers = await load.stop()
        assert refused == RELOADS // 2
        assert {answer.text for answer in answers["steady"]} == {"steady 1 2 3"}
        assert all(answer.text.startswith("edited-") for answer in answers["edited"])
        assert {answer.status for answer in answers["visitor"]} <= {200, 404}
        # The last good file is the one that counts.
        assert (await chat(app, "edited")).text == f"edited-{RELOADS - 2} 1 2 3"
        assert (await chat(app, "visitor")).status == 404
        assert pids(app, "steady") == before
        assert counters(app)["grants"] == 1, "the long answer has gone on all the while"
        stream.leave()
        await at_rest(app)
        await until(lambda: len(app.loop.scheduler.state.slots) == len(app.slots.live) == 2, "only two engines live")
        assert app.mover.moving == 0
        gc.collect()
        kept = [entry for entry in gc.get_objects() if isinstance(entry, Entry) and entry.id == "edited"]
        assert len(kept) == 1, "nothing of the earlier revisions is kept"


class Load:
    """Callers who ask for each model, again and again, until they are told to stop."""

    def __init__(self, app: App) -> None:
        self._stopped = False
        self._callers = {
            name: [asyncio.create_task(self._ask(app, name)) for _ in range(3)]
            for name in ("steady", "edited", "visitor")
        }

    async def _ask(self, app: App, model: str) -> list[Answer]:
        answers = []
        while not self._stopped:
            answers.append(await chat(app, model))
        return answers

    async def stop(self) -> dict[str, list[Answer]]:
        self._stopped = True
        found = {name: await asyncio.gather(*callers) for name, callers in self._callers.items()}
        return {name: [answer for answers in lists for answer in answers] for name, lists in found.items()}


async def reload_often(app: App, folder: Path) -> int:
    """Alternate between a good file, with another process for `edited`, and a truncated one. How many were refused."""
    refused = 0
    path = folder / "greenroom.yaml"
    for number in range(RELOADS):
        if number % 2:
            good = path.read_bytes()
            path.write_bytes(good[: good.rindex(b"cmd:") + 2])
            with pytest.raises(ConfigError, match=r"greenroom\.yaml:\d+"):
                await app.reload()
            refused += 1
            path.write_bytes(good)
            continue
        edit(folder, put("edited", fake(f"edited-{number}")))
        edit(
            folder, put("visitor", fake("visitor")) if number % 4 else lambda said: said["models"].pop("visitor", None)
        )
        await app.reload()
    return refused


@pytest.mark.slow
async def test_unreadable_model_files_stop_a_reload_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_answering = threading.Event()
    async with gateway(tmp_path, {"a": fake("a")}, timeouts=Timeouts(look_at_models_s=2.0)) as app:
        need_of = app.catalog.needs.need_of

        def hangs(entry: MeasuredModel) -> tuple[Need, str]:
            is_answering.wait(PATIENCE_S)
            return need_of(entry)

        monkeypatch.setattr(app.catalog.needs, "need_of", hangs)
        edit(tmp_path, put("b", fake("b")))
        reloading = asyncio.ensure_future(app.reload())
        assert (await chat(app, "a")).status == 200
        with pytest.raises(ConfigError, match=r"could not be looked at within 2 s, and nothing was changed"):
            await asyncio.wait_for(reloading, PATIENCE_S)
        assert app.catalog.find("b") is None
        is_answering.set()

        async def is_reloaded() -> bool:
            # The limit is short for a good look, too, where the machine is busy.
            with contextlib.suppress(ConfigError):
                await app.reload()
            return app.catalog.find("b") is not None

        await until(is_reloaded)
        assert (await chat(app, "b")).status == 200
