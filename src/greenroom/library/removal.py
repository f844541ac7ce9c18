"""Deletes a model from disk, and says how much came free.

Owns what belongs to a model alone: its files, blobs of the hub's cache that no other snapshot links to, refs to a
snapshot that is gone, and folders that are empty then. The file without which it is no model goes first, so that half
of one is never taken for a model. Folders are opened one below the other from the root and links are never followed:
what a link leads to outside of the repository stays. Blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from greenroom.config.hub import repository_of
from greenroom.library.folders import may_pass
from greenroom.library.records import LibraryRecord
from greenroom.library.roots import is_below

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOBS, _REFS, _SNAPSHOTS = "blobs", "refs", "snapshots"
# Empty files that say which files the hub does not have.
_MARKERS: Final = ".no_exist"
_REF_BYTES_MAX: Final = 256


def remove_files(record: LibraryRecord, others: Collection[LibraryRecord]) -> int:
    """Delete this model and return the bytes that came free. `others` are the records that stay. Raises
    FileNotFoundError if it was gone already, and OSError if something of it cannot be deleted."""
    gone, repository = _gone(record, others), _repository(record)
    if repository is not None:
        return repository.remove(gone)
    freed, _ = _remove_all(record.root, gone)
    _remove_empty(record.root, record.root, {os.path.dirname(path) for path in gone})
    return freed


def removed_paths(record: LibraryRecord, others: Collection[LibraryRecord]) -> list[str]:
    """Everything that `remove_files` would delete."""
    gone, repository = _gone(record, others), _repository(record)
    return gone if repository is None else [*gone, *repository.blobs_of(gone)]


def _gone(record: LibraryRecord, others: Collection[LibraryRecord]) -> list[str]:
    """What goes with this model, the file that makes it a model first; without blobs."""
    kept = {path for other in others for path in paths_of(other)}
    gone = [path for path in paths_of(record) if path not in kept]
    repository = _repository(record)
    if repository is not None and not any(is_below(other.path, repository.snapshot) for other in others):
        # The licence and the readme of a snapshot without a model are of no use.
        gone += [path for path in repository.paths() if path not in gone]
    return gone


def paths_of(record: LibraryRecord) -> list[str]:
    """The paths of its files, the one that makes it a model first."""
    return [os.path.join(record.folder, file.name) for file in record.files]


def _repository(record: LibraryRecord) -> _Repository | None:
    """The repository of the hub's cache that holds this model; None for plain files."""
    inside = os.path.relpath(record.path, record.root).split("/")
    at = next(
        (at for at, name in enumerate(inside) if repository_of(name) and inside[at + 1 :][:1] == [_SNAPSHOTS]), None
    )
    return None if at is None else _Repository(record, inside[: at + 3])


