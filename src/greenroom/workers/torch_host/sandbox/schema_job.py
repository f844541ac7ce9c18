"""Compiles one JSON schema and takes its first steps, in a sandbox process, to see whether the worker may.

Owns what a trial is. Callers write schemas, and the library that compiles them has no bounds of its own for some: long
chains of references overrun its stack, long literals and multiples take it hours. `program.py` loads this module by its
path and bounds the process, which may crash; `schema_trials.py` reads the result.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

# Half of what the worker compiles with, and less than the stack of any thread that takes steps.
COMPILE_STACK_BYTES: Final = 8 * 2**20
STEP_STACK_BYTES: Final = 2**20
# A schema that is too wide to follow shows it within the first tokens: a brace, a key, a value.
STEPS: Final = 32
STEP_S: Final = 0.1
# Tokens are bytes here.
OPENING: Final = b'{["'
# The library's error message is passed on, but not the whole schema.
SAID_CHARS_MAX: Final = 2_000

FIT: Final = b"fits"
UNFIT: Final = b"nope"
TOO_SLOW: Final = b"slow"
TOO_MUCH: Final = b"much"
UNKNOWN: Final = b"fail"


class StepTooSlow(Exception):
    """The schema compiles, but a step takes too long."""


def answer(raw: bytes) -> tuple[bytes, bytes]:
    """The verdict on an order's schema. The words: `fits`; `nope` and why the library refuses it; `slow` if its steps
    take too long; `much` if the library gave up or memory ran out; `fail` and why nothing can be said about it."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        return UNKNOWN, said(str(error))
    try:
        why = in_thread(lambda: why_not(json.loads(raw)), COMPILE_STACK_BYTES)
    except StepTooSlow:
        return TOO_SLOW, b""
    except RuntimeError as error:
        # There can be no thread.
        return UNKNOWN, said(str(error))
    except BaseException:
        return TOO_MUCH, b""
    return (UNFIT, said(why)) if why else (FIT, b"")


def said(text: str) -> bytes:
    return text[:SAID_CHARS_MAX].encode(errors="replace")


def why_not(order: dict[str, Any]) -> str:
    """Why the library refuses this schema; empty if it accepts it."""
    import llguidance

    tokens = llguidance.LLTokenizer("byte")
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(order["schema"], overrides=order["overrides"])
    except ValueError as error:
        return str(error)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matchers = [llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)]
    # The library recurses into deeply nested schemas, last when the matcher is freed, which `pop` moves to the thread.
    return in_thread(lambda: _stepped(matchers.pop()), STEP_STACK_BYTES)


def _stepped(matcher: Any) -> str:
    for _ in range(STEPS):
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        token = _choice(mask)
        if token is not None and not matcher.is_error():
            matcher.consume_token(token)
        if matcher.is_error():
            # The library refuses it, however long that took: the verdict must not depend on the speed of the machine.
            break
        if time.thread_time() - began > STEP_S:
            # Other sequences of the same batch would wait at every step.
            raise StepTooSlow
        if token is None or matcher.is_stopped():
            break
    return _problem(matcher)


def _choice(mask: bytes) -> int | None:
    """The token to go on with: preferably one that opens something, because most of a schema lies behind it."""
    allowed = [number for number in range(8 * len(mask)) if mask[number >> 3] >> (number & 7) & 1]
    return next((token for token in OPENING if token in allowed), min(allowed, default=None))


def _problem(matcher: Any) -> str:
    if not matcher.is_error():
        return ""
    # The library has no message for a schema that only ever refers to itself.
    said = str(matcher.get_error()).partition("\n")[0]
    return "nothing satisfies it" if said == "NoExtensionBias" else said


def in_thread(work: Callable[[], str], stack_bytes: int) -> str:
    """What this returns or raises in a thread with such a stack. Raises RuntimeError if no thread can start."""
    threading.stack_size(stack_bytes)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()
