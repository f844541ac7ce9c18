"""Translates the scheduler's rejections into errors that say what happened and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

from greenroom.core.effects import BUDGET_OVER, Reason, RejectCode, Rejection
from greenroom.core.model import Device, DeviceKind, LeaseId, ModelId, MoveKind
from greenroom.core.view import SlotFacts
from greenroom.engines.registry import spread_by
from greenroom.errors import (
    BudgetPassed,
    EngineLost,
    Excluded,
    GreenroomError,
    LeaseStoreUnavailable,
    LoadFailed,
    ModelLoading,
    ModelNotFound,
    QueueFull,
    ShuttingDown,
    TooLarge,
    Unloaded,
)
from greenroom.leases.records import Lease, lease_names
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.slot_memory import SlotMemory
from greenroom.runtime.shell import Shell

# The longest Retry-After: an estimate of minutes is a guess.
RETRY_AFTER_MAX_S = 120.0
# At most so many leases are named in an error.
NAMES_MAX = 5


class Phase(StrEnum):
    """Where a model is when the wait of a request ends: `loading.state` of the error."""

    READY = "ready"
    LOADING = "loading"
    WAKING = "waking"
    PREPARING = "preparing"
    LEAVING = "leaving"
    WAITING = "waiting"


# In the order in which they count where a model has several slots.
_MOVING: Final = {
    MoveKind.LOAD: Phase.LOADING,
    MoveKind.WAKE: Phase.WAKING,
    MoveKind.PREPARE: Phase.PREPARING,
}
_NOT_READY: Final = {
    Phase.LOADING: "is not ready yet; it goes on loading",
    Phase.WAKING: "is not ready yet; it goes on waking up",
    Phase.PREPARING: "is not ready yet; it is being read into the green room",
    Phase.LEAVING: "is leaving the memory that it has, and can come back after that",
    Phase.WAITING: "is not ready yet; it waits for room or for its turn",
}


def phase_of(slots: Iterable[SlotFacts]) -> Phase:
    """What the slots of one model do. A move that is only planned has not begun."""
    slots = tuple(slots)
    if any(slot.is_serving for slot in slots):
        return Phase.READY
    moves = {slot.move.kind for slot in slots if slot.move is not None and not slot.is_going}
    begun = (phase for kind, phase in _MOVING.items() if kind in moves)
    return next(begun, Phase.LEAVING if any(slot.is_going for slot in slots) else Phase.WAITING)


class KnownLeases(Protocol):
    def known(self) -> Sequence[Lease]:
        """All leases, as far as they are known here."""
        ...


class RejectionErrors:
    def __init__(
        self,
        shell: Shell,
        failures: Mapping[ModelId, GreenroomError],
        memory: SlotMemory,
        leases: KnownLeases,
    ) -> None:
        self._failures = failures
        self._gateway = shell.live
        self._loop = shell.loop
        self._catalog = shell.catalog
        self._memory = memory
        self._hosted_slots = shell.hosted_slots
        self._leases = leases

    def error_for(self, rejection: Rejection) -> GreenroomError:
        model, retry_s = rejection.model, _bounded(rejection.retry_after_s)
        match rejection.code:
            case RejectCode.UNKNOWN_MODEL | RejectCode.REMOVED:
                return ModelNotFound.named(model)
            case RejectCode.QUEUE_FULL | RejectCode.TENANT_QUEUE_FULL:
                return _queue_full(rejection, retry_s)
            case RejectCode.LOAD_FAILED:
                return self._load_failed(model, retry_s)
            case RejectCode.TOO_LARGE:
                return self._too_large(rejection)
            case RejectCode.EXCLUDED:
                return Excluded(
                    f"scheduler.company does not let {model} be ready beside {', '.join(rejection.beside)} (pinned). "
                    "Unpin or unload what is in the way, or change the rules."
                )
            case RejectCode.UNLOADED:
                return Unloaded(f"{model} was unloaded by an operator; ask again to load it.", retry_after_s=1.0)
            case RejectCode.EXPIRED:
                phase, progress = phase_of(self._loop.view.slots_of(model)), self._hosted_slots.progress_of(model)
                return _late(rejection, phase, progress, self._names(rejection.leases))
            case RejectCode.SHUTTING_DOWN:
                return ShuttingDown("The gateway is shutting down; ask again when it is back.", retry_after_s=5.0)
            case RejectCode.LOST:
                return self._lost(model)
            case RejectCode.STORE_DOWN:
                message = f"{model} must be loaded and the lease store does not answer; loaded models go on serving."
                return LeaseStoreUnavailable(message, retry_after_s=retry_s)

    def error_for_cut(self, reason: Reason) -> GreenroomError:
        if reason == BUDGET_OVER:
            return BudgetPassed("The time given for this answer is over and the model was still at it; give it more.")
        if self._gateway.is_draining:
            return ShuttingDown("The gateway is shutting down and could wait no longer for this answer.")
        model = dict(reason.facts).get("model", "")
        return Unloaded(f"{model} was unloaded while it answered ({reason.why}).", retry_after_s=1.0)

    def _too_large(self, rejection: Rejection) -> TooLarge:
        if said := self._memory.no_device(rejection.model):
            return TooLarge(said, public=TooLarge.no_device_words, beside=_numbers(rejection))
        devices = self._loop.view.ledger.devices.values()
        return _too_large(rejection, _why_whole(self._catalog.find(rejection.model), devices))

    def _names(self, leases: tuple[LeaseId, ...]) -> tuple[str, ...]:
        names = lease_names(self._leases.known(), self._loop.view.ledger.others) if leases else {}
        return tuple(names.get(lease, lease) for lease in leases)

    def _lost(self, model: ModelId) -> EngineLost:
        said, cause = f"The engine of {model} was lost twice before it answered.", self._failures.get(model)
        if cause is None:
            return EngineLost(said, retry_after_s=1.0)
        # How it ended, which only operators are told.
        return EngineLost(f"{cause.message} {said}", public=said, details=cause.details, retry_after_s=1.0)

    def _load_failed(self, model: ModelId, retry_s: float | None) -> GreenroomError:
        cause = self._failures.get(model)
        if cause is None:
            said = f"{model} could not be loaded."
            return LoadFailed(said, public=said, retry_after_s=retry_s)
        kind = type(cause) if isinstance(cause, LoadFailed) else LoadFailed
        # A final error would fail again in the same way: no retry is suggested.
        again_s = None if kind.final else retry_s
        return kind(
            cause.message, public=cause.public, details=cause.details, retry_after_s=again_s, beside=cause.beside
        )


def _largest_part(entry: Entry) -> str:
    parts = entry.facts.parts
    if not parts:
        return ""
    name = max(parts, key=lambda one: parts[one])
    each_mib = entry.spec.rest_mib(entry.spec.need)
    return (
        f" Its components stay whole, each on one GPU: the largest, {name}, has {parts[name]:,} MiB, and every GPU also"
        f" needs {each_mib:,} MiB to compute. A smaller dtype needs less."
    )


def _why_whole(entry: Entry | None, devices: Iterable[Device]) -> str:
    """What to say where there are several GPUs and this model, or a part of it, can use only one; empty otherwise."""
    gpus = [device.capacity_mib for device in devices if device.kind is DeviceKind.GPU]
    if len(gpus) < 2 or entry is None:
        return ""
    if entry.spec.can_split:
        return _largest_part(entry)
    if entry.config.device_map == "one" and entry.config.engine == "diffusers":
        return " With device_map: balanced its components may be spread over several GPUs."
    other = spread_by(entry.config)
    can = "" if other is None else f"; {other} can, and is taken where `greenroom engines` finds it"
    return (
        f" Its engine cannot be spread over several GPUs, which have {', '.join(f'{mib:,}' for mib in gpus)} MiB{can}."
    )


def _some_of(names: tuple[str, ...]) -> str:
    more = len(names) - NAMES_MAX
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:NAMES_MAX])} and {more:,} more"


def _bounded(retry_s: float | None) -> float | None:
    return None if retry_s is None else min(max(retry_s, 1.0), RETRY_AFTER_MAX_S)


def _queue_full(rejection: Rejection, retry_s: float | None) -> QueueFull:
    wait_ms = round(rejection.avg_wait_s * 1000)
    waiting = f"{rejection.queue_depth} requests wait already"
    if rejection.code is RejectCode.TENANT_QUEUE_FULL:
        waiting = "As many requests of this tenant wait already as may"
    return QueueFull(
        f"{waiting}; try again in {math.ceil(retry_s or 1)} s.",
        retry_after_s=retry_s,
        beside={"queueDepth": rejection.queue_depth, "avgWaitMs": wait_ms},
    )


def _too_large(rejection: Rejection, whole: str) -> TooLarge:
    of = f" of {rejection.capacity_mib:,}" if rejection.capacity_mib else ""
    unpin = f"unpin models ({', '.join(rejection.pinned)}), " if rejection.pinned else ""
    return TooLarge(
        f"{rejection.model} needs {rejection.needs_mib:,} MiB; at most {rejection.free_mib:,}{of} MiB can be made free"
        f"{_held(rejection)}.{whole} Lower ctx_size or memory_mib, {unpin}or give it more devices.",
        beside=_numbers(rejection),
    )


def _held(rejection: Rejection) -> str:
    """Names holders of memory there through other gateways."""
    return f"; {', '.join(rejection.held_by)} hold some" if rejection.held_by else ""


def _numbers(rejection: Rejection) -> dict[str, dict[str, int]]:
    named = {"needs_mib": rejection.needs_mib, "free_mib": rejection.free_mib, "capacity_mib": rejection.capacity_mib}
    return {"memory": named} if rejection.needs_mib else {}


def _late(rejection: Rejection, phase: Phase, progress: float | None, leases: tuple[str, ...]) -> ModelLoading:
    """The error of a request that waited too long. It says what the model does, which need not be to load."""
    eta_s, public = rejection.retry_after_s, None
    if eta_s is not None:
        eta_s = eta_s + rejection.room_s if rejection.room_s < math.inf else None
    if phase is Phase.READY and eta_s:
        message = (
            f"{rejection.model} is ready, but busy: this answer could begin in about {eta_s:.0f} s, too late for it."
        )
    elif phase is Phase.READY:
        message = f"{rejection.model} is ready, but cannot give this answer in the time there is for it."
    elif phase is Phase.WAITING and leases:
        message = (
            f"{rejection.model} waits for memory that is leased ({_some_of(leases)}): it needs "
            f"{rejection.needs_mib:,} MiB, and {rejection.free_mib:,} of {rejection.capacity_mib:,} MiB are free. "
            "When leases end is not known; `greenroom leases` lists them."
        )
        public = f"{rejection.model} waits for memory that other programs hold. Ask again."
    elif phase is Phase.WAITING and rejection.needs_mib > rejection.free_mib:
        message = (
            f"{rejection.model} waits for memory: it needs {rejection.needs_mib:,} MiB, and {rejection.free_mib:,} of "
            f"{rejection.capacity_mib:,} MiB are free{_held(rejection)}. Ask again, or unload another model."
        )
        public = f"{rejection.model} waits for memory. Ask again."
    elif phase is Phase.WAITING and rejection.beside:
        message = (
            f"{rejection.model} waits: scheduler.company does not let it be ready beside {', '.join(rejection.beside)}."
            " Ask again, or unload what is in the way."
        )
        public = f"{rejection.model} waits until other models have left. Ask again."
    else:
        message = f"{rejection.model} {_NOT_READY[phase]}. Ask again."
    state = {"state": phase.value, "eta_s": None if eta_s is None else round(eta_s, 1)}
    if progress is not None:
        state["progress"] = round(progress, 3)
    return ModelLoading(
        message, public=public, retry_after_s=_bounded(eta_s) or 10.0, beside={"loading": state, **_numbers(rejection)}
    )
