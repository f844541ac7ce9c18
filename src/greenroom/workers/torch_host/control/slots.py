"""All slots of this worker, and what the gateway may ask of them.

Owns the table of slots and the end of the process. What a slot is made of is `hosted`'s to know; how requests come in
is `control`'s.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import transformers

from ..failures import POISONED_EXIT, UnknownSlot
from .hosted_slot import HostedSlot, WorkerResources
from .slot_options import read_slot_options

# How long it may take to say what is to be said, and how long until that has reached those it was said to. Whoever else
# is asked meanwhile stays silent.
SAYING_S: Final = 2.0
LAST_WORDS_S: Final = 0.1

log = logging.getLogger(__name__)


class SlotTable:
    """Implements control's `Desk`."""

    def __init__(self, resources: WorkerResources) -> None:
        self._resources = resources
        self._slots: dict[str, HostedSlot] = {}
        self._is_lost = False
        self._losing = threading.Lock()

    def hello(self) -> Mapping[str, Any]:
        # Asking whether there is a GPU does not make a context on it.
        return {
            "pid": os.getpid(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
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
        hosted, answer = HostedSlot.open(options, descriptor, self._resources, progress, cancelled)
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
        """A slot that never came to be is closed already."""
        hosted = self._slots.pop(slot, None)
        if hosted is not None:
            hosted.close()
            del hosted
            # What its graphs kept on the device goes with them.
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        return {}

    def lost(self, error: BaseException, say: Callable[[], None]) -> None:
        """End this process: its device answers nothing any more.

        Who is the first to tell may have done it: it may `say` so to those who asked, before the process ends. The
        others have only noticed. Who asked them hears nothing here, and so is asked for again where their models wake
        next.
        """
        with self._losing:
            is_first, self._is_lost = not self._is_lost, True
        if not is_first:
            return
        log.error("the device is lost, and this process with it: %s", error)
        said = threading.Event()
        try:
            threading.Thread(target=_end, args=(said,), name="end", daemon=True).start()
            say()
        except RuntimeError:
            # There can be no thread any more, or nobody can be told. It must end all the same.
            os._exit(POISONED_EXIT)
        finally:
            said.set()

    def _of(self, slot: str) -> HostedSlot:
        hosted = self._slots.get(slot)
        if hosted is None:
            raise UnknownSlot(f"slot {slot} is not open here.")
        return hosted


def _show_gpus(names: object) -> None:
    """A worker that was started before anybody knew for whom learns with its first slot which GPUs it may see."""
    if isinstance(names, str) and not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = names


def _end(said: threading.Event) -> None:
    said.wait(SAYING_S)
    time.sleep(LAST_WORDS_S)
    os._exit(POISONED_EXIT)


def _own_bytes() -> int:
    """What torch itself holds on the device for all slots: results of computations, graphs, small buffers."""
    return int(torch.cuda.memory_reserved()) if torch.cuda.is_initialized() else 0
