"""Pictures as URLs of this server: an engine's answer is made anew, and the URLs are served.

Owns how the base64 of an answer becomes pictures and URLs, and the headers under which pictures are served. Only what
is a PNG, a JPEG or a WebP by its first bytes is kept. A URL is a capability: it shows the picture to every caller that
has it, without a key, until the picture is gone.
"""

from __future__ import annotations

import asyncio
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.responses import Response, StreamingResponse

from greenroom.access.keys import Permission
from greenroom.api.declared import Routes, get
from greenroom.base.detached import run_detached
from greenroom.config.part import GatewayState
from greenroom.errors import BadRequest, EngineFault, NotFound, shown
from greenroom.features.pictures.store import Picture, PictureStore
from greenroom.http.body import Body, BodyBudget
from greenroom.http.headers import Headers
from greenroom.http.request import Head

PICTURES: Final = "/v1/images"
# Of an engine's answer. It is in memory while its pictures are read.
ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024
# Of base64, which has four characters for three bytes.
_STEP_CHARS: Final = 256 * 1024
# What an answer has beside its pictures.
_BESIDE_BYTES: Final = 1024 * 1024
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_ENDINGS: Final = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp"}
# A page must never run what it finds here, whatever the bytes are.
HARMLESS: Final = {"content-security-policy": "sandbox; default-src 'none'", "x-content-type-options": "nosniff"}


class _PicturesAnswer(msgspec.Struct):
    """The part of an engine's answer that is read; every other field stays as it is."""

    data: list[dict[str, msgspec.Raw]]


_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_answer: Final = msgspec.json.Decoder(_PicturesAnswer)
_text: Final = msgspec.json.Decoder(str | None)


class PictureAnswers:
    """Makes answers with URLs, one at a time: each is in memory as a whole."""

    def __init__(self, store: PictureStore, bodies: BodyBudget, gateway: GatewayState) -> None:
        self.store = store
        self.bodies = bodies
        self._gateway = gateway
        self.turn = asyncio.Lock()

    def for_request(self, head: Head, tenant: str, model: str) -> UrlAnswer:
        """Raises BadRequest if neither the configuration nor the request tells how callers reach this server."""
        base = self._gateway.config.server.public_url or _base_url(head)
        return UrlAnswer(self, base.rstrip("/"), tenant, model)


def _base_url(head: Head) -> str:
    """By the Host header, which the front door has checked. Nothing else that a caller sends gets into a URL."""
    host = head.get(b"host")
    if host is None or _HOST.fullmatch(host) is None:
        raise BadRequest("A URL needs the Host of this server: send that header, or set server.public_url.")
    return f"http://{host.decode('ascii')}"


class UrlAnswer:
    """The answer of one request."""

    def __init__(self, answers: PictureAnswers, base: str, tenant: str, model: str) -> None:
        self._answers = answers
        self._base = base
        self._tenant = tenant
        self._model = model

    @property
    def bytes_max(self) -> int:
        """Base64 has four characters for three bytes."""
        return min(ANSWER_BYTES_MAX, self._answers.store.bytes_max * 4 // 3 + _BESIDE_BYTES)

    def body(self) -> Body:
        return Body(self._answers.bodies)

    async def remade(self, status: int, headers: Headers, body: Body) -> tuple[int, Headers, bytes]:
        """An engine's own error, and URLs of its own, are passed on as they are. Raises EngineFault for garbage. Also
        raises ResultTooLarge and PictureStoreFull."""
        try:
            await self._answers.turn.acquire()
        except asyncio.CancelledError:
            body.close()
            raise
        # What is read and written cannot be stopped: a caller that leaves must not let the next one begin.
        work = asyncio.get_running_loop().create_task(self._made(status, body))
        work.add_done_callback(self._end_turn)
        return status, headers, await asyncio.shield(work)

    def _end_turn(self, work: asyncio.Task[bytes]) -> None:
        self._answers.turn.release()
        if not work.cancelled():
            # The caller that would have been told may be gone.
            work.exception()

    async def _made(self, status: int, body: Body) -> bytes:
        try:
            whole = await run_detached(body.read, "read an answer")
        finally:
            body.close()
        if status != 200:
            return whole
        found = await run_detached(lambda: _read(whole, self._model), "read pictures")
        ids = await self._answers.store.keep(self._tenant, found.pictures)
        return found.with_urls([f"{self._base}{PICTURES}/{id}" for id in ids])


@dataclass(frozen=True, slots=True)
class _Found:
    fields: dict[str, msgspec.Raw]
    data: list[dict[str, msgspec.Raw]]
    places: list[int]
    """Which of `data` had the pictures."""
    pictures: list[Picture]

    def with_urls(self, urls: list[str]) -> bytes:
        for place, url in zip(self.places, urls, strict=True):
            self.data[place] = {"url": msgspec.Raw(msgspec.json.encode(url)), **self.data[place]}
        return msgspec.json.encode({**self.fields, "data": self.data})


def _read(answer: bytes, model: str) -> _Found:
    """The pictures of an answer; they are taken out of it. Raises EngineFault."""
    try:
        fields, data = _fields.decode(answer), _answer.decode(answer).data
        places, pictures = [], []
        for place, item in enumerate(data):
            encoded = _text.decode(item.pop("b64_json", msgspec.Raw(b"null")))
            if encoded is not None:
                item.pop("url", None)
                places.append(place)
                pictures.append(picture_of(encoded, model))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFault(f"{model} answered something else than pictures.", details=str(error)) from error
    return _Found(fields, data, places, pictures)


def picture_of(encoded: str, model: str) -> Picture:
    """Raises EngineFault unless it is the base64 of a PNG, JPEG or WebP."""
    try:
        content = b"".join(_steps(encoded))
    except ValueError as error:
        raise EngineFault(f"{model} answered with a picture that is no base64.", details=str(error)) from error
    kind = media_type(content)
    if kind is None:
        raise EngineFault(f"{model} answered with a picture that is neither PNG, JPEG nor WebP.")
    return Picture(kind, content)


def _steps(encoded: str) -> Iterator[bytes]:
    """The loop gets its turn between them, as a thread has Python's lock while it decodes. Raises ValueError."""
    if encoded.find("=", 0, -2) >= 0:
        raise ValueError("padding before the end")
    for at in range(0, len(encoded), _STEP_CHARS):
        yield binascii.a2b_base64(encoded[at : at + _STEP_CHARS], strict_mode=True)


def media_type(content: bytes) -> str | None:
    """By its first bytes."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if content.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return None


# --- serving --------------------------------------------------------------------------------------------------------


class PictureRoutes(Routes):
    def __init__(self, store: PictureStore) -> None:
        self._store = store

    @get(f"{PICTURES}/img-{{picture}}", needs=Permission.ASK, response_class=Response)
    async def show_picture(self, picture: str) -> Response:
        """A picture that an answer named. Needs no key: its address is the secret."""
        id = f"img-{picture}"
        kept = self._store.find(id)
        pieces = None if kept is None else await run_detached(lambda: self._store.read(id), "read a picture")
        if kept is None or pieces is None:
            raise NotFound(f"There is no picture {shown(id)}; pictures are kept for a while only.")
        headers = {
            **HARMLESS,
            "content-type": kept.media_type,
            "content-length": str(kept.size),
            "content-disposition": f'inline; filename="{kept.id}.{_ENDINGS[kept.media_type]}"',
            "cache-control": f"private, immutable, max-age={self._store.seconds_left(kept)}",
        }
        return StreamingResponse(pieces, headers=headers)
