"""How things end: shutdown, unload, idleness. And what stays: pinned models, preloaded ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.runtime.timeouts import Timeouts
from tests.harness import fake, gateway, left_behind
from tests.integration.facts import Journal, counters, is_loading, is_ready, pids
from tests.integration.raw import Answer, Raw, asking, chat, http
from tests.waiting import until

# Longer than any test: an answer that still goes on then was not ended.
ENDLESS: dict[str, Any] = {"stream": True, "tokens": 1_000_000, "token_s": 0.01}


async def streaming(app: App, model: str, **more: Any) -> Raw:
    """A client that has read the first piece of a long answer."""
    raw = await Raw.open(app)
    raw.ask(asking(model, **{**ENDLESS, **more}))
    assert (await raw.head())[0] == 200
    assert await raw.chunk()
    return raw


async def rest(raw: Raw) -> Answer:
    answer = await raw.rest(200, {})
    raw.leave()
    return answer


def ended_with(answer: Answer, code: str) -> None:
    """With one error event at the end, and never with [DONE]."""
    assert answer.whole
    assert [event for event in answer.data if "error" in event] == [answer.data[-1]]
    assert answer.data[-1]["error"]["code"] == code
    assert "[DONE]" not in answer.data


async def moved(app: App, model: str, kind: str, value: Any = None) -> Answer:
    return await http(app, "POST", f"/api/v1/models/{model}/{kind}", value)


# --- shutdown -------------------------------------------------------------------------------------------------------


async def test_shutdown_lets_running_answers_finish_and_refuses_all_other_requests(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {"model": fake("model", *journal.switches, concurrency=1)}
    async with gateway(tmp_path, models, server={"drain_s": 60}) as app:
        running = await streaming(app, "model", tokens=50)
        waiting = asyncio.create_task(chat(app, "model"))
        await until(lambda: counters(app)["waiting"] == 1, "one waits")
        app.shut_down()
        for answer in (await waiting, await chat(app, "model"), await moved(app, "model", "load")):
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")
            assert int(answer.headers["retry-after"]) >= 1
        health = await http(app, "GET", "/health")
        assert (health.status, health.json()["status"]) == (503, "draining")
        assert not app.closed.is_set()
        answer = await rest(running)
        assert answer.data[-1] == "[DONE]"
        await asyncio.wait_for(app.closed.wait(), 30)
        assert not left_behind(tmp_path)
        with pytest.raises(ConnectionError):
            await chat(app, "model")
    # The engine was asked to go when it had nothing to do.
    assert [line["answering"] for line in journal.lines("term")] == [0]


async def test_shutdown_cuts_what_is_not_done_after_drain_s(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"model": fake("model")}, server={"drain_s": 0.3}) as app:
        running, silent = await streaming(app, "model"), await Raw.open(app)
        silent.ask(asking("model", stall_after=0))
        await until(lambda: counters(app)["grants"] == 2, "both run")
        began = time.monotonic()
        app.shut_down()
        ended_with(await rest(running), "shutting_down")
        assert time.monotonic() - began >= 0.3
        # Nothing had been sent, so that there was room for a status.
        answer = await silent.answer()
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
        silent.leave()
        await asyncio.wait_for(app.closed.wait(), 30)
        assert not left_behind(tmp_path)


async def test_shutdown_ends_loads_and_event_streams(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"slow": fake("slow", "--load-s", "600")}, server={"drain_s": 600}) as app:
        watcher = await Raw.open(app)
        watcher.send(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await watcher.head())[0] == 200
        asked = asyncio.create_task(chat(app, "slow"))
        await until(lambda: is_loading(app, "slow"), "loading")
        app.shut_down()
        assert (await asked).error["code"] == "shutting_down"
        told = await watcher.rest(200, {})
        assert "event: shutdown" in told.body.decode()
        watcher.leave()
        await asyncio.wait_for(app.closed.wait(), 30)
        assert not left_behind(tmp_path)


# --- unload and load ------------------------------------------------------------------------------------------------


async def test_unload_rejects_waiters_and_answers_when_the_process_is_gone(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"model": fake("model", concurrency=1)}) as app:
        running = await streaming(app, "model", tokens=50)
        (pid,) = pids(app, "model")
        waiting = asyncio.create_task(chat(app, "model"))
        await until(lambda: counters(app)["waiting"] == 1, "one waits")
        unload = asyncio.create_task(moved(app, "model", "unload"))
        answer = await waiting
        assert (answer.status, answer.error["code"]) == (503, "unloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await rest(running)).data[-1] == "[DONE]", "what runs may finish within grace_s"
        assert (await unload).json()["tier"] == "cold"
        assert not os.path.exists(f"/proc/{pid}")
        # The next request loads it again.
        assert (await chat(app, "model")).text == "model 1 2 3"


async def test_unload_of_a_loading_model_ends_the_load(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"slow": fake("slow", "--load-s", "600")}) as app:
        asked, load = asyncio.create_task(chat(app, "slow")), asyncio.create_task(moved(app, "slow", "load"))
        await until(lambda: is_loading(app, "slow") and len(left_behind(tmp_path)) > 0, "loading")
        assert (await moved(app, "slow", "unload")).json()["tier"] == "cold"
        assert (await asked).error["code"] == "unloaded"
        assert (await load).error["code"] == "unloaded"
        assert not left_behind(tmp_path)
        # Being told to go is no failure: there is no back-off.
        assert app.loop.scheduler.state.models["slow"].failures == 0  # type: ignore[index]


async def test_load_answers_when_the_model_is_ready(tmp_path: Path) -> None:
    models = {"one": fake("one"), "two": fake("two"), "broken": fake("broken", "--crash-at", "load")}
    async with gateway(tmp_path, models, budget_mib=250) as app:
        answer = await moved(app, "one", "load")
        assert (answer.status, answer.json()["tier"], answer.json()["memory"]) == (200, "ready", {"gpu0": 100})
        assert is_ready(app, "one")
        # Named models leave although there would be room.
        assert (await moved(app, "two", "load", {"evict": ["one"]})).json()["tier"] == "ready"
        await until(lambda: not pids(app, "one"), "the named one has left")
        answer = await moved(app, "broken", "load")
        assert (answer.status, answer.error["code"]) == (503, "model_load_failed")
        assert "crashing as told" in answer.error["details"]


async def test_failed_start_gives_its_port_back(tmp_path: Path) -> None:
    """With a single port for all engines, one that cannot be started must not keep it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    broken = {"cmd": [str(program), "--port", "${PORT}"], "memory_mib": 1}
    async with gateway(tmp_path, {"broken": broken, "good": fake("good")}, ports={"first": port, "last": port}) as app:
        assert (await chat(app, "broken")).error["code"] == "model_load_failed"
        assert (await chat(app, "good")).text == "good 1 2 3"


