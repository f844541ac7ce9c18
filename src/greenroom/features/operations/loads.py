"""Loads and unloads as operations: ordered by one request, watched by others until they have ended.

Owns the steps of a load: find the model, fetch it if that is allowed, make it ready. How moves run is the scheduler's
and the mover's; the rows are those of `table.py`. A row that had not ended when the gateway ended has failed. An order
that its caller waits for has a row too, but needs none: a full disk does not keep a model in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from greenroom.base.names import public_name
from greenroom.config.part import Part
from greenroom.core.model import DeviceKind, ModelId, MoveKind
from greenroom.errors import (
    BadRequest,
    GatewayBug,
    GreenroomError,
    LoadFailed,
    ModelNotFound,
    NotFound,
    OperationsFull,
    OperationStoreFull,
    Unloaded,
)
from greenroom.features.library.downloads import Downloads
from greenroom.features.operations.moves import OperatorMoves
from greenroom.library.orders import DownloadOrder, read_order
from greenroom.runtime.adhoc_model import ModelOptions, Order
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.known_models import Asker
from greenroom.runtime.operations.facts import end_with, error_of, facts_of
from greenroom.runtime.operations.files import Operation, OperationKind, OperationStatus
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.shell import Shell
from greenroom.telemetry.logs import get_logger

_log = get_logger("loads")

ROUTE: Final = "/v1/models/load"
UNLOAD_ROUTE: Final = "/v1/models/unload"
# A load that may be quicker than learned is never said to be done before it is.
PROGRESS_MAX: Final = 0.99


class LoadFacts(msgspec.Struct, frozen=True):
    """What is known of a load or unload beside its row; kept when it has ended."""

    # What it holds of GPUs, or what came free of them.
    gpu_mib: int | None = None
    took_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    share: float
    eta_s: float | None
    # From how long it took before, not from what it has done.
    is_estimated: bool


Steps = Callable[[], Coroutine[Any, Any, LoadFacts]]


@dataclass(frozen=True)
class Loads(Part):
    _shell: Shell
    _resolver: Resolver
    _downloads: Downloads
    _moves: OperatorMoves
    # What those load that have not ended; their rows have the names that were asked for.
    _models: dict[str, ModelId] = field(default_factory=dict)
    _fetches: dict[str, str] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[LoadFacts | GreenroomError]] = field(default_factory=dict)

    def order_for(self, name: str, options: ModelOptions) -> DownloadOrder:
        """The order to fetch a model of this name. Raises BadRequest if it is none of the hub."""
        return read_order(self._downloads.rules, model=name, quantization=options.quantization)

    async def submit(
        self,
        name: str,
        options: ModelOptions,
        evict: tuple[str, ...],
        asker: Asker,
        fetch: Callable[[], DownloadOrder],
        *,
        force: bool,
        tenant: str,
        key: str,
    ) -> Operation:
        """Begin to load a model. Raises ModelNotFound, BadRequest, ModelPinned, or that the table has no room. `fetch`
        is asked for the order to fetch it if it is not on disk; it raises why it may not be fetched."""
        resolver = self._resolver
        leaving = tuple([one for other in evict for one in self.here((await resolver.named(other, asker=asker)).id)])
        entry, order = await self._found(name, options, asker, fetch)
        given = resolver.adhoc.order_of(name, options, asker)
        in_the_way = self._in_the_way(entry, given)
        if force:
            leaving += in_the_way
        else:
            self._moves.expect_leavable(one for one in leaving + in_the_way if entry is None or one != entry.id)
        row = await self._row(OperationKind.LOAD, name, tenant, key)
        if entry is not None:
            self._models[row.id] = entry.id
        before = None if given is None else resolver.adhoc.stands(given)

        async def steps() -> LoadFacts:
            found, stands, replaced = entry, given, before
            if order is not None:
                await self._fetched(row, order)
            if found is None:
                found = await resolver.named(name, options, asker)
                stands = resolver.adhoc.order_of(name, options, asker)
                replaced = None if stands is None else resolver.adhoc.stands(stands)
                self._models[row.id] = found.id
            if stands is not None:
                await self._replaced(replaced, found, force)
            return await self._loaded(found.id, leaving, force)

        self._begin(row, steps)
        return row

    def _in_the_way(self, entry: Entry | None, given: Order | None) -> tuple[ModelId, ...]:
        """What leaves for this order: the model of the one that stands, and what may not be ready beside this one."""
        if entry is None or given is None:
            return ()
        standing, others = self._resolver.adhoc.order_at(given.home), self.here(entry.id)[1:]
        ordered = None if standing is None else standing.model
        return tuple(one for one in others if entry.spec.exclusive or one == ordered)

    async def _replaced(self, order: Order | None, by: Entry, force: bool) -> None:
        """What was ordered before leaves. Raises Unloaded if the new order does not stand any more either."""
        if order is not None and order.model != by.id and self._shell.loop.view.slots_of(order.model):
            await self._moves.move(MoveKind.UNLOAD, order.model, force=force)
        if not self._resolver.adhoc.orders_of([by.id]):
            raise Unloaded(f"{by.public_id} was unloaded or ordered otherwise meanwhile.")

    async def load(
        self, model: ModelId, evict: tuple[ModelId, ...], *, name: str, force: bool, tenant: str, key: str
    ) -> LoadFacts:
        """Load a model that is known, and wait until it is ready. Raises why it is not."""
        steps = partial(self._loaded, model, evict, force)
        return await self._ordered(OperationKind.LOAD, name, model, steps, tenant, key)

    async def unload(
        self, model: ModelId, grace_s: float | None, *, name: str | None = None, force: bool, tenant: str, key: str
    ) -> LoadFacts:
        """Unload all that the name of this model means, and wait until it is gone. Raises why it is not."""
        steps = partial(self._unloaded, model, grace_s, force)
        return await self._ordered(OperationKind.UNLOAD, name or public_name(model), model, steps, tenant, key)

    def here(self, model: ModelId) -> list[ModelId]:
        """This model, and other configurations of its name that are in memory or on their way."""
        view, known = self._shell.loop.view, self._resolver.catalog.configurations(model)
        return [model, *(one for one in known if one != model and view.slots_of(one))]

    async def _ordered(
        self, kind: OperationKind, name: str, model: ModelId, steps: Steps, tenant: str, key: str
    ) -> LoadFacts:
        """Take these steps as an operation and wait for its end. They go on if the caller leaves."""
        try:
            row = await self._row(kind, name, tenant, key)
        except (OperationsFull, OperationStoreFull):
            return await steps()
        self._models[row.id] = model
        task = self._begin(row, steps)
        await asyncio.wait((task,))
        if task.cancelled():
            raise Unloaded(f"The {kind.value} of {name} was overtaken by a shutdown.")
        if isinstance(outcome := task.result(), GreenroomError):
            raise outcome
        return outcome

    async def _row(self, kind: OperationKind, name: str, tenant: str, key: str) -> Operation:
        route = ROUTE if kind is OperationKind.LOAD else UNLOAD_ROUTE
        return await self._shell.table.add(kind, tenant=tenant, key=key, model=name, route=route)

    async def _found(
        self, name: str, options: ModelOptions, asker: Asker, fetch: Callable[[], DownloadOrder]
    ) -> tuple[Entry | None, DownloadOrder | None]:
        """The model, or the order to fetch it."""
        try:
            return await self._resolver.named(name, options, asker), None
        except ModelNotFound as missing:
            if not self._shell.config.library.download or not asker.sees(name):
                raise ModelNotFound(
                    f"{missing.message} It is not on disk; POST /v1/models/download fetches it, and library.download: "
                    "true lets a load do so.",
                    param="modelId",
                    details=missing.details,
                ) from missing
            try:
                return None, fetch()
            except BadRequest:
                raise missing from None

    def _begin(self, row: Operation, steps: Steps) -> asyncio.Task[LoadFacts | GreenroomError]:
        task = asyncio.get_running_loop().create_task(self._run(row, steps), name=row.kind.value)
        self._tasks[row.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(row.id, None))
        return task

    async def _run(self, row: Operation, steps: Steps) -> LoadFacts | GreenroomError:
        """What came of it, which is also in its row."""
        outcome: LoadFacts | GreenroomError
        try:
            # At a restart a row that was not begun has failed just as one that was.
            with contextlib.suppress(OperationStoreFull):
                await self._shell.table.start(row.id)
            outcome = await steps()
        except GreenroomError as error:
            outcome = error
        except Exception as bug:
            _log.bug(f"{row.kind.value} broke", bug, id=row.id)
            outcome = GatewayBug(repr(bug))
        if isinstance(outcome, LoadFacts):
            await end_with(self._shell.table, row.id, OperationStatus.DONE, None, outcome)
        else:
            await end_with(self._shell.table, row.id, OperationStatus.FAILED, error_of(outcome), LoadFacts())
        self._models.pop(row.id, None)
        self._fetches.pop(row.id, None)
        return outcome

    async def _loaded(self, model: ModelId, evict: tuple[ModelId, ...], force: bool) -> LoadFacts:
        began = self._shell.loop.clock()
        # It never leaves for itself.
        leaving = tuple(one for one in evict if one != model)
        await self._moves.move(MoveKind.LOAD, model, evict=leaving, force=force)
        return LoadFacts(self.gpu_mib(model), self._shell.loop.clock() - began)

    async def _unloaded(self, model: ModelId, grace_s: float | None, force: bool) -> LoadFacts:
        began = self._shell.loop.clock()
        models = self.here(model)
        orders = self._resolver.adhoc.orders_of(models)
        held_mib = sum(map(self.gpu_mib, models))
        for one in models:
            await self._moves.move(MoveKind.UNLOAD, one, grace_s=grace_s, force=force)
        self._resolver.adhoc.end(orders)
        freed_mib = max(0, held_mib - sum(map(self.gpu_mib, models)))
        return LoadFacts(freed_mib, self._shell.loop.clock() - began)

    async def _fetched(self, row: Operation, order: DownloadOrder) -> None:
        """Wait until the model is on disk. Raises LoadFailed."""
        downloads = self._downloads
        fetch = await downloads.submit(order, tenant=row.tenant, key=row.key)
        self._fetches[row.id] = fetch.id
        state = await downloads.ended(fetch.id)
        if state is None or state.status is not OperationStatus.DONE:
            why = "it was cancelled" if state is None or state.error is None else state.error.message
            raise LoadFailed(f"{order.name} could not be fetched: {why}")

    # --- watched ------------------------------------------------------------------------------------------------------

    def operations(self) -> Iterable[Operation]:
        """All rows of the table, the newest first."""
        return reversed(list(self._shell.table))

    def get(self, id: str, key: str | None = None) -> Operation:
        """Of this key, if one is given. Raises NotFound."""
        row = self._shell.table.get(id)
        if row is None or row.kind is not OperationKind.LOAD or key not in (None, row.key):
            raise NotFound(f"There is no load {id}. One that has ended is kept for an hour.")
        return row

    async def facts(self, row: Operation) -> LoadFacts:
        kept = await facts_of(self._shell.table, [row.id] if row.status.is_over else [], LoadFacts)
        return kept.get(row.id) or LoadFacts()

    async def progress(self, row: Operation) -> LoadProgress:
        """How far it is. Where it is fetched first, that is the first half."""
        if row.status.is_over:
            return LoadProgress(1.0 if row.status is OperationStatus.DONE else 0.0, None, False)
        fetch = self._downloads.get(self._fetches.get(row.id, ""))
        if fetch is None:
            return self.progress_of(self._models.get(row.id, ModelId(row.model)))
        if not fetch.status.is_over:
            (facts,) = await self._downloads.facts([fetch])
            return LoadProgress((facts.progress or 0.0) / 2, facts.eta_s, False)
        loading = self.progress_of(self._models.get(row.id, ModelId(row.model)))
        return LoadProgress(0.5 + loading.share / 2, loading.eta_s, loading.is_estimated)

    def progress_of(self, model: ModelId) -> LoadProgress:
        """How far a load of this model is, whatever began it."""
        view = self._shell.loop.view
        move = next((slot.move for slot in view.slots_of(model) if slot.move is not None), None)
        record = view.models.get(model)
        learned_s = None if record is None else record.learned_s.get(MoveKind.LOAD if move is None else move.kind)
        since_s = 0.0 if move is None else max(0.0, self._shell.loop.clock() - move.started)
        eta_s = None if learned_s is None else max(0.0, learned_s - since_s)
        starting = None if move is None else self._shell.slots.starting.get(move.slot)
        told = self._shell.hosted_slots.progress_of(model) if starting is None else starting.told()
        if told is None and learned_s is None and starting is not None:
            told = starting.read()
        by_time = 0.0 if not learned_s else since_s / learned_s
        share = min(by_time if told is None else told, PROGRESS_MAX)
        if starting is not None:
            share = starting.furthest = max(starting.furthest, share)
        if eta_s is None and share > 0:
            # At the rate at which it has come so far.
            eta_s = since_s * (1 - share) / share
        return LoadProgress(share, eta_s, told is None)

    def gpu_mib(self, model: ModelId) -> int:
        """What its slots hold on GPUs now."""
        view = self._shell.loop.view
        gpus = {device.id for device in view.ledger.devices.values() if device.kind is DeviceKind.GPU}
        held = (view.ledger.held_by(slot.id) for slot in view.slots_of(model))
        return sum(mib for claim in held for device, mib in claim.items() if device in gpus)

    async def close(self) -> None:
        """What still runs is forgotten: the next start calls it failed."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
