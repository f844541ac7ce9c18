"""The messages of a request, checked and in the shape chat templates expect.

Owns the differences between the API and the templates: content in parts, arguments of calls as text, the developer
role. Never renders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..api.errors import ApiError, unsupported
from ..api.fields import Body, kind_of

MESSAGES_MAX = 65_536

Message = dict[str, Any]


def read_messages(body: Body, knows_developer: bool, thinks: bool = False) -> list[Message]:
    """The messages of a body. Raises ApiError. Unknown fields of a message stay: a template may know them.

    `thinks`: the template is for Harmony, which calls earlier reasoning `thinking`.
    """
    said = body.get("messages")
    if not isinstance(said, list) or not said:
        raise ApiError("messages must be a list of at least one message.", param="messages")
    if len(said) > MESSAGES_MAX:
        raise ApiError(f"messages may hold at most {MESSAGES_MAX} messages.", param="messages")
    messages = [_message(message, f"messages[{place}]", knows_developer) for place, message in enumerate(said)]
    return list(map(_with_thinking, messages)) if thinks else messages


def _message(said: object, param: str, knows_developer: bool) -> Message:
    if not isinstance(said, dict):
        raise ApiError(f"{param} must be an object, not {kind_of(said)}.", param=param)
    role = said.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(f"{param}.role must be a string.", param=f"{param}.role")
    if role == "developer" and not knows_developer:
        role = "system"
    message = {**said, "role": role, "content": _content(said.get("content"), f"{param}.content")}
    if said.get("tool_calls") is not None:
        message["tool_calls"] = _tool_calls(said["tool_calls"], f"{param}.tool_calls")
    return message


def _with_thinking(message: Message) -> Message:
    """In a message with calls, Harmony's templates refuse content beside thinking, so both are joined."""
    reasoning = message.get("reasoning_content")
    if message["role"] != "assistant" or not isinstance(reasoning, str) or not reasoning or message.get("thinking"):
        return message
    if not message.get("tool_calls"):
        return {**message, "thinking": reasoning}
    return {**message, "thinking": "\n\n".join(filter(None, (reasoning, message["content"]))), "content": ""}


def _content(said: object, param: str) -> str:
    """Parts are joined to one text: most templates know nothing else."""
    if said is None:
        return ""
    if isinstance(said, str):
        return said
    if not isinstance(said, list):
        raise ApiError(f"{param} must be a string or a list of parts, not {kind_of(said)}.", param=param)
    return "".join(_part(part, param) for part in said)


def _part(part: object, param: str) -> str:
    if not isinstance(part, dict):
        raise ApiError(f"{param} holds a part that is {kind_of(part)}, not an object.", param=param)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise unsupported(f"{param} holds a part of type {str(kind)[:40]!r}; this model reads text only.", param)
    text = part.get(kind)
    if not isinstance(text, str):
        raise ApiError(f"{param} holds a part whose text is {kind_of(text)}, not a string.", param=param)
    return text


def _tool_calls(said: object, param: str) -> list[Any]:
    if not isinstance(said, list):
        raise ApiError(f"{param} must be a list, not {kind_of(said)}.", param=param)
    return [_tool_call(call, param) for call in said]


def _tool_call(call: object, param: str) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{param} must hold calls with a function that has a name.", param=param)
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(said: Any) -> Any:
    """Arguments as an object: templates write JSON themselves and would quote a text once more."""
    if not isinstance(said, str):
        return said
    try:
        read = json.loads(said)
    except (ValueError, RecursionError):
        return said
    return read if isinstance(read, dict) else said
