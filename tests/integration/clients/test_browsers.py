"""What web pages can have a browser do to a gateway without keys: nothing that loads, evicts, changes or is held.

The headers are those that browsers send, written down; `ME` is the gateway as the browser calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest, counters, is_ready
from tests.integration.raw import CHAT, Raw, asking, chat, request_bytes
from tests.samples.sounds import FORM
from tests.samples.sounds import form as multipart

ME = "127.0.0.1:8210"
EVIL, FRIEND, NEIGHBOUR = "https://evil.example", "https://chat.example", "http://localhost:3000"
UPSTREAM = "/upstream/other/echo/x"
LOAD, UNLOAD = "/api/v1/models/other/load", "/api/v1/models/resident/unload"
BODY = json.dumps(asking("other")).encode()
UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "eA=="}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class JournaledGateway:
    """A gateway with room for one model. `resident` has it; `other` would have to take it away."""

    app: App
    journal: Journal

    def facts(self) -> dict[str, Any]:
        """Everything that a request could have loaded, evicted, changed or kept."""
        state = self.app.loop.scheduler.state
        return {
            "asked of engines": self.journal.count("request"),
            "started": self.journal.count("start"),
            "slots": sorted((slot.id, slot.model, slot.tier.value, slot.move) for slot in state.slots.values()),
            "leases": [lease.id for lease in self.app.leasing.known()],
            "configuration": id(self.app.config),
            **counters(self.app),
        }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JournaledGateway]:
    folder: Path = tmp_path_factory.mktemp("browsers")
    journal = Journal(folder)
    models = {name: fake(name, *journal.switches) for name in ("resident", "other")}
    async with gateway(folder, models, budget_mib=100, server={"allowed_origins": [FRIEND]}) as app:
        yield JournaledGateway(app, journal)


@dataclass(frozen=True)
class Sent:
    """One request as a browser sends it."""

    name: str
    method: str = "GET"
    path: str = UPSTREAM
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None

    def __str__(self) -> str:
        return self.name

    def rendered(self) -> bytes:
        return request_bytes(self.method, self.path, self.body, {"Host": ME, **self.headers})


def fetched(site: str, mode: str, dest: str, **more: str) -> dict[str, str]:
    named = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    return {"User-Agent": "Mozilla/5.0", **named, **{name.replace("_", "-"): value for name, value in more.items()}}


def without_origin(site: str) -> list[Sent]:
    """What names no Origin: all that a page can have a browser get without a script, and some with one."""
    kinds = {
        "img": ("no-cors", "image"),
        "script": ("no-cors", "script"),
        "stylesheet": ("no-cors", "style"),
        "prefetch": ("no-cors", "empty"),
        "audio": ("no-cors", "audio"),
        "iframe": ("navigate", "iframe"),
        "object": ("navigate", "object"),
        "link or form GET": ("navigate", "document"),
        "fetch no-cors": ("no-cors", "empty"),
    }
    sent = [Sent(f"{kind} {site}", headers=fetched(site, *says)) for kind, says in kinds.items()]
    image = fetched(site, "no-cors", "image")
    return [
        *sent,
        Sent(f"HEAD {site}", "HEAD", headers=fetched(site, "no-cors", "empty")),
        Sent(f"img of a model's route {site}", path=CHAT, headers=image),
        Sent(f"img that unloads {site}", path="/unload", headers=image),
        Sent(f"link that unloads {site}", path="/unload", headers=fetched(site, "navigate", "document")),
        Sent(
            f"link that unloads, spelled otherwise {site}",
            path="/unl%6Fad",
            headers=fetched(site, "navigate", "document"),
        ),
        # Each of them would be held open.
        Sent(f"img of events {site}", path="/api/v1/events", headers=image),
        Sent(f"img of logs {site}", path="/api/v1/models/resident/logs/stream", headers=image),
        # Browsers send an Origin with these; were one to forget it, that would not help the page.
        Sent(f"POST {site}", "POST", CHAT, fetched(site, "navigate", "document"), BODY),
        Sent(f"order {site}", "POST", LOAD, fetched(site, "navigate", "document"), b"{}"),
    ]


def with_origin(origin: str) -> list[Sent]:
    """What names the page's origin, or `null` where the page wants that."""
    simple = {"Origin": origin, "Content-Type": "text/plain"}
    form = fetched("cross-site", "navigate", "document", Origin=origin)
    beacon = fetched("cross-site", "no-cors", "empty", Origin=origin, Content_Type="text/plain;charset=UTF-8")
    cors = fetched("cross-site", "cors", "empty", Origin=origin)
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    private = {"Access-Control-Request-Private-Network": "true"}
    urlencoded = {"Content-Type": "application/x-www-form-urlencoded"}
    sent = [
        Sent("form urlencoded", "POST", CHAT, {**form, **urlencoded}, b"model=other"),
        Sent("form text", "POST", CHAT, {**form, "Content-Type": "text/plain"}, BODY),
        Sent("form multipart", "POST", "/v1/audio/transcriptions", form | FORM, multipart([("model", "other")])),
        Sent("form that loads", "POST", LOAD, {**form, "Content-Type": "text/plain"}, b"{}"),
        Sent("form that unloads", "POST", UNLOAD, {**form, "Content-Type": "text/plain"}, b"{}"),
        Sent("form that reloads", "POST", "/api/v1/reload", {**form, **urlencoded}, b""),
        Sent("form to an engine", "POST", UPSTREAM, {**form, **urlencoded}, b"x=1"),
        Sent("fetch no-cors POST", "POST", CHAT, {**fetched("cross-site", "no-cors", "empty"), **simple}, BODY),
        Sent("fetch cors GET", headers=cors),
        Sent("fetch cors simple POST", "POST", CHAT, {**cors, "Content-Type": "text/plain"}, BODY),
        Sent("preflight", "OPTIONS", CHAT, {**cors, **asks}),
        Sent("preflight of an engine's path", "OPTIONS", UPSTREAM, {**cors, **asks}),
        Sent("preflight to a private network", "OPTIONS", CHAT, {**cors, **asks, **private}),
        Sent("beacon", "POST", CHAT, beacon, BODY),
        Sent("EventSource", path=UPSTREAM, headers={**cors, "Accept": "text/event-stream"}),
        Sent("EventSource of events", path="/api/v1/events", headers={**cors, "Accept": "text/event-stream"}),
        Sent("WebSocket", path="/upstream/other/ws", headers={"Origin": origin, **UPGRADE}),
        Sent("WebSocket with its site", path="/upstream/other/ws", headers={**cors, **UPGRADE}),
        Sent("img crossorigin", headers=fetched("cross-site", "cors", "image", Origin=origin)),
        Sent("old browser POST", "POST", CHAT, simple, BODY),
    ]
    return [Sent(f"{one.name} {origin}", one.method, one.path, one.headers, one.body) for one in sent]


