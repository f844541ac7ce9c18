"""The processes that run chat templates, from the worker's side.

Owns how many there are, who waits for one, how long each may think, and that one which is late, full or gone is
replaced. Never knows what a template says: the program they run, `template_program.py`, does. They are started when
first needed, by a path and not by a copy of this process, which holds a device. Read `Share.write` first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

SCRIBES_MAX: Final = 4
# Of one model, so that a template which does not end holds up nobody but who asks for it.
SCRIBES_A_MODEL: Final = 2
# A start takes a tenth of a second; on a machine where it takes this long nothing works.
START_S: Final = 30.0
# Six callers of a template that does not end, one after the other. Who still waits then is refused.
WAIT_S: Final = 30.0
# From the end of a scribe's line to the end of its process.
LEAVING_S: Final = 1.0
# Every character is at most so many bytes. Complaints are shorter than this.
CHAR_BYTES_MAX: Final = 4
COMPLAINT_BYTES_MAX: Final = 4_096
# Sandboxes of earlier ones have holes that are known.
JINJA_MIN: Final = (3, 1, 6)

_PROGRAM: Final = Path(__file__).with_name("template_program.py")
_ORDER_HEAD: Final = struct.Struct("!Q")
_ANSWER_HEAD: Final = struct.Struct("!4sQ")
_READY: Final = b"r"
# What the program needs of the environment: the time of day, and where a Python may keep its libraries.
_ENVIRONMENT: Final = ("TZ", "LD_LIBRARY_PATH")

Order = Mapping[str, Any]


class Unwritten(Exception):
    """No prompt came of an order. The text says why."""


class Complaint(Unwritten):
    """The template said no, or has a mistake."""


class Stopped(Unwritten):
    """The template took too much of something, and its process was ended."""


class _Spent(Stopped):
    """The process is full or gone, perhaps not by this template's doing."""


class Unavailable(Unwritten):
    """The template was not run; another time it may be."""


class TooLong(Unwritten):
    def __init__(self, chars: int) -> None:
        super().__init__(f"{chars:,} characters")
        self.chars = chars


class Scribes:
    """All that one worker has. Belongs to the loop on which it is first used."""

    def __init__(self, most: int = SCRIBES_MAX, wait_s: float = WAIT_S) -> None:
        self.turns = asyncio.Semaphore(most)
        self.wait_s = wait_s
        self._idle: list[_Scribe] = []

    async def ask(self, order: bytes, chars_max: int, deadline_s: float) -> tuple[bytes, bytes]:
        """What a scribe answers. Raises Stopped and Unavailable."""
        if self._idle:
            # What one template leaves behind is not the next one's fault: a scribe that was used before and fails is
            # replaced, and only the new one's word counts.
            with contextlib.suppress(_Spent):
                return await self._answer(self._idle.pop(), order, chars_max, deadline_s)
        return await self._answer(await _Scribe.start(), order, chars_max, deadline_s)

    async def close(self) -> None:
        """End those that are idle. The others end with their callers."""
        while self._idle:
            scribe = self._idle.pop()
            scribe.end()
            await scribe.is_gone()

    async def _answer(self, scribe: _Scribe, order: bytes, chars_max: int, deadline_s: float) -> tuple[bytes, bytes]:
        try:
            async with asyncio.timeout(deadline_s):
                answer = await scribe.ask(order, chars_max)
        except BaseException as reason:
            scribe.end()
            if isinstance(reason, TimeoutError):
                raise Stopped(f"did not end within {deadline_s:g} s and was stopped") from None
            raise
        self._idle.append(scribe)
        return answer


