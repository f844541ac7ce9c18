"""Jobs: requests to models that are answered later. Each is run like every other request, and its answer is kept.

Owns which of the waiting jobs are handed to the scheduler, and what their ends mean. The rows, their files and their
bounds are those of `runtime/operations/table.py`. A job's exchange has no client: `AnswerFile` takes its bytes. Its
client leaves when the job is cancelled, which frees the engine at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from greenroom.core.events import Learned
from greenroom.core.model import ModelId
from greenroom.errors import (
    BadRequest,
    BodiesFull,
    EngineLost,
    GatewayBug,
    GreenroomError,
    InvalidKey,
    OperationStoreFull,
    QueueFull,
    ShuttingDown,
    shown,
)
from greenroom.http.body import Body, BodyBudget
from greenroom.http.exchange import Exchange, RawReceiver
from greenroom.http.headers import NEVER_FORWARDED
from greenroom.http.limits import EdgeState
from greenroom.http.request import Head
from greenroom.runtime.operations.files import Operation, OperationError, OperationKind, OperationStatus
from greenroom.runtime.operations.table import OperationTable, ResultPart
from greenroom.server import render
from greenroom.server.inference.ask import OUR_HEADERS
from greenroom.server.inference.requests import Inference
from greenroom.server.inference.routes import MODEL_ROUTES, UPSTREAM, UPSTREAM_PREFIX, Route
from greenroom.telemetry.logs import get_logger
from greenroom.tenancy.keys import Caller

_log = get_logger("jobs")

# Of one model, so many wait in the scheduler's queue or run; the others wait on disk and hold no memory.
HANDED_OVER_MAX: Final = 64
# Of all models together, jobs take at most one part of so many of the queue: the rest is for callers that wait.
QUEUE_PARTS: Final = 2
# How soon jobs are offered again after the queue or the memory for bodies was full.
AGAIN_S: Final = 1.0
TIDY_EVERY_S: Final = 60.0
# An estimate never says that a job that still runs is done.
PROGRESS_MAX: Final = 0.99
# After so many pieces of a body other requests get their turn.
_PIECES_A_TURN: Final = 16
_NOT_STORED: Final = frozenset((b"x-api-key", b"x-heartbeat"))


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The head of a job's request, as it is kept."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The head of a job's answer, as it is kept."""

    status: int
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known of a job at this moment, beside its row."""

    position: int | None = None
    progress: float | None = None
    eta_s: float | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class JobServices:
    """What all jobs use. `caller_named` finds the holder of a key by its name; `keep_s` is the longest wait.

    `queue_depth_max` is how many requests may wait in the scheduler, jobs and others.
    """

    inference: Inference
    bodies: BodyBudget
    edge: EdgeState
    caller_named: Callable[[str], Caller | None]
    keep_s: Callable[[], float]
    queue_depth_max: Callable[[], int]
    is_draining: Callable[[], bool]
    learned: Callable[[], Mapping[ModelId, Learned]]
    wall: Callable[[], float]


class AnswerFile:
    """The connection of a job's exchange: writes the answer to the job's result.

    The exchange speaks HTTP/1.0, in which a body is not framed: what follows the head is the body itself.
    """

    def __init__(self, open_result: Callable[[], ResultPart], on_failure: Callable[[], None]) -> None:
        """`on_failure` is called when the disk does not take the answer."""
        self._open_result = open_result
        self._on_failure = on_failure
        self.write: Callable[[bytes], None] = self._write
        self.result: ResultPart | None = None
        self.status = 0
        self.is_complete = False
        self.failure: OperationStoreFull | None = None

    def _write(self, data: bytes) -> None:
        if self.failure is not None:
            return
        try:
            if self.result is None:
                self.result = self._open_result()
                answer, data = _split(data)
                self.status = answer.status
                self.result.write_head(answer)
            self.result.write(data)
        except OperationStoreFull as failure:
            self.failure = failure
            # In its own turn: the relay is just writing.
            asyncio.get_running_loop().call_soon(self._on_failure)

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


class Job:
    """A job that was handed over: it waits in the scheduler's queue, runs, or is just ending."""

    def __init__(self, row: Operation, table: OperationTable, jobs: Jobs):
        self.id, self.key, self.model, self.tenant, self.retry = row.id, row.key, row.model, row.tenant, row.retry
        self.request_id: str | None = None
        self.exchange: Exchange | None = None
        self.is_cancelled = False
        self.is_started = False
        self.is_ending = False
        self.answer = AnswerFile(lambda: table.result(row.id), self._leave)
        self.over = asyncio.Event()
        self._table = table
        self._jobs = jobs

    @property
    def may_run_again(self) -> bool:
        return self.retry

    async def starts(self) -> None:
        if not self.is_started:
            # It may have waited for long.
            self._jobs.caller_of(self)
            await self._table.start(self.id)
            self.is_started = True
            self._jobs.pump()

    def ended(self, error: GreenroomError | None) -> None:
        self._jobs.ended(self, error)

    def cancel(self) -> None:
        self.is_cancelled = True
        self._leave()

    def _leave(self) -> None:
        if self.exchange is not None:
            self.exchange.leave()


