"""One job: what is kept of it, and how far it is: what its engine reports, else an estimate.

Owns which headers are kept, and how what an exchange sends becomes a head and a body on disk. Where that is, and how
much of it may be, is said by `runtime/operations/table.py`. Owns also the question to the engine how far it is,
`GET <progress_path>?request=ID` → `{"progress": 0..1}`. It is asked at most once a second for each job, only while the
job runs and a caller looks. What an engine says is never trusted: garbage counts as no answer, and progress never goes
backwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from greenroom.dialects.dialect import Route
from greenroom.errors import BadRequest, GatewayBug, OperationStoreFull, shown
from greenroom.http.exchange import Exchange, RawReceiver
from greenroom.http.headers import NEVER_FORWARDED
from greenroom.http.request import Head
from greenroom.runtime.moves.process_moves import EngineCall
from greenroom.runtime.operations.files import ResultPart
from greenroom.runtime.operations.table import OperationTable
from greenroom.runtime.slots import LiveSlot
from greenroom.serving.admitted import OUR_HEADERS
from greenroom.serving.routes import MODEL_ROUTES, UPSTREAM, UPSTREAM_PREFIX

# Headers that the answer with the result has of its own.
_OF_THE_MOMENT: Final = frozenset((b"connection", b"content-length", b"date", b"x-request-id", b"x-accel-buffering"))
_NOT_STORED: Final = frozenset((b"x-api-key", b"x-heartbeat"))


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The head of a job's request, as it is kept."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, head: Head, forwarded: frozenset[bytes]) -> StoredRequest:
        """Only what running it needs: never a key, nor a cookie. The Host is for the URLs of pictures."""
        wanted = ((OUR_HEADERS | forwarded) - NEVER_FORWARDED - _NOT_STORED) | {b"host"}
        headers = tuple(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers if name in wanted
        )
        return cls(head.method.decode("latin-1"), head.target.decode("latin-1"), headers)

    @property
    def head(self) -> Head:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers]
        return Head(self.method.encode("latin-1"), self.target.encode("latin-1"), headers, "1.0", "", keep_alive=False)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The head of a job's answer, as it is kept."""

    status: int
    headers: tuple[tuple[str, str], ...]


class AnswerFile:
    """The connection of a job's exchange: writes the answer to the job's result. The exchange is in HTTP/1.0, in which
    a body is not framed: what follows the head is the body itself."""

    def __init__(self, table: OperationTable | None = None, job_id: str = "") -> None:
        """Without a table for a request that is only read, and never answered."""
        self._table = table
        self._job_id = job_id
        self.write: Callable[[bytes], None] = self._write
        self.exchange: Exchange | None = None
        self.result: ResultPart | None = None
        self.status = 0
        self.is_complete = False
        self.failure: OperationStoreFull | None = None

    def _write(self, data: bytes) -> None:
        if self.failure is not None:
            return
        if self._table is None:
            raise GatewayBug("A request that is only read was answered.")
        try:
            if self.result is None:
                self.result = self._table.result(self._job_id)
                answer, data = _split(data)
                self.status = answer.status
                self.result.write_head(answer)
            self.result.write(data)
        except OperationStoreFull as failure:
            self.failure = failure
            # In its own turn: the relay is just writing.
            asyncio.get_running_loop().call_soon(self.leave)

    def leave(self) -> None:
        """Its client leaves: the engine is freed."""
        if self.exchange is not None:
            self.exchange.leave()

    def exchange_over(self, keep_alive: bool) -> None:
        self.is_complete = True

    def cut(self, *, hard: bool) -> None:
        """The answer is incomplete."""

    def take_over(self, receiver: RawReceiver) -> asyncio.Transport:
        raise GatewayBug("A job's connection cannot leave HTTP.")

    def discard(self) -> None:
        if self.result is not None:
            self.result.discard()
            self.result = None


