"""All slots of this worker, and the operations on them.

Owns the table of slots and the end of the process. `worker_slot.py` has the parts of a slot, `line.py` the way in
which the gateway's requests arrive.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ..failures import POISONED_EXIT, UnknownSlot
from .resources import WorkerResources
from .slot_options import read_slot_options
from .worker_slot import WorkerSlot

# The packages that tell their versions.
PACKAGES: Final = ("torch", "transformers", "diffusers")
# Before a process that lost its device exits: how long the report may take, and how long it may travel. Other requests
# get no answer meanwhile.
SAYING_S: Final = 2.0
LAST_WORDS_S: Final = 0.1

log = logging.getLogger(__name__)


class SlotTable:
    """Implements `SlotOperations`."""

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

    def open(
        self,
        message: Mapping[str, Any],
        descriptor: int,
        progress: Callable[[float], None],
        cancelled: threading.Event,
    ) -> Mapping[str, Any]:
        _show_gpus(message.get("gpus"))
        try:
            options = read_slot_options(message)
        except BaseException:
            os.close(descriptor)
            raise
        hosted, answer = WorkerSlot.open(options, descriptor, self._resources, progress, cancelled)
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
