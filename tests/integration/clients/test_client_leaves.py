"""A client may be cut off at any moment. Whatever the moment: it is forgotten at once and nothing is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from greenroom.http.limits import EdgeLimits
from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest, counters, is_loading, is_ready, pids
from tests.integration.raw import CHAT, Raw, asking, chat, request_bytes
from tests.samples.sounds import FORM, form
from tests.waiting import PATIENCE_S, until

# No deadline of the gateway passes while a test waits: only the client's leaving can end what it began.
NO_DEADLINES = {"header_timeout_s": 600, "body_timeout_s": 600, "keepalive_s": 600}
HOWS = ("FIN", "RST", "HALF")
# Answered by the gateway itself, in the same turn of the loop.
REFUSED = request_bytes("POST", CHAT, b"{}")

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class JournaledGateway:
    """A gateway with an engine for each phase, and the other clients it has."""

    app: App
    journal: Journal
    others: list[Raw] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        return counters(self.app)["waiting"]

    async def other(self, **body: object) -> Raw:
        """Another client that asks this."""
        raw = await Raw.open(self.app)
        self.others.append(raw)
        raw.ask(body)
        return raw

    async def other_that_sends(self, data: bytes) -> Raw:
        raw = await Raw.open(self.app)
        self.others.append(raw)
        raw.send(data)
        return raw

    def others_leave(self) -> None:
        for other in self.others:
            other.leave()
        self.others.clear()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JournaledGateway]:
    folder: Path = tmp_path_factory.mktemp("leaving")
    journal = Journal(folder)
    models = {
        "one": fake("one", *journal.switches, concurrency=1),
        "endless": fake("endless", *journal.switches, "--sse-weird", "no-end"),
    }
    models["two"] = fake("two", *journal.switches, concurrency=2)
    for phase, load_s in {"joined": "5", "own": "5", "alone": "0.7"}.items():
        for name in (f"slow-{phase}-{how}" for how in HOWS):
            models[name] = fake(name, *journal.switches, "--load-s", load_s)
    for name in (f"fragile-{how}" for how in HOWS):
        models[name] = fake(name, *journal.switches, "--load-s", "1.5", "--crash-at", "request")
    async with gateway(folder, models, server=NO_DEADLINES) as app:
        # Ready before the first test, so that each starts from the same place.
        assert (await chat(app, "one")).text == "one 1 2 3"
        yield JournaledGateway(app, journal)


@pytest.fixture(autouse=True)
def others_leave(gate: JournaledGateway) -> Iterator[None]:
    yield
    gate.others_leave()


# --- the phases: each leaves the client in one ----------------------------------------------------------------------

Gone = Callable[[], bool]


async def headers_half_sent(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    before = gate.app.edge.connections
    raw.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
    await until(lambda: gate.app.edge.connections == before, "connected")
    return lambda: gate.app.edge.connections < before


async def body_half_sent(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    whole = request_bytes("POST", CHAT, b'{"model": "one", "pad": "' + b"x" * 1000)
    raw.send(whole.replace(b"Content-Length: 1", b"Content-Length: 9"))
    await until(lambda: gate.app.edge.bodies.memory_bytes > 1000, "half of the body is here")
    return lambda: gate.app.edge.bodies.memory_bytes == 0


async def queued(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    """The model answers another request, and only one at once."""
    await gate.other(**asking("one", stall_after=0))
    await until(lambda: counters(gate.app)["grants"] == 1, "the model is busy")
    raw.ask(asking("one"))
    await until(lambda: gate.waiting == 1, "queued")
    return lambda: gate.waiting == 0


async def joined_to_a_load(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    model = f"slow-joined-{how}"
    await gate.other(**asking(model))
    await until(lambda: is_loading(gate.app, model), "loading for another request")
    raw.ask(asking(model))
    await until(lambda: gate.waiting == 2, "joined")
    return lambda: gate.waiting == 1 and is_loading(gate.app, model)


async def loading(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    model = f"slow-own-{how}"
    raw.ask(asking(model, stream=True))
    await until(lambda: is_loading(gate.app, model) and gate.waiting == 1, "loading for this client")
    return lambda: gate.waiting == 0 and is_loading(gate.app, model)


async def back_in_the_queue(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    """Its engine was lost before the first byte, and is being loaded again for it."""
    model = f"fragile-{how}"
    raw.ask(asking(model))
    await until(lambda: gate.journal.count("start", name=model) == 2, "loaded a second time")
    assert gate.waiting == 1
    return lambda: gate.waiting == 0 and is_loading(gate.app, model)


def upstream_is_closed(gate: JournaledGateway, since: float) -> Gone:
    return lambda: any(line["t"] > since for line in gate.journal.lines("cancelled"))


async def granted(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    """The engine has the request and has not answered a byte."""
    since, before = time.monotonic(), gate.journal.count("request")
    raw.ask(asking("one", stall_after=0))
    await until(lambda: gate.journal.count("request") > before, "with the engine")
    return upstream_is_closed(gate, since)


async def far_ahead(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    """It has sent more ahead than is read before the answer."""
    is_forgotten = await granted(gate, raw, how)
    raw.send(REFUSED * (2 * EdgeLimits().pipelined_bytes_max // len(REFUSED)))
    return is_forgotten


async def first_byte(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    since = time.monotonic()
    raw.ask(asking("one", stream=True, stall_after=1))
    assert (await raw.head())[0] == 200
    assert await raw.chunk()
    return upstream_is_closed(gate, since)


async def mid_stream(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    since = time.monotonic()
    raw.ask(asking("one", stream=True, tokens=100_000, token_s=0.002))
    assert (await raw.head())[0] == 200
    for _ in range(5):
        assert await raw.chunk()
    return upstream_is_closed(gate, since)


async def last_byte(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    """[DONE] is here, the end of the answer is not."""
    since, seen = time.monotonic(), b""
    raw.ask(asking("endless", stream=True))
    assert (await raw.head())[0] == 200
    while b"[DONE]" not in seen:
        piece = await raw.chunk()
        assert piece, "the answer goes on to [DONE]"
        seen += piece
    return upstream_is_closed(gate, since)


async def keep_alive_idle(gate: JournaledGateway, raw: Raw, how: str) -> Gone:
    raw.ask(asking("one"))
    assert (await raw.answer()).text == "one 1 2 3"
    before = gate.app.edge.connections
    return lambda: gate.app.edge.connections < before


PHASES: tuple[Callable[[JournaledGateway, Raw, str], Awaitable[Gone]], ...] = (
    headers_half_sent,
    body_half_sent,
    queued,
    joined_to_a_load,
    loading,
    back_in_the_queue,
    granted,
    far_ahead,
    first_byte,
    mid_stream,
    last_byte,
    keep_alive_idle,
)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
async def test_client_that_leaves_is_forgotten(
    gate: JournaledGateway, phase: Callable[[JournaledGateway, Raw, str], Awaitable[Gone]], how: str
) -> None:
    raw = await Raw.open(gate.app)
    is_forgotten = await phase(gate, raw, how)
    assert not is_forgotten()
    begun = gate.journal.count("request", name="two")
    if how == "HALF" and phase not in (headers_half_sent, body_half_sent, keep_alive_idle):
        raw.send(asked("two"))
    raw.leave(how)
    await until(is_forgotten, f"forgotten after {phase.__name__}")
    gate.others_leave()
    await at_rest(gate.app)
    assert (await chat(gate.app, "one")).text == "one 1 2 3"
    assert gate.journal.count("request", name="two") == begun, "what it had sent ahead was not begun"


@pytest.mark.parametrize("how", HOWS)
async def test_load_survives_the_client_that_caused_it(gate: JournaledGateway, how: str) -> None:
    model = f"slow-alone-{how}"
    raw = await Raw.open(gate.app)
    raw.ask(asking(model))
    await until(lambda: is_loading(gate.app, model), "loading")
    raw.leave(how)
    await at_rest(gate.app)
    await until(lambda: is_ready(gate.app, model), "ready although no request waits")
    assert (await chat(gate.app, model)).text == f"{model} 1 2 3"
    assert gate.journal.count("start", name=model) == 1


@pytest.mark.parametrize("how", HOWS)
async def test_a_request_that_joined_a_load_is_answered_if_the_first_left(gate: JournaledGateway, how: str) -> None:
    model = f"slow-alone-{how}"
    await gate.app.operations.move(MoveKind.UNLOAD, ModelId(model))
    first, second = await gate.other(**asking(model)), await gate.other(**asking(model))
    await until(lambda: gate.waiting == 2, "both wait")
    first.leave(how)
    assert (await second.answer()).text == f"{model} 1 2 3"


# --- every grant is closed by the end of its connection -------------------------------------------------------------

# After so many answers in one turn other connections get theirs: the next request is taken up a turn later.
A_TURN = EdgeLimits().pipelined_per_turn_max


def asked(model: str, **more: object) -> bytes:
    return request_bytes("POST", CHAT, json.dumps(asking(model, **more)).encode())


def upgrade(model: str) -> bytes:
    headers = {"Connection": "upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    return request_bytes("GET", f"/upstream/{model}/ws", None, headers)


LAST: dict[str, Callable[[str], bytes]] = {
    "chat": asked,
    "stream": lambda model: asked(model, stream=True),
    "large": lambda model: asked(model, pad="x" * 400_000),
    "form": lambda model: request_bytes("POST", "/v1/audio/transcriptions", form([("model", model)]), FORM),
    "upstream": lambda model: request_bytes("GET", f"/upstream/{model}/echo/x", None),
    "upgrade": upgrade,
}


async def places_are_free(gate: JournaledGateway, model: str) -> None:
    """Nothing is counted any more; the model serves as many at once as it may, and can be unloaded."""
    await at_rest(gate.app, PATIENCE_S)
    answers = await asyncio.gather(chat(gate.app, model), chat(gate.app, model))
    assert [answer.text for answer in answers] == [f"{model} 1 2 3"] * 2
    await at_rest(gate.app)
    async with asyncio.timeout(PATIENCE_S):
        await gate.app.operations.move(MoveKind.UNLOAD, ModelId(model))
    assert not is_ready(gate.app, model)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("last", LAST)
async def test_request_whose_client_leaves_holds_no_place(
    gate: JournaledGateway, last: str, is_warm: bool, how: str
) -> None:
    for ahead in (0, A_TURN):
        if is_warm:
            assert (await chat(gate.app, "two")).text == "two 1 2 3"
        # As many as have places, and one more.
        for _ in range(3):
            raw = await gate.other_that_sends(REFUSED * ahead + LAST[last]("two"))
            raw.leave(how)
        await places_are_free(gate, "two")


def kill_and_wait(pid: int) -> None:
    """The loop stands still meanwhile: in its next turn it finds that the connection has ended."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
    raise AssertionError("the engine lives")