def rebound() -> list[Sent]:
    """The page's own name leads to this machine: for the browser everything is of one origin."""
    host = {"Host": "evil.example:8210"}
    page = {**host, **fetched("same-origin", "cors", "empty")}
    origin = {"Origin": "http://evil.example:8210"}
    return [
        Sent("rebound img", headers={**host, **fetched("same-origin", "no-cors", "image")}),
        Sent("rebound fetch", headers=page),
        Sent("rebound POST", "POST", CHAT, {**page, **origin}, BODY),
        Sent("rebound order", "POST", LOAD, {**page, **origin}, b"{}"),
        Sent("rebound typed", headers={**host, **fetched("none", "navigate", "document")}),
        Sent("rebound WebSocket", path="/upstream/other/ws", headers={**host, **origin, **UPGRADE}),
    ]


def old() -> list[Sent]:
    """Browsers from before Sec-Fetch-Site say which page it is, unless the page forbids it."""
    return [
        Sent("old img", headers={"Referer": f"{EVIL}/page?of=theirs"}),
        Sent("old img of an origin", headers={"Referer": f"{EVIL}/"}),
        Sent("old img, spelt oddly", headers={"Referer": "https://127.0.0.1:8210@evil.example/"}),
        Sent("old POST", "POST", CHAT, {"Referer": f"{EVIL}/", "Content-Type": "text/plain"}, BODY),
        Sent("old HEAD", "HEAD", headers={"Referer": f"{EVIL}/"}),
    ]


