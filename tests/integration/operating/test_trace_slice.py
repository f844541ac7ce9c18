"""A slice of a trace through the running gateway: real engines, four tiny models, room for two.

What the scheduler was told is written down and told again to a fresh one, which must ask for exactly the same. The
simulation, given the same requests and the times that were measured, must come to about as many swaps, and to about as
long waits for the same causes as the gateway's own metrics.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from greenroom.app import App
from greenroom.core.effects import Effects
from greenroom.core.events import ConfigChanged, Event, MoveDone
from greenroom.core.model import MoveId, MoveKind, Outcome
from greenroom.core.scheduler import DefaultScheduler
from greenroom.runtime.record.recording import Asked, EventRecorder, Recording, WatchedEffects, read
from greenroom.sim.cases import simulate
from greenroom.sim.config import SimConfig, SimModel, Timings
from greenroom.sim.results.stats import Stats
from greenroom.sim.traces.traces import read_trace
from greenroom.sim.workloads import Recorded
from tests.harness import gateway, tiny
from tests.integration.facts import at_rest
from tests.integration.raw import chat, http
from tests.models import tiny as tiny_model

pytestmark = pytest.mark.slow

NAMES = ("alpha", "bravo", "charlie", "delta")
# Each model claims 100 MiB, so that two are in memory at once.
BUDGET_MIB = 250
REQUESTS = 60
SECONDS = 6.0
SLICES = 3
NOISE_S = 0.02
# Of simulated answers: fine enough to give back what was measured.
TICKS_PER_S = 10_000.0


@dataclass(frozen=True)
class Arrival:
    at: float
    model: str
    stream: bool = False
    priority: str = "normal"
    tenant: str = ""


def drawn(seed: int) -> list[Arrival]:
    """Requests at random times; two models are asked for more often than the others, some callers are in a hurry."""
    dice = random.Random(seed)
    times = sorted(dice.uniform(0, SECONDS) for _ in range(REQUESTS))
    return [
        Arrival(
            at,
            dice.choices(NAMES, (4, 3, 2, 1))[0],
            dice.random() < 0.5,
            dice.choice(("high", "normal", "normal", "low")),
            dice.choice(("lab", "office", "")),
        )
        for at in times
    ]


async def play(app: App, arrivals: Sequence[Arrival], **asked: Any) -> None:
    """Send every request at its time and see that its own model answers it."""
    began = app.clock()

    async def send(one: Arrival) -> None:
        await asyncio.sleep(max(0.0, began + one.at - app.clock()))
        headers = {"X-Tenant-ID": one.tenant} if one.tenant else {}
        answer = await chat(app, one.model, headers=headers, stream=one.stream, x_priority=one.priority, **asked)
        assert answer.status == 200, answer.body
        assert answer.text.startswith(f" {one.model} says hello")

    await asyncio.gather(*map(send, arrivals))


class Nothing:
    """Effects that have none."""

    def __getattr__(self, name: str) -> Any:
        return lambda *said: None


def replayed(events: Sequence[Event]) -> list[Asked]:
    """What a fresh scheduler asks for when it is told these events."""
    asked: list[Asked] = []
    recorder = cast(EventRecorder, SimpleNamespace(add=asked.append))
    scheduler = DefaultScheduler(cast(Effects, WatchedEffects(cast(Effects, Nothing()), recorder)))
    for event in events:
        scheduler.handle(event)
    return asked


def swaps_in(recording: Recording) -> int:
    return sum(name == "move" and said[0].kind is MoveKind.LOAD for name, said in recording.effects)


def took_s(recording: Recording, kind: MoveKind, model: str) -> float:
    """How long the model's moves of this kind took on average."""
    moves = [said[0] for name, said in recording.effects if name == "move"]
    started = {move.id: move.started for move in moves if move.kind is kind and move.model == model}
    ended: dict[MoveId, float] = {
        event.move: event.now
        for event in recording.events
        if isinstance(event, MoveDone) and event.outcome is Outcome.DONE
    }
    return fmean(ended[move] - at for move, at in started.items() if move in ended)


def timings_of(recording: Recording, model: str) -> Timings:
    return Timings(
        load_s=took_s(recording, MoveKind.LOAD, model),
        unload_s=took_s(recording, MoveKind.UNLOAD, model),
        prefill_tokens_per_s=1e9,
        tokens_per_s=TICKS_PER_S,
    )


