"""A request to Anthropic's Messages, read as a conversation.

Tools, servers of tools and containers that only Anthropic's own servers can use are left out, and so is what the
assistant wrote of them. What the user sends and no model here can read (a file, a PDF) is refused. Hints for a cache
are ignored, because prefixes are kept without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    Reasoning,
    Text,
    Tool,
    ToolResult,
    ToolUse,
    Turn,
    decoded,
    expect_choice,
    is_object,
    json_text,
    of_types,
    read,
    read_tools,
    tokens_max,
)
from greenroom.errors import BadRequest


class _Source(msgspec.Struct):
    type: str
    data: str | None = None
    media_type: str | None = None
    url: str | None = None


class _Block(msgspec.Struct):
    """A part of a content, of any type. What a type of ours does not have is not read."""

    type: str
    text: str | None = None
    source: Raw = NOTHING
    title: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = Raw(b"{}")
    tool_use_id: str | None = None
    content: Raw = Raw(b"null")
    is_error: bool | None = None


_Blocks = str | list[_Block]


class _AnthropicMessage(msgspec.Struct):
    role: str
    content: _Blocks


class _AnthropicTool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: Raw = NOTHING
    strict: bool | None = None


class _AnthropicChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: str


class _AnthropicFormat(msgspec.Struct):
    type: str
    schema: Raw = NOTHING


class _Output(msgspec.Struct):
    effort: str | None = None
    format: _AnthropicFormat | None = None


_system: Final = msgspec.json.Decoder(_Blocks | None)
_result_content: Final = msgspec.json.Decoder(_Blocks | None)
_source: Final = msgspec.json.Decoder(_Source)
_messages: Final = msgspec.json.Decoder(list[_AnthropicMessage])
_tool: Final = msgspec.json.Decoder(_AnthropicTool)
_choice: Final = msgspec.json.Decoder(_AnthropicChoice | None)
_thinking: Final = msgspec.json.Decoder(_Thinking | None)
_output: Final = msgspec.json.Decoder(_Output | None)
_number: Final = msgspec.json.Decoder(int | float | None)
_strings: Final = msgspec.json.Decoder(list[str] | None)

_ROLES: Final = ("user", "assistant", "system")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_SAMPLING: Final = ("temperature", "top_p", "top_k")
_SOURCED: Final = ("image", "document")
_SHOWN: Final = ("text", *_SOURCED)
# Blocks that hold nothing for a model here: reasoning that is encrypted, and the names of tools that were found.
_UNREAD: Final = ("redacted_thinking", "tool_reference")
_THINKS: Final = {"enabled": True, "adaptive": True, "disabled": False}


def read_messages(fields: Fields) -> Conversation:
    """A request to /v1/messages. Raises BadRequest."""
    asked = _read(fields)
    if asked.tokens_max is None:
        raise BadRequest("max_tokens is missing: it says how long the answer may be.", param="max_tokens")
    return asked


def read_to_count(fields: Fields) -> Conversation:
    """A request whose tokens are counted, as one that asks for the shortest answer."""
    asked = _read(fields)
    return Conversation(asked.turns, asked.tools, asked.tool_choice, tokens_max=1, thinks=asked.thinks)


def _read(fields: Fields) -> Conversation:
    messages = read(fields, "messages", _messages)
    if not messages:
        raise BadRequest("messages is missing or empty.", param="messages")
    choice, output = read(fields, "tool_choice", _choice), read(fields, "output_config", _output)
    numbers = {name: value for name in _SAMPLING if (value := read(fields, name, _number)) is not None}
    thinking = read(fields, "thinking", _thinking)
    tools = tuple(_tools_of(read_tools(fields)))
    chosen = _tool_choice(choice)
    expect_choice(chosen, tools)
    return Conversation(
        turns=tuple(_turns(read(fields, "system", _system), messages)),
        tools=tools,
        tool_choice=chosen,
        one_tool_at_once=choice is not None and choice.disable_parallel_tool_use is True,
        tokens_max=tokens_max(fields, "max_tokens"),
        stops=tuple(read(fields, "stop_sequences", _strings) or ()),
        sampling=numbers,
        schema=_schema(fields, output),
        thinks=None if thinking is None else _THINKS.get(thinking.type),
        effort=None if output is None else output.effort,
    )


def _schema(fields: Fields, output: _Output | None) -> Raw | None:
    wanted = output.format if output is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema" or not is_object(wanted.schema):
        raise BadRequest("output_config.format is json_schema with a schema.", param="output_config")
    return wanted.schema


def _tool_choice(choice: _AnthropicChoice | None) -> str | NamedChoice | None:
    if choice is None:
        return None
    if choice.type == "tool" and choice.name is not None:
        return NamedChoice(choice.name)
    if choice.type not in _CHOICES:
        raise BadRequest("tool_choice is auto, any, none, or tool with a name.", param="tool_choice")
    return _CHOICES[choice.type]


def _tools_of(tools: Iterable[Raw]) -> Iterator[Tool]:
    """The caller's own. Those of other types have no schema, and only Anthropic's models know how to call them."""
    for tool in of_types(tools, (None, "custom"), _tool):
        if not is_object(tool.input_schema):
            raise BadRequest(f"tools: {tool.name} is a tool without an input_schema.", param="tools")
        yield Tool(tool.name, tool.description, tool.input_schema, tool.strict)


def _turns(system: _Blocks | None, messages: list[_AnthropicMessage]) -> Iterator[Turn]:
    if system:
        yield Turn("system", tuple(_parts("system", system, "system")))
    for message in messages:
        if message.role not in _ROLES:
            raise BadRequest(f"messages: a role is one of {', '.join(_ROLES)}.", param="messages")
        yield Turn(message.role, tuple(_parts(message.role, message.content, "messages")))


def _parts(role: str, content: _Blocks, param: str) -> Iterator[Part]:
    if isinstance(content, str):
        yield Text(content)
        return
    for block in content:
        if block.type == "tool_use":
            if block.id is None or block.name is None:
                raise BadRequest(f"{param}: a tool_use has id and name.", param=param)
            yield ToolUse(block.id, block.name, json_text(block.input))
        elif block.type == "tool_result":
            if block.tool_use_id is None:
                raise BadRequest(f"{param}: a tool_result has tool_use_id.", param=param)
            yield ToolResult(block.tool_use_id, tuple(_result(block, param)))
        elif block.type == "thinking":
            yield Reasoning(block.thinking or "")
        elif block.type in _SHOWN or role != "assistant":
            yield from _shown_part(block, param)


def _result(block: _Block, param: str) -> Iterator[Text | Image]:
    """Chat has no field for an error, so the text says it."""
    shown = _shown(decoded(block.content, param, _result_content), param)
    if block.is_error:
        first = next(shown, Text(""))
        yield Text(f"Error: {first.text}" if isinstance(first, Text) else "Error:")
        if isinstance(first, Image):
            yield first
    yield from shown


def _shown(content: _Blocks | None, param: str) -> Iterator[Text | Image]:
    if content is None or isinstance(content, str):
        yield Text(content or "")
        return
    for block in content:
        yield from _shown_part(block, param)


def _shown_part(block: _Block, param: str) -> Iterator[Text | Image]:
    """Raises BadRequest if it holds what no model here can read."""
    if block.type in _UNREAD:
        return
    if block.text is not None:
        yield Text(block.text)
        return
    source = decoded(block.source, param, _source) if block.type in _SOURCED else None
    if block.type == "image" and source is not None:
        if source.type == "url" and source.url is not None:
            yield Image(source.url)
            return
        if source.type == "base64" and source.data is not None and source.media_type is not None:
            yield Image(f"data:{source.media_type};base64,{source.data}")
            return
    if block.type == "document" and source is not None and source.type == "text" and source.data is not None:
        yield Text(source.data if block.title is None else f"{block.title}\n{source.data}")
        return
    of = "" if source is None else f" with a source of type {source.type}"
    raise BadRequest(f"{param}: a block of type {block.type}{of} cannot be read by models here.", param=param)
