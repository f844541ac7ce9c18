"""Recordings that can be played again: requests for the simulator, events for the core.

    ActivityRecorder   one CSV row for each answered request: time, model, lengths, tenant, how long. Never a prompt
    EventRecorder      every event given to the core and every effect it asked for, as lines of JSON
    read(path)         what an EventRecorder wrote; its events in a fresh Scheduler ask for exactly its effects

Owns both formats. Nothing here stalls the loop: `line_file.py` writes in a thread. A lost row is counted. A lost event
would make every later one useless, so the recording ends there and says so in its last line.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

from greenroom.config.part import Part
from greenroom.core import effects, events, model
from greenroom.core.effects import Effects
from greenroom.core.events import Event
from greenroom.core.policy import coresidency
from greenroom.runtime.record.line_file import WAITING_MAX, LineFile, first_bytes, set_aside
from greenroom.telemetry.activity import Record
from greenroom.telemetry.logs import get_logger

_log = get_logger("recording")

ACTIVITY_COLUMNS = ("t", "model", "prompt_len", "output_len", "tenant", "priority", "wait_s", "total_s")
# About a million requests; the file before it is kept as PATH.1.
ACTIVITY_BYTES_MAX = 64 * 1024 * 1024
# About three million events. Later ones cannot be played without the first, so there is no rotation.
EVENTS_BYTES_MAX = 1024 * 1024 * 1024
_HEAD = '{"greenroom_events":1}'
# A recording that holds an event continues with these bytes after its head.
_FIRST = b'{"n":1,'

# The name of the effect and its arguments.
Asked = tuple[str, tuple[Any, ...]]
# Lines are numbered, so that a lost one is noticed. Text is the last line, and says how the recording ended.
_Numbered = tuple[int, Event | Asked | str]
WHOLE = "whole"


# --- requests -------------------------------------------------------------------------------------------------------


class ActivityRecorder(Part):
    writes = True

    def __init__(self, path: Path, *, bytes_max: int = ACTIVITY_BYTES_MAX) -> None:
        head = ",".join(ACTIVITY_COLUMNS)
        self._file: LineFile[Record] = LineFile(path, _row, head=head, bytes_max=bytes_max, rotates=True)

    async def open(self) -> None:
        """Open the file; rows are added to an existing one. Raises OSError if it cannot be written."""
        self._file.open()

    def check(self) -> None:
        """Raises OSError as `open` would. Changes nothing."""
        self._file.check()

    def add(self, record: Record) -> None:
        """Record a request that has ended. Requests without an answer are left out."""
        if record.status is not None and 200 <= record.status < 300:
            self._file.put(record)

    async def close(self) -> None:
        await self._file.close()


def _row(record: Record) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(activity_row(record))
    return text.getvalue()


def activity_row(record: Record) -> list[str]:
    """The row of a request that has ended, by `ACTIVITY_COLUMNS`."""
    # An unknown length stays empty: 0 would mean an answer that took no time.
    lengths = (record.prompt_tokens, record.completion_tokens)
    times = ("" if seconds is None else f"{seconds:.3f}" for seconds in (record.wait_s, record.total_s))
    row = (f"{record.arrived_at:.3f}", record.model, *lengths, record.tenant, record.priority, *times)
    return ["" if cell is None else str(cell) for cell in row]


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recording:
    """`incomplete` says why it ends before the gateway ended; None if it is whole."""

    events: list[Event]
    effects: list[Asked]
    incomplete: str | None = None


class EventRecorder(Part):
    """Is given every event, and wraps the core's effects by `watching`."""

    writes = True

    def __init__(self, path: Path, *, bytes_max: int = EVENTS_BYTES_MAX, waiting_max: int = WAITING_MAX) -> None:
        self._path = path
        self._file: LineFile[_Numbered] = LineFile(
            path, _line, head=_HEAD, bytes_max=bytes_max, rotates=False, waiting_max=waiting_max
        )
        self._ended = False
        self._written = 0

    async def open(self) -> None:
        """Begin a new recording; an earlier one becomes PATH.1. Raises OSError.

        An earlier one without events is deleted, so that repeated failed starts do not push out the last real one.
        """
        with contextlib.suppress(FileNotFoundError):
            if first_bytes(self._path, _HEAD, len(_FIRST)) == _FIRST:
                set_aside(self._path, _HEAD)
            else:
                self._path.unlink()
        self._file.open()

    def watching(self, effects: Effects) -> Effects:
        """The same effects, recorded."""
        return cast(Effects, WatchedEffects(effects, self))

    async def close(self) -> None:
        if not self._ended:
            self._end(WHOLE)
        await self._file.close()

    def add(self, line: Event | Asked) -> None:
        """An event, in the order in which it is posted, or an effect."""
        if self._ended:
            return
        self._written += 1
        # The loss of earlier lines may be known only now.
        if self._file.dropped or not self._file.put((self._written, line)):
            why = "the file is as large as it may be" if self._file.is_full else "the disk was too slow or full"
            _log.warning("recording of events ends here", why=why)
            self._end(why)

    def _end(self, why: str) -> None:
        self._ended = True
        self._file.put((self._written, why), must=True)


