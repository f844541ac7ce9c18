"""How long a model stays, by what its callers say: from the request to the engine's end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId
from tests.harness import fake, gateway
from tests.integration.facts import Journal, pids
from tests.integration.raw import chat, http
from tests.waiting import until


def keep_alive_s(app: App, model: str = "m") -> float | None:
    (slot,) = app.loop.scheduler.state.slots_of(ModelId(model))
    return slot.keep_alive_s


async def unload_in_s(app: App, model: str = "m") -> float | None:
    said: float | None = (await http(app, "GET", f"/api/v1/models/{model}")).json()["unload_in_s"]
    return said


async def test_zero_lets_the_engine_go_as_soon_as_it_is_idle(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"m": fake("m", *journal.switches)}) as app:
        assert (await chat(app, "m", keep_alive=0)).status == 200
        await until(lambda: not app.loop.scheduler.state.slots and not app.slots.live, "the engine is gone")
        assert (await chat(app, "m", keep_alive="0s")).status == 200
        assert journal.count("start") == 2


async def test_a_keep_alive_of_zero_does_not_unload_before_waiting_requests(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    model = fake("m", *journal.switches, "--load-s", "0.2", concurrency=1)
    async with gateway(tmp_path, {"m": model}) as app:
        answers = await asyncio.gather(*(chat(app, "m", keep_alive=0) for _ in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        assert journal.count("start") == 1


@pytest.mark.parametrize(
    ("said", "stays_s"),
    [({"keep_alive": 600}, 600.0), ({"keep_alive": "1h30m"}, 5_400.0), ({"x_keep_alive_s": 42}, 42.0)],
)
async def test_latest_word_counts_and_silence_leaves_it(tmp_path: Path, said: dict[str, Any], stays_s: float) -> None:
    async with gateway(tmp_path, {"m": fake("m", ttl_s=7)}) as app:
        await chat(app, "m")
        assert keep_alive_s(app) is None
        assert 0 < (await unload_in_s(app) or 0) <= 7
        await chat(app, "m", **said)
        await chat(app, "m")
        assert keep_alive_s(app) == stays_s
        left_s = await unload_in_s(app)
        assert left_s is not None and stays_s - 60 < left_s <= stays_s
        await chat(app, "m", keep_alive=-1)
        assert keep_alive_s(app) == -1
        assert await unload_in_s(app) is None


@pytest.mark.parametrize(("said", "gets"), [(-1, 300.0), (600, 300.0), ("200s", 200.0)])
async def test_operator_bounds_what_callers_say(tmp_path: Path, said: float | str, gets: float) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, scheduler={"keep_alive_max_s": 300}) as app:
        assert (await chat(app, "m", keep_alive=said)).status == 200
        assert keep_alive_s(app) == gets


async def test_engine_never_sees_either_word(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"m": fake("m", *journal.switches, "--record")}) as app:
        await chat(app, "m", keep_alive="5m", x_keep_alive_s=4)
        (line,) = journal.lines("request")
        assert set(json.loads(line["body"])) == {"model", "messages"}


async def test_word_that_cannot_be_understood_is_refused_and_loads_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}) as app:
        answers = (await chat(app, "m", keep_alive="soon"), await chat(app, "m", x_keep_alive_s=[]))
        assert [answer.status for answer in answers] == [400, 400]
        assert [answer.error["param"] for answer in answers] == ["keep_alive", "x_keep_alive_s"]
        assert not pids(app, "m") and not app.mover.moving


async def test_form_may_say_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    parts = {"model": "m", "keep_alive": "2m", "language": "en", "file": "x"}
    head = '--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    body = ("".join(head % part for part in parts.items()) + "--b--\r\n").encode()
    async with gateway(tmp_path, {"m": fake("m", *journal.switches)}) as app:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        answer = await http(app, "POST", "/v1/audio/transcriptions", body=body, headers=headers)
        assert answer.status == 200, answer.body
        assert "keep_alive" not in answer.json()["fields"] and "language" in answer.json()["fields"]
        assert keep_alive_s(app) == 120.0
