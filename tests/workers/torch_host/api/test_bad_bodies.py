"""Bodies refused by name: numbers no parameter can have, and JSON that would keep all streams waiting."""

from __future__ import annotations

import json

import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.serving.fields import BARE_BYTES_MAX, ELEMENTS_MAX, parse_body
from greenroom.workers.serving.request_reader import BODY_BYTES_MAX
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
