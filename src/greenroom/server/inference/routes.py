"""Which paths lead to models, and how a path names one.

Owns the routes of the OpenAI-compatible API, the prefix behind which an engine's own paths lie, and how an id with
slashes is told from what follows it there. The raw path is read, only the part that is the id is decoded, and that
once: what is authorised, routed and forwarded is the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from greenroom.config.kinds import ID_CHARS_MAX
from greenroom.config.schema import Ability
from greenroom.http.sse import StreamShape

_BROKEN_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PLAIN_PART: Final = rb"(?!\.{1,2}(?:/|$))[A-Za-z0-9._~!$&'()+,=:@-]+"
_PLAIN_PATH: Final = re.compile(rb"(?:/" + _PLAIN_PART + rb")*/?")
# Paths have neither; a parser that lets them through must not make them ours.
_RAW_CONTROL: Final = re.compile(rb"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True)
class Route:
    """`name` is its label in metrics; `shape` what an empty piece of its stream looks like.

    `is_text`: it sends a text whose beginning a cache may know, and gets one whose tokens are counted.
    """

    name: str
    ability: Ability | None = None
    shape: StreamShape = StreamShape.TEXT
    is_multipart: bool = False
    is_text: bool = False


MODEL_ROUTES: Final[dict[bytes, Route]] = {
    b"/v1/chat/completions": Route("chat", Ability.CHAT, StreamShape.CHAT, is_text=True),
    b"/v1/completions": Route("completions", Ability.COMPLETIONS, is_text=True),
    b"/v1/embeddings": Route("embeddings", Ability.EMBEDDINGS),
    b"/v1/rerank": Route("rerank", Ability.RERANK),
    b"/v1/images/generations": Route("images", Ability.IMAGES),
    b"/v1/images/edits": Route("image_edits", Ability.IMAGE_EDITS, is_multipart=True),
    b"/v1/images/variations": Route("image_variations", Ability.IMAGE_EDITS, is_multipart=True),
    b"/v1/audio/transcriptions": Route("transcriptions", Ability.TRANSCRIPTION, is_multipart=True),
    b"/v1/audio/translations": Route("translations", Ability.TRANSLATION, is_multipart=True),
    b"/v1/audio/speech": Route("speech", Ability.SPEECH),
}

UPSTREAM_PREFIX: Final = b"/upstream/"
UPSTREAM: Final = Route("upstream")


def split_model(raw_rest: bytes, is_known: Callable[[str], bool]) -> tuple[str, bytes] | None:
    """The id at the start of `raw_rest` and the raw bytes after it (empty, or from a slash on). None if none is known.

    1. A first segment with percent escapes that is a known id: the caller encoded the id as one, slashes included.
    2. Else the longest known id that the first segments make up.
    """
    if _RAW_CONTROL.search(raw_rest):
        return None
    found: tuple[str, bytes] | None = None
    name, end = "", -1
    while end < len(raw_rest):
        begin, end = end + 1, _segment_end(raw_rest, end + 1)
        segment = _decoded(raw_rest[begin:end])
        if segment is None:
            break
        name = f"{name}/{segment}" if begin else segment
        if len(name) > ID_CHARS_MAX:
            break
        if is_known(name):
            found = name, raw_rest[end:]
            if not begin and b"%" in raw_rest[:end]:
                return found  # 1.
    return found  # 2.


def is_open(path: bytes, patterns: Iterable[str]) -> bool:
    """Whether one of a model's `routes` fits this raw path.

    A path that an engine might read as another one fits none: with an escape, an empty part, "." or "..".
    """
    if _PLAIN_PATH.fullmatch(path) is None:
        return False
    parts = path.decode("ascii").split("/")
    return any(_fits(pattern.split("/"), parts) for pattern in patterns)


def _fits(wanted: list[str], parts: list[str]) -> bool:
    if wanted[-1] == "**":
        wanted = wanted[:-1]
        parts = parts[: len(wanted)] if len(parts) > len(wanted) else []
    return len(wanted) == len(parts) and all(
        part == want or (want == "*" and part != "") for want, part in zip(wanted, parts, strict=True)
    )


def _segment_end(raw: bytes, begin: int) -> int:
    slash = raw.find(b"/", begin)
    return len(raw) if slash < 0 else slash


def _decoded(segment: bytes) -> str | None:
    """The segment as text; None when it is not the text of any id."""
    if _BROKEN_ESCAPE.search(segment):
        return None
    try:
        text = unquote_to_bytes(segment).decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None
