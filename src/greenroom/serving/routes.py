"""Which paths lead to models, and how a path names one.

Owns the table of all dialects' routes, the prefix behind which an engine's own paths lie, and how an id with slashes is
told from what follows it there. The raw path is read, only the part that is the id is decoded, and that once: what is
authorised, routed and forwarded is the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import unquote_to_bytes

from greenroom.access.keys import Caller
from greenroom.config.kinds import ID_CHARS_MAX
from greenroom.dialects import anthropic, llama_server, ollama, openai, responses
from greenroom.dialects.dialect import Dialect, Route
from greenroom.dialects.openai import OPENAI
from greenroom.errors import NotAllowed

PATH_SHOWN_MAX: Final = 100

_BROKEN_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PLAIN_PART: Final = rb"(?!\.{1,2}(?:/|$))[A-Za-z0-9._~!$&'()+,=:@-]+"
_PLAIN_PATH: Final = re.compile(rb"(?:/" + _PLAIN_PART + rb")*/?")
# Paths have neither; a parser that lets them through must not make them ours.
_RAW_CONTROL: Final = re.compile(rb"[\x00-\x20\x7f]")


# A text for a prompt, of the model under version control that is meant.
GENERATE: Final = openai.completion(
    "generate", "Continue a text by the model under version control.", openai.COMPLETIONS_PATH
)
# A dialect is one line here. The document of the API has its routes in this order.
MODEL_ROUTES: Final[dict[bytes, Route]] = {
    b"/generate": GENERATE,
    **openai.ROUTES,
    **anthropic.ROUTES,
    **llama_server.ROUTES,
    **responses.ROUTES,
    **ollama.ROUTES,
}
DIALECTS: Final = tuple(dict.fromkeys(route.dialect for route in MODEL_ROUTES.values()))
_DIALECT_OF_PAGE: Final = {page: dialect for dialect in DIALECTS for page in dialect.pages}


def dialect_of(path: bytes) -> Dialect:
    """The API that a path belongs to, for errors before the path is routed."""
    route = MODEL_ROUTES.get(path)
    return _DIALECT_OF_PAGE.get(path, OPENAI) if route is None else route.dialect


UPSTREAM_PREFIX: Final = b"/upstream/"
UPSTREAM: Final = Route("upstream", OPENAI)
# The last parts of paths of engines whose answers are texts: OpenAI's, llama.cpp's, Anthropic's, SGLang's.
_TEXT_PARTS: Final = frozenset((b"completions", b"completion", b"infill", b"messages", b"responses", b"generate"))


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


def name_before(raw_rest: bytes, order: bytes) -> str | None:
    """The name in a raw path that ends in this order, known or not; None if it does not, or cannot be a name."""
    if not raw_rest.endswith(order) or _RAW_CONTROL.search(raw_rest):
        return None
    segments = [_decoded(segment) for segment in raw_rest[: len(raw_rest) - len(order)].split(b"/")]
    return "/".join(segment for segment in segments if segment is not None) if all(segments) else None


def is_open(path: bytes, patterns: Iterable[str]) -> bool:
    """Whether one of a model's `routes` fits this raw path.

    A path that an engine might read as another one fits none: with an escape, an empty part, "." or "..".
    """
    if _PLAIN_PATH.fullmatch(path) is None:
        return False
    parts = path.decode("ascii").split("/")
    return any(_fits(pattern.split("/"), parts) for pattern in patterns)


def expect_route(caller: Caller, path: bytes) -> None:
    """Raises NotAllowed if the caller's key is for other paths."""
    if caller.routes is not None and not is_open(path, caller.routes):
        named = path[:PATH_SHOWN_MAX].decode("ascii", "backslashreplace")
        raise NotAllowed(f"The key {caller.name} may not call {named}: its `routes` do not name it.")


def answers_with_text(target: bytes) -> bool:
    """Whether an engine answers this target with a text, as far as the path tells."""
    return target.partition(b"?")[0].rstrip(b"/").rpartition(b"/")[2] in _TEXT_PARTS


def has_one_path(upgrade: bytes | None) -> bool:
    """False for a protocol that has paths of its own: over HTTP/2 (h2c) every path of an engine could be reached."""
    return upgrade is None or upgrade.lower() == b"websocket"


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
