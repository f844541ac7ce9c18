"""Requests, leases and slots as the simulated world sees them, independent of the scheduler's own records.

A run may have millions of requests: whatever is kept of each after its end, is kept packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from struct import Struct
from typing import NamedTuple

from greenroom.core.effects import RejectCode
from greenroom.core.model import NO_CLAIM, NO_TENANT, Claim, ModelId, Move, SlotId, TenantId, Tier

# The model of a place that is a lease.
NO_MODEL = ModelId("")


class Violation(AssertionError):
    """The scheduler asked for something impossible or forbidden."""


class Fate(Enum):
    WAITING = "waiting"
    GRANTED = "granted"
    SERVED = "served"
    REJECTED = "rejected"
    GONE = "gone"


class SimArrival(NamedTuple):
    """One request of a workload: time, model, lengths, tenant and priority."""

    at: float
    model: ModelId
    prompt_len: int
    output_len: int
    tenant: TenantId = NO_TENANT
    priority: int = 1


class SimCall:
    """A request, or a lease that another program asks for."""

    __slots__ = (
        "arrived",
        "candidates",
        "code",
        "ended_at",
        "fate",
        "granted_at",
        "grants",
        "id",
        "is_lease",
        "model",
        "not_there_s",
        "number",
        "on_end",
        "output_len",
        "priority",
        "prompt_len",
        "slot",
        "tenant",
        "was_broken",
        "was_cut",
        "work_s",
    )

    def __init__(
        self,
        call_id: str,
        number: int,
        candidates: tuple[ModelId, ...],
        arrived: float,
        prompt_len: int = 0,
        output_len: int = 0,
        priority: int = 1,
        tenant: TenantId = NO_TENANT,
        is_lease: bool = False,
    ) -> None:
        self.id = call_id
        self.number = number
        self.candidates = candidates
        self.arrived = arrived
        self.prompt_len = prompt_len
        self.output_len = output_len
        self.priority = priority
        self.tenant = tenant
        self.is_lease = is_lease
        self.fate = Fate.WAITING
        # The model that serves it; before that, its first candidate.
        self.model = candidates[0] if candidates else NO_MODEL
        self.slot: SlotId | None = None
        self.grants = 0
        self.granted_at = 0.0
        self.ended_at = 0.0
        # The part of its wait before its slot was ready.
        self.not_there_s = 0.0
        # How long its answer takes alone on the GPU.
        self.work_s = 0.0
        self.was_cut = False
        # Its engine died in the middle of the answer.
        self.was_broken = False
        self.code: RejectCode | None = None
        # Called when it has ended, however it ended.
        self.on_end: Callable[[SimCall], None] | None = None

    @property
    def wait_s(self) -> float:
        """From arrival to the grant that served it."""
        return self.granted_at - self.arrived


class EndedCall(NamedTuple):
    """What is kept of a request or lease after its end."""

    arrived: float
    granted_at: float
    ended_at: float
    output_len: int
    priority: int
    model: ModelId
    tenant: TenantId
    fate: Fate
    code: RejectCode | None
    was_broken: bool
    is_lease: bool

    @property
    def wait_s(self) -> float:
        """From arrival to the grant that served it."""
        return self.granted_at - self.arrived


class Names:
    """Numbers for names, in the order in which they first occur."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.all: list[str] = []

    def number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.all)
            self.all.append(name)
        return number


_FATES = tuple(Fate)
_CODES = (None, *RejectCode)
_FATE_NUMBERS = {fate: number for number, fate in enumerate(_FATES)}
_CODE_NUMBERS = {code: number for number, code in enumerate(_CODES)}


class EndedCalls:
    """Calls that have ended, in the order of their ends, packed into some 40 bytes each."""

    # The fields of EndedCall; names and enums are numbers.
    _LAYOUT = Struct("<dddIhIIBB??")

    def __init__(self) -> None:
        self._packed = bytearray()
        self._models = Names()
        self._tenants = Names()

    def add(self, call: SimCall) -> None:
        self._packed += self._LAYOUT.pack(
            call.arrived,
            call.granted_at,
            call.ended_at,
            call.output_len,
            call.priority,
            self._models.number(call.model),
            self._tenants.number(call.tenant),
            _FATE_NUMBERS[call.fate],
            _CODE_NUMBERS[call.code],
            call.was_broken,
            call.is_lease,
        )

    def __len__(self) -> int:
        return len(self._packed) // self._LAYOUT.size

    def __iter__(self) -> Iterator[EndedCall]:
        models, tenants = self._models.all, self._tenants.all
        for arrived, granted, ended, output, priority, model, tenant, fate, code, *flags in self._LAYOUT.iter_unpack(
            self._packed
        ):
            yield EndedCall(
                arrived,
                granted,
                ended,
                output,
                priority,
                ModelId(models[model]),
                TenantId(tenants[tenant]),
                _FATES[fate],
                _CODES[code],
                *flags,
            )


class SimPlace:
    """A slot, or the memory of a lease: its tier and its claim, by all events so far."""

    __slots__ = (
        "asleep_claim",
        "concurrency",
        "fell",
        "held",
        "holds",
        "id",
        "model",
        "move",
        "ready_claim",
        "ready_since",
        "revision",
        "running",
        "tier",
    )

    def __init__(self, slot: SlotId, model: ModelId, revision: int) -> None:
        self.id = slot
        self.model = model
        self.revision = revision
        self.tier = Tier.COLD
        self.holds: Claim = NO_CLAIM
        # What it held before its current move.
        self.held: Claim = NO_CLAIM
        self.ready_claim: Claim = NO_CLAIM
        self.asleep_claim: Claim = NO_CLAIM
        self.ready_since = 0.0
        self.move: Move | None = None
        self.running: dict[str, SimCall] = {}
        self.concurrency = 1
        # Its process died during its current move.
        self.fell = False

    @property
    def has_engine(self) -> bool:
        """False for a lease."""
        return self.model != NO_MODEL
