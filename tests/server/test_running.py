"""running.py"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from greenroom.app import App
from greenroom.errors import BudgetPassed
from greenroom.telemetry.activity import Record
from tests.harness import fake, gateway, until
from tests.integration.facts import Journal, at_rest, counters
from tests.integration.raw import chat, http


def form(boundary: str, model: str) -> tuple[bytes, dict[str, str]]:
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--{boundary}--\r\n'
    return part.encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


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
        ticket = list(app.desk.open.values())[-1]
        # Looked at in every turn of the loop: the one after the grant is the last before it is sent.
        while ticket.slot is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ticket.cut(BudgetPassed("Its time is over."))
        assert (await answer).status == 504
        assert (await before).status == 200
        await at_rest(app)
        assert (await chat(app, "alpha")).status == 200
        assert journal.count("request") == 2
