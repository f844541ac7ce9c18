"""The cases that `greenroom simulate` compares, and how to run them. `verdict.py` says what the comparison shows.

A case is a policy, a number of GPUs of some size, a green room and a concurrency. Needs and timings of models are
given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from greenroom.core.model import Device, DeviceId, DeviceKind, ModelSpec, Need
from greenroom.sim.config import SimConfig, SimModel, absent_gpus
from greenroom.sim.hooks import Watcher
from greenroom.sim.results.stats import Stats, stats_of
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
    gpu_mib: int | None = None
    concurrency: int | None = None

    @property
    def label(self) -> str:
        parts = [self.policy]
        if self.gpus is not None or self.gpu_mib is not None:
            count = "" if self.gpus is None else f"{self.gpus} "
            size = "" if self.gpu_mib is None else f" of {self.gpu_mib:,} MiB"
            parts.append(f"{count}GPU{'' if self.gpus == 1 else 's'}{size}")
        if self.green_room_mib is not None:
            parts.append(f"green room {self.green_room_mib:,} MiB" if self.green_room_mib else "no green room")
        if self.concurrency is not None:
            parts.append(f"concurrency {self.concurrency}")
        return ", ".join(parts)


def short_labels(compared: Iterable[Case]) -> dict[Case, str]:
    """Labels without what all of these cases have in common."""
    known = list(compared)
    same = {field.name: getattr(known[0], field.name) for field in fields(Case)}
    for case in known:
        same = {name: value for name, value in same.items() if getattr(case, name) == value}
    # A number of GPUs and their size are said together.
    if not {"gpus", "gpu_mib"} <= same.keys():
        same.pop("gpus", None)
        same.pop("gpu_mib", None)
    has_one_policy = same.pop("policy", None) is not None
    nothing: dict[str, Any] = dict.fromkeys(same)
    bare = {case: replace(case, **nothing) for case in known}
    return {
        case: one.label.removeprefix(f"{one.policy}, ") if has_one_policy else one.label for case, one in bare.items()
    }


@dataclass(frozen=True, slots=True)
class Prospects:
    """What more of something would be used for, as far as the models and GPUs of a case tell."""

    more_gpus: bool = True  # some model may use a further GPU
    spreading: bool = True  # and it does not have one to itself yet
    other_gpus: bool = False  # `devices` keeps some model from GPUs that are there
    green_room: bool = True  # not all models have room in it
    preloading: bool = True  # some model is not preloaded yet, and all of them fit at the same time
    # What models name that can use none of the GPUs that are there; nothing would help these.
    absent_gpus: Mapping[str, tuple[DeviceId, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CaseResult:
    case: Case
    stats: Stats
    # False if the configuration has other GPUs, another green room, concurrency or policy.
    is_as_configured: bool = True
    prospects: Prospects = Prospects()


# One option of a case: its values, the first of which is what the others are compared with. None: as configured.
Values = Sequence[int | None]


def cases(
    policies: Sequence[str],
    gpus: Values,
    green_rooms_mib: Values,
    gpu_mibs: Values = (None,),
    concurrencies: Values = (None,),
) -> tuple[Case, ...]:
    """All combinations; the first has the first value of each."""
    return tuple(
        Case(policy, count, green_room_mib, gpu_mib, concurrency)
        for policy in policies
        for concurrency in concurrencies
        for green_room_mib in green_rooms_mib
        for gpu_mib in gpu_mibs
        for count in gpus
    )


def config_for(case: Case, base: SimConfig) -> SimConfig:
    """The base configuration with the case's policy, GPUs, green room and concurrency."""
    models, devices = base.models, base.devices
    if case.gpu_mib is not None:
        devices = _of_size(devices, case.gpu_mib)
    if case.gpus is not None:
        devices = _with_gpus(devices, case.gpus)
    if case.concurrency is not None:
        models = tuple(_with_concurrency(model, case.concurrency) for model in models)
    if case.green_room_mib is None:
        return replace(base, policy=case.policy, models=models, devices=devices)
    models = tuple(_with_sleep(model, case.green_room_mib) for model in models)
    limits = replace(base.limits, green_room_mib=case.green_room_mib)
    devices = _with_host(devices, models, case.green_room_mib)
    return replace(base, policy=case.policy, models=models, devices=devices, limits=limits)


def is_as_configured(case: Case, base: SimConfig) -> bool:
    """True if this case, though it may name values, is the machine of the base configuration."""
    tried = config_for(case, base)
    sleeps = any(model.spec.need_asleep is not None for model in base.models)
    return (
        base.is_own_scheduler
        and case.policy == base.limits.policy
        and [model.told for model in tried.models] == [model.told for model in base.models]
        and _gpu_sizes(tried) == _gpu_sizes(base)
        and not (sleeps and tried.limits.green_room_mib != base.limits.green_room_mib)
    )


