"""Updates: a new version of a model is fetched, loaded beside the old one, proves itself, and takes its name.

Owns which update runs, one of a model at a time, what is told of the last one, and the files that updates fetched. How
weights are found is `weights.py`; how a version comes to serve, or leaves the old one serving, `version_changes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Final

import msgspec

from greenroom.base.detached import SystemShort
from greenroom.base.repeated import AGAIN_S
from greenroom.config.diff import Changes
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config
from greenroom.errors import (
    BadRequest,
    FetchFailed,
    GatewayBug,
    GreenroomError,
    ModelNotFound,
    NotFound,
    OperationStoreFull,
    ShuttingDown,
    UpdateInProgress,
)
from greenroom.features.library.downloads import Downloads
from greenroom.features.operations.moves import OperatorMoves
from greenroom.features.versions.store import NamedVersions, VersionStore
from greenroom.features.versions.version_changes import RunningUpdate, UpdateFacts, VersionChanges
from greenroom.features.versions.weights import TENANT, VersionWeights
from greenroom.library.records import Version
from greenroom.runtime.known_models import KnownModels
from greenroom.runtime.loop import Tickets
from greenroom.runtime.operations.facts import end_with, error_of, facts_of
from greenroom.runtime.operations.files import Operation, OperationError, OperationKind, OperationStatus
from greenroom.runtime.shell import Shell
from greenroom.telemetry.logs import get_logger

_log = get_logger("versions")

ROUTE: Final = "/update-model"
# A first version that cannot be had is tried again: after so long, then twice as long each time.
FIRST_PAUSE_S: Final = 5.0
FIRST_PAUSE_MAX_S: Final = 300.0
# So long an update waits until weights are locked or deleted. A disk that hangs may never end that.
USING_MAX_S: Final = 60.0
KEEP_MAX_S: Final = 10.0
INTERRUPTED: Final = OperationError("restarted", "The gateway ended during the last update, which is not done.")


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """`number` is the least number that the version gets: its own is larger than every earlier one of the model."""

    repo_id: str
    """An id of the hub with a revision, or a path below the roots."""
    revision: str | None = None
    number: int | None = None
    allow_gap: bool = False
    # To kept weights instead of new ones.
    back_to: Version | None = None
    # The number of the desired state that asks for it.
    state: int = 0


class Updates(Part):
    def __init__(
        self,
        shell: Shell,
        store: VersionStore,
        models: KnownModels,
        downloads: Downloads,
        moves: OperatorMoves,
        tickets: Tickets,
    ) -> None:
        self._shell = shell
        self._table = shell.table
        self._store = store
        self._weights = VersionWeights(downloads)
        self._running: dict[str, RunningUpdate] = {}
        self._ending: dict[str, UpdateFacts] = {}
        self._errors: dict[str, OperationError] = {}
        self._desired: dict[str, UpdateFacts] = {}
        self._changes = VersionChanges(shell, store, models, moves, tickets)
        # Paths that updates of a model fetched and of which none became a version yet.
        self._fetched: dict[str, set[str]] = {}
        # Models whose first version is being fetched, with the repository.
        self._firsts: dict[str, tuple[str, asyncio.Task[None]]] = {}
        # Locks or deletes weights. Updates begin when it has ended.
        self._using: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Fetch the first version of models that have none and name a repository."""
        self._using = asyncio.get_running_loop().create_task(self._use_weights(self._using), name="use weights")
        for name, model in self._shell.config.models.items():
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
        """Order its first version again and again, until it has any version."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                row = await self.submit(name, UpdateOrder(repo_id), tenant=TENANT, key=TENANT)
                await self.ended(row.id)
                return
            except ShuttingDown:
                return
            except UpdateInProgress as other:
                # Of what was configured before, or of what an operator asks for.
                await self.rest(other)
            except GreenroomError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, FIRST_PAUSE_MAX_S)
            model = self._shell.config.models.get(name)
            wanted = None if model is None or model.versions is None else model.versions.repo_id
            if wanted != repo_id or self.of(name).current is not None:
                return

    async def draft(self, new: Config, changes: Changes) -> Apply:
        return self.begin

    # --- asked --------------------------------------------------------------------------------------------------------

    def of(self, model: str) -> NamedVersions:
        return self._store.of(model)

    def running(self, model: str) -> UpdateFacts | None:
        return None if (found := self._running.get(model)) is None else found.facts

    def desired(self, model: str) -> UpdateFacts | None:
        """What the running or the last, failed update wants; None if that serves already."""
        running = self._running.get(model)
        if running is not None and not running.row and running.facts.model_repo_id:
            # Its row is not on disk yet. A trainer orders again what no update seems to bring.
            return running.facts
        return self._desired.get(model)

    def error(self, model: str) -> OperationError | None:
        """Why the last update failed; None if it did not, and while another one runs."""
        if model in self._running:
            return None
        return self._errors.get(model) or (None if self.of(model).prepared is None else INTERRUPTED)

    async def submit(self, model: str, order: UpdateOrder, *, tenant: str, key: str) -> Operation:
        """Begin an update of a model under version control. Raises UpdateInProgress, ShuttingDown, or that the table is
        full."""
        if self._shell.is_draining:
            raise ShuttingDown("The gateway is shutting down and takes no more orders.", retry_after_s=5.0)
        await self._expect_rest(model)
        facts = UpdateFacts(order.repo_id, order.revision, "queued", number_asked=order.number)
        running = self._running[model] = RunningUpdate(facts)
        try:
            row = await self._table.add(OperationKind.UPDATE, tenant=tenant, key=key, model=model, route=ROUTE)
            running.row = row.id
        except BaseException:
            del self._running[model]
            raise
        finally:
            running.begun.set()
        self._desired[model] = running.facts
        running.task = asyncio.get_running_loop().create_task(self._run(row, running, order), name=f"update {model}")
        return row

    async def _expect_rest(self, model: str) -> None:
        """Raises UpdateInProgress, with the task that runs: one that just begins is waited for."""
        while (other := self._running.get(model)) is not None:
            if other.row:
                to, step = other.facts.model_repo_id, other.facts.step
                raise UpdateInProgress(
                    f"{model} is being updated to {to} ({step}). Ask again after that.",
                    beside={"taskId": other.row},
                )
            await other.begun.wait()

    async def rollback(self, model: str, number: int | None, *, tenant: str, key: str) -> Operation:
        """Begin to go back to kept weights, under a new number. Raises BadRequest if there are none."""
        kept = self.of(model).kept
        back_to = next((one for one in kept if number in (None, one.number)), None)
        if back_to is None:
            there = ", ".join(str(one.number) for one in kept) or "none"
            raise BadRequest(f"{model} cannot go back to that version; those that are kept: {there}.", param="version")
        order = UpdateOrder(back_to.repo_id, back_to.commit, back_to=back_to)
        return await self.submit(model, order, tenant=tenant, key=key)

    async def settle(self, model: str, state: int) -> None:
        """Note that what serves is what this desired state asks for. Raises UpdateInProgress and OperationStoreFull."""
        await self._expect_rest(model)
        # No update begins while it is written: both write the whole record.
        running = self._running[model] = RunningUpdate(UpdateFacts("", step="settling"))
        try:
            await self._store.put(model, msgspec.structs.replace(self.of(model), state=state))
        finally:
            del self._running[model]
            running.begun.set()

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

    async def rest(self, refusal: UpdateInProgress) -> None:
        """Wait for the end of the update that an order was refused for, whatever comes of it."""
        with contextlib.suppress(GreenroomError):
            await self.ended(str((refusal.beside or {}).get("taskId")))
        await asyncio.sleep(0.05)  # Its last steps cannot be waited for.

    def get(self, id: str) -> Operation:
        """Raises NotFound."""
        row = self._table.get(id)
        if row is None or row.kind is not OperationKind.UPDATE:
            raise NotFound(f"There is no update {id}. One that has ended is kept for an hour.")
        return row

    async def facts(self, row: Operation) -> UpdateFacts:
        known = {running.row: running.facts for running in self._running.values()} | self._ending
        if row.id not in known:
            known = await facts_of(self._table, [row.id], UpdateFacts)
        return known.get(row.id) or UpdateFacts("")

    async def close(self) -> None:
        """What still runs is forgotten: the next start calls it failed, and serves what was promised."""
        updates = [running.task for running in self._running.values() if running.task is not None]
        firsts, using = (task for _, task in self._firsts.values()), [] if self._using is None else [self._using]
        tasks = [*updates, *firsts, *using]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # After the updates: one that is cancelled may have begun a move just now.
        await self._changes.close()
        await self._weights.use(())

    # --- the steps ----------------------------------------------------------------------------------------------------

    async def _run(self, row: Operation, running: RunningUpdate, order: UpdateOrder) -> Version | GreenroomError:
        """What came of it, which is also in its row."""
        model, began = row.model, self._shell.loop.clock()
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
        took_s = round(self._shell.loop.clock() - began, 3)
        facts = msgspec.structs.replace(
            running.facts, step="done", model_version=version.number, commit=version.commit, took_s=took_s
        )
        await self._end(row, facts)
        _log.info("version serves", model=model, version=version.number, repo_id=version.repo_id, took_s=took_s)
        return version

    async def _failed(self, row: Operation, running: RunningUpdate, error: GreenroomError) -> None:
        model, said = row.model, error_of(error)
        self._errors[model] = said
        _log.warning("update failed", model=model, step=running.facts.step, code=said.code, error=said.message)
        with contextlib.suppress(OperationStoreFull):
            await self._store.put(model, self.of(model).failed(self._fetched.get(model, ())))
        # A first version is tried again, with what is there already.
        if self.of(model).current is not None:
            await self._remove(model)
        await self._end(row, running.facts, said)

    async def _end(self, row: Operation, facts: UpdateFacts, error: OperationError | None = None) -> None:
        """The next one may begin at once. Until the end of this one is on disk, it is told from memory."""
        del self._running[row.model]
        self._ending[row.id] = facts
        try:
            status = OperationStatus.DONE if error is None else OperationStatus.FAILED
            await end_with(self._table, row.id, status, error, facts)
        finally:
            del self._ending[row.id]

    async def _updated(self, name: str, running: RunningUpdate, order: UpdateOrder) -> Version:
        model = self._shell.config.models.get(name)
        if model is None or model.versions is None:
            raise ModelNotFound.named(name)
        if self._using is not None and (await asyncio.wait((self._using,), timeout=USING_MAX_S))[1]:
            raise FetchFailed(
                f"The folders of models did not answer within {USING_MAX_S:g} s: the versions of this gateway are not "
                "locked there yet. Ask again."
            )
        fetched = self._fetched.setdefault(name, set())
        if (left := self.of(name).prepared) is not None and left.is_fetched:
            # Of an update that the end of the gateway broke off.
            fetched.add(left.path)
        running.at("fetching")
        found = order.back_to or await self._weights.found(model, order.repo_id, order.revision, fetched)
        running.at("checking")
        version = self._numbered(name, order, found)
        await self._changes.serve(name, model, version, running, allow_gap=order.allow_gap)
        self._errors.pop(name, None)
        self._desired.pop(name, None)
        await self._remove(name)
        return version

    def _numbered(self, name: str, order: UpdateOrder, found: Version) -> Version:
        known = self.of(name)
        number, since = max(known.last_number + 1, order.number or 0), round(time.time(), 3)
        earlier = (one for one in (known.current, *known.kept) if one is not None)
        is_fetched = found.is_fetched or any(one.is_fetched and one.path == found.path for one in earlier)
        return msgspec.structs.replace(found, number=number, is_fetched=is_fetched, since=since, state=order.state)

    async def _remove(self, model: str) -> None:
        """Delete what updates fetched and no version needs: those that are no longer kept, and those that failed. While
        another model is updated, perhaps to the same files, they are left to the next update of this one. A disk that
        hangs does not keep the update from ending."""
        is_idle = self._using is None or self._using.done()
        if is_idle and not any(other != model for other in self._running):
            deleting = self._delete_unused(model)
            self._using = asyncio.get_running_loop().create_task(deleting, name=f"delete unused weights of {model}")
            await asyncio.wait((self._using,), timeout=USING_MAX_S)

    async def _delete_unused(self, model: str) -> None:
        in_use = [one.path for one in self._known()]
        unused = {*self._fetched.pop(model, ()), *self.of(model).leaving}.difference(in_use)
        try:
            weights, entries = self._weights, tuple(self._shell.catalog)
            later = await weights.remove_unused(unused, in_use, entries) if unused else []
            await self._store.put(model, msgspec.structs.replace(self.of(model), leaving=tuple(later)))
            await self._weights.use(self._known())
        except Exception as error:
            # The update has ended as it has: files that stay are no part of that.
            _log.failed("weights were not deleted", error, model=model)

    def _known(self) -> list[Version]:
        """All versions of all models."""
        models = map(self.of, self._shell.config.models)
        return [one for known in models for one in (known.current, *known.kept, known.prepared) if one is not None]

    async def _use_weights(self, after: asyncio.Task[None] | None) -> None:
        """At the start and after a reload: let no other gateway delete what is known or configured, and delete what an
        earlier run came not to; but nothing while an update runs, which may have fetched what is not known yet."""
        if after is not None:
            with contextlib.suppress(Exception):
                # Not by `asyncio.wait`: the end of the gateway cancels this task, and thereby the one before it.
                await after
        weights, config, is_busy = self._weights, self._shell.config, bool(self._running)
        with contextlib.suppress(TimeoutError, SystemShort):
            # The disk of some other model may hang.
            async with asyncio.timeout(KEEP_MAX_S):
                await weights.keep([model.path for model in config.models.values() if model.path is not None])
        while True:
            try:
                await weights.use(self._known(), only=not is_busy)
                break
            except SystemShort:
                await asyncio.sleep(AGAIN_S)
        for name in () if is_busy else config.models:
            if self.of(name).leaving:
                await self._delete_unused(name)
