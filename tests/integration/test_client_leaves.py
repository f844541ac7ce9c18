"""A client may be cut off at any moment. Whatever the moment: it is forgotten at once and nothing is left of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from tests.harness import fake, gateway, until
from tests.integration.facts import Journal, at_rest, counters, is_loading, is_ready
from tests.integration.raw import CHAT, Raw, asking, chat, request_bytes

# What "at once" means: the queue has forgotten the client and its engine has been told.
AT_ONCE_S = 1.0
HOWS = ("FIN", "RST")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class House:
    """A gateway with engines for every phase, and who else is in it."""

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

    def others_leave(self) -> None:
        for other in self.others:
            other.leave()
        self.others.clear()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder: Path = tmp_path_factory.mktemp("leaving")
    journal = Journal(folder)
    models = {
        "one": fake("one", *journal.switches, concurrency=1),
        "endless": fake("endless", *journal.switches, "--sse-weird", "no-end"),
    }
    for name in (f"slow-{phase}-{how}" for phase in ("joined", "own", "alone") for how in HOWS):
        models[name] = fake(name, *journal.switches, "--load-s", "0.7")
    for name in (f"fragile-{how}" for how in HOWS):
        models[name] = fake(name, *journal.switches, "--load-s", "0.7", "--crash-at", "request")
    async with gateway(folder, models) as app:
        # Ready before the first test, so that each starts from the same place.
        assert (await chat(app, "one")).text == "one 1 2 3"
        yield House(app, journal)


@pytest.fixture(autouse=True)
def others_leave(house: House) -> Iterator[None]:
    yield
    house.others_leave()


# --- the phases: each leaves the client in one ----------------------------------------------------------------------

Gone = Callable[[], bool]


async def headers_half_sent(house: House, raw: Raw, how: str) -> Gone:
    before = house.app.edge.connections
    raw.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
    await until(lambda: house.app.edge.connections == before, "connected")
    return lambda: house.app.edge.connections < before


async def body_half_sent(house: House, raw: Raw, how: str) -> Gone:
    whole = request_bytes("POST", CHAT, b'{"model": "one", "pad": "' + b"x" * 1000)
    raw.send(whole.replace(b"Content-Length: 1", b"Content-Length: 9"))
    await until(lambda: house.app.edge.bodies.memory_bytes > 1000, "half of the body is here")
    return lambda: house.app.edge.bodies.memory_bytes == 0


async def queued(house: House, raw: Raw, how: str) -> Gone:
    """The model answers somebody else, and only one at once."""
    await house.other(**asking("one", stall_after=0))
    await until(lambda: counters(house.app)["grants"] == 1, "the model is busy")
    raw.ask(asking("one"))
    await until(lambda: house.waiting == 1, "queued")
    return lambda: house.waiting == 0


async def joined_to_a_load(house: House, raw: Raw, how: str) -> Gone:
    model = f"slow-joined-{how}"
    await house.other(**asking(model))
    await until(lambda: is_loading(house.app, model), "loading for somebody else")
    raw.ask(asking(model))
    await until(lambda: house.waiting == 2, "joined")
    return lambda: house.waiting == 1 and is_loading(house.app, model)


async def loading(house: House, raw: Raw, how: str) -> Gone:
    model = f"slow-own-{how}"
    raw.ask(asking(model, stream=True))
    await until(lambda: is_loading(house.app, model) and house.waiting == 1, "loading for this client")
    return lambda: house.waiting == 0 and is_loading(house.app, model)


async def back_in_the_queue(house: House, raw: Raw, how: str) -> Gone:
    """Its engine was lost before the first byte, and is being loaded again for it."""
    model = f"fragile-{how}"
    raw.ask(asking(model))
    await until(lambda: house.journal.count("start", name=model) == 2, "loaded a second time")
    assert house.waiting == 1
    return lambda: house.waiting == 0 and is_loading(house.app, model)


def upstream_is_closed(house: House, since: float) -> Gone:
    return lambda: any(line["t"] > since for line in house.journal.lines("cancelled"))


async def granted(house: House, raw: Raw, how: str) -> Gone:
    """The engine has the request and has not answered a byte."""
    since, before = time.monotonic(), house.journal.count("request")
    raw.ask(asking("one", stall_after=0))
    await until(lambda: house.journal.count("request") > before, "with the engine")
    return upstream_is_closed(house, since)


async def first_byte(house: House, raw: Raw, how: str) -> Gone:
    since = time.monotonic()
    raw.ask(asking("one", stream=True, stall_after=1))
    assert (await raw.head())[0] == 200
    assert await raw.chunk()
    return upstream_is_closed(house, since)


async def mid_stream(house: House, raw: Raw, how: str) -> Gone:
    since = time.monotonic()
    raw.ask(asking("one", stream=True, tokens=100_000, token_s=0.002))
    assert (await raw.head())[0] == 200
    for _ in range(5):
        assert await raw.chunk()
    return upstream_is_closed(house, since)


async def last_byte(house: House, raw: Raw, how: str) -> Gone:
    """[DONE] is here, the end of the answer is not."""
    since, seen = time.monotonic(), b""
    raw.ask(asking("endless", stream=True))
    assert (await raw.head())[0] == 200
    while b"[DONE]" not in seen:
        piece = await raw.chunk()
        assert piece, "the answer goes on to [DONE]"
        seen += piece
    return upstream_is_closed(house, since)


async def keep_alive_idle(house: House, raw: Raw, how: str) -> Gone:
    raw.ask(asking("one"))
    assert (await raw.answer()).text == "one 1 2 3"
    before = house.app.edge.connections
    return lambda: house.app.edge.connections < before


PHASES: tuple[Callable[[House, Raw, str], Awaitable[Gone]], ...] = (
    headers_half_sent,
    body_half_sent,
    queued,
    joined_to_a_load,
    loading,
    back_in_the_queue,
    granted,
    first_byte,
    mid_stream,
    last_byte,
    keep_alive_idle,
)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
async def test_client_that_leaves_is_forgotten_at_once(
    house: House, phase: Callable[[House, Raw, str], Awaitable[Gone]], how: str
) -> None:
    raw = await Raw.open(house.app)
    is_forgotten = await phase(house, raw, how)
    assert not is_forgotten()
    raw.leave(how)
    await until(is_forgotten, f"forgotten after {phase.__name__}", AT_ONCE_S)
    house.others_leave()
    await at_rest(house.app)
    assert (await chat(house.app, "one")).text == "one 1 2 3"


@pytest.mark.parametrize("how", HOWS)
async def test_load_survives_the_client_that_caused_it(house: House, how: str) -> None:
    model = f"slow-alone-{how}"
    raw = await Raw.open(house.app)
    raw.ask(asking(model))
    await until(lambda: is_loading(house.app, model), "loading")
    raw.leave(how)
    await at_rest(house.app)
    await until(lambda: is_ready(house.app, model), "ready although nobody waits")
    assert (await chat(house.app, model)).text == f"{model} 1 2 3"
    assert house.journal.count("start", name=model) == 1


@pytest.mark.parametrize("how", HOWS)
async def test_who_joined_a_load_is_answered_though_the_one_who_caused_it_left(house: House, how: str) -> None:
    model = f"slow-joined-{how}"
    await house.app.operations.move(MoveKind.UNLOAD, ModelId(model))
    first, second = await house.other(**asking(model)), await house.other(**asking(model))
    await until(lambda: house.waiting == 2, "both wait")
    first.leave(how)
    assert (await second.answer()).text == f"{model} 1 2 3"
