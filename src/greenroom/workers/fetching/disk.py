"""The writes of a download: each may fail, and each is one call that a test can make fail. Owns how files survive a
crash: bytes are synced before a file gets its name, and the folder after."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .failures import FetchError, of_disk

# Left free for others beside what a download still needs.
RESERVE_BYTES: Final = 64 * 1024 * 1024


class Disk:
    """All methods raise OSError."""

    def open(self, path: Path) -> int:
        """A file for reading and writing, made if it is not there. A link at its name is never followed."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, path: Path, to: Path) -> None:
        os.replace(path, to)

    def link(self, target: str, path: Path) -> None:
        os.symlink(target, path)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def free_bytes(self, path: Path) -> int:
        room = os.statvfs(path)
        return room.f_bavail * room.f_frsize

    # --- made of these ------------------------------------------------------------------------------------------------

    def write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.write(fd, view) :]

    def name(self, path: Path, to: Path) -> None:
        """Give a synced file its name, for good."""
        self.rename(path, to)
        self.sync_folder(to.parent)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def write_file(self, path: Path, content: bytes) -> None:
        """Replace a small file as a whole."""
        new = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            fd = self.open(new)
            try:
                self.truncate(fd, 0)
                self.write_all(fd, content)
                self.sync(fd)
            finally:
                os.close(fd)
            self.name(new, path)
        except BaseException:
            remove(new)
            raise

    def link_as(self, target: str, path: Path) -> None:
        """A link at this name, instead of what was there."""
        new = path.with_name(f".{path.name}.{os.getpid()}.new")
        remove(new)
        self.link(target, new)
        try:
            self.rename(new, path)
        except BaseException:
            remove(new)
            raise

    def expect_room(self, path: Path, size: int) -> None:
        """Raises FetchError unless this many bytes more fit."""
        free = self.free_bytes(path)
        if free < size + RESERVE_BYTES:
            raise FetchError(
                "disk_full",
                f"{size:,} bytes are still to come, and {path} has {free:,} bytes free, of which "
                f"{RESERVE_BYTES:,} stay so. What was fetched stays and is resumed.",
            )


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn errors of the file system into FetchError."""
    try:
        yield
    except OSError as error:
        raise of_disk(error, doing) from error


def try_lock(path: Path) -> int | None:
    """The lock of this file, as huggingface_hub's own processes take it, until it is closed; None while another holds
    it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    is_held = False
    try:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Of a file that the process which held it before has removed, a lock excludes no other process.
            is_held = os.path.samestat(os.fstat(fd), os.stat(path))
    finally:
        if not is_held:
            os.close(fd)
    return fd if is_held else None
