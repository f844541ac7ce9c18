"""The configuration of a simulated world: models and their timings, devices, limits and policy. Owns the numbers of one
run and nothing that changes during it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from greenroom.core.contract import Scheduler, SchedulerFactory
from greenroom.core.effects import Effects
from greenroom.core.events import Learned, Limits
from greenroom.core.model import Device, DeviceId, ModelId, ModelSpec, MoveKind
from greenroom.core.policy import BUILT_IN, SWAPPERS, Swappers
from greenroom.core.policy.base import Policies
from greenroom.core.scheduler import DefaultScheduler


@dataclass(frozen=True, slots=True)
class SpeedCurve:
    """How fast one answer is beside others, as a share of its speed alone on the GPU. `steps` has batch sizes and how
    much longer a token takes in them than alone, in order, from (1, 1.0) on. Each other model that is busy on the same
    GPU makes it longer by `neighbour` times that."""

    steps: tuple[tuple[int, float], ...]
    neighbour: float

    def speed(self, batch: int, busy_neighbours: int) -> float:
        """Linear in time between the steps, and further on as between the last two."""
        steps = self.steps
        # With a batch of one, the second step is asked too, for its line through the first.
        after = min(max(1, bisect_left(steps, (batch, 0.0))), len(steps) - 1)
        (low, low_s), (high, high_s) = steps[after - 1], steps[after]
        token_s = low_s + (high_s - low_s) * (batch - low) / (high - low)
        return 1.0 / (token_s * (1.0 + self.neighbour * busy_neighbours))


# Measured with a model of 8B parameters on an H200: 197, 1,441, 5,193 and 14,115 tokens/s for 1, 8, 32 and 128 callers
# (benchmarks/results/2026-11-16-decode-gpu.txt).
MEASURED_STEPS = ((1, 1.0), (8, 1.096), (32, 1.217), (128, 1.791))
# Two models with 8 callers each, at the same time: 1,356 tokens/s from two processes, 1,763 from one, 1,441 alone.
OWN_PROCESSES = SpeedCurve(MEASURED_STEPS, 1.13)
ONE_PROCESS = SpeedCurve(MEASURED_STEPS, 0.63)


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a model's moves and answers take. The defaults fit a mid-sized model on one recent GPU."""

    load_s: float = 20.0
    wake_s: float = 0.5
    sleep_s: float = 0.5
    unload_s: float = 1.0
    prefill_tokens_per_s: float = 2_000.0
    # Of a request alone on its GPU.
    tokens_per_s: float = 60.0
    concurrency: int = 16
    # How requests slow each other down; None: not at all.
    speed: SpeedCurve | None = None

    def move_s(self, kind: MoveKind) -> float:
        if kind is MoveKind.LOAD or kind is MoveKind.PREPARE:
            return self.load_s
        if kind is MoveKind.WAKE:
            return self.wake_s
        return self.sleep_s if kind is MoveKind.SLEEP else self.unload_s

    def prefill_s(self, prompt_len: int) -> float:
        """Seconds until the first byte of the answer."""
        return prompt_len / self.prefill_tokens_per_s

    def service_s(self, prompt_len: int, output_len: int) -> float:
        return prompt_len / self.prefill_tokens_per_s + output_len / self.tokens_per_s

    def learned(self) -> Learned:
        """What a gateway that has run for a while has learned of this model."""
        return Learned({kind: self.move_s(kind) for kind in MoveKind})


DEFAULT_TIMINGS = Timings()


@dataclass(frozen=True, slots=True)
class SimModel:
    spec: ModelSpec
    timings: Timings = DEFAULT_TIMINGS

    @property
    def told(self) -> ModelSpec:
        """The spec as the scheduler is told it: with the concurrency of its engine, unless the spec names another."""
        return self.spec if self.spec.concurrency else replace(self.spec, concurrency=self.timings.concurrency)


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One world. `jitter` is how much the times of moves vary, as a share of the usual time."""

    models: tuple[SimModel, ...]
    devices: tuple[Device, ...]
    limits: Limits = field(default_factory=Limits)
    policy: str = "default"
    jitter: float = 0.1
    # Callers give up after this long; None: never.
    patience_s: float | None = None
    # Loads that read from disk at the same time, for machines where the disk is the bottleneck; None: all.
    loads_at_once: int | None = None
    # True if the scheduler is given at the start how long moves take, as after a restart.
    knows_times: bool = True
    # Policies and swappers by name, those of other packages included.
    policies: Policies = field(default_factory=lambda: BUILT_IN)
    swappers: Swappers = field(default_factory=lambda: SWAPPERS)
    # Another scheduler; None: the default one, with these policies and swappers.
    scheduler: SchedulerFactory | None = None
    # True if the configuration names this scheduler.
    is_own_scheduler: bool = True

    def scheduler_for(self, effects: Effects) -> Scheduler:
        if self.scheduler is not None:
            return self.scheduler(effects)
        return DefaultScheduler(effects, self.policies, self.swappers)

    def learned(self) -> dict[ModelId, Learned] | None:
        return {model.spec.id: model.timings.learned() for model in self.models} if self.knows_times else None


def absent_gpus(spec: ModelSpec, devices: Iterable[Device]) -> tuple[DeviceId, ...]:
    """The GPUs that `devices` of this model names, if nothing that it names is there; else none."""
    there = {device.id for device in devices}
    return () if there.intersection(spec.devices) else spec.devices
