"""What is told of the scheduler's doings: one log line, one event and one count per thing that happened.

Owns the words. Keeps the last decisions with their reasons for those who ask later: numbered from 1 in each run, with
the wall clock's time.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from greenroom.core.effects import Reason, Rejection
from greenroom.core.model import LeaseId, Move, MoveId, MoveKind, Outcome
from greenroom.telemetry.hub import Hub
from greenroom.telemetry.logs import get_logger
from greenroom.telemetry.metrics import Metrics

_log = get_logger("scheduler")

# Decisions kept for those who ask why.
DECISIONS_MAX = 500


class Observer:
    def __init__(self, hub: Hub, metrics: Metrics, wall: Callable[[], float] = time.time) -> None:
        self._hub = hub
        self._metrics = metrics
        self._wall = wall
        self._numbers = itertools.count(1)
        # Moves that have begun and not ended, to tell of whom an abort is.
        self._moving: dict[MoveId, Move] = {}
        self.decisions: deque[Mapping[str, Any]] = deque(maxlen=DECISIONS_MAX)

    def moving(self, move: Move, reason: Reason) -> None:
        self._moving[move.id] = move
        facts = {"model": move.model, "slot": move.slot, "move": move.id}
        _log.info(f"{move.kind.value} started", **facts, why=str(reason))
        self._tell(move.kind.value, facts, reason)
        if move.kind in (MoveKind.UNLOAD, MoveKind.SLEEP):
            self._metrics.evicted(move.model, reason.why)

    def moved(self, move: Move, outcome: Outcome, took_s: float) -> None:
        self._moving.pop(move.id, None)
        self._metrics.move_done(move.model, move.kind.value, outcome.value, took_s)
        said = {"model": move.model, "slot": move.slot, "move": move.id, "outcome": outcome.value, "took_s": took_s}
        _log.info(f"{move.kind.value} {outcome.value}", **said)
        self._hub.publish(f"{move.kind.value}_done", said)

    def rejected(self, request: str, rejection: Rejection, reason: Reason) -> None:
        self._metrics.rejected(rejection.model, rejection.code.value)
        _log.info("rejected", request=request, model=rejection.model, code=rejection.code.value)
        self._tell("reject", {"request": request, "model": rejection.model, "code": rejection.code.value}, reason)

    def cut(self, request: str, model: str | None, reason: Reason) -> None:
        _log.info("cut", request=request, model=model, why=str(reason))
        self._tell("cut", {"request": request, "model": model}, reason)

    def aborting(self, move: MoveId, reason: Reason) -> None:
        moving = self._moving.get(move)
        self._tell("abort", {"move": move, "model": None if moving is None else moving.model}, reason)

    def recalled(self, lease: LeaseId, deadline: float, reason: Reason) -> None:
        self._tell("recall", {"lease": lease, "deadline": deadline}, reason)

    def lost(self, model: str, slot: str, cause: str) -> None:
        _log.warning("engine lost", model=model, slot=slot, cause=cause)
        self._hub.publish("lost", {"model": model, "slot": slot, "cause": cause})

    def _tell(self, what: str, facts: Mapping[str, Any], reason: Reason) -> None:
        told = {**facts, "why": reason.why, **{name: value for name, value in reason.facts if name not in facts}}
        self.decisions.append({"seq": next(self._numbers), "at": round(self._wall(), 3), "what": what, **told})
        self._hub.publish(what, told)
