"""The error tree: what happened, which side is at fault, and what to do about it.

Owns every error that can reach a caller. The class says what happened; its base says which side is at fault. Never
builds a response: `serving/render.py` does, in the dialect of the caller, and decides what that caller sees. A leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from greenroom.base.names import public_name

# Of a caller's own words in a message.
SHOWN_CHARS_MAX: Final = 128


def shown(text: str) -> str:
    """A caller's text for a message: bounded, and quoted and escaped unless it is one word that can be printed."""
    part = text[:SHOWN_CHARS_MAX]
    part = part if part and part.isprintable() and " " not in part else repr(part)
    return part if len(text) <= SHOWN_CHARS_MAX else f"{part}… ({len(text):,} characters)"


class GreenroomError(Exception):
    """The root. `message` says what, which, and what to do; callers without `admin` see `public` instead."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    # A retry would fail in the same way: clients are told not to retry.
    final: ClassVar[bool] = False
    # The default of `public`, for messages that may hold engine output, paths or the names of other models.
    # None: the message itself is safe to show.
    public_words: ClassVar[str | None] = None
    # False for errors of requests that are refused before they are recorded.
    is_recorded: ClassVar[bool] = True
    # The details are the engine's answer to the caller's own request: the caller may read them.
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
        message = public_name(message)
        super().__init__(message)
        self.message = message
        self.public = public_name(public or self.public_words or message)
        self.param = param
        self.details = None if details is None else public_name(details)
        self.retry_after_s = retry_after_s
        # Further fields next to `code` in the error object (queueDepth, avgWaitMs, progress …).
        self.beside: Mapping[str, Any] = beside or {}


# --- the caller's fault ---------------------------------------------------------------------------------------------


class ClientFault(GreenroomError):
    status = 400
    code = "invalid_request"
    type = "invalid_request_error"
    final = True


class BadRequest(ClientFault):
    """The request cannot be understood: bad JSON, a missing field, a value out of range."""


class MediaRefused(BadRequest):
    """It names pictures, sound or films that its engine may not fetch."""

    code = "media_refused"


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


class KeyExpired(InvalidKey):
    code = "api_key_expired"


class KeyRevoked(InvalidKey):
    code = "api_key_revoked"


class NotAllowed(ClientFault):
    status = 403
    code = "not_allowed"
    type = "permission_error"


class NotFound(ClientFault):
    status = 404
    code = "not_found"
    type = "not_found_error"
    is_recorded = False


class ModelNotFound(NotFound):
    code = "model_not_found"

    @classmethod
    def named(cls, name: str, param: str = "model") -> ModelNotFound:
        return cls(f"There is no model {shown(name)}. GET /v1/models lists those there are.", param=param)


class PathNotFound(NotFound):
    """A model is asked for by a path at which there is none, or which lies outside of the roots: both read alike."""


class JobUnfinished(ClientFault):
    """The result is asked for, and the job still waits or runs."""

    status = 409
    code = "job_unfinished"
    final = False


class ResultGone(ClientFault):
    """The job has ended and was kept, but the file with its result is not there any more."""

    status = 410
    code = "result_gone"


class JobCancelled(ClientFault):
    status = 409
    code = "job_cancelled"


class Cancelled(ClientFault):
    """An operator cancelled this request while it waited or was answered. Not an overload: it should not come again."""

    status = 410
    code = "cancelled"


class MethodNotAllowed(ClientFault):
    status = 405
    code = "method_not_allowed"


class PostOnly(MethodNotAllowed):
    """Inference paths accept POST only."""


class Unsupported(ClientFault):
    """The model exists but its engine cannot do this."""

    status = 422
    code = "unsupported"


class NoAbility(Unsupported):
    """The model cannot be asked for this: the route is for models of another kind."""

    status = 400


class NoCandidate(NoAbility):
    """None of the models of a task can serve this request."""

    code = "no_candidate"


class ModelInUse(ClientFault):
    """The model is to be deleted, and is loaded, asleep or configured. `force` deletes it all the same."""

    status = 409
    code = "model_in_use"


class ModelPinned(ClientFault):
    """An order would take a pinned model out of its place. `force` carries it out all the same."""

    status = 409
    code = "model_pinned"


class NoPlace(ClientFault):
    """The model should have slept, but the green room was full: it was unloaded instead."""

    status = 409
    code = "green_room_full"


class UpdateInProgress(ClientFault):
    """Another update of this model runs. `taskId` in the error object names it."""

    status = 409
    code = "update_in_progress"
    final = False


class WouldInterrupt(ClientFault):
    """The new version fits neither beside the old one nor into host memory: `allow_gap` accepts that requests wait."""

    status = 409
    code = "would_interrupt"


# --- signed operations ----------------------------------------------------------------------------------------------


class TokenRefused(ClientFault):
    """The operation needs a token, and this one does not permit it. Nothing was done."""

    status = 403
    code = "token_refused"
    type = "permission_error"


class TokenMissing(TokenRefused):
    status = 401
    code = "token_missing"


class TokenMalformed(TokenRefused):
    """It is not in one of the forms of tokens, or not in the one way to write it."""

    status = 401
    code = "token_malformed"


class TokenBadSignature(TokenRefused):
    status = 401
    code = "token_bad_signature"


class TokenUnknownSigner(TokenRefused):
    code = "token_unknown_signer"


class TokenSignerRepeated(TokenRefused):
    code = "token_signer_repeated"


class TokenTooFewSigners(TokenRefused):
    code = "token_too_few_signers"


class TokenExpired(TokenRefused):
    status = 401
    code = "token_expired"


class TokenFromFuture(TokenRefused):
    """It was issued later than any clock may be ahead."""

    status = 401
    code = "token_not_yet_valid"


class TokenBeforeStart(TokenRefused):
    """It may have been used before: what was used when it was issued is not known."""

    status = 401
    code = "token_issued_before_start"


class TokenReplayed(TokenRefused):
    code = "token_replayed"


class TokenWrongOperation(TokenRefused):
    code = "token_wrong_operation"


class TokenWrongModel(TokenRefused):
    code = "token_wrong_model"


class TokenBodyUnbound(TokenRefused):
    """It has no `bodySha256`, and needs one."""

    code = "token_body_unbound"


class TokenBodyChanged(TokenRefused):
    code = "token_body_changed"


# --- too much at once -----------------------------------------------------------------------------------------------


class Overload(GreenroomError):
    status = 503
    code = "overloaded"
    type = "overloaded_error"


class QueueFull(Overload):
    code = "queue_full"


class RateLimited(Overload):
    """A tenant, key or model has used up what it may use in a minute, or at once. `beside` has the numbers."""

    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"


class CoolingDown(RateLimited):
    """A client made more mistakes than it may in a while: it is not answered until it has cooled down."""

    code = "cooling_down"


class RemoteBudgetSpent(RateLimited):
    """What may be spent at the provider of a remote model today is used up, or would be by this request."""

    code = "remote_budget_spent"
    final = True
    public_words = "What may be spent on this model today is used up."


class RemoteSpendingUnknown(RemoteBudgetSpent):
    """What was spent today at a provider that has a budget is not known: nothing more is spent until it is."""

    status = 503
    code = "remote_spending_unknown"
    type = "server_error"
    public_words = "What was spent on this model today is not known, so it is not asked. An operator must look."


class BodiesFull(Overload):
    """The bodies buffered at the moment have reached their common limit."""

    code = "bodies_full"


class TooManyModels(Overload):
    """As many models outside of the configuration as may be remembered are in use at once."""

    code = "too_many_models"


class TooManyOfKey(Overload):
    """The keys of a tenant have as many of something as they may have, so that others find room."""

    status = 429
    code = "too_many_of_key"
    type = "rate_limit_error"


class OperationsFull(Overload):
    """As many jobs as may be kept have not ended yet."""

    code = "jobs_full"


class TooManyUnfinished(OperationsFull):
    """A key, or the keys of its tenant together, have as many unfinished jobs as one may have."""

    status = 429
    code = "too_many_jobs"
    type = "rate_limit_error"


class OperationStoreFull(Overload):
    """The disk, or the part of it that jobs may use, has no room for a request or a result."""

    status = 507
    code = "job_store_full"
    public_words = "There is no room to keep this job."


class ResultTooLarge(OperationStoreFull):
    """The result alone is larger than all results may be together."""

    code = "result_too_large"
    final = True
    public_words = "The result is larger than the space for results."


class PictureStoreFull(OperationStoreFull):
    """The disk does not take a picture that was to be served by a URL."""

    code = "picture_store_full"
    public_words = "There is no room to keep the pictures; ask for response_format b64_json."


class ModelLoading(Overload):
    """The wait ended before the model could answer. If it was loading, it goes on."""

    code = "model_loading"


class Unloaded(Overload):
    """The model was unloaded by an operator while this request waited or was answered."""

    code = "unloaded"


class NoVersion(Overload):
    """The model is under version control and has no version yet: its first one is being fetched, or failed."""

    code = "no_version"


class ShuttingDown(Overload):
    code = "shutting_down"


class StartingUp(Overload):
    code = "starting"


class NoncesUnavailable(Overload):
    """It cannot be known or kept whether a token was used before, so none is accepted."""

    code = "nonce_store_unavailable"
    public_words = "It cannot be known whether this token was used before; ask again."


class UsageUnavailable(Overload):
    """The file with what was used cannot be read."""

    code = "usage_unavailable"


class AuditUnavailable(Overload):
    """The audit log cannot be written, so no operation is permitted."""

    code = "audit_unavailable"
    public_words = "The audit log cannot be written; ask again."


# --- leases ---------------------------------------------------------------------------------------------------------


class LeaseDenied(Overload):
    """The memory did not become free in time. `beside` holds the numbers."""

    code = "lease_denied"


class LeaseTooLarge(LeaseDenied):
    """These devices can never provide this much memory."""

    final = True


class LeaseTaken(LeaseDenied):
    """The id belongs to another holder's lease, or to one with other amounts or devices: choose another id."""

    status = 409
    code = "lease_taken"
    type = "invalid_request_error"
    final = True


