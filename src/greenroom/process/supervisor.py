"""Runs programs side by side, starts those again that end, and ends all of them together.

Owns when a program is started again: at once at first, then after twice as long each time, until it has run for a
while. Each program has a keeper, so that nothing of it is left when it ends or when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from greenroom.errors import LoadFailed
from greenroom.process.logs import LogRing
from greenroom.process.spawn import Child, Command, Exit, spawn

RESTART_S: Final = 0.5
RESTART_MAX_S: Final = 30.0
# A program that has run for so long is well: when it ends, it is started again soon.
STEADY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)


class NotStarted(Exception):
    """A program gave up its first start, so that all were ended. The text says which."""


class Supervisor:
    def __init__(self, programs: Sequence[Program], stop_s: float, tell: Callable[[str], None]) -> None:
        """`stop_s` is how long programs may take to end after SIGTERM; `tell` is called with a line for people."""
        self._programs = programs
        self._stop_s = stop_s
        self._tell = tell
        self._identity = f"supervised-{secrets.token_hex(8)}"
        self._starts = 0
        self._children: dict[str, Child] = {}
        self._is_ending = asyncio.Event()
        self._stops: set[asyncio.Task[Exit]] = set()

    async def run(self) -> None:
        """Run all until `end`. Raises NotStarted, when nothing runs any more."""
        keeping = [asyncio.create_task(self._keep(program), name=program.name) for program in self._programs]
        try:
            await asyncio.gather(*keeping)
        except BaseException:
            self.end()
            await asyncio.gather(*keeping, return_exceptions=True)
            raise

    def end(self) -> None:
        """Ask all to end. A second call gives them no more time."""
        stop_s = 0.0 if self._is_ending.is_set() else self._stop_s
        self._is_ending.set()
        for child in self._children.values():
            self._stop(child, stop_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each program that runs."""
        for child in self._children.values():
            if child.is_running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    def _stop(self, child: Child, stop_s: float) -> None:
        task = asyncio.create_task(child.stop(stop_s))
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _keep(self, program: Program) -> None:
        clock, pause_s, is_first = asyncio.get_running_loop().time, RESTART_S, True
        while not self._is_ending.is_set():
            began = clock()
            try:
                ended = await self._ran(program)
                what = f"{program.name} ended ({ended})"
                if is_first and ended.code and clock() - began < STEADY_S and not self._is_ending.is_set():
                    raise NotStarted(f"{program.name} could not start ({ended})")
            except LoadFailed as failed:
                # The system may give no process now, and one in a moment.
                if is_first:
                    raise
                what = f"{program.name}: {failed.message}"
            if self._is_ending.is_set():
                return
            is_first = False
            pause_s = RESTART_S if clock() - began >= STEADY_S else pause_s
            self._tell(f"{what}; it is started again in {pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_ending.wait()
            pause_s = min(2 * pause_s, RESTART_MAX_S)

    async def _ran(self, program: Program) -> Exit:
        """Run it once, until nothing of it is left."""
        self._starts += 1
        identity = f"{self._identity}:{program.name}:{self._starts}"
        child = await spawn(Command(program.argv, program.env), identity=identity, log=PrefixedLog(program.name))
        self._children[program.name] = child
        if self._is_ending.is_set():
            self._stop(child, self._stop_s)
        ended = await child.wait()
        await child.stop(0.0)
        del self._children[program.name]
        return ended


class PrefixedLog(LogRing):
    """Passes every line on to standard error, behind the name of the program."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._rest = b""

    def write(self, data: bytes) -> None:
        super().write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._print(lines)

    def flush(self) -> None:
        super().flush()
        lines, self._rest = [self._rest] if self._rest else [], b""
        self._print(lines)

    def _print(self, lines: Sequence[bytes]) -> None:
        # A terminal that is gone must not end the programs.
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                sys.stderr.write(f"{self._name} | {line.decode('utf-8', 'replace')}\n")
            sys.stderr.flush()
