"""One slot of this worker: its arena, its model, its engine and its HTTP socket.

Owns the order in which these are created, woken, put to sleep and released, and that nothing is left of a slot that
could not be opened. Never parses a request and never computes. Read `WorkerSlot.open` first.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ...serving.http import HttpServer
from ..failures import BadModel, Stuck, WorkCancelled
from ..weights.device_weights import DeviceWeights
from .resources import DeviceContext, SlotEngine, WorkerResources
from .slot_options import SlotOptions


class WorkerSlot:
    """An open slot, which starts asleep. Its methods are called one at a time. `cleanup` is closed with it."""

    def __init__(
        self,
        weights: DeviceWeights,
        engine: SlotEngine,
        served: HttpServer,
        resources: WorkerResources,
        cleanup: ExitStack,
        host_bytes: int,
    ) -> None:
        self._weights, self._engine = weights, engine
        self._served, self._resources = served, resources
        self._cleanup = cleanup
        self.host_bytes = host_bytes
        self.wakes = 0
        self._last_wake_bytes = 0

    @classmethod
    def open(
        cls,
        options: SlotOptions,
        descriptor: int,
        resources: WorkerResources,
        progress: Callable[[float], None],
        cancelled: threading.Event,
    ) -> tuple[WorkerSlot, dict[str, Any]]:
        """Fill the arena, build everything, listen. Passes on errors of these; nothing is left of the slot then."""
        began = time.monotonic()
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            if not options.filled:
                # The gateway holds the memfd too: it must not keep the memory of a model that could not be opened.
                refill = undo.enter_context(_Emptied(descriptor))
            device, *others = _devices(options)
            around = DeviceContext(device, resources.copy_rate, resources.on_fatal, tuple(others))
            made = resources.prepare(options, descriptor, around, progress, cancelled)
            undo.callback(made.close)
            if cancelled.is_set():
                raise WorkCancelled(f"{options.model} is not wanted any more.")
            served = resources.run(made.serve(options.socket, options.model, resources))
            if not options.filled:
                refill.keep()
            hosted = cls(made.weights, made.engine, served, resources, undo.pop_all(), made.host_bytes)
        answer = {
            "arena_bytes": hosted.host_bytes,
            "kv_bytes": made.weights.kv.size,
            "seconds": time.monotonic() - began,
            "read_bytes": made.read_bytes,
        }
        return hosted, answer

    def wake(self) -> dict[str, Any]:
        was_awake = self._weights.is_awake
        woken = self._weights.wake()
        if not was_awake:
            self._start_engine()
            self.wakes += 1
            self._last_wake_bytes = woken.bytes
        return {
            "bytes": woken.bytes,
            "device_bytes": woken.device_bytes,
            "each_device_bytes": woken.each_device_bytes,
            "expected_s": woken.expected_s,
        }

    def _start_engine(self) -> None:
        try:
            self._engine.on_wake()
        except Stuck:
            # The thread may still begin, so its memory stays until the process ends, which is soon.
            raise
        except BaseException:
            self._weights.sleep()
            raise

    def sleep(self) -> dict[str, Any]:
        """Stop computing, then free the device memory. Sequences that still run are ended."""
        began = time.monotonic()
        if self._weights.is_awake:
            self._engine.on_sleep()
            self._weights.sleep()
        return {"seconds": time.monotonic() - began}

    def flush(self, tenant: str | None, tag: str | None) -> dict[str, Any]:
        entries, size = self._engine.flush(tenant, tag)
        return {"entries": entries, "bytes": size}

    def look(self) -> dict[str, Any]:
        return {
            "tier": "ready" if self._weights.is_awake else "asleep",
            "device_bytes": self._weights.device_bytes,
            "host_bytes": self.host_bytes,
            "wakes": self.wakes,
            "last_wake_s": self._weights.last_wake_s,
            "last_wake_bytes": self._last_wake_bytes,
            "in_flight": self._engine.in_flight,
            "kv_used": self._engine.kv_used,
            "kv_bytes": self._engine.kv_bytes,
            "problem": self._weights.registration_problem,
        }

    def close(self) -> None:
        """Cut all connections and release everything but the arena's memory, which the gateway owns."""
        try:
            self._resources.run(self._served.close())
            self.sleep()
        except Stuck:
            raise
        except BaseException:
            self._cleanup.close()
            raise
        self._cleanup.close()


class _Emptied:
    """Truncates a memfd on exit, unless `keep` was called."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._keeps = False

    def keep(self) -> None:
        self._keeps = True

    def __enter__(self) -> _Emptied:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keeps:
            os.ftruncate(self._descriptor, 0)


def _devices(options: SlotOptions) -> list[torch.device]:
    wants = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if wants == "cuda" and not torch.cuda.is_available():
        raise BadModel(f"{options.model} is to run on a GPU, and torch {torch.__version__} sees none here.")
    if wants != "cuda":
        return [torch.device("cpu")]
    wanted, seen = 1 + max(options.device_map.values(), default=0), torch.cuda.device_count()
    if seen < wanted:
        raise BadModel(f"{options.model} is spread over {wanted} GPUs, and torch {torch.__version__} sees {seen} here.")
    return [torch.device("cuda", index) for index in range(wanted)]
