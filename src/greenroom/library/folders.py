"""The folders below one root as they were seen last, looked at again only where something changed.

Owns what is remembered of a root: each folder's listing until its modification time changes. A folder that changed a
moment ago is listed again, because a second change in the same tick of the clock would not be told by its time. Files
are looked at anew every half minute, because writing into a file does not change its folder.

Links to folders are not followed: what they may lead to lies below a root and is found there. Links to files count if
they lead to a plain file below a root. Names that begin with a dot and files that are being written are passed over.
Folders of the kernel (/proc, /sys, /dev) are not looked into. A look that takes long rests between folders, so that a
root such as / never takes a whole core. What a failing disk does not tell stays as it was seen last. Everything blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeGuard

from greenroom.library.roots import is_below

# A folder below this many others is not looked into.
DEPTH_MAX: Final = 12
# Folders and files of one root; what is beyond is not seen.
FOLDERS_MAX: Final = 50_000
FILES_MAX: Final = 200_000
# A change may hide behind another for as long as the coarsest clock of a file system takes, and some more.
SETTLED_AFTER_S: Final = 3.0
# All files are looked at again after this long, even if no folder changed.
FILES_EVERY_S: Final = 30.0
# Endings of files that a download or copy is still writing.
UNFINISHED: Final = (".incomplete", ".part", ".partial", ".tmp", ".download", ".crdownload", ".aria2")
# A look works for this long without a break; then it rests so many times as long as it works.
UNBROKEN_S: Final = 1.0
REST_SHARE: Final = 4.0
REST_AFTER_S: Final = 0.02
_KERNEL: Final = ("/proc", "/sys", "/dev")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
# By these a name leads to nothing that this gateway can use. None is the number of our own errors.
_GONE: Final = frozenset(
    {None, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}
)
# Folders of the hub's cache: blobs are seen through their links; refs are rewritten in place.
HUB_PREFIX: Final = "models--"
_BLOBS, _REFS = "blobs", "refs"


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A plain file, or a link to one. `added` is when its name appeared, as far as the file system tells."""

    name: str
    bytes: int
    changed_ns: int
    inode: int
    added: float
    sha256: str | None = None


@dataclass(slots=True)
class SeenFolder:
    """What was seen of a folder. `version` is another whenever something in it, or below it, changed."""

    path: str
    name: str
    version: int
    files: dict[str, SeenFile] = field(default_factory=dict)
    folders: dict[str, SeenFolder] = field(default_factory=dict)
    stamp: tuple[int, int, int] | None = None
    is_settled: bool = False

    @property
    def is_repository(self) -> bool:
        """True for a repository in the layout of the hub's cache."""
        return self.name.startswith(HUB_PREFIX) and "snapshots" in self.folders

    def below(self) -> Iterator[SeenFolder]:
        """All folders below it."""
        for folder in self.folders.values():
            yield folder
            yield from folder.below()


