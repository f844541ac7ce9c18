"""Where the weights of a version come from: a path below the roots, or a repository of the hub, fetched if need be.

Owns the way from what a caller names to files on disk that the model's engine can run. Fetching, with its retries, is
the library's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from greenroom.base.detached import run_detached
from greenroom.config.schema import Model
from greenroom.errors import BadRequest, FetchFailed, GreenroomError, PathNotFound, UnusableModel, shown
from greenroom.features.library.downloads import NO_KEY, DownloadFacts, Downloads
from greenroom.library.download_locks import close_all, disown
from greenroom.library.orders import read_order
from greenroom.library.records import ENGINE_OF_KIND, BrokenModel, LibraryRecord, ModelKind, Version
from greenroom.library.removal import removed_paths
from greenroom.library.roots import is_below, link_steps, pinned
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.moves.admission import files_of
from greenroom.runtime.operations.files import Operation, OperationStatus
from greenroom.telemetry.logs import get_logger

_log = get_logger("versions")

# In whose name weights are fetched.
TENANT: Final = "versions"
# While another gateway deletes weights, nothing is fetched.
BEGIN_TRIES: Final = 600
BEGIN_EVERY_S: Final = 0.1


class VersionWeights:
    def __init__(self, downloads: Downloads) -> None:
        self._library = downloads.library
        self._downloads = downloads
        self._locks = downloads.library.locks

    async def found(self, model: Model, name: str, revision: str | None, fetched: set[str]) -> Version:
        """The weights on disk, as a version without a number. Paths that were fetched for it are added to `fetched`,
        also if it fails. Raises PathNotFound, BadRequest, UnusableModel or FetchFailed."""
        path = await run_detached(lambda: self._located(name), "look for weights")
        if path is not None:
            await self._library.refresh()
            commit = self._commit_at(path, model)
            if revision not in (None, commit):
                raise BadRequest(
                    f"{shown(name)} is a path, which has no revisions; `revision` is for repositories of the hub.",
                    param="revision",
                )
            return Version(0, name, path, commit, await self._used(path))
        if name.startswith(("/", "./", "../", "~")):
            raise PathNotFound(
                f"There is nothing at {shown(name)} below the folders of models (library.roots).", param="model_repo_id"
            )
        locks = await self._begun()
        try:
            return await self._fetched(model, name, revision, fetched)
        finally:
            close_all(locks)

    def _located(self, name: str) -> str | None:
        """Links are followed now: when they lead elsewhere, what this version serves must not change. Blocks."""
        roots = self._library.roots
        path = roots.locate(name)
        real = None if path is None else pinned(path)
        return real if real is not None and roots.holds(real) else path

    async def _begun(self) -> list[int]:
        """Locks that keep other gateways from deleting what is being fetched. Raises FetchFailed."""
        for _ in range(BEGIN_TRIES):
            try:
                return await run_detached(self._locks.begin_fetch, "begin to fetch", unclaimed=close_all)
            except BlockingIOError:
                await asyncio.sleep(BEGIN_EVERY_S)
        raise FetchFailed("Another gateway has been deleting weights for a minute; ask again.")

    def _commit_at(self, path: str, model: Model) -> str | None:
        """The commit of what lies there. Raises UnusableModel if another engine runs it."""
        record = self._library.find(path)
        if record is None:
            return None
        _expect_kind(record, model)
        return record.source.commit

    async def _fetched(self, model: Model, name: str, revision: str | None, fetched: set[str]) -> Version:
        downloads = self._downloads
        try:
            wanted = read_order(downloads.rules, model=name, revision=revision)
        except BadRequest as error:
            raise BadRequest(error.message, param="model_repo_id") from error
        # Weights that came there in another way since the last look need not be fetched.
        await self._library.refresh()
        known = {record.path for record in self._library.records}
        # Weights that are fetched while no update waits for them would belong to no version, and never be deleted.
        row = await downloads.submit(wanted, tenant=TENANT, key=NO_KEY, retry=False)
        state = await downloads.ended(row.id)
        if state is None or state.status is not OperationStatus.DONE:
            why = "it was cancelled" if state is None or state.error is None else state.error.message
            raise FetchFailed(f"{name} could not be fetched: {why}", public=f"{name} was not fetched.")
        (facts,) = await downloads.facts([state])
        place, records = facts.destination, self._library.records
        there = [record for record in records if is_below(record.path, place) or record.folder == place]
        fresh = [record.path for record in there if record.path not in known and _was_fetched(record, facts)]
        if not self._is_wanted_by_others(row):
            # At once: what was fetched for a model that cannot run it is deleted, unless another gateway uses it.
            await run_detached(lambda: self._mark_all(fresh), "mark weights")
            fetched.update(fresh)
        for path in fetched:
            await self._used(path)
        broken = [problem for problem in self._library.problems if is_below(problem.path, place)]
        record = _choose(there, broken, wanted.quantization, model, name)
        return Version(0, name, record.path, facts.commit, await self._used(record.path))

    def _mark_all(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._locks.mark(path)

    async def _used(self, path: str) -> bool:
        """Let no other gateway delete this. True if an update fetched it, here or elsewhere. Raises FetchFailed."""
        try:
            return await run_detached(lambda: self._locks.use(path), "use weights")
        except BlockingIOError:
            raise FetchFailed("The weights are just being deleted by another gateway; ask again.") from None

    async def keep(self, paths: Sequence[str]) -> None:
        """Let no gateway ever delete these: an operator names them, whichever gateway fetched them."""
        await run_detached(lambda: disown(_meant_by(paths)), "keep configured weights")

    async def use(self, versions: Collection[Version], *, only: bool = True) -> None:
        """Let no other gateway delete what these need, and with `only` let them delete what these do not need."""

        def use() -> None:
            for version in versions:
                with contextlib.suppress(BlockingIOError):
                    self._locks.use(version.path)
            if only:
                self._locks.use_only({version.path for version in versions})

        await run_detached(use, "use weights")

    def _is_wanted_by_others(self, ours: Operation) -> bool:
        """True if a user ordered the same meanwhile."""
        return any(
            row.key != NO_KEY and row.model == ours.model and (row.ended is None or row.ended >= ours.created)
            for row in self._downloads.newest_first()
        )

    async def remove_unused(self, paths: Iterable[str], in_use: Sequence[str], entries: Sequence[Entry]) -> list[str]:
        """Delete what lies at these paths, unless it is in use by any name, by these models or by another gateway.
        Returns those that could not be deleted because a gateway fetches: they are to be deleted later."""
        later: list[str] = []
        used = await run_detached(lambda: {*in_use, *chain.from_iterable(map(files_of, entries))}, "look at models")
        for path in await run_detached(lambda: _unused(paths, used), "compare versions"):
            try:
                locks = await run_detached(
                    lambda: self._locks.take(path),  # noqa: B023
                    "look for users of weights",
                    unclaimed=lambda locks: close_all(locks or ()),
                )
            except BlockingIOError:
                later.append(path)
                continue
            if locks is None:
                continue
            try:
                await self._remove(path, used)
            finally:
                await run_detached(lambda: self._locks.let_go(path, locks), "let go of weights")  # noqa: B023
        return later

    async def _remove(self, path: str, used: Collection[str]) -> None:
        """Delete what lies there, if it is in the library. A version that cannot be deleted stays."""
        if (record := self._library.find(path)) is None:
            # After a start it may not have looked yet.
            await self._library.refresh()
            record = self._library.find(path)
        others = [one for one in self._library.records if one is not record]
        if record is None or await run_detached(lambda: _is_needed(record, others, used), "compare files"):
            return
        try:
            freed = await self._library.remove(record)
            _log.info("version deleted", path=path, bytes=freed)
        except GreenroomError as error:
            _log.warning("version cannot be deleted", path=path, error=error.message)


def _was_fetched(record: LibraryRecord, facts: DownloadFacts) -> bool:
    """Whether the download fetched all files of this: others may have put models into its folder meanwhile."""
    if facts.files_total > len(facts.files):
        # Its list of files is cut short.
        return True
    fetched = {os.path.join(facts.destination, file.path) for file in facts.files}
    return all(os.path.join(record.folder, file.name) in fetched for file in record.files)


def _choose(
    there: Sequence[LibraryRecord],
    broken: Sequence[BrokenModel],
    quantization: str | None,
    model: Model,
    name: str,
) -> LibraryRecord:
    """The one of these that the model's engine runs. Raises UnusableModel."""
    fitting = [record for record in there if _fits(record.kind, model)]
    if quantization is not None:
        fitting = [one for one in fitting if (one.quantization or "").lower() == quantization.lower()]
    if not fitting and broken:
        path, why = broken[0].path, broken[0].why.rstrip(".")
        why = why if why.startswith(path) else f"{path}: {why}"
        raise UnusableModel(f"{why}. So {model.engine} cannot run {name}.")
    if len(fitting) != 1:
        names = ", ".join(record.id for record in fitting[:8]) or "none"
        raise UnusableModel(
            f"{name} must have one model that {model.engine} can run; it has {names}. "
            "Name one as org/name:QUANTIZATION."
        )
    return fitting[0]


