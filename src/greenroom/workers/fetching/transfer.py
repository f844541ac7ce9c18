"""One file, from the first byte to a checked whole, through faults and restarts.

Owns the part file: it only ever holds a prefix of one content, so that any later process resumes it. A part is whole
when its size and hash are those that the hub names. Retries are bounded, and begin anew when enough bytes came. Never
gives a file its real name: `places.py` does.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from .disk import Disk, explained, remove
from .failures import FetchError, is_full
from .web import PROGRESS_BYTES, HubAnswer, Web

PIECE_BYTES: Final = 256 * 1024
PIECE_BYTES_MIN: Final = 1024
# How often the room that is left is looked at.
LOOK_EVERY_BYTES: Final = 256 * 1024 * 1024
# In a row, with next to nothing in between.
ATTEMPTS_MAX: Final = 6
# Of a file that came whole and was wrong.
WRONG_MAX: Final = 2
BACKOFF_S: Final = 1.0
BACKOFF_MAX_S: Final = 60.0
# Of the note about a part.
NOTE_BYTES_MAX: Final = 4096
_STRONG_ETAG: Final = re.compile(r'"[\x21\x23-\x7e]{0,1024}"')
_WRONG: Final = ("wrong_size", "wrong_hash", "not_the_file")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`sha256` or `git_sha1` is what the content must have; a plain URL has neither, and maybe no size."""

    path: str
    url: str
    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def digest(self) -> str | None:
        return self.sha256 or self.git_sha1

    def hasher(self) -> Hasher:
        if self.sha256 is not None or self.git_sha1 is None:
            return hashlib.sha256()
        # Git hashes a file together with its kind and size.
        return hashlib.sha1(b"blob %d\0" % (self.size or 0), usedforsecurity=False)


class Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class RateLimit:
    """Bytes per second of all files together. None: as fast as they come."""

    def __init__(self, bytes_s: float | None) -> None:
        self._bytes_s = bytes_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def set(self, bytes_s: float | None) -> None:
        with self._lock:
            self._bytes_s, self._free_at = bytes_s, 0.0

    @property
    def piece_bytes(self) -> int:
        """How much to read at once, so that no wait is long."""
        return PIECE_BYTES if self._bytes_s is None else max(PIECE_BYTES_MIN, min(PIECE_BYTES, int(self._bytes_s / 4)))

    def take(self, size: int) -> None:
        """Return when this many bytes may have come."""
        with self._lock:
            now = time.monotonic()
            if self._bytes_s is None:
                return
            self._free_at = max(self._free_at, now) + size / self._bytes_s
            wait_s = self._free_at - now
        time.sleep(wait_s)


@dataclass(frozen=True, slots=True)
class FetchPatience:
    """How long failures are borne. Tests have less of it."""

    attempts_max: int = ATTEMPTS_MAX
    backoff_s: float = BACKOFF_S
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random
    # Is told why it waits, and how long.
    tell: Callable[[FetchError, float], None] = lambda error, seconds: None

    def wait(self, failures: int, error: FetchError) -> None:
        """Before the next attempt. Raises the error if there is none."""
        if not error.passes or failures >= (WRONG_MAX if error.code in _WRONG else self.attempts_max):
            raise error
        longest_s = min(self.backoff_s * 2.0 ** (failures - 1), BACKOFF_MAX_S)
        wait_s = max(error.retry_after_s or 0.0, longest_s * (0.5 + 0.5 * self.draw()))
        self.tell(error, wait_s)
        self.sleep(wait_s)


