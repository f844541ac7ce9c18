"""Renders a conversation as the text that its model was trained on, by the model's chat template.

Owns the messages of a request in the shape that templates expect, what a template sees of a request, and how long it
may take. A template is a program that comes with the model: it runs in a sandbox process (`sandbox/template_job.py`),
so that one that loops or grows fails only its request.

Some tokenizers bring Python of their own that renders. The operator has trusted it with this process
(`trust_remote_code`): it runs in a thread, with a deadline but no other bound.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ...serving.errors import ApiError, too_long, unavailable, unsupported
from ...serving.fields import Body, kind_of
from ..sandbox.deadline import DeadlineExceeded, run_with_deadline
from ..sandbox.pool import JobKind, SandboxError, SandboxPool, Stopped, TimedOut, Unavailable
from .tokens import TextCodec, renders_itself

# Every character is at most so many bytes. Error messages are shorter than this.
CHAR_BYTES_MAX: Final = 4
COMPLAINT_BYTES_MAX: Final = 4_096
# The sandboxes of earlier versions have known holes.
JINJA_MIN: Final = (3, 1, 6)

Order = Mapping[str, Any]


class Complaint(SandboxError):
    """The template refused the conversation, or has a mistake."""


class RenderedTooLong(SandboxError):
    def __init__(self, chars: int) -> None:
        super().__init__(f"{chars:,} characters")
        self.chars = chars


class TemplateRunner:
    """One model's share of the processes for chat templates."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._turns = pool.model_turns()

    async def render(self, order: Order, chars_max: int, deadline_s: float) -> str:
        """The prompt of an order: `template`, `messages`, `tools`, and other `names` that the template sees. Raises
        SandboxError. The deadline counts from when a process begins; waiting for one is bounded too."""
        written = json.dumps({**order, "chars_max": chars_max}, ensure_ascii=False, separators=(",", ":"))
        raw = written.encode(errors="surrogatepass")
        bytes_max = CHAR_BYTES_MAX * chars_max + COMPLAINT_BYTES_MAX
        try:
            async with asyncio.timeout(self._pool.kind.wait_s) as waiting, self._turns, self._pool.places:
                waiting.reschedule(None)
                word, content = await self._pool.run(raw, bytes_max, deadline_s)
        except TimeoutError:
            raise Unavailable("Chat templates that take too long keep others waiting. Try again.") from None
        return _prompt(word, content)


def _prompt(word: bytes, content: bytes) -> str:
    if word == b"long":
        raise RenderedTooLong(int(content))
    text = content.decode(errors="replace")
    if word == b"fail":
        raise Complaint(text)
    return text


