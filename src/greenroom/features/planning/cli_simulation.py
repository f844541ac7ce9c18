"""Turns a configuration and the options of `greenroom simulate` into a simulated machine and a workload.

Owns where numbers come from: a model's need is configured or estimated by its engine; the duration of its moves is
estimated from that size, unless an option gives it.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from greenroom.cli.failures import CommandFailed, WrongUsage
from greenroom.config import limits
from greenroom.config.limits import limits_of, ttl_s_of
from greenroom.config.schema import PRIORITY_NAMES, Config, Model
from greenroom.core.model import Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need
from greenroom.engines.registry import engine_for, facts_of, split_keys
from greenroom.runtime.memory.devices import devices
from greenroom.runtime.memory.needs import Needs, Subject
from greenroom.sim.config import ONE_PROCESS, OWN_PROCESSES, SimConfig, SimModel, Timings
from greenroom.sim.results.effect import counted
from greenroom.sim.traces.cells import shown
from greenroom.sim.traces.speeds import AnswerTimes, RecordedSpeed, speeds
from greenroom.sim.traces.traces import Known, trace_of
from greenroom.sim.workloads import ARRIVALS_MAX, SPAN_MAX_S, Agents, Bursty, Mix, Poisson, Recorded, zipf

if TYPE_CHECKING:
    from greenroom.sim.workloads import Workload

# A fixed time to start, then the speed of a good disk (load) or of PCIe (wake).
START_S = 3.0
READ_MIB_PER_S = 1_500.0
WAKE_S = 0.3
COPY_MIB_PER_S = 12_000.0
SPEEDS_SHOWN_MAX = 20
# A larger number of requests is not spelled out.
TOLD_MAX = 1_000_000_000_000
# Of an answer alone on its GPU, where nothing is known.
TOKENS_PER_S = 60.0


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """What all cases share, and sentences that say what was assumed."""

    base: SimConfig
    workload: Workload
    assumed: tuple[str, ...]
    # A guess about the trace that the caller should confirm; empty if there is none.
    doubt: str = ""
    # Callers that do not stream are refused after this; None if all give up by then, as an option says.
    wait_max_s: float | None = None


def prepare(config: Config, args: argparse.Namespace) -> SimulationPlan:
    if not config.models:
        raise CommandFailed("there is no model in the configuration")
    _check_asleep(args.asleep, config)
    there = devices(config)
    gpus = _gpus(there, args)
    needs = Needs(gpus={gpu.id: "simulated" for gpu in gpus})
    needs.usable_mib = {gpu.id: gpu.usable_mib for gpu in gpus}
    models = tuple(_sim_model(name, model, config, args, needs) for name, model in config.models.items())
    if not gpus and (args.gpus or (args.green_room_mib and not all(_is_without_gpu(model.spec) for model in models))):
        raise WrongUsage("the configuration has no gpus: say how large one is with --gpu-mib")
    requests, scheduler = _requests(config, args), args.scheduler or config.scheduler.implementation
    recorded = _recorded_speeds(config, args, models, requests.answers)
    base = SimConfig(
        tuple(_with_speed(model, recorded) for model in models),
        there,
        limits_of(config),
        jitter=args.jitter,
        patience_s=config.server.stream_wait_max_s if args.patience_s is None else args.patience_s,
        loads_at_once=args.loads_at_once,
        policies=limits.POLICIES,
        swappers=limits.SWAPPERS_BY_NAME,
        scheduler=limits.SCHEDULERS[scheduler],
        is_own_scheduler=scheduler == config.scheduler.implementation,
    )
    assumed = (requests.source, *decides(scheduler), *_assumed(base, recorded), *_patience(config, args))
    if args.concurrency:
        assumed += ("A higher concurrency takes no more memory here; with most engines it does.",)
    wait_max_s = config.server.wait_max_s if args.patience_s is None else None
    return SimulationPlan(base, requests.workload, assumed, requests.doubt, wait_max_s)


def decides(scheduler: str) -> list[str]:
    return [] if scheduler == "default" else [f"The scheduler is {scheduler}; policies are the default one's."]


def _check_asleep(asleep: Collection[str], config: Config) -> None:
    """Raises WrongUsage for a model that does not exist, or is named twice: by its id and an alias, or two aliases."""
    models = {**{name: name for name in config.models}, **_aliases(config)}
    names: dict[str, str] = {}
    for name in asleep:
        if name not in models:
            near = get_close_matches(name, models, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise WrongUsage(f"--asleep: there is no model {shown(name)} in the configuration{meant}")
        if (other := names.setdefault(models[name], name)) != name:
            raise WrongUsage(f"--asleep: {shown(other)} and {shown(name)} are the same model: name it once")


def _aliases(config: Config) -> dict[str, str]:
    """The model that each alias means."""
    return {alias: name for name, model in config.models.items() for alias in model.aliases}


def sizeless(config: Config, base: SimConfig) -> list[str]:
    """Models of unknown size, which would fit anywhere. Empty if memory is not planned (`fit_memory: false`)."""
    if not config.scheduler.fit_memory:
        return []
    local = (model.spec for model in base.models if not model.spec.is_remote)
    return [spec.id for spec in local if not (spec.need.gpu_mib or spec.need.host_mib)]


def without_gpus(base: SimConfig, args: argparse.Namespace) -> str:
    """What to say if models are played in host memory because no GPU is known; empty otherwise."""
    hosts = [device for device in base.devices if device.kind is DeviceKind.HOST]
    none_needed = all(_is_without_gpu(model.spec) for model in base.models)
    if len(hosts) < len(base.devices) or args.gpu_mib or none_needed:
        return ""
    return (
        f"the configuration names no gpus, so models are played in the host's memory ({hosts[0].capacity_mib:,} MiB): "
        "for GPUs that the gateway finds by itself, say how large they are with --gpu-mib"
    )


def _sim_model(name: str, model: Model, config: Config, args: argparse.Namespace, needs: Needs) -> SimModel:
    engine, facts = engine_for(model), facts_of(model)
    if facts.is_remote:
        return _remote_model(name, model, config, args)
    subject = Subject(ModelId(name), model, engine)
    need, _ = needs.need_of(subject)
    mib, concurrency = need.gpu_mib + need.host_mib, engine.concurrency(model)
    timings = Timings(
        load_s=START_S + mib / READ_MIB_PER_S if args.load_s is None else args.load_s,
        wake_s=WAKE_S + mib / COPY_MIB_PER_S if args.wake_s is None else args.wake_s,
        sleep_s=args.sleep_s,
        unload_s=args.unload_s,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        tokens_per_s=TOKENS_PER_S if args.tokens_per_s is None else args.tokens_per_s,
        concurrency=concurrency,
        speed=None if args.constant_speed else ONE_PROCESS if engine.hosted else OWN_PROCESSES,
    )
    estimated = needs.asleep_of(subject) if facts.can_sleep else None
    # Without `fit_memory` models take no memory, but loading them takes as long as ever.
    fits = config.scheduler.fit_memory
    spec = ModelSpec(
        ModelId(name),
        need=need if fits else Need(),
        need_asleep=_asleep(_said_asleep(name, model, args) or estimated, fits),
        devices=tuple(DeviceId(device) for device in model.devices),
        **split_keys(facts),
        sizes_itself=facts.sizes_itself,
        concurrency=concurrency,
        priority=_priority(model),
        ttl_s=ttl_s_of(model, config.stay_warm),
        pinned=model.pinned,
        preload=model.preload,
    )
    return SimModel(spec, timings)


def _said_asleep(name: str, model: Model, args: argparse.Namespace) -> Need | None:
    """By its id or an alias; None if nothing was said of it."""
    return next((args.asleep[known] for known in (name, *model.aliases) if known in args.asleep), None)


def _asleep(need: Need | None, fits: bool) -> Need | None:
    return need if need is None or fits else Need()


def _remote_model(name: str, model: Model, config: Config, args: argparse.Namespace) -> SimModel:
    """It takes no memory and no compute here, and is always ready."""
    concurrency = engine_for(model).concurrency(model)
    timings = Timings(
        load_s=0.0,
        wake_s=0.0,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        tokens_per_s=TOKENS_PER_S if args.tokens_per_s is None else args.tokens_per_s,
        concurrency=concurrency,
    )
    spec = ModelSpec(
        ModelId(name),
        concurrency=concurrency,
        priority=_priority(model),
        ttl_s=ttl_s_of(model, config.stay_warm),
        pinned=True,
        preload=True,
        is_remote=True,
    )
    return SimModel(spec, timings)


def _recorded_speeds(
    config: Config, args: argparse.Namespace, models: Sequence[SimModel], answers: Mapping[str, Sequence[AnswerTimes]]
) -> dict[str, RecordedSpeed]:
    """By model, where the trace is a recording that tells; none if an option says how fast models are."""
    if args.tokens_per_s is not None:
        return {}
    curves = {str(model.spec.id): model.timings.speed for model in models}
    gpus = sum(device.kind is DeviceKind.GPU for device in devices(config))
    return speeds(answers, curves, args.prefill_tokens_per_s, gpus)


def _with_speed(model: SimModel, recorded: Mapping[str, RecordedSpeed]) -> SimModel:
    found = recorded.get(model.spec.id)
    if found is None:
        return model
    return replace(model, timings=replace(model.timings, tokens_per_s=found.tokens_per_s, speed=found.curve))


def _priority(model: Model) -> int:
    return model.priority if isinstance(model.priority, int) else PRIORITY_NAMES[model.priority]


def _gpus(there: Sequence[Device], args: argparse.Namespace) -> list[Device]:
    """The GPUs that models are sized for; one of those to be tried on a machine without."""
    gpus = [device for device in there if device.kind is DeviceKind.GPU]
    if not gpus and args.gpu_mib:
        return [Device(DeviceId("gpu0"), DeviceKind.GPU, args.gpu_mib[0])]
    return gpus


def _is_without_gpu(spec: ModelSpec) -> bool:
    """True if it is known to run elsewhere, or on the host alone."""
    return spec.is_remote or (spec.need.host_mib > 0 and not spec.need.gpu_mib)


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests to play, where they come from, a doubt about that, and what they tell of answers by model."""

    workload: Workload
    source: str
    doubt: str = ""
    answers: Mapping[str, Sequence[AnswerTimes]] = field(default_factory=dict)


