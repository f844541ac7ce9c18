"""Processes that run foreign code for the worker: chat templates and JSON schemas, each kind in a pool of its own.

Owns the processes: how many there are, how they start, how long a job may take, and that a process which is late, full
or gone is replaced. Each starts by path, never as a copy of this process, which holds a device, and inherits nothing
but one socket. `program.py` is the other end. Independent of what jobs do. Read `SandboxPool.run` first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# A start takes a tenth of a second. A machine that needs this long cannot serve anyway.
START_S: Final = 30.0
# From the end of a socket to the end of its process.
EXIT_S: Final = 1.0

PROGRAM: Final = Path(__file__).with_name("program.py")
_ORDER_HEAD: Final = struct.Struct("!Q")
_ANSWER_HEAD: Final = struct.Struct("!4sQ")
_READY: Final = b"r"
_FULL: Final = b"full"
# All that the program sees of the environment: the time zone, and where a Python may keep its libraries.
_ENVIRONMENT: Final = ("TZ", "LD_LIBRARY_PATH")


class SandboxError(Exception):
    """A job has no result. The text says why."""


class Unavailable(SandboxError):
    """The job was not run; a later attempt may work."""


class Stopped(SandboxError):
    """The job took too much of something and its process was ended. The text follows the job's name."""


class TimedOut(Stopped):
    def __init__(self, deadline_s: float) -> None:
        super().__init__(f"did not end within {deadline_s:g} s and was stopped")


class _Broken(Stopped):
    """The process is of no further use, perhaps because of an earlier job."""


class MemoryExhausted(_Broken):
    def __init__(self) -> None:
        super().__init__("took too much memory and was stopped")


class ProcessEnded(_Broken):
    """The process ended before it answered. A negative code is the number of a signal; None: not known yet."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"ended the process that it ran in ({_described(code)})")
        self.code = code


@dataclass(frozen=True, slots=True)
class JobKind:
    """One kind of job: the module that does it, and the bounds of its processes."""

    purpose: str
    """What it is for, as error messages say it: "chat templates"."""
    module: Path
    """Has `answer(order: bytes) -> tuple[bytes, bytes]`, a word of four letters and the content."""
    folders: Callable[[], tuple[str, ...]]
    """Where this Python keeps the packages that the module imports. May raise Unavailable."""
    memory_bytes: int
    """Beyond what the process needs by itself."""
    processes_max: int
    processes_a_model: int
    """Fewer than `processes_max`, so that one model's jobs never keep all others waiting."""
    wait_s: float
    """A caller that still waits for a process after this long is refused."""
    is_reused: bool
    """A process runs one job after the other."""
    kept_bytes: int = 0
    """A reused process that has grown by more than this ends after its answer; the next job gets a fresh one."""
    cpu_s: int | None = None
    """Of processor time, for the whole process. SIGXCPU ends it then."""
    wall_s: int | None = None
    """SIGALRM ends the process after this long."""
    start_s: float = START_S
    program: Path = PROGRAM


class SandboxPool:
    """All processes of one kind that this worker has. Belongs to the loop on which it is first used."""

    def __init__(self, kind: JobKind) -> None:
        self.kind = kind
        self.places = asyncio.Semaphore(kind.processes_max)
        """Hold one around `run`."""
        self._idle: list[_Process] = []

    def model_turns(self) -> asyncio.Semaphore:
        """A model's share. Hold it around one of `places`; both are granted first come, first served."""
        return asyncio.Semaphore(self.kind.processes_a_model)

    async def run(self, order: bytes, answer_bytes_max: int, deadline_s: float) -> tuple[bytes, bytes]:
        """The word and content that a process answers. The deadline begins when it is ready. Raises SandboxError."""
        if self._idle:
            # What one job leaves behind is not the fault of the next: a process that was used before and breaks is
            # replaced, and only the new one's result counts.
            with contextlib.suppress(_Broken):
                return await self._answer(self._idle.pop(), order, answer_bytes_max, deadline_s)
        return await self._answer(await _Process.start(self.kind), order, answer_bytes_max, deadline_s)

    async def close(self) -> None:
        """End the idle processes. The others end with their callers."""
        while self._idle:
            process = self._idle.pop()
            process.end()
            await process.wait()

    async def _answer(
        self, process: _Process, order: bytes, answer_bytes_max: int, deadline_s: float
    ) -> tuple[bytes, bytes]:
        is_kept = False
        try:
            async with asyncio.timeout(deadline_s):
                answer = await process.ask(order, answer_bytes_max)
            is_kept = self.kind.is_reused
        except TimeoutError:
            raise TimedOut(deadline_s) from None
        finally:
            if is_kept:
                self._idle.append(process)
            else:
                process.end()
        return answer


class _Process:
    """One process and the socket to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        self._process, self._source, self._sink = process, source, sink

    @classmethod
    async def start(cls, kind: JobKind) -> _Process:
        """A process that is ready for a job. Raises Unavailable."""
        command = _command(kind)
        try:
            process = await cls._spawned(command)
        except OSError as reason:
            raise Unavailable(f"No process could be started for {kind.purpose}: {reason}.") from reason
        await process._await_ready(kind)
        return process

    @classmethod
    async def _spawned(cls, command: list[str]) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            source, sink = await asyncio.open_unix_connection(sock=ours)
            undo.callback(sink.close)
            process = await _launched(command, theirs)
            undo.pop_all()
        return cls(process, source, sink)

    async def ask(self, order: bytes, answer_bytes_max: int) -> tuple[bytes, bytes]:
        """Its answer. Raises Stopped if it ends instead, is full, or says more than was asked for."""
        try:
            self._sink.write(_ORDER_HEAD.pack(len(order)) + order)
            await self._sink.drain()
            word, size = _ANSWER_HEAD.unpack(await self._source.readexactly(_ANSWER_HEAD.size))
            if size > answer_bytes_max:
                raise Stopped("wrote without an end and was stopped")
            content = await self._source.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            raise ProcessEnded(await self._exit_code()) from None
        if word == _FULL:
            raise MemoryExhausted
        return word, content

    def end(self) -> None:
        """Kill it, whatever it does. The loop reaps it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._sink.close()

    async def wait(self) -> None:
        await self._process.wait()

    async def _await_ready(self, kind: JobKind) -> None:
        try:
            async with asyncio.timeout(kind.start_s):
                if await self._source.read(len(_READY)) == _READY:
                    return
            why = _described(await self._exit_code())
        except (TimeoutError, OSError) as error:
            why = str(error) or f"it was not ready after {kind.start_s:g} s"
        except BaseException:
            self.end()
            raise
        self.end()
        raise Unavailable(f"The process for {kind.purpose} did not start ({why}).")

    async def _exit_code(self) -> int | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S):
                await self._process.wait()
        return self._process.returncode


def _command(kind: JobKind) -> list[str]:
    setup = {
        "worker": os.getpid(),
        "module": str(kind.module),
        "folders": kind.folders(),
        "memory_bytes": kind.memory_bytes,
        "kept_bytes": kind.kept_bytes,
        "cpu_s": kind.cpu_s,
        "wall_s": kind.wall_s,
    }
    return [sys.executable, "-I", "-S", str(kind.program), json.dumps(setup)]


async def _launched(command: list[str], line: socket.socket) -> asyncio.subprocess.Process:
    """Start it with nothing of ours but its socket: no other descriptor, no environment, no working directory."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=line.fileno(),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        cwd="/",
    )


def _described(code: int | None) -> str:
    if code is None:
        return "its exit code is not known"
    return f"code {code}" if code >= 0 else f"signal {-code}"
