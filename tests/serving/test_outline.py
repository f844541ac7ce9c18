"""Long JSON bodies: what is taken out of them, what is refused, and that engines get what was sent."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest

from greenroom.errors import BadRequest, BodiesFull
from greenroom.http.body import Body, BodyBudget
from greenroom.http.limits import EdgeLimits
from greenroom.serving.body.outline import DENSE_FROM_BYTES, LONG_BYTES, Outline, count_values, outline_of

VALUES_MAX = 2_000


def held(raw: bytes, piece_bytes: int = 100_000) -> Body:
    """In memory up to 256 KiB, else in a file."""
    body = Body(BodyBudget(EdgeLimits()))
    for begin in range(0, len(raw), piece_bytes):
        body.append(raw[begin : begin + piece_bytes])
    return body


def outlined(raw: bytes, piece_bytes: int = 100_000) -> Outline:
    return asyncio.run(outline_of(held(raw, piece_bytes), VALUES_MAX, asyncio.Lock()))


def put_back(outline: Outline, text: bytes) -> Any:
    back = outline.put_back(text)
    whole = back if isinstance(back, bytes) else back.read()
    assert len(whole) == len(back), "an engine is told this length"
    return json.loads(whole)


def refused(raw: bytes) -> str:
    with pytest.raises(BadRequest) as caught:
        outlined(raw)
    return caught.value.message


def drawn(rng: random.Random) -> dict[str, Any]:
    letters = rng.choice(["abc", "é漢😀a", '"\\\n\t/\u2028', "\U0001f600", "a"])
    texts = ["".join(rng.choices(letters, k=rng.choice([3, 1_000, 5_000, 40_000]))) for _ in range(rng.randint(1, 6))]
    return {
        "model": "m",
        "input": [{"text": text, "weight": 1.5, "of": None} for text in texts],
        "tokens": [rng.randrange(10**5) for _ in range(rng.choice([3, 500, 30_000]))],
    }


@pytest.mark.parametrize("seed", range(40))
def test_what_is_put_back_is_what_was_sent(seed: int) -> None:
    rng = random.Random(seed)
    said = drawn(rng)
    raw = json.dumps(said, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2])).encode()
    outline = outlined(raw, rng.choice([1_000, 65_536, 100_000]))
    assert len(outline.text) < 8 * LONG_BYTES + 4_000
    # As it was sent, decoded and encoded again, and as a text that is JSON itself.
    assert put_back(outline, outline.text) == said
    assert put_back(outline, msgspec.json.encode(msgspec.json.decode(outline.text))) == said
    inner = bytes(msgspec.json.decode(outline.text, type=dict[str, msgspec.Raw])["input"]).decode()
    assert json.loads(put_back(outline, msgspec.json.encode({"arguments": inner}))["arguments"]) == said["input"]


def test_line_breaks_between_numbers_do_not_come_into_texts() -> None:
    said = {"input": {"path": "a", "rows": list(range(2_000))}}
    for indent in (None, 1, "\t"):
        outline = outlined(json.dumps(said, indent=indent).encode())
        inner = bytes(msgspec.json.decode(outline.text, type=dict[str, msgspec.Raw])["input"]).decode()
        assert json.loads(put_back(outline, msgspec.json.encode({"arguments": inner}))["arguments"]) == said["input"]


def test_beginnings_of_texts_stay() -> None:
    url = "data:image/png;base64," + "A" * 100_000
    outline = outlined(json.dumps({"url": url}).encode())
    assert json.loads(outline.text)["url"].startswith("data:image/png;base64,AAAA")
    assert len(outline.text) < 1_000


def test_an_outline_stays_small_however_many_texts_there_are() -> None:
    said = {"input": ["x" * 3_000] * 1_900}
    outline = outlined(json.dumps(said).encode())
    assert len(outline.text) < DENSE_FROM_BYTES + 400_000
    assert put_back(outline, outline.text) == said


def test_outlines_that_are_being_made_count_as_memory() -> None:
    async def make() -> None:
        budget = BodyBudget(EdgeLimits(bodies_total_max=3_000_000))
        bodies = [Body(budget) for _ in range(3)]
        for body in bodies:
            body.append(json.dumps({"input": ["x" * 100] * 15_000}).encode())
        turn = asyncio.Lock()
        made = await asyncio.gather(*(outline_of(body, 20_000, turn) for body in bodies), return_exceptions=True)
        assert any(isinstance(one, BodiesFull) for one in made)
        for body in bodies:
            body.close()
        assert budget.memory_bytes == 0

    asyncio.run(make())


@pytest.mark.parametrize("unit", [b"{},", b"[],", b'"",', b'{"a":1},', b"true,", b'"a\\"",'])
def test_too_many_values_are_refused_with_the_key_of_the_limit(unit: bytes) -> None:
    told = refused(b'{"a":[' + unit * 1_000_000 + b"1]}")
    assert "2,000 JSON values" in told and "server.json_values_max" in told


def test_commas_in_texts_are_no_values() -> None:
    said = {"log": ['[{"a, b, c", {[,' * 100] * 500}
    outline = outlined(json.dumps(said).encode())
    assert put_back(outline, outline.text) == said


def test_numbers_in_lists_hardly_count() -> None:
    said = {"input": [list(range(1_000))] * 300}
    outline = outlined(json.dumps(said).encode())
    assert put_back(outline, outline.text) == said


@pytest.mark.parametrize("number", [b"1" * 13_000_000, b"0." + b"0" * 40_000 + b"1", b"1" * 10_000])
def test_a_number_that_is_too_long_is_refused(number: bytes) -> None:
    assert "more than 4,096 digits" in refused(b'{"a":[' + number + b"," + b" 1," * 40_000 + b"1]}")


def test_white_space_is_left_out() -> None:
    assert len(outlined(b'{"a":' + b" \n" * 1_000_000 + b"1}").text) < LONG_BYTES + 100


@pytest.mark.parametrize(
    "wrong",
    [
        b'{"a":"' + b"x" * 100_000,
        b'{"a":"' + b"x" * 100_000 + b"\\",
        b'{"a":"' + b"x" * 100_000 + b'\\x"}',
        b'{"a":"' + b"x" * 100_000 + b'\\u12"}',
        b'{"a":"' + b"x" * 100_000 + b'\n"}',
        b'{"a":"' + b"x" * 5_000 + b'\x01"}',
    ],
)
def test_long_texts_that_are_no_json_are_refused(wrong: bytes) -> None:
    assert "not valid JSON" in refused(wrong)


@pytest.mark.parametrize("wrong", [b"\xff", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf"])
@pytest.mark.parametrize("before", [0, 32 * 1024 - 7, 65_535])
def test_bytes_that_are_no_text_are_refused(wrong: bytes, before: int) -> None:
    assert "UTF-8" in refused(b'{"a":"' + b"x" * before + wrong + b'","b":"' + b"x" * 50_000 + b'"}')


def test_a_character_at_the_very_end_must_be_whole() -> None:
    assert "UTF-8" in refused(b'{"a":1}' + b" " * 70_000 + b"\xf0\x9f")


def test_names_of_fields_are_never_cut() -> None:
    said = "The name of a field of the body is too long: it may have 4,094 bytes, or 126 behind the first 1,048,576"
    assert said in refused(b'{"' + b"image_url" * 1_000 + b'":"http://10.0.0.1"}')
    many = b'{"a":[' + b'"%b",' % (b"x" * 4_000) * 275 + b'""],"%b":1}'
    assert said in refused(b'{"%b":1}' % (b"n" * 4_095)) and said in refused(many % (b"n" * 127))
    for body, name in ((b'{"%b":1}', b"n" * 4_094), (many, b"n" * 126)):
        assert name + b'":1}' in outlined(body % name).text


def test_marks_of_another_body_are_text() -> None:
    other = outlined(json.dumps({"a": "x" * 10_000}).encode())
    said = {"a": json.loads(other.text)["a"] + "y" * 10_000}
    outline = outlined(json.dumps(said).encode())
    assert put_back(outline, outline.text) == said


def test_values_of_orders_are_counted_without_an_outline() -> None:
    asyncio.run(count_values(held(json.dumps({"text": ",[{" * 50_000, "n": [1] * 1_900}).encode()), VALUES_MAX))
    for unit in (b"1,", b"{},", b'"",'):
        with pytest.raises(BadRequest, match="2,000 JSON values"):
            asyncio.run(count_values(held(b"[" + unit * 100_000 + b"1]"), VALUES_MAX))
