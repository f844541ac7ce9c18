"""Changes of a key file by `greenroom key`: one at a time, and each whole or not at all.

Owns the lock, a file beside the key file that stays, and the way a new key file takes the place of the old one. Two
commands at once lose nothing; one that is killed, or meets a full disk, leaves the old file as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from greenroom.access.key_file import FILE_BYTES_MAX, FileKey, parsed, read_keys, rendered
from greenroom.base.plain_file import sync_folder
from greenroom.config.sections.keys import digest_of
from greenroom.errors import ConfigError

# A change takes some milliseconds; many may be queued on a slow disk.
LOCK_MAX_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.02
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_CREAT


def add_key(path: str | Path, key: FileKey) -> None:
    """Add this key; the file is made if there is none. Raises ConfigError, and then nothing has changed."""
    with _changing(path) as file:
        keys = _read(file)
        if any(key.name == other.name for other in keys):
            raise ConfigError(
                f"{file} has a key {key.name} already, revoked ones included: "
                "usage and jobs go by this name. Choose another"
            )
        if any(digest_of(key) == digest_of(other) for other in keys):
            raise ConfigError(f"{file} has this key already")
        _replace(file, (*keys, key))


def revoke_key(path: str | Path, name: str, now: datetime) -> FileKey:
    """Refuse this key from now on. Returns it. Raises ConfigError, and then nothing has changed.

    A key that is revoked already stays as it is.
    """
    with _changing(path) as file:
        keys = _read(file)
        found = next((key for key in keys if key.name == name), None)
        if found is None:
            raise ConfigError(f"{file} has no key {name}; `greenroom key list` shows those it has")
        if found.revoked is not None:
            return found
        gone = found.model_copy(update={"revoked": now})
        _replace(file, tuple(gone if key is found else key for key in keys))
        return gone


def _read(path: Path) -> tuple[FileKey, ...]:
    try:
        # A file of no bytes was made beforehand, to set its mode.
        return read_keys(path) if path.stat().st_size else ()
    except FileNotFoundError:
        return ()
    except ConfigError as error:
        # A change would not count: a gateway takes no key from a file that is wrong anywhere.
        todo = "Nothing was changed, and a gateway takes no change from this file: mend it by hand, then repeat this"
        raise ConfigError(f"{error.message}. {todo}") from None


def _replace(path: Path, keys: tuple[FileKey, ...]) -> None:
    """Raises OSError or ConfigError, and then the old file is there."""
    data, draft = rendered(keys), Path(f"{path}.new")
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} would be larger than {FILE_BYTES_MAX:,} bytes; use another file")
    # What is written must be readable: it replaces the only copy.
    parsed(data, path)
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_EXCL | _FLAGS, 0o600), "wb") as file:
            _like(path, file.fileno())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def _changing(path: str | Path) -> Iterator[Path]:
    """The key file, with its lock held."""
    # The file that a link leads to is replaced, not the link.
    whole = Path(os.path.realpath(os.path.expanduser(path)))
    try:
        lock = os.open(f"{whole}.lock", os.O_RDWR | _FLAGS, 0o600)
        try:
            _like(whole, lock)
            _wait_for(lock, whole)
            yield whole
        finally:
            os.close(lock)
    except OSError as error:
        raise ConfigError(f"{error.filename or whole} cannot be written: {error.strerror or error}") from None


def _wait_for(lock: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_MAX_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(f"{path} is being changed by another command, for {LOCK_MAX_S:g} s now") from None
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _like(path: Path, fd: int) -> None:
    """Give an open file the owner and mode of the key file: the gateway may run as another user."""
    try:
        seen = path.stat()
    except FileNotFoundError:
        return
    mine = os.fstat(fd)
    if (mine.st_uid, mine.st_gid) != (seen.st_uid, seen.st_gid):
        os.fchown(fd, seen.st_uid, seen.st_gid)
    if stat.S_IMODE(mine.st_mode) != stat.S_IMODE(seen.st_mode):
        os.fchmod(fd, stat.S_IMODE(seen.st_mode))
