"""The library: every model below the roots, as records in memory that follow the disk.

Owns the records and when the disk is looked at: all roots every two seconds, each in a thread of its own, so that one
that hangs delays neither the loop nor the others; its records stay until it answers. Also owns when each model was last
used, which is kept in the state directory. `find` looks in memory only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from greenroom.base.detached import run_detached
from greenroom.base.plain_file import replace_file
from greenroom.base.repeated import Repeated
from greenroom.config.diff import Changes
from greenroom.config.hub import whisper_names, whisper_repository
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config
from greenroom.errors import ModelNotFound, RemovalFailed
from greenroom.library.download_locks import DownloadLocks
from greenroom.library.facts import FETCHED_MAX, FILE_NAME, USED_MAX, Remembered, read_remembered, text_of
from greenroom.library.folders import REST_SHARE, FolderTree
from greenroom.library.models import Found, ModelFinder
from greenroom.library.naming import FoundRoot, Inventory, inventory_of
from greenroom.library.records import BrokenModel, FetchedFile, LibraryRecord, Source
from greenroom.library.removal import remove_files
from greenroom.library.roots import Roots
from greenroom.telemetry.logs import get_logger

_log = get_logger("library")

WRITE_EVERY_S: Final = 30.0
# Requests come often; the last use is told to about a second.
USED_EVERY_S: Final = 1.0
# Between two looks at most.
REST_MAX_S: Final = 60.0
# After this time a file that was fetched and is of no model is not remembered: each root was looked at since.
NOTED_S: Final = 120.0
RunDetached = Callable[[Callable[[], Any], str], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class LookTimes:
    """When the disk is looked at, in seconds."""

    # A new file is found within this time and one look.
    every_s: float = 2.0
    # A root that has not answered by then is left behind; it keeps one thread, and its records.
    max_s: float = 20.0
    # Headers of a large tree are read for this long at a time; what was found by then can be asked for.
    slice_s: float = 1.0


LOOK_TIMES: Final = LookTimes()


# The versions of a root that was not looked at yet, and of one that could not be seen as a whole.
_NEW: Final = -2
_UNSURE: Final = -3


@dataclass(slots=True)
class _Root:
    """What is known of one root, and the look that is under way."""

    tree: FolderTree
    finder: ModelFinder
    # The version of the tree that was looked at as a whole; -1: it is not there.
    version: int = _NEW
    # The last look failed, which was told.
    is_failing: bool = False
    found: Found = field(default_factory=Found)
    look: asyncio.Task[None] | None = None


class LibraryFollower(Protocol):
    def looked(self) -> None:
        """The disk was looked at."""

    def removed(self, record: LibraryRecord) -> None:
        """Its files were deleted."""


class Library(Part):
    """`run` runs blocking work in a thread that can be left behind."""

    writes = True

    def __init__(
        self,
        roots: Roots,
        state_dir: Path | None,
        *,
        run: RunDetached = run_detached,
        on_gpu: bool = False,
        times: LookTimes = LOOK_TIMES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._path = None if state_dir is None else state_dir / FILE_NAME
        self._on_gpu = on_gpu
        self._times = times
        self._clock = clock
        self._remembered = Remembered() if self._path is None else read_remembered(self._path, on_gpu)
        # The hash of what the file has.
        self._written = b""
        self._inventory = Inventory()
        self._records: dict[str, LibraryRecord] = {}
        # Of weights that updates fetched, with other gateways.
        self.locks = DownloadLocks(lambda: self.roots)
        self._lock, self._taking, self._removing = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._asked = self._answered = 0
        self._looked = asyncio.Event()
        self._removals: set[asyncio.Task[int]] = set()
        # The path of the model that is being deleted: it is found no more, even while its files are still there.
        self._leaving: str | None = None
        # Something was found that is not among the records yet.
        self._is_stale = False
        self._following = Repeated(self.refresh, "looking at the library", self._rest_s, _log.failed)
        self._keeping = Repeated(
            self._write, "writing what is known of the library", lambda: WRITE_EVERY_S, _log.failed
        )
        self._roots: dict[str, _Root] = {}
        self.follower: LibraryFollower | None = None
        self.roots = Roots(())
        self.use_roots(roots)

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def records(self) -> tuple[LibraryRecord, ...]:
        return tuple(self._records.values())

    @property
    def problems(self) -> tuple[BrokenModel, ...]:
        """What looks like a model and is none, incomplete or damaged files, and models that cannot be named."""
        damaged = (problem for root in self._roots.values() for problem in root.found.problems)
        return (*damaged, *self._inventory.unnamed)

    @property
    def is_looking(self) -> bool:
        """True while a root was not looked at as a whole yet."""
        return any(root.version == _NEW for root in self._roots.values())

    def find(self, name: str) -> LibraryRecord | None:
        """The model with this id, hub id (`org/name`, `org/name:QUANT`, `org/name@ref`) or path; else the Whisper model
        of this size, as the hub has it or in a folder of the repository's name. In memory only.
        """
        found = self._inventory.find(name)
        if found is None and (repository := whisper_repository(name)) is not None:
            found = self._inventory.find(repository) or self._inventory.find(os.path.basename(repository))
        return None if found is None else self._records.get(found.id)

    def names_of(self, records: Iterable[LibraryRecord]) -> frozenset[str]:
        """Every name that `find` knows these models by, and the hub ids of their repositories."""
        repositories = {record.id: record.source.hub_id for record in records}
        names = [name for name, id in self._inventory.names.items() if id in repositories]
        names += [name for name in whisper_names() if (one := self.find(name)) is not None and one.id in repositories]
        return frozenset((*names, *(hub_id for hub_id in repositories.values() if hub_id is not None)))

    @property
    def work_done(self) -> tuple[int, int]:
        """Folders listed and models whose headers were read, since the start."""
        roots = self._roots.values()
        return sum(root.tree.listed for root in roots), sum(root.finder.read for root in roots)

    async def looked(self) -> None:
        """Wait until the roots were looked at once, or did not answer in time."""
        await self._looked.wait()

    def used(self, record: LibraryRecord) -> None:
        """A request for this model came now."""
        now, used = round(self._clock(), 3), self._remembered.used
        if now - used.get(record.path, 0.0) < USED_EVERY_S:
            return
        # Moved to the end: the newest are last.
        used.pop(record.path, None)
        used[record.path] = now
        if len(used) > USED_MAX:
            del used[next(iter(used))]
        if record.id in self._records:
            self._records[record.id] = replace(self._records[record.id], last_used=now)

    def used_at(self, path: str) -> None:
        """The same by its path, if there is a model on disk at this path."""
        if (record := self.find(path)) is not None:
            self.used(record)

    def fetched(self, files: Mapping[str, tuple[int | None, str | None]], source: Source) -> None:
        """These files were fetched into a plain folder just now: size and sha256 by path, as far as they were told."""
        notes = self._remembered.fetched
        for path, (size, sha256) in files.items():
            notes.pop(path, None)
            notes[path] = FetchedFile(source, self._clock(), size, sha256)
        for path in list(notes)[: max(0, len(notes) - FETCHED_MAX)]:
            del notes[path]
        self._is_stale = True

    async def remove(
        self,
        record: LibraryRecord,
        lock: contextlib.AbstractContextManager[None] | None = None,
    ) -> int:
        """Delete this model from disk and return the bytes that came free. Goes on if the caller leaves. `lock` is held
        in a thread while files are deleted; what it raises comes from here. Raises ModelNotFound if the model is gone,
        and RemovalFailed if something of it cannot be deleted."""
        held = lock or contextlib.nullcontext()
        task = asyncio.get_running_loop().create_task(self._remove(record, held), name="remove model")
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return await asyncio.shield(task)

    async def _remove(self, record: LibraryRecord, lock: contextlib.AbstractContextManager[None]) -> int:
        def remove() -> int:
            with lock:
                return remove_files(record, others)

        async with self._removing:
            if self._records.pop(record.id, None) is None:
                raise ModelNotFound.named(record.id)
            others = self.records
            self._leaving = record.path
            try:
                freed = int(await self._run(remove, "remove model"))
                if self.follower is not None:
                    self.follower.removed(record)
                return freed
            except FileNotFoundError:
                raise ModelNotFound.named(record.id) from None
            except OSError as error:
                raise RemovalFailed(
                    f"{error.filename or record.path} could not be deleted: {error.strerror or error}."
                ) from error
            finally:
                # If it failed early, the model is still there.
                self._leaving, self._is_stale = None, True
                await self.refresh()

    # --- looking at the disk ------------------------------------------------------------------------------------------

    def use_roots(self, roots: Roots) -> None:
        """Look below these folders from now on. The next look finds what is there and forgets the rest."""
        self.roots, self._is_stale = roots, True
        self._roots = {
            folder: self._roots.get(folder)
            or _Root(
                FolderTree(folder, self.real_roots), ModelFinder(on_gpu=self._on_gpu, known=self._remembered.facts)
            )
            for folder in roots.folders
        }

    def real_roots(self) -> frozenset[str]:
        """The roots with links resolved, as `root` of a record has them, as far as each is known. Asking the disk here
        would make one root wait for another."""
        return frozenset(root.tree.real for root in self._roots.values())

    async def refresh(self) -> None:
        """Look at the disk now and take what was found. A root that does not answer in time keeps its records."""
        self._asked += 1
        asked = self._asked
        async with self._lock:
            # A look that began after this was asked for has ended meanwhile.
            if self._answered >= asked:
                return
            began = self._asked
            await self._look()
            self._answered = began

    async def _look(self) -> None:
        roots = list(self._roots.values())
        for root in roots:
            if root.look is None:
                root.look = asyncio.get_running_loop().create_task(self._look_at(root), name="look at models")
        looks = [root.look for root in roots if root.look is not None]
        if looks:
            await asyncio.wait(looks, timeout=self._times.max_s)
        try:
            if self._is_stale:
                await self._take()
        finally:
            self._looked.set()
        if self.follower is not None:
            self.follower.looked()

    async def _look_at(self, root: _Root) -> None:
        try:
            while True:
                version, found = await self._run(lambda: _looked_at(root, self._times.slice_s), "look at models")
                if found is not None:
                    self._is_stale = self._is_stale or found != root.found
                    root.found = found
                if found is None or found.is_whole:
                    error = root.tree.error or root.found.error
                    root.version = version if error is None else _UNSURE
                    self._tell(root, error)
                    return
                # What was found so far can be asked for already.
                await self._take()
        except Exception as error:
            # What was known of this root stays; the next look may fare better.
            self._tell(root, error)
        finally:
            root.look = None

    def _tell(self, root: _Root, error: Exception | None) -> None:
        """Say once that a root could not be looked at, as a whole or at all."""
        if error is not None and not root.is_failing:
            _log.failed("a folder of models could not be looked at", error, folder=root.tree.folder)
        root.is_failing = error is not None

    async def _take(self) -> None:
        """Make records of what is known of all roots."""
        async with self._taking:
            self._is_stale = False
            notes = dict(self._remembered.fetched)
            seen = [FoundRoot(folder, root.tree.real, root.found.models) for folder, root in self._roots.items()]
            # With thousands of models this takes longer than the loop may wait.
            try:
                inventory = await self._run(lambda: inventory_of(seen, notes), "name models")
            except BaseException:
                self._is_stale = True
                raise
            self._inventory = inventory
            self._records = {
                id: replace(record, last_used=self._remembered.used.get(record.path))
                for id, record in inventory.records.items()
                if record.path != self._leaving
            }

    # --- start and end ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Follow the disk from now on."""
        self._following.wake()
        self._following.start()
        self._keeping.start()

    async def draft(self, new: Config, changes: Changes) -> Apply:
        return partial(self.use_roots, Roots(new.roots))

    async def close(self) -> None:
        """Stop following, and write when models were last used. A thread that hangs is left behind. Raises OSError."""
        await self._following.cancel()
        await self._keeping.stop()
        for root in self._roots.values():
            if root.look is not None:
                root.look.cancel()
        await self._write()

    def _rest_s(self) -> float:
        """A tree that takes long to look at is looked at less often."""
        worked_s = max((root.tree.worked_s for root in self._roots.values()), default=0.0)
        return max(self._times.every_s, min(REST_SHARE * worked_s, REST_MAX_S))

    async def _write(self) -> None:
        path, used, roots = self._path, dict(self._remembered.used), list(self._roots.values())
        fetched, records, useful_since = dict(self._remembered.fetched), self.records, self._clock() - NOTED_S
        if path is None:
            return
        is_known = all(root.version >= 0 for root in roots)

        def write() -> bytes:
            for file in _useless(fetched, records, useful_since) if is_known else ():
                del fetched[file]
            facts = {state: one for root in roots for state, one in root.finder.facts.items()}
            text = text_of(Remembered(used, facts, fetched), self._on_gpu)
            written = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
            if written != self._written:
                replace_file(path, text)
            return written

        self._written = await self._run(write, "write library")
        notes = self._remembered.fetched
        for file in [file for file, note in notes.items() if note.at < useful_since and file not in fetched]:
            del notes[file]


