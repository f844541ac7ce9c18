"""Jobs through a running gateway: submitted, watched, cancelled, refused, kept over a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.features.jobs.jobs import HANDED_OVER_MAX
from tests.full_disk import full_disk
from tests.harness import fake, gateway
from tests.integration.facts import OVER, Journal, edit, is_ready, over
from tests.integration.raw import CHAT, Answer, Raw, http, request_bytes
from tests.samples.sounds import FORM, form
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

JOBS = "/v1/jobs"
COUNTED = {"metrics_aliases": "runner-api"}
KEYS = [
    {"name": "ann", "key": "ann-key"},
    {"name": "bob", "key": "bob-key"},
    {"name": "boss", "key": "boss-key", "admin": True},
]


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-key"}


def chat(model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}


async def post(app: App, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
    raw_body = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with await Raw.open(app) as raw:
        raw.send(request_bytes("POST", path, raw_body, headers))
        return await raw.answer()


async def refusals(app: App) -> int:
    """How many requests to models were counted as errors."""
    metrics = (await http(app, "GET", "/metrics")).body.decode().splitlines()
    counted = [line for line in metrics if line.startswith("vllm_requests_total{") and 'status="error"' in line]
    return round(sum(float(line.rpartition(" ")[2]) for line in counted))


async def submit(app: App, body: Any, route: str = CHAT, *, by: Mapping[str, str] | None = None, **more: Any) -> str:
    answer = await post(app, JOBS, {"route": route, "body": body, **more}, by)
    assert answer.status == 202, answer.body
    assert answer.headers["location"] == f"{JOBS}/{answer.json()['id']}"
    return str(answer.json()["id"])


async def job(app: App, id: str, by: Mapping[str, str] | None = None) -> dict[str, Any]:
    answer = await http(app, "GET", f"{JOBS}/{id}", headers=by)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


async def ended(app: App, id: str, by: Mapping[str, str] | None = None) -> dict[str, Any]:
    return await over(app, f"{JOBS}/{id}", by)


async def status_of(app: App, id: str, by: Mapping[str, str] | None = None) -> str:
    return str((await job(app, id, by))["status"])


async def result(app: App, id: str, by: Mapping[str, str] | None = None) -> Answer:
    return await http(app, "GET", f"{JOBS}/{id}/result", headers=by)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    async with gateway(tmp_path_factory.mktemp("jobs"), {"m": fake("m")}) as app:
        yield app


# --- the way of a job -----------------------------------------------------------------------------------------------


async def test_a_job_is_run_like_a_request_and_its_answer_kept(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m", aliases=["also"])}) as app:
        answer = await post(app, JOBS, {"route": CHAT, "body": chat("also", tokens=3)})
        assert answer.status == 202
        taken = answer.json()
        assert (taken["status"], taken["route"], taken["model"]) == ("queued", CHAT, "m")
        assert taken["created"] > 1_700_000_000
        row = await ended(app, taken["id"])
        assert (row["status"], row["progress"], row["error"]) == ("done", 1.0, None)
        assert row["created"] <= row["started"] <= row["ended"]
        origin = {"Origin": "http://localhost"}
        kept = await result(app, taken["id"], by=origin)
        assert (kept.status, kept.text) == (200, "m 1 2")
        assert kept.headers["content-type"] == "application/json"
        # What every answer gets is added when the result is fetched.
        assert kept.headers["access-control-allow-origin"] == origin["Origin"]
        assert row["result_bytes"] > len(kept.body)
        # Counted as every other request.
        records = [record for record in app.activity.recent(10) if record.route == "chat"]
        assert [(record.status, record.model, record.completion_tokens) for record in records] == [(200, "m", 3)]
        assert row["request_id"] == records[0].id


async def test_prefer_respond_async_makes_a_job_of_any_request(app: App) -> None:
    answer = await post(app, CHAT, chat(), {"Prefer": "wait=1, Respond-Async"})
    assert (answer.status, answer.headers["preference-applied"]) == (202, "respond-async")
    row = await ended(app, answer.json()["id"])
    assert row["status"] == "done"
    # Another preference is none for a job.
    assert (await post(app, CHAT, chat(), {"Prefer": "respond-asynchronously"})).status == 200


async def test_a_stream_is_kept_as_collected(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m", "--load-s", "0.5")}, server={"heartbeat_after_s": 0.1}) as app:
        id = await submit(app, chat(stream=True, tokens=3))
        assert (await ended(app, id))["status"] == "done"
        kept = await result(app, id)
        assert kept.headers["content-type"].startswith("text/event-stream")
        assert kept.data[-1] == "[DONE]"
        # Not a heartbeat: no client waited.
        assert not any(event.startswith(":") for event in kept.events)
        said = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in kept.data[:-1])
        assert said == "m 1 2"


async def test_a_form_is_a_job_by_its_own_route(app: App) -> None:
    path = "/v1/audio/transcriptions"
    answer = await post(app, path, form([("model", "m")], b"x" * 300_000), FORM | {"Prefer": "respond-async"})
    assert answer.status == 202, answer.body
    assert (await ended(app, answer.json()["id"]))["status"] == "done"
    assert (await result(app, answer.json()["id"])).json()["sizes"] == {"model": 1, "file": 300_000}
    refused = await post(app, JOBS, {"route": path, "body": {"model": "m"}})
    assert (refused.status, refused.error["param"]) == (400, "route")
    assert "Prefer: respond-async" in refused.error["message"]


# The fields that are sent, and the first one that is missing.
FORMS = [
    ("/v1/audio/transcriptions", ("model",), "file"),
    ("/v1/audio/translations", ("model", "prompt"), "file"),
    ("/v1/images/edits", ("model", "prompt"), "image"),
    ("/v1/images/edits", ("model", "image"), "prompt"),
    ("/v1/images/edits", ("image", "prompt"), "model"),
    ("/v1/images/variations", ("model",), "image"),
]


async def test_forms_that_lack_a_field_are_no_jobs(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}) as app:
        for path, sent, missing in FORMS:
            for headers in (FORM, FORM | {"Prefer": "respond-async"}):
                refused = await post(app, path, form([(name, "m") for name in sent]), headers)
                assert (refused.status, refused.error["param"]) == (400, missing), (path, sent, refused.body)
        assert not app.slots.live, "nothing was started"


async def test_an_engines_own_route_is_a_job_too(tmp_path: Path) -> None:
    models = {"m": fake("m", routes=["/echo/open"])}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        id = await submit(app, {"a": [1]}, "/upstream/m/echo/open?x=1", by=key("ann"))
        await until(lambda: done_for(app, id, key("ann")))
        echoed = (await result(app, id, key("ann"))).json()
        assert (echoed["method"], echoed["path"], echoed["json"]) == ("POST", "/echo/open?x=1", {"a": [1]})
        closed = await post(app, JOBS, {"route": "/upstream/m/echo/shut", "body": {}}, key("ann"))
        assert (closed.status, closed.error["code"]) == (403, "not_allowed")


async def done_for(app: App, id: str, by: Mapping[str, str]) -> bool:
    return (await job(app, id, by))["status"] == "done"


async def test_the_scheduler_gives_place_and_time(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m", concurrency=1)}) as app:
        # Answers are measured first.
        assert (await post(app, CHAT, chat(tokens=2, token_s=0.1))).status == 200
        ids = [await submit(app, chat(tokens=40, token_s=0.1)) for _ in range(3)]
        await until(lambda: is_status(app, ids[0], "running"))
        rows = [await job(app, id) for id in ids]
        assert [row["position"] for row in rows] == [None, 1, 2]
        assert 0 < rows[0]["progress"] < 1
        assert rows[1]["progress"] == 0 and rows[1]["eta_s"] > 0
        assert rows[1]["request_id"] in {record.id for record in app.activity.recent(10)}
        for id in ids:
            await http(app, "DELETE", f"{JOBS}/{id}")


async def is_status(app: App, id: str, status: str) -> bool:
    return await status_of(app, id) == status


# --- cancelled ------------------------------------------------------------------------------------------------------


async def test_delete_cancels_at_once_and_frees_the_engine(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"m": fake("m", *journal.switches, concurrency=1)}) as app:
        running = await submit(app, chat(tokens=10_000, token_s=0.1))
        waiting = await submit(app, chat())
        await until(lambda: is_status(app, running, "running"))
        assert (await http(app, "DELETE", f"{JOBS}/{waiting}")).json()["status"] == "cancelled"
        assert (await http(app, "DELETE", f"{JOBS}/{running}")).json()["status"] == "cancelled"
        await until(lambda: journal.count("cancelled") == 1)
        assert journal.count("request") == 1
        assert (await result(app, running)).error["code"] == "job_cancelled"
        # The engine is free: the next is answered.
        last = await submit(app, chat())
        assert (await ended(app, last))["status"] == "done"
        # What has ended stays as it is.
        assert (await http(app, "DELETE", f"{JOBS}/{last}")).json()["status"] == "done"
        assert (await result(app, last)).status == 200


# --- whose ----------------------------------------------------------------------------------------------------------


async def test_a_job_belongs_to_its_tenant(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, server={"api_keys": KEYS}) as app:
        id = await submit(app, chat(), by=key("ann"))
        await until(lambda: done_for(app, id, key("ann")))
        for method, path in (("GET", ""), ("GET", "/result"), ("DELETE", "")):
            answer = await http(app, method, f"{JOBS}/{id}{path}", headers=key("bob"))
            assert (answer.status, answer.error["code"]) == (404, "not_found")
        listed = {
            name: (await http(app, "GET", JOBS, headers=key(name))).json()["data"] for name in ("ann", "bob", "boss")
        }
        assert [len(rows) for rows in listed.values()] == [1, 0, 1]
        assert (listed["ann"][0]["tenant"], listed["boss"][0]["tenant"]) == (None, "ann")
        assert (await result(app, id, key("ann"))).status == 200


async def test_jobs_are_listed_by_status(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}) as app:
        ids = [await submit(app, chat()) for _ in range(3)]
        for id in ids:
            await ended(app, id)
        every = (await http(app, "GET", JOBS)).json()["data"]
        assert [row["id"] for row in every] == ids[::-1]
        assert len((await http(app, "GET", f"{JOBS}?status=done&limit=2")).json()["data"]) == 2
        assert (await http(app, "GET", f"{JOBS}?status=failed")).json()["data"] == []
        assert (await http(app, "GET", f"{JOBS}?status=lost")).status == 400


async def test_events_tell_each_status(app: App) -> None:
    with app.hub.subscribe() as events:
        id = await submit(app, chat())
        seen: list[str] = []
        async with asyncio.timeout(30):
            async for event in events:
                if event.kind == "job" and event.data["id"] == id:
                    seen.append(event.data["status"])
                    if seen[-1] in OVER:
                        break
    assert seen == ["queued", "running", "done"]


# --- refused and failed ---------------------------------------------------------------------------------------------


BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "invalid_request"),
    (b'{"route": "/v1/chat/completions", "body": ' + b"[" * 9_000, 400, "invalid_request"),
    ({"body": {}}, 400, "invalid_request"),
    ({"route": CHAT}, 400, "invalid_request"),
    ({"route": CHAT, "body": chat(), "retries": 3}, 400, "invalid_request"),
    ({"route": CHAT, "body": [1]}, 400, "invalid_request"),
    ({"route": CHAT, "body": "text"}, 400, "invalid_request"),
    ({"route": CHAT, "body": {"messages": []}}, 400, "invalid_request"),
    ({"route": CHAT, "body": chat("none")}, 404, "model_not_found"),
    ({"route": "/v1/models", "body": {}}, 400, "invalid_request"),
    ({"route": "/v1/jobs", "body": {}}, 400, "invalid_request"),
    ({"route": "/nowhere", "body": {}}, 400, "invalid_request"),
    ({"route": "chat\r\nx: y", "body": {}}, 400, "invalid_request"),
    ({"route": "/upstream/none/x", "body": {}}, 404, "model_not_found"),
    ({"route": "/v1/embeddings", "body": {"model": "m"}}, 400, "unsupported"),
    # Routes that are no paths.
    *(
        ({"route": route, "body": {"model": "m"}}, 400, "invalid_request")
        for route in ("/v1/chät", "/v1/\u4e2d", "/v1/chat completions", "v1/x", "/\0", "\ud800")
    ),
]


async def test_bad_jobs_are_refused_before_anything_is_kept(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m", abilities=["chat"])}, server=COUNTED) as app:
        for number, (body, status, code) in enumerate(BAD, 1):
            answer = await post(app, JOBS, body)
            assert (answer.status, answer.error["code"]) == (status, code), (body, answer.body)
            assert await refusals(app) == number, body
        assert (await http(app, "GET", JOBS)).json()["data"] == []
        assert not list((tmp_path / "state" / "jobs").iterdir())
        assert not is_ready(app, "m")


async def test_prefer_with_bad_input_is_refused_like_the_request(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, server=COUNTED) as app:
        later = {"Prefer": "respond-async"}
        assert (await post(app, CHAT, b"{", later)).status == 400
        assert (await post(app, CHAT, chat("none"), later)).error["code"] == "model_not_found"
        assert (await post(app, CHAT, chat(), {**later, "X-Job-Retry": "maybe"})).error["param"] == "X-Job-Retry"
        assert (await http(app, "GET", CHAT, headers=later)).status == 405
        assert await refusals(app) == 4
        assert app.edge.bodies.memory_bytes == 0


async def test_unknown_and_unfinished_results(app: App) -> None:
    assert (await result(app, "job-" + "0" * 32)).status == 404
    assert (await http(app, "DELETE", f"{JOBS}/../../id")).status == 404
    id = await submit(app, chat(tokens=1000, token_s=0.1))
    early = await result(app, id)
    assert (early.status, early.error["code"], early.headers["retry-after"]) == (409, "job_unfinished", "1")
    await http(app, "DELETE", f"{JOBS}/{id}")


async def test_a_result_that_was_removed_by_hand_is_gone(app: App, capfd: pytest.CaptureFixture[str]) -> None:
    id = await submit(app, chat())
    assert (await ended(app, id))["status"] == "done"
    (app.state_dir.path / "jobs" / f"{id}.result").unlink()
    gone = await result(app, id)
    assert (gone.status, gone.error["code"]) == (410, "result_gone")
    assert id in gone.error["message"]
    assert f"result is gone job={id}" in capfd.readouterr().err


async def test_an_engines_error_is_the_result_of_a_failed_job(tmp_path: Path) -> None:
    models = {"m": fake("m", "--sse-weird", "error-500"), "b": fake("b", "--exit-before-bind")}
    async with gateway(tmp_path, models) as app:
        id = await submit(app, chat(stream=True))
        row = await ended(app, id)
        assert (row["status"], row["error"]["code"]) == ("failed", "engine_error")
        assert (await result(app, id)).status == 500
        broken = await submit(app, chat("b"))
        row = await ended(app, broken)
        assert (row["status"], row["error"]["code"]) == ("failed", "model_load_failed")
        assert (await result(app, broken)).error["code"] == "model_load_failed"
        assert row["request_id"] in {record.id for record in app.activity.recent(10)}


@pytest.mark.parametrize("retry", [False, True])
async def test_an_engine_that_dies_runs_a_job_again_only_if_it_may(tmp_path: Path, retry: bool) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"m": fake("m", *journal.switches)}, scheduler={"backoff_s": 0.1}) as app:
        id = await submit(app, chat(crash_at="request"), retry=retry)
        row = await ended(app, id)
        assert (row["status"], row["error"]["code"]) == ("failed", "engine_lost")
        assert journal.count("request") == journal.count("ready") == (2 if retry else 1)
        assert (await result(app, id)).error["code"] == "engine_lost"


async def test_a_result_larger_than_the_store_fails_and_frees_the_engine(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {"m": fake("m", *journal.switches, "--sse-weird", "huge-line", "--huge-line-bytes", str(2**20 + 1))}
    async with gateway(tmp_path, models, jobs={"store_mib": 1}) as app:
        id = await submit(app, chat(stream=True))
        row = await ended(app, id)
        assert (row["status"], row["error"]["code"]) == ("failed", "result_too_large")
        answer = await result(app, id)
        assert (answer.status, answer.error["code"], answer.error["job_error"]["code"]) == (
            *(502, "job_failed"),
            "result_too_large",
        )
        await until(lambda: not app.tickets.open)
        assert [path.suffix for path in (tmp_path / "state" / "jobs").iterdir()] == [".json"]
        # A request that large is refused.
        large = await post(app, JOBS, {"route": CHAT, "body": chat(pad="x" * 2**20)})
        assert (large.status, large.error["code"]) == (507, "job_store_full")


async def test_a_full_disk_refuses_jobs_and_serves_requests(app: App) -> None:
    assert (await post(app, CHAT, chat())).status == 200
    with full_disk():
        refused = await post(app, JOBS, {"route": CHAT, "body": chat()})
        assert (refused.status, refused.error["code"]) == (507, "job_store_full")
        assert (await post(app, CHAT, chat())).status == 200
    id = await submit(app, chat())
    assert (await ended(app, id))["status"] == "done"


async def test_a_job_that_cannot_be_read_for_now_waits(tmp_path: Path) -> None:
    models = {"m": fake("m", "--load-s", "60")}
    async with gateway(tmp_path, models) as app:
        id = await submit(app, chat())
    request = tmp_path / "state" / "jobs" / f"{id}.request"
    request.rename(tmp_path / "away")
    request.mkdir()
    async with gateway(tmp_path, {"m": fake("m")}) as app:
        assert (await post(app, CHAT, chat())).status == 200
        assert await status_of(app, id) == "queued"
        request.rmdir()
        (tmp_path / "away").rename(request)
        assert (await ended(app, id))["status"] == "done"


async def test_a_disk_that_fills_while_a_job_runs_fails_it(app: App) -> None:
    id = await submit(app, chat(tokens=20, token_s=0.05))
    await until(lambda: is_status(app, id, "running"))
    with full_disk():
        row = await ended(app, id)
    assert (row["status"], row["error"]["code"]) == ("failed", "job_store_full")
    assert (await ended(app, await submit(app, chat())))["status"] == "done"


async def test_too_many_jobs_are_refused_and_ended_ones_make_room(tmp_path: Path) -> None:
    jobs = {"count_max": 2, "unfinished_per_key_max": 2}
    async with gateway(tmp_path, {"m": fake("m", concurrency=1)}, jobs=jobs, server=COUNTED) as app:
        first = await submit(app, chat())
        await ended(app, first)
        slow = [await submit(app, chat(tokens=1000, token_s=0.1)) for _ in range(2)]
        assert (await http(app, "GET", f"{JOBS}/{first}")).status == 404
        full = await post(app, JOBS, {"route": CHAT, "body": chat()})
        assert (full.status, full.error["code"]) == (503, "jobs_full")
        assert await refusals(app) == 1
        for id in slow:
            await http(app, "DELETE", f"{JOBS}/{id}")


async def test_jobs_wait_where_the_queue_is_full(tmp_path: Path) -> None:
    models = {"m": fake("m", concurrency=1)}
    async with gateway(tmp_path, models, scheduler={"queue_depth_max": 1}, server=COUNTED) as app:
        async with await Raw.open(app) as running, await Raw.open(app) as waiting:
            running.ask(chat(tokens=20, token_s=0.05, stream=True))
            assert (await running.head())[0] == 200
            waiting.ask(chat(tokens=1))
            await until(lambda: app.loop.scheduler.state.waitlist.depth == 1, "the queue is full")
            ids = [await submit(app, chat(tokens=2, token_s=0.05)) for _ in range(5)]
            assert (await waiting.answer()).status == 200
        assert [(await ended(app, id))["status"] for id in ids] == ["done"] * 5
        assert await refusals(app) == 0, "one that waits is not refused"


async def test_jobs_leave_half_of_the_queue_to_callers_that_wait(tmp_path: Path) -> None:
    models = {name: fake(name, concurrency=1) for name in ("m", "other")}
    async with gateway(tmp_path, models, scheduler={"queue_depth_max": 10}) as app:
        ids = [await submit(app, chat(tokens=1000, token_s=0.1)) for _ in range(14)]
        await until(lambda: app.loop.scheduler.state.waitlist.depth >= 4, "jobs wait")
        for model in models:
            waits = asyncio.create_task(post(app, CHAT, chat(model, tokens=1)))
            await asyncio.wait({waits}, timeout=0.2)
            assert not waits.done() or (await waits).status == 200, "it is not refused"
            waits.cancel()
        assert app.loop.scheduler.state.waitlist.depth <= 6
        for id in ids:
            await http(app, "DELETE", f"{JOBS}/{id}")


async def test_jobs_that_run_take_no_places_of_the_queue(tmp_path: Path) -> None:
    models = {name: fake(name, concurrency=1) for name in ("m", "other")}
    async with gateway(tmp_path, models, scheduler={"queue_depth_max": 2}) as app:
        runs = await submit(app, chat(tokens=1000, token_s=0.1))
        await until(lambda: is_status(app, runs, "running"))
        assert (await ended(app, await submit(app, chat("other", tokens=1))))["status"] == "done"
        await http(app, "DELETE", f"{JOBS}/{runs}")


async def test_a_job_whose_key_is_removed_while_it_waits_does_not_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {"m": fake("m", *journal.switches, concurrency=1)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        runs = await submit(app, chat(tokens=1000, token_s=0.1), by=key("ann"))
        await until(lambda: app.operation_table.get(runs).status == "running")
        waits = await submit(app, chat(tokens=1), by=key("bob"))
        await until(lambda: app.loop.scheduler.state.waitlist.depth == 1, "it waits in the scheduler")
        edit(tmp_path, lambda said: said["server"].update(api_keys=[KEYS[0], KEYS[2]]))
        await app.reload()
        await http(app, "DELETE", f"{JOBS}/{runs}", headers=key("ann"))
        await until(lambda: app.operation_table.get(waits).status == "failed")
        assert (await job(app, waits, key("boss")))["error"]["code"] == "invalid_api_key"
        assert journal.count("request") == 1


@pytest.mark.slow
async def test_more_jobs_than_are_handed_over_are_all_run_and_no_tenant_waits_for_another(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m", concurrency=1)}, server={"api_keys": KEYS}) as app:
        first = await submit(app, chat(tokens=1000, token_s=0.1), by=key("ann"))
        many = [await submit(app, chat(tokens=1, token_s=0.05), by=key("ann")) for _ in range(HANDED_OVER_MAX + 10)]
        assert (await job(app, many[-1], key("ann")))["position"] >= HANDED_OVER_MAX + 10
        one = await submit(app, chat(tokens=1), by=key("bob"))
        await http(app, "DELETE", f"{JOBS}/{first}", headers=key("ann"))
        await until(lambda: done_for(app, one, key("bob")))
        assert await status_of(app, many[-1], key("ann")) == "queued"
        await until(lambda: done_for(app, many[-1], key("ann")))
        listed = (await http(app, "GET", f"{JOBS}?status=done&limit=1000", headers=key("ann"))).json()["data"]
        assert {row["id"] for row in listed} == set(many)


# --- restarts -------------------------------------------------------------------------------------------------------


async def test_results_and_waiting_jobs_survive_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {"m": fake("m", *journal.switches, concurrency=1)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        done = await submit(app, chat(), by=key("ann"))
        await until(lambda: done_for(app, done, key("ann")))
        ran = await submit(app, chat(tokens=1000, token_s=0.1), by=key("ann"))
        waits = await submit(app, chat(tokens=2), by=key("ann"))
        revoked = await submit(app, chat(tokens=3), by=key("bob"))
        await until(lambda: app.operation_table.get(ran).status == "running")
    async with gateway(tmp_path, models, server={"api_keys": [KEYS[0], KEYS[2]]}) as app:
        assert (await result(app, done, key("ann"))).text == "m 1 2 3"
        row = await job(app, ran, key("ann"))
        assert (row["status"], row["error"]["code"]) == ("failed", "restarted")
        assert (await result(app, ran, key("ann"))).error["job_error"]["code"] == "restarted"
        await until(lambda: done_for(app, waits, key("ann")))
        # Its key is gone, and so is what it may do.
        await until(lambda: app.operation_table.get(revoked).status == "failed")
        assert (await job(app, revoked, key("boss")))["error"]["code"] == "invalid_api_key"
        assert journal.count("request") == 3