class LeaseLost(ClientFault):
    """The lease is no longer the holder's: it was not renewed in time, or another holder has it."""

    status = 409
    code = "lease_lost"


class LeaseUnknown(LeaseLost):
    """There is no such lease: it never existed, or ended long ago."""

    status = 404
    code = "lease_unknown"
    type = "not_found_error"


class LeaseStoreUnavailable(Overload):
    code = "lease_store_unavailable"


class StoreDown(LeaseStoreUnavailable):
    """The lease store does not answer, or cannot write at the moment."""

    public_words = "The lease store does not answer; ask again."


# --- out of time ----------------------------------------------------------------------------------------------------


class BudgetPassed(GreenroomError):
    """The caller's time budget for the whole answer is used up. The part made so far was sent."""

    status = 504
    code = "budget_passed"
    type = "timeout_error"


# --- the engine's fault ---------------------------------------------------------------------------------------------


class EngineFault(GreenroomError):
    status = 502
    code = "engine_error"
    type = "engine_error"


class LoadFailed(EngineFault):
    """The engine did not become ready. `details` holds the last lines of this start."""

    status = 503
    code = "model_load_failed"
    public_words = "The model could not be loaded."


class LoadOutOfMemory(LoadFailed):
    """The engine ran out of memory while loading. `memory` in the error object has the numbers."""

    status = 507
    code = "model_out_of_memory"
    public_words = "The model could not be loaded: it ran out of memory."


