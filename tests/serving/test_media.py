"""Which pictures, sounds and films a request may name, however it is written."""

from __future__ import annotations

import json
import timeit
from typing import Any

import pytest

from greenroom.errors import BadRequest, MediaRefused
from greenroom.serving.body.media import check_body, check_media, is_upload
from greenroom.serving.body.peek import has_parts, peek

HOSTS = ("pictures.example.org",)
PIXEL = "data:image/png;base64,iVBORw0KGgo="
GOOD = "https://pictures.example.org/a.png?size=1&x=%20#top"
BAD = "http://169.254.169.254/latest/meta-data/"


def checked(body: Any, hosts: tuple[str, ...] = HOSTS) -> None:
    raw = body if isinstance(body, bytes) else json.dumps({"model": "m", **body}).encode()
    fields = peek(raw).fields
    if has_parts(fields):
        check_media(fields, hosts)


def passed_on(raw: bytes) -> None:
    check_body(raw, HOSTS)


def asking(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "[x] http://10.0.0.1"}, {"role": "user", "content": [*parts]}]}


def part(place: Any, kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, kind: {"url": place}}


@pytest.mark.parametrize("place", [PIXEL, GOOD, "HTTP://Pictures.Example.ORG:8080", "http://pictures.example.org?a"])
def test_data_and_listed_hosts_pass(place: str) -> None:
    checked(asking({"type": "text", "text": BAD}, part(place), part(place, "video_url")))


@pytest.mark.parametrize(
    "place",
    [
        BAD,
        "https://example.org/a.png",
        "https://evil.pictures.example.org/",
        "https://pictures.example.org.evil.com/",
        "https://pictures.example.org@evil.com/",
        "https://evil.com/@pictures.example.org",
        "https://evil.com\\@pictures.example.org/",
        "https://evil.com#@pictures.example.org/",
        "https://pictures.example.org\\@evil.com/",
        "https://pictures.example.org:80@evil.com/",
        "https://pictures.example.org\n.evil.com/",
        "https://pictures.example.org/a b",
        "https:pictures.example.org",
        "//pictures.example.org/a.png",
        " https://evil.com/",
        "http://[::1]/",
        "http://0x7f.1/",
        "file:///etc/hostname.png",
        "file:/etc/hostname.png",
        "/etc/hostname.png",
        "a.png",
        "ftp://pictures.example.org/a.png",
        "DATA:x",
        "",
    ],
)
def test_everything_else_is_refused(place: str) -> None:
    with pytest.raises(MediaRefused) as told:
        checked(asking({"type": "text", "text": "what is it?"}, part(place)))
    assert (told.value.status, told.value.code, told.value.param) == (400, "media_refused", "url")
    assert "data: URL" in told.value.message and HOSTS[0] in told.value.message


@pytest.mark.parametrize(
    "odd",
    [
        part(BAD, "audio_url"),
        part(BAD, "video_url"),
        {"type": "image_url", "image_url": BAD},
        {"image_url": BAD},
        {"type": "input_image", "image_url": BAD},
        {"type": "image", "image": BAD},
        {"type": "video", "video": [PIXEL, BAD]},
        {"type": "image", "source": {"type": "url", "url": BAD}},
        {"type": "input_audio", "input_audio": {"data": BAD, "format": "wav"}},
        {"type": "file", "file": {"file_data": BAD, "filename": "a.pdf"}},
        {"type": "input_audio", "input_audio": {"data": 40 * " " + BAD, "format": "wav"}},
        {"type": "image", "image": [[PIXEL, BAD]]},
        {"type": "tool_result", "content": [part(BAD)]},
        {"type": "x", "a_new_image": {"nested": {"deeper": [{"url": BAD}]}}},
    ],
)
def test_parts_of_every_shape_are_seen(odd: dict[str, Any]) -> None:
    with pytest.raises(MediaRefused):
        checked(asking(odd))


