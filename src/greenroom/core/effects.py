"""Everything the scheduler may ask for, each with its reason. The shell carries effects out; the simulator plays them.

Effects return nothing: their results come back as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from greenroom.core.events import Timer
from greenroom.core.model import LeaseId, ModelId, Move, MoveId, OpId, RequestId, SlotId
from greenroom.core.model import Reason as Reason
from greenroom.core.model import because as because

# The reason of a cut when the caller's budget is used up. The shell reports it with an error of its own.
BUDGET_OVER: Final = because("budget")


class RejectCode(Enum):
    """Why a waiting request cannot be served. The shell turns each into an error a caller can act on."""

    UNKNOWN_MODEL = "unknown_model"
    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"  # Its tenant's places; others may still wait.
    LOAD_FAILED = "load_failed"
    TOO_LARGE = "too_large"
    EXCLUDED = "excluded"
    UNLOADED = "unloaded"
    REMOVED = "removed"
    EXPIRED = "expired"
    SHUTTING_DOWN = "shutting_down"
    LOST = "lost"
    STORE_DOWN = "store_down"


@dataclass(frozen=True, slots=True)
class Rejection:
    """What the caller is told: the code, the model, when to try again, and the numbers behind it."""

    code: RejectCode
    model: ModelId
    retry_after_s: float | None = None
    queue_depth: int = 0
    avg_wait_s: float = 0.0
    needs_mib: int = 0
    free_mib: int = 0
    capacity_mib: int = 0
    # Holders of memory through other gateways.
    held_by: tuple[str, ...] = ()
    # Models beside which the coresidency rules exclude it.
    beside: tuple[ModelId, ...] = ()
    # Seconds beyond `retry_after_s` until loads of other models have made room; infinite if that is not known, as
    # where leases or undeclared processes hold the memory.
    room_s: float = 0.0
    # For `TOO_LARGE`: pinned models without which it would fit.
    pinned: tuple[ModelId, ...] = ()
    # The fewest leases, of any gateway, whose end would make room, and which are not recalled for it.
    leases: tuple[LeaseId, ...] = ()


class OpOutcome(Enum):
    """How an operator's request ended."""

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    EXCLUDED = "excluded"
    CANCELLED = "cancelled"
    STORE_DOWN = "store_down"


class Effects(Protocol):
    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        """Let this request or lease use this slot now. It is already counted as in flight."""
        ...

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        """End this waiting request or lease with an error."""
        ...

    def cut(self, request: RequestId, reason: Reason) -> None:
        """End this running answer; `ServeDone` follows."""
        ...

    def move(self, move: Move, reason: Reason) -> None:
        """Start this move; exactly one `MoveDone` follows."""
        ...

    def abort(self, move: MoveId, reason: Reason) -> None:
        """Stop this move if that is still possible; its `MoveDone` follows either way."""
        ...

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        """Tell the operator how the operation ended."""
        ...

    def recall(self, lease: LeaseId, deadline: float, reason: Reason) -> None:
        """Ask the holder to leave by the deadline; `LeaseGone` follows."""
        ...

    def set_timer(self, timer: Timer, at: float | None, reason: Reason) -> None:
        """Fire once at that time. A later call for the same timer replaces it; None cancels it."""
        ...
