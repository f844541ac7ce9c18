"""How long a model shall stay, as callers write it: in JSON, in forms, and what is refused."""

from __future__ import annotations

import math

import pytest

from greenroom.config.kinds import SECONDS_MAX
from greenroom.errors import BadRequest
from greenroom.serving.body.multipart import MultipartForm, scan
from greenroom.serving.body.peek import FOR_EVER, capped, join, keep_alive_s, peek
from tests.serving.test_multipart import Pieces


def said(text: float | str) -> float:
    return keep_alive_s(text, param="keep_alive")


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (300, 300.0),
        (0, 0.0),
        (1.5, 1.5),
        (-1, FOR_EVER),
        (-0.001, FOR_EVER),
        (-99_999_999_999, FOR_EVER),
        (-1e300, FOR_EVER),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1h30m5.5s", 5405.5),
        ("300ms", 0.3),
        ("250us", 0.00025),
        ("250µs", 0.00025),
        ("1.5h", 5400.0),
        (".5m", 30.0),
        ("+10s", 10.0),
        ("-1m", FOR_EVER),
        ("-1", FOR_EVER),
        ("0", 0.0),
        ("-0s", 0.0),
        ("90", 90.0),
        (" 24h ", 86_400.0),
    ],
)
def test_times_are_read_as_people_write_them(text: float | str, seconds: float) -> None:
    assert said(text) == pytest.approx(seconds)


@pytest.mark.parametrize("much", [1e300, "9999999h", 10**15])
def test_no_time_is_longer_than_every_clock_can_bear(much: float | str) -> None:
    assert said(much) == SECONDS_MAX


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "5 m", "m", "5x", "5M", "1h-30m", "--1", "nan", "inf", "1_0", "١", "5m5", "1" * 65, "0x10", "1e3"),
        *(math.inf, -math.inf, math.nan),
    ],
)
def test_what_is_no_time_is_refused_and_named(text: float | str) -> None:
    with pytest.raises(BadRequest, match="keep_alive is a number of seconds") as caught:
        said(text)
    assert caught.value.param == "keep_alive"


@pytest.mark.parametrize(
    ("seconds", "most_s", "gets"),
    [
        (None, 60.0, None),
        (300.0, None, 300.0),
        (FOR_EVER, None, FOR_EVER),
        (300.0, 60.0, 60.0),
        (30.0, 60.0, 30.0),
        (0.0, 60.0, 0.0),
        (FOR_EVER, 60.0, 60.0),
        (FOR_EVER, 0.0, 0.0),
    ],
)
def test_keep_alive_is_capped_by_the_operator(seconds: float | None, most_s: float | None, gets: float | None) -> None:
    assert capped(seconds, most_s) == gets


# --- in JSON --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [b"true", b"[]", b"[1]", b"{}", b"1e400", b"1e999", b"1" + b"0" * 400, b'"x"', b'"soon"', b'""']
)
@pytest.mark.parametrize("name", ["keep_alive", "x_keep_alive_s"])
def test_whatever_is_wrong_is_told_in_one_way(name: str, wrong: bytes) -> None:
    with pytest.raises(BadRequest) as told:
        peek(b'{"model":"m","%b":%b}' % (name.encode(), wrong))
    assert told.value.param == name
    assert told.value.message == (
        f'{name} is a number of seconds or a time such as "5m" or "1h30m"; 0 leaves when idle, -1 stays.'
    )


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        (b"", None),
        (b',"keep_alive":null', None),
        (b',"keep_alive":7', 7.0),
        (b',"keep_alive":"5m"', 300.0),
        (b',"keep_alive":-1', FOR_EVER),
        (b',"x_keep_alive_s":2.5', 2.5),
        (b',"x_keep_alive_s":"2s"', 2.0),
        (b',"keep_alive":7,"x_keep_alive_s":8', 8.0),
        (b',"x_keep_alive_s":8,"keep_alive":7', 8.0),
        (b',"x_keep_alive_s":null,"keep_alive":7', 7.0),
    ],
)
def test_both_names_are_read_from_a_body_and_ours_wins(fields: bytes, seconds: float | None) -> None:
    assert peek(b'{"model":"m"%b}' % fields).keep_alive_s == seconds


def test_wrong_value_is_refused_also_beside_a_right_one_that_wins() -> None:
    with pytest.raises(BadRequest, match="keep_alive"):
        peek(b'{"model":"m","keep_alive":"soon","x_keep_alive_s":8}')


def test_engine_never_sees_either() -> None:
    peeked = peek(b'{"model":"m","keep_alive":"5m","x_keep_alive_s":8,"keep_alive_s":9}')
    assert join(peeked.fields, drop=frozenset(), put={}) == b'{"model":"m","keep_alive_s":9}'


# --- in forms -------------------------------------------------------------------------------------------------------


def form(**fields: str) -> MultipartForm:
    parts = {"model": "m", **fields, "language": "en"}
    head = '--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    content = "".join(head % field for field in parts.items()) + "--b--\r\n"
    return scan(Pieces(content.encode(), 1_000), b"multipart/form-data; boundary=b")


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        ({"keep_alive": ""}, None),
        ({"keep_alive": "5m"}, 300.0),
        ({"x_keep_alive_s": "8"}, 8.0),
        ({"keep_alive": "5m", "x_keep_alive_s": "8"}, 8.0),
        ({"keep_alive": "-1"}, FOR_EVER),
    ],
)
def test_forms_may_say_it_too(fields: dict[str, str], seconds: float | None) -> None:
    assert form(**fields).keep_alive_s == seconds


def test_bad_value_in_a_form_is_refused_by_its_name() -> None:
    with pytest.raises(BadRequest) as caught:
        _ = form(keep_alive="soon").keep_alive_s
    assert caught.value.param == "keep_alive"


def test_engine_never_sees_it_in_a_form() -> None:
    sent = form(keep_alive="5m", x_keep_alive_s="8").rewrite().read()
    assert b"keep_alive" not in sent
    assert b"language" in sent and b"model" in sent
