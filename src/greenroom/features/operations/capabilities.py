"""`GET /v1/capabilities`: what this gateway can do and how loaded it is, in the shape of the runner API.

Owns the published shape, in which memory is in MiB, and how long an answer is kept. Never loads a model. A figure that
is not known is null; on a machine without GPUs the figures of GPUs are 0 and their list is empty.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

import greenroom
from greenroom.access.keys import Caller, Permission
from greenroom.api import views
from greenroom.api.asgi import caller_of
from greenroom.api.declared import Routes, get
from greenroom.api.overview import Overview
from greenroom.api.reports.memory import cache_view, gpu_used_mib, kv_mib
from greenroom.api.reports.snapshot import Snapshot
from greenroom.api.views import StatusWord, View
from greenroom.config.sections.model import KEYS_OF_ENGINES, Ability
from greenroom.core.model import ModelId
from greenroom.errors import ShuttingDown, StartingUp
from greenroom.features.operations.loads import Loads
from greenroom.library.library import Library
from greenroom.library.records import LibraryRecord
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.shell import Shell

PATH: Final = "/v1/capabilities"
KEPT_S: Final = 5.0
# Answers kept: one for each key that asked lately.
KEPT_MAX: Final = 256
_TEXT: Final = frozenset((Ability.CHAT, Ability.COMPLETIONS))
_STREAMS: Final = _TEXT | {Ability.SPEECH}


class LoadedCapability(View):
    id: str
    quantization: str | None
    """As configured, else as its files tell."""
    contextLength: int | None  # noqa: N815
    """Tokens; null where its files decide, or for a model that reads no text."""
    loadedAt: int | None  # noqa: N815
    """Unix time in seconds."""
    gpuMemoryMB: int  # noqa: N815


class LoadingModel(View):
    id: str
    progress: float
    """From 0 to 1; by how long it took before where its engine does not tell."""
    eta: int | None
    """Seconds; null before its first load."""


class Models(View):
    loaded: list[LoadedCapability]
    loading: list[LoadingModel]
    available: list[str]
    """Ids of all other models that can be asked for."""


class Resources(View):
    gpuIds: list[int]  # noqa: N815
    gpuMemoryTotalMB: int  # noqa: N815
    gpuMemoryUsedMB: int  # noqa: N815
    gpuMemoryFreeMB: int  # noqa: N815
    gpuUtilization: float | None  # noqa: N815
    """The mean of all GPUs, from 0 to 1; null where the driver does not tell."""
    kvCacheSizeMB: int | None  # noqa: N815
    """Of the loaded models whose engine has a KV cache of known size; null if there are only others."""
    kvCacheUtilization: float | None  # noqa: N815
    """The share of these in use; null if no engine tells."""


class QueueCapacity(View):
    depth: int
    maxDepth: int  # noqa: N815
    avgWaitMs: int | None  # noqa: N815
    """Of all requests, the latest counting most; null before the first."""
    p95WaitMs: int | None  # noqa: N815
    """Of the last 512 requests that have ended; null before the first."""


class Abilities(View):
    """What at least one model can do, those on disk included that were not asked for yet."""

    streaming: bool
    prefixCaching: bool  # noqa: N815
    multiTenant: bool  # noqa: N815
    visionInput: bool  # noqa: N815
    audioInput: bool  # noqa: N815
    functionCalling: bool  # noqa: N815
    byModel: dict[str, list[str] | None]  # noqa: N815
    """The abilities of each model; null where only its engine knows."""


class Capabilities(View):
    runnerType: str  # noqa: N815
    runnerId: str  # noqa: N815
    models: Models
    resources: Resources
    queue: QueueCapacity
    capabilities: Abilities
    health: views.HealthWord


@dataclass(frozen=True)
class CapabilityRoutes(Routes):
    _shell: Shell
    _resolver: Resolver
    _library: Library
    _loads: Loads
    _gateway: Overview
    _kept: dict[Caller, tuple[float, Capabilities]] = field(default_factory=dict)

    @get(PATH, needs=Permission.ASK)
    async def capabilities(self, request: Request, response: Response) -> Capabilities:
        """What this gateway can do, and its state, with the models that the caller may see. Kept for 5 seconds.

        503 while it starts and while it shuts down.
        """
        if self._shell.is_draining:
            raise ShuttingDown("The gateway is shutting down.", retry_after_s=KEPT_S)
        if self._shell.is_starting:
            raise StartingUp("The gateway is starting.", retry_after_s=1.0)
        if self._library.roots:
            # Models that were not found yet would be missing for as long as the answer is kept.
            with suppress(TimeoutError):
                async with asyncio.timeout(KEPT_S):
                    await self._library.looked()
        response.headers["cache-control"] = f"private, max-age={KEPT_S:g}"
        return self._current(caller_of(request))

    def _current(self, caller: Caller) -> Capabilities:
        now = self._shell.clock()
        kept = self._kept.get(caller)
        if kept is not None and now - kept[0] < KEPT_S:
            return kept[1]
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        made = self._made(caller)
        self._kept[caller] = (now, made)
        return made

    def _made(self, caller: Caller) -> Capabilities:
        shell, look = self._shell, Snapshot(self._gateway)
        runner = shell.config.runner
        listed = [entry for entry in shell.catalog.shown if not entry.config.unlisted and caller.sees(entry.base_id)]
        # A caller that nothing tells from others may be the one that ordered it.
        is_told = caller.admin or not caller.may_list
        names = {entry.id: entry.shown_id(to_operator=is_told) for entry in listed}
        words = {entry.id: look.word(entry) for entry in listed}
        loaded = [entry for entry in listed if words[entry.id] is StatusWord.LOADED]
        unasked = [record for record in self._resolver.unasked if caller.sees(record.id)]
        return Capabilities(
            runnerType=runner.type or f"greenroom-{greenroom.__version__}",
            runnerId=runner.id or socket.gethostname(),
            models=Models(
                loaded=[self._loaded(entry, names[entry.id]) for entry in loaded],
                loading=[
                    self._loading(entry, names[entry.id]) for entry in listed if words[entry.id] is StatusWord.LOADING
                ],
                available=[
                    *(names[one] for one, word in words.items() if word not in (StatusWord.LOADED, StatusWord.LOADING)),
                    *(record.id for record in unasked),
                ],
            ),
            resources=self._resources(loaded),
            queue=self._queue(),
            capabilities=self._abilities(listed, names, unasked),
            health=look.health().status,
        )

    # --- models -------------------------------------------------------------------------------------------------------

    def _loaded(self, entry: Entry, name: str) -> LoadedCapability:
        reads = "ctx_size" in KEYS_OF_ENGINES.get(entry.engine.name, ())
        return LoadedCapability(
            id=name,
            quantization=entry.facts.quantization,
            contextLength=(entry.config.ctx_size or None) if reads else None,
            loadedAt=self._loaded_at(entry.id),
            gpuMemoryMB=self._loads.gpu_mib(entry.id),
        )

    def _loaded_at(self, model: ModelId) -> int | None:
        slots, live = self._shell.loop.scheduler.view.slots_of(model), self._shell.slots.live
        since = min((live[slot.id].ready_since for slot in slots if slot.id in live), default=None)
        return None if since is None else int(time.time() - (self._shell.clock() - since))

    def _loading(self, entry: Entry, name: str) -> LoadingModel:
        progress = self._loads.progress_of(entry.id)
        eta = None if progress.eta_s is None else math.ceil(progress.eta_s)
        return LoadingModel(id=name, progress=round(progress.share, 3), eta=eta)

    # --- figures ------------------------------------------------------------------------------------------------------

    def _resources(self, loaded: list[Entry]) -> Resources:
        gpus = self._gateway.memory_watch.last.reading.gpus
        total, used = (
            sum(gpu.total_mib for gpu in gpus),
            sum(gpu_used_mib(self._gateway, gpu) for gpu in gpus),
        )
        told = [gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
        size, share = self._kv_cache(loaded)
        return Resources(
            gpuIds=[gpu.index for gpu in gpus],
            gpuMemoryTotalMB=total,
            gpuMemoryUsedMB=used,
            gpuMemoryFreeMB=max(0, total - used),
            gpuUtilization=round(sum(told) / len(told) / 100, 3) if told else None if gpus else 0.0,
            kvCacheSizeMB=size,
            kvCacheUtilization=share,
        )

    def _kv_cache(self, loaded: list[Entry]) -> tuple[int | None, float | None]:
        """The size of all KV caches, and the share in use of those whose engine tells it, by their sizes."""
        text = [entry for entry in loaded if entry.facts.abilities is None or entry.facts.abilities & _TEXT]
        if not text:
            return 0, 0.0
        sizes = {entry.id: size for entry in text if (size := kv_mib(self._shell, entry)) is not None}
        view, live = self._shell.loop.scheduler.view, self._shell.slots
        told = {entry.id: cache for entry in text if (cache := cache_view(live, view.slots_of(entry.id))) is not None}
        # A cache of unknown size counts as one MiB, so that it is not lost among others.
        weights = {model: max(1, sizes.get(model, 1)) for model in told}
        used = sum(told[model].kv_used * weight for model, weight in weights.items())
        share = round(used / sum(weights.values()), 3) if weights else None
        return sum(sizes.values()) if sizes else None, share

    def _queue(self) -> QueueCapacity:
        state, waits = self._shell.loop.scheduler.view, sorted(self._shell.metrics.waits_s)
        # The same mean as in the error of a full queue.
        mean = None if state.avg_wait_s is None else round(1000 * state.avg_wait_s)
        p95 = round(1000 * waits[math.ceil(0.95 * len(waits)) - 1]) if waits else None
        return QueueCapacity(
            depth=state.waitlist.depth, maxDepth=state.limits.queue_depth_max, avgWaitMs=mean, p95WaitMs=p95
        )

    def _abilities(self, listed: list[Entry], names: Mapping[ModelId, str], unasked: list[LibraryRecord]) -> Abilities:
        known: dict[str, Collection[str] | None] = {names[entry.id]: entry.facts.abilities for entry in listed}
        known |= {record.id: record.abilities or None for record in unasked}
        union: frozenset[str] = frozenset().union(*(one for one in known.values() if one is not None))
        return Abilities(
            streaming=bool(union & _STREAMS) or None in known.values(),
            prefixCaching=any(entry.facts.keeps_prefixes for entry in listed)
            or any(_TEXT.intersection(record.abilities) for record in unasked),
            multiTenant=self._shell.config.server.multi_tenant,
            visionInput=Ability.VISION in union,
            audioInput=bool(union & {Ability.AUDIO, Ability.TRANSCRIPTION, Ability.TRANSLATION}),
            functionCalling=Ability.TOOLS in union,
            byModel={model: None if one is None else sorted(one) for model, one in known.items()},
        )
