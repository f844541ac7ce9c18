"""What the library keeps across restarts, in one file of the state directory.

Owns that file: when models were last used, what their headers told, and which files in plain folders were fetched from
where. All of it can be found again or done without: a file that cannot be read costs a warning and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Final

import msgspec

import greenroom
from greenroom.base.plain_file import read_plain
from greenroom.library.facts import FileFacts
from greenroom.library.records import FetchedFile
from greenroom.telemetry.logs import get_logger

_log = get_logger("library")

FILE_NAME: Final = "library.json"
VERSION: Final = 1
# Models whose last use is remembered, those that are not there any more included; the oldest are forgotten first.
USED_MAX: Final = 10_000
FACTS_MAX: Final = 20_000
FETCHED_MAX: Final = 20_000
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
# A year far away: a later time in the file is not ours.
TIME_MAX: Final = 1e11
_Facts = tuple[str | None, int | None, int | None, int | None, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Remembered:
    """When models were last used, by path, what their headers told, by state, and which files were fetched, by path."""

    used: dict[str, float] = field(default_factory=dict)
    facts: dict[str, FileFacts] = field(default_factory=dict)
    fetched: dict[str, FetchedFile] = field(default_factory=dict)


def text_of(known: Remembered, on_gpu: bool) -> str:
    facts = {state: astuple(one) for state, one in list(known.facts.items())[-FACTS_MAX:]}
    # Another release may read or estimate otherwise, and so does a machine with GPUs.
    fetched = {path: asdict(one) for path, one in known.fetched.items()}
    said = {"version": VERSION, "read_by": _reader(on_gpu), "used": known.used, "facts": facts, "fetched": fetched}
    return json.dumps(said)


def _reader(on_gpu: bool) -> str:
    return f"{greenroom.__version__}{' gpu' if on_gpu else ''} with abilities"


def read_remembered(path: Path, on_gpu: bool) -> Remembered:
    """Empty if the file is not there or not ours. What an earlier release read is forgotten."""
    try:
        said = json.loads(read_plain(path, FILE_BYTES_MAX))
        if said["version"] != VERSION:
            return Remembered()
        used = {str(path): float(when) for path, when in said["used"].items() if 0 <= float(when) <= TIME_MAX}
        told = said["facts"] if said.get("read_by") == _reader(on_gpu) else {}
        facts = msgspec.convert(told, dict[str, _Facts])
        fetched = msgspec.convert(said["fetched"], dict[str, FetchedFile])
    except FileNotFoundError:
        return Remembered()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("cannot be read, and is begun anew", file=str(path), error=str(error))
        return Remembered()
    newest = sorted(used.items(), key=lambda item: item[1])[-USED_MAX:]
    return Remembered(dict(newest), {state: FileFacts(*one) for state, one in facts.items()}, fetched)