def _fits(kind: ModelKind, model: Model) -> bool:
    if model.engine in ("vllm", "sglang"):
        return kind in (ModelKind.SAFETENSORS, ModelKind.GGUF)
    return ENGINE_OF_KIND[kind] == model.engine


def _expect_kind(record: LibraryRecord, model: Model) -> None:
    if not _fits(record.kind, model):
        raise UnusableModel(f"{record.id} has files of kind {record.kind.value}, which {model.engine} does not run.")


def _is_needed(record: LibraryRecord, others: Collection[LibraryRecord], used: Iterable[str]) -> bool:
    """Whether a file that would go with this is used: a projector or an adapter by a model of another folder. Blocks.
    What both only link to, as revisions of a repository do, is kept for the other anyway."""
    gone = {link_steps(path)[0] for path in removed_paths(record, others)}
    return any(step in gone for path in used for step in link_steps(path))


def _meant_by(paths: Iterable[str]) -> Iterator[str]:
    """These paths, the files of those that are folders, and where links among them lead. Blocks."""
    for path in paths:
        yield from link_steps(path)
        with contextlib.suppress(OSError):
            for name in os.listdir(path):
                yield from link_steps(os.path.join(path, name))


def _unused(paths: Iterable[str], in_use: Iterable[str]) -> list[str]:
    """Those that are not in use by any name: a link, or a folder and a file in it. Blocks."""
    used = [one for path in in_use for one in (path, os.path.realpath(path))]

    def is_used(path: str) -> bool:
        return any(is_below(path, one) or is_below(one, path) for one in used)

    return [path for path in paths if not (is_used(path) or is_used(os.path.realpath(path)))]
