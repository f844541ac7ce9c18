"""Pictures, sound and films that a request names by URL. Engines fetch them, from inside the operator's network.

Owns what a request may name: data that it brings along (`data:`), and hosts that the operator listed (`media_hosts`).
Everything else is refused before anything is loaded, for every engine alike. Fetches nothing itself. Of a text request
nothing is decoded (`holds_parts` in `peek.py`). The mark of an outline is no URL, so an address that is so long is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Raw

from greenroom.errors import BadRequest, MediaRefused
from greenroom.serving.body.peek import CONTENT, MESSAGES, Fields, holds_parts

# Fields that hold schemas and notes, whose words mean something else.
_NO_CONTENT: Final = frozenset({"tools", "functions", "response_format", "structured_outputs", "metadata", "text"})
# Keys that hold something to fetch, and those among them that only describe it.
_MEDIA: Final = re.compile(r"image|video|audio|media|file|source|ur[il]$", re.IGNORECASE)
_DESCRIBES: Final = re.compile(r"(embeds|id|name|type|format|detail|kwargs|transcript)$", re.IGNORECASE)
_DATA: Final = "data:"
# Only what all URL parsers read alike: no user, no backslash, no space, no brackets around the host.
_URL: Final = re.compile(r"https?://([a-z0-9._-]{1,253})(?::[0-9]{1,5})?(?:[/?#][!#-;=?-\[\]_a-~]*)?", re.IGNORECASE)
_SHOWN_MAX: Final = 80
# Names that an engine gives to media in a cache that all of its callers share.
_UUID: Final = "uuid"


_messages: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_list: Final = msgspec.json.Decoder(list[Raw])


def check_media(fields: Fields, hosts: Sequence[str]) -> None:
    """Raises MediaRefused for media that the engine would have to fetch from anywhere but these hosts."""
    for name, raw in fields.items():
        if name in CONTENT and holds_parts(name, raw):
            for content in _contents(raw) if name == MESSAGES else (raw,):
                for item in _items(content):
                    _walk(_decoded(item), hosts)


def is_upload(content_type: bytes | None) -> bool:
    """True for a form, which no engine reads as JSON. Other spellings and kinds of multipart llama.cpp does read."""
    return (content_type or b"").startswith(b"multipart/form-data")


def check_body(body: bytes, hosts: Sequence[str], refused: frozenset[str] = frozenset()) -> None:
    """The same for what is passed on to a path of the engine's own: all of it, as JSON. Raises BadRequest if it is not,
    or if it has one of the `refused` fields.

    What cannot be read here might still be read there.
    """
    if not body:
        return
    said = _decoded(body)
    for one in said if isinstance(said, list) else (said,):
        if isinstance(one, dict) and (names := sorted(refused.intersection(one))):
            raise BadRequest(f"{names[0]} tells the engine of another host; leave it out.", param=names[0])
    if isinstance(said, dict):
        said = {name: value for name, value in said.items() if name not in _NO_CONTENT}
    _walk(said, hosts)


def _contents(messages: Raw) -> list[Raw]:
    """The contents that are no text; all of it where it is no list of messages, which is the engine's to refuse."""
    try:
        found = [message["content"] for message in _messages.decode(messages) if "content" in message]
    except msgspec.ValidationError:
        return [messages]
    return [raw for raw in found if bytes(raw)[:1] in (b"[", b"{")]


def _items(content: Raw) -> list[Raw]:
    """What a list holds, or what is no list. Each is decoded by itself, so that no single call takes long."""
    try:
        return _list.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [content]


def _decoded(raw: bytes | Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None


def _walk(said: Any, hosts: Sequence[str]) -> None:
    """Look at every object below. The depth is bounded by the decoder's."""
    if isinstance(said, list):
        for one in said:
            if isinstance(one, list | dict):
                _walk(one, hosts)
    elif isinstance(said, dict):
        if _UUID in said and said.get("type") != "text":
            raise MediaRefused("uuid names media in a cache that all callers share; leave it out.", param=_UUID)
        for name, value in said.items():
            if isinstance(value, list | dict):
                _walk(value, hosts)
            if _MEDIA.search(name) and not _DESCRIBES.search(name):
                _check_named(name, value, hosts)


def _check_named(name: str, value: Any, hosts: Sequence[str]) -> None:
    """A place, several, or an object of which anything that looks like one is; `url` in it is found by itself."""
    if isinstance(value, str):
        _check_place(name, value, hosts)
    elif isinstance(value, list):
        for one in value:
            if not isinstance(one, dict):
                _check_named(name, one, hosts)
    elif isinstance(value, dict):
        for key, one in value.items():
            if isinstance(one, str) and "://" in one.lstrip()[:32]:
                _check_place(f"{name}.{key}", one, hosts)


def _check_place(name: str, place: str, hosts: Sequence[str]) -> None:
    if place.startswith(_DATA):
        return
    found = _URL.fullmatch(place)
    if found is None or found[1].lower() not in hosts:
        _refuse(name, place, found[1] if found else None, hosts)


def _refuse(name: str, place: str, host: str | None, hosts: Sequence[str]) -> NoReturn:
    shown = place if len(place) <= _SHOWN_MAX else place[:_SHOWN_MAX] + "…"
    what = f"{shown!r} is neither data nor an http(s) URL of at most 8 KiB"
    if host is not None:
        what = f"it may not be fetched from {host}"
    listed = f", or name one of {', '.join(hosts)}" if hosts else ""
    raise MediaRefused(f"{name}: {what}. Send it as a data: URL{listed}.", param=name)
