"""Whether a JSON schema may be compiled in this process: tried in one that may fall, and remembered.

Owns the processes of `schema_trial.py`, how many run at once and for whom, and what came of them. A schema is seldom
sent once, so that few requests wait for a trial, which takes a tenth of a second. Never keeps a schema: only a hash of
it. What a trial could not find out, because the machine had no time or memory for it, is not held against the schema.
Read `Share.check` first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..api.refusals import Refused, unavailable
from .schema_trial import CPU_S, NO_LIBRARY, TOO_MUCH, TOO_SLOW, WALL_S

AT_ONCE: Final = 2
# Of one model, so that its bad schemas hold up nobody else's.
AT_ONCE_A_MODEL: Final = 1
# Who still waits then is refused.
WAIT_S: Final = 60.0
PASSED_MAX: Final = 1_024
# Apart from those that passed, so that whoever invents bad ones pushes out no good one.
REFUSED_MAX: Final = 1_024
_PROGRAM: Final = Path(__file__).with_name("schema_trial.py")

_FIT: Final = 200
_UNFIT: Final = 400
_TOO_COMPLEX: Final = 422
_UNKNOWN: Final = 503
_COMPILES_LONG: Final = f"to compile it takes more than {CPU_S} s or too much memory"
# Ends that are the schema's own doing. A kill is none: it comes from the kernel, when the whole machine has no memory.
_OWN_DOING: Final = {
    TOO_SLOW: "to follow it takes too long",
    TOO_MUCH: _COMPILES_LONG,
    -signal.SIGXCPU: _COMPILES_LONG,
    -signal.SIGSEGV: _COMPILES_LONG,
    -signal.SIGBUS: _COMPILES_LONG,
    -signal.SIGABRT: _COMPILES_LONG,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial found, as the status of a request, and why."""

    status: int
    why: str = ""

    def enforce(self, param: str) -> None:
        """Return if the schema may be compiled. Raises Refused, for the caller who sent it in this field."""
        if self.status == _UNFIT:
            raise Refused(f"{param}: this schema cannot be held to: {self.why}", param=param)
        if self.status == _TOO_COMPLEX:
            raise too_complex(param, self.why)
        if self.status == _UNKNOWN:
            raise unavailable(f"{param}: this schema could not be tried. Try again.")


class SchemaTrials:
    """All that one worker has. Belongs to the loop on which it is first used."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)
        self._running = _Together()
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
        async with self._places:
            verdict = await _judged(order)
        if verdict.status == _FIT:
            _remember(self._passed, key, verdict, PASSED_MAX)
        elif verdict.status != _UNKNOWN:
            _remember(self._refused, key, verdict, REFUSED_MAX)
        return verdict


class Share:
    """One model's way to the trials, of which it may keep some busy, but not all."""

    def __init__(self, trials: SchemaTrials) -> None:
        self._trials = trials
        self._turns = asyncio.Semaphore(AT_ONCE_A_MODEL)
        self._waiting = _Together()

    async def check(self, order: bytes, param: str) -> None:
        """Return if the schema of this order is fit to be compiled here. Raises Refused.

        However many ask about one schema, it is tried once; the trial ends with the last of them.
        """
        key = hashlib.sha256(order).digest()
        verdict = self._trials.known(key)
        if verdict is None:
            try:
                async with asyncio.timeout(WAIT_S):
                    verdict = await self._waiting.once(key, lambda: self._in_turn(key, order))
            except TimeoutError:
                raise unavailable(f"{param}: schemas that take long keep others waiting. Try again.") from None
        verdict.enforce(param)

    async def _in_turn(self, key: bytes, order: bytes) -> Verdict:
        """First come, first served: among those who ask for this model, then among the models."""
        async with self._turns:
            return await self._trials.verdict(key, order)


class _Together:
    """Work that several may wait for: it is done once, and ended when the last of them leaves."""

    def __init__(self) -> None:
        self._under_way: dict[bytes, _Work] = {}

    async def once(self, key: bytes, begin: Callable[[], Coroutine[Any, Any, Verdict]]) -> Verdict:
        work = self._under_way.get(key)
        if work is None:
            work = self._under_way[key] = _Work(asyncio.create_task(begin()))
        work.waiting += 1
        try:
            return await asyncio.shield(work.task)
        finally:
            work.waiting -= 1
            if work.waiting == 0:
                del self._under_way[key]
                work.task.cancel()


@dataclass(slots=True)
class _Work:
    task: asyncio.Task[Verdict]
    waiting: int = 0


def too_complex(param: str, why: str) -> Refused:
    return Refused(
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


async def _judged(order: bytes) -> Verdict:
    try:
        code, said = await _tried(order)
    except TimeoutError:
        return _unknown(f"it had not ended after {WALL_S} s")
    except OSError as error:
        return _unknown(f"no process could be started: {error}")
    if code == 0:
        return Verdict(_UNFIT, said) if said else Verdict(_FIT)
    if code in _OWN_DOING:
        return Verdict(_TOO_COMPLEX, _OWN_DOING[code])
    if code == NO_LIBRARY:
        return _unknown(said)
    return _unknown(f"code {code}" if code > 0 else f"signal {-code}")


def _unknown(why: str) -> Verdict:
    log.warning("schema trial failed: %s", why)
    return Verdict(_UNKNOWN)


async def _tried(order: bytes) -> tuple[int, str]:
    """How the trial ended, and what it said. Raises TimeoutError, and OSError if it could not begin."""
    found = importlib.util.find_spec("llguidance")
    folder = str(Path(found.origin).parent.parent) if found is not None and found.origin else ""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid()), folder),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
        cwd="/",
    )
    try:
        async with asyncio.timeout(WALL_S):
            said, _ = await process.communicate(order)
            return await process.wait(), said.decode(errors="replace")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