class Transfer(ABC):
    def __init__(self, web: Web, disk: Disk, rate: RateLimit, patience: FetchPatience) -> None:
        self._web = web
        self._disk = disk
        self._rate = rate
        self._patience = patience

    @abstractmethod
    def _came(self, file: RemoteFile, have: int) -> None:
        """So much of a file is here. What this raises ends the transfer."""

    def fetch(self, file: RemoteFile, part: Path) -> None:
        """Returns when the part is whole, checked and synced. Raises FetchError; then the part can be resumed."""
        failures = wrongs = 0
        while True:
            before = _size(part)
            try:
                with explained(f"Writing {part.name}"):
                    self._attempt(file, part)
                return
            except FetchError as error:
                if error.code in _WRONG:
                    # What is here may be what is wrong.
                    remove(part)
                    wrongs += 1
                    self._patience.wait(wrongs, error)
                else:
                    failures = 1 if _size(part) >= before + PROGRESS_BYTES else failures + 1
                    self._patience.wait(failures, error)

    def _attempt(self, file: RemoteFile, part: Path) -> None:
        fd = self._disk.open(part)
        try:
            have, hasher = self._resumed(file, fd, part)
            if file.size is None or have != file.size:
                have, hasher = self._receive(file, fd, part, have, hasher)
            if file.digest is not None and hasher.hexdigest() != file.digest:
                raise FetchError("wrong_hash", f"{file.path} came with another content than its hash.", passes=True)
            self._sync(fd, part)
        finally:
            os.close(fd)

    def _sync(self, fd: int, part: Path) -> None:
        """Raises OSError. Bytes that the disk has lost are read as they were as long as memory has them, and the next
        sync says nothing of them: such a part is never resumed."""
        try:
            self._disk.sync(fd)
        except OSError as error:
            if not is_full(error):
                remove(part)
            raise

    def _resumed(self, file: RemoteFile, fd: int, part: Path) -> tuple[int, Hasher]:
        """How much is here, and its hash so far."""
        size = os.fstat(fd).st_size
        if (file.size is not None and size > file.size) or (file.digest is None and _validator_of(part) is None):
            self._disk.truncate(fd, 0)
            size = 0
        hasher, have = file.hasher(), 0
        os.lseek(fd, 0, os.SEEK_SET)
        while have < size and (piece := os.read(fd, PIECE_BYTES)):
            hasher.update(piece)
            have += len(piece)
            self._came(file, have)
        return have, hasher

    def _receive(self, file: RemoteFile, fd: int, part: Path, have: int, hasher: Hasher) -> tuple[int, Hasher]:
        known = _validator_of(part) if file.digest is None else None
        with self._web.get(file.url, have, None if known is None else known.etag) as answer:
            total = _expected(file, answer)
            if answer.start != have:
                self._disk.truncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
                have, hasher = 0, file.hasher()
            if file.digest is None:
                if have and Validator.of(answer) != known:
                    # Nothing else would tell: such a file has no hash.
                    raise FetchError("wrong_size", f"{file.path} has changed while it was fetched.", passes=True)
                self._keep_validator(part, answer)
            looked = have
            self._expect_room(part, have, total)
            for piece in answer.pieces(self._rate.piece_bytes):
                if total is not None and have + len(piece) > total:
                    raise FetchError("wrong_size", f"{file.path} is larger than was said.", passes=True)
                self._rate.take(len(piece))
                self._disk.write_all(fd, piece)
                hasher.update(piece)
                have += len(piece)
                self._came(file, have)
                if have - looked >= LOOK_EVERY_BYTES:
                    looked = have
                    self._expect_room(part, have, total)
        if total is not None and have < total:
            raise FetchError("hub_unreachable", f"{file.path} was cut off by the server.", passes=True)
        return have, hasher

    def _expect_room(self, part: Path, have: int, total: int | None) -> None:
        self._disk.expect_room(part.parent, 0 if total is None else total - have)

    def _keep_validator(self, part: Path, answer: HubAnswer) -> None:
        """What tells a later process that the part is of the same content. Without it, that process begins anew."""
        validator = Validator.of(answer)
        if validator is None:
            remove(_note(part))
        elif _validator_of(part) != validator:
            said = json.dumps({"etag": validator.etag, "bytes": validator.size})
            self._disk.write_file(_note(part), said.encode())


@dataclass(frozen=True, slots=True)
class Validator:
    """By what two answers are known to be of one content: a strong ETag, and the size of the whole."""

    etag: str
    size: int

    @classmethod
    def of(cls, answer: HubAnswer) -> Validator | None:
        """None for a weak ETag, none at all, or an unknown size."""
        if answer.etag is None or answer.total is None or not _STRONG_ETAG.fullmatch(answer.etag):
            return None
        return cls(answer.etag, answer.total)


def _expected(file: RemoteFile, answer: HubAnswer) -> int | None:
    if file.digest is None and not answer.is_delimited:
        why = f"The server does not say how long {file.path} is: a part of it could not be told from the whole."
        raise FetchError("not_the_file", why, passes=True)
    if file.size is not None and answer.total is not None and answer.total != file.size:
        raise FetchError(
            "wrong_size",
            f"{file.path} has {file.size:,} bytes by the hub's list, and the server sends {answer.total:,}.",
            passes=True,
        )
    return answer.total if file.size is None else file.size


def _note(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _validator_of(part: Path) -> Validator | None:
    """None if there is no note of it that can be read."""
    try:
        said = json.loads(_note(part).read_bytes()[:NOTE_BYTES_MAX])
        etag, size = said["etag"], said["bytes"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    is_one = isinstance(etag, str) and _STRONG_ETAG.fullmatch(etag) and type(size) is int
    return Validator(etag, size) if is_one else None


def discard_note(part: Path) -> None:
    """The part has its name: what was noted of it is not needed any more."""
    remove(_note(part))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
