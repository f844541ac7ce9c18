"""Jobs: requests to models that are answered later. Each is run like every other request, and its answer is kept.

Owns which of the waiting jobs are handed to the scheduler, and what their ends mean. The rows, their files and their
bounds are those of `runtime/operations/table.py`. A job's exchange has no client: `job.py` takes its bytes. Its
client leaves when the job is cancelled, which frees the engine at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from greenroom.access.key_ring import KeyRing
from greenroom.access.keys import Caller
from greenroom.config.part import Part
from greenroom.core.events import Learned
from greenroom.core.model import ModelId
from greenroom.dialects.dialect import Route
from greenroom.errors import (
    BadRequest,
    BodiesFull,
    EngineLost,
    GatewayBug,
    GreenroomError,
    InvalidKey,
    OperationStoreFull,
    QueueFull,
    RateLimited,
    ShuttingDown,
)
from greenroom.features.jobs.job import ASK_EVERY_S, AnswerFile, JobProgress, StoredAnswer, StoredRequest, route_of
from greenroom.http.body import Body, BodyBudget
from greenroom.http.exchange import Exchange
from greenroom.http.limits import EdgeState
from greenroom.http.request import Head
from greenroom.runtime.operations.files import (
    Operation,
    OperationError,
    OperationKind,
    OperationStatus,
    ResultPart,
    disk_failed,
)
from greenroom.runtime.operations.table import OperationTable
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlot
from greenroom.serving import render
from greenroom.serving.admitted import OUR_HEADERS
from greenroom.serving.body.long_body import LongBody
from greenroom.serving.requests import Inference
from greenroom.telemetry.logs import get_logger

_log = get_logger("jobs")

# Of one model, so many wait in the scheduler's queue or run; the others wait on disk and hold no memory.
HANDED_OVER_MAX: Final = 64
# Of all models together, jobs take at most one part of so many of the queue: the rest is for callers that wait.
QUEUE_PARTS: Final = 2
# How soon jobs are offered again after the queue or the memory for bodies was full.
AGAIN_S: Final = 1.0
TIDY_EVERY_S: Final = 60.0
# How many running jobs of a list are asked how far they are; the others are shown as known.
LOOKED_AT_MAX: Final = 16
# After so many pieces of a body other requests get their turn.
_PIECES_A_TURN: Final = 16
_RETRY: Final = {b"true": True, b"false": False}


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known of a job at this moment, beside its row."""

    position: int | None = None
    progress: float | None = None
    eta_s: float | None = None
    request_id: str | None = None


class Job:
    """A job that was handed over: it waits in the scheduler's queue, runs, or is just ending."""

    def __init__(self, row: Operation, table: OperationTable, jobs: Jobs):
        self.id, self.key, self.model, self.tenant, self.retry = row.id, row.key, row.model, row.tenant, row.retry
        self.request_id: str | None = None
        self.is_cancelled = False
        self.is_started = False
        self.is_ending = False
        self.answer = AnswerFile(table, row.id)
        self.over = asyncio.Event()
        self.progress = JobProgress()
        self.told_progress = 0.0
        self._table = table
        self._jobs = jobs

    @property
    def may_run_again(self) -> bool:
        return self.retry

    async def starts(self, slot: LiveSlot) -> None:
        if not self.is_started:
            # It may have waited for long.
            self._jobs.caller_of(self)
            await self._table.start(self.id, self.request_id)
            self.is_started = True
            self._jobs.pump()
        self.progress.begin(slot, self.request_id or "")
        self._jobs.watch()

    def is_put_back(self, error: GreenroomError | None) -> bool:
        return self._jobs.is_put_back(self, error)

    def ended(self, error: GreenroomError | None) -> None:
        self._jobs.ended(self, error)

    def cancel(self) -> None:
        self.is_cancelled = True
        self.answer.leave()


