"""What all slots of a worker share, and what its program makes of a model.

A worker runs one program, for models of Transformers or for pipelines of diffusers. They differ in how a model is
prepared and served; slots, arenas and the control line are the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch

from ...serving.http import HttpServer
from ..failures import OnFatal
from ..sandbox.pool import SandboxPool
from ..sandbox.schema_trials import SCHEMAS, SchemaTrials
from ..text.templates import TEMPLATES
from ..weights.device_weights import DeviceWeights
from ..weights.reading import LoadContext
from ..weights.upload import CopyRate
from .slot_options import Opening, SlotOptions

DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """The device of a model, its copy rate, and what to call when the device is lost. `others` are further devices over
    which its components may be spread."""

    device: torch.device
    copy_rate: CopyRate
    on_fatal: OnFatal
    others: tuple[torch.device, ...] = ()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All of them, in the order in which `device_map` counts them."""
        return (self.device, *self.others)


def settle_near(device: torch.device) -> None:
    """Run the calling thread, and those it starts, on processors near this device."""
    near = processors_near(device) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)


def processors_near(device: torch.device) -> set[int]:
    # With one NUMA node there is no need to wait for CUDA to identify the device.
    if device.type != "cuda" or len(list(NODES.glob("node[0-9]*"))) < 2:
        return set()
    seen = torch.cuda.get_device_properties(device)
    try:
        address = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"
        return numbers_in((DEVICES / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):
        return set()


def numbers_in(text: str) -> set[int]:
    """The numbers in a list of the kernel, such as `0-3,8,10-11`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


class SlotLoad(LoadContext):
    """The load of one slot: reports to the gateway, and reads near the device."""

    def __init__(self, order: SlotOptions, device_context: DeviceContext, opening: Opening) -> None:
        # A CPU computes with the arena itself; a GPU gets a copy, which is faster if it is smaller.
        folds = all(device.type == "cuda" for device in device_context.devices)
        super().__init__(order.arena_max_bytes, order.host_free_bytes, folds, cancelled=opening.cancelled)
        self._device, self._opening = device_context.device, opening

    def on_progress(self, share: float) -> None:
        self._opening.report(share)

    def on_thread(self) -> None:
        settle_near(self._device)


# A loop that does not get to open or close a socket for this long is stuck.
LOOP_TIMEOUT_S: Final = 60.0
_Answer = TypeVar("_Answer")


class SlotEngine(Protocol):
    """Computes what a model is asked for, in a thread of its own, between `on_wake` and `on_sleep`."""

    def on_wake(self) -> None:
        """Start computing: weights are being copied. Raises Stuck, or what keeps it from starting."""

    def on_sleep(self) -> None:
        """Stop computing and end unfinished requests. Returns when nothing touches the device any more."""

    def flush(self, tenant: str | None, tag: str | None) -> tuple[int, int]:
        """Drop cached prefixes. Returns entries removed and bytes freed."""

    @property
    def in_flight(self) -> int: ...
    @property
    def kv_used(self) -> float | None:
        """The share of its KV cache that sequences use now; None if it has none."""

    @property
    def kv_bytes(self) -> int | None:
        """The size of its KV cache while it is ready; None if it has none."""


class PreparedModel(Protocol):
    """A model that sleeps."""

    @property
    def weights(self) -> DeviceWeights: ...
    @property
    def engine(self) -> SlotEngine: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...

    async def serve(self, socket: Path, model: str, resources: WorkerResources) -> HttpServer:
        """Open its API there."""

    def close(self) -> None:
        """Release everything, engine first."""


Prepare = Callable[[SlotOptions, int, DeviceContext, Opening], PreparedModel]
"""Fills or adopts the arena behind a memfd and builds what a wake needs. Raises what its parts raise; then nothing is
left."""


@dataclass(slots=True)
class WorkerResources:
    """What all slots of this process share."""

    loop: asyncio.AbstractEventLoop
    on_fatal: OnFatal
    prepare: Prepare
    copy_rate: CopyRate = field(default_factory=CopyRate)
    templates: SandboxPool = field(default_factory=lambda: SandboxPool(TEMPLATES))
    trials: SchemaTrials = field(default_factory=lambda: SchemaTrials(SandboxPool(SCHEMAS)))

    def run(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Run this on the event loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LOOP_TIMEOUT_S)
