"""Which weights were fetched by updates, and which of them a gateway uses. Several gateways may share a root.

Owns the folder `.greenroom` of a root. A file there, named by the hash of a path below the root, says that an update
has fetched what lies at that path, so that it may be deleted. A gateway that uses the weights holds a shared lock on
it, and one that deletes them an exclusive one, so none deletes what another uses. Locks end with their process.
Everything here blocks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Collection
from typing import Final

from greenroom.library.roots import Roots, is_below

FOLDER: Final = ".greenroom"


class FetchedMarks:
    def __init__(self, roots: Callable[[], Roots]) -> None:
        self._roots = roots
        # The locks of the weights that this gateway uses.
        self._held: dict[str, int] = {}

    def use(self, path: str, *, is_fetched: bool) -> bool:
        """Use these weights from now on; with `is_fetched`, an update of this gateway fetched them.

        True if an update of any gateway did, and they can be locked: only then they may be deleted one day. Raises
        BlockingIOError if another gateway is just deleting them.
        """
        if path in self._held:
            return True
        fd = self._open(path, os.O_CREAT if is_fetched else 0)
        if fd is None:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:
                raise BlockingIOError("they were deleted")
        except BlockingIOError:
            os.close(fd)
            raise
        except OSError:
            # A volume without locks: nothing on it is ever deleted.
            os.close(fd)
            return False
        self._held[path] = fd
        return True

    def use_only(self, paths: Collection[str]) -> None:
        """Use no others any more."""
        for path in [path for path in self._held if path not in paths]:
            os.close(self._held.pop(path))

    def take(self, path: str) -> int | None:
        """The exclusive lock of fetched weights that are to be deleted; None if another gateway uses them."""
        fd = self._held.pop(path, None)
        if fd is None:
            fd = self._open(path, os.O_CREAT)
        if fd is None:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Used elsewhere, or the disk has no locks. The last to use them deletes them.
            os.close(fd)
            return None
        return fd

    def let_go(self, path: str, fd: int) -> None:
        """The end of `take`. If the weights are gone, so is their mark."""
        try:
            if not os.path.lexists(path) and (file := self._file(path)) is not None:
                os.unlink(file)
        finally:
            os.close(fd)

    def _open(self, path: str, flags: int) -> int | None:
        file = self._file(path)
        if file is None:
            return None
        try:
            if flags & os.O_CREAT:
                os.makedirs(os.path.dirname(file), exist_ok=True)
            return os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o664)
        except OSError:
            return None

    def _file(self, path: str) -> str | None:
        root = next((root for root in self._roots().real() if is_below(path, root)), None)
        if root is None:
            return None
        name = hashlib.sha256(os.path.relpath(path, root).encode("utf-8", "surrogateescape")).hexdigest()
        return os.path.join(root, FOLDER, name)
