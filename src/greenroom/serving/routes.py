"""Which paths lead to models, and how a path names one.

Owns the routes of the OpenAI-compatible API, the prefix behind which an engine's own paths lie, and how an id with
slashes is told from what follows it there. The raw path is read, only the part that is the id is decoded, and that
once: what is authorised, routed and forwarded is the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote_to_bytes

from msgspec import Raw

from greenroom.access.keys import Caller
from greenroom.config.kinds import ID_CHARS_MAX
from greenroom.config.schema import Ability
from greenroom.dialects import ollama_answer
from greenroom.dialects.anthropic_answer import count_translation, messages_translation
from greenroom.dialects.responses_answer import response_translation
from greenroom.dialects.shapes import Dialect
from greenroom.dialects.translation import Translate
from greenroom.errors import NotAllowed
from greenroom.http.sse import StreamShape
from greenroom.serving.body import body_check
from greenroom.serving.body.body_check import BodyCheck

PATH_SHOWN_MAX: Final = 100

_BROKEN_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PLAIN_PART: Final = rb"(?!\.{1,2}(?:/|$))[A-Za-z0-9._~!$&'()+,=:@-]+"
_PLAIN_PATH: Final = re.compile(rb"(?:/" + _PLAIN_PART + rb")*/?")
# Paths have neither; a parser that lets them through must not make them ours.
_NULL: Final = Raw(b"null")
_RAW_CONTROL: Final = re.compile(rb"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True)
class Route:
    """`name` is its label in metrics; `shape` what an empty piece of its stream looks like.

    `is_text`: it sends a text whose beginning a cache may know, and gets one whose tokens are counted.
    `form`: it takes a form, which must have these fields beside `model`. `makes_pictures`: its answer has pictures.
    `is_sound`: its answer is counted by the length of the sound that was heard or made.
    `dialect`: which API it belongs to. `translate`: how it becomes OpenAI's chat; None: it goes to the engine as it is.
    `is_native`: a route of engines, open to models whose engine has it. `is_promptless`: it computes no prompt.
    `can_stream`: False where an answer is always one piece. `streams_unless_told`: it streams if the body is silent.
    `sent_to`: the path of engines for it; None: the caller's. `is_twin`: another name of a documented route.
    `check`: what its body must hold, where it is passed on as it is.
    `has_prompt`: its engine may keep what it computed for the request, and find it again for another one.
    """

    name: str
    ability: Ability | None = None
    shape: StreamShape = StreamShape.TEXT
    form: tuple[str, ...] = ()
    is_text: bool = False
    makes_pictures: bool = False
    is_sound: bool = False
    dialect: Dialect = Dialect.OPENAI
    translate: Translate | None = None
    is_native: bool = False
    is_promptless: bool = False
    can_stream: bool = True
    streams_unless_told: bool = False
    sent_to: bytes | None = None
    is_twin: bool = False
    check: BodyCheck | None = None
    has_prompt: bool = field(init=False)

    def __post_init__(self) -> None:
        of_texts = self.ability in (Ability.EMBEDDINGS, Ability.RERANK)
        has_prompt = self.is_text or of_texts or (self.is_native and not self.is_promptless)
        object.__setattr__(self, "has_prompt", has_prompt)

    def is_stream(self, asked: bool, fields: Mapping[str, Raw]) -> bool:
        """Whether the answer streams, where the field `stream` was read as `asked`."""
        said = bytes(fields.get("stream", _NULL))
        return self.can_stream and (asked or (self.streams_unless_told and said == b"null"))


def _native(name: str, *, is_text: bool = False, is_promptless: bool = False) -> Route:
    """A route of llama.cpp or vLLM, whose bodies and answers pass as they are."""
    return Route(name, is_text=is_text, dialect=Dialect.LLAMACPP, is_native=True, is_promptless=is_promptless)


# A text for a prompt, of the model under version control that is meant; answered like /v1/completions.
GENERATE: Final = Route(
    "generate", Ability.COMPLETIONS, is_text=True, sent_to=b"/v1/completions", check=body_check.COMPLETION
)
# As llama.cpp, vLLM and llama-swap call it too.
_RERANK_TWIN: Final = Route("rerank", Ability.RERANK, sent_to=b"/v1/rerank", is_twin=True, check=body_check.RERANK)
MODEL_ROUTES: Final[dict[bytes, Route]] = {
    b"/generate": GENERATE,
    b"/v1/chat/completions": Route("chat", Ability.CHAT, StreamShape.CHAT, is_text=True, check=body_check.CHAT),
    b"/v1/completions": Route("completions", Ability.COMPLETIONS, is_text=True, check=body_check.COMPLETION),
    b"/v1/embeddings": Route("embeddings", Ability.EMBEDDINGS, check=body_check.EMBEDDING),
    b"/v1/rerank": Route("rerank", Ability.RERANK, check=body_check.RERANK),
    b"/v1/reranking": _RERANK_TWIN,
    b"/rerank": _RERANK_TWIN,
    b"/reranking": _RERANK_TWIN,
    b"/v1/images/generations": Route("images", Ability.IMAGES, makes_pictures=True, check=body_check.PICTURE),
    b"/v1/images/edits": Route("image_edits", Ability.IMAGE_EDITS, form=("image", "prompt"), makes_pictures=True),
    b"/v1/images/variations": Route("image_variations", Ability.IMAGE_EDITS, form=("image",), makes_pictures=True),
    b"/v1/audio/transcriptions": Route(
        "transcriptions", Ability.TRANSCRIPTION, StreamShape.TRANSCRIPT, form=("file",), is_sound=True
    ),
    b"/v1/audio/translations": Route(
        "translations", Ability.TRANSLATION, StreamShape.TRANSCRIPT, form=("file",), is_sound=True
    ),
    b"/v1/audio/speech": Route("speech", Ability.SPEECH, is_sound=True, check=body_check.SPEECH),
    b"/v1/messages": Route(
        "messages",
        Ability.CHAT,
        StreamShape.MESSAGE,
        is_text=True,
        dialect=Dialect.ANTHROPIC,
        translate=messages_translation,
    ),
    b"/v1/messages/count_tokens": Route(
        "count_tokens",
        Ability.CHAT,
        dialect=Dialect.ANTHROPIC,
        translate=count_translation,
        can_stream=False,
    ),
    b"/completion": _native("completion", is_text=True),
    b"/infill": _native("infill", is_text=True),
    b"/tokenize": _native("tokenize", is_promptless=True),
    b"/detokenize": _native("detokenize", is_promptless=True),
    b"/apply-template": _native("apply_template", is_promptless=True),
    b"/pooling": _native("pooling"),
    b"/score": _native("score"),
    b"/v1/responses": Route(
        "responses",
        Ability.CHAT,
        StreamShape.RESPONSE,
        is_text=True,
        dialect=Dialect.RESPONSES,
        translate=response_translation,
    ),
    b"/api/chat": Route(
        "ollama_chat",
        Ability.CHAT,
        StreamShape.OLLAMA_CHAT,
        is_text=True,
        dialect=Dialect.OLLAMA,
        translate=ollama_answer.chat_translation,
        streams_unless_told=True,
    ),
    b"/api/generate": Route(
        "ollama_generate",
        Ability.CHAT,
        StreamShape.OLLAMA_GENERATE,
        is_text=True,
        dialect=Dialect.OLLAMA,
        translate=ollama_answer.generate_translation,
        streams_unless_told=True,
    ),
    b"/api/embed": Route(
        "ollama_embed",
        Ability.EMBEDDINGS,
        dialect=Dialect.OLLAMA,
        translate=ollama_answer.embed_translation,
        can_stream=False,
    ),
    b"/api/embeddings": Route(
        "ollama_embeddings",
        Ability.EMBEDDINGS,
        dialect=Dialect.OLLAMA,
        translate=ollama_answer.embeddings_translation,
        can_stream=False,
    ),
}
# Of Ollama's other paths, which the management API answers.
_OLLAMA_PATHS: Final = frozenset(
    (b"/api/tags", b"/api/show", b"/api/ps", b"/api/version", b"/api/pull", b"/api/delete")
)


def dialect_of(path: bytes) -> Dialect:
    """The API that a path belongs to, for errors before the path is routed."""
    route = MODEL_ROUTES.get(path)
    if route is None:
        return Dialect.OLLAMA if path in _OLLAMA_PATHS else Dialect.OPENAI
    return route.dialect


UPSTREAM_PREFIX: Final = b"/upstream/"
UPSTREAM: Final = Route("upstream")
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