class Jobs(Part):
    writes = True

    def __init__(
        self,
        shell: Shell,
        inference: Inference,
        edge: EdgeState,
        bodies: BodyBudget,
        keys: KeyRing,
        *,
        tidy_every_s: float = TIDY_EVERY_S,
    ) -> None:
        self._table = shell.table
        self._inference = inference
        self._edge = edge
        self._bodies = bodies
        self._keys = keys
        self._gateway = shell.live
        self._loop = shell.loop
        self._tidy_every_s = tidy_every_s
        self._live: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_watched = False
        self._is_closed = False

    # --- asked for by callers -----------------------------------------------------------------------------------------

    async def submit(
        self, head: Head, route: Route, body: Body, caller: Caller, *, retry: bool | None = None
    ) -> Operation:
        """Keep this request; it is run when its turn comes. `retry` None: as X-Job-Retry says. Raises what the request
        itself would be refused with, ShuttingDown, OperationsFull and OperationStoreFull."""
        kept = StoredRequest.of(head, self._inference.settings.forward_headers)
        exchange = Exchange(AnswerFile(), self._edge, kept.head, body)
        admitted = self._inference.admitted(kept.head.get_all(OUR_HEADERS), route, caller)
        reading, request = self._inference.reading(exchange, admitted, route), None
        try:
            if self._gateway.is_draining:
                raise ShuttingDown("The gateway is shutting down and takes no more jobs.")
            retry = _retry(head) if retry is None else retry
            request = await self._inference.read_job(reading)
            if request.hold is not None:
                request.hold.admit_to_model()
            row = await self._table.add(
                OperationKind.JOB,
                kept,
                body.chunks(),
                len(body),
                tenant=request.tenant,
                key=caller.name,
                model=request.candidates[0].name,
                route=head.path.decode("ascii", "replace"),
                priority=request.priority,
                retry=retry,
            )
        except GreenroomError as error:
            if isinstance(error, RateLimited):
                # It tells the numbers of the limit that it exceeds.
                head.answer_lines = None
            self._inference.count_refused(error, admitted, reading, request)
            raise
        self.pump()
        return row

    def count_refused(self, error: GreenroomError, head: Head, caller: Caller) -> None:
        """Count an order that could not be read as a refused request."""
        self._inference.count_refused(error, self._inference.admitted(head.get_all(OUR_HEADERS), None, caller))

    def long_body(self, body: Body) -> LongBody:
        """For an order above SHORT_BYTES."""
        return self._inference.long_body(body)

    async def cancel(self, id: str) -> Operation:
        """End it now, and free its engine. One that has ended stays as it is. Returns the row as it is then. Raises
        NotFound if it has made room for others meanwhile."""
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

    async def look(self, rows: Iterable[Operation]) -> None:
        """Ask the engines of these jobs how far they are, if that is due. Takes half a second at most."""
        running = (self._live.get(row.id) for row in rows if row.status is OperationStatus.RUNNING)
        asked = [job.progress for job in running if job is not None and job.progress.is_reported]
        await asyncio.gather(*(progress.look() for progress in asked[:LOOKED_AT_MAX]))

    def facts(self, rows: Iterable[Operation]) -> list[tuple[Operation, JobFacts]]:
        learned, places, counts = self._loop.view.learned(), dict[str, int](), Counter[str]()
        for row in self._queued():
            counts[row.model] += 1
            places[row.id] = counts[row.model]
        return [(row, self._facts(row, learned.get(ModelId(row.model)), places.get(row.id))) for row in rows]

    def _facts(self, row: Operation, learned: Learned | None, place: int | None) -> JobFacts:
        """`place` is that among the jobs of its model; the scheduler's is more exact once it has the job."""
        job, usual_s = self._live.get(row.id), None if learned is None else learned.service_s
        request_id = row.request_id if job is None else job.request_id
        if row.status is OperationStatus.QUEUED:
            position, begins_s = (None, None) if request_id is None else self._loop.outlook(request_id)
            return JobFacts(place if position is None else position, 0.0, _sum(begins_s, usual_s), request_id)
        ran_s = self._table.ran_s(row)
        if row.status is OperationStatus.RUNNING and ran_s is not None and job is not None:
            progress, left_s = job.progress.shown(ran_s, usual_s)
            return JobFacts(None, progress, left_s, request_id)
        return JobFacts(progress=1.0 if row.status is OperationStatus.DONE else None, request_id=request_id)

    # --- running ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Go on with the jobs of earlier runs."""
        self.pump()
        self._later(self._tidy_every_s, self._tidy)

    async def close(self) -> None:
        """Wait until every end is written. Jobs that did not end are gone on with, or settled, by the next start."""
        # What runs meanwhile may want to do more, later.
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def pump(self) -> None:
        """Hand over the jobs whose turn it is: by priority, then from the tenant with fewest at work, then by age."""
        if self._gateway.is_draining:
            return
        handed = Counter(job.model for job in self._live.values())
        at_work = Counter((job.model, job.tenant) for job in self._live.values())
        in_queue = sum(not job.is_started for job in self._live.values())
        room = max(1, self._gateway.config.scheduler.queue_depth_max // QUEUE_PARTS) - in_queue
        of_model = self._waiting()
        age = {row.id: place for place, row in enumerate(self._table)}
        while room > 0 and (models := [one for one in of_model if of_model[one] and handed[one] < HANDED_OVER_MAX]):
            model = min(models, key=handed.__getitem__)
            waiting = of_model[model]
            tenant = min(waiting, key=lambda t: (waiting[t][0].priority, at_work[model, t], age[waiting[t][0].id]))
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
        """By priority, then as they came, whatever the clock said then: the table has the oldest first."""
        rows = (row for row in self._table if row.status is OperationStatus.QUEUED and row.kind is OperationKind.JOB)
        return sorted(rows, key=lambda row: row.priority)

    def _hand_over(self, row: Operation) -> None:
        job = self._live[row.id] = Job(row, self._table, self)
        self._own(self._run(job, row))

    async def _run(self, job: Job, row: Operation) -> None:
        """Begin the request. `ended` is told of its end, whatever becomes of it."""
        body = Body(self._bodies)
        try:
            kept = await self._read(row.id, body)
            head = kept.head
            job.answer.exchange = exchange = Exchange(job.answer, self._edge, head, body)
            route = route_of(head.path)
            admitted = self._inference.admitted(head.get_all(OUR_HEADERS), route, self.caller_of(job))
            request = await self._inference.read_job(self._inference.reading(exchange, admitted, route, job))
            job.request_id = request.id
            if not job.is_cancelled:
                self._inference.begin_job(exchange, request, self._gateway.config.jobs.keep_s)
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
        caller = self._keys.keys.named(job.key)
        if caller is None:
            raise InvalidKey(f"The key {job.key}, with which this job was started, is no longer one of this server's.")
        return caller

    async def _read(self, id: str, body: Body) -> StoredRequest:
        try:
            kept, pieces = self._table.read_request(id, StoredRequest)
            for number, piece in enumerate(pieces):
                body.append(piece)
                if number % _PIECES_A_TURN == 0:
                    await asyncio.sleep(0)
        except OSError as error:
            raise disk_failed(error) from error
        return kept

    def ended(self, job: Job, error: GreenroomError | None) -> None:
        """Only the first call for a job counts."""
        if not job.is_ending:
            job.is_ending = True
            self._own(self._finish(job, error))

    async def _finish(self, job: Job, error: GreenroomError | None) -> None:
        answer = job.answer
        job.progress.close()
        if answer.exchange is not None:
            answer.exchange.body.close()
        try:
            if self.is_put_back(job, error):
                answer.discard()
                if not self._gateway.is_draining:
                    self._later(AGAIN_S, self._pump_soon)
                return
            status, told, result = _outcome(job, error)
            if result is None:
                answer.discard()
            await self._table.end(job.id, status, told, result, job.request_id)
        except Exception as bug:
            _log.bug("the end of a job broke", bug, job=job.id)
        finally:
            del self._live[job.id]
            job.over.set()
        self.pump()

    def is_put_back(self, job: Job, error: GreenroomError | None) -> bool:
        """True if it is no end: the queue was full, a limit reached, it cannot be read for now, or the gateway ends."""
        if job.is_cancelled:
            return False
        if isinstance(error, QueueFull | BodiesFull | RateLimited) and not job.is_started:
            return True
        if isinstance(error, OperationStoreFull) and job.answer.exchange is None:
            return True
        return self._gateway.is_draining and (error is not None or not job.answer.is_complete)

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _later(self, after_s: float, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Not at all once it is closed."""
        if self._is_closed:
            return

        def run() -> None:
            self._timers.discard(timer)
            self._own(what())

        timer = asyncio.get_running_loop().call_later(after_s, run)
        self._timers.add(timer)

    def watch(self) -> None:
        """As long as jobs run whose engines report progress, tell it to those that listen to events."""
        if not self._is_watched and any(job.progress.is_reported for job in self._live.values()):
            self._is_watched = True
            self._later(ASK_EVERY_S, self._tell_progress)

    async def _tell_progress(self) -> None:
        rows = [row for id in self._live if (row := self.get(id)) is not None]
        if self._table.listeners:
            await self.look(rows)
            for row in rows:
                job = self._live.get(row.id)
                if job is not None and (done := job.progress.reported or 0.0) > job.told_progress:
                    job.told_progress = done
                    self._table.publish(row, done)
        self._is_watched = False
        self.watch()

    async def _pump_soon(self) -> None:
        self.pump()

    async def _tidy(self) -> None:
        self._later(self._tidy_every_s, self._tidy)
        await self._table.tidy()


def _retry(head: Head) -> bool:
    said = head.get(b"x-job-retry")
    if said is None:
        return False
    if said.lower() not in _RETRY:
        raise BadRequest("X-Job-Retry is true or false.", param="X-Job-Retry")
    return _RETRY[said.lower()]


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