FOREIGN = [
    *without_origin("cross-site"),
    *without_origin("same-site"),
    # One that we do not know is not ours.
    Sent("img of a new kind", headers=fetched("same-planet", "no-cors", "image")),
    *with_origin(EVIL),
    *with_origin("null"),
    *with_origin(NEIGHBOUR),
    *rebound(),
    *old(),
    Sent(
        "old browser, neighbour's page", "POST", CHAT, {"Referer": f"{NEIGHBOUR}/", "Content-Type": "text/plain"}, BODY
    ),
]


async def refused(gate: JournaledGateway, sent: Sent) -> None:
    async with await Raw.open(gate.app) as raw:
        raw.send(sent.rendered())
        answer = await raw.answer(bodiless=sent.method == "HEAD")
    assert answer.status == 403
    assert not any(name.startswith("access-control-") for name in answer.headers)
    if sent.method != "HEAD":
        assert answer.error["code"] == "host_not_allowed"


@pytest.mark.parametrize("sent", FOREIGN, ids=str)
async def test_page_of_another_site_reaches_nothing(gate: JournaledGateway, sent: Sent) -> None:
    if not is_ready(gate.app, "resident"):
        assert (await chat(gate.app, "resident")).text == "resident 1 2 3"
    await at_rest(gate.app)
    before = gate.facts()
    await refused(gate, sent)
    assert gate.facts() == before


# --- what may be read by anyone who gets there ----------------------------------------------------------------------

STREAMS = ("/api/v1/events", "/api/v1/models/resident/logs/stream")
NAMES = {
    "picture": "1",
    "job_id": "job-1",
    "task_id": "load-1",
    "model_id": "resident",
    "request_id": "r-1",
    "lease_id": "l-1",
}


async def readable(gate: JournaledGateway) -> list[str]:
    """Every path of the gateway's own that answers to GET."""
    async with await Raw.open(gate.app) as raw:
        raw.send(request_bytes("GET", "/api/v1/openapi.json", None))
        paths = (await raw.answer()).json()["paths"]
    named = [re.sub(r"{(\w+)(:path)?}", lambda found: NAMES[found[1]], path) for path in paths if "get" in paths[path]]
    return [*named, "/models", "/api/v1/docs", "/api/v1/openapi.json", "/nothing"]


async def test_nothing_that_answers_to_get_changes_anything(gate: JournaledGateway) -> None:
    """Neither by an image of another site, which is refused, nor by a link to it, which shows what is asked for."""
    if not is_ready(gate.app, "resident"):
        assert (await chat(gate.app, "resident")).text == "resident 1 2 3"
    await at_rest(gate.app)
    before, paths = gate.facts(), await readable(gate)
    assert {*STREAMS, "/health", "/metrics", "/v1/models", "/api/v1/status", "/api/v1/leases/l-1"} <= set(paths)
    for path in paths:
        for site in ("cross-site", "same-site"):
            await refused(gate, Sent("img", path=path, headers=fetched(site, "no-cors", "image")))
            async with await Raw.open(gate.app) as raw:
                raw.send(Sent("link", path=path, headers=fetched(site, "navigate", "document")).rendered())
                # 400: no model here has versions.
                assert (await raw.head())[0] in (200, 400, 404), path
    assert gate.facts() == before


