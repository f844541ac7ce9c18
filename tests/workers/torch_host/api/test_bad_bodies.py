"""Routes, and bodies refused by name: odd numbers, what is no JSON, and what would keep all streams waiting."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.serving.fields import BARE_BYTES_MAX, ELEMENTS_MAX, parse_body
from greenroom.workers.serving.request_reader import BODY_BYTES_MAX
from tests.waiting import until
from tests.workers.torch_host.conftest import Opener

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ASKS = {
    CHAT: '"messages": [{"role": "user", "content": "hi"}]',
    COMPLETIONS: '"prompt": "hi"',
    EMBEDDINGS: '"input": "hi"',
}

# As they are written in a body; the third to last is longer than Python makes a number of, the last two are no number.
VALUES = (
    "Infinity",
    "-Infinity",
    "NaN",
    "1e400",
    "-1e400",
    "1e308",
    "-1" + 400 * "0",
    "1" + 400 * "0",
    "1" + 5_000 * "0",
    '"1e400"',
    "[1]",
)
SHARED = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("n", "max_tokens", "max_completion_tokens"),
)
PARAMETERS = (
    *((CHAT, name) for name in (*SHARED, "top_logprobs")),
    *((COMPLETIONS, name) for name in (*SHARED, "logprobs", "best_of")),
    (EMBEDDINGS, "dimensions"),
)


@pytest.mark.parametrize(("path", "name"), PARAMETERS)
async def test_an_odd_number_is_400_and_named(open_api: Opener, path: str, name: str) -> None:
    async with open_api(embeds=path == EMBEDDINGS) as rig:
        for value in VALUES:
            response = await rig.http.post(path, content=f'{{{ASKS[path]}, "{name}": {value}}}')
            error = response.json()["error"]
            assert response.status_code == 400, (value[:20], error)
            assert error["param"] == name, (value[:20], error)
            assert name in error["message"] and len(error["message"]) < 300, (value[:20], error)
    assert not rig.engine.asks


@pytest.mark.parametrize("value", VALUES)
async def test_an_odd_bias_is_400_and_named(open_api: Opener, value: str) -> None:
    async with open_api() as rig:
        response = await rig.http.post(CHAT, content=f'{{{ASKS[CHAT]}, "logit_bias": {{"5": {value}}}}}')
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("path", "name"), [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")])
async def test_an_odd_token_is_400_and_named(open_api: Opener, path: str, name: str, value: str) -> None:
    async with open_api(embeds=path == EMBEDDINGS) as rig:
        for shape in ("[5, {}]", "[[5, {}]]"):
            body = f'{{"{name}": {shape.replace("{}", value)}}}'
            response = await rig.http.post(path, content=body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == name, response.text


@pytest.mark.parametrize("value", [value for value in VALUES if not value.startswith(("[", '"'))])
async def test_an_odd_number_in_a_schema_is_400_and_named(open_api: Opener, value: str) -> None:
    schema = f'{{"type": "string", "minLength": {value}}}'
    wanted = f'{{"type": "json_schema", "json_schema": {{"strict": true, "schema": {schema}}}}}'
    async with open_api() as rig:
        response = await rig.http.post(CHAT, content=f'{{{ASKS[CHAT]}, "response_format": {wanted}}}')
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format"), response.text


@pytest.mark.parametrize("value", ["Infinity", "NaN", "1e400", "1" + 5_000 * "0"])
async def test_an_odd_number_in_an_unknown_field_is_ignored_if_it_is_json(open_api: Opener, value: str) -> None:
    """What is no JSON is refused wherever it stands; the rest is passed over."""
    async with open_api("fine") as rig:
        response = await rig.http.post(CHAT, content=f'{{{ASKS[CHAT]}, "strange": {value}}}')
    assert response.status_code == (200 if value == "1e400" else 400)


@pytest.mark.parametrize("cut", ['{"a": NaN, ', '{"a": NaN} x', '{"a": Infinity' + "[" * 20])
async def test_an_odd_number_in_what_is_no_json_at_all_is_400(open_api: Opener, cut: str) -> None:
    async with open_api() as rig:
        response = await rig.http.post(CHAT, content=cut)
    assert response.status_code == 400 and "not JSON" in response.json()["error"]["message"], response.text


def listed(unit: bytes, times: int) -> bytes:
    return b'{"a": [%b0]}' % (unit * times)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(listed(b"0,", ELEMENTS_MAX + 1), id="numbers"),
        pytest.param(listed(b"[],", ELEMENTS_MAX // 3 + 1), id="lists"),
        pytest.param(listed(b"[" * 16 + b"]" * 16 + b",", ELEMENTS_MAX // 32), id="lists in lists, with few commas"),
        pytest.param(listed(b'{"":{}},', ELEMENTS_MAX // 7 + 1), id="objects"),
        pytest.param(listed(b'"",', ELEMENTS_MAX + 1), id="texts"),
        pytest.param(listed(b'"\\"",', ELEMENTS_MAX + 1), id="texts with quotes in them"),
        pytest.param(listed(b"9" * 4_000 + b",", BARE_BYTES_MAX // 4_000), id="long numbers"),
        pytest.param(listed(b" ", BARE_BYTES_MAX), id="nothing"),
    ],
)
def test_more_than_may_be_read_at_once_is_refused_with_the_limit(raw: bytes) -> None:
    assert len(raw) < BODY_BYTES_MAX
    with pytest.raises(ApiError) as refused:
        parse_body(raw)
    assert (refused.value.status, refused.value.code) == (413, "body_too_complex")
    assert f"{ELEMENTS_MAX:,} elements" in refused.value.message


@pytest.mark.parametrize("said", ["[1, {2: 3}], ", '"[", ', "\\[,{:", '\\"[,{:\\\\', "{" * 8])
def test_marks_within_a_text_are_text(said: str) -> None:
    text = said * (ELEMENTS_MAX // len(said) + ELEMENTS_MAX // 2)
    body = {"messages": [{"role": "user", "content": text}], "more": ["x", text[:100]]}
    assert parse_body(json.dumps(body).encode()) == body


def test_as_many_numbers_as_may_be_are_read() -> None:
    assert len(parse_body(listed(b"7,", ELEMENTS_MAX - 10))["a"]) == ELEMENTS_MAX - 9


async def test_the_caller_of_an_endless_list_is_told_and_others_are_served(open_api: Opener) -> None:
    async with open_api("fine") as rig:
        refused = await rig.http.post("/v1/completions", content=listed(b"[[]],", ELEMENTS_MAX))
        served = await rig.http.post("/v1/completions", json={"prompt": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_complex")
    assert served.status_code == 200


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