def _requests(config: Config, args: argparse.Namespace) -> Requests:
    priorities = {name: _priority(model) for name, model in config.models.items()}
    if args.trace:
        return _traced(Known(list(config.models), _aliases(config), priorities, args.skip_unknown, args.spread), args)
    return Requests(*_drawn(Mix(zipf(list(config.models)), priority_of=priorities), args))


def _traced(known: Known, args: argparse.Namespace) -> Requests:
    trace = trace_of(args.trace, known, args.seed, args.time_unit)
    recorded = Recorded(trace.rows, args.stretch)
    stretched = f", time stretched by {args.stretch:g}" if args.stretch != 1 else ""
    # A span that is not a finite number arrives here as infinity.
    if recorded.seconds > SPAN_MAX_S:
        raise CommandFailed(
            f"{args.trace}: {recorded.seconds:.3g} s from the first request to the last{stretched} are more than "
            f"{SPAN_MAX_S:,.0f} s: look at its times, or give a smaller --stretch"
        )
    source = f"{counted(len(trace.rows), 'request')} over {recorded.seconds:,.0f} s from {args.trace}{stretched}"
    told = "; ".join((source, trace.columns, *trace.remarks)) + "."
    return Requests(recorded, told, trace.doubt, trace.answers)


def _drawn(mix: Mix, args: argparse.Namespace) -> tuple[Workload, str]:
    if args.seconds > SPAN_MAX_S:
        raise WrongUsage(f"--seconds {args.seconds:g} is more than {SPAN_MAX_S:,.0f}")
    span = f"over {args.seconds:,.0f} s, models by popularity in the order of the configuration"
    if args.workload == "agents":
        agents = Agents(mix, args.agents, args.seconds, seed=args.seed)
        _refuse_too_many(agents.expected, "--agents")
        return agents, f"{counted(args.agents, 'agent')}, each alternating between two models, {span}."
    drawn = (Bursty if args.workload == "bursty" else Poisson)(mix, args.rate, args.seconds, args.seed)
    _refuse_too_many(drawn.expected, "--rate")
    return drawn, f"{args.workload.capitalize()} arrivals, {args.rate:g} a second on average, {span}."


