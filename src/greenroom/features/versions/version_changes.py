"""A new version on its way: looked at, loaded beside the old one or in its place, promised, and given the name.

Owns the moves of one update and what each leaves behind when it fails: nothing of the new version, and the old one
serving. Which update runs, and what is told of it, is `updates.py`; how moves run is the scheduler's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from greenroom.base.detached import run_detached
from greenroom.config.schema import Model
from greenroom.core.events import ConfigChanged, VersionPromoted
from greenroom.core.model import ModelId, MoveKind
from greenroom.errors import BadRequest, GreenroomError, LoadFailed, TooLarge, UnusableModel, WouldInterrupt
from greenroom.features.operations.moves import OperatorMoves
from greenroom.features.versions.store import NamedVersions, VersionStore
from greenroom.features.versions.warm_up import WarmUp
from greenroom.library.records import Version
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.known_models import KnownModels
from greenroom.runtime.operations.files import disk_failed
from greenroom.runtime.shell import Shell


class VersionChanges:
    def __init__(
        self, shell: Shell, store: VersionStore, models: KnownModels, moves: OperatorMoves, warm_up: WarmUp
    ) -> None:
        self._shell = shell
        self._store = store
        self._models = models
        self._moves = moves
        self._warm_up = warm_up
        # The moves that bring old versions back, one for each model whose update failed while it was held.
        self._coming_back: set[asyncio.Task[None]] = set()

    async def serve(
        self, name: str, model: Model, version: Version, told: Callable[[str], None], *, allow_gap: bool
    ) -> None:
        """Let the name mean this version. `told` hears of each step. Raises what went wrong; the old version serves
        then."""
        assert model.versions is not None
        coming = await self._checked(name, model, version)
        await self.write(name, msgspec.structs.replace(self._store.of(name), prepared=version))
        told("loading")
        try:
            self._add(coming)
            await self._ready(coming, told, allow_gap)
            told("warming")
            await self._warm_up.ask(coming, model.versions)
            told("flipping")
            await self._promised(name, model, coming, version)
        except BaseException as error:
            self._give_up(coming)
            if isinstance(error, LoadFailed):
                # It names the model, which is not what is broken.
                said = f"{error.message} So {name} cannot serve {version.repo_id}."
                raise type(error)(said, public=error.public, details=error.details, beside=error.beside) from error
            raise
        finally:
            self._release(name)

    async def write(self, name: str, versions: NamedVersions) -> None:
        """Raises OperationStoreFull if the disk does not take it."""
        try:
            await run_detached(lambda: self._store.put(name, versions), "write versions")
        except OSError as error:
            raise disk_failed(error) from error

    async def close(self) -> None:
        for task in self._coming_back:
            task.cancel()
        await asyncio.gather(*self._coming_back, return_exceptions=True)

    async def _checked(self, name: str, model: Model, version: Version) -> Entry:
        """The coming version, whose files its engine can use as far as they tell. Raises UnusableModel."""
        catalog = self._shell.catalog

        def look() -> tuple[Entry, str | None]:
            if not os.path.exists(version.path):
                return catalog.coming(name, model, version), f"there is nothing at {version.path}"
            entry = catalog.coming(name, model, version)
            return entry, entry.engine.unusable(entry.config)

        entry, problem = await run_detached(look, f"look at {name}")
        if problem is not None:
            raise UnusableModel(f"{problem}. So {name} cannot serve {version.repo_id}.")
        return entry

    def _add(self, coming: Entry) -> None:
        shell, name = self._shell, coming.spec.version_of
        assert name is not None
        shell.slots.coming(coming.id, name)
        known = shell.loop.view.learned().get(name)
        self._models.add(coming, None if known is None else {coming.id: known})

    async def _ready(self, coming: Entry, told: Callable[[str], None], allow_gap: bool) -> None:
        """Load it beside the old version, or in its place where both do not fit. Raises why it is not ready."""
        moves = self._moves
        try:
            await moves.move(MoveKind.LOAD, coming.id)
            return
        except TooLarge as error:
            if not await self._is_prepared(coming) and not allow_gap:
                raise WouldInterrupt(
                    f"{coming.id} does not fit beside the version that serves, and host memory or its engine does not "
                    "let the two change places quickly. `allow_gap: true` lets requests wait for a whole load."
                ) from error
        told("draining")
        await self._hold(coming)
        told("loading")
        await moves.move(MoveKind.LOAD, coming.id)

    async def _is_prepared(self, coming: Entry) -> bool:
        """Bring it into host memory. False if its engine cannot, or if there is no room for it beside the old one."""
        if not (coming.facts.can_sleep and coming.engine.hosted):
            return False
        try:
            await self._moves.move(MoveKind.PREPARE, coming.id)
        except TooLarge:
            return False
        return True

    async def _hold(self, coming: Entry) -> None:
        """Let requests for the model wait and its answers end; then its slots leave. Raises WouldInterrupt."""
        shell, name = self._shell, coming.spec.version_of
        assert name is not None
        entry = shell.catalog.find(name)
        if entry is None or entry.config.versions is None:
            return
        limit_s = entry.config.versions.drain_s
        shell.loop.post(ConfigChanged(shell.clock(), models=(replace(entry.spec, held=True),)))
        try:
            async with asyncio.timeout(limit_s):
                await shell.loop.until(lambda: all(not slot.in_flight for slot in shell.loop.view.slots_of(name)))
        except TimeoutError:
            raise WouldInterrupt(
                f"Answers of {name} took longer than {limit_s:g} s (versions.drain_s), so that it could not leave for "
                "its next version."
            ) from None

    def _release(self, name: str) -> None:
        """The model is no longer held. What waits for it brings it back."""
        shell, record = self._shell, self._shell.loop.view.models.get(ModelId(name))
        entry = shell.catalog.find(name)
        if record is not None and record.spec.held and entry is not None:
            self._models.tell(entry)
            # It was there before, so it comes back also if nothing waits for it now.
            coming_back = self._moves.move(MoveKind.LOAD, ModelId(name))
            task = asyncio.get_running_loop().create_task(_quietly(coming_back), name=f"bring {name} back")
            self._coming_back.add(task)
            task.add_done_callback(self._coming_back.discard)

    async def _promised(self, name: str, model: Model, coming: Entry, version: Version) -> None:
        """Write the version down, then let it take the name, in one step. Raises, and then nothing has changed."""
        shell = self._shell
        assert model.versions is not None
        async with self._shell.live.changing:
            now = shell.catalog.find(coming.id)
            if self._shell.config.models.get(name) != model or now is None or now.spec.version_of is None:
                raise BadRequest(
                    f"The configuration of {name} was changed during its update. Ask again.", param="model"
                )
            # A reload may have made it anew.
            coming, after = now, self._store.of(name).promoted(version, model.versions.keep)
            writing = asyncio.ensure_future(self.write(name, after))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                # What was written counts, so it is flipped to even while shutting down.
                await asyncio.wait((writing,))
                if writing.exception() is None:
                    self._flip(coming, model, version)
                raise
            self._flip(coming, model, version)

    def _flip(self, coming: Entry, model: Model, version: Version) -> None:
        """From here on the name means the new version; answers that were granted end on the old one."""
        shell = self._shell
        entry = shell.catalog.promote(coming, model, version)
        shell.slots.promoted(entry, coming.id)
        shell.hosted_slots.promoted(entry, coming.id)
        shell.slots.ended(coming.id)
        shell.loop.post(VersionPromoted(shell.clock(), coming.id, entry.spec))

    def _give_up(self, coming: Entry) -> None:
        """Take a version away that did not make it. Does nothing for one that was promoted."""
        shell = self._shell
        if (known := shell.catalog.find(coming.id)) is None or known.spec.version_of is None:
            return
        shell.slots.ended(coming.id)
        self._models.remove(coming.id)


async def _quietly(work: Awaitable[None]) -> None:
    """What it raises is told to those that ask for the model."""
    with contextlib.suppress(GreenroomError):
        await work