# --- idle, pinned, preloaded ----------------------------------------------------------------------------------------


async def test_idle_model_is_unloaded_after_its_ttl_and_not_while_it_answers(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"model": fake("model", *journal.switches, ttl_s=0.3)}) as app:
        running = await streaming(app, "model", tokens=100)
        answer = await rest(running)
        assert answer.data[-1] == "[DONE]", "an answer longer than the ttl is not cut"
        await until(lambda: not app.loop.scheduler.state.slots, "unloaded for being idle")
        assert (await chat(app, "model")).text == "model 1 2 3"
    assert {line["answering"] for line in journal.lines("term")} == {0}


async def test_pinned_model_is_neither_evicted_nor_unloaded_for_being_idle(tmp_path: Path) -> None:
    models = {"pinned": fake("pinned", pinned=True, ttl_s=0.1), "other": fake("other"), "third": fake("third")}
    async with gateway(tmp_path, models, budget_mib=250) as app:
        assert (await chat(app, "pinned")).status == 200
        before = pids(app, "pinned")
        # One place is left, and the two others take it in turns.
        for model in ("other", "third", "other"):
            assert (await chat(app, model)).text == f"{model} 1 2 3"
        assert pids(app, "pinned") == before
        assert (await moved(app, "pinned", "unload", {"force": True})).json()["tier"] == "cold", "an operator may"


async def test_preloaded_model_is_there_at_the_start_and_again_after_a_crash(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {"model": fake("model", *journal.switches, preload=True), "other": fake("other")}
    async with gateway(tmp_path, models) as app:
        await until(lambda: is_ready(app, "model"), "loaded without being asked for")
        assert journal.count("request") == 0
        (pid,) = pids(app, "model")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: is_ready(app, "model") and pids(app, "model") != [pid], "loaded again")
        assert (await chat(app, "model")).text == "model 1 2 3"
        # What an operator unloads stays away, whatever else happens.
        await moved(app, "model", "unload")
        assert (await chat(app, "other")).status == 200
        await moved(app, "other", "unload")
        assert not app.loop.scheduler.state.slots
        assert journal.count("start") == 2


async def test_preload_evicts_no_model_and_loads_when_there_is_room(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {name: fake(name, *journal.switches, preload=True) for name in ("one", "two")}
    async with gateway(tmp_path, models, budget_mib=150) as app:
        await until(lambda: is_ready(app, "one") or is_ready(app, "two"), "one of them came")
        (first,) = (name for name in models if pids(app, name))
        (second,) = set(models) - {first}
        before = pids(app, first)
        assert (await chat(app, first)).text == f"{first} 1 2 3"
        assert pids(app, first) == before
        await moved(app, first, "unload")
        await until(lambda: is_ready(app, second), "it came when there was room")
        assert journal.count("start") == 2


async def test_a_part_that_does_not_close_does_not_keep_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with gateway(tmp_path, {"a": fake("a")}, timeouts=Timeouts(close_s=0.1)) as app:
        # No part is known to hang; this is the net below all of them.
        monkeypatch.setattr(app.memory_watch, "close", asyncio.Event().wait)
    assert app.closed.is_set()
    assert "the memory watch" in capfd.readouterr().err