class Jobs:
    def __init__(self, table: OperationTable, services: JobServices) -> None:
        self._table = table
        self._services = services
        self._inference = services.inference
        self._live: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()

    # --- asked for by callers -----------------------------------------------------------------------------------------

    async def submit(self, head: Head, route: Route, body: Body, caller: Caller, *, retry: bool) -> Operation:
        """Keep this request; it is run when its turn comes. Raises what the request itself would be refused with.

        Also raises ShuttingDown, OperationsFull and OperationStoreFull.
        """
        if self._services.is_draining():
            raise ShuttingDown("The gateway is shutting down and takes no more jobs.")
        kept = self._stored(head)
        reading = Exchange(AnswerFile(_no_answer, _nothing), self._services.edge, _head_of(kept), body)
        ask = await self._inference.read_job(reading, route, caller)
        row = await self._table.add(
            OperationKind.JOB,
            kept,
            body.chunks(),
            len(body),
            tenant=ask.tenant,
            key=caller.name,
            model=ask.entry.id,
            route=head.path.decode("ascii", "replace"),
            priority=ask.priority,
            retry=retry,
        )
        self.pump()
        return row

    async def cancel(self, id: str) -> Operation:
        """End it now, and free its engine. One that has ended stays as it is. Returns the row as it is then.

        Raises NotFound if it has made room for others meanwhile.
        """
        job = self._live.get(id)
        if job is None:
            return await self._table.end(id, OperationStatus.CANCELLED)
        job.cancel()
        await job.over.wait()
        return await self._table.end(id, OperationStatus.CANCELLED)

    def get(self, id: str) -> Operation | None:
        row = self._table.get(id)
        return row if row is not None and row.kind is OperationKind.JOB else None

    def newest_first(self) -> Iterable[Operation]:
        return (row for row in reversed(list(self._table)) if row.kind is OperationKind.JOB)

    def read_result(self, id: str) -> tuple[StoredAnswer, Iterable[bytes]] | None:
        """None if it has none. Blocks."""
        return self._table.read_result(id, StoredAnswer)

    def facts(self, rows: Iterable[Operation]) -> list[tuple[Operation, JobFacts]]:
        learned, places, counts = self._services.learned(), dict[str, int](), Counter[str]()
        for row in self._queued():
            counts[row.model] += 1
            places[row.id] = counts[row.model]
        return [(row, self._facts(row, learned.get(ModelId(row.model)), places.get(row.id))) for row in rows]

    def _facts(self, row: Operation, learned: Learned | None, place: int | None) -> JobFacts:
        """`place` is that among the jobs of its model; the scheduler knows it better once it has the job."""
        job, usual_s = self._live.get(row.id), None if learned is None else learned.service_s
        request_id = None if job is None else job.request_id
        if row.status is OperationStatus.QUEUED:
            position, begins_s = (None, None) if request_id is None else self._inference.outlook(request_id)
            return JobFacts(place if position is None else position, 0.0, _sum(begins_s, usual_s), request_id)
        if row.status is OperationStatus.RUNNING and row.started is not None and usual_s:
            ran_s = max(0.0, self._services.wall() - row.started)
            return JobFacts(None, min(ran_s / usual_s, PROGRESS_MAX), max(0.0, usual_s - ran_s), request_id)
        return JobFacts(progress=1.0 if row.status is OperationStatus.DONE else None, request_id=request_id)

    def _stored(self, head: Head) -> StoredRequest:
        """Only what running it needs: never a key, nor a cookie."""
        wanted = (OUR_HEADERS | self._inference.settings.forward_headers) - NEVER_FORWARDED - _NOT_STORED
        headers = tuple(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers if name in wanted
        )
        return StoredRequest(head.method.decode("latin-1"), head.target.decode("latin-1"), headers)

    # --- running ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on with the jobs of earlier runs."""
        self.pump()
        self._later(TIDY_EVERY_S, self._tidy)

    async def close(self) -> None:
        """Wait until every end is written. Jobs that did not end are gone on with, or settled, by the next start."""
        for timer in self._timers:
            timer.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def pump(self) -> None:
        """Hand over the jobs whose turn it is: by priority, then from the tenant with fewest at work, then by age."""
        if self._services.is_draining():
            return
        handed = Counter(job.model for job in self._live.values())
        at_work = Counter((job.model, job.tenant) for job in self._live.values())
        in_queue = sum(not job.is_started for job in self._live.values())
        room = max(1, self._services.queue_depth_max() // QUEUE_PARTS) - in_queue
        of_model = self._waiting()
        while room > 0 and (models := [one for one in of_model if of_model[one] and handed[one] < HANDED_OVER_MAX]):
            model = min(models, key=handed.__getitem__)
            waiting = of_model[model]
            tenant = min(waiting, key=lambda t: (waiting[t][0].priority, at_work[model, t], waiting[t][0].created))
            self._hand_over(waiting[tenant].popleft())
            if not waiting[tenant]:
                del waiting[tenant]
            handed[model] += 1
            at_work[model, tenant] += 1
            room -= 1

    def _waiting(self) -> dict[str, dict[str, deque[Operation]]]:
        """The jobs on disk whose turn has not come, by model and tenant, in the order of their turns."""
        found: dict[str, dict[str, deque[Operation]]] = {}
        for row in self._queued():
            if row.id not in self._live:
                found.setdefault(row.model, {}).setdefault(row.tenant, deque()).append(row)
        return found

    def _queued(self) -> list[Operation]:
        rows = (row for row in self._table if row.status is OperationStatus.QUEUED and row.kind is OperationKind.JOB)
        return sorted(rows, key=lambda row: (row.priority, row.created))

    def _hand_over(self, row: Operation) -> None:
        job = self._live[row.id] = Job(row, self._table, self)
        self._own(self._run(job, row))

    async def _run(self, job: Job, row: Operation) -> None:
        """Begin the request. `ended` is told of its end, whatever becomes of it."""
        body = Body(self._services.bodies)
        try:
            kept = await self._read(row.id, body)
            head = _head_of(kept)
            job.exchange = exchange = Exchange(job.answer, self._services.edge, head, body)
            ask = await self._inference.read_job(exchange, route_of(head.path), self.caller_of(job))
            ask.job = job
            job.request_id = self._inference.next_id()
            if not job.is_cancelled:
                self._inference.begin_job(exchange, ask, job.request_id, self._services.keep_s())
                return
            self.ended(job, None)
        except GreenroomError as error:
            self.ended(job, error)
        except Exception as bug:
            _log.bug("job broke", bug, job=job.id)
            self.ended(job, GatewayBug("Something went wrong in the gateway."))
        body.close()

    def caller_of(self, job: Job) -> Caller:
        """The holder of its key. Raises InvalidKey if the key was removed meanwhile."""
        caller = self._services.caller_named(job.key)
        if caller is None:
            raise InvalidKey(f"The key {job.key}, with which this job was started, is no longer one of this server's.")
        return caller

    async def _read(self, id: str, body: Body) -> StoredRequest:
        kept, pieces = self._table.read_request(id, StoredRequest)
        for number, piece in enumerate(pieces):
            body.append(piece)
            if number % _PIECES_A_TURN == 0:
                await asyncio.sleep(0)
        return kept

    def ended(self, job: Job, error: GreenroomError | None) -> None:
        """Only the first call for a job counts."""
        if not job.is_ending:
            job.is_ending = True
            self._own(self._finish(job, error))

    async def _finish(self, job: Job, error: GreenroomError | None) -> None:
        answer = job.answer
        if job.exchange is not None:
            job.exchange.body.close()
        try:
            if self._is_put_back(job, error):
                answer.discard()
                if not self._services.is_draining():
                    self._later(AGAIN_S, self._pump_soon)
                return
            status, told, result = _outcome(job, error)
            if result is None:
                answer.discard()
            await self._table.end(job.id, status, told, result)
        except Exception as bug:
            _log.bug("the end of a job broke", bug, job=job.id)
        finally:
            del self._live[job.id]
            job.over.set()
        self.pump()

    def _is_put_back(self, job: Job, error: GreenroomError | None) -> bool:
        """True if it is no end: the queue was full for the moment, or the gateway ends and the next one decides."""
        if job.is_cancelled:
            return False
        if isinstance(error, QueueFull | BodiesFull) and not job.is_started:
            return True
        return self._services.is_draining() and (error is not None or not job.answer.is_complete)

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _later(self, after_s: float, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            self._own(what())

        timer = asyncio.get_running_loop().call_later(after_s, run)
        self._timers.add(timer)

    async def _pump_soon(self) -> None:
        self.pump()

    async def _tidy(self) -> None:
        self._later(TIDY_EVERY_S, self._tidy)
        await self._table.tidy()


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


def _outcome(
    job: Job, error: GreenroomError | None
) -> tuple[OperationStatus, OperationError | None, ResultPart | None]:
    """What the end of its request means for a job. An error that callers would have got as an answer is its result."""
    answer = job.answer
    if job.is_cancelled:
        return OperationStatus.CANCELLED, None, None
    if answer.failure is not None:
        return OperationStatus.FAILED, _told(job, answer.failure), None
    if error is None and not answer.is_complete:
        error = EngineLost(f"The answer of {job.model} was ended.")
    result = answer.result if answer.is_complete else None
    if error is not None:
        return OperationStatus.FAILED, _told(job, error), result
    if answer.status >= 400:
        refused = OperationError("engine_error", f"{job.model} answered {answer.status}; the result has its words.")
        return OperationStatus.FAILED, refused, result
    return OperationStatus.DONE, None, result


def _told(job: Job, error: GreenroomError) -> OperationError:
    return OperationError(error.code, render.words(error, job.request_id or "", to_operator=False).message)


def _sum(begins_s: float | None, usual_s: float | None) -> float | None:
    return None if begins_s is None or usual_s is None else begins_s + usual_s


def _head_of(kept: StoredRequest) -> Head:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept.headers]
    return Head(kept.method.encode("latin-1"), kept.target.encode("latin-1"), headers, "1.0", "", keep_alive=False)


def _split(data: bytes) -> tuple[StoredAnswer, bytes]:
    """The head that an exchange wrote, and what follows it."""
    head, _, body = data.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    pairs = (header.partition(b": ") for header in headers)
    kept = tuple(
        (name.decode("latin-1"), value.decode("latin-1")) for name, _, value in pairs if name not in _OF_THE_MOMENT
    )
    return StoredAnswer(int(line.split(b" ")[1]), kept), body


# Headers that the answer with the result has of its own.
_OF_THE_MOMENT: Final = frozenset((b"connection", b"content-length", b"date", b"x-request-id", b"x-accel-buffering"))


def _no_answer() -> ResultPart:
    raise GatewayBug("A request that is only read was answered.")


def _nothing() -> None:
    pass
