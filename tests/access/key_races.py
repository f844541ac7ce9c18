"""Several processes change one key file: `python -m tests.access.key_races at_once|killed FILE`."""

from __future__ import annotations

import os
import random
import signal
import stat
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from greenroom.access.key_file import FileKey, add_key, read_keys, revoke_key
from greenroom.access.keys import new_key

NOW = datetime(2026, 11, 17, tzinfo=UTC)


def key(name: str) -> FileKey:
    return FileKey(name=name, sha256=new_key()[1], created=NOW)


def in_child(work: Callable[[int], None], who: int) -> int:
    """Run this in a child of this process. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work(who)
    except BaseException:
        os._exit(1)
    os._exit(0)


def at_once(file: Path) -> None:
    def change(who: int) -> None:
        for number in range(20):
            add_key(file, key(f"{who}-{number}"))
            if number % 4 == 0:
                revoke_key(file, f"{who}-{number}", NOW)

    children = [in_child(change, who) for who in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    found = {one.name: one.revoked is not None for one in read_keys(file)}
    assert found == {"first": False} | {f"{who}-{n}": n % 4 == 0 for who in range(4) for n in range(20)}


def killed(file: Path) -> None:
    """Three at a time, killed at random moments: the file is whole, and has every key whose command ended."""
    chance = random.Random(18)
    told: set[str] = set()
    for turn in range(30):
        reader, writer = os.pipe()

        def add(who: int, turn: int = turn, writer: int = writer) -> None:
            for number in range(1_000):
                add_key(file, key(name := f"{turn}-{who}-{number}"))
                os.write(writer, f"{name}\n".encode())

        children = [in_child(add, who) for who in range(3)]
        os.close(writer)
        # On a slow machine nothing may have been told in so short a time: sometimes wait for it.
        said = os.read(reader, 1) if turn % 10 == 0 else b""
        time.sleep(chance.uniform(0, 0.05))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with os.fdopen(reader, "rb") as rest:
            told |= set((said + rest.read()).decode().split())
        assert told <= {one.name for one in read_keys(file)}, turn
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # Nothing waits for a lock of the dead, and a draft that one of them left blocks nothing.
    add_key(file, key("last"))
    assert told and read_keys(file)[-1].name == "last"


if __name__ == "__main__":
    {"at_once": at_once, "killed": killed}[sys.argv[1]](Path(sys.argv[2]))
