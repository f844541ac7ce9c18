"""Bodies as JSON: what would keep all streams of the process waiting is refused before it is read."""

from __future__ import annotations

import json

import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.serving.fields import BARE_BYTES_MAX, ELEMENTS_MAX, parse_body
from greenroom.workers.serving.request_reader import BODY_BYTES_MAX
from tests.workers.torch_host.conftest import Opener


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
