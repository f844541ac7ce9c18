"""A new version on its way: looked at, loaded beside the old one or in its place, asked, promised, and given the name.

Owns the moves of one update and what each leaves behind when it fails: nothing of the new version, and the old one
serving. Also the request by which a version proves itself: it must be answered, in time, and not with nothing. Which
update runs, and what is told of it, is `updates.py`; how moves run is the scheduler's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from greenroom.base.detached import run_detached
from greenroom.config.schema import Ability, Model, ModelVersions
from greenroom.core.events import ConfigChanged, RequestArrived, VersionPromoted
from greenroom.core.model import ModelId, MoveKind, RequestId
from greenroom.errors import (
    BadRequest,
    GreenroomError,
    LoadFailed,
    TooLarge,
    UnusableModel,
    WarmUpFailed,
    WouldInterrupt,
)
from greenroom.features.operations.moves import OperatorMoves
from greenroom.features.versions.store import VersionStore
from greenroom.library.records import Version
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.known_models import KnownModels
from greenroom.runtime.loop import Tickets
from greenroom.runtime.moves.process_moves import EngineCall
from greenroom.runtime.shell import Shell

# Of an engine's own words in the error of a warm-up.
SAID_CHARS_MAX: Final = 500


class UpdateFacts(msgspec.Struct, frozen=True):
    """What is known of an update beside its row, in the words of its view; kept when it has ended."""

    model_repo_id: str
    revision: str | None = None
    step: str = ""
    model_version: int | None = None
    commit: str | None = None
    took_s: float | None = None
    # The least number that was asked for.
    number_asked: int | None = None


@dataclass(slots=True)
class RunningUpdate:
    """`row` is empty until it is on disk; `begun` is set then, or when it is not to be."""

    facts: UpdateFacts
    row: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Version | GreenroomError] | None = None

    def at(self, step: str) -> None:
        self.facts = msgspec.structs.replace(self.facts, step=step)


@dataclass(frozen=True)
class VersionChanges:
    _shell: Shell
    _store: VersionStore
    _models: KnownModels
    _moves: OperatorMoves
    _tickets: Tickets
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    # The moves that bring old versions back, one for each model whose update failed while it was held.
    _coming_back: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, name: str, model: Model, version: Version, update: RunningUpdate, *, allow_gap: bool) -> None:
        """Let the name mean this version. Raises what went wrong; the old version serves then."""
        assert model.versions is not None
        coming = await self._checked(name, model, version)
        await self._store.put(name, msgspec.structs.replace(self._store.of(name), prepared=version))
        update.at("loading")
        try:
            self._add(coming)
            await self._ready(coming, update, allow_gap)
            update.at("warming")
            await self._warm_up(coming, model.versions)
            update.at("flipping")
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

    async def _ready(self, coming: Entry, update: RunningUpdate, allow_gap: bool) -> None:
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
        update.at("draining")
        await self._hold(coming)
        update.at("loading")
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
            task = asyncio.get_running_loop().create_task(self._bring_back(name), name=f"bring {name} back")
            self._coming_back.add(task)
            task.add_done_callback(self._coming_back.discard)

    async def _bring_back(self, name: str) -> None:
        # What it raises is told to those that ask for the model.
        with contextlib.suppress(GreenroomError):
            await self._moves.move(MoveKind.LOAD, ModelId(name))

    async def _warm_up(self, coming: Entry, asked: ModelVersions) -> None:
        """Returns when this version has answered. Its request waits for its slot like every other, so that nothing
        makes it leave meanwhile. Raises WarmUpFailed, or why it was not granted a slot."""
        request = _request(coming, asked)
        if request is None:
            return
        now, limit_s = self._shell.clock(), asked.warm_up_timeout_s
        id = RequestId(f"warm-up-{next(self._numbers)}")
        ticket = self._tickets.arrive(RequestArrived(now, id, (coming.id,), give_up_at=now + limit_s))
        try:
            async with asyncio.timeout(limit_s):
                await ticket.wait(None)
                slot = ticket.slot
                assert slot is not None
                target, body = request
                status, answer = await EngineCall(slot.pool.address)("POST", target, msgspec.json.encode(body))
        except TimeoutError:
            raise WarmUpFailed(f"{coming.id} did not answer its warm-up request within {limit_s:g} s.") from None
        except (OSError, ValueError) as error:
            raise WarmUpFailed(f"{coming.id} broke off its warm-up request: {error}.") from error
        except GreenroomError as error:
            raise WarmUpFailed(
                f"{coming.id} could not be asked its warm-up request: {error.message}", details=error.details
            ) from error
        finally:
            self._tickets.close(ticket)
        if status != 200 or not _says_something(answer):
            what = f"with {status}" if status != 200 else "with nothing"
            said = answer[:SAID_CHARS_MAX].decode("utf-8", "replace")
            raise WarmUpFailed(f"{coming.id} answered its warm-up request {what}.", details=said)

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
            writing = asyncio.ensure_future(self._store.put(name, after))
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


# --- the warm-up request ----------------------------------------------------------------------------------------------


def _request(entry: Entry, asked: ModelVersions) -> tuple[str, dict[str, Any]] | None:
    """Path and body; None for models that no text can be asked: that they are loaded is their proof."""
    abilities = entry.facts.abilities
    body: dict[str, Any] = {"model": entry.config.use_model_name or entry.engine_name}
    text = {"max_tokens": asked.warm_up_tokens, "temperature": 0.0}
    if abilities is None or Ability.CHAT in abilities:
        return "/v1/chat/completions", body | text | {"messages": [{"role": "user", "content": asked.warm_up}]}
    if Ability.COMPLETIONS in abilities:
        return "/v1/completions", body | text | {"prompt": asked.warm_up}
    if Ability.EMBEDDINGS in abilities:
        return "/v1/embeddings", body | {"input": asked.warm_up}
    if Ability.RERANK in abilities:
        return "/v1/rerank", body | {"query": asked.warm_up, "documents": [asked.warm_up]}
    return None


def _says_something(answer: bytes) -> bool:
    """True if it has a text that is more than spaces, a vector, or a rank."""
    try:
        said = msgspec.json.decode(answer)
    except msgspec.MsgspecError:
        return False
    if not isinstance(said, dict):
        return False
    found = [*_list(said.get("choices")), *_list(said.get("data")), *_list(said.get("results"))]
    return any(_has_content(one) for one in found if isinstance(one, dict))


def _has_content(one: dict[str, Any]) -> bool:
    message = one.get("message")
    told = message if isinstance(message, dict) else one
    texts = [told.get(key) for key in ("content", "reasoning_content", "reasoning", "text")]
    has_text = any(isinstance(text, str) and text.strip() for text in texts)
    return has_text or bool(told.get("tool_calls") or one.get("embedding")) or "relevance_score" in one


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
