"""The audit log: one line of JSON for every signed operation, each with the hash of the line before.

Owns the file, which only grows, and the file beside it with the number and the hash of the last line. A line is on disk
before the operation it permits begins. A line that a crash cut in two stays as it is, and the next line says so. With
write access to these files one can write another chain: keep the hash of the last line elsewhere, and `verify` finds
that out.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from greenroom.base.detached import run_detached
from greenroom.base.plain_file import NotPlainFile, open_plain, read_plain, replaced, sync_folder, why, write_all
from greenroom.errors import AuditUnavailable, ConfigError
from greenroom.features.governance.canonical_json import NotCanonical, canonical, read, sha256_of
from greenroom.features.governance.nonces import WRITE_MAX_S, Run

# The hash before the first line.
BEGINNING: Final = "0" * 64
LINE_BYTES_MAX: Final = 64 * 1024
# The first line after a start. It tells what is wrong with the lines before, if something is.
OPENED: Final = "opened"
CUT: Final = "it was cut; the next start of the gateway marks it"


@dataclass(frozen=True, slots=True)
class LastLine:
    """The last line: its number, counted from 1, and its hash."""

    number: int
    sha256: str


class AuditLog:
    def __init__(self, path: Path, run: Run = run_detached) -> None:
        self._path = path
        self._run = run
        self._fd: int | None = None
        self._head = LastLine(0, BEGINNING)
        self._writing = threading.Lock()
        # What was wrong with the file when it was opened.
        self.problem: str | None = None

    async def open(self) -> None:
        """Go on with the file, or begin it. Raises ConfigError if it cannot be written or is another gateway's."""
        try:
            await self._run(self._open, "open audit log")
        except (OSError, NotPlainFile) as error:
            raise ConfigError(f"governance: the audit log {self._path} cannot be used: {why(error)}") from None

    async def append(self, fields: Mapping[str, Any]) -> None:
        """Write a line; it is on disk when this returns. Raises AuditUnavailable."""
        try:
            async with asyncio.timeout(WRITE_MAX_S):
                await self._run(lambda: self._append(fields), "write audit log")
        except (OSError, TimeoutError) as error:
            said = getattr(error, "strerror", None) or "the disk does not answer"
            raise AuditUnavailable(
                f"The audit log {self._path} cannot be written: {said}.", retry_after_s=5.0
            ) from None

    async def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # --- in a thread ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o600)
        try:
            _lock(fd)
            kept = read_head(self._path)
            chain = _read_chain(self._path, _hash_of(kept))
            # What is left of a cut line becomes a line.
            self._fd, self._head = fd, LastLine(chain.number + (chain.torn is not None), chain.last)
            has_end = chain.torn is None and chain.has_end
            found = chain.problem(kept)
            self.problem = None if found is None else f"line {found[0]}: {found[1]}"
            self._write_line(_opening(self.problem, chain.torn), before=b"" if has_end else b"\n")
            sync_folder(self._path.parent)
        except BaseException:
            self._fd = None
            os.close(fd)
            raise

    def _append(self, fields: Mapping[str, Any]) -> None:
        with self._writing:
            if self._fd is None:
                raise OSError(None, "it is closed")
            size, head = os.fstat(self._fd).st_size, self._head
            try:
                self._write_line(fields)
            except OSError:
                self._take_back(size, head)
                raise

    def _take_back(self, size: int, head: LastLine) -> None:
        """Nothing was permitted by a line that is half on disk, or whose number is not kept beside the log."""
        assert self._fd is not None
        self._head = head
        try:
            os.ftruncate(self._fd, size)
        except OSError:
            # It stays, and the next line would not follow it. The next start marks it and goes on.
            os.close(self._fd)
            self._fd = None

    def _write_line(self, fields: Mapping[str, Any], before: bytes = b"") -> None:
        assert self._fd is not None
        number = self._head.number + 1
        value = {"n": number, "at": int(time.time()), **fields, "prev": self._head.sha256}
        digest = sha256_of(value)
        line = canonical({**value, "sha256": digest})
        if len(line) > LINE_BYTES_MAX:
            raise OSError(None, "the line is too long")
        write_all(self._fd, before + line + b"\n")
        self._head = LastLine(number, digest)
        os.close(replaced(head_path(self._path), canonical({"n": number, "sha256": digest}) + b"\n"))


