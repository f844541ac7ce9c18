"""An operator looks at the queue, and ends requests that wait or are answered."""

from __future__ import annotations

from pathlib import Path

from tests.harness import fake, gateway
from tests.integration.raw import Raw, asking, chat, http
from tests.waiting import until

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


async def test_an_unknown_request_cannot_be_cancelled(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"quick": fake("quick")}) as app:
        assert (await http(app, "DELETE", "/api/v1/requests/r-none-1")).status == 404
        done = await chat(app, "quick")
        assert (await http(app, "DELETE", f"/api/v1/requests/{done.headers['x-request-id']}")).status == 404