class FolderTree:
    """One root. `roots` are the real paths of all roots; others than this one are left to their own trees."""

    def __init__(
        self,
        folder: str,
        roots: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.time,
        pace: Pace | None = None,
    ):
        self.folder = folder
        self._roots = roots
        self._clock = clock
        self._pace = pace or Pace()
        self._kernel_devices: frozenset[int] = frozenset()
        self._real = folder
        self._top: SeenFolder | None = None
        self._changes = 0
        self._files_seen_at = 0.0
        self._looks_at_files = False
        self._folders_left = self._files_left = 0
        # How many folders were listed, for tests and benchmarks.
        self.listed = 0
        # The work of the last look.
        self.worked_s = 0.0
        # Why the last look could not see everything.
        self.error: OSError | None = None

    @property
    def real(self) -> str:
        """Its path with links resolved, as of the last look."""
        return self._real

    def look(self) -> SeenFolder | None:
        """The root as it is now; None if it is not there. The same object each time, unless the root was away."""
        self._real = os.path.realpath(self.folder)
        self._kernel_devices = _kernel_devices()
        self._pace.begin()
        self.error = None
        if self._top is None or self._top.path != self._real:
            self._top = self._new(self._real, os.path.basename(self._real))
        now = self._clock()
        self._looks_at_files = not 0 <= now - self._files_seen_at < FILES_EVERY_S
        if self._looks_at_files:
            self._files_seen_at = now
        self._folders_left, self._files_left = FOLDERS_MAX, FILES_MAX
        if not self._look_at(self._top, 0):
            self._top = None
        self.worked_s = self._pace.worked_s
        return self._top

    def _look_at(self, folder: SeenFolder, depth: int) -> bool:
        """Bring this folder up to date. False if it is not there: then nothing is in it."""
        self._pace.keep()
        try:
            seen = os.stat(folder.path, follow_symlinks=False)
            if seen.st_dev in self._kernel_devices or folder.path in _KERNEL:
                raise PermissionError
            stamp = (seen.st_dev, seen.st_ino, seen.st_mtime_ns)
            if stamp == folder.stamp and folder.is_settled and not self._looks_at_files:
                self._files_left -= len(folder.files)
            else:
                if not stat.S_ISDIR(seen.st_mode):
                    raise NotADirectoryError
                self._list(folder)
                folder.stamp = stamp
                folder.is_settled = folder.is_settled and self._clock() - seen.st_mtime > SETTLED_AFTER_S
        except (OSError, ValueError) as error:
            if may_pass(error):
                self.error, folder.is_settled = error, False
                return True
            self._forget(folder)
            return False
        for child in folder.folders.values():
            before = child.version
            self._look_below(child, depth + 1)
            if child.version != before:
                self._changed(folder)
        return True

    def _look_below(self, folder: SeenFolder, depth: int) -> None:
        self._folders_left -= 1
        is_other_root = folder.path in self._roots() and folder.path != self._real
        if self._folders_left < 0 or depth > DEPTH_MAX or is_other_root:
            self._forget(folder)
        else:
            self._look_at(folder, depth)

    def _new(self, path: str, name: str) -> SeenFolder:
        self._changes += 1
        return SeenFolder(path, name, self._changes)

    def _changed(self, folder: SeenFolder) -> None:
        # One count for the whole tree: a folder that comes back is not taken for the one that was there before.
        self._changes += 1
        folder.version = self._changes

    def _forget(self, folder: SeenFolder) -> None:
        """Nothing is known of it, as if it were empty."""
        if folder.files or folder.folders:
            self._changed(folder)
        folder.files, folder.folders, folder.stamp = {}, {}, None

    def _list(self, folder: SeenFolder) -> None:
        """Read the names in it, and the size and time of its files. Raises OSError."""
        self.listed += 1
        files: dict[str, SeenFile] = {}
        folders: dict[str, SeenFolder] = {}
        is_hub = folder.name.startswith(HUB_PREFIX)
        folder.is_settled = folder.name != _REFS
        with os.scandir(folder.path) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(".") or (is_hub and name == _BLOBS):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders[name] = folder.folders.get(name) or self._new(entry.path, name)
                elif not name.endswith(UNFINISHED) and (file := self._file(entry, folder)) is not None:
                    files[name] = file
                    if self._clock() - file.changed_ns / 1e9 <= SETTLED_AFTER_S:
                        folder.is_settled = False
        if files != folder.files or folders.keys() != folder.folders.keys():
            self._changed(folder)
        folder.files, folder.folders = dict(sorted(files.items())), dict(sorted(folders.items()))

    def _file(self, entry: os.DirEntry[str], folder: SeenFolder) -> SeenFile | None:
        """None for what is no plain file, or leads out of the roots."""
        self._files_left -= 1
        if self._files_left < 0:
            return None
        try:
            own = entry.stat(follow_symlinks=False)
            target, digest = own, None
            if stat.S_ISLNK(own.st_mode):
                real = os.path.realpath(entry.path)
                if not any(is_below(real, root) for root in (self._real, *self._roots())):
                    return None
                target, digest = os.stat(real), _digest(real)
        except (OSError, ValueError) as error:
            if not may_pass(error):
                return None
            self.error, folder.is_settled = error, False
            return folder.files.get(entry.name)
        if not stat.S_ISREG(target.st_mode):
            return None
        return SeenFile(entry.name, target.st_size, target.st_mtime_ns, target.st_ino, own.st_ctime, digest)


class Pace:
    """How fast one look may be. `rest` sleeps, and `clock` tells the work of this thread."""

    def __init__(self, rest: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.thread_time):
        self._rest, self._clock = rest, clock
        self._began = self._rests_from = 0.0

    def begin(self) -> None:
        self._began = self._clock()
        self._rests_from = self._began + UNBROKEN_S

    @property
    def worked_s(self) -> float:
        """The work since the beginning. To be asked in the same thread."""
        return self._clock() - self._began

    def keep(self) -> None:
        """Rest if it is time."""
        worked_s = self._clock() - self._rests_from
        if worked_s >= REST_AFTER_S:
            self._rest(REST_SHARE * worked_s)
            self._rests_from = self._clock()


def may_pass(error: BaseException) -> TypeGuard[OSError]:
    """True for errors of the disk, or of descriptors that ran out, which tell nothing of what is there."""
    return isinstance(error, OSError) and error.errno not in _GONE


def _kernel_devices() -> frozenset[int]:
    """The devices of /proc and /sys, wherever else they are mounted."""
    found = set()
    for path in _KERNEL[:2]:
        with contextlib.suppress(OSError):
            if os.path.ismount(path):
                found.add(os.stat(path).st_dev)
    return frozenset(found)


def _digest(real: str) -> str | None:
    """The hub's cache names blobs of large files by their sha256, and small ones by another hash."""
    folder, name = os.path.split(real)
    return name if os.path.basename(folder) == _BLOBS and _SHA256.fullmatch(name) else None
