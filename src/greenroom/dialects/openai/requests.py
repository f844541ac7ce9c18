"""What the body of each of OpenAI's routes must hold, so that what every engine refuses loads nothing.

Owns the fields, their types and the mistakes that are named. It is lenient where an engine is: numbers may be text,
whole ones may be 1.0, null is a field that was not sent, and fields without an entry pass. Contents are not decoded.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from greenroom.dialects.dialect import READ_BYTES_MAX, BodyCheck, Read
from greenroom.errors import BadRequest, NoAbility, shown

MESSAGES, TOOLS, FUNCTION = "messages", "tools", "function"
_NULL: Final = Raw(b"null")


class _Message(msgspec.Struct):
    role: str
    content: Raw = _NULL


def _decoder(kind: Any) -> Read:
    return msgspec.json.Decoder(kind | None, strict=False).decode


def _read_texts(raw: Raw) -> bool:
    """A text (True), a list, or an object of an engine's own. Raises ValueError."""
    first = memoryview(raw)[0]
    if first not in b'"[{n':
        raise ValueError("Expected a text or a list")
    return first == 0x22


def _read_list(raw: Raw) -> None:
    """The items are the engine's to read. Raises ValueError."""
    if memoryview(raw)[0] not in b"[n":
        raise ValueError("Expected a list")


class _TextMessage(msgspec.Struct):
    role: str
    content: str | None = None


_decode_messages: Final = msgspec.json.Decoder(list[_Message] | None).decode
_decode_texts: Final = msgspec.json.Decoder(list[_TextMessage]).decode


def _read_messages(raw: Raw) -> bool:
    """True if each content is one text, as in most conversations: those need no second look. Raises ValueError."""
    try:
        _decode_texts(raw)
    except ValueError:
        messages: list[_Message] = _decode_messages(raw) or []
        for message in messages:
            if memoryview(message.content)[0] not in b'"[n':
                raise ValueError("Expected a content that is a text or a list") from None
        return False
    return True


_number: Final = _decoder(float | bool)
# llama.cpp takes -1 for no limit.
_limit: Final = _decoder(Annotated[float, Meta(ge=-1)])
_count: Final = _decoder(Annotated[float, Meta(ge=1)])
_SAMPLING: Final[dict[str, Read]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty"), _number),
    "max_tokens": _limit,
    "n": _count,
}


class _Tool(msgspec.Struct):
    type: str = FUNCTION
    function: dict[str, Raw] | None = None


_decode_tools: Final = msgspec.json.Decoder(list[_Tool] | None).decode


def expect_functions(raw: Raw, model: str) -> None:
    """Raises NoAbility if `tools` has others than functions: another model of a task may take them.

    BadRequest if one has no function.
    """
    if len(raw) > READ_BYTES_MAX:
        return
    try:
        tools = _decode_tools(raw) or ()
    except msgspec.DecodeError as error:
        raise BadRequest(f"{TOOLS}: {error}.", param=TOOLS) from None
    if other := next((tool.type for tool in tools if tool.type != FUNCTION), None):
        raise NoAbility(f"{model} takes tools of the type {FUNCTION}, and none of {shown(other)}.", param=TOOLS)
    if any(tool.function is None for tool in tools):
        raise BadRequest(f"{TOOLS}: a tool has no {FUNCTION}.", param=TOOLS)


CHAT: Final[BodyCheck] = BodyCheck(
    (MESSAGES,), reads={MESSAGES: _read_messages, TOOLS: _read_list, "max_completion_tokens": _limit, **_SAMPLING}
)
COMPLETION: Final[BodyCheck] = BodyCheck(("prompt", "prompt_embeds"), reads={"prompt": _read_texts, **_SAMPLING})
# llama.cpp embeds `content`, and vLLM what a conversation becomes.
EMBEDDING: Final[BodyCheck] = BodyCheck(("input", "content", MESSAGES), reads={"input": _read_texts})
RERANK: Final[BodyCheck] = BodyCheck(
    ("query",), ("documents", "texts"), reads={"query": _read_texts, "documents": _read_texts}
)
PICTURE: Final[BodyCheck] = BodyCheck(("prompt",), reads={"prompt": _read_texts, "n": _count})
SPEECH: Final[BodyCheck] = BodyCheck(("input",), reads={"input": _read_texts})
