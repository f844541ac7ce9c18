"""The switches of the fake engine. Read without argparse, which takes an eighth of the engine's start to import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

HUGE_LINE_BYTES = 2 * 1024 * 1024
ERRORS = ("error-429", "error-500", "error-503")
SSE_WEIRD = ("no-done", "no-end", "broken-event", "error-event", "huge-line", "non-sse-200", *ERRORS)


class Switches(SimpleNamespace):
    """A value for every switch, named without its dashes: `load_s`."""


def flag(_: str) -> bool:
    """The type of switches that take no value."""
    return True


def one_of(*words: str) -> Callable[[str], str]:
    def read(word: str) -> str:
        if word not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return word

    return read


# The type of each switch and its value where it is not given.
SWITCHES: dict[str, tuple[Callable[[str], Any], Any]] = {
    # One of these two, and not both.
    "port": (int, None),
    "uds": (str, None),
    "host": (str, "127.0.0.1"),
    # Every answer contains it.
    "name": (str, "fake"),
    "journal": (str, None),
    # The journal gets whole requests.
    "record": (flag, False),
    # Events are sent in pieces of this size.
    "split-bytes": (int, 0),
    # /health answers 503 until then.
    "load-s": (float, 0.0),
    "tokens": (int, 4),
    # The answer, word by word, instead of its name and numbers.
    "say": (str, None),
    # A pause before each token.
    "token-s": (float, 0.0),
    "no-usage": (flag, False),
    # load, request or token:N.
    "crash-at": (str, None),
    # Crash at load as long as this file exists.
    "crash-while": (str, None),
    # Of a crash, and of --exit-before-bind.
    "exit-code": (int, 1),
    "exit-before-bind": (flag, False),
    "exit-zero-without-listening": (flag, False),
    # Print the command line and every request's body.
    "talkative": (flag, False),
    # Accept, never answer.
    "hang": (one_of("load", "serve"), None),
    "stall-after": (int, None),
    "ignore-term": (flag, False),
    # At SIGUSR1 it stops listening and cuts its connections, unless it drains them; it ends so much later, or listens
    # again.
    "deaf-s": (float, 0.0),
    "drains": (flag, False),
    "listens-again": (flag, False),
    "fork-setsid": (flag, False),
    "sse-weird": (one_of(*SSE_WEIRD), None),
    "huge-line-bytes": (int, HUGE_LINE_BYTES),
    # A JSON answer stops in its middle and never goes on.
    "half-body": (flag, False),
    # GPUs to take memory of, as a file probe describes them.
    "gpu-file": (str, None),
    # Taken at load, shared evenly by the visible GPUs.
    "gpu-mib": (int, 0),
    # Taken besides at the first request.
    "gpu-grow-mib": (int, 0),
    # One engine at a time may hold it; `doubled` is noted otherwise.
    "lock": (str, None),
}


def parse_switches(words: list[str] | None = None) -> Switches:
    """Those of the command line, unless others are given. Exits with a sentence for one that cannot be understood."""
    found = {name: value for name, (_, value) in SWITCHES.items()}
    left = iter(sys.argv[1:] if words is None else words)
    for word in left:
        switch, equals, given = word.partition("=")
        name = switch.removeprefix("--")
        if name not in SWITCHES or name == switch:
            sys.exit(f"no such switch: {word}")
        read = SWITCHES[name][0]
        try:
            value = read("" if read is flag else given if equals else next(left))
        except (StopIteration, ValueError) as wrong:
            sys.exit(f"{word} needs another value: {wrong}")
        found[name] = value
    if (found["port"] is None) == (found["uds"] is None):
        sys.exit("--port or --uds is needed, and not both")
    return Switches(**{name.replace("-", "_"): value for name, value in found.items()})
