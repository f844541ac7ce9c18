"""Simulated machines: GPUs, the models that share them, and the green room for those asleep.

Owns sizes and the times of moves. A machine is plain data, so that a variant with more of something is one `replace`.
"""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.events import Limits
from greenroom.core.model import Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need
from greenroom.sim.config import SimModel, SpeedCurve, Timings

GIB = 1_024
# A load starts an engine and reads weights from disk; a wake copies them from host memory.
START_S, DISK_MIB_PER_S = 3.0, 1_500.0
WAKE_S, HOST_MIB_PER_S = 0.3, 20_000.0
UNLOAD_S = 0.5
# One slot's worth of memory on a machine of equal slots; equal models take exactly one.
SLOT_MIB = 1_000
# Sizes of unequal models on such a machine, in turn.
MIXED_MIB = (500, 1_000, 1_500, 2_000)
SLOT_CONCURRENCY = 16


def model_names(count: int) -> tuple[str, ...]:
    return tuple(f"m{number}" for number in range(count))


def gib(*sizes: int) -> tuple[int, ...]:
    return tuple(size * GIB for size in sizes)


@dataclass(frozen=True, slots=True)
class Machine:
    """Models are named m0, m1, … in the order of their sizes here."""

    gpus: int
    gpu_mib: int
    models_mib: tuple[int, ...]
    green_room_mib: int = 0
    concurrency: int = SLOT_CONCURRENCY
    start_s: float = START_S
    mib_per_s: float = DISK_MIB_PER_S
    unload_s: float = UNLOAD_S
    # How models that are busy on the same GPU slow each other down; None: not at all.
    compute: SpeedCurve | None = None

    def __str__(self) -> str:
        small, large = min(self.models_mib), max(self.models_mib)
        green = f"{self.green_room_mib / GIB:g}" if self.green_room_mib else "no"
        sizes = f"{len(self.models_mib)} models of {small / GIB:.3g}-{large / GIB:.3g}"
        shared = ", compute shared" if self.compute else ""
        at_once = f"{self.concurrency} at once"
        return f"{self.gpus} x {self.gpu_mib / GIB:.3g} GiB, {sizes}, {green} green room, {at_once}{shared}"

    @property
    def swap_s(self) -> float:
        """The longest load of a model."""
        return self.load_s(max(self.models_mib))

    def load_s(self, mib: int) -> float:
        return self.start_s + mib / self.mib_per_s

    @property
    def ready_at_once(self) -> int:
        """About how many models fit on the GPUs together."""
        mean_mib = sum(self.models_mib) / len(self.models_mib)
        return min(len(self.models_mib), self.gpus * max(1, int(self.gpu_mib // mean_mib)))

    @property
    def answers_at_once(self) -> float:
        """About how many answers it gives at the speed of one alone. Models that share a GPU give as many as one."""
        if self.compute is None:
            return self.ready_at_once * self.concurrency
        return self.gpus * self.concurrency * self.compute.speed(self.concurrency, 0)

    def sim_models(self) -> tuple[SimModel, ...]:
        names = model_names(len(self.models_mib))
        return tuple(self._sim_model(name, mib) for name, mib in zip(names, self.models_mib, strict=True))

    def _sim_model(self, name: str, mib: int) -> SimModel:
        move_s = WAKE_S + mib / HOST_MIB_PER_S
        timings = Timings(
            self.load_s(mib), move_s, move_s, self.unload_s, concurrency=self.concurrency, speed=self.compute
        )
        asleep = Need(0, mib) if self.green_room_mib else None
        return SimModel(ModelSpec(ModelId(name), need=Need(mib), need_asleep=asleep), timings)

    def devices(self) -> tuple[Device, ...]:
        gpus = tuple(Device(DeviceId(f"gpu{n}"), DeviceKind.GPU, self.gpu_mib) for n in range(self.gpus))
        host = Device(DeviceId("host"), DeviceKind.HOST, self.green_room_mib)
        return (*gpus, host) if self.green_room_mib else gpus

    def limits(self) -> Limits:
        """The scheduler's defaults. Queues may be long: what is measured is waiting."""
        return Limits(queue_depth_max=10**6, green_room_mib=self.green_room_mib or None)


def slots(count: int, swap_s: float, models: int, sizes: str = "equal") -> Machine:
    """One GPU with room for `count` models of equal size. Of `mixed` sizes, a larger one takes longer to load."""
    # The largest model must fit where there is a single slot, too.
    scale = 2 if count == 1 else 1
    mixed = tuple(MIXED_MIB[number % len(MIXED_MIB)] // scale for number in range(models))
    models_mib = (SLOT_MIB,) * models if sizes == "equal" else mixed
    return Machine(1, count * SLOT_MIB, models_mib, start_s=0.0, mib_per_s=SLOT_MIB / swap_s, unload_s=0.0)