@functools.cache
def jinja_folders() -> tuple[str, ...]:
    """Where this Python keeps Jinja. Raises Unavailable if it has none, or one that is too old."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    places = [str(Path(spec.origin).parent.parent) for spec in found if spec is not None and spec.origin]
    if len(places) < len(found) or _version("jinja2") < JINJA_MIN:
        wanted = ".".join(map(str, JINJA_MIN))
        raise Unavailable(f"Chat templates need Jinja: {sys.executable} -m pip install 'jinja2>={wanted}'.")
    return tuple(sorted(set(places)))


def _version(package: str) -> tuple[int, ...]:
    try:
        parts = importlib.metadata.version(package).split(".")[: len(JINJA_MIN)]
    except importlib.metadata.PackageNotFoundError:
        # It is installed without a record of its version.
        return ()
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


TEMPLATES: Final = JobKind(
    purpose="chat templates",
    module=Path(__file__).parents[1] / "sandbox" / "template_job.py",
    folders=jinja_folders,
    # Far more than any conversation takes, and no danger to the machine.
    memory_bytes=2**30,
    processes_max=4,
    processes_a_model=2,
    # Six callers of a template that does not end, one after the other.
    wait_s=30.0,
    is_reused=True,
    kept_bytes=2**26,
)


RENDER_DEADLINE_S = 5.0
# A template's own error message is shown, but not a whole conversation.
COMPLAINT_CHARS_MAX = 500
# Twenty times the longest known. It is sent with every order.
PROGRAM_CHARS_MAX = 2**20
# No prompt is longer, however large the context is.
PROMPT_CHARS_MAX = 2**26

log = logging.getLogger(__name__)

Message = Mapping[str, Any]


class ChatTemplate:
    def __init__(self, text: TextCodec, pool: SandboxPool, deadline_s: float = RENDER_DEADLINE_S) -> None:
        self._text = text
        self._folder = text.folder
        tokenizer = text.tokenizer
        said = getattr(tokenizer, "chat_template", None)
        self.source = "\n".join(map(str, said.values())) if isinstance(said, dict) else str(said or "")
        """Its source; all of them if the model has several."""
        # A caller may set a template's own switches, never the arguments that choose the template or how it runs.
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        # None for a tokenizer that brings Python of its own.
        self._runner = None if renders_itself(tokenizer) else TemplateRunner(pool)
        self._deadline_s = deadline_s

    async def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, switches: Mapping[str, Any], context: int
    ) -> str:
        """The prompt of this conversation. Raises ApiError if there is no template, or if it fails or does not end. A
        prompt that is certain to have more than `context` tokens is refused too."""
        if not self.source:
            raise ApiError(
                f"{self._folder.name} has no chat template. Use /v1/completions, or add chat_template.jinja to it.",
                code="no_chat_template",
            )
        own = {name: value for name, value in switches.items() if name not in self._reserved}
        chars_max = min(self._text.chars_max(context), PROMPT_CHARS_MAX)
        try:
            return await self._write(list(messages), list(tools) if tools else None, own, chars_max)
        except Stopped as reason:
            log.warning("template stopped model=%s: it %s", self._folder.name, reason)
            raise self._failed(f"{reason}. Mend it or use /v1/completions.", 422) from None
        except RenderedTooLong as reason:
            raise too_long(f"messages make {reason}; at most {context:,} tokens fit. Send less.") from None
        except Unavailable as reason:
            raise unavailable(str(reason)) from None
        except Complaint as reason:
            raise self._failed(f"refused these messages: {reason}", 400) from reason

    async def _write(
        self, messages: list[Message], tools: list[Message] | None, switches: Mapping[str, Any], chars_max: int
    ) -> str:
        """The prompt. Raises SandboxError."""
        tokenizer = self._text.tokenizer
        if self._runner is not None:
            names = {**tokenizer.special_tokens_map, **switches}
            order = {"template": self._program(tools), "messages": messages, "tools": tools, "names": names}
            return await self._runner.render(order, chars_max, self._deadline_s)

        def rendered() -> str:
            render = tokenizer.apply_chat_template
            return str(render(messages, tools=tools, tokenize=False, add_generation_prompt=True, **switches))

        try:
            text = await run_with_deadline(rendered, self._deadline_s, f"template of {type(tokenizer).__name__}")
        except DeadlineExceeded:
            raise TimedOut(self._deadline_s) from None
        except Exception as error:
            raise Complaint(str(error)[:COMPLAINT_CHARS_MAX]) from error
        if len(text) > chars_max:
            raise RenderedTooLong(len(text))
        return text

    def _program(self, tools: list[Message] | None) -> str:
        """The template for this request, as Transformers chooses among several."""
        try:
            program = self._text.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise Complaint(str(error)[:COMPLAINT_CHARS_MAX]) from error
        if not isinstance(program, str) or len(program) > PROGRAM_CHARS_MAX:
            raise Complaint(f"it is no text, or one of more than {PROGRAM_CHARS_MAX:,} characters.")
        return program

    def _failed(self, why: str, status: int) -> ApiError:
        return ApiError(
            f"The chat template of {self._folder.name} ({self._file()}) {why}",
            status=status,
            param="messages",
            code="template_failed",
        )

    def _file(self) -> str:
        if self._text.template_file is not None:
            return self._text.template_file
        for name in ("chat_template.jinja", "chat_template.json"):
            if (self._folder / name).exists():
                return name
        return "chat_template in tokenizer_config.json"


MESSAGES_MAX = 65_536


def read_messages(body: Body, knows_developer: bool, thinks: bool = False) -> list[dict[str, Any]]:
    """The messages of a body. Raises ApiError. Unknown fields of a message stay: a template may know them. `thinks`:
    the template is for Harmony, which calls earlier reasoning `thinking`."""
    said = body.get("messages")
    if not isinstance(said, list) or not said:
        raise ApiError("messages must be a list of at least one message.", param="messages")
    if len(said) > MESSAGES_MAX:
        raise ApiError(f"messages may hold at most {MESSAGES_MAX} messages.", param="messages")
    messages = [_message(message, f"messages[{place}]", knows_developer) for place, message in enumerate(said)]
    return list(map(_with_thinking, messages)) if thinks else messages


def _message(said: object, param: str, knows_developer: bool) -> dict[str, Any]:
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


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
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
