"""Routes, and bodies that are no requests at all."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.waiting import until
from tests.workers.torch_host.conftest import Opener


async def test_it_says_that_it_is_there_and_which_model_it_is(open_api: Opener) -> None:
    async with open_api() as rig:
        assert (await rig.http.get("/health")).json() == {"status": "ok"}
        assert [model.id async for model in rig.openai.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/audio", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_what_is_not_there_is_said_so(open_api: Opener, method: str, path: str, status: int) -> None:
    async with open_api() as rig:
        response = await rig.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


async def test_a_model_does_one_of_the_two(open_api: Opener) -> None:
    async with open_api(embeds=True) as rig:
        chat = await rig.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    async with open_api() as rig:
        embed = await rig.http.post("/v1/embeddings", json={"input": "x"})
    assert [chat.json()["error"]["code"], embed.json()["error"]["code"]] == ["unsupported", "unsupported"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
    ],
    ids=range(12),
)
async def test_a_body_that_is_no_request_is_400(open_api: Opener, body: bytes) -> None:
    async with open_api() as rig:
        response = await rig.http.post("/v1/completions", content=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await rig.http.get("/health")).status_code == 200


async def test_schemas_nested_without_end_are_400(open_api: Opener) -> None:
    deep = '{"properties":{"a":' * 400 + "{}" + "}}" * 400
    tool = '{"type":"function","function":{"name":"f","parameters":' + deep + "}}"
    body = '{"messages":[{"role":"user","content":"x"}],"tool_choice":"required","tools":[' + tool + "]}"
    async with open_api() as rig:
        response = await rig.http.post("/v1/chat/completions", content=body)
        assert (await rig.http.get("/health")).status_code == 200
    assert response.status_code == 400, response.text


async def test_noise_never_ends_the_server(open_api: Opener) -> None:
    draw = random.Random(11)
    good = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 17\r\n\r\n{"prompt": "abc"}'
    async with open_api() as rig:
        for _ in range(150):
            noisy = bytearray(good)
            for _ in range(draw.randrange(1, 6)):
                noisy[draw.randrange(len(noisy))] = draw.randrange(256)
            reader, writer = await asyncio.open_unix_connection(str(rig.socket))
            writer.write(bytes(noisy))
            writer.write_eof()
            async with asyncio.timeout(30):
                await reader.read()
            writer.close()
        assert (await rig.http.get("/health")).status_code == 200


async def test_an_unknown_cache_mode_is_refused(open_api: Opener) -> None:
    async with open_api() as rig:
        response = await rig.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Cache-Mode": "maybe"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Cache-Mode")


async def test_a_closed_api_has_ended_what_it_asked(open_api: Opener) -> None:
    async with open_api("one two three four") as rig:
        rig.engine.holds_after = 1
        asked = asyncio.create_task(rig.http.post("/v1/completions", json={"prompt": "a"}))
        await until(lambda: rig.engine.asks)
        await rig.served.close()
        assert rig.engine.asks[0].cancelled
        assert [end.reason for end in await asyncio.to_thread(rig.engine.wait_for_ends, 1)] == ["cancelled"]
        with pytest.raises(Exception, match=r"disconnected|reset|closed|peer"):
            await asked