def simulated(recording: Recording, trace: Path, served_s: Sequence[float]) -> Stats:
    """The same requests in a simulated world with the same models, room and times; `served_s`: of each answer."""
    first = recording.events[0]
    assert isinstance(first, ConfigChanged) and first.devices is not None and first.limits is not None
    # An answer takes as long as it took: on a busy machine equal answers do not take equally long.
    rows = [row._replace(output_len=round(s * TICKS_PER_S)) for row, s in zip(read_trace(trace), served_s, strict=True)]
    specs = next(event.models for event in recording.events if isinstance(event, ConfigChanged) and event.models)
    models = tuple(SimModel(spec, timings_of(recording, spec.id)) for spec in specs)
    config = SimConfig(models, first.devices, first.limits, first.limits.policy, knows_times=False)
    return simulate(config, Recorded(rows))


def served_s(app: App) -> list[float]:
    """How long each answer took once it was begun, in the order of their arrival."""
    records = sorted(app.activity.recent(2 * REQUESTS), key=lambda record: record.arrived_at)
    return [(record.total_s or 0.0) - (record.wait_s or 0.0) for record in records]


async def slice_through(
    folder: Path, arrivals: Sequence[Arrival], asked: dict[str, Any], **keys: Any
) -> tuple[Recording, Path, list[float], str]:
    """Play one slice. What was recorded of it, how long each answer took once it was begun, and the metrics."""
    folder.mkdir()
    files = {"record_events": str(folder / "events"), "record_activity": str(folder / "activity.csv")}
    models = {name: tiny(tiny_model(name), **keys) for name in NAMES}
    async with gateway(folder, models, budget_mib=BUDGET_MIB, server=files) as app:
        await play(app, arrivals, **asked)
        await at_rest(app)
        served, metrics = served_s(app), (await http(app, "GET", "/metrics")).body.decode()
    return read(folder / "events"), folder / "activity.csv", served, metrics


async def test_slice_is_replayed_exactly_and_simulated_closely(tmp_path: Path) -> None:
    ratios = []
    for seed in range(SLICES):
        told = await slice_through(tmp_path / str(seed), drawn(seed), {"max_tokens": 20})
        recording, trace, served, _ = told
        assert recording.incomplete is None
        effects = replayed(recording.events)
        assert effects == recording.effects
        assert sum(name == "grant" for name, _ in effects) == REQUESTS
        assert len(read_trace(trace)) == REQUESTS
        swaps = swaps_in(recording)
        assert swaps >= len(NAMES), "the slice made models take each other's place"
        ratios.append(simulated(recording, trace, served).swaps / swaps)
    assert 0.8 <= median(ratios) <= 1.2, ratios


# --- waits by cause -------------------------------------------------------------------------------------------------

# One answer at a time, long enough that requests wait for each other as long as for loads.
LONG_TOKENS = 300
LONG_SECONDS = 12.0
CAUSES = ("not_there", "full")


async def long_slice(folder: Path, seed: int) -> tuple[dict[str, float], Stats]:
    """Play requests for long answers. Their waits by cause, as the gateway measured them; and the same, simulated."""
    dice = random.Random(seed)
    arrivals = [Arrival(dice.uniform(0, LONG_SECONDS), dice.choices(NAMES, (4, 3, 2, 1))[0]) for _ in range(REQUESTS)]
    asked = {"max_tokens": LONG_TOKENS, "ignore_eos": True}
    *recorded, metrics = await slice_through(folder, arrivals, asked, concurrency=1, ctx_size=2_048)
    return waits_by_cause(metrics), simulated(*recorded)


def waits_by_cause(metrics: str) -> dict[str, float]:
    """Seconds over all models."""
    sums = dict.fromkeys(CAUSES, 0.0)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "greenroom_queue_wait_cause_seconds_sum":
                sums[sample.labels["cause"]] += sample.value
    return sums


async def test_waits_are_simulated_closely_cause_by_cause(tmp_path: Path) -> None:
    slices = [await long_slice(tmp_path / str(seed), seed) for seed in range(SLICES)]
    real = {cause: sum(sums[cause] for sums, _ in slices) for cause in CAUSES}
    told = {cause: sum(getattr(stats.all_delays, f"{cause}_s") for _, stats in slices) for cause in CAUSES}
    requests = REQUESTS * SLICES
    assert max(real.values()) > 0.1 * requests and min(real.values()) > 0, "requests wait, for both causes"
    # Within a fifth; where a fast machine hardly lets them wait, within what timers and processes take.
    allowed = {cause: max(0.2 * real[cause], NOISE_S * requests) for cause in CAUSES}
    assert all(abs(told[cause] - real[cause]) <= allowed[cause] for cause in CAUSES), (told, real)