def head_path(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def _opening(problem: str | None, torn: bytes | None) -> dict[str, Any]:
    cut = {} if torn is None else {"cutBytes": len(torn), "cutSha256": hashlib.sha256(torn).hexdigest()}
    return {"event": OPENED, **({} if problem is None else {"problem": problem}), **cut}


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(None, "another gateway writes it") from None


# --- verification -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verified:
    """`problem` says what is wrong with line `bad_line`; None if nothing is. `cut` are lines that a crash cut."""

    lines: int
    head: str
    cut: tuple[int, ...] = ()
    bad_line: int | None = None
    problem: str | None = None


def verify(path: Path, expected_head: str | None = None) -> Verified:
    """Check the chain, and that it holds the last line that is kept beside it, or elsewhere. Raises OSError. Lines that
    were taken from the end are missed only where every kept hash is older than they are."""
    kept = read_head(path)
    chain = _read_chain(path, _hash_of(kept), expected_head)
    found = chain.problem(kept)
    if found is None and chain.torn is not None:
        found = chain.number + 1, CUT
    if found is None and expected_head not in (None, BEGINNING) and expected_head not in chain.seen:
        found = chain.number + 1, "no line has the expected hash: lines were taken away or changed"
    return Verified(chain.number, chain.last, tuple(chain.cut), *(found or (None, None)))


def read_head(path: Path) -> LastLine | None:
    """What is kept beside the log; None if nothing is. One that cannot be read fits no line."""
    try:
        value = read(read_plain(head_path(path), LINE_BYTES_MAX))
        return LastLine(int(value["n"]), str(value["sha256"]))
    except FileNotFoundError:
        return None
    except (NotCanonical, LookupError, TypeError, ValueError):
        return LastLine(-1, "")


class _Chain:
    """The lines of a log, one after another. Goes on after a bad line, whose number and problem it keeps. `wanted` are
    hashes whose lines are noted; a log may have more lines than memory should hold."""

    def __init__(self, wanted: frozenset[str | None]) -> None:
        self._wanted = wanted
        self.number = 0
        self.last = BEGINNING
        self.cut: list[int] = []
        self.seen: dict[str, int] = {}
        self.torn: bytes | None = None
        # False if only the end of the last line was cut off.
        self.has_end = True
        self._bad: tuple[int, str] | None = None
        # A line that is no JSON, until the next one says that a crash cut it.
        self._doubtful: bytes | None = None

    def add(self, text: bytes) -> None:
        self.number += 1
        if self._doubtful is None and not _is_json(text):
            self._doubtful = text
            return
        value, problem = _read_line(text)
        problem = problem or self._misfit(value)
        if self._doubtful is not None:
            if value.get("cutSha256") == hashlib.sha256(self._doubtful).hexdigest():
                self.cut.append(self.number - 1)
            else:
                self._blame(self.number - 1, "it is no line of this log")
            self._doubtful = None
        if problem is not None:
            self._blame(self.number, problem)
        self.last = str(value.get("sha256", ""))
        if self.last in self._wanted:
            self.seen[self.last] = self.number

    def problem(self, kept: LastLine | None) -> tuple[int, str] | None:
        """The first bad line and what is wrong with it, at the end of the file."""
        if self._doubtful is not None:
            self._blame(self.number, "it is no line of this log")
        if self._bad is None and kept is not None and self.seen.get(kept.sha256) != kept.number:
            return self.number + 1, f"lines were taken away or changed: the last one known had the number {kept.number}"
        return self._bad

    def _misfit(self, value: Mapping[str, Any]) -> str | None:
        # A cut line has a number of its own, and its successor follows the line before it.
        if value.get("prev") != self.last:
            return "it does not follow the line before: lines were removed, moved or put in between"
        if value.get("n") != self.number:
            return f"it says that it has the number {value.get('n')}: lines were removed, moved or put in between"
        if "problem" in value:
            return f"the gateway found when it started: {value['problem']}"
        return None

    def _blame(self, number: int, problem: str) -> None:
        if self._bad is None or number < self._bad[0]:
            self._bad = number, problem


def _hash_of(head: LastLine | None) -> str | None:
    return None if head is None else head.sha256


def _read_chain(path: Path, *wanted: str | None) -> _Chain:
    chain, rest = _Chain(frozenset(wanted)), b""
    with open_plain(path) as file:
        while block := os.read(file.fileno(), 1024 * 1024):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                chain.add(line)
    if rest and _is_json(rest):
        chain.add(rest)
        chain.has_end = False
    elif rest:
        chain.torn = rest
    return chain


def _is_json(text: bytes) -> bool:
    try:
        read(text)
    except NotCanonical:
        return False
    return True


def _read_line(text: bytes) -> tuple[Mapping[str, Any], str | None]:
    """The fields of a line, and what is wrong with it."""
    try:
        value = read(text)
        if not isinstance(value, dict):
            return {}, "it is no line of this log"
        unsealed = {key: one for key, one in value.items() if key != "sha256"}
        if canonical(value) != text or value.get("sha256") != sha256_of(unsealed):
            return value, "it was changed: its hash is another"
    except NotCanonical:
        return {}, "it was changed: it is not in its canonical form"
    return value, None