class EngineMissing(LoadFailed):
    """The engine of the model is not installed here."""

    code = "engine_missing"
    public_words = "The model could not be loaded: its engine is not installed here."


class UnusableModel(LoadFailed):
    """Files of the model are missing, damaged, or not supported by its engine. A retry cannot succeed."""

    code = "bad_model"
    final = True
    public_words = "The model could not be loaded: its files cannot be served."


class OutsideRoots(UnusableModel):
    """A file of the model is outside of model_roots."""

    code = "path_outside_roots"
    public_words = "The model could not be loaded: its files lie where no model's may."


class TooLarge(EngineFault):
    """The model can never fit on the devices of this gateway."""

    status = 503
    code = "model_too_large"
    final = True
    public_words = "The model does not fit into the memory that can be made free for it."
    # `public` where it may use only devices that are not there.
    no_device_words: ClassVar[str] = "The model may use only devices that are not there."


class Excluded(EngineFault):
    """The rules of `scheduler.company` do not let the model be ready beside a pinned one."""

    status = 503
    code = "model_excluded"
    final = True
    public_words = "The model may not be ready beside a model that always is."


class FetchFailed(EngineFault):
    """The weights of a version could not be fetched or found."""

    code = "fetch_failed"


class WarmUpFailed(EngineFault):
    """A new version did not answer its warm-up request in time, or with nothing. The old one serves on."""

    code = "warm_up_failed"


class EngineLost(EngineFault):
    """The engine's process or connection went away while it was answering."""

    code = "engine_lost"


class RemoteFailed(EngineLost):
    """The provider of a remote model cannot be reached, or failed."""

    code = "remote_failed"


class RemoteBusy(RemoteFailed):
    """The provider of a remote model takes no more requests of the gateway's account at present."""

    status = 429
    code = "remote_busy"
    type = "rate_limit_error"


class RemoteRefused(RemoteFailed):
    """The provider of a remote model does not accept the gateway's account: its key, its quota, or its rights."""

    code = "remote_refused"
    final = True


class RemoteTimeout(RemoteFailed):
    """The provider of a remote model did not begin to answer in time."""

    status = 504
    code = "remote_timeout"


class JobFailed(EngineFault):
    """The job failed without an answer; `job_error` in the error object says why."""

    code = "job_failed"
    final = True


class EngineTimeout(EngineFault):
    status = 504
    code = "engine_timeout"


# --- ours -----------------------------------------------------------------------------------------------------------


class GatewayBug(GreenroomError):
    """An internal error. Logged with its traceback, which callers never see."""


class PolicyFailed(GreenroomError):
    """The scheduler or its policy raised instead of answering a question. Logged with its traceback."""

    public_words = "Something went wrong inside the gateway."


class ConfigError(GreenroomError):
    """The configuration cannot be used. `message` names file, line, key and the nearest valid spelling."""

    status = 422
    code = "invalid_config"
    type = "invalid_request_error"
    final = True


class ConfigNotKept(GreenroomError):
    """A changed setting cannot be written to the state directory. Nothing has changed."""

    status = 507
    code = "config_not_kept"
    public_words = "The change cannot be kept; nothing has changed."


class RemovalFailed(GreenroomError):
    """A file of the model cannot be deleted. What is left of it is no model any more, or all of it is still there."""

    code = "removal_failed"
    final = True
    public_words = "The model could not be deleted."


class StateDirBusy(GreenroomError):
    """Another gateway holds the state directory."""

    status = 409
    code = "state_dir_busy"


class ProbeFailed(GreenroomError):
    """GPU memory could not be read: no driver, no permission, or an unreadable file."""

    status = 503
    code = "probe_failed"