class WatchedEffects:
    """Records every effect, then passes it on."""

    def __init__(self, effects: Effects, recorder: EventRecorder) -> None:
        self._effects = effects
        self._recorder = recorder

    def __getattr__(self, name: str) -> Callable[..., None]:
        effect = getattr(self._effects, name)

        def recorded(*asked: Any, **named: Any) -> None:
            self._recorder.add((name, (*asked, *named.values())))
            effect(*asked, **named)

        # Found at once from now on.
        setattr(self, name, recorded)
        return recorded


def _line(numbered: _Numbered) -> str:
    number, line = numbered
    if isinstance(line, str):
        return json.dumps({"n": number, "end": line} if line == WHOLE else {"n": number, "incomplete": line})
    if isinstance(line, tuple):
        return f'{{"n":{number},"effect":"{line[0]}","asked":{encode(line[1])}}}'
    return f'{{"n":{number},"event":{encode(line)}}}'


# --- read again -----------------------------------------------------------------------------------------------------


def read(path: Path) -> Recording:
    """Read a recording to its end or its first gap. Raises OSError, or ValueError with the line that is wrong."""
    recording = Recording([], [])
    with path.open(encoding="utf-8") as file:
        if next(file, "").strip() != _HEAD:
            raise ValueError(f"{path} is not a recording of events that this version reads")
        for number, line in enumerate(file, 1):
            try:
                ended = _take(line, number, recording)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number + 1}: {error}") from error
            if ended is not None:
                return recording if ended == WHOLE else replace(recording, incomplete=ended)
    return replace(recording, incomplete="it was not ended")


def read_events(path: Path) -> list[Event]:
    """The events of a whole recording. Raises ValueError also if it is not whole."""
    recording = read(path)
    if recording.incomplete is not None:
        raise ValueError(f"{path} is incomplete: {recording.incomplete}")
    return recording.events


def _take(line: str, number: int, recording: Recording) -> str | None:
    """Take in one line. Returns how the recording ends there, if it does."""
    if not line.endswith("\n"):
        return "the last line was not finished"
    said = json.loads(line)
    if "incomplete" in said:
        return str(said["incomplete"])
    if said["n"] != (number - 1 if "end" in said else number):
        return f"lines are missing before line {number + 1}"
    if "end" in said:
        return WHOLE
    if "event" in said:
        recording.events.append(decode(said["event"]))
    else:
        recording.effects.append((said["effect"], decode(said["asked"])))
    return None


# The key that names the type of a value that is not plain JSON. No field of a record begins with an underscore.
_KIND = "_"
_MAP, _SET = "map", "set"


def _named(module: object) -> dict[str, type[Any]]:
    """The records and enums of this module, by name."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return {name: kind for name, kind in found.items() if is_dataclass(kind) or issubclass(kind, Enum)}


_TYPES: Mapping[str, type[Any]] = {**_named(model), **_named(coresidency), **_named(effects), **_named(events)}


def encode(value: object) -> str:
    """One line of JSON."""
    return json.dumps(_plain(value), separators=(",", ":"))


def decode(said: Any) -> Any:
    """The value that was encoded, from parsed JSON. Raises ValueError for anything else."""
    try:
        return _made(said)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a record of the core: {error!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Enum):
        return {_KIND: type(value).__name__, "is": value.value}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {_KIND: _MAP, "of": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, frozenset):
        return {_KIND: _SET, "of": [_plain(one) for one in sorted(value)]}
    said = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return {_KIND: type(value).__name__, **said}


def _made(said: Any) -> Any:
    if isinstance(said, list):
        return tuple(_made(one) for one in said)
    if not isinstance(said, dict):
        return said
    kind = said.pop(_KIND)
    if kind == _MAP:
        return {_made(key): _made(one) for key, one in said["of"]}
    if kind == _SET:
        return frozenset(_made(one) for one in said["of"])
    made = _TYPES[kind]
    if issubclass(made, Enum):
        return made(said["is"])
    return made(**{name: _made(one) for name, one in said.items()})
