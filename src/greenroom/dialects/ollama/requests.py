"""A request to Ollama's API, read as a conversation or as texts to embed.

What would need another template, or the tokens of an earlier answer, is refused by name. Options of a load (`num_ctx`,
`num_gpu` …) are ignored: the operator chooses them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
from msgspec import Raw

from greenroom.dialects.neutral import (
    NOTHING,
    OBJECTS_MAX,
    Conversation,
    Fields,
    Image,
    Part,
    Reasoning,
    Text,
    Tool,
    ToolResult,
    ToolUse,
    Turn,
    is_object,
    json_text,
    of_types,
    read,
    read_tools,
    refuse_fields,
)
from greenroom.errors import BadRequest


class _Called(msgspec.Struct):
    name: str
    arguments: Raw = Raw(b"{}")


class _OllamaCall(msgspec.Struct):
    function: _Called
    id: str | None = None


class _OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    images: list[str] | None = None
    thinking: str | None = None
    tool_calls: list[_OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _OllamaFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: Raw = NOTHING


class _OllamaTool(msgspec.Struct):
    function: _OllamaFunction | None = None


class _Options(msgspec.Struct):
    """Clients whose language has one kind of number may send 40.0 where 40 is meant."""

    num_predict: int | float | None = None
    stop: list[str] | str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | float | None = None
    min_p: float | None = None
    seed: int | float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None


_messages: Final = msgspec.json.Decoder(list[_OllamaMessage] | None)
_tool: Final = msgspec.json.Decoder(_OllamaTool)
_options: Final = msgspec.json.Decoder(_Options | None)
_text: Final = msgspec.json.Decoder(str | None)
_texts: Final = msgspec.json.Decoder(list[str] | None)
_think: Final = msgspec.json.Decoder(bool | str | None)
_inputs: Final = msgspec.json.Decoder(str | list[str])
_whole: Final = msgspec.json.Decoder(int | None)

LATEST: Final = ":latest"
_NOT_ZERO: Final = frozenset(b"123456789")
_ROLES: Final = ("system", "user", "assistant", "tool")
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
# Larger floats are not exact.
_FLOAT_MAX: Final = 2**53
# The first letters of base64 tell what a picture is.
_PICTURES: Final = {"/9j/": "image/jpeg", "UklGR": "image/webp", "R0lGOD": "image/gif"}
# Asks for nothing: the model is loaded, or leaves if it is to be kept for no time.
_NOTHING_SAID: Final = (Turn("user", (Text(""),)),)


def read_chat(fields: Fields) -> Conversation | None:
    """A request to /api/chat; None if it says nothing, to have the model loaded. Raises BadRequest."""
    messages = read(fields, "messages", _messages)
    if not messages:
        return None
    _check_pictures(sum(len(message.images or ()) for message in messages), "messages")
    tools = tuple(_tools_of(read_tools(fields)))
    return _conversation(fields, tuple(_turns(messages)), tools)


def read_generate(fields: Fields) -> Conversation | None:
    """A request to /api/generate; None if it says nothing. Raises BadRequest."""
    refuse_fields(fields, ("suffix", "template", "context"), "cannot be used here; ask /api/chat, or /infill for gaps.")
    refuse_fields(fields, ("raw",), "cannot be used here; ask /v1/completions for a text without template.")
    prompt, images = read(fields, "prompt", _text), read(fields, "images", _texts)
    if not prompt and not images:
        return None
    _check_pictures(len(images or ()), "images")
    system = read(fields, "system", _text)
    before = (Turn("system", (Text(system),)),) if system else ()
    return _conversation(fields, (*before, Turn("user", (*_pictures(images), Text(prompt or "")))), ())


def pulled(name: str) -> str:
    """The id of the hub in a name as Ollama's clients say it: `hf.co/org/name:Q4_K_M`."""
    for host in ("hf.co/", "huggingface.co/"):
        name = name.removeprefix(host)
    return name.removesuffix(LATEST)


def only_loads() -> Conversation:
    """What is asked where nothing is said."""
    return Conversation(_NOTHING_SAID, tokens_max=1)


def tagged(id: str) -> str:
    """The name of a model in Ollama's lists, where all have a tag: Open WebUI adds it, and looks for the result."""
    return id if ":" in id else f"{id}{LATEST}"


def untagged(name: str, is_there: Callable[[str], bool]) -> str:
    """The model that a name with the tag of `tagged` means. `is_there`: the caller can ask for a model of this name."""
    plain = name.removesuffix(LATEST)
    return plain if plain != name and not is_there(name) and is_there(plain) else name


def is_unload(fields: Fields) -> bool:
    """True if `keep_alive` is no time at all: 0, "0s", "0m0s". What is no time was refused before."""
    raw = fields.get("keep_alive")
    return raw is not None and b"0" in bytes(raw) and not _NOT_ZERO.intersection(bytes(raw))


def embed_fields(fields: Fields) -> Fields:
    """A request to /api/embed as one for embeddings. Raises BadRequest."""
    said = read(fields, "input", _inputs)
    if said is None or said == []:
        raise BadRequest("input is missing or empty: it says what to embed.", param="input")
    wanted = {"model": fields["model"], "input": fields["input"], "encoding_format": Raw(b'"float"')}
    return wanted if read(fields, "dimensions", _whole) is None else {**wanted, "dimensions": fields["dimensions"]}