@pytest.mark.parametrize(
    "fine",
    [
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "file", "file": {"file_data": PIXEL, "filename": "a.pdf"}},
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "high"}},
        {"type": "text", "text": BAD, "uuid": "a"},
        "just text http://10.0.0.1",
    ],
)
def test_what_fetches_nothing_passes(fine: Any) -> None:
    checked(asking(fine))


def test_no_name_in_a_cache_of_all_tenants_is_passed_on() -> None:
    with pytest.raises(MediaRefused, match="uuid"):
        checked(asking({**part(PIXEL), "uuid": "logo"}))
    with pytest.raises(MediaRefused, match="uuid"):
        checked(asking({"type": "image_url", "uuid": "logo"}))


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model":"m","messages":[{"con\u0074ent":[{"image_u\u0072l":{"\u0075rl":"\u0068ttp://10.0.0.1"}}]}]}',
        rb'{"model":"m","messages":[{"content":"x","content":[{"image_url":{"url":"http:\/\/10.0.0.1"}}]}]}',
        rb'{"model":"m","messages":[{"content":[{"image_url":{"url":"data:,","url":"http://10.0.0.1"}}]}]}',
        rb'{"model":"m","messages":[],"mess\u0061ges": [ {"content" : [{"image_url":"http://10.0.0.1"}]}]}',
        rb'{"model":"m","messages":["x",{"content":[{"image_url":"http://10.0.0.1"}]}]}',
        rb'{"model":"m","messages":{"content":[{"image_url":"http://10.0.0.1"}]}}',
        rb'{"model":"m","input":[{"text":"a","image":"http://10.0.0.1"}]}',
        rb'{"model":"m","messages":[{"content":[]},{"content":{"type":"image_url","image_url":"http://10.0.0.1"}}]}',
        rb'{"model":"m","query":"x","texts":[{"content":[{"image_url":"http://10.0.0.1"}]}]}',
        rb'{"model":"m","query":"x","documents":{"content":[{"image_url":{"url":"/etc/a.png"}}]}}',
    ],
)
def test_other_ways_to_write_it_are_the_same(body: bytes) -> None:
    with pytest.raises(MediaRefused):
        checked(body)


def test_text_is_never_looked_into() -> None:
    checked({"messages": [{"role": "user", "content": '[{"image_url": "http://10.0.0.1"}]'}], "input": ["{", BAD]})
    checked({"prompt": '{"url": "http://10.0.0.1"}', "query": "{}"})
    checked({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "image"}}]}]})
    checked({"messages": 7})


def test_bodies_for_an_engines_own_paths_are_looked_into_as_a_whole() -> None:
    for body in (asking(part(BAD)), {"input": [{"content": [part(BAD)]}]}, {"image_data": [BAD]}, [{"url": BAD}]):
        with pytest.raises(MediaRefused):
            passed_on(json.dumps(body).encode())
    schema = {"type": "object", "properties": {"url": {"type": "string", "default": BAD}}}
    passed_on(json.dumps({"tools": [{"parameters": schema}], **asking(part(GOOD))}).encode())
    passed_on(b"")
    for odd in (b"\0", b'{"a": NaN}', json.dumps(asking(part(BAD))).encode("utf-16"), b"[" * 100_000):
        with pytest.raises(BadRequest):
            passed_on(odd)


@pytest.mark.parametrize("kind", ["multipart/x", "multipart/mixed; boundary=a", "Multipart/Form-Data; boundary=a"])
def test_only_what_no_engine_reads_as_json_is_an_upload(kind: str) -> None:
    """llama.cpp compares the letters as they are, and reads everything else as JSON."""
    assert is_upload(b"multipart/form-data; boundary=a")
    assert not is_upload(kind.encode()) and not is_upload(None)


def test_a_text_request_costs_hardly_anything() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a word and more " * 500} for _ in range(20)]}
    raw = json.dumps(body).encode()
    fields = peek(raw).fields
    assert not has_parts(fields)
    # Both in the same process, one after the other: the machine's own speed cancels out.
    look = min(timeit.repeat(lambda: has_parts(fields), number=100, repeat=5))
    whole = min(timeit.repeat(lambda: peek(raw), number=100, repeat=5))
    assert look < whole / 2
