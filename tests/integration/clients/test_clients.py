"""What each client asks, as operators see it; cooldown of clients that only make mistakes; cancelled requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.facts import at_rest, edit
from tests.integration.raw import CHAT, Answer, Raw, asking, http, request_bytes
from tests.waiting import until

PATH = "/api/v1/clients"
KEYS = [
    {"name": "alice", "tenant": "lab"},
    {"name": "bob"},
    {"name": "ops", "verbs": ["read"]},
    {"name": "boss", "admin": True},
]
SERVER = {"api_keys": [{**key, "key": f"{key['name']}-key"} for key in KEYS]}
COOLDOWN = {"errors_max": 3, "cooldown_s": 600, "cooldown_max_s": 10_000}


async def call(app: App, key: str, body: Any, client: str = "", path: str = CHAT, method: str = "POST") -> Answer:
    headers = {"Authorization": f"Bearer {key}-key", **({"X-Client-ID": client} if client else {})}
    if isinstance(body, bytes):
        return await http(app, method, path, body=body, headers=headers)
    return await http(app, method, path, body, headers=headers)


async def clients(app: App, key: str = "boss") -> list[dict[str, Any]]:
    answer = await call(app, key, None, path=PATH, method="GET")
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json()["clients"]
    return found


def is_cooling(answer: Answer) -> bool:
    if answer.status != 429:
        return False
    assert (answer.error["code"], answer.error["type"]) == ("cooling_down", "rate_limit_error")
    assert 0 < int(answer.headers["retry-after"]) <= 600
    return True


async def test_operators_see_what_each_client_asks(tmp_path: Path) -> None:
    profiles = {"labs": {"tenants": ["lab"]}}
    async with gateway(tmp_path, {"a": fake("a"), "b": fake("b")}, server=SERVER, profiles=profiles) as app:
        for model in ("a", "a", "b"):
            assert (await call(app, "alice", asking(model), "editor")).status == 200
        await call(app, "alice", asking("nothing"), "editor")
        # The fake engine refuses this itself.
        assert (await call(app, "alice", asking("a", tokens="many"), "editor")).status == 400
        await call(app, "alice", asking("a", x_client_id="bot"), "editor")
        await call(app, "alice", asking("nothing", x_client_id="bot"))
        await call(app, "bob", b"{broken")
        await at_rest(app)
        rows = {(row["key"], row["client"]): row for row in await clients(app)}
        assert set(rows) == {("alice", "editor"), ("alice", "bot"), ("bob", None)}
        editor = rows["alice", "editor"]
        assert (editor["tenant"], editor["profile"], editor["requests"]) == ("lab", "labs", 5)
        assert editor["models"] == [{"model": "a", "requests": 3}, {"model": "b", "requests": 1}]
        assert {one["code"]: one["count"] for one in editor["errors"]} == {"model_not_found": 1, "status_400": 1}
        assert (editor["mistakes"], editor["failed"], editor["cooling_down_s"]) == (2, 0, None)
        assert 0 < editor["requests_per_minute"] <= 5
        assert rows["alice", "bot"]["requests"] == 2
        assert (rows["bob", None]["tenant"], rows["bob", None]["profile"]) == ("bob", None)
        assert len((await call(app, "boss", None, path=f"{PATH}?limit=1", method="GET")).json()["clients"]) == 1


async def test_a_client_that_only_makes_mistakes_cools_down_alone(tmp_path: Path) -> None:
    models = {"a": fake("a", routes=["/echo/**"])}
    async with gateway(tmp_path, models, server=SERVER, clients=COOLDOWN) as app:
        for _ in range(4):
            assert (await call(app, "alice", asking("nothing"), "bad")).status == 404
        assert is_cooling(await call(app, "alice", asking("a"), "bad"))
        # By its headers, before the body is sent.
        async with await Raw.open(app) as raw:
            headers = {"Authorization": "Bearer alice-key", "X-Client-ID": "bad", "Content-Length": "1000000"}
            raw.send(request_bytes("POST", CHAT, b"", headers))
            assert is_cooling(await raw.answer())
        assert is_cooling(await call(app, "alice", {}, "bad", path="/upstream/a/echo/x"))
        later = {"path": CHAT, "body": asking("a")}
        assert is_cooling(await call(app, "alice", later, "bad", path="/v1/jobs"))
        assert is_cooling(await call(app, "alice", asking("a", x_client_id="bad")))
        for key, client in (("alice", "good"), ("alice", ""), ("bob", "bad")):
            assert (await call(app, key, asking("a"), client)).status == 200
        (row,) = [row for row in await clients(app) if (row["key"], row["client"]) == ("alice", "bad")]
        assert row["cooldowns"] == 1 and 500 < row["cooling_down_s"] <= 600
        assert row["mistakes"] == 4
        metrics = await call(app, "boss", None, path="/metrics", method="GET")
        assert b'code="cooling_down"' in metrics.body


async def test_clients_that_only_their_bodies_name_are_told_apart(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}, server=SERVER, clients=COOLDOWN) as app:
        for _ in range(4):
            assert (await call(app, "alice", asking("nothing", x_client_id="bad"))).status == 404
        assert is_cooling(await call(app, "alice", asking("nothing", x_client_id="bad")))
        assert is_cooling(await call(app, "alice", asking("a", x_client_id="bad")))
        assert (await call(app, "alice", asking("a", x_client_id="good"))).status == 200
        for _ in range(4):
            assert (await call(app, "alice", b"{broken")).status == 400
        assert is_cooling(await call(app, "alice", b"{broken"))
        assert (await call(app, "alice", asking("a", x_client_id="good"))).status == 200


async def test_what_is_not_the_callers_fault_never_cools_it_down(tmp_path: Path) -> None:
    broken = fake("broken", "--crash-at", "request")
    limits = {"lab": {"requests_per_minute": 5}}
    models = {"a": fake("a"), "broken": broken}
    async with gateway(tmp_path, models, server=SERVER, clients={**COOLDOWN, "errors_max": 1}, tenants=limits) as app:
        for _ in range(3):
            assert (await call(app, "bob", asking("broken"))).status >= 500
        # Keys that are none of ours, under the names of clients that are.
        for _ in range(4):
            assert (await call(app, "guessed", asking("a"), "editor")).status == 401
        assert (await call(app, "bob", asking("a"))).status == 200
        answers = [await call(app, "alice", asking("a"), "editor") for _ in range(8)]
        assert {answer.error["code"] for answer in answers if answer.status != 200} == {"rate_limit_exceeded"}
        rows = await clients(app)
        assert [row["cooldowns"] for row in rows] == [0] * len(rows)


async def test_an_engines_own_refusals_count_and_a_reload_ends_it(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}, server=SERVER, clients=COOLDOWN) as app:
        for _ in range(4):
            assert (await call(app, "alice", asking("a", tokens="many"), "bad")).status == 400
        await at_rest(app)
        assert is_cooling(await call(app, "alice", asking("a"), "bad"))
        edit(tmp_path, lambda said: said["clients"].update(errors_max=None))
        assert (await call(app, "boss", {}, path="/api/v1/reload")).status == 200
        assert (await call(app, "alice", asking("a"), "bad")).status == 200


LOADING = {"slow": fake("slow", "--load-s", "60")}


async def test_a_waiting_request_is_listed_and_cancelled(tmp_path: Path) -> None:
    async with gateway(tmp_path, LOADING) as app, await Raw.open(app) as raw:
        raw.ask(asking("slow"))
        await until(lambda: len(app.activity) == 1)
        page = (await http(app, "GET", "/api/v1/queue")).json()
        assert (page["depth"], len(page["requests"])) == (1, 1)
        row = page["requests"][0]
        assert (row["position"], row["model"], row["plan"], row["behind"]) == (1, "slow", "join", [])
        assert row["route"] == "chat"
        events = app.hub.subscribe()
        said = await http(app, "DELETE", f"/api/v1/requests/{row['id']}")
        assert (said.status, said.json()) == (200, {"id": row["id"], "state": "waiting"})
        told = await anext(event async for event in events if event.kind == "cancel")
        assert told.data == {"request": row["id"], "model": "slow", "state": "waiting", "key": "anyone"}
        status, headers = await raw.head()
        answer = await raw.rest(status, headers)
        assert (status, answer.json()["error"]["code"]) == (410, "cancelled")
        assert (await http(app, "GET", "/api/v1/queue")).json()["requests"] == []
        # Once more: it is over.
        assert (await http(app, "DELETE", f"/api/v1/requests/{row['id']}")).status == 404
        shown = (await http(app, "GET", f"/api/v1/requests/{row['id']}")).json()
        assert (shown["state"], shown["status"], shown["error_code"]) == ("done", 410, "cancelled")


async def test_a_running_answer_is_cut(tmp_path: Path) -> None:
    models = {"long": fake("long", "--token-s", "0.2", "--tokens", "1000")}
    async with gateway(tmp_path, models) as app, await Raw.open(app) as raw:
        raw.ask(asking("long", stream=True))
        status, headers = await raw.head()
        request_id = headers["x-request-id"]
        said = await http(app, "DELETE", f"/api/v1/requests/{request_id}")
        assert (status, said.status, said.json()["state"]) == (200, 200, "serving")
        answer = await raw.rest(status, headers)
        assert answer.data[-1]["error"]["code"] == "cancelled"
        # Its slot is free again.
        await until(lambda: not app.tickets.open)
