"""The schema trial: a small program that compiles one JSON schema and takes its first steps, to see whether it may.

Owns the bounds of this process, which may fall: a schema is written by a caller, and the library that compiles it knows
no bound of its own for some. Long chains of references overrun its stack, long literals and multiples take it hours.
Never imports torch or anything of ours, so that it starts in a tenth of a second. `schema_trials.py` asks.

    python -I -S schema_trial.py FOLDER          (where llguidance lies; stdin has the order as JSON)

It says on stdout why the schema cannot be held to, or nothing; however else it ends, the schema is too much.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

# Far more than an honest schema takes, and still within what somebody waits for.
CPU_S: Final = 3
WALL_S: Final = 20
MEMORY_BYTES: Final = 2**31
# Half of what the worker compiles with, and less than any thread has that takes steps.
COMPILE_STACK_BYTES: Final = 8 * 2**20
STEP_STACK_BYTES: Final = 2**20
# What is too wide to be followed shows within the first words: a brace, a key, a value.
STEPS: Final = 32
STEP_S: Final = 0.1
# Tokens are bytes here.
OPENING: Final = b'{["'


class TooSlow(Exception):
    """It could be compiled, but each step takes too long."""


def why_not(order: dict[str, Any]) -> str:
    """Why the library refuses this schema; empty if it does not."""
    import llguidance

    tokens = llguidance.LLTokenizer("byte")
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(order["schema"], overrides=order["overrides"])
    except ValueError as error:
        return str(error)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matchers = [llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)]
    # What is deeply nested is taken apart by functions that call themselves, the last time when it is let go.
    return _in_thread(lambda: _stepped(matchers.pop()), STEP_STACK_BYTES)


def _stepped(matcher: Any) -> str:
    for _ in range(STEPS):
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        token = _choice(mask)
        if token is not None and not matcher.is_error():
            matcher.consume_token(token)
        if time.thread_time() - began > STEP_S:
            # However it is answered, the others who are answered with it would wait for every word.
            raise TooSlow
        if token is None or matcher.is_error() or matcher.is_stopped():
            break
    return _problem(matcher)


def _choice(mask: bytes) -> int | None:
    """The token to go on with: one that opens something, because behind it lies most of a schema."""
    allowed = [number for number in range(8 * len(mask)) if mask[number >> 3] >> (number & 7) & 1]
    return next((token for token in OPENING if token in allowed), min(allowed, default=None))


def _problem(matcher: Any) -> str:
    if not matcher.is_error():
        return ""
    # It has no word for a schema that only ever refers to itself.
    said = str(matcher.get_error()).partition("\n")[0]
    return "nothing satisfies it" if said == "NoExtensionBias" else said


def _in_thread(work: Callable[[], str], stack_bytes: int) -> str:
    found: list[str] = []
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def main() -> None:
    for kind, most in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))
    # Also where nobody is left who would end it.
    signal.alarm(WALL_S)
    sys.path += sys.argv[1:]
    order = json.load(sys.stdin)
    sys.stdout.write(_in_thread(lambda: why_not(order), COMPILE_STACK_BYTES))


if __name__ == "__main__":
    main()
