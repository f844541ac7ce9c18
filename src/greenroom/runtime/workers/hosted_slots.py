"""Hosted slots: where the weights of each lie, in which worker it lives, and what it holds there by that worker's word.

Owns the table, also of those that are asleep and so are no live slots. Several slots share a process, so that what each
of them uses cannot be seen from outside; what the process uses beyond their words is its own.
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
        # Where it is open; None when its worker has ended and nobody has asked for it since.
        self.worker: Worker | None = None
        # Whether others lived there when it came.
        self.had_neighbours = False
        self.pool: Pool | None = None
        self.socket: str | None = None
        # How often it was opened: each time its socket has a name of its own.
        self.opened_count = 0
        # A move is under way, which deals with the end of the worker itself.
        self.is_moving = False
        self.is_ready = False
        # How much of its arena is filled, while it is.
        self.progress: float | None = None
        self.arena_bytes = 0
        # Beside the arena, while it is ready.
        self.device_bytes = 0
        # Its worker computes on the host, also where GPUs are a budget only.
        self.is_on_host = False

    @property
    def gpu(self) -> DeviceId | None:
        return None if self.is_on_host or not self.key.gpus else self.key.gpus[0]

    @property
    def on_gpu(self) -> Claim:
        """What it holds on a GPU, by its worker's word."""
        gpu = self.gpu
        return {gpu: _mib(self.device_bytes)} if gpu is not None and self.is_ready and self.device_bytes else NO_CLAIM

    @property
    def told(self) -> Claim:
        """What it holds everywhere by its worker's word."""
        beside_bytes = self.device_bytes if self.gpu is None and self.is_ready else 0
        host_mib = _mib(self.arena_bytes + beside_bytes)
        return {**self.on_gpu, **({HOST: host_mib} if host_mib else NO_CLAIM)}

    def socket_name(self) -> str:
        self.opened_count += 1
        return f"{self.id}.{self.opened_count}.sock"


class HostedSlots:
    def __init__(self) -> None:
        self.there: dict[SlotId, HostedSlot] = {}
        self.workers: dict[str, Worker] = {}
        # How often memory of each GPU began or ended to change hands inside workers, and how often it just does.
        self.stirs: Counter[DeviceId] = Counter()
        self._stirring: Counter[DeviceId] = Counter()

    @contextmanager
    def stirring(self, gpu: DeviceId | None) -> Iterator[None]:
        """While a worker maps or unmaps memory of this GPU, no look can tell whose it is."""
        if gpu is None:
            yield
            return
        self.stirs[gpu] += 1
        self._stirring[gpu] += 1
        try:
            yield
        finally:
            self.stirs[gpu] += 1
            self._stirring[gpu] -= 1

    def stirred_since(self, stirs: Mapping[DeviceId, int]) -> frozenset[DeviceId]:
        """GPUs on which memory changed hands after this was noted, or does now."""
        return frozenset(gpu for gpu, count in self.stirs.items() if count != stirs.get(gpu, 0) or self._stirring[gpu])

    def progress_of(self, model: ModelId) -> float | None:
        """How much of this model's arena is filled, while it is being filled."""
        return next((slot.progress for slot in self.there.values() if slot.entry.id == model), None)

    def told(self) -> dict[str, Claim]:
        """What every slot holds by its worker's word."""
        return {slot.id: slot.told for slot in self.there.values()}


def _mib(size_bytes: int) -> int:
    return -(-size_bytes // _BYTES_A_MIB)


class Arena:
    def __init__(self, name: str) -> None:
        """Empty at first. Raises OSError when there is no descriptor left."""
        self._name = f"greenroom-{name}"
        self.fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        # Filled whole, by a worker that said so: any other worker can take it over as it is.
        self.is_filled = False

    @property
    def size_bytes(self) -> int:
        return 0 if self.fd < 0 else os.fstat(self.fd).st_size

    def empty(self) -> None:
        """Give back what a worker that ended in the middle has left in it. Raises OSError as the first time.

        The next one gets another file: a process that the last one has left behind may still write to the old one.
        """
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
