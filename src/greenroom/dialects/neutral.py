"""The small form between a dialect and OpenAI's chat: a conversation that is asked, and deltas of its answer.

Owns the records alone. What a dialect can say and chat cannot is refused where it is read, by the field's name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from greenroom.errors import BadRequest

Fields = dict[str, Raw]
# The value of a field that was not sent.
NOTHING: Final = Raw(b"")

# Objects inside of one field of a body. A long conversation has some thousands, and each takes time of all requests.
OBJECTS_MAX: Final = 20_000
# Where an object begins. Inside of a text its quote would be escaped, so code and JSON that are quoted hardly count.
_OBJECT: Final = re.compile(rb'\{\s*["}]')


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """`url` is a data: URL or an address."""

    url: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model wrote for itself before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """`name` is for dialects whose results name the tool and not the call."""

    id: str
    parts: tuple[Text | Image, ...]
    name: str | None = None


Part = Text | Image | Reasoning | ToolUse | ToolResult


@dataclass(frozen=True, slots=True)
class Turn:
    """`role` is system, user or assistant. Results of tools are parts of a user's turn."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """`name` is the engine's. Where a dialect groups its tools, `group` and `member` are the dialect's names."""

    name: str
    description: str | None
    schema: Raw
    is_strict: bool | None = None
    group: str | None = None
    member: str | None = None


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """The model must call this tool."""

    tool: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """`sampling` has numbers under the names of chat. `schema` is what the answer must fit; `any_json`: any object.

    `tool_choice` is auto, none, required, or one tool. `thinks` switches thinking where the template can.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str | NamedChoice | None = None
    one_tool_at_once: bool = False
    tokens_max: int | None = None
    stops: tuple[str, ...] = ()
    sampling: dict[str, float | int] = field(default_factory=dict)
    schema: Raw | None = None
    any_json: bool = False
    thinks: bool | None = None
    effort: str | None = None


class Tokens(NamedTuple):
    """`cached` are among those of the prompt. Milliseconds are 0 if the engine does not tell."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    prompt_ms: float = 0.0
    completion_ms: float = 0.0


class ToolDelta(NamedTuple):
    """Part of a call: the first has id and name, and each some of its arguments. `place` is which of
    the calls it is; deltas of several calls may come mixed.
    """

    place: int
    id: str | None
    name: str | None
    arguments: str


class Delta(NamedTuple):
    """Some of an answer. A whole answer is one delta.

    `reason` is why it ended: stop, length, tool_calls or content_filter. `stop` is the stop sequence that ended it,
    where the engine tells. `error` is the engine's, in a stream.
    """

    text: str = ""
    reasoning: str = ""
    tools: tuple[ToolDelta, ...] = ()
    reason: str | None = None
    tokens: Tokens | None = None
    error: str | None = None
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What an answer tells of itself: the model as it was asked for, an id that is its own, and when it began."""

    model: str
    id: str
    created: float


def read(fields: Fields, name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    """The value of a field; None if it was not sent. Raises BadRequest, which names it."""
    raw = fields.get(name)
    if raw is None:
        return None
    if _has_too_many_objects(bytes(raw)):
        raise BadRequest(f"{name} has more than {OBJECTS_MAX:,} objects, which is the limit.", param=name)
    return decoded(raw, name, decoder)


def decoded(raw: Raw, name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    """A value of the field `name`, or a part of one. Raises BadRequest, which names the field."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{name}: {error}.", param=name) from None
    except RecursionError:
        raise BadRequest(f"{name} is nested too deeply.", param=name) from None


class _Typed(msgspec.Struct):
    type: str | None = None


_typed: Final = msgspec.json.Decoder(_Typed)
_tools: Final = msgspec.json.Decoder(list[Raw] | None)
_whole: Final = msgspec.json.Decoder(int | None)


def read_tools(fields: Fields) -> list[Raw]:
    """The field `tools`. Raises BadRequest."""
    return read(fields, "tools", _tools) or []


def of_types(tools: Iterable[Raw], types: Collection[str | None], decoder: msgspec.json.Decoder[Any]) -> Iterator[Any]:
    """The tools of these types. What others hold is not read: their fields may be anything. Raises BadRequest."""
    for raw in tools:
        if decoded(raw, "tools", _typed).type in types:
            yield decoded(raw, "tools", decoder)


def _has_too_many_objects(raw: bytes) -> bool:
    """True if `raw` is over the limit. Stops counting there."""
    if raw.count(b"{") <= OBJECTS_MAX:
        return False
    return next(islice(_OBJECT.finditer(raw), OBJECTS_MAX, None), None) is not None


def tokens_max(fields: Fields, name: str) -> int | None:
    """The field that says how long an answer may be. Raises BadRequest."""
    count: int | None = read(fields, name, _whole)
    if count is not None and count < 1:
        raise BadRequest(f"{name} is a number above 0.", param=name)
    return count


def refuse_fields(fields: Fields, names: tuple[str, ...], why: str) -> None:
    """Raises BadRequest if one of these fields says anything. null, false, and nothing in brackets say nothing."""
    for name in names:
        raw = fields.get(name)
        if raw is not None and bytes(raw).strip() not in (b"null", b"false", b"[]", b"{}", b'""'):
            raise BadRequest(f"{name} {why}", param=name)


def expect_choice(choice: str | NamedChoice | None, tools: tuple[Tool, ...]) -> None:
    """Raises BadRequest if a tool must be called that models here are not offered. Tools of unknown types are not."""
    if choice == "required" and not tools:
        raise BadRequest(
            "tool_choice asks for a call, and tools has none that models here can use.", param="tool_choice"
        )
    if isinstance(choice, NamedChoice) and all(tool.name != choice.tool for tool in tools):
        raise BadRequest(
            f"tool_choice names {choice.tool}, and tools has none of this name that models here can use.",
            param="tool_choice",
        )


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call; an engine that was cut off may send half of them."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = text
    return found if isinstance(found, dict) else {"arguments": found}


def is_object(raw: Raw) -> bool:
    return bytes(raw)[:1] == b"{"


def json_text(raw: Raw) -> str:
    """A value as the JSON that it was sent as."""
    return bytes(raw).decode("utf-8", "replace")
