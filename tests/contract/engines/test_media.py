"""What every engine promises that makes or hears something else than text: start, serve, cancel, sleep, wake, stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.contract.engines.engine_gateway import until_quiet
from tests.contract.engines.media import MEDIA, MediaKind
from tests.harness import gateway
from tests.integration import facts
from tests.integration.facts import at_rest
from tests.integration.faults import is_alive
from tests.integration.raw import Answer, Raw, http
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "media"
A_WHOLE_ANSWER_TICKS = 400


@dataclass(frozen=True, slots=True)
class MediaGateway:
    app: App
    kind: MediaKind

    async def ask(self, **changes: Any) -> Answer:
        async with await Raw.open(self.app) as raw:
            raw.send(self.kind.request(MODEL, changes))
            return await raw.answer()

    async def made(self) -> object:
        answer = await self.ask()
        assert answer.status == 200, answer.body
        return self.kind.answers(answer.body)

    async def ready(self) -> int:
        assert (await facts.order(self.app, "load", MODEL)).status == 200
        return await facts.pid_of(self.app, MODEL)

    async def tier(self) -> str:
        return str((await facts.view(self.app, MODEL))["tier"])


@pytest_asyncio.fixture(loop_scope="session", scope="session", params=sorted(MEDIA))
async def gate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MediaGateway]:
    kind = MEDIA[request.param]
    async with gateway(tmp_path_factory.mktemp(request.param), {MODEL: kind.model()}) as app:
        yield MediaGateway(app, kind)


async def test_a_request_starts_what_is_cold_and_each_answer_is_the_same(gate: MediaGateway) -> None:
    await facts.order(gate.app, "unload", MODEL, grace_s=0)
    first = await gate.made()
    assert await gate.tier() == "ready"
    assert await gate.made() == first
    assert await asyncio.gather(*(gate.made() for _ in range(3))) == [first] * 3
    await at_rest(gate.app)


async def test_bad_requests_are_refused_by_name(gate: MediaGateway) -> None:
    for changes, code in gate.kind.bad:
        answer = await gate.ask(**changes)
        assert (answer.status, answer.error["code"]) == (400, code), answer.body
        assert next(iter(changes)) in answer.error["message"]


async def test_a_route_that_it_has_no_ability_for_is_refused_before_it_is_loaded(gate: MediaGateway) -> None:
    await facts.order(gate.app, "unload", MODEL, grace_s=0)
    answer = await http(gate.app, "POST", "/v1/embeddings", {"model": MODEL, "input": "a"})
    assert (answer.status, answer.error["code"]) == (400, "unsupported")
    assert await gate.tier() == "cold"


async def test_a_client_that_leaves_is_worked_for_no_longer(gate: MediaGateway) -> None:
    pid = await gate.ready()
    async with await Raw.open(gate.app) as raw:
        raw.send(gate.kind.request(MODEL, long=True))
        await until(lambda: _is_asked(gate.app), "the request")
        raw.leave("RST")
        await at_rest(gate.app)
        assert await until_quiet(pid) < A_WHOLE_ANSWER_TICKS / 4
    assert (await facts.view(gate.app, MODEL))["in_flight"] == 0


async def test_a_stream_brings_its_pieces_as_they_are_made(gate: MediaGateway) -> None:
    if not gate.kind.streams:
        return
    answer = await gate.ask(stream="true")
    assert answer.whole and answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = answer.data
    assert len(deltas) > 1
    assert "".join(event["delta"] for event in deltas) == done["text"] == await gate.made()


async def test_an_answer_without_end_is_cut_when_its_model_is_unloaded_at_once(gate: MediaGateway) -> None:
    await gate.ready()
    async with await Raw.open(gate.app) as raw:
        raw.send(gate.kind.request(MODEL, long=True))
        await until(lambda: _is_asked(gate.app), "the request")
        await facts.order(gate.app, "unload", MODEL, grace_s=0)
        answer = await raw.answer()
    assert answer.status == 503 or b"unloaded" in answer.body, answer
    assert await gate.tier() == "cold"
    await at_rest(gate.app)


async def _is_asked(app: App) -> bool:
    return bool((await facts.view(app, MODEL))["in_flight"])


async def test_it_sleeps_and_wakes_with_the_same_answer_or_says_that_it_cannot(gate: MediaGateway) -> None:
    first = await gate.made()
    answer = await facts.order(gate.app, "sleep", MODEL)
    if not gate.kind.can_sleep:
        assert (answer.status, answer.error["code"]) == (422, "unsupported")
        return
    assert answer.status == 200 and await gate.tier() == "asleep"
    assert await gate.made() == first


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_process_that_is_killed_is_replaced(gate: MediaGateway, number: signal.Signals) -> None:
    first = await gate.made()
    pid = await gate.ready()
    os.kill(pid, number)
    await until(lambda: not is_alive(pid), "its end")
    assert await gate.made() == first
    assert await gate.ready() != pid


async def test_unload_ends_it(gate: MediaGateway) -> None:
    await gate.ready()
    assert (await facts.order(gate.app, "unload", MODEL, grace_s=0)).status == 200
    assert await gate.tier() == "cold"
    assert (await facts.view(gate.app, MODEL))["memory"] == {}
