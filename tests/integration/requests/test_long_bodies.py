"""Bodies of many MiB: engines get what was sent, or the caller is told why not, and no other caller waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.http.limits import MIB
from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest
from tests.integration.faults import loaded
from tests.integration.raw import CHAT, Answer, Raw, http, request_bytes
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PICTURE = "iVBORw0KGgoAAAANSUhEUg" * 100_000
# Quotes, line breaks and what is no ASCII, which grow where JSON becomes a text of JSON.
CODE = 'print("é😀\\n")\n' * 60_000
# Twenty times what the longest takes on the machine that this was written on.
TURN_MAX_S = 0.1
USER = '{"model":"alpha","max_tokens":9,"stream":false,"messages":[{"role":"user","content":'


@contextlib.asynccontextmanager
async def alpha(folder: Path, journal: Journal, **sections: Any) -> AsyncIterator[App]:
    async with gateway(folder, {"alpha": fake("alpha", "--record", *journal.switches)}, **sections) as app:
        await loaded(app, "alpha")
        yield app
        await at_rest(app)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory, journal: Journal) -> AsyncIterator[App]:
    async with alpha(tmp_path_factory.mktemp("long"), journal) as app:
        yield app


def received(journal: Journal) -> dict[str, Any]:
    """What the engine was sent last."""
    body: dict[str, Any] = json.loads(journal.lines("request")[-1]["body"].encode("latin-1"))
    return body


async def longest_turn_s(answering: asyncio.Task[Answer]) -> float:
    """Of the loop, until this answer. In time of the processor: what others do to the machine does not count."""
    longest, before = 0.0, time.thread_time()
    while not answering.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
    return longest


async def test_a_chat_with_a_large_picture_reaches_its_engine_as_it_was_sent(app: App, journal: Journal) -> None:
    parts = [
        {"type": "text", "text": CODE},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
    ]
    said = {"messages": [{"role": "user", "content": parts}], "seed": 7, "stop": ["a" * 5_000]}
    for is_ascii in (True, False):
        body = json.dumps({"model": "alpha", "x_client_id": "t", **said}, ensure_ascii=is_ascii).encode()
        assert (await http(app, "POST", CHAT, body=body)).status == 200
        assert received(journal) == {"model": "alpha", **said}


async def test_a_model_that_is_loaded_first_gets_all_of_a_long_body(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    asked = {"model": "alpha", "messages": [{"role": "user", "content": CODE}]}
    async with gateway(tmp_path, {"alpha": fake("alpha", "--record", *journal.switches)}) as app:
        assert (await http(app, "POST", CHAT, asked)).status == 200
        assert received(journal) == asked
        await at_rest(app)


async def test_long_bodies_are_translated(app: App, journal: Journal) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    tool = {"type": "tool_use", "id": "c1", "name": "write", "input": {"path": "a.py", "text": CODE}}
    turns = [
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": CODE}]},
        {"role": "assistant", "content": [tool]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": CODE}]},
    ]
    asked = {"model": "alpha", "max_tokens": 9, "messages": turns}
    assert (await http(app, "POST", "/v1/messages", asked)).status == 200
    first, second, third = received(journal)["messages"]
    assert first["content"][0]["image_url"]["url"] == f"data:image/png;base64,{PICTURE}"
    assert first["content"][1]["text"] == third["content"] == CODE
    assert json.loads(second["tool_calls"][0]["function"]["arguments"]) == {"path": "a.py", "text": CODE}

    message = {"role": "user", "content": "what?", "images": [PICTURE]}
    ollama = {"model": "alpha:latest", "stream": False, "messages": [message]}
    assert (await http(app, "POST", "/api/chat", ollama)).status == 200
    assert PICTURE in received(journal)["messages"][0]["content"][0]["image_url"]["url"]


async def test_many_short_texts_are_translated_off_the_loop(app: App, journal: Journal) -> None:
    turns = [{"role": role, "content": f"turn {at} of many"} for at in range(4_000) for role in ("user", "assistant")]
    asked = {"model": "alpha", "max_tokens": 9, "system": "be short", "messages": turns}
    assert (await http(app, "POST", "/v1/messages", asked)).status == 200
    assert received(journal)["messages"] == [{"role": "system", "content": "be short"}, *turns]


async def test_media_of_long_bodies_are_checked_like_others(app: App) -> None:
    bad = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/meta-data/"}}
    long_url = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/?" + "a" * 100_000}}
    filler = [{"type": "text", "text": "a"}] * 5_000
    for parts in ([{"type": "text", "text": CODE}, bad], [*filler, bad], [long_url]):
        answer = await http(app, "POST", CHAT, {"model": "alpha", "messages": [{"role": "user", "content": parts}]})
        assert (answer.status, answer.error["code"]) == (400, "media_refused")


async def test_urls_of_listed_hosts_are_read_in_any_body(tmp_path: Path) -> None:
    signed = [f"https://pictures.example/a.png?sig={'a' * length}" for length in (100, 5_000)]
    # Behind so many turns short texts are taken out, too.
    turns: list[dict[str, Any]] = [{"role": "user", "content": "so it is, [{ " * 10}] * 10_000
    turns += [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]} for url in signed]
    async with gateway(tmp_path, {"alpha": fake("alpha", media_hosts=["pictures.example"])}) as app:
        answer = await http(app, "POST", CHAT, {"model": "alpha", "messages": turns})
        assert answer.status == 200, answer.body
        await at_rest(app)


async def test_an_answer_tells_back_what_was_sent_in_a_long_body(app: App) -> None:
    tools = [{"type": "function", "name": "f", "description": CODE[:9_000], "parameters": {"type": "object"}}]
    told = {"instructions": CODE[:60_000], "tools": tools}
    answer = await http(app, "POST", "/v1/responses", {"model": "alpha", "input": "[{" * 40_000, **told})
    assert {name: answer.json()[name] for name in told} == told


async def test_a_long_body_that_names_no_model_or_an_unknown_one_is_refused(app: App) -> None:
    assert (await http(app, "POST", CHAT, {"messages": CODE})).error["param"] == "model"
    assert (await http(app, "POST", CHAT, {"model": "m" * 3_000, "messages": CODE})).status == 404
    empty = await http(app, "POST", CHAT, body=b" " * 100_000)
    assert (empty.status, "empty" in empty.error["message"]) == (400, True)


async def test_a_client_that_leaves_while_its_long_body_is_read_leaves_nothing_behind(app: App) -> None:
    body = (USER + '"' + "\\n" * (10 * MIB) + '"}]}').encode()
    asking = asyncio.create_task(http(app, "POST", CHAT, body=body))
    await until(lambda: app.edge.bodies.spool_bytes >= len(body), every_s=0)
    asking.cancel()
    await asyncio.wait((asking,))
    await at_rest(app)


@pytest.mark.parametrize(
    ("path", "before", "unit", "after"),
    [
        (CHAT, USER + "[", b"{},", '{"type":"image_url","image_url":{"url":"data:,"}}]}]}'),
        (CHAT, USER + '"', rb"\"", '"}]}'),
        ("/v1/embeddings", '{"model":"alpha","input":[', b'"a",', '""]}'),
        ("/v1/messages", USER + '"', rb"\n", '"}]}'),
        ("/v1/jobs", '{"route":"/v1/chat/completions","body":' + USER + '"', b"a", '"}]}}'),
    ],
    ids=["objects", "escapes", "inputs", "translated", "job"],
)
async def test_no_turn_of_the_loop_is_long(tmp_path: Path, path: str, before: str, unit: bytes, after: str) -> None:
    body = before.encode() + unit * (24 * MIB // len(unit)) + after.encode()
    async with alpha(tmp_path, Journal(tmp_path)) as app:
        # Routes of the management API are analysed when they are first used.
        assert (await http(app, "POST", path, body=b"{}")).status == 400
        answering = asyncio.create_task(http(app, "POST", path, body=body))
        # This process sends it as well, in one piece at first.
        await until(lambda: app.edge.bodies.spool_bytes > len(body) / 2 or answering.done(), every_s=0)
        assert await longest_turn_s(answering) < TURN_MAX_S
        answer = await answering
        if answer.status == 400:
            assert "server.json_values_max" in answer.error["message"]
        else:
            assert answer.status in (200, 202)


async def test_an_order_with_many_values_is_refused_before_it_is_read(app: App) -> None:
    body = b'{"evict":[' + b"1," * 400_000 + b"1]}"
    answering = asyncio.create_task(http(app, "POST", "/api/v1/models/alpha/load", body=body))
    assert await longest_turn_s(answering) < TURN_MAX_S
    assert "10,000 JSON values" in (await answering).error["message"]


async def test_an_order_of_a_job_may_have_as_many_values_as_its_request(app: App, journal: Journal) -> None:
    order = {"route": "/v1/embeddings", "body": {"model": "alpha", "input": [list(range(50_000))]}}
    assert (await http(app, "POST", "/v1/jobs", order)).status == 202
    await until(lambda: received(journal) == order["body"])


async def test_a_body_of_short_chunks_is_taken_in_turns(app: App) -> None:
    pad = b"\r\n" * MIB
    asked = pad + b'{"model":"alpha","messages":[{"role":"user","content":"hi"}]}'
    head = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
    async with await Raw.open(app) as raw:
        raw.send(request_bytes("POST", CHAT, None, head) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(asked), asked))
        raw.send(request_bytes("GET", "/health", None))
        answering = asyncio.create_task(raw.answer())
        assert await longest_turn_s(answering) < TURN_MAX_S
        assert (await answering).status == 200
        # What follows the body is not of it.
        assert (await raw.answer()).status == 200


async def test_heads_of_parts_are_read_in_turns(app: App) -> None:
    more = "\r\n".join(f"x{at}:" for at in range(1_900))
    parts = [f'--b\r\nContent-Disposition: form-data; name="f{at}"\r\n{more}\r\n\r\n\r\n' for at in range(99)]
    body = "".join([*parts, "--b--\r\n"]).encode()
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    asking = http(app, "POST", "/v1/audio/transcriptions", body=body, headers=headers)
    answering = asyncio.create_task(asking)
    assert await longest_turn_s(answering) < TURN_MAX_S
    assert "no field model" in (await answering).error["message"]


async def test_a_low_limit_of_values_holds_for_bodies_of_every_length(tmp_path: Path) -> None:
    async with alpha(tmp_path, Journal(tmp_path), server={"json_values_max": 1_000}) as app:
        for size in (70_000, 300_000):
            order = {"model": "alpha", "input": ["a" * (size // 2_000)] * 2_000}
            answer = await http(app, "POST", "/v1/embeddings", order)
            assert answer.status == 400 and "server.json_values_max" in answer.error["message"]