def _refuse_too_many(expected: float, option: str) -> None:
    if expected > ARRIVALS_MAX:
        about = f"about {expected:,.0f}" if expected < TOLD_MAX else f"far more than {TOLD_MAX:,}"
        raise WrongUsage(f"{about} requests are more than {ARRIVALS_MAX:,}: give a smaller {option} or --seconds")


def _assumed(base: SimConfig, recorded: Mapping[str, RecordedSpeed]) -> list[str]:
    # Of models that are loaded, if there are some.
    timings = [model.timings for model in base.models if not model.spec.is_remote] or [base.models[0].timings]
    load_s, wake_s = [one.load_s for one in timings], [one.wake_s for one in timings]
    sentences = [
        f"Loads take {_range(load_s, '.1f')} s, wakes {_range(wake_s, '.1f')} s, unloads {timings[0].unload_s:g} s, "
        f"falling asleep {timings[0].sleep_s:g} s, give or take {base.jitter:.0%}.",
        f"Alone on its GPU, a request reads its prompt at {timings[0].prefill_tokens_per_s:,.0f} and answers at "
        f"{_range([one.tokens_per_s for one in timings])} tokens a second, {_most(base)} at a time.",
        *_as_recorded(recorded),
        *_slowed(base, {name for name, one in recorded.items() if one.is_curve_known}),
        f"The configuration's devices: {', '.join(f'{one.id} {one.capacity_mib:,} MiB' for one in base.devices)}.",
    ]
    if base.loads_at_once is not None:
        sentences.append(f"The disk reads {base.loads_at_once} at a time.")
    return sentences