class Share:
    """One model's way to the scribes, of which it may keep some busy, but not all."""

    def __init__(self, scribes: Scribes) -> None:
        self._scribes = scribes
        self._turns = asyncio.Semaphore(SCRIBES_A_MODEL)

    async def write(self, order: Order, chars_max: int, deadline_s: float) -> str:
        """The prompt of an order: `template`, `messages`, `tools`, and other `names` that the template sees.

        Raises Unwritten. The deadline counts from when a scribe begins; who waits for one has a bound too.
        """
        told = json.dumps({**order, "chars_max": chars_max}, ensure_ascii=False, separators=(",", ":"))
        raw = told.encode(errors="surrogatepass")
        async with self._turn():
            word, content = await self._scribes.ask(raw, chars_max, deadline_s)
        return _prompt(word, content)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """First come, first served: among those who ask for this model, then among the models."""
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._scribes.wait_s):
                    await held.enter_async_context(self._turns)
                    await held.enter_async_context(self._scribes.turns)
            except TimeoutError:
                raise Unavailable("Chat templates that take too long keep others waiting. Try again.") from None
            yield


class _Scribe:
    """One process, and the line to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        self._process, self._source, self._sink = process, source, sink

    @classmethod
    async def start(cls) -> _Scribe:
        folders = _jinja_folders()
        try:
            scribe = await cls._begun(folders)
        except OSError as reason:
            raise Unavailable(f"No process could be started for chat templates: {reason}.") from reason
        await scribe._greeted()
        return scribe

    @classmethod
    async def _begun(cls, folders: tuple[str, ...]) -> _Scribe:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            source, sink = await asyncio.open_unix_connection(sock=ours)
            undo.callback(sink.close)
            process = await _launched(theirs, folders)
            undo.pop_all()
        return cls(process, source, sink)

    async def ask(self, order: bytes, chars_max: int) -> tuple[bytes, bytes]:
        """Its answer. Raises Stopped if it ends instead, is full, or says more than was asked for."""
        try:
            self._sink.write(_ORDER_HEAD.pack(len(order)) + order)
            await self._sink.drain()
            word, size = _ANSWER_HEAD.unpack(await self._source.readexactly(_ANSWER_HEAD.size))
            if size > CHAR_BYTES_MAX * chars_max + COMPLAINT_BYTES_MAX:
                raise Stopped("wrote without an end and was stopped")
            content = await self._source.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            raise _Spent(f"ended the process that it ran in ({await self._how_it_ended()})") from None
        if word == b"full":
            raise _Spent("took too much memory and was stopped")
        return word, content

    def end(self) -> None:
        """Now, whatever it does. The loop collects what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._sink.close()

    async def is_gone(self) -> None:
        await self._process.wait()

    async def _greeted(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                if await self._source.read(len(_READY)) == _READY:
                    return
            why = await self._how_it_ended()
        except (TimeoutError, OSError) as error:
            why = str(error) or f"it was not ready after {START_S:g} s"
        except BaseException:
            self.end()
            raise
        self.end()
        raise Unavailable(f"The process for chat templates did not start ({why}).")

    async def _how_it_ended(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_S):
                await self._process.wait()
        code = self._process.returncode
        if code is None:
            return "nobody knows how"
        return f"code {code}" if code >= 0 else f"signal {-code}"


async def _launched(line: socket.socket, folders: tuple[str, ...]) -> asyncio.subprocess.Process:
    """Nothing of ours is inherited but its line: no other descriptor, no environment, no folder."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S", str(_PROGRAM), str(os.getpid()), *folders),
        stdin=line.fileno(),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        cwd="/",
    )


@functools.cache
def _jinja_folders() -> tuple[str, ...]:
    """Where this Python has Jinja, so that the program need not look for it. Raises Unavailable if it has none."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    places = [str(Path(spec.origin).parent.parent) for spec in found if spec is not None and spec.origin]
    if len(places) < len(found) or _version("jinja2") < JINJA_MIN:
        wanted = ".".join(map(str, JINJA_MIN))
        raise Unavailable(f"Chat templates need Jinja: {sys.executable} -m pip install 'jinja2>={wanted}'.")
    return tuple(sorted(set(places)))


def _version(package: str) -> tuple[int, ...]:
    try:
        parts = importlib.metadata.version(package).split(".")[: len(JINJA_MIN)]
    except importlib.metadata.PackageNotFoundError:
        # It is there, but nobody wrote down which one it is.
        return ()
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def _prompt(word: bytes, content: bytes) -> str:
    if word == b"long":
        raise TooLong(int(content))
    text = content.decode(errors="replace")
    if word == b"fail":
        raise Complaint(text)
    return text
