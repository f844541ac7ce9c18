"""Learned times of models, kept across restarts: how long their moves and answers take.

Owns one small JSON file in the state directory. A model is recognised by its id and by the configuration of its
process, so that a changed model starts anew. A file that cannot be read or written costs a warning and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from greenroom.base.detached import run_detached
from greenroom.base.plain_file import read_plain, replace_file
from greenroom.base.repeated import Repeated
from greenroom.config.diff import NEW_SLOT_KEYS
from greenroom.config.part import Part
from greenroom.config.schema import Model
from greenroom.core.events import Learned
from greenroom.core.model import ModelId, MoveKind
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.telemetry.logs import get_logger

_log = get_logger("learned")

FILE_NAME = "learned.json"
# A crash costs at most what was learned in this time.
WRITE_EVERY_S = 30.0
# Includes models that are no longer configured, in case they return; the oldest are forgotten first.
MODELS_MAX = 10_000
# More than so many models need; a larger file is not ours.
FILE_BYTES_MAX = 16 * 1024 * 1024
# The shortest time that is written: the scheduler may divide by it.
SECONDS_MIN = 0.0001
# Longer than any move or answer: eleven days.
SECONDS_MAX = 1e6


Seconds = Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)]


class RememberedTimes(msgspec.Struct, frozen=True):
    identity: str
    moves_s: dict[MoveKind, Seconds]
    service_s: Seconds | None

    @classmethod
    def of(cls, identity: str, learned: Learned) -> RememberedTimes:
        moves_s = {kind: _rounded(seconds) for kind, seconds in learned.moves_s.items()}
        return cls(identity, moves_s, None if learned.service_s is None else _rounded(learned.service_s))


class _File(msgspec.Struct):
    version: Literal[1]
    models: dict[ModelId, RememberedTimes]


def identity_of(model: Model) -> str:
    """A hash that is equal for configurations that make the same process."""
    said = {key: getattr(model, key) for key in sorted(NEW_SLOT_KEYS)}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]


class LearnedTimes(Part):
    """`entries` are the models there are now."""

    writes = True

    def __init__(
        self,
        folder: Path,
        loop: SchedulerLoop,
        entries: Iterable[Entry],
        *,
        write_every_s: float = WRITE_EVERY_S,
        models_max: int = MODELS_MAX,
    ) -> None:
        self._path = folder / FILE_NAME
        self._loop = loop
        self._entries = entries
        self._models_max = models_max
        self._known = _read(self._path)
        self._written = _text(self._known)
        self._identities: dict[ModelId, tuple[Entry, str]] = {}
        tell = partial(_log.failed, file=str(self._path))
        self._writing = Repeated(self.write, "writing learned times", lambda: write_every_s, tell)

    def recall(self, models: Iterable[ModelId]) -> dict[ModelId, Learned]:
        """The learned times of these models, as they are configured now."""
        wanted = self._known.keys() & frozenset(models)
        return {
            entry.id: Learned(known.moves_s, known.service_s)
            for entry in self._entries
            if entry.id in wanted and (known := self._known[entry.id]).identity == self._identity(entry)
        }

    def begin(self) -> None:
        """Write from time to time."""
        self._writing.start()

    async def close(self) -> None:
        """Write a last time. Raises OSError."""
        await self._writing.stop()
        await self.write()

    async def write(self) -> None:
        """Write what is new, if anything is. Raises OSError."""
        self._take()
        known, written = dict(self._known), self._written
        self._written = await run_detached(lambda: _write_if_new(self._path, known, written), "write learned times")

    def _take(self) -> None:
        learned = self._loop.view.learned()
        there = {entry.id for entry in self._entries}
        self._identities = {model: known for model, known in self._identities.items() if model in there}
        for entry in self._entries:
            if (times := learned.get(entry.id)) is not None:
                # Moved to the end: the newest are last.
                self._known.pop(entry.id, None)
                self._known[entry.id] = RememberedTimes.of(self._identity(entry), times)
        for model in list(self._known)[: max(0, len(self._known) - self._models_max)]:
            del self._known[model]

    def _identity(self, entry: Entry) -> str:
        """Its identity, computed once: a thousand of them take a while."""
        known = self._identities.get(entry.id)
        if known is None or known[0] is not entry:
            known = self._identities[entry.id] = (entry, identity_of(entry.config))
        return known[1]


def known_loads_s(folder: Path, models: Mapping[str, Model]) -> dict[str, float]:
    """How long these models took to load, as far as an earlier run has learned it. Changes nothing."""
    known = _read(folder / FILE_NAME)
    return {
        name: times.moves_s[MoveKind.LOAD]
        for name, model in models.items()
        if (times := known.get(ModelId(name))) is not None
        and times.identity == identity_of(model)
        and MoveKind.LOAD in times.moves_s
    }


# --- the file -------------------------------------------------------------------------------------------------------


def _text(known: dict[ModelId, RememberedTimes]) -> str:
    return msgspec.json.format(msgspec.json.encode(_File(1, known)), indent=1).decode() + "\n"


def _rounded(seconds: float) -> float:
    return min(max(round(seconds, 4), SECONDS_MIN), SECONDS_MAX)


def _read(path: Path) -> dict[ModelId, RememberedTimes]:
    """The times of an earlier run; none, with a warning, if they cannot be read."""
    try:
        return msgspec.json.decode(read_plain(path, FILE_BYTES_MAX), type=_File).models
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning(
            "learned times are ignored and will be learned anew", file=str(path), error=str(error) or repr(error)
        )
        return {}


def _write_if_new(path: Path, known: dict[ModelId, RememberedTimes], written: str) -> str:
    """Write the file if this differs from what it has. Returns its text."""
    text = _text(known)
    if text != written:
        replace_file(path, text)
    return text
