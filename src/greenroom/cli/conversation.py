"""One conversation with one model: what was said so far, and an answer that is shown while it comes.

Owns the messages, which live as long as the command. A question whose answer failed or was stopped is forgotten.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

from greenroom.cli import screen
from greenroom.cli.client import Client, ServerEvent
from greenroom.cli.failures import CommandFailed, NotAStream, Refused

PATH: Final = "/v1/chat/completions"
# Older ones are dropped; models forget long before.
MESSAGES_MAX: Final = 200
DONE: Final = "[DONE]"
WAITING: Final = "waiting "


class Conversation:
    def __init__(self, client: Client, model: str, system: str | None, settings: Mapping[str, object]) -> None:
        self.model = model
        self._client = client
        self._settings = dict(settings)
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []

    def forget(self) -> None:
        """Begin anew; what the model was told first stays."""
        self._messages.clear()

    def answer(self, prompt: str, *, answer_max_s: float) -> Any:
        """The gateway's whole answer. Raises CommandFailed."""
        return self._client.post(PATH, self._body(prompt), answer_max_s=answer_max_s)

    def say(self, prompt: str) -> str:
        """Ask, show the answer as it comes, and remember both. Raises CommandFailed."""
        body = self._body(prompt) | {"stream": True, "stream_options": {"include_usage": True}}
        began = time.monotonic()
        answer = _Shown()
        with answer:
            try:
                self._show_stream(body, answer)
            except NotAStream as whole:
                # Not every engine that can be a model knows how to stream.
                answer.show_whole(whole)
        answer.conclude(time.monotonic() - began)
        self._remember(prompt, answer.text)
        return answer.text

    def _show_stream(self, body: Mapping[str, object], answer: _Shown) -> None:
        with contextlib.ExitStack() as waiting:
            show = waiting.enter_context(_waiting(self.model))
            with self._client.stream("POST", PATH, body, {"X-Heartbeat": "comment"}) as events:
                for event in events:
                    if event.comment is not None:
                        show(_outlook(self.model, event.comment))
                    elif event.data == DONE:
                        answer.is_whole = True
                    elif delta := answer.take(event):
                        # The spinner goes before the first word comes.
                        waiting.close()
                        answer.show(delta)

    def _body(self, prompt: str) -> dict[str, object]:
        messages = [*self._system, *self._messages, {"role": "user", "content": prompt}]
        return {"model": self.model, "messages": messages, **self._settings}

    def _remember(self, prompt: str, answer: str) -> None:
        self._messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        del self._messages[:-MESSAGES_MAX]


class _Shown:
    """The answer so far."""

    def __init__(self) -> None:
        self.text = ""
        self.is_whole = False
        self._is_begun = False
        self._tokens: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Also when it broke off: what is said next begins a line of its own.
        if self._is_begun:
            self._write("\n")

    def take(self, event: ServerEvent) -> Mapping[str, Any]:
        """The piece of the answer in this event; empty if there is none. Raises Refused for an error event."""
        try:
            data = json.loads(event.data)
            if error := data.get("error"):
                raise Refused(str(error["message"]), error.get("details"), code=str(error.get("code")))
            if usage := data.get("usage"):
                self._tokens = usage.get("completion_tokens")
            choices = data.get("choices") or [{}]
            delta = choices[0].get("delta") or {}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise CommandFailed(f"the model answered with something that is no chat: {event.data[:200]}") from None
        return delta if delta.get("content") or delta.get("reasoning_content") else {}

    def show(self, delta: Mapping[str, Any]) -> None:
        """Thoughts are for people only: dim in a terminal, nothing in a pipe."""
        is_terminal = sys.stdout.isatty()
        if is_terminal and (thought := delta.get("reasoning_content")):
            self._write(screen.dim(str(thought)))
        if said := delta.get("content"):
            self.text += str(said)
            self._write(screen.harmless(str(said)) if is_terminal else str(said))

    def show_whole(self, came: NotAStream) -> None:
        """An answer that came at once. Raises what came if it is none."""
        match came.value:
            case {"choices": [{"message": {"content": str()} as message}, *_]}:
                self.show(message)
                self.is_whole = True
            case _:
                raise came

    def conclude(self, took_s: float) -> None:
        """Say how long it took. Raises CommandFailed if the answer is not whole."""
        if not self.is_whole:
            raise CommandFailed("the answer was cut off; see `greenroom ps`")
        tokens = f", {self._tokens} tokens" if self._tokens is not None else ""
        screen.hint(f"({screen.seconds(took_s)}{tokens})")

    def _write(self, text: str) -> None:
        self._is_begun = True
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def _waiting(model: str) -> Iterator[Any]:
    """What is shown until the first word: a spinner for people; in a pipe a line only if it takes long."""
    if sys.stderr.isatty():
        with screen.spinner(f"waiting for {model}") as show:
            yield show
    else:
        yield screen.note


def _outlook(model: str, comment: str) -> str:
    """`waiting model=m position=2 eta_s=4` in words."""
    said = dict(part.partition("=")[::2] for part in comment.removeprefix(WAITING).split())
    words = [f"waiting for {model}"]
    if "position" in said:
        words.append(f"position {said['position']}")
    if "eta_s" in said:
        words.append(f"about {said['eta_s']} s to go")
    return ", ".join(words)
