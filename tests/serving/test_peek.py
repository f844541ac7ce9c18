"""The top level of a body: what is read and refused, and that values reach the engine as they were sent."""

from __future__ import annotations

import json
import timeit

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from greenroom.access.keys import parse_priority
from greenroom.dialects.dialect import READ_BYTES_MAX
from greenroom.dialects.openai.requests import CHAT
from greenroom.errors import BadRequest
from greenroom.serving.body.peek import FIELDS_MAX, ask_for_usage, join, peek, tokens_asked

# Another process may hold the machine for a while: that says nothing about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NOTHING: frozenset[str] = frozenset()


def refused(body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        peek(body)
    return caught.value


def rejoined(body: bytes, drop: frozenset[str] = NOTHING, **put: bytes) -> bytes:
    return join(peek(body).fields, drop=drop, put=put)


# --- what is read ---------------------------------------------------------------------------------------------------


def test_model_and_stream_are_read() -> None:
    peeked = peek(b' {"model": "org/qwen", "stream" : true, "messages": []}\n')
    assert (peeked.model, peeked.stream) == ("org/qwen", True)
    assert (peeked.priority, peeked.client_id, peeked.budget_s) == (None, None, None)
    assert set(peeked.fields) == {"model", "stream", "messages"}


@pytest.mark.parametrize(("raw", "stream"), [(b"true", True), (b"false", False), (b"null", False)])
def test_stream_may_be_null(raw: bytes, stream: bool) -> None:
    assert peek(b'{"model":"m","stream":%b}' % raw).stream is stream


def test_words_to_us_are_read() -> None:
    peeked = peek(b'{"model":"m","x_priority":"high","x_client_id":"cli","x_budget_s":2}')
    assert (peeked.priority, peeked.client_id, peeked.budget_s) == ("high", "cli", 2.0)
    assert peek(b'{"model":"m","x_priority":-5}').priority == -5
    assert peek(b'{"model":"m","x_priority":null,"x_client_id":null,"x_budget_s":null}').client_id is None


def test_escaped_names_mean_the_same() -> None:
    peeked = peek(rb'{"mod\u0065l":"caf\u00e9","\u0078_client_id":"cli"}')
    assert (peeked.model, peeked.client_id) == ("café", "cli")


def test_body_that_names_no_model_can_be_given_one() -> None:
    peeked = peek(b'{"a":1}')
    assert peeked.model == ""
    peeked.name_model("caf\u00e9")
    assert peek(join(peeked.fields, drop=NOTHING, put={})).model == "caf\u00e9"


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":null}', "model"),
        (b'{"model":1}', "model"),
        (b'{"model":["m"]}', "model"),
        (b'{"model":""}', "model"),
        (b'{"model":"%b"}' % (b"m" * 4097), "model"),
        (b'{"model":"m","stream":"true"}', "stream"),
        (b'{"model":"m","stream":1}', "stream"),
        (b'{"model":"m","x_priority":1.5}', "x_priority"),
        (b'{"model":"m","x_priority":true}', "x_priority"),
        (b'{"model":"m","x_priority":[]}', "x_priority"),
        (b'{"model":"m","x_client_id":1}', "x_client_id"),
        (b'{"model":"m","x_client_id":"a\\nb"}', "x_client_id"),
        (b'{"model":"m","x_client_id":"%b"}' % (b"c" * 129), "x_client_id"),
        (b'{"model":"m","x_budget_s":"2"}', "x_budget_s"),
        (b'{"model":"m","x_budget_s":0}', "x_budget_s"),
        (b'{"model":"m","x_budget_s":-1}', "x_budget_s"),
        (b'{"model":"m","x_budget_s":1e999}', "x_budget_s"),
    ],
)
def test_wrong_field_is_named(body: bytes, param: str) -> None:
    error = refused(body)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize("said", [b"1.5", b"true", b"[]", b"101", b'"urgent"', b"1e400"])
