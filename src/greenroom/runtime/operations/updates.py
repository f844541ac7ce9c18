"""Updates: a new version of a model is fetched, loaded beside the old one, proves itself, and takes its name.

Owns the steps and their order, one update of a model at a time, and what is told of the last one. Whatever fails before
the version is promised on disk leaves the old one serving, untouched; once it is promised, the name flips in the same
step of the loop. How weights are found is `weights.py`, how moves run is the scheduler's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from greenroom.config.schema import Config, Model, ModelVersions
from greenroom.core.events import ConfigChanged, Event, Learned, VersionPromoted
from greenroom.core.model import ModelId, ModelSpec, MoveKind
from greenroom.core.view import SchedulerView
from greenroom.errors import (
    BadRequest,
    GatewayBug,
    GreenroomError,
    ModelNotFound,
    NotFound,
    OperationStoreFull,
    ShuttingDown,
    TooLarge,
    UnusableModel,
    UpdateInProgress,
    WouldInterrupt,
)
from greenroom.library.roots import is_below
from greenroom.library.versions import NamedVersions, Version, VersionStore
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.detached import run_detached
from greenroom.runtime.operations.facts import end_with, facts_of
from greenroom.runtime.operations.files import Operation, OperationError, OperationKind, OperationStatus
from greenroom.runtime.operations.loads import MoveOrders
from greenroom.runtime.operations.result_part import disk_failed
from greenroom.runtime.operations.table import OperationTable
from greenroom.runtime.operations.warm_up import WarmUp
from greenroom.runtime.operations.weights import TENANT, FoundWeights, Weights, WeightsOrder
from greenroom.runtime.slots import LiveSlots
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.telemetry.logs import get_logger

_log = get_logger("versions")

ROUTE: Final = "/update-model"
# A first version that cannot be had is tried again: after so long, then twice as long each time.
FIRST_PAUSE_S: Final = 5.0
FIRST_PAUSE_MAX_S: Final = 300.0
INTERRUPTED: Final = OperationError("restarted", "The gateway ended during the last update, which is not done.")


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """`number` is the least number that the version gets: its own is larger than every earlier one of the model."""

    weights: WeightsOrder
    number: int | None = None
    allow_gap: bool = False
    # To kept weights instead of new ones.
    back_to: Version | None = None
    # The number of the desired state that asks for it.
    state: int = 0


class UpdateFacts(msgspec.Struct, frozen=True):
    """What is known of an update beside its row; kept when it has ended."""

    model: str
    repo_id: str
    revision: str | None = None
    step: str = ""
    number: int | None = None
    commit: str | None = None
    took_s: float | None = None
    # The least number that was asked for.
    number_asked: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateServices:
    """`unchanging` is held while the configuration must stay as it is; `forgotten` is called when a model has left."""

    config: Callable[[], Config]
    catalog: Catalog
    store: VersionStore
    weights: Weights
    moves: MoveOrders
    warm_up: WarmUp
    slots: LiveSlots
    hosted_slots: HostedSlots
    post: Callable[[Event], None]
    clock: Callable[[], float]
    learned: Callable[[], Mapping[ModelId, Learned]]
    unchanging: asyncio.Lock
    is_draining: Callable[[], bool]
    forgotten: Callable[[], None]
    view: Callable[[], SchedulerView]
    until: Callable[[Callable[[], bool]], Awaitable[None]]
    wall: Callable[[], float] = time.time


@dataclass(slots=True)
class _Running:
    """An update that runs. `row` is empty until it is on disk."""

    facts: UpdateFacts
    row: str = ""
    task: asyncio.Task[Version | GreenroomError] | None = None

    def at(self, step: str) -> None:
        self.facts = msgspec.structs.replace(self.facts, step=step)


class Updates:
    def __init__(self, table: OperationTable, services: UpdateServices) -> None:
        self._table = table
        self._services = services
        self._running: dict[str, _Running] = {}
        self._errors: dict[str, OperationError] = {}
        self._desired: dict[str, UpdateFacts] = {}
        # The moves that bring old versions back, one for each model whose update failed while it was held.
        self._coming_back: set[asyncio.Task[None]] = set()
        # Models whose first version is being fetched, with the repository.
        self._firsts: dict[str, tuple[str, asyncio.Task[None]]] = {}

    def start(self) -> None:
        """Fetch the first version of models that have none and name a repository. Also after a reload."""
        for name, model in self._services.config().models.items():
            repo_id = None if model.versions is None else model.versions.repo_id
            if repo_id is None or self.of(name).current is not None:
                continue
            known_id, known = self._firsts.get(name, (repo_id, None))
            if known is not None and not known.done():
                if known_id == repo_id:
                    continue
                known.cancel()
            task = asyncio.get_running_loop().create_task(self._first(name, repo_id), name=f"first {name}")
            self._firsts[name] = repo_id, task

    async def _first(self, name: str, repo_id: str) -> None:
        """Until it has a version, whoever asked for that."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                row = await self.submit(name, UpdateOrder(WeightsOrder(repo_id)), tenant=TENANT, key=TENANT)
                await self.ended(row.id)
                return
            except ShuttingDown:
                return
            except GreenroomError:
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, FIRST_PAUSE_MAX_S)
            model = self._services.config().models.get(name)
            if model is None or model.versions is None or self.of(name).current is not None:
                return

    # --- asked --------------------------------------------------------------------------------------------------------

    def options(self, model: str) -> ModelVersions:
        """Raises BadRequest or ModelNotFound for one that is not under version control."""
        found = self._services.config().models.get(model)
        if found is None:
            raise ModelNotFound.named(model)
        if found.versions is None:
            raise BadRequest(f"{model} is not under version control: set its key `versions`.", param="model")
        return found.versions

    def of(self, model: str) -> NamedVersions:
        return self._services.store.of(model)

    def running(self, model: str) -> UpdateFacts | None:
        return None if (found := self._running.get(model)) is None else found.facts

    def desired(self, model: str) -> UpdateFacts | None:
        """What the last update that was asked for wants; None if it is what serves."""
        return self._desired.get(model)

    def error(self, model: str) -> OperationError | None:
        """Why the last update failed; None if it did not."""
        if model in self._errors or model in self._running:
            return self._errors.get(model)
        return None if self.of(model).prepared is None else INTERRUPTED

    async def submit(self, model: str, order: UpdateOrder, *, tenant: str, key: str) -> Operation:
        """Begin an update. Raises UpdateInProgress, ShuttingDown, BadRequest, or that the table has no room."""
        self.options(model)
        if self._services.is_draining():
            raise ShuttingDown("The gateway is shutting down and takes no more orders.", retry_after_s=5.0)
        if (other := self._running.get(model)) is not None:
            raise UpdateInProgress(
                f"{model} is being updated to {other.facts.repo_id} ({other.facts.step}). Ask again after that.",
                beside={"taskId": other.row},
            )
        asked = order.weights
        facts = UpdateFacts(model, asked.repo_id, asked.revision, "queued", number_asked=order.number)
        running = self._running[model] = _Running(facts)
        try:
            row = await self._table.add(
                OperationKind.UPDATE,
                b"",
                (),
                0,
                tenant=tenant,
                key=key,
                model=model,
                route=ROUTE,
                priority=0,
                retry=False,
            )
        except BaseException:
            del self._running[model]
            raise
        running.row = row.id
        self._desired[model] = running.facts
        running.task = asyncio.get_running_loop().create_task(self._run(row, running, order), name=f"update {model}")
        return row

    async def rollback(self, model: str, number: int | None, *, tenant: str, key: str) -> Operation:
        """Begin to go back to kept weights, under a new number. Raises BadRequest if there are none."""
        self.options(model)
        kept = self.of(model).kept
        back_to = next((one for one in kept if number in (None, one.number)), None)
        if back_to is None:
            there = ", ".join(str(one.number) for one in kept) or "none"
            raise BadRequest(f"{model} cannot go back to that version; those that are kept: {there}.", param="version")
        order = UpdateOrder(WeightsOrder(back_to.repo_id, back_to.commit), back_to=back_to)
        return await self.submit(model, order, tenant=tenant, key=key)

    async def settle(self, model: str, state: int) -> None:
        """Note that what serves is what this desired state wants. Raises OperationStoreFull."""
        await self._write(model, msgspec.structs.replace(self.of(model), state=state))

    async def ended(self, id: str) -> Version:
        """Wait for the end of an update that runs. Raises why it failed."""
        running = next((one for one in self._running.values() if one.row == id), None)
        if running is None or running.task is None:
            raise NotFound(f"There is no update {id} that runs.")
        await asyncio.wait((running.task,))
        if running.task.cancelled():
            raise ShuttingDown("The update was overtaken by a shutdown.")
        outcome = running.task.result()
        if isinstance(outcome, GreenroomError):
            raise outcome
        return outcome

    def get(self, id: str) -> Operation:
        """Raises NotFound."""
        row = self._table.get(id)
        if row is None or row.kind is not OperationKind.UPDATE:
            raise NotFound(f"There is no update {id}. One that has ended is kept for an hour.")
        return row

    async def facts(self, row: Operation) -> UpdateFacts:
        running = next((one for one in self._running.values() if one.row == row.id), None)
        if running is not None:
            return running.facts
        kept = await facts_of(self._table, [row.id], UpdateFacts)
        return kept.get(row.id) or UpdateFacts(row.model, "")

    async def close(self) -> None:
        """What still runs is forgotten: the next start calls it failed, and serves what was promised."""
        updates = [running.task for running in self._running.values() if running.task is not None]
        tasks = [*updates, *(task for _, task in self._firsts.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # An update that is cancelled may have begun one just now.
        for task in self._coming_back:
            task.cancel()
        await asyncio.gather(*self._coming_back, return_exceptions=True)

    # --- the steps ----------------------------------------------------------------------------------------------------

    async def _run(self, row: Operation, running: _Running, order: UpdateOrder) -> Version | GreenroomError:
        """What came of it, which is also in its row."""
        model, began = row.model, self._services.clock()
        try:
            with contextlib.suppress(OperationStoreFull):
                await self._table.start(row.id)
            version = await self._updated(model, running, order)
        except GreenroomError as error:
            await self._failed(row, running, error)
            return error
        except Exception as bug:
            _log.bug("update broke", bug, id=row.id)
            failure = GatewayBug(repr(bug))
            await self._failed(row, running, failure)
            return failure
        took_s = self._services.clock() - began
        self._errors.pop(model, None)
        self._desired.pop(model, None)
        facts = msgspec.structs.replace(
            running.facts, step="done", number=version.number, commit=version.commit, took_s=took_s
        )
        del self._running[model]
        await end_with(self._table, row.id, OperationStatus.DONE, None, facts)
        _log.info(
            "version serves", model=model, version=version.number, repo_id=version.repo_id, took_s=round(took_s, 3)
        )
        return version

    async def _failed(self, row: Operation, running: _Running, error: GreenroomError) -> None:
        model, is_bug = row.model, isinstance(error, GatewayBug)
        said = OperationError(error.code, "Something went wrong in the gateway." if is_bug else error.message)
        self._errors[model] = said
        _log.warning("update failed", model=model, step=running.facts.step, code=said.code, error=said.message)
        del self._running[model]
        with contextlib.suppress(OperationStoreFull):
            await self._write(model, replace_prepared(self.of(model), None))
        await end_with(self._table, row.id, OperationStatus.FAILED, said, running.facts)

    async def _updated(self, name: str, running: _Running, order: UpdateOrder) -> Version:
        services = self._services
        model = services.config().models.get(name)
        if model is None or model.versions is None:
            raise ModelNotFound.named(name)
        running.at("fetching")
        found = await self._found(model, order)
        running.at("checking")
        version = self._numbered(name, order, found)
        coming = await self._checked(name, model, version)
        await self._write(name, replace_prepared(self.of(name), version))
        running.at("loading")
        try:
            self._add(coming)
            await self._ready(coming, running, order.allow_gap)
            running.at("warming")
            await services.warm_up(coming, model.versions)
            running.at("flipping")
            await self._promised(name, model, coming, version)
        except BaseException:
            self._give_up(coming)
            raise
        finally:
            self._release(name)
        return version

    async def _found(self, model: Model, order: UpdateOrder) -> FoundWeights:
        back = order.back_to
        if back is None:
            return await self._services.weights.found(model, order.weights)
        return FoundWeights(back.path, back.repo_id, back.commit, back.is_fetched)

    def _numbered(self, name: str, order: UpdateOrder, found: FoundWeights) -> Version:
        known = self.of(name)
        number = max(known.last_number + 1, order.number or 0)
        earlier = (one for one in (known.current, *known.kept) if one is not None)
        is_fetched = found.is_fetched or any(one.is_fetched and one.path == found.path for one in earlier)
        since = round(self._services.wall(), 3)
        return Version(number, found.repo_id, found.path, found.commit, is_fetched, since, order.state)

    async def _checked(self, name: str, model: Model, version: Version) -> Entry:
        """The coming version, whose files its engine can use as far as they tell. Raises UnusableModel."""
        catalog = self._services.catalog

        def look() -> tuple[Entry, str | None]:
            if not os.path.exists(version.path):
                return catalog.coming(name, model, version), f"there is nothing at {version.path}"
            entry = catalog.coming(name, model, version)
            return entry, entry.engine.unusable(entry.config)

        entry, problem = await run_detached(look, f"look at {name}")
        if problem is not None:
            raise UnusableModel(f"{version.repo_id} cannot be served by {name}: {problem}.")
        return entry

    async def _write(self, name: str, versions: NamedVersions) -> None:
        """Raises OperationStoreFull if the disk does not take it."""
        try:
            await run_detached(lambda: self._services.store.put(name, versions), "write versions")
        except OSError as error:
            raise disk_failed(error) from error

    def _add(self, coming: Entry) -> None:
        services, name = self._services, coming.spec.version_of
        assert name is not None
        services.slots.coming(coming.id, name)
        services.catalog.add(coming)
        known = services.learned().get(name)
        learned = None if known is None else {coming.id: known}
        services.post(ConfigChanged(services.clock(), models=(coming.spec,), learned=learned))

    async def _ready(self, coming: Entry, running: _Running, allow_gap: bool) -> None:
        """Load it beside the old version, or in its place where both do not fit. Raises why it is not ready."""
        moves = self._services.moves
        try:
            await moves.move(MoveKind.LOAD, coming.id)
            return
        except TooLarge as error:
            if not await self._is_prepared(coming) and not allow_gap:
                raise WouldInterrupt(
                    f"{coming.id} does not fit beside the version that serves, and host memory or its engine does not "
                    "let the two change places quickly. `allow_gap: true` lets requests wait for a whole load."
                ) from error
        running.at("draining")
        await self._hold(coming)
        running.at("loading")
        await moves.move(MoveKind.LOAD, coming.id)

    async def _is_prepared(self, coming: Entry) -> bool:
        """Bring it into host memory. False if its engine cannot, or if there is no room for it beside the old one."""
        if not (coming.facts.can_sleep and coming.engine.hosted):
            return False
        try:
            await self._services.moves.move(MoveKind.PREPARE, coming.id)
        except TooLarge:
            return False
        return True

    async def _hold(self, coming: Entry) -> None:
        """Let requests for the model wait and its answers end; then its slots leave. Raises WouldInterrupt."""
        services, name = self._services, coming.spec.version_of
        assert name is not None
        entry = services.catalog.find(name)
        if entry is None or entry.config.versions is None:
            return
        limit_s = entry.config.versions.drain_s
        services.post(ConfigChanged(services.clock(), models=(replace(entry.spec, held=True),)))
        try:
            async with asyncio.timeout(limit_s):
                await services.until(lambda: all(not slot.in_flight for slot in services.view().slots_of(name)))
        except TimeoutError:
            raise WouldInterrupt(
                f"Answers of {name} took longer than {limit_s:g} s (versions.drain_s), so that it could not leave for "
                "its next version."
            ) from None

    def still_held(self, spec: ModelSpec) -> ModelSpec:
        """What a reload makes of a model that is held: it stays so, unless it has other processes now."""
        record = self._services.view().models.get(spec.id)
        is_held = record is not None and record.spec.held and record.spec.revision == spec.revision
        return replace(spec, held=True) if is_held else spec

    def _release(self, name: str) -> None:
        """The model is no longer held. What waits for it brings it back."""
        services, record = self._services, self._services.view().models.get(ModelId(name))
        entry = services.catalog.find(name)
        if record is not None and record.spec.held and entry is not None:
            services.post(ConfigChanged(services.clock(), models=(entry.spec,)))
            # It was there before, so it comes back also if nothing waits for it now.
            coming_back = services.moves.move(MoveKind.LOAD, ModelId(name))
            task = asyncio.get_running_loop().create_task(_quietly(coming_back), name=f"bring {name} back")
            self._coming_back.add(task)
            task.add_done_callback(self._coming_back.discard)

    async def _promised(self, name: str, model: Model, coming: Entry, version: Version) -> None:
        """Write the version down, then let it take the name, in one step. Raises, and then nothing has changed."""
        services = self._services
        assert model.versions is not None
        async with services.unchanging:
            now = services.catalog.find(coming.id)
            if services.config().models.get(name) != model or now is None or now.spec.version_of is None:
                raise BadRequest(
                    f"The configuration of {name} was changed during its update. Ask again.", param="model"
                )
            # A reload may have made it anew.
            coming, before = now, self.of(name)
            after, dropped = before.promoted(version, model.versions.keep)
            writing = asyncio.ensure_future(self._write(name, after))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                # What was written counts, so it is flipped to even while shutting down.
                await asyncio.wait((writing,))
                if writing.exception() is None:
                    self._flip(coming, model, version)
                raise
            self._flip(coming, model, version)
        await self._remove(dropped)

    def _flip(self, coming: Entry, model: Model, version: Version) -> None:
        """From here on the name means the new version; answers that were granted end on the old one."""
        services = self._services
        entry = services.catalog.promote(coming, model, version)
        services.slots.promoted(entry, coming.id)
        services.hosted_slots.promoted(entry, coming.id)
        services.slots.ended(coming.id)
        services.post(VersionPromoted(services.clock(), coming.id, entry.spec))

    def _give_up(self, coming: Entry) -> None:
        """Take a version away that did not make it. Does nothing for one that was promoted."""
        services = self._services
        if (known := services.catalog.find(coming.id)) is None or known.spec.version_of is None:
            return
        services.catalog.remove(coming.id)
        services.slots.ended(coming.id)
        services.post(ConfigChanged(services.clock(), removed=(coming.id,)))
        services.forgotten()

    async def _remove(self, dropped: Iterable[Version]) -> None:
        """Delete the files of versions that are no longer kept, if an update fetched them and no model needs them."""
        if not (fetched := [one.path for one in dropped if one.is_fetched]):
            return
        in_use = [entry.real_path for entry in self._services.catalog if entry.real_path]
        for name in self._services.config().models:
            known = self.of(name)
            in_use += [one.path for one in (known.current, *known.kept) if one is not None]
        for path in await run_detached(lambda: _unused(fetched, in_use), "compare versions"):
            await self._services.weights.remove(path)


async def _quietly(work: Awaitable[None]) -> None:
    """What it raises is told to those that ask for the model."""
    with contextlib.suppress(GreenroomError):
        await work


def _unused(paths: Iterable[str], in_use: Iterable[str]) -> list[str]:
    """Those that are not in use by any name: a link, or a folder and a file in it. Blocks."""
    used = [one for path in in_use for one in (path, os.path.realpath(path))]

    def is_used(path: str) -> bool:
        return any(is_below(path, one) or is_below(one, path) for one in used)

    return [path for path in paths if not (is_used(path) or is_used(os.path.realpath(path)))]


def replace_prepared(versions: NamedVersions, version: Version | None) -> NamedVersions:
    return msgspec.structs.replace(versions, prepared=version)
