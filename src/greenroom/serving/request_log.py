"""What is known of a request when it has ended, written down: in the activity, the metrics, the usage, for its client.

Owns what counts as its end, its status and its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from greenroom.access.client_stats import ClientStats
from greenroom.access.keys import ANYONE, BY_TOKENS, Caller
from greenroom.errors import GreenroomError
from greenroom.http.exchange import Exchange
from greenroom.http.relays.relay import Relay, RelayOutcome
from greenroom.runtime.loop import Ticket
from greenroom.serving import render
from greenroom.serving.answer_facts import usage_of
from greenroom.serving.attempt import Attempt
from greenroom.serving.request import Candidate, Request
from greenroom.serving.routes import UPSTREAM, answers_with_text
from greenroom.telemetry.activity import Activity, Record, UsageCounts
from greenroom.telemetry.metrics import Metrics

# The status that is recorded if the caller left before the answer was complete; nothing is sent.
CLIENT_CLOSED: Final = 499
SWITCHED: Final = 101
# By it an engine tells how many seconds of sound it heard or made. An answer for more than ten days is a mistake.
AUDIO_HEADER: Final = b"x-audio-seconds"
AUDIO_MAX_S: Final = 864_000.0
# By it an engine tells how many pictures it made.
PICTURES_HEADER: Final = b"x-pictures"
_PICTURES_DIGITS_MAX: Final = 6


class Served:
    """One request that is or was served. `candidate` is the model that serves it, or did last; before that, the first.

    `attempt` is None while it waits for a slot.
    """

    __slots__ = ("attempt", "candidate", "exchange", "record", "request", "ticket")

    exchange: Exchange
    request: Request
    record: Record
    ticket: Ticket
    candidate: Candidate
    attempt: Attempt | None

    @property
    def relay(self) -> Relay | None:
        """That of its last attempt, unless it waits again."""
        return None if self.attempt is None else self.attempt.relay


class RequestLog:
    """Writes each request down: in the recent activity, the metrics, the usage and, if configured, in a file."""

    def __init__(
        self,
        activity: Activity,
        metrics: Metrics,
        write_down: Callable[[Record], None] | None = None,
        usage: UsageCounts | None = None,
        client_stats: ClientStats | None = None,
    ) -> None:
        """`write_down` is called for every request that has ended. Without `usage` none is kept."""
        self._requestors = client_stats or ClientStats(time.monotonic)
        self._activity = activity
        self._metrics = metrics
        self._write_down = write_down
        self._usage = usage
        # For people; and for durations, the clock by which tickets tell when they arrived.
        self._wall: Callable[[], float] = time.time
        self._clock: Callable[[], float] = time.monotonic

    def begin(self, request: Request) -> Record:
        """The record of a request that begins now. `end` completes it."""
        record = Record(
            id=request.id,
            model=request.candidates[0].name,
            asked_as=request.asked_as,
            tenant=request.tenant,
            client=request.client,
            route=request.route.name,
            stream=request.stream,
            priority=request.priority,
            arrived_at=self._wall(),
        )
        self._activity.begin(record)
        return record

    def looked_up(self, request: Request, is_hit: bool) -> None:
        """A hit found its model ready and with room."""
        self._metrics.looked_up(request.candidates[0].name, is_hit)

    def refused(self, error: GreenroomError) -> None:
        self._metrics.edge_refused(error.code)

    @property
    def are_cooled(self) -> bool:
        """True if clients that make too many mistakes are refused for a while."""
        return self._requestors.are_cooled

    def check_cooldown(self, caller: Caller, tenant: str, client: str) -> None:
        """Raises CoolingDown."""
        if self._requestors.are_cooled:
            self._requestors.check(_key_of(caller), tenant, client)

    def count_refused(
        self, error: GreenroomError, caller: Caller, tenant: str, client: str, model: str, asked: str
    ) -> None:
        """`model` is empty unless it was read as a whole, `asked` unless its model was found."""
        self._metrics.refused(asked, tenant)
        key = _key_of(caller)
        self._requestors.count(key, tenant, client, model, error.status, error.code)
        if self._usage is not None:
            self._usage.refused(key, tenant, model, error.status)

    def end(self, served: Served, error: GreenroomError | None) -> None:
        """Complete its record, and count it. Called once for each request that came to the scheduler."""
        request, record, ticket, attempt = served.request, served.record, served.ticket, served.attempt
        relay = None if attempt is None else attempt.relay
        record.total_s = total_s = max(0.0, self._clock() - ticket.arrived)
        record.status = _status(served.exchange, relay, error)
        if error is not None:
            record.error_code = error.code
            record.error_message = render.words(error, record.id, to_operator=False).message
            record.reason, record.details = render.words(error, record.id, to_operator=True)
        if ticket.granted_at:
            record.wait_s = ticket.granted_at - ticket.arrived
        if ticket.slot is not None:
            record.slot = ticket.slot.id
        if relay is not None:
            self._read_answer(served, relay)
        self._activity.end(record)
        if self._write_down is not None:
            self._write_down(record)
        if relay is None and request.job is not None and request.job.is_put_back(error):
            # It goes on to wait.
            return
        key, model = _key_of(request.caller), served.candidate.entry.base_id
        self._requestors.count(key, request.tenant, request.client, model, record.status, record.error_code)
        if self._usage is not None:
            self._usage.ended(key, request.tenant, model, record, _is_uncounted(served))
        self._metrics.request_done(
            model=served.candidate.name,
            tenant=request.tenant,
            route=request.route.name,
            status=record.status,
            seconds=total_s,
            wait_s=record.wait_s or 0.0,
            not_there_s=ticket.not_there_s,
            first_byte_s=record.first_byte_s,
        )

    def _read_answer(self, served: Served, relay: Relay) -> None:
        """Tokens are read once, from the last bytes of the answer; sound and pictures are told by its headers."""
        request, candidate, record = served.request, served.candidate, served.record
        route, is_not_cached = request.route, candidate.is_not_cached
        facts = None if served.attempt is None else served.attempt.facts
        record.chunks = relay.events
        if relay.first_data_at is not None:
            record.first_byte_s = max(0.0, relay.first_data_at - served.ticket.arrived)
        if relay.status != 200 or (route is UPSTREAM and served.exchange.head.method != b"POST"):
            return
        if relay.outcome is RelayOutcome.COMPLETE and not route.is_text:
            self._count_media(served, relay)
        if route.is_sound:
            return
        estimates = route.is_text or (route is UPSTREAM and answers_with_text(candidate.target))
        said = usage_of(candidate.entry.engine, relay, request.stream, facts, estimates=estimates)
        if said is None:
            return
        record.prompt_tokens, record.completion_tokens = said.prompt, said.completion
        record.cached_tokens, record.estimated = 0 if is_not_cached else said.cached, said.estimated
        record.gpu_time_ms = None if said.gpu_ms is None else round(said.gpu_ms)
        self._metrics.tokens(candidate.name, request.tenant, said.prompt, said.completion, said.cached or 0)
        if said.cached is not None and not is_not_cached and route.is_text:
            self._metrics.prefix_looked_up(candidate.name, said.cached > 0)

    def _count_media(self, served: Served, relay: Relay) -> None:
        """By headers, which an engine need not send."""
        record, route = served.record, served.request.route
        for name, value in relay.headers:
            if name == AUDIO_HEADER:
                record.audio_s = _seconds(value)
            elif name == PICTURES_HEADER and value.isdigit() and len(value) <= _PICTURES_DIGITS_MAX:
                record.pictures = int(value)
        if record.audio_s is not None and route.is_sound:
            took_s = max(0.0, (record.total_s or 0.0) - (record.wait_s or 0.0))
            self._metrics.audio(served.candidate.name, route.name, record.audio_s, took_s)


def _key_of(caller: Caller) -> str:
    """The name of the caller's key; empty where there are no keys."""
    return "" if caller is ANYONE or caller is BY_TOKENS else caller.name