def _split(data: bytes) -> tuple[StoredAnswer, bytes]:
    """The head that an exchange wrote, and what follows it."""
    head, _, body = data.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    pairs = (header.partition(b": ") for header in headers)
    kept = tuple(
        (name.decode("latin-1"), value.decode("latin-1")) for name, _, value in pairs if name not in _OF_THE_MOMENT
    )
    return StoredAnswer(int(line.split(b" ")[1]), kept), body


def route_of(path: bytes) -> Route:
    """Raises BadRequest for a path that leads to no model."""
    if path.startswith(UPSTREAM_PREFIX):
        return UPSTREAM
    route = MODEL_ROUTES.get(path)
    if route is None:
        raise BadRequest(
            f"{shown(path.decode('latin-1'))} is no route to a model. There are "
            f"{', '.join(known.decode() for known in MODEL_ROUTES)} and {UPSTREAM_PREFIX.decode()}MODEL/….",
            param="route",
        )
    return route


# --- how far it is --------------------------------------------------------------------------------------------------

ASK_EVERY_S: Final = 1.0
# An engine that computes may not answer at once. Callers wait for it no longer than this.
ANSWER_MAX_S: Final = 0.5
# Nothing that still runs is shown as done.
PROGRESS_MAX: Final = 0.99
# Before this much is done, what is left cannot be told from it.
_TELLING: Final = 0.02


class _Reported(msgspec.Struct):
    progress: float


_reported: Final = msgspec.json.Decoder(_Reported)


class JobProgress:
    """Of one job."""

    def __init__(self) -> None:
        self._slot: LiveSlot | None = None
        self._request_id = ""
        self._asked_at: float | None = None
        self._asking: asyncio.Task[None] | None = None
        self._shown: float | None = None
        self.reported: float | None = None
        """What its engine said last."""

    def begin(self, slot: LiveSlot, request_id: str) -> None:
        """The engine of this slot is sent the request now."""
        self._slot, self._request_id = slot, request_id

    @property
    def is_reported(self) -> bool:
        """True if its engine reports progress at all."""
        return self._slot is not None and self._slot.entry.engine.progress_path is not None

    async def look(self) -> None:
        """Ask the engine, if that is due, and wait a moment for its answer. Never raises."""
        if self._asking is None and self._is_due():
            self._asked_at = time.monotonic()
            self._asking = asyncio.get_running_loop().create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        if self._asking is not None:
            # Several callers may wait for one answer.
            await asyncio.wait((self._asking,), timeout=ANSWER_MAX_S)

    def _is_due(self) -> bool:
        return self.is_reported and (self._asked_at is None or time.monotonic() - self._asked_at >= ASK_EVERY_S)

    async def _ask(self) -> None:
        slot = self._slot
        assert slot is not None
        with contextlib.suppress(OSError, ValueError, TimeoutError, msgspec.MsgspecError):
            async with asyncio.timeout(ASK_EVERY_S):
                target = f"{slot.entry.engine.progress_path}?request={self._request_id}"
                status, body = await EngineCall(slot.pool.address)("GET", target)
            said = _reported.decode(body).progress
            if status == 200 and 0.0 <= said <= 1.0:
                self.reported = max(self.reported or 0.0, min(said, PROGRESS_MAX))

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None

    def close(self) -> None:
        """The job has ended; an answer that comes now is not wanted."""
        if self._asking is not None:
            self._asking.cancel()

    def shown(self, ran_s: float, usual_s: float | None) -> tuple[float | None, float | None]:
        """Progress and seconds left, after `ran_s`; `usual_s` is how long such requests take. None: not known."""
        done, left_s = self.reported, None if usual_s is None else max(0.0, usual_s - ran_s)
        if done is None and usual_s:
            done = min(ran_s / usual_s, PROGRESS_MAX)
        elif done is not None and done >= _TELLING:
            left_s = ran_s * (1.0 - done) / done
        if done is not None:
            self._shown = max(self._shown or 0.0, done)
        return self._shown, left_s
