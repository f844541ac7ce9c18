"""A request to Anthropic's Messages, read as a conversation.

What only Anthropic's own servers can do (their tools, files and containers) is refused by name;
hints for a cache are ignored, because prefixes are kept without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

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
    json_text,
    read,
    refuse_fields,
)
from greenroom.errors import BadRequest


class _TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Base64(msgspec.Struct, tag_field="type", tag="base64"):
    data: str
    media_type: str


class _Url(msgspec.Struct, tag_field="type", tag="url"):
    url: str


class _PlainText(msgspec.Struct, tag_field="type", tag="text"):
    data: str


class _ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    source: _Base64 | _Url


class _DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """A text; other documents would have to be read by an engine that reads none."""

    source: _PlainText
    title: str | None = None


class _ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str


class _RedactedBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Nothing but Anthropic's servers can read it."""


class _ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw = Raw(b"{}")


class _ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_TextBlock | _ImageBlock | _DocumentBlock] | None = None
    is_error: bool | None = None


_Block = _TextBlock | _ImageBlock | _DocumentBlock | _ThinkingBlock | _RedactedBlock | _ToolUseBlock | _ToolResultBlock


class _AnthropicMessage(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _AnthropicTool(msgspec.Struct):
    name: str
    type: str | None = None
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


_system: Final = msgspec.json.Decoder(str | list[_TextBlock] | None)
_messages: Final = msgspec.json.Decoder(list[_AnthropicMessage])
_tools: Final = msgspec.json.Decoder(list[_AnthropicTool] | None)
_choice: Final = msgspec.json.Decoder(_AnthropicChoice | None)
_thinking: Final = msgspec.json.Decoder(_Thinking | None)
_output: Final = msgspec.json.Decoder(_Output | None)
_whole: Final = msgspec.json.Decoder(int | None)
_number: Final = msgspec.json.Decoder(int | float | None)
_strings: Final = msgspec.json.Decoder(list[str] | None)

_ROLES: Final = ("user", "assistant", "system")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_SAMPLING: Final = ("temperature", "top_p", "top_k")
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
    refuse_fields(fields, ("mcp_servers", "container"), "works on Anthropic's servers only; leave it out.")
    messages = read(fields, "messages", _messages)
    if not messages:
        raise BadRequest("messages is missing or empty.", param="messages")
    choice, output = read(fields, "tool_choice", _choice), read(fields, "output_config", _output)
    numbers = {name: value for name in _SAMPLING if (value := read(fields, name, _number)) is not None}
    thinking = read(fields, "thinking", _thinking)
    return Conversation(
        turns=tuple(_turns(read(fields, "system", _system), messages)),
        tools=tuple(map(_tool, read(fields, "tools", _tools) or ())),
        tool_choice=_tool_choice(choice),
        one_tool_at_once=choice is not None and choice.disable_parallel_tool_use is True,
        tokens_max=_tokens_max(fields),
        stops=tuple(read(fields, "stop_sequences", _strings) or ()),
        sampling=numbers,
        schema=_schema(fields, output),
        thinks=None if thinking is None else _THINKS.get(thinking.type),
        effort=None if output is None else output.effort,
    )


def _tokens_max(fields: Fields) -> int | None:
    said: int | None = read(fields, "max_tokens", _whole)
    if said is not None and said < 1:
        raise BadRequest("max_tokens is a number above 0.", param="max_tokens")
    return said


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


def _tool(tool: _AnthropicTool) -> Tool:
    if tool.type not in (None, "custom") or not is_object(tool.input_schema):
        kind = f"of type {tool.type}" if tool.type not in (None, "custom") else "without an input_schema"
        raise BadRequest(f"tools: {tool.name} is a tool {kind}, which models here cannot use.", param="tools")
    return Tool(tool.name, tool.description, tool.input_schema, tool.strict)


def _turns(system: str | list[_TextBlock] | None, messages: list[_AnthropicMessage]) -> Iterator[Turn]:
    if system:
        yield Turn("system", tuple(_parts(system)))
    for message in messages:
        if message.role not in _ROLES:
            raise BadRequest(f"messages: a role is one of {', '.join(_ROLES)}.", param="messages")
        yield Turn(message.role, tuple(_parts(message.content)))


def _parts(content: str | list[Any]) -> Iterator[Part]:
    if isinstance(content, str):
        yield Text(content)
        return
    for block in content:
        if isinstance(block, _ToolUseBlock):
            yield ToolUse(block.id, block.name, json_text(block.input))
        elif isinstance(block, _ToolResultBlock):
            yield ToolResult(block.tool_use_id, tuple(_result(block)))
        elif isinstance(block, _ThinkingBlock):
            yield Thought(block.thinking)
        elif not isinstance(block, _RedactedBlock):
            yield _shown_part(block)


def _result(block: _ToolResultBlock) -> Iterator[Text | Image]:
    """Chat has no field for an error, so the text says it."""
    shown = _shown(block.content)
    if block.is_error:
        first = next(shown, Text(""))
        yield Text(f"Error: {first.text}" if isinstance(first, Text) else "Error:")
        if isinstance(first, Image):
            yield first
    yield from shown


def _shown(content: str | list[_TextBlock | _ImageBlock | _DocumentBlock] | None) -> Iterator[Text | Image]:
    if content is None or isinstance(content, str):
        yield Text(content or "")
        return
    for block in content:
        yield _shown_part(block)


def _shown_part(block: _TextBlock | _ImageBlock | _DocumentBlock) -> Text | Image:
    if isinstance(block, _TextBlock):
        return Text(block.text)
    if isinstance(block, _DocumentBlock):
        return Text(block.source.data if block.title is None else f"{block.title}\n{block.source.data}")
    source = block.source
    return Image(source.url if isinstance(source, _Url) else f"data:{source.media_type};base64,{source.data}")