def _is_uncounted(served: Served) -> bool:
    """True if an engine worked for this request and nothing tells how much."""
    record, relay, route = served.record, served.relay, served.request.route
    if relay is None or not (relay.status == 200 or (relay.status == 0 and relay.outcome is RelayOutcome.CLIENT_GONE)):
        return False
    if record.completion_tokens is not None or record.audio_s is not None or record.pictures is not None:
        return False
    return route is not UPSTREAM or answers_with_text(served.candidate.target)


def tokens_used(served: Served) -> int | None:
    """None if they are not known although an engine worked: a caller that leaves does not get its tokens back."""
    record = served.record
    if record.completion_tokens is None and _is_uncounted(served):
        return None
    return (record.prompt_tokens or 0) + (record.completion_tokens or 0)


def _seconds(value: bytes) -> float | None:
    """A plain number of seconds; None for anything else."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0.0 <= seconds <= AUDIO_MAX_S else None


def _status(exchange: Exchange, relay: Relay | None, error: GreenroomError | None) -> int:
    if error is not None:
        return error.status
    if relay is None or exchange.gone or relay.outcome is RelayOutcome.CLIENT_GONE:
        return CLIENT_CLOSED
    # A connection that left HTTP was answered by the engine's 101, which no relay forwards.
    return relay.status or SWITCHED
