"""`/api/v1/history`, the last hour in figures, and `/api/v1/timeline`, which model was where during it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Final

from fastapi import Query

from greenroom.access.keys import Permission
from greenroom.api.declared import Routes, get
from greenroom.api.overview import Overview
from greenroom.api.reports.memory import gpu_used_mib, green_room_used_mib
from greenroom.api.views import View
from greenroom.core.model import Tier
from greenroom.runtime.shell import Shell
from greenroom.telemetry.history import History, Sample

HISTORY_PATH: Final = "/api/v1/history"
TIMELINE_PATH: Final = "/api/v1/timeline"
SPAN_MAX_S: Final = 3600
# More than any gateway keeps.
_AT_MAX: Final = 1e12

Rates = list[float | None]


class HistoryView(View):
    """Each list has one value for each time in `at`; rates are of the time since the sample before."""

    every_s: float
    at: list[float]
    """Unix times, the oldest first."""
    requests_per_s: Rates
    errors_per_s: Rates
    """Answered with 5xx."""
    refused_per_s: Rates
    """Answered with 4xx."""
    prompt_tokens_per_s: Rates
    completion_tokens_per_s: Rates
    cached_tokens_per_s: Rates
    mean_wait_s: Rates
    """Of requests that ended meanwhile, from arrival to a slot; null if none did."""
    mean_total_s: Rates
    """The same from arrival to the last byte."""
    hit_share: Rates
    """Of requests that ended meanwhile, those that found their model ready, as far as both fell into the same time."""
    swaps_per_min: Rates
    """Loads and wakes."""
    mean_swap_s: Rates
    queue: list[int]
    in_flight: list[int]
    connections: list[int]
    ready: list[int]
    """Models that are ready."""
    asleep: list[int]
    green_room_mib: list[float]
    used_mib: dict[str, list[float | None]]
    """By device."""
    utilisation: dict[str, list[float | None]]
    """By GPU, in percent, where it can be seen."""


class SpanView(View):
    slot: str
    model: str
    phase: str
    """The move that was under way (load, wake, prepare, sleep, unload), or the tier in between (ready, asleep)."""
    devices: dict[str, int]
    """MiB by device."""
    began: float
    """Unix time."""
    ended: float | None
    """Null if it goes on."""
    outcome: str | None
    """How a move ended; `lost` if its engine ended by itself."""
    decision: dict[str, Any] | None
    """Why, as in `/api/v1/decisions`; null for tiers."""


class TimelineView(View):
    now: float
    since: float
    devices: list[str]
    """GPUs, then the host."""
    spans: list[SpanView]


class HistoryRoutes(Routes):
    def __init__(self, shell: Shell, history: History) -> None:
        self._shell = shell
        self._history = history

    @get(HISTORY_PATH, needs=Permission.READ)
    async def show_history(
        self,
        since: Annotated[
            float, Query(ge=0, le=_AT_MAX, allow_inf_nan=False, description="Only later samples: a Unix time.")
        ] = 0.0,
    ) -> HistoryView:
        """The last hour in figures of the whole gateway, every ten seconds."""
        history = self._history
        return _view(history.every_s, history.since(since))

    @get(TIMELINE_PATH, needs=Permission.READ)
    async def show_timeline(
        self,
        seconds: Annotated[int, Query(ge=1, le=SPAN_MAX_S, description="So far back.")] = SPAN_MAX_S,
        since: Annotated[
            float,
            Query(
                ge=0,
                le=_AT_MAX,
                allow_inf_nan=False,
                description="Only spans that ended after this Unix time or go on. A time in the future is ignored.",
            ),
        ] = 0.0,
    ) -> TimelineView:
        """Which model was on which GPU during the last hour, its moves, and why."""
        view, now = self._shell.loop.scheduler.view, time.time()
        # The clock was set back since the earlier answer.
        first = now - seconds if since > now else max(now - seconds, since)
        spans = self._shell.observer.residency.spans(first, view.slots)
        return TimelineView(
            now=round(now, 3),
            since=round(now - seconds, 3),
            devices=[str(device.id) for device in sorted(view.ledger.devices.values(), key=lambda one: one.kind.value)],
            spans=[
                SpanView(
                    slot=span.slot,
                    model=span.model,
                    phase=span.phase,
                    devices=dict(span.devices),
                    began=round(span.began, 3),
                    ended=None if span.ended is None else round(span.ended, 3),
                    outcome=span.outcome,
                    decision=dict(span.why) or None,
                )
                for span in spans
            ],
        )


def sample(gateway: Overview) -> Sample:
    """The gateway at this moment, in a dozen figures."""
    state = gateway.shell.loop.scheduler.view
    slots = [slot for slot in state.slots.values() if slot.lease is None]
    gpus = gateway.memory_watch.last.reading.gpus
    held: dict[str, float] = {str(device): 0.0 for device in state.ledger.devices}
    for holding in state.ledger.holdings.values():
        for device in state.ledger.devices:
            held[str(device)] += holding.on(device)
    return Sample(
        at=round(time.time(), 3),
        clock=gateway.shell.clock(),
        totals=gateway.shell.metrics.totals(),
        queue=state.waitlist.depth,
        in_flight=sum(len(slot.in_flight) for slot in slots),
        connections=gateway.edge.connections,
        green_room_mib=green_room_used_mib(state),
        ready=sum(slot.tier is Tier.READY for slot in slots),
        asleep=sum(slot.tier is Tier.ASLEEP for slot in slots),
        used_mib=held | {gpu.uuid: float(gpu_used_mib(gateway, gpu)) for gpu in gpus if gpu.uuid in held},
        utilisation={gpu.uuid: float(gpu.utilisation) for gpu in gpus if gpu.utilisation is not None},
    )


def _view(every_s: float, samples: Sequence[Sample]) -> HistoryView:
    """The first sample only begins the rates of the second."""
    pairs, shown = list(pairwise(samples)), samples[1:]

    def per_s(name: str, factor: float = 1.0) -> Rates:
        return [_share(factor * _more(a, b, name), b.clock - a.clock) for a, b in pairs]

    def mean(amount: str, count: str) -> Rates:
        return [_share(_more(a, b, amount), _more(a, b, count)) for a, b in pairs]

    def by_device(name: str) -> dict[str, list[float | None]]:
        devices = dict.fromkeys(device for one in shown for device in getattr(one, name))
        return {device: [getattr(one, name).get(device) for one in shown] for device in devices}

    return HistoryView(
        every_s=every_s,
        at=[one.at for one in shown],
        requests_per_s=per_s("requests"),
        errors_per_s=per_s("errors"),
        refused_per_s=per_s("refused"),
        prompt_tokens_per_s=per_s("prompt_tokens"),
        completion_tokens_per_s=per_s("completion_tokens"),
        cached_tokens_per_s=per_s("cached_tokens"),
        mean_wait_s=mean("wait_s", "waits"),
        mean_total_s=mean("seconds", "requests"),
        hit_share=[None if share is None else min(1.0, share) for share in mean("hits", "requests")],
        swaps_per_min=per_s("swaps", 60.0),
        mean_swap_s=mean("swap_s", "swaps"),
        queue=[one.queue for one in shown],
        in_flight=[one.in_flight for one in shown],
        connections=[one.connections for one in shown],
        ready=[one.ready for one in shown],
        asleep=[one.asleep for one in shown],
        green_room_mib=[one.green_room_mib for one in shown],
        used_mib=by_device("used_mib"),
        utilisation=by_device("utilisation"),
    )


def _more(a: Sample, b: Sample, name: str) -> float:
    return float(getattr(b.totals, name) - getattr(a.totals, name))


def _share(amount: float, of: float) -> float | None:
    return round(amount / of, 4) if of > 0 else None
