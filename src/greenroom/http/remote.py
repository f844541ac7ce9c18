"""Connections to a provider of remote models: over TLS, with the gateway's own key, and sent again while it is busy.

Owns what a provider is sent of a caller's request and what a caller is shown of its answer: neither the caller's key
nor the gateway's, and no header but those that describe the body. An answer that concerns the gateway's account (a
refused key, a full quota, a failure) becomes an error of ours, because its text may name the account. Never decides
what is asked.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final

from greenroom.errors import EngineLost, GatewayBug, RemoteBusy, RemoteFailed, RemoteRefused, RemoteTimeout
from greenroom.http.body import Payload
from greenroom.http.engine_connection import Connection, Sink
from greenroom.http.headers import REMOTE_ANSWER_ALLOWED, REQUEST_ALLOWED, Headers, build_request
from greenroom.http.upstream import EngineAddress, Pool

# The first wait before a request is sent again; each further one is twice as long.
BACKOFF_S: Final = 0.5
BACKOFF_MAX_S: Final = 8.0
# A provider that asks for a longer wait is not waited for: the caller is told instead.
RETRY_AFTER_MAX_S: Final = 30.0
# How often requests without an answer are looked at.
SWEEP_S: Final = 0.1
# A reused connection that ends so soon was closed before the provider saw the request, which may be sent once more.
RESEND_S: Final = 0.25
# Shorter than providers keep a connection open that is not used.
IDLE_S: Final = 30.0
_OUR_PATHS: Final = b"/v1/"


@dataclass(frozen=True, slots=True)
class RemoteEndpoint:
    """Where a provider's API is, and the account by which it is called."""

    host: str
    port: int
    path: bytes
    """What stands in the place of /v1, without a slash at its end."""
    tls: ssl.SSLContext | None
    key: str | None = field(repr=False)
    agent: str = "greenroom"

    def head(self, method: bytes, target: bytes, headers: Headers, length: int, request_id: bytes) -> bytes:
        """The head of a request. Of the caller's own only the headers that describe the body go with it."""
        asked = target.partition(b"?")[0]
        if not asked.startswith(_OUR_PATHS):
            raise GatewayBug("A remote model is asked by OpenAI's paths only.")
        ours = [(b"user-agent", self.agent.encode())]
        if self.key is not None:
            ours.append((b"authorization", b"Bearer " + self.key.encode()))
        return build_request(
            method,
            self.path + asked[len(_OUR_PATHS) - 1 :],
            headers,
            host=self._host_header,
            length=length,
            request_id=request_id,
            allowed=REQUEST_ALLOWED,
            ours=ours,
        )

    @property
    def _host_header(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.tls is not None else 80
        return (host if self.port == usual else f"{host}:{self.port}").encode()


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    connect_s: float = 10.0
    first_byte_s: float = 600.0
    retries_max: int = 2
    # Between 0 and 1; spreads the waits of requests that failed together.
    draw: Callable[[], float] = random.random


class RemotePool(Pool):
    """Connections to one provider for one model. `name` is how errors name it; they never tell its address."""

    def __init__(
        self,
        endpoint: RemoteEndpoint,
        limits: RemoteLimits,
        *,
        name: str,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(EngineAddress(endpoint.host, endpoint.port), name=name, idle_s=IDLE_S, loop=loop)
        self.endpoint = endpoint
        self.limits = limits
        self.connect_timeout_s = limits.connect_s
        # Requests that wait for the first byte of their answer, or to be sent again.
        self._unanswered: set[_Attempts] = set()
        self._sweep_at: asyncio.TimerHandle | None = None

    def lost(self, what: str) -> EngineLost:
        return RemoteFailed(f"{self.name} {what}. Ask again later.")

    async def send(self, head: bytes, body: Payload, sink: Sink) -> None:
        attempts = self._begun(head, body, sink)
        if not Pool.send_now(self, head, body, attempts):
            await self._send_fresh(head, body, attempts)

    def send_now(self, head: bytes, body: Payload, sink: Sink) -> bool:
        attempts = self._begun(head, body, sink)
        is_sent = Pool.send_now(self, head, body, attempts)
        if not is_sent:
            self.answered(attempts)
        return is_sent

    def send_again(self, head: bytes, body: Payload, attempts: _Attempts) -> None:
        if not Pool.send_now(self, head, body, attempts):
            self.retry(head, body, attempts)

    def may_resend(self, sink: Sink) -> bool:
        """Only if it ended at once. Else the provider may have worked on the request, which is paid for."""
        return isinstance(sink, _Attempts) and sink.is_just_sent

    def close(self) -> None:
        unanswered = list(self._unanswered)
        super().close()
        for attempts in unanswered:
            attempts.stopped()
        if self._sweep_at is not None:
            self._sweep_at.cancel()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def answered(self, attempts: _Attempts) -> None:
        """It needs no look any more."""
        self._unanswered.discard(attempts)

    def _begun(self, head: bytes, body: Payload, sink: Sink) -> _Attempts:
        attempts = _Attempts(self, head, body, sink, self._time)
        self._unanswered.add(attempts)
        if self._sweep_at is None:
            self._sweep_at = self._loop.call_later(SWEEP_S, self._sweep)
        return attempts

    def _sweep(self) -> None:
        # First, so that one look that fails is not the last.
        self._sweep_at = self._loop.call_later(SWEEP_S, self._sweep) if self._unanswered else None
        now = self._time()
        for attempts in list(self._unanswered):
            attempts.look(now)

    async def _dial(self) -> Connection:
        tls, host = self.endpoint.tls, self.endpoint.host
        _, connection = await self._loop.create_connection(
            self._new_connection,
            host,
            self.endpoint.port,
            ssl=tls,
            server_hostname=None if tls is None else host,
        )
        return connection


class _Attempts:
    """A Sink between connections and the sink of one request, which gets the last answer only."""

    __slots__ = ("_body", "_clock", "_deadline", "_due_at", "_head", "_pool", "_sent_at", "_sink", "_tries")

    def __init__(self, pool: RemotePool, head: bytes, body: Payload, sink: Sink, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._head = head
        self._body = body
        self._sink = sink
        self._clock = clock
        self._tries = 0
        # When it is sent again; None while it is under way.
        self._due_at: float | None = None
        self._sent_at = clock()
        self._deadline = self._sent_at + pool.limits.first_byte_s

    @property
    def upstream(self) -> Connection | None:
        return self._sink.upstream

    @upstream.setter
    def upstream(self, connection: Connection | None) -> None:
        self._sink.upstream = connection
        if connection is not None:
            self._sent_at = self._clock()

    @property
    def is_just_sent(self) -> bool:
        return self._clock() - self._sent_at <= RESEND_S

    @property
    def wanted(self) -> bool:
        return self._sink.wanted

    # --- what the provider says -------------------------------------------------------------------------------------

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        failure = _failure(self._pool.name, status, headers)
        if failure is None:
            self._pool.answered(self)
            self._sink.answer(status, _shown(headers), body)
        else:
            # The connection is already another request's.
            self.upstream = None
            self._failed(failure, status, headers)

    def head(self, status: int, headers: Headers) -> None:
        failure = _failure(self._pool.name, status, headers)
        if failure is None:
            self._pool.answered(self)
            self._sink.head(status, _shown(headers))
        else:
            self._hang_up()
            self._failed(failure, status, headers)

    def body(self, data: bytes) -> None:
        self._sink.body(data)

    def complete(self) -> None:
        self._sink.complete()

    def upgraded(self, headers: Headers, rest: bytes) -> None:
        """No upgrade was asked for."""
        if self.upstream is not None:
            self.upstream.lose("switched protocols unasked")

    def lost(self, error: EngineLost, before_first_byte: bool) -> None:
        """A request that never left is sent again. One that did may have been answered, and paid for, already."""
        if self.upstream is None and before_first_byte and self._may_try_again():
            self._wait(self._backoff_s())
        else:
            self._end(error)

    # --- what the pool asks -----------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        if not self.wanted:
            self._pool.answered(self)
        elif self._due_at is not None and now >= self._due_at:
            self._due_at, self._deadline = None, now + self._pool.limits.first_byte_s
            self._pool.send_again(self._head, self._body, self)
        elif self._due_at is None and now >= self._deadline:
            upstream = self.upstream
            # First, so that it is known whether it was sent.
            self._end(RemoteTimeout(f"{self._pool.name} did not begin to answer in time."))
            if upstream is not None:
                upstream.abort()

    def stopped(self) -> None:
        """The pool is closed. What is under way was told by its connection."""
        if self._due_at is not None and self.wanted:
            self._end(self._pool.lost("was stopped"))

    # --- trying again -----------------------------------------------------------------------------------------------

    def _failed(self, failure: RemoteFailed, status: int, headers: Headers) -> None:
        wait_s = failure.retry_after_s if failure.retry_after_s is not None else self._backoff_s()
        passes = (status == 429 or status >= 500) and not _says_no(headers)
        if passes and wait_s <= RETRY_AFTER_MAX_S and self._may_try_again():
            self._wait(wait_s)
        else:
            self._end(failure)

    def _may_try_again(self) -> bool:
        return self.wanted and self._tries < self._pool.limits.retries_max and not self._pool.is_closed

    def _backoff_s(self) -> float:
        most_s = min(BACKOFF_S * 2.0**self._tries, BACKOFF_MAX_S)
        return float(most_s * (0.5 + self._pool.limits.draw() / 2))

    def _wait(self, wait_s: float) -> None:
        self._tries += 1
        self._due_at = self._clock() + wait_s

    def _hang_up(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()

    def _end(self, error: EngineLost) -> None:
        """Never "before the first byte": what could be tried again was."""
        self._pool.answered(self)
        self._sink.lost(error, False)


def _shown(headers: Headers) -> Headers:
    return [header for header in headers if header[0] in REMOTE_ANSWER_ALLOWED]


def _failure(name: str, status: int, headers: Headers) -> RemoteFailed | None:
    """The error for an answer that callers are not shown; None for an answer to the caller's own request."""
    if status in (401, 402, 403, 407):
        return RemoteRefused(f"{name} cannot be asked: its provider does not accept the gateway's account ({status}).")
    if status == 429:
        said = f"{name} is asked more than its provider allows."
        return RemoteBusy(said, retry_after_s=retry_after_s(headers))
    if status >= 500 or status < 200 or 300 <= status < 400:
        said = f"{name} failed: its provider answered {status}."
        return RemoteFailed(said, retry_after_s=retry_after_s(headers))
    return None


def retry_after_s(headers: Headers, wall: Callable[[], float] = time.time) -> float | None:
    """How long the provider asks to wait; None if it does not say, or says nonsense."""
    said = next((value for name, value in headers if name == b"retry-after"), b"").decode("latin-1")
    try:
        wait_s = float(said) if said[:1].isdigit() else parsedate_to_datetime(said).timestamp() - wall()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, wait_s)


def _says_no(headers: Headers) -> bool:
    return any(name == b"x-should-retry" and value.lower() == b"false" for name, value in headers)
