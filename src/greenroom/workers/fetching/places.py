"""Where files go: the hub's cache, in the layout that huggingface_hub has, or a plain folder.

Owns names and locks. A file that was checked is kept under the name of its content first; the names that people and
engines know are given when all files of a download are there, so that half a model is never found.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, Protocol

from .disk import Disk, remove
from .failures import FetchError
from .hub import is_inside
from .transfer import PIECE_BYTES, RemoteFile, discard_note

# Of a content's hash in the name of a hidden file.
_MARK_CHARS: Final = 16
_HIDDEN: Final = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?:part|whole|part\.etag)")
_LOCK: Final = ".greenroom.lock"
# Of a repository in the hub's cache.
_CACHED: Final = "models--"

# What a folder is that can never be written to, as opposed to a disk that is full.
_NO_FOLDER: Final = (errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ELOOP)
_CACHES: Final = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "TRANSFORMERS_CACHE")


def _named_by(cache: Path) -> str:
    """The variable that names this folder, if it is one."""
    told = ((name, os.path.abspath(os.path.expanduser(os.environ.get(name) or "."))) for name in _CACHES)
    found = next((name for name, path in told if os.environ.get(name) and cache.is_relative_to(path)), None)
    return "" if found is None else f" {found} says so: set it to a folder that can be written to."


class FetchTarget(Protocol):
    """Methods raise OSError or FetchError."""

    def prepare(self, files: Sequence[RemoteFile]) -> Path:
        """Make folders. Returns one that lies on the disk in question."""

    def lock_of(self, file: RemoteFile | None) -> Path | None:
        """The lock for a whole download, or for one file of it; None where there is none."""

    def part(self, file: RemoteFile) -> Path: ...

    def has(self, file: RemoteFile) -> bool:
        """True if the whole file is here, checked."""

    def keep(self, file: RemoteFile) -> None:
        """The part is whole."""

    def finish(self, files: Sequence[RemoteFile]) -> Path:
        """Give all files their names. Returns the folder of the model, or its only file."""


class CachePlace:
    """A repository in the hub's cache: blobs by their hash, and for each commit a folder of links to them."""

    def __init__(self, disk: Disk, cache: Path, repo: str, commit: str, revision: str | None) -> None:
        self._disk = disk
        self._cache = cache
        name = _CACHED + repo.replace("/", "--")
        self._folder = cache / name
        self._locks = cache / ".locks" / name
        self._blobs = self._folder / "blobs"
        self._commit = commit
        self._revision = revision or "main"
        if not is_inside(self._revision):
            raise FetchError("revision_not_found", f"{revision!r:.100} is no name of a revision.")

    def prepare(self, files: Sequence[RemoteFile]) -> Path:
        try:
            for folder in (self._blobs, self._locks):
                self._disk.make_folder(folder)
        except OSError as error:
            if error.errno not in _NO_FOLDER:
                raise
            why = f"Models cannot be put into {self._cache}: {error.strerror}."
            raise FetchError("disk_error", why + _named_by(self._cache)) from error
        return self._blobs

    def lock_of(self, file: RemoteFile | None) -> Path | None:
        return None if file is None else self._locks / f"{file.digest}.lock"

    def _blob(self, file: RemoteFile) -> Path:
        assert file.digest is not None, "every file of a repository has a hash"
        return self._blobs / file.digest

    def part(self, file: RemoteFile) -> Path:
        blob = self._blob(file)
        return blob.with_name(f"{blob.name}.part")

    def has(self, file: RemoteFile) -> bool:
        """Blobs get their names when they are checked; one of another size is fetched again."""
        return _is_of(self._blob(file), file.size)

    def keep(self, file: RemoteFile) -> None:
        self._disk.name(self.part(file), self._blob(file))

    def finish(self, files: Sequence[RemoteFile]) -> Path:
        snapshot = self._folder / "snapshots" / self._commit
        folders = {snapshot}
        for file in files:
            link = snapshot / file.path
            target = os.path.relpath(self._blob(file), link.parent)
            self._disk.make_folder(link.parent)
            if not (link.is_symlink() and os.readlink(link) == target):
                self._disk.link_as(target, link)
            folders.add(link.parent)
        for folder in folders:
            self._disk.sync_folder(folder)
        if self._revision != self._commit:
            ref = self._folder / "refs" / self._revision
            self._disk.make_folder(ref.parent)
            self._disk.write_file(ref, self._commit.encode())
        return snapshot


