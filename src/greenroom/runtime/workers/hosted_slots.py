"""Hosted slots: the arena of each, the worker in which it lives, and what the worker says that it holds.

Owns the table of all hosted slots, including sleeping ones, which are no live slots. Slots share a process, so that the
use of each cannot be seen from outside: the worker reports it, and the rest is the worker's own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from greenroom.core.model import NO_CLAIM, Claim, DeviceId, ModelId, SlotId
from greenroom.engines.base import HostedEngine, HostKey
from greenroom.http.upstream import Pool
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.workers.worker import Worker

_BYTES_A_MIB = 1024 * 1024


class HostedSlot:
    """One slot, from before its arena is filled until after it is closed."""

    def __init__(self, slot: SlotId, entry: Entry, engine: HostedEngine, key: HostKey) -> None:
        self.id = slot
        self.entry = entry
        self.engine = engine
        self.key = key
        self.arena = Arena(slot)
        # Where it is open; None if its worker has ended and it was not opened again.
        self.worker: Worker | None = None
        # Whether the worker had other slots when it was opened.
        self.had_neighbours = False
        self.pool: Pool | None = None
        self.socket: str | None = None
        # How often it was opened: each time its socket has a new name.
        self.opened_count = 0
        # A move is under way; it handles the end of the worker itself.
        self.is_moving = False
        self.is_ready = False
        # The share of its arena that is filled, while it is being filled.
        self.progress: float | None = None
        self.arena_bytes = 0
        # Used beyond the arena while it is ready, on each of its devices.
        self.device_bytes: list[int] = []
        # Its worker computes on the host; also where GPUs are only a budget.
        self.is_on_host = False

    @property
    def gpus(self) -> tuple[DeviceId, ...]:
        """The GPUs it computes on."""
        return () if self.is_on_host else self.key.gpus or ()

    @property
    def on_gpus(self) -> Claim:
        """What its worker says that it holds on GPUs."""
        if not self.is_ready:
            return NO_CLAIM
        return {gpu: _mib(size) for gpu, size in zip(self.gpus, self.device_bytes, strict=False) if size}

    @property
    def told(self) -> Claim:
        """What its worker says that it holds on all devices."""
        beside_bytes = sum(self.device_bytes) if not self.gpus and self.is_ready else 0
        host_mib = _mib(self.arena_bytes + beside_bytes)
        return {**self.on_gpus, **({HOST: host_mib} if host_mib else NO_CLAIM)}

    def socket_name(self) -> str:
        self.opened_count += 1
        return f"{self.id}.{self.opened_count}.sock"


class HostedSlots:
    def __init__(self) -> None:
        self.there: dict[SlotId, HostedSlot] = {}
        self.workers: dict[str, Worker] = {}
        # How often workers began or ended to map or unmap memory of each GPU, and how many do so now.
        self.stirs: Counter[DeviceId] = Counter()
        self._stirring: Counter[DeviceId] = Counter()

    @contextmanager
    def stirring(self, *gpus: DeviceId) -> Iterator[None]:
        """Marks a worker that maps or unmaps memory of these GPUs: a look meanwhile cannot attribute it."""
        self.stirs.update(gpus)
        self._stirring.update(gpus)
        try:
            yield
        finally:
            self.stirs.update(gpus)
            self._stirring.subtract(gpus)

    def stirred_since(self, stirs: Mapping[DeviceId, int]) -> frozenset[DeviceId]:
        """GPUs on which workers mapped or unmapped memory since these counts were taken, or do so now."""
        return frozenset(gpu for gpu, count in self.stirs.items() if count != stirs.get(gpu, 0) or self._stirring[gpu])

    def progress_of(self, model: ModelId) -> float | None:
        """The share of this model's arena that is filled, while it is being filled."""
        return next((slot.progress for slot in self.there.values() if slot.entry.id == model), None)

    def promoted(self, entry: Entry, version: ModelId) -> None:
        """The slots of this version are the model's from now on."""
        for slot in self.there.values():
            if slot.entry.id == version:
                slot.entry = entry

    def told(self) -> dict[str, Claim]:
        """What workers say that each slot holds."""
        return {slot.id: slot.told for slot in self.there.values()}


def _mib(size_bytes: int) -> int:
    return -(-size_bytes // _BYTES_A_MIB)


class Arena:
    """A memory file that holds the weights of one slot. It outlives the workers that map it."""

    def __init__(self, name: str) -> None:
        """Empty at first. Raises OSError if no descriptor is left."""
        self._name = f"greenroom-{name}"
        self.fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        # A worker said that it is completely filled: any other worker can take it over.
        self.is_filled = False

    @property
    def size_bytes(self) -> int:
        return 0 if self.fd < 0 else os.fstat(self.fd).st_size

    def empty(self) -> None:
        """Drop what a worker that ended in the middle has written. Raises OSError if no descriptor is left. The next
        worker gets another file: a leftover process of the last one may still write to the old one."""
        self.is_filled = False
        fresh = os.memfd_create(self._name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, 0)
        os.close(self.fd)
        self.fd = fresh

    def close(self) -> None:
        """May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
