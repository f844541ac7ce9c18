"""What the tests of this directory share: commands, identities, and facts about processes to wait for."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from greenroom.process import proc
from greenroom.process.logs import LogRing
from greenroom.process.spawn import Child, Command
from tests.waiting import until

ENGINE = Path(__file__).with_name("small_engine.py")


def new_identity() -> str:
    return f"test-{secrets.token_hex(6)}:run:slot"


def engine_argv(*mode: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", str(ENGINE), *mode)


def engine_command(*mode: str) -> Command:
    return Command(argv=engine_argv(*mode), env={})


def is_alive(pid: int) -> bool:
    seen = proc.stat(pid)
    return seen is not None and not seen.is_dead


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def pids_said(log: LogRing) -> set[int]:
    """The processes an engine says it is made of."""
    return {int(line.removeprefix("pid ")) for line in log.tail(100) if line.startswith("pid ")}


async def pids_of(child: Child, count: int) -> set[int]:
    """Wait until `count` processes of the engine run, and return them."""
    await until(lambda: len(pids_said(child.log)) == count)
    return pids_said(child.log)


def keeper_of(child: Child) -> int:
    seen = proc.stat(child.pid)
    assert seen is not None
    return seen.parent


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