def _patience(config: Config, args: argparse.Namespace) -> list[str]:
    if args.patience_s is not None:
        return [f"Callers give up after {args.patience_s:g} s."]
    server = config.server
    return [
        f"All callers stream, so the gateway refuses them after {server.stream_wait_max_s:,g} s "
        f"(server.stream_wait_max_s); those that do not stream, after {server.wait_max_s:,g} s (server.wait_max_s)."
    ]


def _as_recorded(recorded: Mapping[str, RecordedSpeed]) -> list[str]:
    if not recorded:
        return []
    sentences = [
        f"Tokens a second as recorded: {_listed({name: f'{one.tokens_per_s:,.0f}' for name, one in recorded.items()})}."
    ]
    curves = {name: one.curve for name, one in recorded.items() if one.is_curve_known and one.curve is not None}
    if curves:
        slowed = {name: f"{1 / curve.speed(8, 0):.1f}, {1 / curve.speed(1, 1):.1f}" for name, curve in curves.items()}
        shown = _listed(slowed, "; ")
        sentences.append(
            f"As recorded, 8 at a time and beside another busy model answers take so many times as long: {shown}."
        )
    return sentences


def _listed(words: Mapping[str, str], between: str = ", ") -> str:
    shown = between.join(f"{name} {word}" for name, word in sorted(words.items())[:SPEEDS_SHOWN_MAX])
    more = len(words) - SPEEDS_SHOWN_MAX
    return f"{shown} and {counted(more, 'more model')}" if more > 0 else shown


def _range(values: Sequence[float], form: str = ",.0f") -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _slowed(base: SimConfig, recorded: Collection[str]) -> list[str]:
    """How models slow each other down whose recording does not tell."""
    local = (model for model in base.models if not model.spec.is_remote)
    curves = [model.timings.speed for model in local if model.spec.id not in recorded]
    usual = [curve for curve in curves if curve is not None]
    if not usual:
        return ["Answers do not slow each other down."] if curves else []
    beside = sorted({1 / curve.speed(1, 1) for curve in usual})
    of_which = "Of other models, answers" if recorded else "Answers"
    return [
        f"{of_which} of one model at the same time are slower: {1 - usual[0].speed(8, 0):.0%} with 8 of them, "
        f"{1 - usual[0].speed(32, 0):.0%} with 32. Another busy model on the same GPU makes them take "
        f"{' or '.join(f'{factor:.1f}' for factor in beside)} times as long (measured with 8B models on an H200)."
    ]


def _most(base: SimConfig) -> str:
    counts = sorted({model.timings.concurrency for model in base.models})
    if counts == [1]:
        return "one"
    return "as one of at most " + (f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} (by model)")