def embedding_fields(fields: Fields) -> Fields:
    """The same for /api/embeddings, which takes one text."""
    if read(fields, "prompt", _text) is None:
        raise BadRequest("prompt is missing: it says what to embed.", param="prompt")
    return {"model": fields["model"], "input": fields["prompt"], "encoding_format": Raw(b'"float"')}


def _conversation(fields: Fields, turns: tuple[Turn, ...], tools: tuple[Tool, ...]) -> Conversation:
    options = read(fields, "options", _options) or _Options()
    tokens_max = _whole_number("num_predict", options.num_predict)
    options.top_k = _whole_number("top_k", options.top_k)
    options.seed = _whole_number("seed", options.seed)
    numbers = {name: value for name in _SAMPLING if (value := getattr(options, name)) is not None}
    if options.repeat_penalty is not None:
        # The names of llama.cpp, and of vLLM and Transformers.
        numbers |= {"repeat_penalty": options.repeat_penalty, "repetition_penalty": options.repeat_penalty}
    schema, any_json = _format(fields)
    think: bool | str | None = read(fields, "think", _think)
    return Conversation(
        turns,
        tools,
        tokens_max=tokens_max if tokens_max is not None and tokens_max > 0 else None,
        stops=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ()),
        sampling=numbers,
        schema=schema,
        any_json=any_json,
        thinks=None if think is None else bool(think),
        effort=think if isinstance(think, str) and think else None,
    )


def _whole_number(name: str, said: int | float | None) -> int | None:
    if isinstance(said, float):
        if not said.is_integer() or abs(said) > _FLOAT_MAX:
            raise BadRequest(f"options: {name} is a whole number.", param="options")
        return int(said)
    return said


def _format(fields: Fields) -> tuple[Raw | None, bool]:
    raw = fields.get("format")
    if raw is None or bytes(raw) in (b"null", b'""'):
        return None, False
    if is_object(raw):
        return raw, False
    if bytes(raw) != b'"json"':
        raise BadRequest('format is "json" or a JSON schema.', param="format")
    return None, True


def _tools_of(tools: Iterable[Raw]) -> Iterator[Tool]:
    """The functions. Tools of other types are left out."""
    for tool in of_types(tools, (None, "function"), _tool):
        if tool.function is None:
            raise BadRequest("tools: a tool has a function with a name.", param="tools")
        schema = tool.function.parameters
        yield Tool(tool.function.name, tool.function.description, schema if is_object(schema) else Raw(b"{}"))


def _turns(messages: list[_OllamaMessage]) -> Iterator[Turn]:
    """Calls have no ids here: each gets one, and results are given to the calls in their order."""
    waiting = _OpenCalls()
    for number, message in enumerate(messages):
        if message.role not in _ROLES:
            raise BadRequest(f"messages: a role is one of {', '.join(_ROLES)}.", param="messages")
        if message.role == "tool":
            shown: tuple[Text | Image, ...] = (*_pictures(message.images), Text(message.content or ""))
            # A result for no call gets an id all the same: the engine accepts or refuses it.
            id = message.tool_call_id or waiting.take(message.tool_name) or "call_0"
            yield Turn("user", (ToolResult(id, shown, message.tool_name),))
            continue
        parts: list[Part] = [*_pictures(message.images)]
        if message.content or not message.tool_calls:
            parts.append(Text(message.content or ""))
        if message.thinking:
            parts.append(Reasoning(message.thinking))
        for place, call in enumerate(message.tool_calls or ()):
            id = call.id or f"call_{number}_{place}"
            waiting.add(id, call.function.name)
            parts.append(ToolUse(id, call.function.name, json_text(call.function.arguments)))
        yield Turn(message.role, tuple(parts))


class _OpenCalls:
    """Calls without a result so far, in their order: of all tools, and of each one.

    A call that is taken from one queue stays in the other until it is met there, so that each is met twice at most.
    """

    def __init__(self) -> None:
        self._all: deque[tuple[int, str]] = deque()
        self._of_tool: defaultdict[str | None, deque[tuple[int, str]]] = defaultdict(deque)
        self._count = 0
        self._taken: set[int] = set()

    def add(self, id: str, tool: str) -> None:
        self._count += 1
        self._all.append((self._count, id))
        self._of_tool[tool].append((self._count, id))

    def take(self, tool: str | None) -> str | None:
        """The first open call of the tool, else the first of all; None if there is none."""
        for calls in (self._of_tool[tool], self._all):
            while calls:
                number, id = calls.popleft()
                if number not in self._taken:
                    self._taken.add(number)
                    return id
        return None


def _check_pictures(count: int, param: str) -> None:
    if count > OBJECTS_MAX:
        raise BadRequest(f"{param} has more than {OBJECTS_MAX:,} pictures, which is the limit.", param=param)


def _pictures(images: list[str] | None) -> tuple[Image, ...]:
    return tuple(Image(f"data:{_kind(image)};base64,{image}") for image in images or ())


def _kind(image: str) -> str:
    return next((kind for letters, kind in _PICTURES.items() if image.startswith(letters)), "image/png")
