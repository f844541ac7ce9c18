"""The key file (`server.key_file`): API keys by their hashes, which `greenroom key` writes and a running gateway reads.

Owns the format: one JSON document with one key on each line. It counts as a whole or not at all: a document that is cut
short anywhere is no JSON, so a file that is half written is never taken for one with fewer keys. It never holds a key
itself. A plain SHA-256 is enough: keys are made by `greenroom key new`, of 256 random bits, and cannot be guessed
however fast hashes are tried. Slow hashes are for words that people choose.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import ValidationError, model_validator

from greenroom.base.plain_file import NotPrivate, read_private, why
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