# --- what must be served --------------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}
SDK = {"User-Agent": "OpenAI/Python 2.0", "X-Stainless-Lang": "python", "Authorization": "Bearer none", **JSON}
OWN = {"Origin": f"http://{ME}"}
HONEST = [
    Sent("typed address", headers=fetched("none", "navigate", "document")),
    Sent("own page", headers=fetched("same-origin", "cors", "empty")),
    Sent("own page's image", headers=fetched("same-origin", "no-cors", "image")),
    Sent("own page's frame", headers=fetched("same-origin", "navigate", "iframe")),
    Sent("own page's form", "POST", CHAT, {**fetched("same-origin", "cors", "empty"), **OWN, **JSON}, BODY),
    Sent("own page's order", "POST", LOAD, {**fetched("same-origin", "cors", "empty"), **OWN, **JSON}, b"{}"),
    Sent("allowed page", headers=fetched("cross-site", "cors", "empty", Origin=FRIEND)),
    Sent("allowed page's POST", "POST", CHAT, {**fetched("cross-site", "cors", "empty", Origin=FRIEND), **JSON}, BODY),
    Sent("allowed page's image crossorigin", headers=fetched("cross-site", "cors", "image", Origin=FRIEND)),
    Sent("curl", headers={"User-Agent": "curl/8.5.0", "Accept": "*/*"}),
    Sent("curl POST", "POST", CHAT, {"User-Agent": "curl/8.5.0", "Content-Type": "text/plain"}, BODY),
    Sent("OpenAI SDK", "POST", CHAT, SDK, BODY),
    Sent("old browser, own page", headers={"Referer": f"http://{ME}/upstream/other/"}),
    Sent("old browser, allowed page", headers={"Referer": f"{FRIEND}/"}),
]


@pytest.mark.parametrize("sent", HONEST, ids=str)
async def test_honest_callers_are_served(gate: JournaledGateway, sent: Sent) -> None:
    async with await Raw.open(gate.app) as raw:
        raw.send(sent.rendered())
        assert (await raw.answer()).status == 200
    assert is_ready(gate.app, "other")


@pytest.mark.parametrize(
    "headers",
    [{"Origin": FRIEND, **UPGRADE}, {**fetched("same-origin", "websocket", "websocket"), **OWN, **UPGRADE}, UPGRADE],
    ids=["allowed page", "own page", "program"],
)
async def test_websockets_of_honest_callers_reach_the_engine(gate: JournaledGateway, headers: dict[str, str]) -> None:
    async with await Raw.open(gate.app) as raw:
        raw.send(Sent("WebSocket", path="/upstream/other/ws", headers=headers).rendered())
        assert (await raw.head())[0] == 101
        raw.send(b"hello")
        assert await raw.reader.readexactly(5) == b"hello"
    await at_rest(gate.app)


@pytest.mark.parametrize("is_private", [False, True])
async def test_allowed_page_hears_that_it_may_ask(gate: JournaledGateway, is_private: bool) -> None:
    """Also one of the internet that asks for a private address."""
    asks = {"Origin": FRIEND, "Access-Control-Request-Method": "POST"}
    if is_private:
        asks["Access-Control-Request-Private-Network"] = "true"
    async with await Raw.open(gate.app) as raw:
        raw.send(Sent("preflight", "OPTIONS", CHAT, asks).rendered())
        answer = await raw.answer(bodiless=True)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, FRIEND)
    assert answer.headers.get("access-control-allow-private-network") == ("true" if is_private else None)


async def test_gateway_for_all_pages_serves_them(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"other": fake("other")}, server={"allowed_origins": ["*"]}) as app:
        for headers in (fetched("cross-site", "no-cors", "image"), {"Referer": f"{EVIL}/"}, {"Origin": EVIL}):
            async with await Raw.open(app) as raw:
                raw.send(Sent("any", headers=headers).rendered())
                assert (await raw.answer()).status == 200