class FolderPlace:
    """A plain folder below a root. Hidden files beside the real names hold what is not finished."""

    def __init__(self, disk: Disk, folder: Path, root: Path | None) -> None:
        """Without a root the folder may be anywhere."""
        self._disk = disk
        self._given = folder
        self._folder = folder
        self._root = root

    def prepare(self, files: Sequence[RemoteFile]) -> Path:
        """Raises FetchError if a link leads out of the root or out of the folder, a folder has a file's name, or one
        would pass for a repository in a cache."""
        cached = (name for file in files for name in file.path.split("/")[:-1] if name.startswith(_CACHED))
        if name := next(cached, None):
            why = f"The folder {name} would pass for another repository here: fetch this one without `destination`."
            raise FetchError("bad_repo", why)
        if self._root is not None and not is_below(self._given, self._root):
            raise _outside(self._given)
        self._disk.make_folder(self._given)
        self._folder = self._given.resolve(strict=True)
        for file in files:
            path = self._folder / file.path
            if not is_below(path.parent, self._folder):
                raise _outside(path.parent)
            if path.is_dir() and not path.is_symlink():
                raise FetchError(
                    "disk_error", f"{path} is a folder, where a file of this name is to lie: move it away."
                )
        for folder in {(self._folder / file.path).parent for file in files}:
            self._disk.make_folder(folder)
        return self._folder

    def lock_of(self, file: RemoteFile | None) -> Path | None:
        return self._folder / _LOCK if file is None else None

    def _hidden(self, file: RemoteFile, ending: str) -> Path:
        path = self._folder / file.path
        mark = file.digest or sha256(file.url.encode()).hexdigest()
        return path.with_name(f".{path.name}.{mark[:_MARK_CHARS]}.{ending}")

    def part(self, file: RemoteFile) -> Path:
        return self._hidden(file, "part")

    def has(self, file: RemoteFile) -> bool:
        if _is_of(self._hidden(file, "whole"), file.size):
            return True
        path = self._folder / file.path
        return _is_of(path, file.size) and (file.digest is None or _digest(path, file) == file.digest)

    def keep(self, file: RemoteFile) -> None:
        self._disk.name(self.part(file), self._hidden(file, "whole"))
        discard_note(self.part(file))

    def finish(self, files: Sequence[RemoteFile]) -> Path:
        for file in files:
            whole, path = self._hidden(file, "whole"), self._folder / file.path
            if whole.exists():
                self._disk.rename(whole, path)
            elif not path.exists():
                raise FetchError("disk_error", f"{file.path} was removed by another program while it was fetched.")
        for folder, names in self._by_folder(files).items():
            self._disk.sync_folder(folder)
            _forget_others(folder, names)
        remove(self._folder / _LOCK)
        return self._folder / files[0].path if len(files) == 1 else self._folder

    def _by_folder(self, files: Sequence[RemoteFile]) -> dict[Path, set[str]]:
        """The names of the files in each folder: a folder of thousands is looked at once."""
        found: dict[Path, set[str]] = {}
        for file in files:
            path = self._folder / file.path
            found.setdefault(path.parent, set()).add(path.name)
        return found


def _forget_others(folder: Path, names: set[str]) -> None:
    """Parts of other contents of these files, of an earlier revision, are of no use any more."""
    for old in folder.iterdir():
        found = _HIDDEN.fullmatch(old.name)
        if found is not None and found["name"] in names:
            remove(old)


def is_below(path: Path, root: Path) -> bool:
    """True if the path, with every link in it followed, lies below the root or is it. It need not exist."""
    real = os.path.realpath(root)
    return os.path.commonpath((real, os.path.realpath(path))) == real


def _outside(path: Path) -> FetchError:
    return FetchError("outside_root", f"{path} lies outside of the folders that models may be in.")


def _is_of(path: Path, size: int | None) -> bool:
    """True for a plain file of this size."""
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(seen.st_mode) and size in (None, seen.st_size)


def _digest(path: Path, file: RemoteFile) -> str:
    hasher = file.hasher()
    with path.open("rb") as opened:
        while piece := opened.read(PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()
