"""The state directory: one gateway at a time, a durable id, and a short private place for Unix sockets.

Owns the lock, the id by which processes of earlier runs are recognised, and the run directory. Stores nothing else;
other parts put their files next to these. Only its owner can read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

from greenroom import errors
from greenroom.base.plain_file import replace_file
from greenroom.config.problems import OTHER_FILES, holds_other_files, known_state_id, of_wrong_kind

# The kernel's limit on the path of a Unix socket, without its final zero byte.
UNIX_PATH_BYTES_MAX = 107
# The longest name of a socket in the run directory.
SOCKET_NAME_BYTES_MAX = 32
_PRIVATE = 0o700
LOCK = "lock"


class StateDir:
    """An open state directory. `id` lasts as long as the directory, `run` as long as this object."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        # Nothing was ever kept here: it was made, or found empty, and locked by this start.
        self.is_new = os.listdir(path) == [LOCK]
        self.id = _read_or_make_id(path / "id")
        self.run = secrets.token_hex(4)
        self.run_dir = _make_run_dir(path, self.id)
        self._lock_fd: int | None = lock_fd

    @classmethod
    def open(cls, path: str | Path) -> StateDir:
        """Create the directory if need be and lock it. Raises StateDirBusy if another gateway has it, ConfigError if it
        cannot be used or contains other things."""
        try:
            whole = Path(path).expanduser().resolve()
        except RuntimeError as error:
            # A link that leads to itself, or a home that is not known.
            raise errors.ConfigError(f"state_dir: {path} cannot be used: {error}.") from error
        if holds_other_files(whole):
            raise errors.ConfigError(f"{whole} {OTHER_FILES}")
        if (wrong := of_wrong_kind(whole)) is not None:
            raise errors.ConfigError(f"state_dir: {wrong}")
        _make_private(whole)
        try:
            return cls._locked(whole)
        except OSError as error:
            raise _cannot_be_used(whole, error) from error

    @classmethod
    def _locked(cls, path: Path) -> StateDir:
        lock_fd = _lock(path)
        try:
            return cls(path, lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise

    @property
    def prefix(self) -> str:
        """The common prefix of the identities of all processes of this directory, in every run."""
        return f"{self.id}:"

    @property
    def run_name(self) -> str:
        """Of this run, among those of all gateways."""
        return f"{self.id}.{self.run}"

    def identity(self, slot: str) -> str:
        """The identity of the processes of one slot of this run."""
        return f"{self.prefix}{self.run}:{slot}"

    def unnamed(self, text: str) -> str:
        """The text without the paths of our folders: callers see file names only."""
        for folder in (self.run_dir, self.path):
            text = text.replace(f"{folder}/", "")
            # Not if it is the beginning of another name.
            text = re.sub(re.escape(str(folder)) + r"(?![\w.-])", "the state directory", text)
        return text

    def close(self) -> None:
        """Empty the run directory and release the lock. May be called again."""
        if self._lock_fd is None:
            return
        lock_fd, self._lock_fd = self._lock_fd, None
        try:
            with contextlib.suppress(OSError):
                _empty(self.run_dir)
                # Ours stays: a full disk has no room for a new one.
                if self.run_dir.parent != self.path:
                    self.run_dir.rmdir()
            os.ftruncate(lock_fd, 0)
        finally:
            os.close(lock_fd)


def _cannot_be_used(path: Path, error: OSError) -> errors.ConfigError:
    return errors.ConfigError(f"the directory {path} cannot be used: {error.strerror}")


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        is_private = _is_private(path)
    except OSError as error:
        raise _cannot_be_used(path, error) from error
    if not is_private:
        raise errors.ConfigError(f"the directory {path} belongs to another user or is a link; choose another one")


def _is_private(path: Path) -> bool:
    """Remove the permissions of others. False if it is not ours or is a link."""
    seen = path.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        return False
    if (mode := stat.S_IMODE(seen.st_mode)) & ~_PRIVATE:
        # What the owner may not do stays so: a directory that is read-only is meant to be.
        path.chmod(mode & _PRIVATE)
    return True


def _lock(path: Path) -> int:
    lock_fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock_fd, 32, 0).decode("ascii", "replace").strip()
        os.close(lock_fd)
        who = f"the gateway with pid {holder}" if holder else "another gateway"
        raise errors.StateDirBusy(f"{path} is held by {who}; stop it or choose another state directory") from None
    # The kernel releases the lock when the process ends; the pid in the file is only for messages, and not worth a
    # start on a full disk.
    with contextlib.suppress(OSError):
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
    return lock_fd


def _read_or_make_id(path: Path) -> str:
    if known := known_state_id(path):
        return known
    made = secrets.token_hex(8)
    replace_file(path, made + "\n")
    return made


def _make_run_dir(path: Path, name: str) -> Path:
    """An empty private directory with a path short enough for sockets in it."""
    candidates = (path / "run", *(base / f"greenroom-{name}" for base in _short_bases()))
    run_dir = next((one for one in candidates if _leaves_room(one)), None)
    if run_dir is None:
        raise errors.ConfigError(f"{path} is too long for Unix sockets and so is every place for temporary files")
    _make_private(run_dir)
    _empty(run_dir)
    return run_dir


def _short_bases() -> tuple[Path, ...]:
    """Places for the run directory if the path of the state directory is too long for a socket."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = os.path.isabs(runtime) and os.access(runtime, os.W_OK | os.X_OK)
    return (Path(runtime), Path("/tmp")) if usable else (Path("/tmp"),)


def _leaves_room(path: Path) -> bool:
    return len(os.fsencode(path)) + 1 + SOCKET_NAME_BYTES_MAX <= UNIX_PATH_BYTES_MAX


def _empty(folder: Path) -> None:
    for leftover in folder.iterdir():
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
