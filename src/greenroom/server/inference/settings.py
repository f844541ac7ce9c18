"""The numbers a running request goes by, taken from the configuration and replaced as a whole when it is reloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from greenroom.config.schema import Heartbeat, Server
from greenroom.core.events import RequestArrived
from greenroom.core.model import ModelId, RequestId, TenantId
from greenroom.http.headers import REQUEST_ALLOWED


@dataclass(frozen=True, slots=True)
class Settings:
    heartbeat: Heartbeat
    heartbeat_after_s: float
    heartbeat_every_s: float
    wait_max_s: float
    stream_wait_max_s: float
    answer_idle_max_s: float
    forward_headers: frozenset[bytes]
    body_max: int
    upload_max: int

    @classmethod
    def of(cls, server: Server) -> Settings:
        return cls(
            heartbeat=server.heartbeat,
            heartbeat_after_s=server.heartbeat_after_s,
            heartbeat_every_s=server.heartbeat_every_s,
            wait_max_s=server.wait_max_s,
            stream_wait_max_s=server.stream_wait_max_s,
            answer_idle_max_s=server.answer_idle_max_s,
            forward_headers=REQUEST_ALLOWED | {name.lower().encode("latin-1") for name in server.forward_headers},
            body_max=server.body_max_mib * 1024 * 1024,
            upload_max=server.upload_max_mib * 1024 * 1024,
        )


def arrival(
    settings: Settings,
    now: float,
    request: RequestId,
    model: ModelId,
    priority: int,
    tenant: TenantId,
    patient: bool,
    budget_s: float | None,
    keep_alive_s: float | None = None,
) -> RequestArrived:
    """A `patient` caller hears heartbeats and can wait long; who hears nothing gives up after a while unannounced."""
    wait_s = settings.stream_wait_max_s if patient else settings.wait_max_s
    answer_by: float | None = None
    if budget_s is not None:
        wait_s = min(wait_s, budget_s)
        answer_by = now + budget_s
    return RequestArrived(now, request, (model,), priority, tenant, now + wait_s, patient, answer_by, keep_alive_s)


# Bounds of the sweep's period: fine enough for the shortest heartbeat, rare enough to cost nothing.
SWEEP_MIN_S: Final = 0.05
SWEEP_MAX_S: Final = 0.5


class Watched(Protocol):
    def look(self, now: float) -> None:
        """Do what is due at this moment. Must not raise."""
        ...


class Vigil:
    def __init__(self, period_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self._period_s = period_s
        self._clock = clock
        self._watched: set[Watched] = set()
        self._next: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)
        if self._next is None:
            self._arm()

    def remove(self, watched: Watched) -> None:
        self._watched.discard(watched)

    def _arm(self) -> None:
        period_s = min(max(self._period_s(), SWEEP_MIN_S), SWEEP_MAX_S)
        self._next = asyncio.get_running_loop().call_later(period_s, self._sweep)

    def _sweep(self) -> None:
        self._next = None
        now = self._clock()
        for watched in list(self._watched):
            watched.look(now)
        if self._watched:
            self._arm()

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
