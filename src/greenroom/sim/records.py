"""Requests, leases and slots as the simulated world sees them, independent of the scheduler's own records. A run may
have millions of requests: what is kept of each before it arrives and after it has ended is packed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import merge
from struct import Struct
from typing import Any, NamedTuple, overload

from greenroom.core.effects import RejectCode
from greenroom.core.model import NO_TENANT, Claim, ModelId, Move, SlotId, TenantId, Tier

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


class Arrivals(Sequence[SimArrival]):
    """Arrivals, packed into 26 bytes each: times in any unit, lengths that may be unknown. `sort` puts them in order of
    time. They are read with their times in seconds from the first, and with the given lengths in place of unknown
    ones."""

    # Time, model, prompt_len, output_len, tenant, priority; names are numbers.
    _LAYOUT = Struct("<dIiiIh")

    def __init__(self) -> None:
        self._packed = bytearray()
        self._models = Names()
        self._tenants = Names()
        self.first = self._last = 0.0
        self._in_order = True
        # Set when all rows are known.
        self.unit_s = 1.0
        self.usual_prompt_len = 0
        self.usual_output_len = 0

    def add(self, at: float, model: str, prompt_len: int, output_len: int, tenant: str, priority: int) -> None:
        """`at` is in `unit_s`; a length below 0 is unknown."""
        if not self._packed:
            self.first = self._last = at
        elif at < self._last:
            self._in_order = False
            self.first = min(self.first, at)
        else:
            self._last = at
        self._packed += self._LAYOUT.pack(
            at, self._models.number(model), prompt_len, output_len, self._tenants.number(tenant), priority
        )

    @property
    def span(self) -> float:
        """From the first to the last, in the unit of `add`."""
        return self._last - self.first

    def sort(self) -> None:
        """Put rows in order of time; rows of the same time keep their order."""
        if self._in_order:
            return
        size, packed = self._LAYOUT.size, self._packed
        times = array("d", (row[0] for row in self._LAYOUT.iter_unpack(packed)))
        ordered = bytearray(len(packed))
        for place, number in enumerate(_in_order(times)):
            ordered[place * size : (place + 1) * size] = packed[number * size : (number + 1) * size]
        self._packed, self._in_order = ordered, True

    def __len__(self) -> int:
        return len(self._packed) // self._LAYOUT.size

    def __iter__(self) -> Iterator[SimArrival]:
        return map(self._read, self._LAYOUT.iter_unpack(self._packed))

    @overload
    def __getitem__(self, index: int) -> SimArrival: ...

    @overload
    def __getitem__(self, index: slice) -> list[SimArrival]: ...

    def __getitem__(self, index: int | slice) -> SimArrival | list[SimArrival]:
        rows = range(len(self))[index]
        return self._at(rows) if isinstance(rows, int) else [self._at(row) for row in rows]

    def _at(self, row: int) -> SimArrival:
        return self._read(self._LAYOUT.unpack_from(self._packed, row * self._LAYOUT.size))

    def _read(self, fields: tuple[Any, ...]) -> SimArrival:
        at, model, prompt_len, output_len, tenant, priority = fields
        return SimArrival(
            (at - self.first) * self.unit_s,
            ModelId(self._models.all[model]),
            self.usual_prompt_len if prompt_len < 0 else prompt_len,
            self.usual_output_len if output_len < 0 else output_len,
            TenantId(self._tenants.all[tenant]),
            priority,
        )


# Rows that are sorted at once.
SORTED_MAX = 65_536


def _in_order(times: array[float]) -> Iterator[int]:
    """The numbers of rows in order of their times. All at once, as objects, they would take more than the rows."""
    starts = range(0, len(times), SORTED_MAX)
    parts = (range(start, min(start + SORTED_MAX, len(times))) for start in starts)
    return merge(*(array("I", sorted(part, key=times.__getitem__)) for part in parts), key=times.__getitem__)


@dataclass(slots=True, eq=False)
class SimCall:
    """A request, or a lease that another program asks for."""

    id: str
    number: int
    candidates: tuple[ModelId, ...]
    arrived: float
    prompt_len: int = 0
    output_len: int = 0
    priority: int = 1
    tenant: TenantId = NO_TENANT
    is_lease: bool = False
    fate: Fate = Fate.WAITING
    # The model that serves it; before that, its first candidate.
    model: ModelId = field(init=False)
    slot: SlotId | None = None
    grants: int = 0
    granted_at: float = 0.0
    ended_at: float = 0.0
    # The part of its wait before its slot was ready.
    not_there_s: float = 0.0
    # The part of that in which its model became ready: for the first time; after it had left because it was idle.
    first_load_s: float = 0.0
    idle_load_s: float = 0.0
    # How long its answer takes alone on the GPU.
    work_s: float = 0.0
    was_cut: bool = False
    # Its engine died in the middle of the answer.
    was_broken: bool = False
    code: RejectCode | None = None
    # Refused for lack of memory that the machine has, but pinned models hold.
    is_kept_out: bool = False
    # Called when it has ended, however it ended.
    on_end: Callable[[SimCall], None] | None = None

    def __post_init__(self) -> None:
        self.model = self.candidates[0] if self.candidates else NO_MODEL

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
        for row in self._LAYOUT.iter_unpack(self._packed):
            *figures, model, tenant, fate, code, was_broken, is_lease = row
            names = (self._models.all[model], self._tenants.all[tenant])
            yield EndedCall._make((*figures, *names, _FATES[fate], _CODES[code], was_broken, is_lease))


@dataclass(slots=True, eq=False)
class SimPlace:
    """A slot, or the memory of a lease: its tier and its claim, by all events so far."""

    id: SlotId
    model: ModelId
    revision: int
    tier: Tier = Tier.COLD
    holds: Claim = field(default_factory=dict)
    # What it held before its current move.
    held: Claim = field(default_factory=dict)
    ready_claim: Claim = field(default_factory=dict)
    asleep_claim: Claim = field(default_factory=dict)
    ready_since: float = 0.0
    # How long it took to be ready: if it was the first time for its model; if that had left because it was idle.
    first_load_s: float = 0.0
    idle_load_s: float = 0.0
    move: Move | None = None
    moving_since: float = 0.0
    running: dict[str, SimCall] = field(default_factory=dict)
    concurrency: int = 1
    # Its process died during its current move.
    fell: bool = False

    @property
    def has_engine(self) -> bool:
        """False for a lease."""
        return self.model != NO_MODEL
