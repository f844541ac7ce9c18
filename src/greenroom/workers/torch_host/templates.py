"""A conversation as the one text its model was trained on, by the model's chat template.

Owns what of a request a template sees, and how long it may think. A template is a program that came with the model:
Transformers runs it in a sandbox, and here that runs in a thread with a deadline, so that one that loops fails only the
request.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from .deadline import DeadlineExceeded, run_with_deadline
from .refusals import Refused
from .text import Text

RENDER_DEADLINE_S = 5.0
# What a template says about itself when it refuses is shown, but not a whole conversation.
COMPLAINT_CHARS_MAX = 500

Message = Mapping[str, Any]


class Template:
    def __init__(self, text: Text, deadline_s: float = RENDER_DEADLINE_S) -> None:
        self._tokenizer = text.tokenizer
        self._folder = text.folder
        self._deadline_s = deadline_s
        said = getattr(self._tokenizer, "chat_template", None)
        self.source = "\n".join(map(str, said.values())) if isinstance(said, dict) else str(said or "")
        """Its program; all of them where a model has one for tools."""
        # A caller may set the template's own switches, never the arguments that decide which program runs and how.
        self._reserved = set(inspect.signature(self._tokenizer.apply_chat_template).parameters)

    async def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, switches: Mapping[str, Any]
    ) -> str:
        """The prompt of this conversation. Raises Refused if there is no template, or it fails, or does not return."""
        if not self.source:
            raise Refused(
                f"{self._folder.name} has no chat template. Use /v1/completions, or add chat_template.jinja to it.",
                code="no_chat_template",
            )
        try:
            return await run_with_deadline(
                lambda: self._rendered(messages, tools, switches), self._deadline_s, f"template of {self._folder.name}"
            )
        except DeadlineExceeded:
            why = f"did not end within {self._deadline_s:g} s and was stopped. Mend it or use /v1/completions."
            raise self._failed(why, 422) from None
        except Exception as error:
            raise self._failed(f"refused these messages: {str(error)[:COMPLAINT_CHARS_MAX]}", 400) from error

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, switches: Mapping[str, Any]
    ) -> str:
        own = {name: value for name, value in switches.items() if name not in self._reserved}
        rendered = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True, **own
        )
        return str(rendered)

    def _failed(self, why: str, status: int) -> Refused:
        return Refused(
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
