"""The key file (`server.key_file`): API keys by their hashes, which `greenroom key` writes and a running gateway reads.

Owns the format: one JSON document with one key on each line. It counts as a whole or not at all: a document that is cut
short anywhere is no JSON, so a file that is half written is never taken for one with fewer keys. It never holds a key
itself. A plain SHA-256 is enough: keys are made by `greenroom key new`, of 256 random bits, and cannot be guessed
however fast hashes are tried. Slow hashes are for words that people choose.

Changes are made one at a time, under the lock of a file beside it that stays, and each whole or not at all: a command
that is killed, or meets a full disk, leaves the old file as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import ValidationError, model_validator

from greenroom.base.plain_file import NotPrivate, read_private, sync_folder, why
from greenroom.config.kinds import Section
from greenroom.config.mistakes import nearest_key, told
from greenroom.config.reader import Problem, Where, break_on, dotted
from greenroom.config.sections.keys import ApiKey, Moment, digest_of, equal_api_keys
from greenroom.errors import ConfigError

VERSION: Final = 1
# Some ten thousand keys, revoked ones included.
FILE_BYTES_MAX: Final = 8 * 1024 * 1024


class FileKey(ApiKey):
    """One key of the file: what a key of the configuration has, and its history."""

    created: Moment | None = None
    revoked: Moment | None = None
    """Since when it is refused. It stays in the file, so that its name is never another key's."""

    @model_validator(mode="after")
    def _is_hashed(self) -> Self:
        break_on([Problem(("key",), "must not be here: give sha256")] if self.key is not None else [])
        return self


class _Document(Section):
    version: Literal[1]
    keys: tuple[FileKey, ...]

    def _problems(self) -> Iterator[Problem]:
        yield from (Problem(("keys", *problem.where), problem.message) for problem in equal_api_keys(self.keys))


def read_keys(path: str | Path) -> tuple[FileKey, ...]:
    """The keys of this file. Raises ConfigError, which shows no hash; FileNotFoundError if there is none."""
    try:
        data = read_private(path, FILE_BYTES_MAX)
    except FileNotFoundError:
        raise
    except NotPrivate as error:
        raise ConfigError(f"the key file {path} {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {why(error)}") from None
    return parsed(data, path)


def parsed(data: bytes, path: str | Path) -> tuple[FileKey, ...]:
    """The keys of a document. Raises ConfigError; `path` is for its message."""
    try:
        tree = json.loads(data.decode(), object_pairs_hook=_mapping, parse_constant=_refuse)
        return _Document.model_validate(tree).keys
    except ValidationError as error:
        first, *others = _problems(error)
        more = f" (and {len(others)} more)" if others else ""
        raise ConfigError(f"the key file {path}{_line(data, first.where)}: {_sentence(first)}{more}") from None
    except json.JSONDecodeError as error:
        said = "is empty" if not data.strip() else f"is cut short or no JSON (line {error.lineno})"
        raise ConfigError(f"the key file {path} {said}") from None
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"the key file {path} is wrong: {said}") from None


def _line(data: bytes, where: Where) -> str:
    """The line of the key at this place, as an error message names it; empty if it is no place of a key."""
    text, decoder, start = data.decode(), json.JSONDecoder(), 0
    if where[:1] != ("keys",) or len(where) < 2:
        return ""
    try:
        end = text.index("[", text.index('"keys"')) + 1
        for _ in range(int(where[1]) + 1):
            while text[end] in ", \t\r\n":
                end += 1
            start = end
            _, end = decoder.raw_decode(text, start)
    except (ValueError, IndexError):
        # It is written in another way: with escapes, or with more of this word.
        return ""
    return f", line {text.count(chr(10), 0, start) + 1}"


def rendered(keys: Iterable[FileKey]) -> bytes:
    """The document of these keys."""
    lines = [json.dumps(key.model_dump(mode="json", exclude_defaults=True), ensure_ascii=False) for key in keys]
    body = ",\n".join(lines)
    return f'{{"version": {VERSION}, "keys": [\n{body}\n]}}\n'.encode()


def joined(api_keys: Sequence[ApiKey], file_keys: Iterable[FileKey]) -> tuple[list[ApiKey], list[str]]:
    """The keys of configuration and file, and what is left out: the configuration counts where both have a key."""
    keys, left_out = list(api_keys), []
    names, digests = {key.name for key in api_keys}, {digest_of(key): key.name for key in api_keys}
    for key in file_keys:
        if key.name in names:
            left_out.append(f"the key {key.name} of the key file does not count: server.api_keys has one of this name")
        elif (same := digests.get(digest_of(key))) is not None:
            left_out.append(f"the key {key.name} of the key file does not count: server.api_keys has it as {same}")
        else:
            keys.append(key)
    return keys, left_out


def sentences(error: ValidationError) -> Iterator[str]:
    """What is wrong with a file or with one key, in words. Shows no value that may be a secret."""
    return (_sentence(problem) for problem in _problems(error))


def _sentence(problem: Problem) -> str:
    where = dotted(problem.where)
    return f"{where}: {problem.message}" if where else problem.message


def _problems(error: ValidationError) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        said: Where = detail["loc"]
        if detail["type"] == "extra_forbidden":
            document = FileKey if error.title == FileKey.__name__ else _Document
            yield Problem(said, nearest_key(said, document))
            continue
        place = _in_configuration(said, error.title)
        for problem in told(place, [detail]):
            yield Problem((*said, *problem.where[len(place) :]), problem.message)


def _in_configuration(where: Where, title: str) -> Where:
    """Where the configuration has the same field of a key, so that the same values are hidden."""
    keys: Where = ("server", "api_keys")
    if title == FileKey.__name__:
        return (*keys, 0, *where)
    # Also what stands in the place of the whole document or of its version may be a key.
    return (*keys, *(where[1:] if where[:1] == ("keys",) else where))


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field stands twice in one entry")
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


# --- changes, by `greenroom key` --------------------------------------------------------------------------------------


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
    """Refuse this key from now on. Returns it. Raises ConfigError, and then nothing has changed. A key that is revoked
    already stays as it is."""
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
