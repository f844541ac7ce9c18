"""The tools that a request offers, and the calls that a model makes: three formats, which most models write.

1. Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them among text.
2. Mistral: `[TOOL_CALLS]` and then a list of such objects, or `name[ARGS]{…}`, up to the end.
3. Llama 3: nothing but `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`.

Owns `tools` and `tool_choice`, which format a chat template teaches, and the text held back because it may be a call.
If it turns out to be none, it is passed on as text.
"""

from __future__ import annotations

import enum
import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...serving.errors import ApiError
from ...serving.fields import Body, refuse

_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_MISTRAL, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"
_MARKS = (_HERMES, _MISTRAL, _PYTHON)
# Special tokens that are part of calls. They must be decoded as text to be found.
CALL_TOKENS = (*_MARKS, _HERMES_END, "[ARGS]", "[CALL_ID]")
CALLS_MAX = 128

_NAMED = re.compile(r"\s*([\w.\-]{1,128})\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN = re.compile(r"[\s;,]*")
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_CALL_KEYS = {"name", "type", "function", "parameters", "arguments", "id"}
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON, as in the API."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probability and its likeliest alternatives. `offset` is where its text begins."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(slots=True)
class OutputPiece:
    """A new part of an answer. What reads the text of one knows nothing of its tokens."""

    text: str = ""
    chosen: list[ScoredToken] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.text or self.chosen or self.calls or self.reasoning)

    def add(self, later: OutputPiece) -> None:
        self.text += later.text
        self.chosen += later.chosen
        self.calls += later.calls
        self.reasoning += later.reasoning


class _Place(enum.Enum):
    START = enum.auto()  # Only spaces since the beginning or the last call.
    TEXT = enum.auto()
    HERMES = enum.auto()  # Between the marks of one call.
    REST = enum.auto()  # Everything up to the end belongs to calls.


class CallReader:
    """Splits one answer into text and calls as it comes."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the tools offered: without a mark, only these can be called."""
        self._names = names
        self._place = _Place.START
        self._held = ""
        self._mark = ""
        self._has_called = False

    def add(self, text: str) -> OutputPiece:
        """The text and calls that are certain now."""
        self._held += text
        found = OutputPiece()
        # Each step but the last shortens the held text or changes the place.
        while self._step(found):
            pass
        return found

    def end(self) -> OutputPiece:
        """The answer is over: held text is a call if it parses as one, else text."""
        found, held = OutputPiece(), self._held
        self._held = ""
        if self._place in (_Place.HERMES, _Place.REST):
            self._read(held, found, self._mark + held)
        elif self._place is _Place.TEXT or not self._has_called:
            found.text = held
        return found

    def _step(self, found: OutputPiece) -> bool:
        """Go on by one step; false if more text must come first."""
        if self._place is _Place.START:
            return self._begin()
        if self._place is _Place.TEXT:
            return self._pass_text(found)
        if self._place is _Place.HERMES:
            return self._close_call(found)
        return self._give_up_rest()

    def _begin(self) -> bool:
        inside = self._held.lstrip()
        if not inside:
            return False
        if self._has_called:
            self._held = inside
        is_bare = inside[0] == "{" and not self._has_called
        self._place, self._mark = (_Place.REST if is_bare else _Place.TEXT), ""
        return True

    def _pass_text(self, found: OutputPiece) -> bool:
        at, mark = min(((at, mark) for mark in _MARKS if (at := self._held.find(mark)) >= 0), default=(-1, ""))
        if at < 0:
            keep = hopeful(self._held, _MARKS)
            found.text += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
            return False
        found.text += self._held[:at]
        self._held = self._held[at + len(mark) :]
        self._place, self._mark = (_Place.HERMES if mark == _HERMES else _Place.REST), mark
        return True

    def _close_call(self, found: OutputPiece) -> bool:
        inside, end, rest = self._held.partition(_HERMES_END)
        if not end:
            return False
        self._held, self._place = rest, _Place.START
        self._read(inside, found, f"{_HERMES}{inside}{_HERMES_END}")
        return True

    def _give_up_rest(self) -> bool:
        """An object that begins with a key that no call has is an answer in JSON, which need not be held back."""
        if self._mark:
            return False
        first = _FIRST_KEY.match(self._held)
        if first is None or first[1] in _CALL_KEYS:
            return False
        self._place = _Place.TEXT
        return True

    def _read(self, inside: str, found: OutputPiece, otherwise: str) -> None:
        calls = parse_calls(inside)
        if calls and (self._mark or all(call.name in self._names for call in calls)):
            found.calls += calls
            self._has_called = True
        else:
            found.text += otherwise


def parse_calls(text: str) -> list[ToolCall]:
    """All calls in this text; none if it contains anything else."""
    calls: list[ToolCall] = []
    for part in text.split(_MISTRAL):
        at = _BETWEEN.match(part).end()  # type: ignore[union-attr]
        while at < len(part):
            name = _NAMED.match(part, at)
            try:
                value, at = _DECODER.raw_decode(part, name.end() if name else at)
            except (ValueError, RecursionError):
                return []
            items = [{"name": name[1], "arguments": value}] if name else value if isinstance(value, list) else [value]
            read = [call for item in items if (call := _call(item)) is not None]
            if len(read) < len(items) or len(calls) + len(read) > CALLS_MAX:
                return []
            calls += read
            at = _BETWEEN.match(part, at).end()  # type: ignore[union-attr]
    return calls


def _call(item: Any) -> ToolCall | None:
    if not isinstance(item, dict):
        return None
    inner = item.get("function")
    said = inner if isinstance(inner, dict) else item
    name = said.get("name", inner)
    arguments = said.get("arguments", said.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, written)


def hopeful(text: str, marks: Sequence[str]) -> int:
    """How many of the last characters could be the beginning of one of these."""
    for length in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0


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
    """The functions of a body. Raises ApiError for one without a name, and for an unknown choice."""
    said = body.get("tools")
    definitions = tuple(_checked(tool) for tool in _as_list(said) if not _is_of_others(tool))
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


def _is_of_others(tool: object) -> bool:
    """True for a type that only others' servers and models know. It is left out."""
    return isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "function"


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
