"""Usage through a running gateway: equal to what the engine says on every way of a request, and kept over kill -9."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import GatewayProcess, fake, gateway, gateway_process, tiny
from tests.integration.facts import at_rest, over
from tests.integration.faults import dial, first_events, loaded
from tests.integration.raw import CHAT, Answer, Raw, asking, chat, http
from tests.models import tiny as tiny_model
from tests.models import tiny_embedding, tiny_reranker
from tests.waiting import until

KEYS = [
    {"name": "alice", "key": "gr-alice", "tenant": "red"},
    {"name": "bob", "key": "gr-bob", "tenant": "blue"},
    {"name": "carol", "key": "gr-carol", "tenant": "blue"},
    {"name": "root", "key": "gr-root", "admin": True},
    {"name": "viewer", "key": "gr-viewer", "verbs": ["read"]},
]


def by(key: str) -> dict[str, str]:
    return {"x-api-key": f"gr-{key}"}


async def usage(app: App, query: str = "", key: str = "") -> dict[str, Any]:
    await at_rest(app)
    answer = await http(app, "GET", f"/api/v1/usage{query}", headers=by(key) if key else {})
    assert answer.status == 200, answer.body
    shown: dict[str, Any] = answer.json()
    return shown


async def total(app: App) -> dict[str, Any]:
    found: dict[str, Any] = (await usage(app))["total"]
    return found


# --- on the real llama.cpp ------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    models = {
        "hello": tiny(tiny_model("alpha")),
        "endless": tiny(tiny_model("alpha", loop=True), ctx_size=4096),
        "vectors": tiny(tiny_embedding()),
        "ranks": tiny(tiny_reranker()),
    }
    async with gateway(tmp_path_factory.mktemp("usage"), models) as app:
        yield app


def told(answers: Iterable[dict[str, Any]]) -> tuple[int, int, int]:
    """Prompt, cached and completion tokens, as the engine tells them."""
    prompt = cached = completion = 0
    for answer in answers:
        prompt += answer["usage"]["prompt_tokens"]
        cached += (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        completion += answer["usage"].get("completion_tokens", 0)
    return prompt, cached, completion


class Grown:
    """What the usage of one model grew by since this was made."""

    def __init__(self, app: App, model: str, before: dict[str, Any]) -> None:
        self._app, self._model, self._before = app, model, before

    @classmethod
    async def of(cls, app: App, model: str) -> Grown:
        return cls(app, model, await _of_model(app, model))

    async def by(self, *figures: str) -> tuple[float, ...]:
        now = await _of_model(self._app, self._model)
        return tuple((now.get(name) or 0) - (self._before.get(name) or 0) for name in figures)

    async def tokens(self) -> tuple[float, ...]:
        return await self.by("prompt_tokens", "cached_tokens", "completion_tokens")


async def _of_model(app: App, model: str) -> dict[str, Any]:
    rows = (await usage(app))["rows"]
    return next((row for row in rows if row["model"] == model), {})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/upstream/hello/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_texts_are_counted_as_the_engine_tells_them(real: App, path: str, stream: bool) -> None:
    grown, answers = await Grown.of(real, "hello"), []
    for content in ("hi", "one two three four", "one two three four"):
        body: dict[str, Any] = asking("hello", prompt=content, max_tokens=20, stream=stream)
        body["messages"][0]["content"] = content
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = await http(real, "POST", path, body)
        assert answer.status == 200, answer.body
        answers.append([one for one in answer.data if one != "[DONE]"][-1] if stream else answer.json())
    assert await grown.tokens() == told(answers)
    requests, uncounted, estimated, seconds = await grown.by("requests", "uncounted", "estimated", "answer_s")
    assert (requests, uncounted, estimated) == (3, 0, 0) and seconds > 0
    assert (await grown.by("gpu_s"))[0] > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_path_of_the_engines_own_is_counted(real: App) -> None:
    grown = await Grown.of(real, "hello")
    answer = await http(real, "POST", "/upstream/hello/completion", {"prompt": "one two", "n_predict": 3})
    said = answer.json()
    assert await grown.tokens() == (said["tokens_evaluated"], said["timings"]["cache_n"], said["tokens_predicted"])
    assert (
        await http(real, "POST", "/upstream/hello/tokenize", {"content": '"usage": {"prompt_tokens": 9}'})
    ).status == 200
    assert (await http(real, "GET", "/upstream/hello/props")).status == 200
    assert (await grown.by("requests", "uncounted"), (await grown.tokens())[0]) == ((3, 0), said["tokens_evaluated"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("prefix", ["/v1", "/upstream/vectors/v1"])
@pytest.mark.parametrize("count", [1, 60])
async def test_embeddings_are_counted_however_long_the_answer_is(real: App, prefix: str, count: int) -> None:
    grown = await Grown.of(real, "vectors")
    answer = await http(real, "POST", f"{prefix}/embeddings", {"model": "vectors", "input": ["red", "green"] * count})
    assert answer.status == 200 and (len(answer.body) > 32_768) == (count > 1)
    assert await grown.tokens() == told([answer.json()]) and (await grown.tokens())[0] > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_reranking_is_counted(real: App) -> None:
    grown = await Grown.of(real, "ranks")
    answer = await http(real, "POST", "/v1/rerank", {"model": "ranks", "query": "a", "documents": ["bad", "good"]})
    assert await grown.tokens() == told([answer.json()])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_job_is_counted_once(real: App) -> None:
    grown = await Grown.of(real, "hello")
    order = {"route": CHAT, "body": asking("hello", max_tokens=20)}
    made = (await http(real, "POST", "/v1/jobs", order)).json()
    assert (await over(real, f"/v1/jobs/{made['id']}"))["status"] == "done"
    result = await http(real, "GET", f"/v1/jobs/{made['id']}/result")
    assert await grown.tokens() == told([result.json()])
    assert await grown.by("requests") == (1,)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, "/upstream/endless/v1/chat/completions"])
async def test_of_a_stream_that_is_left_the_tokens_seen_count(real: App, path: str) -> None:
    await loaded(real, "endless")
    grown = await Grown.of(real, "endless")
    async with await Raw.open(real) as raw:
        raw.ask(asking("endless", stream=True), path=path)
        await first_events(raw, 10)
    requests, aborted, estimated, tokens = await grown.by("requests", "aborted", "estimated", "completion_tokens")
    assert (requests, aborted, estimated) == (1, 1, 1) and tokens >= 9
    assert (await grown.by("prompt_tokens", "uncounted")) == (0, 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_of_a_json_answer_that_is_left_nothing_is_made_up(real: App) -> None:
    await loaded(real, "endless")
    grown = await Grown.of(real, "endless")
    async with await Raw.open(real) as raw:
        raw.ask(asking("endless"))
        await until(lambda: any(record.state == "serving" for record in real.activity.recent(1)), "it is served")
    assert await grown.by("requests", "aborted", "uncounted", "completion_tokens") == (1, 1, 1, 0)


# --- who sees what, and what is counted besides answers --------------------------------------------------------------


async def test_a_key_sees_its_own_usage_only(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m", "--tokens", "3")}, server={"api_keys": KEYS}) as app:
        for key, count in (("alice", 3), ("bob", 2), ("carol", 1)):
            for _ in range(count):
                assert (await chat(app, "m", headers=by(key))).status == 200
        query = "?by=key,tenant,model"
        for key, tenant, count in (("alice", "red", 3), ("bob", "blue", 2), ("carol", "blue", 1)):
            own = await usage(app, query, key)
            names = [(row["key"], row["tenant"], row["model"], row["requests"]) for row in own["rows"]]
            assert names == [(key, tenant, "m", count)] and own["total"]["requests"] == count
        for key in ("root", "viewer"):
            whole = await usage(app, query, key)
            assert {row["key"]: row["requests"] for row in whole["rows"]} == {"alice": 3, "bob": 2, "carol": 1}
        tenants = await usage(app, "?by=tenant", "root")
        assert {row["tenant"]: row["requests"] for row in tenants["rows"]} == {"red": 3, "blue": 3}
        assert (await http(app, "GET", "/api/v1/usage")).status == 401


async def test_refusals_are_counted_for_their_key_by_class(tmp_path: Path) -> None:
    keys = [*KEYS[1:], KEYS[0] | {"limits": {"requests_per_minute": 5}}]
    models = {
        "m": fake("m"),
        "dear": fake("dear", limits={"requests_per_minute": 1}),
        "bad": fake("bad", "--exit", "1"),
    }
    async with gateway(tmp_path, models, server={"api_keys": keys}) as app:
        statuses = [
            (await chat(app, "nothing", headers=by("alice"))).status,
            (await http(app, "POST", CHAT, body=b"{", headers=by("alice"))).status,
            (await chat(app, "dear", headers=by("alice"))).status,
            (await chat(app, "dear", headers=by("alice"))).status,
            (await http(app, "POST", "/v1/jobs", {"route": CHAT, "body": asking("no")}, headers=by("alice"))).status,
            (await chat(app, "m", headers=by("alice"))).status,
            (await chat(app, "m", headers={"x-api-key": "wrong"})).status,
        ]
        assert statuses == [404, 400, 200, 429, 404, 429, 401]
        rows = {row["model"]: row for row in (await usage(app, "?by=model", "alice"))["rows"]}
        assert {model: (row["requests"], row["refused"], row["rate_limited"]) for model, row in rows.items()} == {
            None: (4, 4, 1),
            "dear": (2, 1, 1),
        }
        assert (await usage(app, "?by=key", "root"))["total"]["requests"] == 6, "a wrong key belongs to no tenant"


async def test_without_keys_tenants_are_those_that_callers_name(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}) as app:
        for tenant in ("=HYPERLINK(1)", "b", ""):
            assert (await chat(app, "m", headers={"X-Tenant-ID": tenant} if tenant else {})).status == 200
        rows = (await usage(app, "?by=key,tenant"))["rows"]
        assert {(row["key"], row["tenant"]) for row in rows} == {(None, "=HYPERLINK(1)"), (None, "b"), (None, None)}
        shown = await http(app, "GET", "/api/v1/usage?by=tenant,day", headers={"Accept": "text/csv"})
        assert shown.headers["content-type"] == "text/csv; charset=utf-8"
        lines = list(csv.DictReader(io.StringIO(shown.body.decode(), newline="")))
        assert {line["tenant"] for line in lines} == {"", "'=HYPERLINK(1)", "b"}, (
            "no spreadsheet takes it for a formula"
        )
        assert {(line["requests"], line["gpu_s"], len(line["day"])) for line in lines} == {("1", "", 10)}
        assert (await http(app, "GET", "/api/v1/usage?format=csv&by=tenant,day")).body == shown.body


async def test_an_answer_that_is_left_keeps_its_tokens_reserved(tmp_path: Path) -> None:
    slow = fake("m", "--token-s", "60", "--tokens", "500")
    async with gateway(tmp_path, {"m": slow}, tenants={"default": {"tokens_per_minute": 1000}}) as app:
        async with await Raw.open(app) as raw:
            raw.ask(asking("m", max_tokens=900))
            await until(lambda: any(record.state == "serving" for record in app.activity.recent(1)), "it is served")
        await at_rest(app)
        refused = await chat(app, "m", max_tokens=900)
        assert (refused.status, refused.error["remaining"]) == (429, 100)


async def test_a_job_that_waits_for_a_place_in_the_queue_is_counted_once(tmp_path: Path) -> None:
    slow = fake("m", "--token-s", "0.5", "--tokens", "8", concurrency=1)
    async with gateway(tmp_path, {"m": slow}, scheduler={"queue_depth_max": 1}) as app:
        assert (await chat(app, "m", tokens=1)).status == 200
        async with await Raw.open(app) as first, await Raw.open(app) as second:
            first.ask(asking("m"))
            await until(lambda: app.tickets.open, "the first is answered")
            second.ask(asking("m", tokens=1))
            await until(lambda: app.loop.scheduler.view.waitlist.depth == 1, "the queue is full")
            job = (await http(app, "POST", "/v1/jobs", {"route": CHAT, "body": asking("m", tokens=1)})).json()
            await until(lambda: any(one.error_code == "queue_full" for one in app.activity.recent(9)), "it is put back")
            assert [(await raw.answer()).status for raw in (first, second)] == [200, 200]
        assert (await over(app, f"/v1/jobs/{job['id']}"))["status"] == "done"
        found = await total(app)
        assert (found["requests"], found["failed"]) == (4, 0)


WRONG = {
    "?since=yesterday": "since",
    "?until=2026-13-01": "until",
    "?since=1d&until=2d": "since",
    "?by=color": "by",
    "?by=": "by",
    "?format=xml": "format",
}


async def test_times_are_read_in_several_ways_and_a_wrong_question_is_told_so(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}) as app:
        assert (await chat(app, "m")).status == 200
        for since in (
            "30m",
            "7d",
            "2w",
            "1700000000",
            "2020-01-01",
            "2020-01-01T00:00:00Z",
            "2020-01-01T00:00:00%2B01:00",
        ):
            assert (await usage(app, f"?since={since}"))["total"]["requests"] == 1, since
        assert (await usage(app, "?since=1700000000&until=2024-01-01"))["rows"] == []
        for query, param in WRONG.items():
            answer = await http(app, "GET", f"/api/v1/usage{query}")
            assert (answer.status, answer.error["param"]) == (400, param), query


async def test_usage_can_be_off(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, server={"usage_days": 0}) as app:
        assert (await chat(app, "m")).status == 200
        assert (await http(app, "GET", "/api/v1/usage")).status == 404
        assert not (tmp_path / "state" / "usage.db").exists()


# --- kill -9 --------------------------------------------------------------------------------------------------------


def counted(gate: GatewayProcess) -> dict[str, Any]:
    return {row["model"]: row for row in gate.call("GET", "/api/v1/usage?by=model")[2]["rows"]}


async def asked(gate: GatewayProcess, model: str) -> Answer:
    async with await dial(gate.port) as raw:
        raw.ask(asking(model, max_tokens=20))
        return await raw.answer()


@pytest.mark.slow
async def test_kill_9_loses_at_most_the_last_seconds(tmp_path: Path) -> None:
    models = {"hello": tiny(tiny_model("alpha"))}
    with gateway_process(tmp_path, models) as gate:
        answers = [(await asked(gate, "hello")).json() for _ in range(5)]
        row = counted(gate)["hello"]
        tokens = told(answers)
        assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == tokens
        file = tmp_path / "state" / "usage.db"
        written = file.stat().st_mtime_ns
        await until(lambda: file.stat().st_mtime_ns > written, "it is written")
        await until(lambda: not file.with_name("usage.db-journal").exists(), "the transaction has ended")
        gate.kill()
        again = GatewayProcess(tmp_path, tmp_path / "greenroom.yaml")
        try:
            assert counted(again)["hello"] == row
            answers.append((await asked(again, "hello")).json())
            now = counted(again)["hello"]
            shown = subprocess.run(
                [sys.executable, "-m", "greenroom", "usage", "--since", "7d", "--csv", "--url", again.url],
                capture_output=True,
                text=True,
                check=True,
            )
            (line,) = csv.DictReader(io.StringIO(shown.stdout))
            assert {name: line[name] for name in ("model", "requests", "completion_tokens")} == {
                "model": "hello",
                "requests": "6",
                "completion_tokens": str(now["completion_tokens"]),
            }
            assert (now["requests"], now["prompt_tokens"]) == (6, told(answers)[0])
            assert again.stop() == 0
        finally:
            again.process.kill()
            again.process.wait()
        third = GatewayProcess(tmp_path, tmp_path / "greenroom.yaml")
        try:
            assert counted(third)["hello"] == now, "an orderly end writes all"
        finally:
            assert third.stop() == 0
