"""The cases that `greenroom simulate` compares, how to run them, and what the comparison says.

A case is a policy, a number of GPUs and a green room. Needs and timings of models are given. `advice` puts the figures
into words: would another GPU or a larger green room help, and which policy is better. Every sentence names its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from greenroom.core.model import Device, DeviceId, DeviceKind, Need
from greenroom.sim.config import SimConfig, SimModel
from greenroom.sim.hooks import Watcher
from greenroom.sim.stats import Stats, stats_of
from greenroom.sim.workloads import Workload
from greenroom.sim.world import World

CASES_MAX = 100
GPUS_MAX = 64


@dataclass(frozen=True, slots=True)
class Case:
    """None: as the configuration has it."""

    policy: str
    gpus: int | None = None
    green_room_mib: int | None = None

    @property
    def label(self) -> str:
        parts = [self.policy]
        if self.gpus is not None:
            parts.append(f"{self.gpus} GPU" if self.gpus == 1 else f"{self.gpus} GPUs")
        if self.green_room_mib is not None:
            parts.append(f"green room {self.green_room_mib:,} MiB" if self.green_room_mib else "no green room")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Result:
    case: Case
    stats: Stats


def cases(
    policies: Sequence[str], gpus: Sequence[int | None], green_rooms_mib: Sequence[int | None]
) -> tuple[Case, ...]:
    return tuple(
        Case(policy, count, green_room_mib)
        for policy in policies
        for green_room_mib in green_rooms_mib
        for count in gpus
    )


def config_for(case: Case, base: SimConfig) -> SimConfig:
    """The base configuration with the case's policy, GPUs and green room."""
    devices = base.devices if case.gpus is None else _with_gpus(base.devices, case.gpus)
    if case.green_room_mib is None:
        return replace(base, policy=case.policy, devices=devices)
    models = tuple(_with_sleep(model, case.green_room_mib) for model in base.models)
    limits = replace(base.limits, green_room_mib=case.green_room_mib)
    devices = _with_host(devices, models, case.green_room_mib)
    return replace(base, policy=case.policy, models=models, devices=devices, limits=limits)


def _with_gpus(devices: Sequence[Device], count: int) -> tuple[Device, ...]:
    """The first `count` GPUs; further ones are like the last."""
    gpus = [device for device in devices if device.kind is DeviceKind.GPU]
    like = [gpus[min(number, len(gpus) - 1)] for number in range(count)]
    named = [replace(gpu, id=DeviceId(f"gpu{number}")) for number, gpu in enumerate(like)]
    return (*named, *(device for device in devices if device.kind is not DeviceKind.GPU))


def _with_sleep(model: SimModel, green_room_mib: int) -> SimModel:
    """Asleep, a model keeps all its memory on the host."""
    need = model.spec.need
    asleep = Need(0, need.gpu_mib + need.host_mib) if green_room_mib else None
    return replace(model, spec=replace(model.spec, need_asleep=asleep))


def _with_host(devices: Sequence[Device], models: Sequence[SimModel], green_room_mib: int) -> tuple[Device, ...]:
    """Host memory for the green room and for what ready models need there."""
    gpus = tuple(device for device in devices if device.kind is DeviceKind.GPU)
    beside_mib = sum(model.spec.need.host_mib for model in models)
    return (*gpus, Device(DeviceId("host"), DeviceKind.HOST, green_room_mib + beside_mib))


def run_all(
    compared: Sequence[Case],
    base: SimConfig,
    workload: Workload,
    seed: int,
    on_progress: Callable[[Case, float], None],
) -> list[Result]:
    """Run every case with the same callers. `on_progress` gets the case and the share of its time that has passed."""
    return [Result(case, _run(case, base, workload, seed, on_progress)) for case in compared]


def _run(
    case: Case, base: SimConfig, workload: Workload, seed: int, on_progress: Callable[[Case, float], None]
) -> Stats:
    return simulate(config_for(case, base), workload, seed, on_progress=lambda share: on_progress(case, share))


# How often progress is reported.
PROGRESS_STEPS = 50


def simulate(
    config: SimConfig,
    workload: Workload,
    seed: int = 0,
    watchers: Sequence[Watcher] = (),
    on_progress: Callable[[float], None] | None = None,
) -> Stats:
    """Run until everything has drained. `on_progress` gets the share of the arrivals' time that has passed."""
    world = World(config, seed, watchers=watchers)
    workload.begin(world)
    if on_progress is not None:
        for step in range(1, PROGRESS_STEPS + 1):
            world.run(until=workload.seconds * step / PROGRESS_STEPS)
            on_progress(step / PROGRESS_STEPS)
    world.run()
    return stats_of(world)


