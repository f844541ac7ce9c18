"""Decides whether the worker may compile a JSON schema: tries it in a sandbox process, and remembers the verdict.

Owns the trials: how many run at once and for which models, and what came of them. Most schemas are sent again and
again, so few requests wait for a trial, which takes a tenth of a second. Never keeps a schema, only its hash. What a
trial could not find out, because the machine lacked time or memory, is not held against the schema.
Read `SchemaChecker.check` first.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import signal
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...serving.errors import ApiError, unavailable
from .pool import JobKind, MemoryExhausted, ProcessEnded, SandboxError, SandboxPool
from .schema_job import FIT, SAID_CHARS_MAX, TOO_MUCH, TOO_SLOW, UNFIT, UNKNOWN

# Far more than an honest schema takes, and still within what a caller waits for.
CPU_S: Final = 3
WALL_S: Final = 20
# Two memories, so that invented bad schemas push out no good one.
PASSED_MAX: Final = 1_024
REFUSED_MAX: Final = 1_024
_SAID_BYTES_MAX: Final = 4 * SAID_CHARS_MAX

# Words of a trial that say that a schema is too complex, and how messages say it.
_TOO_COMPLEX: Final = {
    TOO_MUCH: f"to compile it takes more than {CPU_S} s or too much memory",
    TOO_SLOW: "to follow it takes too long",
}
# Signals that a schema brings upon its process. SIGKILL is not among them: the kernel sends it when the whole machine
# has no memory.
_OWN_SIGNALS: Final = (signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial found, as the words of `schema_job`, and why if that is UNFIT."""

    word: bytes
    why: str = ""

    def enforce(self, param: str) -> None:
        """Return if the schema may be compiled. Raises ApiError, which names the field it was sent in."""
        if self.word == UNFIT:
            raise ApiError(f"{param}: this schema cannot be held to: {self.why}", param=param)
        if self.word in _TOO_COMPLEX:
            raise too_complex(param, _TOO_COMPLEX[self.word])
        if self.word == UNKNOWN:
            raise unavailable(f"{param}: this schema could not be tried. Try again.")


class SchemaTrials:
    """All verdicts of one worker. Belongs to the loop on which it is first used."""

    def __init__(self, pool: SandboxPool, passed_max: int = PASSED_MAX, refused_max: int = REFUSED_MAX) -> None:
        self.pool = pool
        self._passed_max, self._refused_max = passed_max, refused_max
        self._running = _SharedTasks()
        self._passed: OrderedDict[bytes, Verdict] = OrderedDict()
        self._refused: OrderedDict[bytes, Verdict] = OrderedDict()

    def known(self, key: bytes) -> Verdict | None:
        for verdicts in (self._passed, self._refused):
            if key in verdicts:
                verdicts.move_to_end(key)
                return verdicts[key]
        return None

    async def verdict(self, key: bytes, order: bytes) -> Verdict:
        return self.known(key) or await self._running.once(key, lambda: self._try(key, order))

    async def _try(self, key: bytes, order: bytes) -> Verdict:
        async with self.pool.places:
            verdict = await _judged(self.pool, order)
        if verdict.word == FIT:
            _remember(self._passed, key, verdict, self._passed_max)
        elif verdict.word != UNKNOWN:
            _remember(self._refused, key, verdict, self._refused_max)
        return verdict


class SchemaChecker:
    """One model's share of the trials."""

    def __init__(self, trials: SchemaTrials) -> None:
        self._trials = trials
        self._turns = trials.pool.model_turns()
        self._waiting = _SharedTasks()

    async def check(self, order: bytes, param: str) -> None:
        """Return if the worker may compile the schema of this order. Raises ApiError. However many callers ask about
        one schema, it is tried once; the trial ends when the last of them leaves."""
        key = hashlib.sha256(order).digest()
        verdict = self._trials.known(key)
        if verdict is None:
            try:
                async with asyncio.timeout(self._trials.pool.kind.wait_s):
                    verdict = await self._waiting.once(key, lambda: self._in_turn(key, order))
            except TimeoutError:
                raise unavailable(f"{param}: schemas that take long keep others waiting. Try again.") from None
        verdict.enforce(param)

    async def _in_turn(self, key: bytes, order: bytes) -> Verdict:
        async with self._turns:
            return await self._trials.verdict(key, order)


class _SharedTasks:
    """Tasks that several callers wait for: each runs once, and is cancelled when its last caller leaves."""

    def __init__(self) -> None:
        self._under_way: dict[bytes, _SharedTask] = {}

    async def once(self, key: bytes, begin: Callable[[], Coroutine[Any, Any, Verdict]]) -> Verdict:
        shared = self._under_way.get(key)
        if shared is None:
            shared = self._under_way[key] = _SharedTask(asyncio.create_task(begin()))
        shared.callers += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.callers -= 1
            if shared.callers == 0:
                del self._under_way[key]
                shared.task.cancel()


@dataclass(slots=True)
class _SharedTask:
    task: asyncio.Task[Verdict]
    callers: int = 0


def too_complex(param: str, why: str) -> ApiError:
    return ApiError(
        f"{param}: this schema is too complex: {why}. Use fewer or shorter alternatives, literals, patterns, multiples "
        "and chains of $ref.",
        status=422,
        param=param,
        code="schema_too_complex",
    )


def _remember(verdicts: OrderedDict[bytes, Verdict], key: bytes, verdict: Verdict, most: int) -> None:
    verdicts[key] = verdict
    if len(verdicts) > most:
        verdicts.popitem(last=False)


async def _judged(pool: SandboxPool, order: bytes) -> Verdict:
    try:
        word, content = await pool.run(order, _SAID_BYTES_MAX, WALL_S)
    except MemoryExhausted:
        return Verdict(TOO_MUCH)
    except ProcessEnded as error:
        if error.code is not None and -error.code in _OWN_SIGNALS:
            return Verdict(TOO_MUCH)
        return _unknown(f"it {error}")
    except SandboxError as error:
        return _unknown(str(error))
    why = content.decode(errors="replace")
    return Verdict(word, why) if word in (FIT, UNFIT, *_TOO_COMPLEX) else _unknown(why)


def _unknown(why: str) -> Verdict:
    log.warning("schema trial failed: %s", why)
    return Verdict(UNKNOWN)


def _library_folders() -> tuple[str, ...]:
    """Where this Python keeps llguidance. A trial without it says that it cannot be imported."""
    found = importlib.util.find_spec("llguidance")
    return (str(Path(found.origin).parent.parent),) if found is not None and found.origin else ()


SCHEMAS: Final = JobKind(
    purpose="JSON schemas",
    module=Path(__file__).with_name("schema_job.py"),
    folders=_library_folders,
    memory_bytes=2**31,
    processes_max=2,
    processes_a_model=1,
    # The trial itself included.
    wait_s=60.0,
    # How a process ends is the verdict, so each has one schema.
    is_reused=False,
    cpu_s=CPU_S,
    wall_s=WALL_S,
)