@pytest.mark.parametrize("turns", range(8))
async def test_client_that_leaves_as_its_engine_is_lost_holds_no_place(gate: JournaledGateway, turns: int) -> None:
    """However many turns of the gateway's loop lie between the two."""
    assert (await chat(gate.app, "two")).text == "two 1 2 3"
    raw = await gate.other(**asking("two", stream=True, stall_after=1))
    assert (await raw.head())[0] == 200
    assert await raw.chunk()
    (engine,) = pids(gate.app, "two")
    kill_and_wait(engine)
    for _ in range(turns):
        await asyncio.sleep(0)
    raw.leave("HALF")
    await places_are_free(gate, "two")


@pytest.mark.parametrize("seed", range(8))
async def test_no_moment_of_leaving_holds_a_place(gate: JournaledGateway, seed: int) -> None:
    """Requests of every kind sent ahead of each other, in pieces, and a client that leaves at some turn of the loop."""
    draw = random.Random(seed)
    for _ in range(12):
        raw = await Raw.open(gate.app)
        gate.others.append(raw)
        kinds = [REFUSED, *(make(model) for make in LAST.values() for model in ("one", "two"))]
        sent = b"".join(
            REFUSED * draw.choice((0, 0, 1, A_TURN)) + draw.choice(kinds) for _ in range(draw.randint(1, 4))
        )
        cuts = sorted(draw.randrange(len(sent)) for _ in range(draw.randint(0, 2)))
        for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            raw.send(sent[begin:end])
            for _ in range(draw.choice((0, 1, 2, 5, 20))):
                await asyncio.sleep(0)
        raw.leave(draw.choice(HOWS))
    await places_are_free(gate, "two")
    assert (await chat(gate.app, "one")).text == "one 1 2 3"
