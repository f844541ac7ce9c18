"""A request to OpenAI's Responses, read as a conversation.

Nothing is stored here: what would need an earlier response, or keep this one, is refused by name. Tools of other types
than functions are left out, and so are items that hold nothing for a model to read. Items, parts of contents and
outputs that hold something which cannot be shown to it are refused.
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
    of_types,
    read,
    read_tools,
    refuse_fields,
    tokens_max,
)
from greenroom.errors import BadRequest

_NULL: Final = Raw(b"null")


class _Content(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class _Item(msgspec.Struct):
    """A message, a call, its result, or reasoning. A message need not say that it is one.

    What a type other than these has in its fields is not read.
    """

    type: str = "message"
    role: str | None = None
    content: Raw = _NULL
    summary: Raw = _NULL
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Raw = NOTHING
    input: Raw = NOTHING
    action: Raw = NOTHING
    output: Raw = _NULL
    encrypted_content: Raw = _NULL


class _ResponsesTool(msgspec.Struct):
    """`tools` are those of a namespace."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = NOTHING
    strict: bool | None = None
    tools: list[Raw] | None = None


class _ResponsesChoice(msgspec.Struct):
    type: str
    name: str | None = None
    namespace: str | None = None


class _ResponsesFormat(msgspec.Struct):
    type: str
    schema: Raw = NOTHING


class _TextConfig(msgspec.Struct):
    format: _ResponsesFormat | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


_input: Final = msgspec.json.Decoder(str | list[_Item])
_content: Final = msgspec.json.Decoder(str | list[_Content] | None)
_summary: Final = msgspec.json.Decoder(list[_Content] | None)
_tool: Final = msgspec.json.Decoder(_ResponsesTool)
_choice: Final = msgspec.json.Decoder(str | _ResponsesChoice | None)
_text_config: Final = msgspec.json.Decoder(_TextConfig | None)
_reasoning: Final = msgspec.json.Decoder(_Reasoning | None)
_text: Final = msgspec.json.Decoder(str | None)
_flag: Final = msgspec.json.Decoder(bool | None)
_number: Final = msgspec.json.Decoder(int | float | None)
_encode: Final = msgspec.json.Encoder().encode

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_CHOICES: Final = ("auto", "none", "required")
_SAMPLING: Final = ("temperature", "top_p")
# How the types of calls and of their results end. Their items belong to the assistant's turn, and to the user's.
_CALL: Final = "_call"
_OUTPUT: Final = "_output"
# Between the names of a namespace and of a tool in it, in the one name that chat has.
_JOINT: Final = "__"


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
    turns = tuple(_turns(read(fields, "input", _input)))
    if not turns:
        raise BadRequest("input is missing or empty.", param="input")
    instructions = read(fields, "instructions", _text)
    before = (Turn("system", (Text(instructions),)),) if instructions else ()
    schema, any_json = _format(fields)
    effort = read(fields, "reasoning", _reasoning)
    tools = tuple(_tools_of(read_tools(fields)))
    choice = _tool_choice(read(fields, "tool_choice", _choice))
    expect_choice(choice, tools)
    return Conversation(
        turns=(*before, *turns),
        tools=tools,
        tool_choice=choice,
        one_tool_at_once=read(fields, "parallel_tool_calls", _flag) is False,
        tokens_max=tokens_max(fields, "max_output_tokens"),
        sampling={name: value for name in _SAMPLING if (value := read(fields, name, _number)) is not None},
        schema=schema,
        any_json=any_json,
        effort=None if effort is None else effort.effort,
    )


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
        return NamedChoice(_joined(choice.namespace, choice.name))
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return choice
    raise BadRequest("tool_choice is auto, none, required, or a function with a name.", param="tool_choice")


def _tools_of(tools: Iterable[Raw], group: str | None = None) -> Iterator[Tool]:
    """The functions, those in namespaces too. Other types belong to OpenAI's own servers and models, or are unknown."""
    for tool in of_types(tools, ("function",) if group is not None else ("function", "namespace"), _tool):
        if tool.type == "namespace":
            yield from _tools_of(tool.tools or (), tool.name)
        else:
            if tool.name is None:
                raise BadRequest("tools: a function has a name.", param="tools")
            schema = tool.parameters if is_object(tool.parameters) else Raw(b'{"type":"object"}')
            name = _joined(group, tool.name)
            yield Tool(name, tool.description, schema, tool.strict, group, None if group is None else tool.name)


def _joined(group: str | None, name: str) -> str:
    return name if group is None else f"{group}{_JOINT}{name}"


def _turns(said: str | list[_Item] | None) -> Iterator[Turn]:
    if isinstance(said, str):
        yield Turn("user", (Text(said),))
        return
    # Reasoning, text and calls of the assistant is one turn of chat.
    assistant: list[Part] = []
    for item in said or ():
        role = _role(item)
        if role is None:
            continue
        if role == "assistant":
            assistant += _parts(item)
            continue
        if assistant:
            yield Turn("assistant", tuple(assistant))
            assistant = []
        yield Turn(role, tuple(_parts(item)))
    if assistant:
        yield Turn("assistant", tuple(assistant))


def _role(item: _Item) -> str | None:
    """None for an item that holds nothing for a model to read. Raises BadRequest if what it holds cannot be read."""
    if item.type == "message":
        if item.role not in _ROLES:
            raise BadRequest(f"input: the role of a message is one of {', '.join(_ROLES)}.", param="input")
        return _ROLES[item.role]
    if item.type == "reasoning" or _is_call(item):
        return "assistant"
    if item.type.endswith(_OUTPUT):
        return "user"
    if item.type == "item_reference" or item.content != _NULL or item.encrypted_content != _NULL:
        raise BadRequest(
            f"input: what an item of type {item.type} holds cannot be read here; send it as messages.", param="input"
        )
    return None


def _is_call(item: _Item) -> bool:
    """Calls without `call_id` were carried out by OpenAI's own servers: what came of them is in the messages."""
    return item.type == "function_call" or (item.type.endswith(_CALL) and item.call_id is not None)


def _parts(item: _Item) -> Iterator[Part]:
    if item.type == "message":
        yield from _shown(item.content)
    elif item.type == "reasoning":
        # Encrypted reasoning can be read by OpenAI's servers alone.
        content = decoded(item.content, "input", _content)
        reasoning = content if isinstance(content, list) and content else decoded(item.summary, "input", _summary)
        if text := "\n".join(part.text for part in reasoning or () if part.text):
            yield Reasoning(text)
    elif _is_call(item):
        yield _call(item)
    else:
        if item.call_id is None:
            raise BadRequest(f"input: a {item.type} has call_id.", param="input")
        yield ToolResult(item.call_id, tuple(_shown(item.output)))


def _call(item: _Item) -> ToolUse:
    """A call of a function, or another one, whose arguments become an object."""
    if item.type == "function_call":
        if item.call_id is None or item.name is None:
            raise BadRequest("input: a function_call has call_id and name.", param="input")
        arguments = decoded(item.arguments or _NULL, "input", _text)
        return ToolUse(item.call_id, _joined(item.namespace, item.name), arguments or "{}")
    sent = {"arguments": item.arguments, "input": item.input, "action": item.action}
    arguments = _encode({name: raw for name, raw in sent.items() if raw}).decode()
    return ToolUse(item.call_id or "", item.name or item.type.removesuffix(_CALL), arguments)


def _shown(raw: Raw) -> Iterator[Text | Image]:
    content = decoded(raw, "input", _content)
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
