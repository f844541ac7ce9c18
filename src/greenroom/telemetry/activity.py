"""What each request is doing, and what the last ones did.

Owns one record for each request, from arrival to some time after its end: always while it runs, then as one of the
most recent. Never holds bodies or keys. Only `reason` and `details`, which are for operators, quote an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Final, Literal

State = Literal["waiting", "serving", "done"]


# In the order in which they are shown.
_FIELDS: Final = (
    "id",
    "model",
    "asked_as",
    "tenant",
    "client",
    "route",
    "stream",
    "priority",
    "arrived_at",
    "state",
    "slot",
    "model_version",
    "model_repo_id",
    "wait_s",
    "first_byte_s",
    "total_s",
    "status",
    "error_code",
    "error_message",
    "reason",
    "details",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "gpu_time_ms",
    "audio_s",
    "pictures",
    "estimated",
    "chunks",
)


class Record:
    """One request, filled in as it goes on. What is not known yet is None. Times are seconds since arrival.

    A plain class: there is one for every request, and even a compiled dataclass is constructed by the interpreter.
    """

    __slots__ = _FIELDS

    def __init__(
        self,
        *,
        id: str,
        model: str,
        asked_as: str,
        tenant: str,
        route: str,
        arrived_at: float,
        client: str | None = None,
        stream: bool = False,
        priority: int = 1,
    ) -> None:
        self.id = id
        # The model's id, and the id or alias that the caller sent.
        self.model = model
        self.asked_as = asked_as
        self.tenant = tenant
        self.client = client
        self.route = route
        self.stream = stream
        self.priority = priority
        # Wall clock, for people.
        self.arrived_at = arrived_at
        self.state: State = "waiting"
        self.slot: str | None = None
        # Of a model under version control: which weights answer.
        self.model_version: int | None = None
        self.model_repo_id: str | None = None
        self.wait_s: float | None = None
        self.first_byte_s: float | None = None
        self.total_s: float | None = None
        self.status: int | None = None
        self.error_code: str | None = None
        # The message for callers; the one for operators, and the engine's lines that belong to it.
        self.error_message: str | None = None
        self.reason: str | None = None
        self.details: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        # Prompt tokens that were not computed again, and how long the engine computed, where it tells.
        self.cached_tokens: int | None = None
        self.gpu_time_ms: int | None = None
        # Seconds of sound that were heard or made, and pictures that were made, where the engine tells.
        self.audio_s: float | None = None
        self.pictures: int | None = None
        # True if the gateway counted the tokens because the engine did not report them.
        self.estimated = False
        self.chunks = 0

    def as_dict(self) -> dict[str, Any]:
        """Every field, ready to be JSON."""
        return {name: getattr(self, name) for name in _FIELDS}


class Activity:
    """`begin` and `end` match. If an id is used twice, the newest request counts."""

    def __init__(self, keep_max: int = 2_000) -> None:
        self._live: dict[str, Record] = {}
        # In the order in which they ended. There is no index by id: few are asked for, and every request ends.
        self._ended: deque[Record] = deque(maxlen=keep_max)

    def __len__(self) -> int:
        """The number of requests that run now."""
        return len(self._live)

    def begin(self, record: Record) -> None:
        self._live[record.id] = record

    def end(self, record: Record) -> None:
        """This request is over. Does nothing for one that was ended before or never begun."""
        if self._live.get(record.id) is not record:
            return
        del self._live[record.id]
        record.state = "done"
        self._ended.append(record)

    def get(self, request_id: str) -> Record | None:
        live = self._live.get(request_id)
        return live or next((record for record in reversed(self._ended) if record.id == request_id), None)

    def recent(self, limit: int, model: str | None = None) -> list[Record]:
        """Running requests, then ended ones, each with the newest first."""
        newest_first: Iterator[Record] = chain(reversed(self._live.values()), reversed(self._ended))
        if model is not None:
            newest_first = (record for record in newest_first if record.model == model)
        return list(islice(newest_first, max(limit, 0)))
