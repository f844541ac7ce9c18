"""All slots of this worker, the parts of each, and the operations on them. Owns the table of slots and the end of the
process. `line.py` has the way in which the gateway's requests arrive."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch

from ...serving.http import HttpServer
from ..failures import POISONED_EXIT, BadModel, Stuck, UnknownSlot, WorkCancelled
from ..weights.device_weights import DeviceWeights
from .resources import DeviceContext, SlotEngine, WorkerResources
from .slot_options import Opening, SlotOptions, read_slot_options


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
        opening: Opening,
    ) -> tuple[WorkerSlot, dict[str, Any]]:
        """Fill the arena, build everything, listen. Passes on errors of these; nothing is left of the slot then."""
        began = time.monotonic()
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            if not options.filled:
                # The gateway holds the memfd too: it must not keep the memory of a model that could not be opened.
                emptying = undo.enter_context(ExitStack())
                emptying.callback(os.ftruncate, descriptor, 0)
            device, *others = _devices(options)
            around = DeviceContext(device, resources.copy_rate, resources.on_fatal, tuple(others))
            made = resources.prepare(options, descriptor, around, opening)
            undo.callback(made.close)
            if opening.cancelled.is_set():
                raise WorkCancelled(f"{options.model} is not wanted any more.")
            served = resources.run(made.serve(options.socket, options.model, resources))
            if not options.filled:
                emptying.pop_all()
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


# The packages that tell their versions.
PACKAGES: Final = ("torch", "transformers", "diffusers")
# Before a process that lost its device exits: how long the report may take, and how long it may travel. Other requests
# get no answer meanwhile.
SAYING_S: Final = 2.0
LAST_WORDS_S: Final = 0.1

log = logging.getLogger(__name__)


class SlotTable:
    """What the gateway may ask for. Methods with a slot are called in that slot's own thread."""

    def __init__(self, resources: WorkerResources, saying_s: float = SAYING_S) -> None:
        self._saying_s = saying_s
        self._resources = resources
        self._slots: dict[str, WorkerSlot] = {}
        self._is_lost = False
        self._losing = threading.Lock()

    def hello(self) -> Mapping[str, Any]:
        # Looking for a GPU creates no CUDA context.
        return {
            "pid": os.getpid(),
            **{name: str(sys.modules[name].__version__) for name in PACKAGES if name in sys.modules},
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "python": platform.python_version(),
        }

    def look(self) -> Mapping[str, Any]:
        slots = {slot: hosted.look() for slot, hosted in list(self._slots.items())}
        return {"slots": slots, "device_bytes_own": _own_bytes()}

    def open(self, message: Mapping[str, Any], descriptor: int, opening: Opening) -> Mapping[str, Any]:
        """Takes ownership of the descriptor, whatever happens."""
        _show_gpus(message.get("gpus"))
        try:
            options = read_slot_options(message)
        except BaseException:
            os.close(descriptor)
            raise
        hosted, answer = WorkerSlot.open(options, descriptor, self._resources, opening)
        self._slots[options.slot] = hosted
        log.info("opened slot=%s model=%s took_s=%.2f", options.slot, options.model, answer["seconds"])
        return answer

    def wake(self, slot: str) -> Mapping[str, Any]:
        return self._of(slot).wake()

    def sleep(self, slot: str) -> Mapping[str, Any]:
        return self._of(slot).sleep()

    def flush(self, slot: str, tenant: str | None, tag: str | None) -> Mapping[str, Any]:
        return self._of(slot).flush(tenant, tag)

    def close(self, slot: str) -> Mapping[str, Any]:
        """Closing a slot that was never opened does nothing."""
        hosted = self._slots.pop(slot, None)
        if hosted is not None:
            hosted.close()
            del hosted
            # Its CUDA graphs and their memory go with the last reference.
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        return {}

    def lost(self, error: BaseException, say: Callable[[], None]) -> None:
        """End this process, because its device does not work any more. The first caller may have caused it: its `say`
        reports the error before the process ends. Later callers have only noticed it. Their requests get no answer, so
        the gateway repeats them where the models wake next."""
        with self._losing:
            is_first, self._is_lost = not self._is_lost, True
        if not is_first:
            return
        log.error("the device is lost, and this process with it: %s", error)
        said = threading.Event()
        try:
            threading.Thread(target=_end, args=(said, self._saying_s), name="end", daemon=True).start()
            say()
        except RuntimeError:
            # No thread can be started, or the report failed. The process must end all the same.
            os._exit(POISONED_EXIT)
        finally:
            said.set()

    def _of(self, slot: str) -> WorkerSlot:
        hosted = self._slots.get(slot)
        if hosted is None:
            raise UnknownSlot(f"slot {slot} is not open here.")
        return hosted


def _show_gpus(names: object) -> None:
    """Choose the GPUs that this process sees. Only the first slot can; the worker started before they were known."""
    if isinstance(names, str) and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = names


def _end(said: threading.Event, saying_s: float) -> None:
    said.wait(saying_s)
    time.sleep(LAST_WORDS_S)
    os._exit(POISONED_EXIT)


def _own_bytes() -> int:
    """What torch's allocator holds on all devices for all slots: activations, graphs, small buffers."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return sum(int(torch.cuda.memory_reserved(gpu)) for gpu in gpus)
