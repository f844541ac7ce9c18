"""Which weights were fetched by updates, and which of them a gateway uses. Several gateways may share a root.

Owns the folder `.greenroom` of a root. A file there, named by the hash of a path below the root, says that an update
has fetched what lies at that path, so that it may be deleted. Its content says what lay there: files that were replaced
since are not deleted, and a mark that names no file which lies there counts as none. A gateway that uses the weights
holds a shared lock on it, and one that deletes them an exclusive one, so none deletes what another uses. A gateway that
fetches holds a shared lock on the file `fetching` until what it fetched is marked and in use. Nothing is deleted
meanwhile, because it may be what is fetched. Locks end with their process. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any, Final

from greenroom.library.folders import DEPTH_MAX, FOLDERS_MAX
from greenroom.library.roots import Roots, is_below

FOLDER: Final = ".greenroom"
FETCHING: Final = "fetching"
MARK_BYTES_MAX: Final = 16 * 1024 * 1024
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class DownloadLocks:
    def __init__(self, roots: Callable[[], Roots]) -> None:
        self._roots = roots
        # The locks of the weights that this gateway uses.
        self._held: dict[str, int] = {}

    def begin_fetch(self) -> list[int]:
        """Let no gateway delete anything until these are closed. Raises BlockingIOError while one just does."""
        roots, locks = list(self._roots().real()), list[int]()
        try:
            own = [os.path.join(root, FOLDER, FETCHING) for root in roots]
            for file in own:
                _share(file, os.O_CREAT, locks)
            # A gateway with a root below may be deleting there since before these files were made.
            for file in _fetching_below(roots):
                if file not in own:
                    _share(file, 0, locks)
        except BlockingIOError:
            close_all(locks)
            raise
        return locks

    def mark(self, path: str) -> None:
        """Note that an update of this gateway has just fetched what lies there."""
        if (fd := self._open(path, os.O_CREAT)) is None:
            return
        try:
            # A mark that is not whole is none: without room on the disk these are never deleted.
            with contextlib.suppress(OSError):
                content = json.dumps(_contents(path)).encode()
                # In this order another gateway that reads the same mark meanwhile finds it whole.
                os.pwrite(fd, content, 0)
                os.ftruncate(fd, len(content))
        finally:
            os.close(fd)

    def use(self, path: str) -> bool:
        """Use these weights from now on. True if an update of any gateway fetched them, and they can be locked: only
        then they may be deleted one day. Raises BlockingIOError if another gateway is just deleting them."""
        if self._uses(path):
            return _is_fetched(path, self._held[path])
        fd = self._open(path)
        if fd is None:
            return False
        try:
            is_locked = _lock(fd, fcntl.LOCK_SH)
            if is_locked and os.fstat(fd).st_nlink == 0:
                raise BlockingIOError("they were deleted")
        except BlockingIOError:
            os.close(fd)
            raise
        except OSError:
            is_locked = False
        if not is_locked:
            os.close(fd)
            return False
        # Also without a mark that can be read: it may just be written.
        self._held[path] = fd
        return _is_fetched(path, fd)

    def _uses(self, path: str) -> bool:
        """True if this gateway holds the lock of these weights. If their mark was deleted, there may be others now."""
        if (fd := self._held.get(path)) is None:
            return False
        with contextlib.suppress(OSError):
            if (file := self._file(path)) is not None and os.path.samestat(os.fstat(fd), os.lstat(file)):
                return True
        os.close(self._held.pop(path))
        return False

    def use_only(self, paths: Collection[str]) -> None:
        """Use no others any more."""
        for path in [path for path in self._held if path not in paths]:
            os.close(self._held.pop(path))

    def is_used_elsewhere(self, path: str) -> bool:
        """True if another gateway uses these weights, which an update fetched. Of those in use here, False."""
        if self._uses(path) or (fd := self._open(path)) is None:
            return False
        try:
            _lock(fd, fcntl.LOCK_EX)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    @contextlib.contextmanager
    def deleting(self, path: str, *, force: bool) -> Iterator[None]:
        """Let no other gateway begin to use these weights meanwhile. If they are gone at the end, so is their mark.
        Raises BlockingIOError if another one uses them, unless `force`. Those in use here are not locked again. Whether
        one fetches them is not asked: an operator has ordered them to be deleted, whatever comes after."""
        fd = None if self._uses(path) else self._open(path)
        locks = [] if fd is None else [fd]
        try:
            try:
                if fd is not None:
                    _lock(fd, fcntl.LOCK_EX)
            except BlockingIOError:
                if not force:
                    raise
            yield
        finally:
            self.let_go(path, locks)

    def take(self, path: str) -> list[int] | None:
        """The exclusive locks of fetched weights that are to be deleted; None if they may not be. That is: another
        gateway uses them, or they are no longer what an update fetched. Raises BlockingIOError while a gateway fetches:
        they may be what it fetches."""
        fd = self._held.pop(path, None)
        if fd is None:
            fd = self._open(path)
        if fd is None:
            return None
        locks = [fd]
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink > 0 and (not os.path.lexists(path) or _is_fetched(path, fd)):
                self._expect_no_fetch(path, locks)
                return locks
        except _Fetched as reason:
            close_all(locks)
            raise BlockingIOError(str(reason)) from None
        except OSError:
            # Used elsewhere, or the disk has no locks. The last to use them deletes them.
            pass
        close_all(locks)
        return None

    def _expect_no_fetch(self, path: str, locks: list[int]) -> None:
        """Adds the locks: of the folder with its mark, and of all above it, which may be roots of other gateways.
        Raises _Fetched, also if one above cannot be opened, or OSError if there can be none of its own."""
        own = self._file(path)
        if own is None:
            raise OSError("nothing can be locked")
        # Its own first: a gateway that begins to fetch above makes its file, and then looks for those below.
        root = os.path.dirname(os.path.dirname(own))
        if not _lock_alone(os.path.join(root, FOLDER, FETCHING), os.O_CREAT, locks):
            raise OSError("nothing can be locked")
        folder = path
        while (folder := os.path.dirname(above := folder)) != above:
            file = os.path.join(folder, FOLDER, FETCHING)
            if folder != root and os.path.lexists(file) and not _lock_alone(file, 0, locks):
                raise _Fetched("it cannot be told whether another gateway is fetching")

    def let_go(self, path: str, locks: list[int]) -> None:
        """The end of `take`. If the weights are gone, so is their mark."""
        try:
            if not os.path.lexists(path) and (file := self._file(path)) is not None:
                with contextlib.suppress(OSError):
                    os.unlink(file)
        finally:
            close_all(locks)

    def _open(self, path: str, flags: int = 0) -> int | None:
        file = self._file(path)
        return None if file is None else _opened(file, flags)

    def _file(self, path: str) -> str | None:
        """The mark of this, or where it is to be: in the innermost root. Other gateways may have other roots."""
        roots = sorted((root for root in self._roots().real() if is_below(path, root)), key=len)
        if not roots:
            return None
        folder = path
        while folder != roots[0]:
            folder = os.path.dirname(folder)
            if os.path.lexists(file := _mark(folder, path)):
                return file
        return _mark(roots[-1], path)


def disown(paths: Iterable[str]) -> None:
    """Mark what lies at these paths as ordered by a user: no gateway deletes it any more."""
    for path in paths:
        folder, name = os.path.split(path)
        real = root = os.path.join(os.path.realpath(folder), name)
        while (root := os.path.dirname(above := root)) != above:
            with contextlib.suppress(OSError):
                os.unlink(_mark(root, real))


class _Fetched(Exception):
    """A gateway fetches into this root."""


def _share(file: str, flags: int, locks: list[int]) -> None:
    """Add a shared lock, if the file can be opened. Raises BlockingIOError while a gateway deletes."""
    if (fd := _opened(file, flags)) is not None:
        locks.append(fd)
        _lock(fd, fcntl.LOCK_SH)


def _lock_alone(file: str, flags: int, locks: list[int]) -> bool:
    """Add an exclusive lock; False if the file cannot be opened. Raises _Fetched or OSError."""
    if (fd := _opened(file, flags)) is None:
        return False
    locks.append(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _Fetched("a gateway is fetching") from None
    return True


def _lock(fd: int, how: int) -> bool:
    """False on a volume without locks: nothing on it is ever deleted. Raises BlockingIOError if another holds one."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _fetching_below(roots: Iterable[str]) -> Iterator[str]:
    """The lock files of gateways whose roots are these folders or lie below them, as deep as models are looked for."""
    for root in roots:
        for folder, folders, _ in islice(os.walk(root), FOLDERS_MAX):
            if FOLDER in folders and os.path.lexists(file := os.path.join(folder, FOLDER, FETCHING)):
                yield file
            if folder.count(os.sep) - root.count(os.sep) >= DEPTH_MAX:
                folders.clear()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _opened(file: str, flags: int) -> int | None:
    """To write, or only to lock it where another user's gateway has made it or the volume is read-only."""
    with contextlib.suppress(OSError):
        if flags & os.O_CREAT:
            os.makedirs(os.path.dirname(file), exist_ok=True)
        return os.open(file, os.O_RDWR | _FLAGS | flags, 0o664)
    with contextlib.suppress(OSError):
        return os.open(file, os.O_RDONLY | _FLAGS)
    return None


def _mark(root: str, path: str) -> str:
    name = hashlib.sha256(os.path.relpath(path, root).encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(root, FOLDER, name)


def _contents(path: str) -> dict[str, list[int]]:
    """Size and time of a file, or of all files below a folder, by name. Not inode numbers: some volumes change them."""
    seen: dict[str, list[int]] = {}
    below = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    for file in below or [path]:
        with contextlib.suppress(FileNotFoundError):
            at = os.stat(file)
            if not stat.S_ISDIR(at.st_mode):
                seen[os.path.relpath(file, path)] = [at.st_size, at.st_mtime_ns]
    return seen


def _is_fetched(path: str, fd: int) -> bool:
    """Whether what was marked lies there, and nothing of it was replaced; some of it may be deleted."""
    try:
        content = os.pread(fd, MARK_BYTES_MAX + 1, 0)
        then: Any = json.loads(content) if len(content) <= MARK_BYTES_MAX else None
        now = _contents(path)
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(then, dict):
        return False
    left = {name: seen for name, seen in now.items() if name in then}
    return bool(left) and all(then[name] == seen for name, seen in left.items())