def test_whatever_is_no_priority_is_told_in_one_way(said: bytes) -> None:
    """Values that no priority can be made of, and those that make one out of range."""
    with pytest.raises(BadRequest) as told:
        parse_priority(peek(b'{"model":"m","x_priority":%b}' % said).priority)
    assert told.value.message == "x_priority is high, normal, low or a whole number from -100 to 100; lower goes first."


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" \n", b"null", b"[]", b'"model"', b"1", b"true", b"\x00", b"model=m"),
        *(b'{"model":"m"', b'{"model":"m"}}', b'{"model":"m"} x', b'{"model":"m",}', b"{'model':'m'}", b'{model:"m"}'),
        *(b'{"model":"m","a":NaN}', b'{"model":"m","a":[Infinity]}', b'{"model":"m","a":-Infinity}'),
        *(b'{"model":"m","a":01}', b'{"model":"m","a":1.}', b'{"model":"m","a":+1}', b'{"model":"m","a":.5}'),
        *(b'{"model":"m","a":"\n"}', b'{"model":"m","a":"\\q"}', b'{"model":"m","a":"\\ud800"}'),
        *(b'{"model":"m","a":"\xff"}', b'{"model":"m","\xff":1}', b'{"model":"\xff"}', b'{"model":"m","a":["\xc3("]}'),
        *(b'{"model":"m","a":"\xed\xa0\x80"}', b'\xef\xbb\xbf{"model":"m"}', b'{"model":"m"/**/}'),
        '{"model":"m"}'.encode("utf-16"),
    ],
)
def test_body_that_is_not_a_json_object_in_utf8_is_refused(body: bytes) -> None:
    assert refused(body).param is None


def test_position_of_a_mistake_is_said() -> None:
    assert "byte 18" in refused(b'{"model":"m","a":tru}').message


def test_malformed_utf8_is_found_in_large_bodies_too() -> None:
    long = '"' + "ä" * 400_000 + '"'
    assert peek(b'{"model":"m","a":%b}' % long.encode()).model == "m"
    assert "UTF-8" in refused(b'{"model":"m","a":%b}' % (long.encode()[:-2] + b'"')).message


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"model":"m","a":', b'{"model":[', b'{"x_client_id":{"a":'])
def test_nesting_without_end_is_refused(opening: bytes) -> None:
    refused(opening + b"[" * 1_000_000)
    refused(opening * (1_000_000 // len(opening)))
    refused(opening + b"[" * 500_000 + b"]" * 500_000 + b"}")


@pytest.mark.parametrize("count", [FIELDS_MAX + 1, 20_000, 500_000])
def test_fields_without_end_are_refused(count: int) -> None:
    body = b'{"model":"m",%b}' % b",".join(b'"%x":1' % number for number in range(count))
    assert "fields" in refused(body).message


def test_large_body_gives_the_same_as_a_small_one() -> None:
    body = b'{"model":"m","\\u0061":[1,  2],"model":"n","big":"%b","x_priority":"low"}' % (b"x" * 200_000)
    peeked = peek(body)
    assert (peeked.model, peeked.priority) == ("n", "low")
    assert all(type(name) is str for name in peeked.fields)
    assert rejoined(body) == b'{"model":"n","a":[1,  2],"big":"%b"}' % (b"x" * 200_000)


# --- what the engine gets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *(
            b"123456789012345678901234567890",
            b"1e400",
            b"-0.0",
            b"1.10",
            b"1E+2",
            b"0.1000000000000000055511151231257827",
        ),
        *(rb'"\u00e9\/\ud83d\ude00"', '"é😀"'.encode(), b'"\x7f"', b'" "', b"null", b"true"),
        *(b'{ "b" : 1 ,\t"a" : [ ] , "b" : 2 }', b"[1 , 2\n]", b"{}", b'""'),
    ],
)
def test_value_reaches_the_engine_byte_for_byte(value: bytes) -> None:
    assert rejoined(b'{ "model" : "m" , "v" :  %b  }' % value) == b'{"model":"m","v":%b}' % value


def test_repeated_key_is_read_and_forwarded_once_with_its_last_value() -> None:
    body = rb'{"model":"cheap","a":1,"mod\u0065l":"dear","a":2}'
    assert peek(body).model == "dear"
    assert rejoined(body) == b'{"model":"dear","a":2}'


def test_words_to_us_are_not_forwarded() -> None:
    body = rb'{"x_priority":1,"model":"m","x_":2,"x_whatever":{},"\u0078_client_id":"c","xy":3}'
    assert rejoined(body) == b'{"model":"m","xy":3}'


def test_fields_are_dropped_and_put() -> None:
    body = b'{"model":"m","seed":1,"temperature":0.5}'
    sent = rejoined(body, frozenset(("seed", "absent")), model=b'"real"', temperature=b"0", new=b"[ ]")
    assert sent == b'{"model":"real","temperature":0,"new":[ ]}'
    # What is put wins over what is dropped.
    assert rejoined(b'{"model":"m","a":1}', frozenset(("a",)), a=b"2") == b'{"model":"m","a":2}'


def test_odd_names_are_forwarded_with_their_meaning() -> None:
    body = rb'{"model":"m","":1,"a\"b":2,"\n":3,"\u0000":4}' + b""
    assert json.loads(rejoined(body)) == {"model": "m", "": 1, 'a"b': 2, "\n": 3, "\0": 4}


plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@patient
@given(st.dictionaries(st.text(max_size=10), plain_json, max_size=8), st.booleans(), st.integers(0, 3))
def test_what_the_engine_reads_is_what_was_sent(fields: dict[str, object], ascii_only: bool, indent: int) -> None:
    ours = ("stream", "keep_alive")
    said = {name: value for name, value in fields.items() if not name.startswith("x_") and name not in ours}
    said["model"] = "m"
    try:
        body = json.dumps(said, ensure_ascii=ascii_only, indent=indent or None).encode()
    except UnicodeEncodeError:
        # Half a surrogate pair cannot be sent as UTF-8.
        return
    try:
        sent = rejoined(body)
    except BadRequest:
        # Half a surrogate pair can be sent as an escape, and is refused.
        assert rb"\ud" in body
        return
    assert json.loads(sent) == said


@patient
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(tail: bytes) -> None:
    for body in (tail, b'{"model":"m",' + tail, b'{"model":"m","a":' + tail + b"}", b'{"model":"m"}' + tail):
        try:
            sent = rejoined(body)
        except BadRequest:
            continue
        assert isinstance(json.loads(sent), dict)


# --- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "becomes", "asked"),
    [
        (None, b'{"include_usage":true}', False),
        (b"null", b'{"include_usage":true}', False),
        (b"{}", b'{"include_usage":true}', False),
        (b'{"include_usage": true }', None, True),
        (b'{"include_usage":false}', b'{"include_usage":true}', False),
        (b'{"include_usage":null}', b'{"include_usage":true}', False),
        (b'{"include_usage":true,"include_usage":false}', b'{"include_usage":true}', False),
        (b'{"other": [1 , 2]}', b'{"other":[1 , 2],"include_usage":true}', False),
    ],
)
def test_usage_is_asked_for_once(said: bytes | None, becomes: bytes | None, asked: bool) -> None:
    fields = {} if said is None else {"stream_options": msgspec.Raw(said)}
    assert ask_for_usage(fields) == (becomes, asked)


@pytest.mark.parametrize(
    ("said", "param"),
    [
        (b"true", "stream_options"),
        (b"[]", "stream_options"),
        (b'{"include_usage":"yes"}', "stream_options.include_usage"),
        (b"{" + b'"a":1,' * 20_000 + b'"include_usage":true}', "stream_options"),
    ],
)
def test_stream_options_of_another_shape_are_refused(said: bytes, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ask_for_usage({"stream_options": msgspec.Raw(said)})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "n": 3}, 21),
        ({"n_predict": 7}, 7),
        ({"n_predict": -1}, 0),
        ({"max_tokens": "7"}, 0),
    ],
)
def test_how_many_tokens_are_asked_for_by_every_name(said: dict[str, object], tokens: int) -> None:
    assert tokens_asked({name: msgspec.Raw(json.dumps(value).encode()) for name, value in said.items()}) == tokens


