"""Operations on disk: a row, the request that it was made from, and its result, each a file of its own.

    ID.json      the row; replaced as a whole
    ID.request   what to run; gone when the operation has ended
    ID.part      a result that is being written
    ID.result    a result that is complete

Every function blocks, and what one has written survives a crash. A result is complete once it has its name: a crash
between that and the last row loses nothing. Never decides what is kept.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeVar

import msgspec

from greenroom.base.plain_file import open_plain, read_plain, replace_file, sync_folder
from greenroom.errors import OperationStoreFull
from greenroom.telemetry.logs import get_logger

_log = get_logger("operations")

_ID: Final = re.compile(r"[a-z]+-[0-9a-f]{32}")
ROW, REQUEST, PART, RESULT = ".json", ".request", ".part", ".result"
_BUFFER_BYTES: Final = 64 * 1024
# Of the first line of a request or a result, which holds its headers.
_LINE_BYTES_MAX: Final = 256 * 1024

About = TypeVar("About")


class OperationStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self not in (OperationStatus.QUEUED, OperationStatus.RUNNING)


class OperationKind(StrEnum):
    JOB = "job"
    DOWNLOAD = "download"
    LOAD = "load"
    UNLOAD = "unload"
    UPDATE = "update"

    @property
    def is_move(self) -> bool:
        """It changes what is in memory, which does not survive the gateway."""
        return self in (OperationKind.LOAD, OperationKind.UNLOAD, OperationKind.UPDATE)


@dataclass(frozen=True, slots=True)
class OperationError:
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One row. Times are seconds since 1970."""

    id: str
    kind: OperationKind
    tenant: str
    key: str
    """The name of the API key that started it; its permissions are looked up when the operation runs."""
    model: str
    route: str
    priority: int
    retry: bool
    """It may run again after a crash."""
    created: float
    status: OperationStatus = OperationStatus.QUEUED
    started: float | None = None
    ended: float | None = None
    runs: int = 0
    request_bytes: int = 0
    result_bytes: int = 0
    error: OperationError | None = None
    # The request that ran it last.
    request_id: str | None = None

    @property
    def bytes(self) -> int:
        return self.request_bytes + self.result_bytes


class OperationFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_rows(self) -> list[Operation]:
        """All rows that can be read. Others stay on disk, with a warning; files without a row are removed."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        names = sorted(os.listdir(self._folder))
        with_row = {name.removesuffix(ROW) for name in names if name.endswith(ROW)}
        for name in names:
            id, suffix = os.path.splitext(name)
            if _ID.fullmatch(id) and (id not in with_row or suffix in (".new", PART)):
                self._remove(name)
        return [row for id in sorted(with_row) if (row := self._read_row(id)) is not None]

    def write_row(self, row: Operation) -> None:
        """Raises OSError, and then the file is as it was."""
        replace_file(self._path(row.id, ROW), msgspec.json.encode(row).decode())
        self._sync()

    def write_request(self, id: str, about: object, body: Iterable[bytes]) -> int:
        """Returns the bytes written. Raises OSError, and then there is no file."""
        path = self._path(id, REQUEST)
        try:
            with _created(path) as file:
                file.write(first_line(about))
                file.writelines(body)
                _sync_file(file)
                return file.tell()
        except BaseException:
            self.remove(id, REQUEST)
            raise

    def read(self, id: str, suffix: str, about: type[About]) -> tuple[About, BinaryIO]:
        """What the first line says, and the file, open at the body. Raises OSError or msgspec.MsgspecError."""
        file = io.BufferedReader(open_plain(self._path(id, suffix)))
        try:
            return msgspec.json.decode(file.readline(_LINE_BYTES_MAX), type=about), file
        except BaseException:
            file.close()
            raise

    def create_result(self, id: str) -> BinaryIO:
        return _created(self._path(id, PART))

    def complete_result(self, id: str, file: BinaryIO, *, survives: bool = True) -> None:
        """Closes the file, and gives it its name. Raises OSError. It `survives` a power cut unless said otherwise."""
        with file:
            if survives:
                _sync_file(file)
        self._path(id, PART).replace(self._path(id, RESULT))
        if survives:
            self._sync()

    def result_bytes(self, id: str) -> int | None:
        """None if there is no complete result."""
        with contextlib.suppress(OSError):
            return self._path(id, RESULT).stat().st_size
        return None

    def remove(self, id: str, *suffixes: str) -> None:
        """The row goes first: a crash in between leaves files that the next start removes."""
        for suffix in sorted(suffixes, key=(ROW, REQUEST, PART, RESULT).index):
            self._remove(id + suffix)

    def _read_row(self, id: str) -> Operation | None:
        try:
            row = msgspec.json.decode(read_plain(self._path(id, ROW), _LINE_BYTES_MAX), type=Operation)
            if row.id == id and _ID.fullmatch(id):
                return row
            raise ValueError("it names another operation")
        except (OSError, ValueError) as error:
            _log.warning("an operation of an earlier run cannot be read", file=f"{id}{ROW}", error=str(error))
            return None

    def _path(self, id: str, suffix: str) -> Path:
        return self._folder / (id + suffix)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def _sync(self) -> None:
        """Names of files survive a power cut too."""
        sync_folder(self._folder)


def chunks(file: BinaryIO) -> Iterator[bytes]:
    """The rest of the file, which is closed at its end."""
    with file:
        while piece := file.read(_BUFFER_BYTES):
            yield piece


def first_line(about: object) -> bytes:
    """What stands before the body of a request or a result."""
    return msgspec.json.encode(about) + b"\n"


def close_unwritten(file: BinaryIO) -> None:
    """Close a file whose last bytes may not fit and are not wanted."""
    with contextlib.suppress(OSError):
        file.close()


def _created(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    return open(descriptor, "wb", buffering=_BUFFER_BYTES)


def _sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


RETRY_AFTER_S: Final = 10.0


class ResultBudget(Protocol):
    def grow(self, id: str, size: int) -> None:
        """Raises ResultTooLarge or OperationStoreFull if that cannot be kept."""
        ...

    def shrink(self, id: str) -> None: ...


class ResultPart:
    """A result that is being written. `OperationTable.end` completes it."""

    def __init__(self, budget: ResultBudget, stored: OperationFiles, id: str, file: BinaryIO) -> None:
        self._budget = budget
        self._files = stored
        self._id = id
        self._file = file
        self.size = 0

    def write(self, data: bytes) -> None:
        """Ends in the page cache. Raises ResultTooLarge or OperationStoreFull."""
        self._budget.grow(self._id, len(data))
        self.size += len(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise disk_failed(error) from error

    def write_head(self, about: object) -> None:
        """The first line, which `read_result` reads. Raises as `write` does."""
        self.write(first_line(about))

    def complete(self) -> None:
        """Blocks. Raises OSError."""
        self._files.complete_result(self._id, self._file)

    def discard(self) -> None:
        """May be called again."""
        self._budget.shrink(self._id)
        close_unwritten(self._file)
        self._files.remove(self._id, PART)


def disk_failed(error: OSError) -> OperationStoreFull:
    return OperationStoreFull(
        f"The disk of the state directory does not take it: {error.strerror}.", retry_after_s=RETRY_AFTER_S
    )
