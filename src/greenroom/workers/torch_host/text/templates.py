"""Renders a conversation as the text that its model was trained on, by the model's chat template.

Owns what a template sees of a request, and how long it may take. A template is a program that comes with the model: it
runs in a sandbox process (`sandbox/`), so that one that loops or grows fails only its request.

Some tokenizers bring Python of their own that renders. The operator has trusted it with this process
(`trust_remote_code`): it runs in a thread, with a deadline but no other bound.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..api.errors import ApiError, too_long, unavailable
from ..sandbox.deadline import DeadlineExceeded, run_with_deadline
from ..sandbox.pool import SandboxPool, Stopped, TimedOut, Unavailable
from ..sandbox.template_runner import Complaint, RenderedTooLong, TemplateRunner
from .tokens import Text

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
    def __init__(self, text: Text, pool: SandboxPool, deadline_s: float = RENDER_DEADLINE_S) -> None:
        self._text = text
        self._folder = text.folder
        tokenizer = text.tokenizer
        said = getattr(tokenizer, "chat_template", None)
        self.source = "\n".join(map(str, said.values())) if isinstance(said, dict) else str(said or "")
        """Its source; all of them if the model has several."""
        # A caller may set a template's own switches, never the arguments that choose the template or how it runs.
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        self._writer: _Writer = (
            _InThread(tokenizer, deadline_s)
            if _renders_itself(tokenizer)
            else _InProcess(tokenizer, TemplateRunner(pool), deadline_s)
        )

    async def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, switches: Mapping[str, Any], context: int
    ) -> str:
        """The prompt of this conversation. Raises ApiError if there is no template, or if it fails or does not end.

        A prompt that is certain to have more than `context` tokens is refused too.
        """
        if not self.source:
            raise ApiError(
                f"{self._folder.name} has no chat template. Use /v1/completions, or add chat_template.jinja to it.",
                code="no_chat_template",
            )
        own = {name: value for name, value in switches.items() if name not in self._reserved}
        chars_max = min(self._text.chars_max(context), PROMPT_CHARS_MAX)
        try:
            return await self._writer.write(list(messages), list(tools) if tools else None, own, chars_max)
        except Stopped as reason:
            log.warning("template stopped model=%s: it %s", self._folder.name, reason)
            raise self._failed(f"{reason}. Mend it or use /v1/completions.", 422) from None
        except RenderedTooLong as reason:
            raise too_long(f"messages make {reason}; at most {context:,} tokens fit. Send less.") from None
        except Unavailable as reason:
            raise unavailable(str(reason)) from None
        except Complaint as reason:
            raise self._failed(f"refused these messages: {reason}", 400) from reason

    def _failed(self, why: str, status: int) -> ApiError:
        return ApiError(
            f"The chat template of {self._folder.name} ({self._file()}) {why}",
            status=status,
            param="messages",
            code="template_failed",
        )

    def _file(self) -> str:
        for name in ("chat_template.jinja", "chat_template.json"):
            if (self._folder / name).exists():
                return name
        return "chat_template in tokenizer_config.json"


class _Writer(Protocol):
    async def write(
        self, messages: list[Message], tools: list[Message] | None, switches: Mapping[str, Any], chars_max: int
    ) -> str:
        """The prompt. Raises SandboxError."""


class _InProcess:
    def __init__(self, tokenizer: Any, runner: TemplateRunner, deadline_s: float) -> None:
        self._tokenizer, self._runner, self._deadline_s = tokenizer, runner, deadline_s

    async def write(
        self, messages: list[Message], tools: list[Message] | None, switches: Mapping[str, Any], chars_max: int
    ) -> str:
        order = {
            "template": self._program(tools),
            "messages": messages,
            "tools": tools,
            "names": {**self._tokenizer.special_tokens_map, **switches},
        }
        return await self._runner.render(order, chars_max, self._deadline_s)

    def _program(self, tools: list[Message] | None) -> str:
        """The template for this request, as Transformers chooses among several."""
        try:
            program = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise Complaint(str(error)[:COMPLAINT_CHARS_MAX]) from error
        if not isinstance(program, str) or len(program) > PROGRAM_CHARS_MAX:
            raise Complaint(f"it is no text, or one of more than {PROGRAM_CHARS_MAX:,} characters.")
        return program


class _InThread:
    def __init__(self, tokenizer: Any, deadline_s: float) -> None:
        self._tokenizer, self._deadline_s = tokenizer, deadline_s

    async def write(
        self, messages: list[Message], tools: list[Message] | None, switches: Mapping[str, Any], chars_max: int
    ) -> str:
        def rendered() -> str:
            render = self._tokenizer.apply_chat_template
            return str(render(messages, tools=tools, tokenize=False, add_generation_prompt=True, **switches))

        try:
            text = await run_with_deadline(rendered, self._deadline_s, f"template of {type(self._tokenizer).__name__}")
        except DeadlineExceeded:
            raise TimedOut(self._deadline_s) from None
        except Exception as error:
            raise Complaint(str(error)[:COMPLAINT_CHARS_MAX]) from error
        if len(text) > chars_max:
            raise RenderedTooLong(len(text))
        return text


def _renders_itself(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    method = getattr(tokenizer.apply_chat_template, "__func__", None)
    return method is not PreTrainedTokenizerBase.apply_chat_template