# Waits below this are not noticed; differences below this share do not count.
FELT_S = 0.1
SHARE = 0.1

NEXT_GPU = {2: "a second", 3: "a third", 4: "a fourth", 5: "a fifth", 6: "a sixth", 7: "a seventh", 8: "an eighth"}


def advice(results: Sequence[Result]) -> list[str]:
    """What matters for planning hardware, most important first."""
    known = {result.case: result for result in results}
    # Hardware is compared under the first policy only; policies are compared on every machine.
    first = [result for result in results if result.case.policy == results[0].case.policy]
    sentences = [*_gpus(first, known), *_green_rooms(first, known), *_policies(results, known)]
    return sentences or [_alone(result) for result in results]


def _gpus(results: Sequence[Result], known: dict[Case, Result]) -> Iterable[str]:
    counts = sorted({result.case.gpus for result in results if result.case.gpus is not None})
    for fewer, more in pairwise(counts):
        for case in _cases(results, gpus=more):
            is_next = more == fewer + 1 and more in NEXT_GPU
            what = f"{NEXT_GPU[more]} GPU" if is_next else f"{more} GPUs instead of {fewer}"
            yield _compared(what, known[replace(case, gpus=fewer)], known[case], _beside(case, results, "gpus"))


def _green_rooms(results: Sequence[Result], known: dict[Case, Result]) -> Iterable[str]:
    sizes = sorted({result.case.green_room_mib for result in results if result.case.green_room_mib is not None})
    for smaller, larger in pairwise(sizes):
        for case in _cases(results, green_room_mib=larger):
            before = f"{smaller:,} MiB" if smaller else "none"
            what = f"a green room of {larger:,} MiB instead of {before}"
            old = known[replace(case, green_room_mib=smaller)]
            yield _compared(what, old, known[case], _beside(case, results, "green_room_mib"))


def _policies(results: Sequence[Result], known: dict[Case, Result]) -> Iterable[str]:
    names = list(dict.fromkeys(result.case.policy for result in results))
    for other in names[1:]:
        for case in _cases(results, policy=names[0]):
            what = f"the policy {names[0]} instead of {other}"
            old = known[replace(case, policy=other)]
            yield _compared(what, old, known[case], _beside(case, results, "policy"))


def _cases(results: Sequence[Result], **fixed: object) -> list[Case]:
    return [
        result.case for result in results if all(getattr(result.case, name) == value for name, value in fixed.items())
    ]


def _beside(case: Case, results: Sequence[Result], without: str) -> str:
    """The case that a sentence is about, in parentheses; empty if there is only one."""
    parts = []
    if without != "gpus" and case.gpus is not None and len({result.case.gpus for result in results}) > 1:
        parts.append(f"{case.gpus} GPU{'s' if case.gpus > 1 else ''}")
    if without != "green_room_mib" and len({result.case.green_room_mib for result in results}) > 1:
        parts.append(f"green room {case.green_room_mib:,} MiB" if case.green_room_mib else "no green room")
    return f" ({', '.join(parts)})" if parts else ""


def _compared(what: str, old: Result, new: Result, beside: str) -> str:
    before, after = old.stats.waits, new.stats.waits
    waits = f"the p95 wait from {seconds(before.p95_s)} to {seconds(after.p95_s)}"
    mean = f"the mean from {seconds(before.mean_s)} to {seconds(after.mean_s)}"
    swaps = f"swaps from {old.stats.swaps:,} to {new.stats.swaps:,}"
    sentence = f"{what[0].upper()}{what[1:]} would take {waits}, {mean}, {swaps}{beside}: {_verdict(old, new)}"
    refused, still = sum(old.stats.rejected.values()), sum(new.stats.rejected.values())
    return sentence + (f"; refused requests from {refused:,} to {still:,}." if refused or still else ".")


def _verdict(old: Result, new: Result) -> str:
    before, after = old.stats.waits.p95_s, new.stats.waits.p95_s
    if max(before, after) < FELT_S:
        return "no request waits either way"
    if abs(before - after) <= max(SHARE * before, FELT_S):
        return "hardly a difference"
    if after > before:
        return "worse"
    return "it helps a lot" if after < before / 2 else "it helps"


def _alone(result: Result) -> str:
    stats = result.stats
    return (
        f"{stats.served:,} of {stats.requests:,} requests were served; half of them waited at most "
        f"{seconds(stats.waits.p50_s)}, 95 of 100 at most {seconds(stats.waits.p95_s)}, with {stats.swaps:,} swaps."
    )


def seconds(value: float) -> str:
    """`0.4 s`, `12 s`, `3.5 min`, `2.1 h`."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.1f} min" if value < 7_200 else f"{value / 3_600:.1f} h"
