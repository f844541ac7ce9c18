"""A request to OpenAI's Responses, read as a conversation.

Nothing is stored here: what would need an earlier response, or keep this one, is refused by name, and so are the tools
of OpenAI's own servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Raw

from greenroom.dialects.neutral import (
    NOTHING,
    Conversation,
    Fields,
    Image,
    NamedChoice,
    Part,
    Text,
    Thought,
    Tool,
    ToolResult,
    ToolUse,
    Turn,
    is_object,
    read,
    refuse_fields,
)
from greenroom.errors import BadRequest


class _Content(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class _Item(msgspec.Struct):
    """A message, a call, its result, or what was thought. A message need not say that it is one."""

    type: str = "message"
    role: str | None = None
    content: str | list[_Content] | None = None
    summary: list[_Content] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[_Content] | None = None


class _ResponsesTool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = NOTHING
    strict: bool | None = None


class _ResponsesChoice(msgspec.Struct):
    type: str
    name: str | None = None


class _ResponsesFormat(msgspec.Struct):
    type: str
    schema: Raw = NOTHING


class _TextConfig(msgspec.Struct):
    format: _ResponsesFormat | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


_input: Final = msgspec.json.Decoder(str | list[_Item])
_tools: Final = msgspec.json.Decoder(list[_ResponsesTool] | None)
_choice: Final = msgspec.json.Decoder(str | _ResponsesChoice | None)
_text_config: Final = msgspec.json.Decoder(_TextConfig | None)
_reasoning: Final = msgspec.json.Decoder(_Reasoning | None)
_text: Final = msgspec.json.Decoder(str | None)
_flag: Final = msgspec.json.Decoder(bool | None)
_whole: Final = msgspec.json.Decoder(int | None)
_number: Final = msgspec.json.Decoder(int | float | None)

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_CHOICES: Final = ("auto", "none", "required")
_SAMPLING: Final = ("temperature", "top_p")
# Parts of one assistant's turn, which come as items of their own.
_ASSISTANTS: Final = ("function_call", "reasoning")


def read_response(fields: Fields) -> Conversation:
    """Raises BadRequest."""
    refuse_fields(fields, ("store",), "cannot be true: no response is kept here; send the whole conversation.")
    refuse_fields(
        fields,
        ("previous_response_id", "conversation"),
        "cannot be used: no response is kept here; send the whole conversation as input.",
    )
    refuse_fields(fields, ("background",), "cannot be true; send Prefer: respond-async for an answer later.")
    refuse_fields(fields, ("prompt",), "names a template of OpenAI's servers; send instructions and input.")
    said = read(fields, "input", _input)
    if said is None or said == []:
        raise BadRequest("input is missing or empty.", param="input")
    schema, any_json = _format(fields)
    effort = read(fields, "reasoning", _reasoning)
    return Conversation(
        turns=tuple(_turns(read(fields, "instructions", _text), said)),
        tools=tuple(map(_tool, read(fields, "tools", _tools) or ())),
        tool_choice=_tool_choice(read(fields, "tool_choice", _choice)),
        one_tool_at_once=read(fields, "parallel_tool_calls", _flag) is False,
        tokens_max=_tokens_max(fields),
        sampling={name: value for name in _SAMPLING if (value := read(fields, name, _number)) is not None},
        schema=schema,
        any_json=any_json,
        effort=None if effort is None else effort.effort,
    )


def _tokens_max(fields: Fields) -> int | None:
    said: int | None = read(fields, "max_output_tokens", _whole)
    if said is not None and said < 1:
        raise BadRequest("max_output_tokens is a number above 0.", param="max_output_tokens")
    return said


def _format(fields: Fields) -> tuple[Raw | None, bool]:
    config = read(fields, "text", _text_config)
    wanted = None if config is None else config.format
    if wanted is None or wanted.type == "text":
        return None, False
    if wanted.type == "json_object":
        return None, True
    if wanted.type != "json_schema" or not is_object(wanted.schema):
        raise BadRequest("text.format is text, json_object, or json_schema with a schema.", param="text")
    return wanted.schema, False


def _tool_choice(choice: str | _ResponsesChoice | None) -> str | NamedChoice | None:
    if isinstance(choice, _ResponsesChoice) and choice.type == "function" and choice.name is not None:
        return NamedChoice(choice.name)
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return choice
    raise BadRequest("tool_choice is auto, none, required, or a function with a name.", param="tool_choice")


def _tool(tool: _ResponsesTool) -> Tool:
    if tool.type != "function" or tool.name is None:
        raise BadRequest(f"tools: models here can use functions with a name, and no {tool.type}.", param="tools")
    schema = tool.parameters if is_object(tool.parameters) else Raw(b'{"type":"object"}')
    return Tool(tool.name, tool.description, schema, tool.strict)


def _turns(instructions: str | None, said: str | list[_Item]) -> Iterator[Turn]:
    if instructions:
        yield Turn("system", (Text(instructions),))
    if isinstance(said, str):
        yield Turn("user", (Text(said),))
        return
    # What the assistant thought, said and called is one turn of chat.
    assistant: list[Part] = []
    for item in said:
        role = "assistant" if item.type in _ASSISTANTS else _role(item)
        if role == "assistant":
            assistant += _parts(item)
            continue
        if assistant:
            yield Turn("assistant", tuple(assistant))
            assistant = []
        yield Turn(role, tuple(_parts(item)))
    if assistant:
        yield Turn("assistant", tuple(assistant))


def _role(item: _Item) -> str:
    if item.type == "function_call_output":
        return "user"
    if item.type != "message":
        raise BadRequest(f"input: an item of type {item.type} cannot be used here.", param="input")
    if item.role not in _ROLES:
        raise BadRequest(f"input: the role of a message is one of {', '.join(_ROLES)}.", param="input")
    return _ROLES[item.role]


def _parts(item: _Item) -> Iterator[Part]:
    if item.type == "function_call":
        if item.call_id is None or item.name is None:
            raise BadRequest("input: a function_call has call_id and name.", param="input")
        yield ToolUse(item.call_id, item.name, item.arguments or "{}")
    elif item.type == "function_call_output":
        if item.call_id is None:
            raise BadRequest("input: a function_call_output has call_id.", param="input")
        yield ToolResult(item.call_id, tuple(_shown(item.output)))
    elif item.type == "reasoning":
        # Encrypted thoughts can be read by OpenAI's servers alone.
        thought = item.content if isinstance(item.content, list) and item.content else item.summary or []
        if text := "\n".join(part.text for part in thought if part.text):
            yield Thought(text)
    else:
        yield from _shown(item.content)


def _shown(content: str | list[_Content] | None) -> Iterator[Text | Image]:
    if content is None or isinstance(content, str):
        yield Text(content or "")
        return
    for part in content:
        if part.type == "input_image" and part.image_url is not None:
            yield Image(part.image_url)
        elif part.text is not None or part.refusal is not None:
            yield Text(part.text or part.refusal or "")
        else:
            raise BadRequest(f"input: a part of type {part.type} cannot be used here.", param="input")