def _useless(notes: Mapping[str, FetchedFile], records: Iterable[LibraryRecord], useful_since: float) -> list[str]:
    """Notes of files that are of no model, as most of a large repository may be."""
    files = {os.path.join(record.folder, file.name) for record in records for file in record.files}
    return [file for file, note in notes.items() if note.at < useful_since and file not in files]


def _looked_at(root: _Root, within_s: float = math.inf) -> tuple[int, Found | None]:
    """The version of the root, and what is in it if that changed. Blocks."""
    top = root.tree.look()
    if top is None:
        why = "it is not there, or is no folder that may be read"
        return -1, None if root.version == -1 else Found(problems=(BrokenModel(root.tree.folder, why),))
    return top.version, None if top.version == root.version else root.finder.find(top, within_s)


def look_once(folders: Roots) -> tuple[tuple[LibraryRecord, ...], tuple[BrokenModel, ...]]:
    """The records of these folders and what is none, for programs that look once. Blocks."""
    real = frozenset(folders.real())
    seen: list[FoundRoot] = []
    problems: list[BrokenModel] = []
    for folder in folders.folders:
        root = _Root(FolderTree(folder, lambda: real), ModelFinder(on_gpu=False))
        found = _looked_at(root)[1] or Found()
        seen.append(FoundRoot(folder, root.tree.real, found.models))
        problems += found.problems
    inventory = inventory_of(seen)
    return tuple(inventory.records.values()), (*problems, *inventory.unnamed)
