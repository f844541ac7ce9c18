"""`greenroom chat`: a conversation with a model in the terminal.

One question when there is one (as words, or on standard input), otherwise a small prompt that keeps the conversation in
memory and nowhere else.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Final

from greenroom.cli import address, screen
from greenroom.cli.failures import CommandFailed, Exit, WrongUsage

if TYPE_CHECKING:
    from greenroom.cli.conversation import Conversation

NAME = "chat"
HELP = "Talk to a model. Without a prompt: a conversation, until Ctrl-D."
STDIN_BYTES_MAX: Final = 16 * 1024 * 1024
# A non-streaming answer says nothing until it is complete.
ANSWER_MAX_S: Final = 3_600.0
BYE: Final = frozenset({"/exit", "/quit", "/bye"})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument("prompt", nargs="*", help="the question; - stands for standard input")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is the most predictable")
    address.add_options(parser, json_help="print the whole answer as JSON; needs a prompt")


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.client import Client
    from greenroom.cli.conversation import Conversation

    settings = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    said = {name: value for name, value in settings.items() if value is not None}
    conversation = Conversation(Client(address.address_of(args)), args.model, args.system, said)
    prompt = _prompt(args.prompt)
    if prompt is None:
        if args.json:
            raise WrongUsage("--json needs a prompt, as words or on standard input")
        return _talk(conversation)
    if args.json:
        screen.say_json(conversation.answer(prompt, answer_max_s=ANSWER_MAX_S))
    else:
        conversation.say(prompt)
    return Exit.OK


def _prompt(words: list[str]) -> str | None:
    """The question, None if there is none yet."""
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


def _talk(conversation: Conversation) -> int:
    with contextlib.suppress(ImportError):
        # Arrow keys and earlier lines at the prompt, where Python has them.
        import readline  # noqa: F401
    screen.hint(f"talking to {conversation.model}; /new begins anew, Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            screen.say()
            return Exit.OK
        if line in BYE:
            return Exit.OK
        if line == "/new":
            conversation.forget()
        elif line:
            _one_turn(conversation, line)


def _one_turn(conversation: Conversation, line: str) -> None:
    """A question that fails leaves the conversation as it was."""
    try:
        conversation.say(line)
    except KeyboardInterrupt:
        screen.note("\n(stopped)")
    except CommandFailed as error:
        screen.fail(error)
