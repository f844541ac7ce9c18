"""`greenroom chat`: a conversation with a model in the terminal.

One question when there is one (as words, or on standard input), otherwise a prompt that keeps the conversation in
memory and nowhere else. A question whose answer failed or was stopped is forgotten.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand, from_0
from greenroom.cli.failures import CommandFailed, ExitStatus, GatewayRefused, NotAStream, WrongUsage

if TYPE_CHECKING:
    from greenroom.cli.client import Client, ServerEvent

STDIN_BYTES_MAX: Final = 16 * 1024 * 1024
# A non-streaming answer says nothing until it is complete.
ANSWER_MAX_S: Final = 3_600.0
BYE: Final = frozenset({"/exit", "/quit", "/bye"})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument("prompt", nargs="*", help="the question; - is standard input")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the most tokens of an answer")
    parser.add_argument("--temperature", type=from_0, metavar="T", help="0 is the most predictable")
    address.add_options(parser, json_help="print the whole answer as JSON; needs a prompt")


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client

    settings = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    said = {name: value for name, value in settings.items() if value is not None}
    conversation = ChatSession(Client(address.address_of(args)), args.model, args.system, said)
    prompt = _prompt(args.prompt)
    if prompt is None:
        if args.json:
            raise WrongUsage("--json needs a prompt, as words or on standard input")
        return _talk(conversation)
    if args.json:
        screen.say_json(conversation.answer(prompt, answer_max_s=ANSWER_MAX_S))
    else:
        conversation.say(prompt)
    return ExitStatus.OK


COMMAND = Subcommand("chat", "Talk to a model. Without a prompt: a conversation, until Ctrl-D.", add_options, run)


def _prompt(words: list[str]) -> str | None:
    """The question; None if it is to be typed at the prompt."""
    if words:
        texts = [_stdin() if word == "-" else word for word in words]
        return ("\n\n" if "-" in words else " ").join(texts)
    return None if sys.stdin.isatty() else _stdin()


def _stdin() -> str:
    text = sys.stdin.read(STDIN_BYTES_MAX + 1)
    if len(text) > STDIN_BYTES_MAX:
        raise CommandFailed(f"standard input is longer than {STDIN_BYTES_MAX:,} characters")
    if not text.strip():
        raise WrongUsage("standard input is empty; there is nothing to ask")
    return text


def _talk(conversation: ChatSession) -> int:
    with contextlib.suppress(ImportError):
        # Line editing and history at the prompt, where Python has them.
        import readline  # noqa: F401
    screen.hint(f"talking to {conversation.model}; /new starts over, Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            screen.say()
            return ExitStatus.OK
        if line in BYE:
            return ExitStatus.OK
        if line == "/new":
            conversation.forget()
        elif line:
            _one_turn(conversation, line)


def _one_turn(conversation: ChatSession, line: str) -> None:
    """A question that fails leaves the conversation as it was."""
    try:
        conversation.say(line)
    except KeyboardInterrupt:
        screen.note("\n(stopped)")
    except CommandFailed as error:
        screen.fail(error)


# --- the conversation -----------------------------------------------------------------------------------------------


PATH: Final = "/v1/chat/completions"
# Older messages are dropped; no model's context is that long.
MESSAGES_MAX: Final = 200
DONE: Final = "[DONE]"
WAITING: Final = "waiting "


class ChatSession:
    def __init__(self, client: Client, model: str, system: str | None, settings: Mapping[str, object]) -> None:
        self.model = model
        self._client = client
        self._settings = dict(settings)
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []

    def forget(self) -> None:
        """Start over; the system prompt stays."""
        self._messages.clear()

    def answer(self, prompt: str, *, answer_max_s: float) -> Any:
        """The gateway's answer, not streamed. Raises CommandFailed."""
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
                # Not every engine can stream.
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
                        # The spinner ends before the first word is shown.
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
        # Also when it broke off: the next output starts on a new line.
        if self._is_begun:
            self._write("\n")

    def take(self, event: ServerEvent) -> Mapping[str, Any]:
        """The delta in this event; empty if it has no text. Raises GatewayRefused for an error event."""
        try:
            data = json.loads(event.data)
            if error := data.get("error"):
                raise GatewayRefused(str(error["message"]), error.get("details"), code=str(error.get("code")))
            if usage := data.get("usage"):
                self._tokens = usage.get("completion_tokens")
            choices = data.get("choices") or [{}]
            delta = choices[0].get("delta") or {}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise CommandFailed(f"the model answered with something that is no chat: {event.data[:200]}") from None
        return delta if delta.get("content") or _thought(delta) else {}

    def show(self, delta: Mapping[str, Any]) -> None:
        """Print a delta. Reasoning is dim in a terminal and left out in a pipe."""
        is_terminal = sys.stdout.isatty()
        if is_terminal and (thought := _thought(delta)):
            self._write(screen.dim(str(thought)))
        if said := delta.get("content"):
            self.text += str(said)
            self._write(screen.harmless(str(said)) if is_terminal else str(said))

    def show_whole(self, came: NotAStream) -> None:
        """Show an answer that was not streamed. Raises `came` if it is not a chat answer."""
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
        screen.write(text)


def _thought(delta: Mapping[str, Any]) -> object:
    """What a model thinks: vLLM says `reasoning`, others `reasoning_content`."""
    return delta.get("reasoning_content") or delta.get("reasoning")


@contextlib.contextmanager
def _waiting(model: str) -> Iterator[Any]:
    """Progress until the first word: a spinner at a terminal; in a pipe one line per heartbeat."""
    if sys.stderr.isatty():
        with screen.spinner(f"waiting for {model}") as show:
            yield show
    else:
        yield screen.note


def _outlook(model: str, comment: str) -> str:
    """The heartbeat `waiting model=m position=2 eta_s=4` in words."""
    said = dict(part.partition("=")[::2] for part in comment.removeprefix(WAITING).split())
    words = [f"waiting for {model}"]
    if "position" in said:
        words.append(f"position {said['position']}")
    if "eta_s" in said:
        words.append(f"about {said['eta_s']} s to go")
    return ", ".join(words)
