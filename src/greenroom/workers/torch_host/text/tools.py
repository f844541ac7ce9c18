"""The tools that a request offers, and the format in which a model calls them.

Owns `tools` and `tool_choice`, and which format a chat template teaches. `tool_calls.py` finds the calls.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.errors import ApiError
from ..api.fields import Body, refuse

TOOLS_MAX = 128


class CallFormat(enum.Enum):
    """How a model writes calls. All formats are recognised; this one is used for ids and forced calls."""

    HERMES = "<tool_call>{json}</tool_call>"
    MISTRAL = "[TOOL_CALLS][{json}]"
    BARE = "{json}"


@dataclass(frozen=True, slots=True)
class Tools:
    definitions: tuple[Mapping[str, Any], ...]
    names: frozenset[str]
    choice: str
    """none, auto, required, or the name of the tool that must be called (then `is_named`)."""
    is_named: bool = False

    @property
    def may_be_called(self) -> bool:
        return bool(self.definitions) and (self.is_named or self.choice != "none")

    @property
    def shown(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the template sees; none if none may be called."""
        return self.definitions if self.may_be_called else ()

    def forced_schema(self, form: CallFormat) -> dict[str, Any] | None:
        """The schema of a call if the caller requires one; None if the model may choose."""
        if not self.may_be_called or (self.choice != "required" and not self.is_named):
            return None
        functions = [tool["function"] for tool in self.definitions]
        wanted = [function for function in functions if not self.is_named or function["name"] == self.choice]
        calls = [_call_schema(function, place, form) for place, function in enumerate(wanted)]
        parameters = {_key(place): _parameters(function, place) for place, function in enumerate(wanted)}
        return {"anyOf": calls, "$defs": parameters}


def read_tools(body: Body) -> Tools:
    """The tools of a body. Raises ApiError for a tool that is not a named function, and for an unknown choice."""
    said = body.get("tools")
    definitions = tuple(map(_checked, _as_list(said)))
    names = frozenset(tool["function"]["name"] for tool in definitions)
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in names:
            raise ApiError(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice")
        return Tools(definitions, names, name, is_named=True)
    if choice is None:
        choice = "auto" if definitions else "none"
    if choice not in ("none", "auto", "required"):
        refuse("tool_choice", "none, auto, required or an object that names a function", choice)
    if choice == "required" and not definitions:
        raise ApiError("tool_choice is required, but there are no tools.", param="tool_choice")
    return Tools(definitions, names, choice)


def call_format_of(template: str) -> CallFormat:
    """The format that a chat template teaches."""
    if "[TOOL_CALLS]" in template:
        return CallFormat.MISTRAL
    return CallFormat.HERMES if "<tool_call>" in template else CallFormat.BARE


def new_call_id(form: CallFormat) -> str:
    """A new id. Mistral's templates require nine characters."""
    return secrets.token_hex(5)[:9] if form is CallFormat.MISTRAL else f"call_{secrets.token_hex(12)}"


def _as_list(said: object) -> list[Any]:
    if said is None:
        return []
    if not isinstance(said, list):
        refuse("tools", "a list", said)
    if len(said) > TOOLS_MAX:
        raise ApiError(f"At most {TOOLS_MAX} tools may be offered.", param="tools")
    return said


def _checked(tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ApiError('Each tool must be {"type": "function", "function": {…}}.', param="tools")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError("Each tool's function must have a name.", param="tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        refuse("parameters of a tool", "a JSON schema", parameters)
    return {**tool, "type": "function"}


def _call_schema(function: Mapping[str, Any], place: int, form: CallFormat) -> dict[str, Any]:
    # Llama was taught "parameters"; Hermes and Mistral use "arguments".
    word = "parameters" if form is CallFormat.BARE else "arguments"
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, word: {"$ref": f"#/$defs/{_key(place)}"}},
        "required": ["name", word],
        "additionalProperties": False,
    }


def _key(place: int) -> str:
    return f"tool{place}"


def _parameters(function: Mapping[str, Any], place: int) -> Any:
    """A tool's schema as part of a larger one: references within it follow its new place."""
    return _moved(function.get("parameters") or {"type": "object"}, f"#/$defs/{_key(place)}")


def _moved(schema: Any, to: str) -> Any:
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved
