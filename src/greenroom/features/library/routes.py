"""`/v1/models/inventory`, `/loaded` and `/stats`: what is on disk, what is in memory, and how often that helped.

Every key may look; paths on disk are shown to admins only. Deleting a model is for admins: what is loaded, asleep,
configured or a version of another gateway is refused unless it is forced, and is unloaded here first then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from greenroom.access.keys import Permission
from greenroom.api import views
from greenroom.api.asgi import asked_by_admin, caller_of, owner_of
from greenroom.api.declared import NeededOperation, Routes, SignedCall, delete, get
from greenroom.api.listing import MODELS, ModelPath
from greenroom.api.overview import Overview, refuse_while_draining
from greenroom.api.reports.snapshot import Snapshot
from greenroom.api.views import View
from greenroom.base.detached import run_detached
from greenroom.base.names import public_name
from greenroom.core.model import ModelId
from greenroom.errors import ModelInUse, ModelNotFound, RemovalFailed, shown
from greenroom.library.library import Library
from greenroom.library.records import LibraryRecord, told, told_problem
from greenroom.library.removal import paths_of, removed_paths
from greenroom.library.roots import link_steps
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.moves.admission import files_of
from greenroom.runtime.shell import Shell
from greenroom.telemetry.history import ModelCounts
from greenroom.telemetry.logs import get_logger

INVENTORY: Final = f"{MODELS}/inventory"
# The files of all models are compared with those of the one to be deleted; a disk may take so long for that.
COMPARE_MAX_S: Final = 20.0
CHOICES_MAX: Final = 20

_log = get_logger("library")
Answer = TypeVar("Answer")

Force = Annotated[
    bool, Query(description="Delete it although it is loaded, asleep or configured; it is unloaded first.")
]


class FileView(View):
    name: str
    """Relative to the model's folder."""
    bytes: int
    sha256: str | None
    """Where it is known: for large files of the hub's cache, and for downloads."""


class SourceView(View):
    """Where it came from; all null if it was put there by hand."""

    hub_id: str | None
    commit: str | None
    url: str | None


class RecordView(View):
    """A model on disk."""

    id: str
    """What a request may name it by: the hub id, `org/name:QUANT`, or the path relative to its root."""
    kind: str
    """gguf, safetensors, pipeline or whisper."""
    source: SourceView
    files: list[FileView]
    bytes: int
    quantization: str | None
    context_length: int | None
    parameters: int | None
    """Counted from the files."""
    memory_mib: int | None
    """Estimated: of a GPU, or of the host where there is none."""
    added: float
    """Unix time."""
    last_used: float | None
    path: str | None
    """For admins."""
    root: str | None
    """For admins."""


class ProblemView(View):
    path: str
    why: str


class InventoryView(View):
    object: str
    data: list[RecordView]
    problems: list[ProblemView]
    """For admins: what looks like a model and is incomplete or damaged, or has a name that cannot be asked for."""
    looking: bool
    """The folders are still being looked at for the first time: more may come."""


class LoadedModel(View):
    id: str
    tier: views.Tier
    engine: str
    memory: dict[str, int]
    """MiB by device."""
    memory_mib: int
    in_flight: int
    last_used_s_ago: float | None
    moving: views.MovingView | None


class LoadedList(View):
    object: str = "list"
    data: list[LoadedModel]
    """Models that are ready or asleep now."""


class LookupStats(View):
    """Since the start of the gateway."""

    hits: int
    """Requests that were granted at once."""
    misses: int
    """Requests that had to wait, or were refused."""
    hit_rate: float | None
    loads: int
    """Loads that succeeded."""
    evictions: int
    load_seconds_mean: float | None


class ModelStats(LookupStats):
    id: str


class StatsView(LookupStats):
    models: list[ModelStats]


class Removed(View):
    id: str
    deleted: bool = True
    bytes_freed: int
    """What came free on disk; less than its size where other models need the same files."""
    unloaded: list[str]
    """Models that used its files and were unloaded first."""


def _delete(call: SignedCall) -> NeededOperation:
    return NeededOperation("model-delete", call.scope["path_params"]["model_id"])


class Unloading(Protocol):
    async def unload(self, model: ModelId, grace_s: float | None, *, force: bool, tenant: str, key: str) -> object: ...


class KeptVersions(Protocol):
    def kept_by(self, path: str) -> str | None:
        """The model of which this is a version that does not serve now, and is kept."""


@dataclass(frozen=True)
class LibraryRoutes(Routes):
    _shell: Shell
    _library: Library
    _loads: Unloading
    _versions: KeptVersions
    _gateway: Overview

    @get(INVENTORY, needs=Permission.ASK, response_class=Response, responses={200: {"model": InventoryView}})
    async def inventory(self, request: Request) -> Response:
        """Every model on disk below the roots, whether it is configured or not. Looks in memory only."""
        library, is_admin, sees = self._library, asked_by_admin(request), caller_of(request).sees
        problems = library.problems if is_admin else ()
        answer = {
            "object": "list",
            "data": [told(record, with_paths=is_admin) for record in library.records if sees(record.id)],
            "problems": [told_problem(one) for one in problems],
            "looking": library.is_looking,
        }
        # Thousands of records are written at once, without a class for each.
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @get(f"{MODELS}/loaded", needs=Permission.ASK)
    async def loaded(self, request: Request) -> LoadedList:
        """Models that are ready or asleep now, with the memory each holds."""
        models = Snapshot(self._gateway).models(caller_of(request), to_operator=asked_by_admin(request))
        return LoadedList(
            data=[
                # Its other fields are left out.
                LoadedModel(**dict(model), memory_mib=sum(model.memory.values()))
                for model in models
                if model.tier != "cold"
            ]
        )

    @get(f"{MODELS}/stats", needs=Permission.ASK)
    async def stats(self, request: Request) -> StatsView:
        """How often a model was there when it was asked for. Unlisted models are named to admins only."""
        is_admin, counted, total = asked_by_admin(request), self._shell.metrics.model_counts(), ModelCounts()
        sees = caller_of(request).sees
        for model, counts in counted.items():
            if sees(model):
                total.add(counts)
        seen = [entry for entry in self._shell.catalog.shown if sees(entry.base_id)]
        listed = [entry for entry in seen if is_admin or not entry.config.unlisted]
        names = [public_name(one.id) for one in listed]
        models = [ModelStats(id=name, **_stats(counted.get(name, ModelCounts()))) for name in names]
        return StatsView(models=models, **_stats(total))

    # --- deleting ---------------------------------------------------------------------------------------------------

    @delete(INVENTORY + "/{model_id:path}", needs=Permission.DELETE, signed=_delete)
    async def remove(self, request: Request, model_id: ModelPath, force: Force = False) -> Removed:
        """Delete a model from disk. 409 if it is loaded, asleep, configured or a version of another gateway, unless
        `force=true`."""
        refuse_while_draining(self._shell)
        record = self._record(model_id)
        users = await self._users_of(record)
        if not force and (name := self._versions.kept_by(record.path)) is not None:
            raise ModelInUse(
                f"{record.id} is a version that {name} can go back to. Ask with force=true to delete it all the same.",
                param="model",
            )
        if users and not force:
            raise _in_use(record, users, [entry for entry in users if self._slots(entry)])
        if not force:
            locks = self._library.locks
            looking = run_detached(lambda: locks.is_used_elsewhere(record.path), "look for users of weights")
            if await _answered(record, looking):
                raise _used_elsewhere(record)
        unloaded = [entry.id for entry in users if self._slots(entry)]
        for model in unloaded:
            await self._loads.unload(model, None, force=force, **owner_of(request))
        freed = await self._library.remove(record, self._deleting(record, force=force))
        _log.info("model deleted", model=record.id, bytes_freed=freed, unloaded=len(unloaded))
        return Removed(id=record.id, bytes_freed=freed, unloaded=[public_name(model) for model in unloaded])

    @contextlib.contextmanager
    def _deleting(self, record: LibraryRecord, *, force: bool) -> Iterator[None]:
        """Other gateways cannot begin to use it meanwhile. Blocks. Raises ModelInUse if one has since it was looked."""
        try:
            with self._library.locks.deleting(record.path, force=force):
                yield
        except BlockingIOError:
            raise _used_elsewhere(record) from None

    async def users_of(self, name: str) -> list[Entry]:
        """Models that a deletion by this name would take files from. Raises ModelNotFound or RemovalFailed."""
        return await self._users_of(self._record(name))

    def _record(self, name: str) -> LibraryRecord:
        """The model with exactly this id or path: a name that several could be meant by deletes none of them. The id of
        a configured model means that one, as in every request."""
        library, entry = self._library, self._shell.catalog.find(name)
        is_configured = entry is not None and not entry.is_adhoc
        record = library.find(name)
        if is_configured and entry is not None and record is not None and record.path != entry.config.path:
            raise ModelNotFound(
                f"{shown(name)} is configured, with other files than those of this name on disk. Name those by their "
                "path.",
                param="model",
            )
        if record is not None and name in (record.id, record.path):
            return record
        choices = [one.id for one in library.records if one.id.startswith((f"{name}:", f"{name}@"))]
        hint = f"GET {INVENTORY} lists those there are."
        if choices:
            hint = f"Say which one: {', '.join(choices[:CHOICES_MAX])}."
        elif record is not None:
            hint = f"Its id is {record.id}."
        raise ModelNotFound(f"There is no model with the id {shown(name)} on disk. {hint}", param="model")

    def _slots(self, entry: Entry) -> bool:
        """True if it holds memory or is about to."""
        return bool(self._shell.loop.scheduler.view.slots_of(entry.id))

    async def _users_of(self, record: LibraryRecord) -> list[Entry]:
        """Models that are configured or in memory and need a file of this one. Raises RemovalFailed."""
        shell = self._shell
        entries = [entry for entry in shell.catalog if entry.id in shell.config.models or self._slots(entry)]
        others = [one for one in self._library.records if one is not record]
        return await _answered(record, run_detached(lambda: _sharing(record, others, entries), "compare files"))


async def _answered(record: LibraryRecord, asked: Awaitable[Answer]) -> Answer:
    """What a look at the disk told. Raises RemovalFailed if it fails or takes too long."""
    try:
        async with asyncio.timeout(COMPARE_MAX_S):
            return await asked
    except OSError as error:
        why = error.strerror or "it does not answer"
        raise RemovalFailed(
            f"{record.id}: its disk, or that of a configured model, fails ({why}); nothing was deleted."
        ) from error


def _sharing(record: LibraryRecord, others: Sequence[LibraryRecord], entries: Sequence[Entry]) -> list[Entry]:
    """The models that need one of its files, or one that would go with them. Blocks. What both only link to, as
    revisions of a repository do, is kept for the other anyway."""
    mine = {link_steps(path)[0] for path in (*paths_of(record), *removed_paths(record, others), record.path)}
    return [entry for entry in entries if not mine.isdisjoint(chain.from_iterable(map(link_steps, files_of(entry))))]


def _in_use(record: LibraryRecord, users: Sequence[Entry], loaded: Sequence[Entry]) -> ModelInUse:
    why = "loaded or asleep" if loaded else "configured"
    names = ", ".join(public_name(entry.id) for entry in users[:8])
    return ModelInUse(
        f"{record.id} is {why} (as {names}). Ask with force=true to delete it all the same; it is unloaded first.",
        param="model",
    )


def _used_elsewhere(record: LibraryRecord) -> ModelInUse:
    return ModelInUse(
        f"{record.id} is a version that another gateway serves or can go back to. Ask with force=true to delete it all "
        "the same.",
        param="model",
    )


def _stats(counted: ModelCounts) -> dict[str, Any]:
    asked = counted.hits + counted.misses
    return {
        "hits": counted.hits,
        "misses": counted.misses,
        "hit_rate": round(counted.hits / asked, 4) if asked else None,
        "loads": counted.loads,
        "evictions": counted.evictions,
        "load_seconds_mean": round(counted.load_s / counted.loads, 3) if counted.loads else None,
    }
