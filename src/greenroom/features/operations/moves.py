"""Moves that operators ask for: load, unload, sleep, wake and prepare, answered when they are done. Owns the errors of
such a move. The caller may leave; the move goes on, because it belongs to the model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from greenroom.core.effects import OpOutcome
from greenroom.core.events import MoveAsked
from greenroom.core.model import ARRIVING, ModelId, MoveKind, OpId
from greenroom.core.view import Shortfall
from greenroom.errors import (
    Excluded,
    GreenroomError,
    LeaseStoreUnavailable,
    LoadFailed,
    ModelNotFound,
    ModelPinned,
    NoPlace,
    TooLarge,
    Unloaded,
    Unsupported,
    UpdateInProgress,
)
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.loop import AsyncEffects
from greenroom.runtime.memory.slot_memory import SlotMemory
from greenroom.runtime.moves.mover import Mover
from greenroom.runtime.operations.files import OperationKind
from greenroom.runtime.shell import Shell

# As for callers. The store itself is tried more often.
RETRY_AFTER_S = 1.0


def expect_movable(shell: Shell, entry: Entry) -> None:
    """Raises UpdateInProgress for a version that does not serve yet: only its update moves it."""
    if (name := entry.spec.version_of) is None:
        return
    updates = (row for row in shell.table if row.kind is OperationKind.UPDATE and row.model == name)
    task = next((row.id for row in updates if not row.status.is_over), None)
    raise UpdateInProgress(
        f"{entry.id} is the next version of {name} and moves only by its update. Ask again after that.",
        beside=None if task is None else {"taskId": task},
    )


@dataclass(frozen=True)
class OperatorMoves:
    _effects: AsyncEffects
    _mover: Mover
    _shell: Shell
    _memory: SlotMemory
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def expect_leavable(self, models: Iterable[ModelId]) -> None:
        """Raises ModelPinned if one of these is in memory and pinned."""
        if kept := [model for model in models if self._is_kept(model)]:
            raise ModelPinned(
                f"{', '.join(kept)} is pinned. Ask with force=true to have it leave all the same, or unpin it first.",
                param="force",
            )

    def _is_kept(self, model: ModelId) -> bool:
        """True for a pinned model that is in memory. Remote ones, which are always there, take none."""
        entry = self._shell.catalog.find(model)
        is_pinned = entry is not None and entry.spec.pinned and not entry.spec.is_remote
        return is_pinned and bool(self._shell.loop.view.slots_of(model))

    async def move(
        self,
        kind: MoveKind,
        model: ModelId,
        *,
        evict: tuple[ModelId, ...] = (),
        grace_s: float | None = None,
        force: bool = False,
    ) -> None:
        """Ask for a move and wait until it is done. Raises the error that says why it was not. Only with `force` does
        it take away models that are pinned."""
        if not force:
            self.expect_leavable(evict if kind in ARRIVING else (model,))
        op = OpId(f"op-{next(self._numbers)}")
        future: asyncio.Future[OpOutcome] = asyncio.get_running_loop().create_future()
        self._effects.operations[op] = future
        self._shell.loop.post(MoveAsked(self._shell.loop.clock(), op, kind, model, evict, grace_s))
        outcome = await asyncio.shield(future)
        if outcome is not OpOutcome.DONE:
            raise self._error(kind, model, outcome)
        if kind is MoveKind.UNLOAD:
            # The model is meant to be away: an earlier error of it no longer matters.
            self._mover.failures.pop(model, None)

    def _error(self, kind: MoveKind, model: ModelId, outcome: OpOutcome) -> GreenroomError:
        match outcome:
            case OpOutcome.UNKNOWN_MODEL:
                return ModelNotFound.named(model)
            case OpOutcome.REFUSED:
                what = "prepare it" if kind is MoveKind.PREPARE else "put it to sleep"
                engine = self._shell.catalog.engine_of(model)
                return Unsupported(
                    f"{model} runs on {engine}, which cannot {what} here. `load` and `unload` work for it.",
                    param="model",
                )
            case OpOutcome.TOO_LARGE if said := self._memory.no_device(model):
                return TooLarge(said, public=TooLarge.no_device_words)
            case OpOutcome.TOO_LARGE if kind is MoveKind.PREPARE:
                return _too_large_asleep(model, self._shell.loop.view.green_room_shortfall(model))
            case OpOutcome.TOO_LARGE:
                return TooLarge(
                    f"{model} does not fit on the devices there are beside what is pinned; `greenroom ps` shows it."
                )
            case OpOutcome.EXCLUDED:
                return Excluded(
                    f"scheduler.company does not let {model} be ready beside a model that is pinned; "
                    f"`greenroom explain {model}` names it."
                )
            case OpOutcome.CANCELLED:
                return Unloaded(f"The {kind.value} of {model} was overtaken by an unload, a removal or a shutdown.")
            case OpOutcome.STORE_DOWN:
                return LeaseStoreUnavailable(
                    f"{model} needs memory that must be leased, and the lease store does not answer; loaded models go "
                    "on serving. Ask again when it is back: `lease_store` in GET /api/v1/status says what is wrong.",
                    retry_after_s=RETRY_AFTER_S,
                )
            case _ if kind is MoveKind.SLEEP and model not in self._mover.failures:
                # A slot that cannot sleep for want of host memory is unloaded rather than kept on its GPU.
                return NoPlace(
                    f"{model} was unloaded instead: the green room had no place for it. Raise `memory.green_room_mib`, "
                    "or unload a sleeping model; `greenroom ps` shows them."
                )
            case _:
                return self._mover.failures.get(model) or LoadFailed(f"The {kind.value} of {model} failed.")


def _too_large_asleep(model: ModelId, short: Shortfall | None) -> TooLarge:
    if short is None:
        return TooLarge(f"{model} does not fit into the green room. Raise `memory.green_room_mib`.")
    said = f"{model} takes {short.needs_mib:,} MiB of host memory asleep, and the green room has {short.size_mib:,} MiB"
    if short.pinned_mib:
        said += f", of which pinned models keep {short.pinned_mib:,}"
    unpin = ", or unpin one; `greenroom ps` shows them" if short.pinned_mib else ""
    return TooLarge(f"{said}. Raise `memory.green_room_mib`{unpin}.")
