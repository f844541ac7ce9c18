"""What the scheduler's rejections mean to a caller: an error that says what happened and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from greenroom.core.effects import Reason, RejectCode, Rejection
from greenroom.core.model import ModelId
from greenroom.errors import (
    BudgetPassed,
    EngineLost,
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

# Clients are never sent away for longer than this: an estimate of minutes is a guess.
RETRY_AFTER_MAX_S = 120.0
# Why the scheduler cuts an answer whose caller's time is over.
BUDGET = "budget"


class Rejections:
    """`is_draining` tells whether the gateway is on its way out, whatever a single answer was cut for."""

    def __init__(self, failures: Mapping[ModelId, GreenroomError], is_draining: Callable[[], bool]) -> None:
        self._failures = failures
        self._is_draining = is_draining

    def error_for(self, rejection: Rejection) -> GreenroomError:
        model, retry_s = rejection.model, _bounded(rejection.retry_after_s)
        match rejection.code:
            case RejectCode.UNKNOWN_MODEL | RejectCode.REMOVED:
                return ModelNotFound(f"There is no model {model}. GET /v1/models lists those there are.", param="model")
            case RejectCode.QUEUE_FULL:
                return _queue_full(rejection, retry_s)
            case RejectCode.LOAD_FAILED:
                return self._load_failed(model, retry_s)
            case RejectCode.TOO_LARGE:
                return _too_large(rejection)
            case RejectCode.UNLOADED:
                return Unloaded(f"{model} was unloaded by an operator; ask again to load it.", retry_after_s=1.0)
            case RejectCode.EXPIRED:
                return _loading(rejection, retry_s)
            case RejectCode.SHUTTING_DOWN:
                return ShuttingDown("The gateway is shutting down; ask again when it is back.", retry_after_s=5.0)
            case RejectCode.LOST:
                return EngineLost(f"The engine of {model} was lost twice before it answered.", retry_after_s=1.0)
            case RejectCode.STORE_DOWN:
                message = f"{model} must be loaded and the lease store does not answer; loaded models go on serving."
                return LeaseStoreUnavailable(message, retry_after_s=retry_s)

    def error_for_cut(self, reason: Reason) -> GreenroomError:
        if reason.why == BUDGET:
            return BudgetPassed("The time given for this answer is over and the model was still at it; give it more.")
        if self._is_draining():
            return ShuttingDown("The gateway is shutting down and could wait no longer for this answer.")
        model = dict(reason.facts).get("model", "")
        return Unloaded(f"{model} was unloaded while it answered ({reason.why}).", retry_after_s=1.0)

    def _load_failed(self, model: ModelId, retry_s: float | None) -> GreenroomError:
        cause = self._failures.get(model)
        if cause is None:
            return LoadFailed(f"{model} could not be loaded.", retry_after_s=retry_s)
        return LoadFailed(cause.message, details=cause.details, retry_after_s=retry_s)


def _bounded(retry_s: float | None) -> float | None:
    return None if retry_s is None else min(max(retry_s, 1.0), RETRY_AFTER_MAX_S)


def _queue_full(rejection: Rejection, retry_s: float | None) -> QueueFull:
    wait_ms = round(rejection.avg_wait_s * 1000)
    return QueueFull(
        f"{rejection.queue_depth} requests wait already; try again in {retry_s or 1:.0f} s.",
        retry_after_s=retry_s,
        beside={"queueDepth": rejection.queue_depth, "avgWaitMs": wait_ms},
    )


def _too_large(rejection: Rejection) -> TooLarge:
    return TooLarge(
        f"{rejection.model} needs {rejection.needs_mib:,} MiB; at most {rejection.free_mib:,} MiB can be made free. "
        "Lower ctx_size or memory_mib, unpin a model, or give it more devices."
    )


def _loading(rejection: Rejection, retry_s: float | None) -> ModelLoading:
    eta_s = rejection.retry_after_s
    if eta_s == 0.0:
        message = f"{rejection.model} is ready, but cannot give this answer in the time there is for it."
    else:
        message = f"{rejection.model} is not ready yet; it goes on loading. Ask again."
    state = {"state": "ready" if eta_s == 0.0 else "loading", "eta_s": None if eta_s is None else round(eta_s, 1)}
    return ModelLoading(message, retry_after_s=retry_s or 10.0, beside={"loading": state})
