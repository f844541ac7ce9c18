"""Small worlds for the simulator's tests."""

from __future__ import annotations

from typing import Any

from greenroom.core.events import Event, Limits
from greenroom.core.model import Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need
from greenroom.sim.config import SimConfig, SimModel, Timings
from greenroom.sim.hooks import Watcher

GPU = DeviceId("gpu0")
HOST = DeviceId("host")
# Round numbers: 100 tokens of answer take a second, prompts take none to speak of.
MANNERS = Timings(load_s=5.0, wake_s=0.5, sleep_s=0.25, unload_s=1.0, prefill_tokens_per_s=1e9, tokens_per_s=100.0)


def gpu(mib: int, number: int = 0) -> Device:
    return Device(DeviceId(f"gpu{number}"), DeviceKind.GPU, mib)


def host(mib: int) -> Device:
    return Device(HOST, DeviceKind.HOST, mib)


def sim_model(name: str, mib: int = 1_000, *, timings: Timings = MANNERS, **more: Any) -> SimModel:
    return SimModel(ModelSpec(ModelId(name), need=Need(mib), **more), timings)


def sleeper(name: str, mib: int = 1_000, **more: Any) -> SimModel:
    return sim_model(name, mib, need_asleep=Need(0, mib), **more)


def setting(*models: SimModel, mib: int = 1_000, **more: Any) -> SimConfig:
    """One GPU that holds one model, the simplest policy, and no chance."""
    said: dict[str, Any] = {"devices": (gpu(mib),), "jitter": 0.0, "limits": Limits(), "policy": "fifo", **more}
    return SimConfig(models, **said)


def names(count: int) -> list[str]:
    return [f"m{number}" for number in range(count)]


class Transcript(Watcher):
    """Keeps events and effects, each effect with the number of the event that caused it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.effects: list[tuple[int, str, tuple[object, ...]]] = []

    def told(self, event: Event) -> None:
        self.events.append(event)

    def asked(self, effect: str, *details: object) -> None:
        self.effects.append((len(self.events), effect, details))
