"""One slot of this worker: its arena, its model, its engine and its HTTP socket.

Owns the order in which these are created, woken, put to sleep and released, and that nothing is left of a slot that
could not be opened. Never parses a request and never computes. Read `WorkerSlot.open` first.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

from ..api.routes import ModelServer, serve_text
from ..engine.engine_loop import EngineLoop
from ..failures import BadModel, Cancelled, OnFatal, Stuck
from ..sandbox.pool import SandboxPool
from ..sandbox.schema_trials import SCHEMAS, SchemaTrials
from ..text.templates import TEMPLATES
from ..weights.device_weights import CopyRate, DeviceWeights
from .preparing import DeviceContext, prepare
from .slot_options import SlotOptions

# A loop that does not get to open or close a socket for this long is stuck.
LOOP_TIMEOUT_S: Final = 60.0
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class WorkerResources:
    """What all slots of this process share."""

    loop: asyncio.AbstractEventLoop
    on_fatal: OnFatal
    copy_rate: CopyRate = field(default_factory=CopyRate)
    templates: SandboxPool = field(default_factory=lambda: SandboxPool(TEMPLATES))
    trials: SchemaTrials = field(default_factory=lambda: SchemaTrials(SandboxPool(SCHEMAS)))

    def run(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Run this on the event loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LOOP_TIMEOUT_S)


class WorkerSlot:
    """An open slot, which starts asleep. Its methods are called one at a time. `cleanup` is closed with it."""

    def __init__(
        self,
        weights: DeviceWeights,
        engine: EngineLoop,
        served: ModelServer,
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
            device = _device(options)
            made = prepare(
                options, descriptor, DeviceContext(device, resources.copy_rate, resources.on_fatal), progress, cancelled
            )
            undo.callback(made.text.close)
            undo.callback(made.weights.close)
            undo.callback(made.engine.close)
            if cancelled.is_set():
                raise Cancelled(f"{options.model} is not wanted any more.")
            served = resources.run(
                serve_text(
                    options.socket,
                    made.engine,
                    made.text,
                    options.model,
                    templates=resources.templates,
                    trials=resources.trials,
                    sentence=made.sentence,
                )
            )
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
        return {"bytes": woken.bytes, "device_bytes": woken.device_bytes, "expected_s": woken.expected_s}

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


def _device(options: SlotOptions) -> torch.device:
    wants = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if wants == "cuda" and not torch.cuda.is_available():
        raise BadModel(f"{options.model} is to run on a GPU, and torch {torch.__version__} sees none here.")
    return torch.device("cuda", 0) if wants == "cuda" else torch.device("cpu")