def test_reading_and_joining_costs_a_small_multiple_of_the_bare_decoder() -> None:
    message = {"role": "user", "content": "word " * 190}
    body = json.dumps({"model": "m", "messages": [message], "temperature": 0.7, "stream": True, "top_p": 1}).encode()
    assert 1_000 < len(body) < 1_100
    bare = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def both() -> None:
        join(peek(body).fields, drop=NOTHING, put={})

    ours = min(timeit.repeat(both, number=500, repeat=9))
    theirs = min(timeit.repeat(lambda: bare.decode(body), number=500, repeat=9))
    # Measured: 3 times. Anything that decodes values, or looks at every byte in Python, would be far above.
    assert ours < 40 * theirs


HI = Raw(b'[{"role": "user", "content": "hi"}]')


def check(size: int, **fields: Raw) -> None:
    CHAT.check(fields, size, {}, frozenset())


def test_a_large_field_is_left_to_the_engine_and_small_ones_beside_it_are_read() -> None:
    large = Raw(b"[" + b"5," * READ_BYTES_MAX + b"5]")
    check(len(bytes(large)), messages=large)
    with pytest.raises(BadRequest, match="temperature"):
        check(len(bytes(large)), messages=large, temperature=Raw(b'"hot"'))
    with pytest.raises(BadRequest, match="messages"):
        check(100, messages=Raw(b"[5]"))


@pytest.mark.parametrize(
    "broken",
    [b'[{"role": "user"', b'[{"role": "\xff"}]', b"[" * 100_000, b'[{"role": "a", "content": tru}]', b"1" * 5_000],
)
def test_garbage_in_a_field_is_a_mistake_in_it(broken: bytes) -> None:
    with pytest.raises(BadRequest, match=r"^(messages|n)\b"):
        check(len(broken), messages=Raw(broken))
    with pytest.raises(BadRequest, match=r"^n\b"):
        check(len(broken), messages=HI, n=Raw(broken))