def prospects(config: SimConfig) -> Prospects:
    gpus = [device for device in config.devices if device.kind is DeviceKind.GPU]
    needing = (model.spec for model in config.models if model.spec.need.gpu_mib)
    absent = {str(spec.id): named for spec in needing if (named := absent_gpus(spec, config.devices))}
    local = [model.spec for model in config.models if not model.spec.is_remote and model.spec.id not in absent]
    on_gpu = [spec for spec in local if spec.need.gpu_mib]
    largest_mib = max((spec.need.gpu_mib for spec in on_gpu), default=0)
    more_gpus = any(not spec.devices for spec in on_gpu)
    # Any model fits on any of these.
    roomy = [gpu for gpu in gpus if gpu.usable_mib >= largest_mib]
    other_gpus = any(spec.devices and not {gpu.id for gpu in gpus} <= {*spec.devices} for spec in on_gpu)
    spreading = more_gpus and len(on_gpu) > len(roomy)
    preloading = _all_fit(local, config) and not all(spec.preload or spec.pinned for spec in local)
    return Prospects(more_gpus, spreading, other_gpus, _lacks_places(local, config), preloading, absent)


def _all_fit(specs: Sequence[ModelSpec], config: SimConfig) -> bool:
    """True if all models could be ready at the same time, as if memory could be shared out at will."""
    usable_mib = {kind: sum(one.usable_mib for one in config.devices if one.kind is kind) for kind in DeviceKind}
    on_gpu_mib, on_host_mib = sum(spec.need.gpu_mib for spec in specs), sum(spec.need.host_mib for spec in specs)
    if not usable_mib[DeviceKind.GPU]:
        return on_gpu_mib + on_host_mib <= usable_mib[DeviceKind.HOST]
    return on_gpu_mib <= usable_mib[DeviceKind.GPU] and on_host_mib <= usable_mib[DeviceKind.HOST]


def _lacks_places(specs: Sequence[ModelSpec], config: SimConfig) -> bool:
    """True if not all models could sleep at the same time."""
    host_mib = sum(device.capacity_mib for device in config.devices if device.kind is DeviceKind.HOST)
    limit_mib = host_mib if config.limits.green_room_mib is None else config.limits.green_room_mib
    asleep = [spec.need_asleep for spec in specs]
    return None in asleep or sum(need.host_mib for need in asleep if need is not None) > limit_mib


def _gpu_sizes(config: SimConfig) -> list[tuple[int, int]]:
    gpus = (device for device in config.devices if device.kind is DeviceKind.GPU)
    return [(gpu.capacity_mib, gpu.margin_mib) for gpu in gpus]


def _of_size(devices: Sequence[Device], gpu_mib: int) -> tuple[Device, ...]:
    """All GPUs of this size, and one where there is none."""
    gpus = [replace(device, capacity_mib=gpu_mib) for device in devices if device.kind is DeviceKind.GPU]
    others = (device for device in devices if device.kind is not DeviceKind.GPU)
    return (*(gpus or [Device(DeviceId("gpu0"), DeviceKind.GPU, gpu_mib)]), *others)


def _with_concurrency(model: SimModel, concurrency: int) -> SimModel:
    spec, timings = replace(model.spec, concurrency=concurrency), replace(model.timings, concurrency=concurrency)
    return replace(model, spec=spec, timings=timings)


def _with_gpus(devices: Sequence[Device], count: int) -> tuple[Device, ...]:
    """The first `count` GPUs; further ones are like the last."""
    gpus = [device for device in devices if device.kind is DeviceKind.GPU]
    like = [gpus[min(number, len(gpus) - 1)] for number in range(count)]
    named = [replace(gpu, id=DeviceId(f"gpu{number}")) for number, gpu in enumerate(like)]
    return (*named, *(device for device in devices if device.kind is not DeviceKind.GPU))


def _with_sleep(model: SimModel, green_room_mib: int) -> SimModel:
    """Asleep, a model keeps all its memory on the host."""
    if model.spec.is_remote:
        return model
    need = model.spec.need
    asleep = Need(0, need.gpu_mib + need.host_mib) if green_room_mib else None
    return replace(model, spec=replace(model.spec, need_asleep=asleep))


def _with_host(devices: Sequence[Device], models: Sequence[SimModel], green_room_mib: int) -> tuple[Device, ...]:
    """Host memory for the green room and for what ready models need there."""
    gpus = tuple(device for device in devices if device.kind is DeviceKind.GPU)
    beside_mib = sum(model.spec.need.host_mib for model in models)
    return (*gpus, Device(DeviceId("host"), DeviceKind.HOST, green_room_mib + beside_mib))


# How often progress is reported.
PROGRESS_STEPS = 50
# Gets the share of the arrivals' time that has passed.
OnProgress = Callable[[float], None]


def play(
    case: Case, base: SimConfig, workload: Workload, seed: int = 0, on_progress: OnProgress | None = None
) -> CaseResult:
    """The same workload and seed bring the same callers to every case."""
    config = config_for(case, base)
    stats = simulate(config, workload, seed, on_progress=on_progress)
    return CaseResult(case, stats, is_as_configured(case, base), prospects(config))


def simulate(
    config: SimConfig,
    workload: Workload,
    seed: int = 0,
    watchers: Sequence[Watcher] = (),
    on_progress: OnProgress | None = None,
) -> Stats:
    """Run until everything has drained."""
    world = World(config, seed, watchers=watchers)
    workload.begin(world)
    if on_progress is not None:
        for step in range(1, PROGRESS_STEPS + 1):
            world.run(until=workload.seconds * step / PROGRESS_STEPS)
            on_progress(step / PROGRESS_STEPS)
    world.run()
    return stats_of(world)