class _Repository:
    """The repository of the hub's cache that holds a record. `inside` is the way from the root to its snapshot."""

    def __init__(self, record: LibraryRecord, inside: Sequence[str]) -> None:
        self._root = record.root
        self.snapshot = os.path.join(record.root, *inside)
        self._folder = os.path.join(record.root, *inside[:-2])
        self._commit = inside[-1]

    def paths(self) -> list[str]:
        """Every file of the snapshot."""
        return [os.path.join(path, name) for path, names, _ in _walk(self._root, self.snapshot) for name in names]

    def blobs_of(self, gone: Collection[str]) -> list[str]:
        """The blobs that no file of any snapshot needs but these."""
        theirs, others = set[str](), set[str]()
        for path, names, folder in _walk(self._root, self._place(_SNAPSHOTS)):
            for name in names:
                (theirs if os.path.join(path, name) in gone else others).update(_blob(name, folder))
        return [os.path.join(self._place(_BLOBS), name) for name in theirs - others]

    def remove(self, gone: list[str]) -> int:
        # Raises, before anything is gone, if it cannot be told which blobs others need.
        self._linked()
        freed, blobs = _remove_all(self._root, gone)
        _remove_empty(self._root, self._place(_SNAPSHOTS), {os.path.dirname(path) for path in gone})
        if not os.path.lexists(self.snapshot):
            self._remove_refs()
        freed += self._remove_blobs(blobs - self._linked())
        if _remove_folder(self._root, self._place(_SNAPSHOTS)):
            self._remove_rest()
        return freed

    def _place(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _linked(self) -> set[str]:
        """The blobs that the snapshots that are left need."""
        folders = _walk(self._root, self._place(_SNAPSHOTS))
        return {blob for _, names, folder in folders for name in names for blob in _blob(name, folder)}

    def _remove_refs(self) -> None:
        for _, names, folder in _walk(self._root, self._place(_REFS)):
            for name in names:
                if _text(name, folder) == self._commit:
                    _unlink(name, folder)

    def _remove_blobs(self, names: Iterable[str]) -> int:
        freed = 0
        with contextlib.suppress(FileNotFoundError), _opened(self._root, self._place(_BLOBS)) as folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    freed += _unlink(name, folder)
        return freed

    def _remove_rest(self) -> None:
        """What is left of a repository without snapshots. A download that is under way keeps its blobs and folder."""
        for _, names, folder in _walk(self._root, self._place(_MARKERS)):
            for name in names:
                _unlink(name, folder)
        for name in (_REFS, _MARKERS):
            below = [path for path, _, _ in _walk(self._root, self._place(name))]
            _remove_empty(self._root, self._folder, below)
        _remove_folder(self._root, self._place(_BLOBS))
        _remove_folder(self._root, self._folder)


def _remove_all(root: str, paths: Sequence[str]) -> tuple[int, set[str]]:
    """Delete these files. Returns the bytes that came free, and the blobs that they linked to. The first must be there;
    the others may be gone already. Raises OSError."""
    freed, blobs = 0, set[str]()
    for number, path in enumerate(paths):
        try:
            with _opened(root, os.path.dirname(path)) as folder:
                name = os.path.basename(path)
                blobs |= _blob(name, folder)
                freed += _unlink(name, folder)
        except FileNotFoundError:
            if number == 0:
                raise
    return freed, blobs


@contextlib.contextmanager
def _opened(root: str, folder: str) -> Iterator[int]:
    """A descriptor of this folder, reached from the root without following a link. Raises OSError."""
    relative = os.path.relpath(folder, root)
    steps = [] if relative == "." else relative.split("/")
    if ".." in steps:
        raise OSError(errno.EXDEV, "lies outside of its root", folder)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for step in steps:
            below = os.open(step, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _walk(root: str, top: str) -> Iterator[tuple[str, list[str], int]]:
    """Each folder below this one, and itself: path, names of files, descriptor; the deepest first. Raises OSError if
    the disk fails."""

    def failed(error: OSError) -> None:
        if may_pass(error):
            raise error

    try:
        with _opened(root, top) as descriptor:
            for path, _, names, folder in os.fwalk(".", topdown=False, onerror=failed, dir_fd=descriptor):
                yield os.path.normpath(os.path.join(top, path)), names, folder
    except (FileNotFoundError, NotADirectoryError):
        return


def _unlink(name: str, folder: int) -> int:
    """Delete it and return the bytes that came free. Raises OSError."""
    seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
    os.unlink(name, dir_fd=folder)
    return seen.st_size if stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1 else 0


def _blob(name: str, folder: int) -> set[str]:
    """The blob that a file of a snapshot links to, if it is a link to one. Raises OSError if the disk fails."""
    try:
        above, blob = os.path.split(os.readlink(name, dir_fd=folder))
    except OSError as error:
        if error.errno != errno.EINVAL and may_pass(error):
            raise
        return set()
    return {blob} if os.path.basename(above) == _BLOBS and blob not in ("", ".", "..") else set()


def _text(name: str, folder: int) -> str:
    """The first bytes of a file, as text; empty if it cannot be read."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _REF_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _remove_folder(root: str, path: str) -> bool:
    """Remove a folder if it is empty. True if it is not there any more."""
    try:
        with _opened(root, os.path.dirname(path)) as above:
            os.rmdir(os.path.basename(path), dir_fd=above)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _remove_empty(root: str, top: str, folders: Iterable[str]) -> None:
    """Remove these folders and those above them, below `top`, as long as they are empty."""
    for folder in sorted(folders, key=len, reverse=True):
        while folder != top and is_below(folder, top) and _remove_folder(root, folder):
            folder = os.path.dirname(folder)
