"""serve.py"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from greenroom.errors import BudgetPassed
from greenroom.telemetry.activity import Record
from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest, counters
from tests.integration.raw import CHAT, Raw, asking, chat, http, request_bytes
from tests.waiting import PATIENCE_S, until


def form(boundary: str, model: str) -> tuple[bytes, dict[str, str]]:
    head = f"--{boundary}\r\nContent-Disposition: form-data; name="
    parts = f'{head}"model"\r\n\r\n{model}\r\n{head}"file"\r\n\r\nx\r\n--{boundary}--\r\n'
    return parts.encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def newest(app: App) -> Record:
    return app.activity.recent(1)[0]


@pytest.mark.parametrize("is_warm", [True, False])
async def test_request_that_cannot_be_written_for_its_engine_gives_its_slot_back(tmp_path: Path, is_warm: bool) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha", use_model_name="the--name")}) as app:
        if is_warm:
            # A connection to the engine is free now, so that the next request is sent at once, without a task.
            assert (await chat(app, "alpha")).status == 200
        body, headers = form("name", "alpha")
        answer = await http(app, "POST", "/v1/audio/transcriptions", body=body, headers=headers)
        assert answer.status == newest(app).status == 400
        assert "boundary" in answer.error["message"]
        assert not any(counters(app).values())


async def test_record_says_whether_a_request_waits_or_is_served(tmp_path: Path) -> None:
    models = {"alpha": fake("alpha", "--load-s", "1", "--tokens", "4", "--token-s", "0.5")}
    async with gateway(tmp_path, models) as app:
        answer = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: len(app.activity) == 1, "it has arrived")
        assert newest(app).state == "waiting"
        await until(lambda: newest(app).state == "serving", "it is served")
        assert (await answer).status == 200
        await until(lambda: newest(app).state == "done", "it is done")


async def test_request_that_is_cut_between_its_grant_and_its_sending_never_reaches_the_engine(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"alpha": fake("alpha", *journal.switches, concurrency=1)}) as app:
        before = asyncio.create_task(chat(app, "alpha", token_s=0.1))
        await until(lambda: journal.count("request") == 1, "the only place is taken")
        answer = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: counters(app)["waiting"] == 1, "it waits for its turn")
        ticket = list(app.tickets.open.values())[-1]
        # Looked at in every turn of the loop: the one after the grant is the last before it is sent.
        while ticket.slot is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ticket.cut(BudgetPassed("Its time is over."))
        assert (await answer).status == 504
        assert (await before).status == 200
        await at_rest(app)
        assert (await chat(app, "alpha")).status == 200
        assert journal.count("request") == 2


# --- whatever happens to a task -------------------------------------------------------------------------------------


@contextmanager
def cancelled(name: str, turns: int) -> Iterator[None]:
    """Every task with a name that begins so is cancelled after so many turns of the loop; 0: before its first step."""
    loop = asyncio.get_running_loop()

    def factory(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
        made: list[asyncio.Task[Any]] = []

        def look(left: int) -> None:
            if made[0].get_name().startswith(name):
                made[0].cancel() if left == 0 else loop.call_soon(look, left - 1)

        # Before the task, whose first step would come first otherwise.
        loop.call_soon(look, turns)
        made.append(asyncio.Task(work, loop=loop, **more))
        return made[0]

    loop.set_task_factory(factory)
    try:
        yield
    finally:
        loop.set_task_factory(None)


def asked(kind: str) -> bytes:
    if kind == "form":
        body, headers = form("b", "alpha")
        return request_bytes("POST", "/v1/audio/transcriptions", body, headers)
    if kind == "asgi":
        return request_bytes("GET", "/api/v1/status", None)
    return request_bytes("POST", CHAT, json.dumps(asking("alpha")).encode())


@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize(("kind", "name"), [("chat", "r-"), ("form", "long body"), ("form", "r-"), ("asgi", "asgi")])
async def test_request_ends_whenever_its_task_is_cancelled(tmp_path: Path, kind: str, name: str, is_warm: bool) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha", concurrency=1)}) as app:
        for turns in (0, 1, 2, 3, 5, 8):
            if is_warm:
                assert (await chat(app, "alpha")).status == 200
            async with await Raw.open(app) as raw, await Raw.open(app) as busy:
                if is_warm and kind != "asgi":
                    # With its only place taken, the model is waited for by a task.
                    busy.ask(asking("alpha", stall_after=0))
                    await until(lambda: counters(app)["grants"] == 1, "its place is taken")
                with cancelled(name, turns):
                    raw.send(asked(kind))
                    for _ in range(turns + 20):
                        await asyncio.sleep(0)
                    # The place is free again: a request that was not cancelled by now is answered.
                    busy.leave()
                    await raw.is_closed()
                await at_rest(app)
        assert (await chat(app, "alpha")).status == 200
        async with asyncio.timeout(PATIENCE_S):
            await app.operations.move(MoveKind.UNLOAD, ModelId("alpha"))
