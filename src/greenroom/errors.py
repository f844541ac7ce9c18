"""The error tree: what happened, whose fault it is, and what to do about it.

Owns every error that can reach a caller. The class says what happened; its base says whose fault it was. Never builds a
response: `server/render.py` does, in the dialect of the caller, and decides there what of an error that caller sees.
A leaf: imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class GreenroomError(Exception):
    """The root. `message` says what, which, and what to do; `public` is told instead to callers without `admin`."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    # A final failure would fail again in the same way: clients are told not to retry it.
    final: ClassVar[bool] = False
    # Where a message may hold an engine's words, paths or the names of others: what `public` is unless it is given.
    # None: the message is made of our own words and the caller's.
    public_words: ClassVar[str | None] = None
    # The details are the engine's answer to the caller's own request, which is the caller's to read.
    details_are_the_callers: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        public: str | None = None,
        param: str | None = None,
        details: str | None = None,
        retry_after_s: float | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.public = public or self.public_words or message
        self.param = param
        self.details = details
        self.retry_after_s = retry_after_s
        # Further fields that stand beside `code` in the error object (queueDepth, avgWaitMs, progress …).
        self.beside: Mapping[str, Any] = beside or {}


# --- the caller's fault ---------------------------------------------------------------------------------------------


class ClientFault(GreenroomError):
    status = 400
    code = "invalid_request"
    type = "invalid_request_error"
    final = True


class BadRequest(ClientFault):
    """The request cannot be understood: bad JSON, a missing field, a value out of range."""


class BadFraming(ClientFault):
    """The bytes are not one unambiguous HTTP/1.1 request. The connection is closed after the answer."""

    code = "bad_framing"


class HeadersTooLarge(ClientFault):
    status = 431
    code = "headers_too_large"


class BodyTooLarge(ClientFault):
    status = 413
    code = "body_too_large"


class TooSlow(ClientFault):
    """Headers or body did not arrive before their deadline."""

    status = 408
    code = "request_timeout"


class ExpectationFailed(ClientFault):
    status = 417
    code = "expectation_failed"


class HostNotAllowed(ClientFault):
    """The Host or Origin header names something this server does not answer for (DNS rebinding)."""

    status = 403
    code = "host_not_allowed"


class InvalidKey(ClientFault):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class NotAllowed(ClientFault):
    status = 403
    code = "not_allowed"
    type = "permission_error"


class NotFound(ClientFault):
    status = 404
    code = "not_found"
    type = "not_found_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ClientFault):
    status = 405
    code = "method_not_allowed"


class PostOnly(MethodNotAllowed):
    """Paths that ask a model take POST and nothing else."""


class Unsupported(ClientFault):
    """The model exists but its engine cannot do this."""

    status = 422
    code = "unsupported"


# --- too much at once -----------------------------------------------------------------------------------------------


class Overload(GreenroomError):
    status = 503
    code = "overloaded"
    type = "overloaded_error"


class QueueFull(Overload):
    code = "queue_full"


class BodiesFull(Overload):
    """All bodies being buffered together have reached their limit."""

    code = "bodies_full"


class ModelLoading(Overload):
    """The wait ended before the model was ready; it goes on loading."""

    code = "model_loading"


class Unloaded(Overload):
    """The model was unloaded by an operator while this request waited or was answered."""

    code = "unloaded"


class ShuttingDown(Overload):
    code = "shutting_down"


class LeaseStoreUnavailable(Overload):
    code = "lease_store_unavailable"


# --- out of time ----------------------------------------------------------------------------------------------------


class BudgetPassed(GreenroomError):
    """The time the caller gave for the whole answer is over; what was made of it so far was sent."""

    status = 504
    code = "budget_passed"
    type = "timeout_error"


# --- the engine's fault ---------------------------------------------------------------------------------------------


class EngineFault(GreenroomError):
    status = 502
    code = "engine_error"
    type = "engine_error"


class LoadFailed(EngineFault):
    """The engine did not come up. `details` holds the last lines of this start."""

    status = 503
    code = "model_load_failed"
    public_words = "The model could not be loaded."


class TooLarge(EngineFault):
    """The model can never fit on the devices there are."""

    status = 503
    code = "model_too_large"
    final = True
    public_words = "The model does not fit into the memory that can be made free for it."


class EngineLost(EngineFault):
    """The engine's process or connection went away while it was answering."""

    code = "engine_lost"


class EngineTimeout(EngineFault):
    status = 504
    code = "engine_timeout"


# --- ours -----------------------------------------------------------------------------------------------------------


class GatewayBug(GreenroomError):
    """Something that cannot happen did. Always logged with its traceback, never shown with it."""


class ConfigError(GreenroomError):
    """The configuration cannot be used. `message` names file, line, key and the nearest valid spelling."""

    status = 422
    code = "invalid_config"
    type = "invalid_request_error"
    final = True


class StateDirBusy(GreenroomError):
    """Another gateway holds the state directory."""

    status = 409
    code = "state_dir_busy"


class ProbeFailed(GreenroomError):
    """The memory of GPUs could not be looked at: no driver, no permission, a file that cannot be read."""

    status = 503
    code = "probe_failed"


class LeaseDenied(Overload):
    """The memory is not to be had in the time there was. `beside` holds the numbers."""

    code = "lease_denied"


class LeaseTooLarge(LeaseDenied):
    """So much memory can never be had on these devices, however long one waits."""

    final = True


class LeaseTaken(LeaseDenied):
    """The id names the lease of another holder, or one of other amounts or devices: choose another id."""

    status = 409
    code = "lease_taken"
    type = "invalid_request_error"
    final = True


class LeaseLost(ClientFault):
    """The lease is not the holder's any more: it was not heard of in time, or another has it."""

    status = 409
    code = "lease_lost"


class LeaseUnknown(LeaseLost):
    """Nothing is known of such a lease: it never was, or it is long over."""

    status = 404
    code = "lease_unknown"
    type = "not_found_error"


class StoreDown(LeaseStoreUnavailable):
    """The lease store does not answer, or cannot write at present."""

    public_words = "The lease store does not answer; ask again."


class OutOfMemory(LoadFailed):
    """The engine ran out of memory while loading. `memory` beside the code has the numbers."""

    status = 507
    code = "model_out_of_memory"
    public_words = "The model could not be loaded: it ran out of memory."


class NoPlace(ClientFault):
    """A model was to sleep and the green room had no place for it, so that it went cold."""

    status = 409
    code = "green_room_full"


class BadModel(LoadFailed):
    """Files of the model are missing, damaged, or not what its engine can serve: trying again changes nothing."""

    code = "bad_model"
    final = True
    public_words = "The model could not be loaded: its files cannot be served."


class OutsideRoots(BadModel):
    """A file of the model lies where no files of models may lie."""

    code = "path_outside_roots"
    public_words = "The model could not be loaded: its files lie where no model's may."
