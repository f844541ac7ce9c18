"""What a decision may be: serve, join a load, wait, swap or refuse.

`decision.py` and `arrival.py` choose a plan, `apply.py` carries it out, `explain.py` describes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf

from greenroom.core.effects import RejectCode
from greenroom.core.model import Claim, DeviceId, LeaseId, ModelId, MoveKind, SlotId
from greenroom.core.policy.swapper import Resident


# One is created for every request, so its constructor is one that is compiled.
@dataclass(slots=True, init=False)
class Serve:
    """Ready and free: use this slot now."""

    slot: SlotId

    def __init__(self, slot: SlotId) -> None:
        self.slot = slot


@dataclass(frozen=True, slots=True)
class Join:
    """The model is already on its way: wait for it in its queue."""

    slot: SlotId
    model: ModelId


class WaitReason(Enum):
    """Why nothing can be done now."""

    BUSY = "busy"  # ready, but at its concurrency limit
    LEAVING = "leaving"  # leaving, or moving to the green room
    NO_LEASE = "no_lease"  # a lease was refused; it is retried soon
    STORE_DOWN = "store_down"
    KEPT_FOR_OTHERS = "kept_for_others"
    GREEN_ROOM = "green_room"  # no host memory for one more sleeper
    NO_ROOM = "no_room"
    EXCLUDED = "excluded"  # by the coresidency rules, beside models that cannot leave now
    HELD = "held"  # its next version takes its place
    MANY_MODELS = "crowd"  # many models are waited for, and a round asks for only some of them


# Several are created in every round, so it is not frozen: that takes several times as long. Never modified.
@dataclass(slots=True)
class Wait:
    """Nothing can be done now. `until` is when asking again may help; `on` are the devices where memory is missing.

    `beside` are the models beside which the coresidency rules exclude it. `keeps` are devices where it could come soon
    if nothing else did.
    """

    why: WaitReason
    model: ModelId
    until: float = inf
    on: frozenset[DeviceId] = frozenset()
    behind: tuple[ModelId, ...] = ()
    beside: tuple[ModelId, ...] = ()
    keeps: frozenset[DeviceId] = frozenset()


@dataclass(frozen=True, slots=True)
class Swap:
    """Start the move that brings the model, after the evictions. `claim` is what it holds when ready."""

    model: ModelId
    kind: MoveKind
    claim: Claim
    evict: tuple[Resident, ...]
    wakes: SlotId | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The only possible answer is an error. `beside` as in `Wait`; for `EXCLUDED` these models are pinned.

    `room_s`, `pinned` and `leases` as in `Rejection`.
    """

    code: RejectCode
    retry_after_s: float | None = None
    needs_mib: int = 0
    free_mib: int = 0
    capacity_mib: int = 0
    held_by: tuple[str, ...] = ()
    beside: tuple[ModelId, ...] = ()
    room_s: float = 0.0
    pinned: tuple[ModelId, ...] = ()
    leases: tuple[LeaseId, ...] = ()


Plan = Serve | Join | Wait | Swap | Refuse
