"""The schema trial: a small program that compiles one JSON schema and takes its first steps, to see whether it may.

Owns the bounds of this process, which may fall: a schema is written by a caller, and the library that compiles it knows
no bound of its own for some. Long chains of references overrun its stack, long literals and multiples take it hours.
Never imports torch or anything of ours, so that it starts in a tenth of a second. `schema_trials.py` asks.

    python -I -S schema_trial.py WORKER_PID FOLDER          (where llguidance lies; stdin has the order as JSON)

Exit codes: 0 stdout says why the schema cannot be held to, or nothing; 10 to follow it takes too long; 11 it is too
much for the library; 12 the library cannot be imported, and stdout says why. A signal that this process brings upon
itself means too much as well; whatever else ends it says nothing about the schema.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
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
# What the library says about a schema is told, but not the whole schema.
SAID_CHARS_MAX: Final = 2_000
# The kernel ends this process before any other when memory runs out.
FIRST_TO_GO: Final = "1000"
PR_SET_PDEATHSIG: Final = 1

TOO_SLOW: Final = 10
TOO_MUCH: Final = 11
NO_LIBRARY: Final = 12


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
        if matcher.is_error():
            # The library says no, however long it took to: on a slow machine the same schema hears the same.
            break
        if time.thread_time() - began > STEP_S:
            # However it is answered, the others who are answered with it would wait for every word.
            raise TooSlow
        if token is None or matcher.is_stopped():
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
    """What this returns, or raises, in a thread with such a stack. Raises RuntimeError if there can be no thread."""
    found: list[str] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def end_with(worker: int) -> None:
    """Make the kernel end this process with the thread that started it, the worker's first."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    if prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != worker:
        # It went before this was said.
        os._exit(1)


def stay_small() -> None:
    # At the hard limit the kernel kills, as when memory runs out: the soft one, which says why, comes first.
    limit(resource.RLIMIT_CPU, CPU_S, CPU_S + 1)
    limit(resource.RLIMIT_AS, MEMORY_BYTES, MEMORY_BYTES)
    limit(resource.RLIMIT_CORE, 0, 0)
    # Also where nobody is left who would end it.
    signal.alarm(WALL_S)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(FIRST_TO_GO)


def limit(kind: int, soft: int, hard: int) -> None:
    """For good: what is lowered here nobody raises again."""
    _, before = resource.getrlimit(kind)
    most = hard if before == resource.RLIM_INFINITY else min(hard, before)
    resource.setrlimit(kind, (min(soft, most), most))


def judge(order: dict[str, Any]) -> tuple[int, str]:
    """The exit code and what to say. Raises RuntimeError where nothing can be said about the schema."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        return NO_LIBRARY, str(error)
    try:
        return 0, _in_thread(lambda: why_not(order), COMPILE_STACK_BYTES)
    except TooSlow:
        return TOO_SLOW, ""
    except RuntimeError:
        raise
    except BaseException:
        # No memory, or the library gave up on it.
        return TOO_MUCH, ""


def main() -> None:
    end_with(worker=int(sys.argv[1]))
    stay_small()
    sys.path += sys.argv[2:]
    code, said = judge(json.load(sys.stdin))
    sys.stdout.buffer.write(said[:SAID_CHARS_MAX].encode(errors="replace"))
    sys.stdout.buffer.flush()
    # Nothing is tidied up, which could fail where memory has run out.
    os._exit(code)


if __name__ == "__main__":
    main()
