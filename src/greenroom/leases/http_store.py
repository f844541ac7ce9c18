"""A client of a gateway's lease API over HTTP.

Owns the calls and the translation of answers and errors. Uses only the standard library, so that any training program
can import it. Each call has its own connection and thread. A cancelled call cuts its connection, by which the gateway
sees that its caller has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlsplit

from greenroom.errors import (
    BadRequest,
    GreenroomError,
    InvalidKey,
    LeaseDenied,
    LeaseLost,
    LeaseTaken,
    LeaseTooLarge,
    LeaseUnknown,
    NotAllowed,
    StoreDown,
)
from greenroom.leases.answers import WHOLE_MAX, Answer, Deadline, Fields, Request, connection_to, exchanged, json_of
from greenroom.leases.records import Holder, Lease, LeaseAsk, is_program_id

PATH: Final = "/api/v1/leases"
# Beyond the wait that was asked for: the gateway decides at once and writes one line to disk.
ANSWER_MAX_S: Final = 30.0
# Of seconds to wait.
DIGITS_MAX: Final = 9
_BY_CODE: Final = {one.code: one for one in (LeaseDenied, LeaseLost, LeaseTaken, LeaseUnknown)}
_BY_STATUS: Final = {401: InvalidKey, 403: NotAllowed, 408: StoreDown, 429: StoreDown}

Result = TypeVar("Result")


class HttpStore:
    def __init__(
        self, url: str, key: str | None = None, *, answer_max_s: float = ANSWER_MAX_S, op_token: str | None = None
    ) -> None:
        """Raises BadRequest for an invalid address. Connects to nothing yet. `op_token` permits the first lease."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._op_token = op_token
        self._answer_max_s = answer_max_s
        try:
            parts = urlsplit(self._url)
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise BadRequest(f"{url} is no address: {error}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise BadRequest(f"{url} is no address of a gateway; write it like http://127.0.0.1:8210.")
        self._is_tls, self._host, self._prefix = parts.scheme == "https", parts.hostname, parts.path

    async def acquire(self, ask: LeaseAsk) -> Lease:
        # Whole seconds as whole numbers, which have one canonical form.
        body = {
            key: int(one) if isinstance(one, float) and one.is_integer() else one for key, one in asdict(ask).items()
        }
        # Only gateways use these, and not between each other.
        del body["shares"]
        return await self._call("POST", PATH, body, _lease, ask.wait_s + self._answer_max_s)

    async def renew(self, id: str, token: int) -> Lease:
        if not is_program_id(id):
            raise LeaseUnknown(f"There is no lease {id!r}: no program's lease is called so.")
        return await self._call("POST", f"{_path(id)}/renew", {"token": token}, _lease)

    async def release(self, id: str, token: int | None = None) -> None:
        query = "" if token is None else f"?token={token}"
        if is_program_id(id):
            await self._call("DELETE", _path(id) + query, None, lambda nothing: None)

    async def leases(self) -> list[Lease]:
        return await self._call("GET", PATH, None, lambda said: [_lease(one) for one in said.each("leases")])

    async def close(self) -> None:
        """Nothing is kept open between calls."""

    async def _call(
        self, method: str, path: str, body: object, read: Callable[[Fields], Result], answer_max_s: float | None = None
    ) -> Result:
        request = (method, self._prefix + path, None if body is None else json.dumps(body).encode(), self._headers())
        deadline = Deadline(answer_max_s or self._answer_max_s)
        connection = connection_to(self._host, self._port, deadline, is_tls=self._is_tls)
        try:
            status, headers, content = await _HttpCall(connection, request, deadline).answer()
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise StoreDown(f"The gateway at {self._url} does not answer ({why}).", retry_after_s=1.0) from None
        try:
            # A release has no answer but its status.
            said = Fields(json_of(content) if content else {})
            if status < 300:
                return read(said)
            raise _error(status, headers, said.inner("error"))
        except ValueError:
            raise StoreDown(f"What answers at {self._url} is no gateway (status {status}).") from None

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Connection": "close", "Content-Type": "application/json"}
        if self._op_token is not None:
            headers["X-Verified-Op-Token"] = self._op_token
        return headers if self._key is None else {**headers, "Authorization": f"Bearer {self._key}"}


class _HttpCall:
    """One request and its answer, made in a thread whose connection can be cut."""

    def __init__(self, connection: http.client.HTTPConnection, request: Request, deadline: Deadline) -> None:
        self._connection = connection
        self._request = request
        self._deadline = deadline
        self._is_cut = False

    async def answer(self) -> Answer:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Answer] = loop.create_future()

        def run() -> None:
            try:
                answer = self._made()
            except Exception as error:
                _tell(loop, done, error)
            else:
                _tell(loop, done, answer)

        threading.Thread(target=run, name="greenroom lease call", daemon=True).start()
        try:
            return await done
        finally:
            if not done.done() or done.cancelled():
                self._cut()

    def _made(self) -> Answer:
        with contextlib.closing(self._connection) as connection:
            connection.connect()
            if self._is_cut:
                raise OSError("was cut off")
            return exchanged(connection, self._request, self._deadline)

    def _cut(self) -> None:
        self._is_cut = True
        # The thread may still be connecting, or be done.
        with contextlib.suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], said: Any) -> None:
    def tell() -> None:
        if done.done():
            return
        if isinstance(said, Exception):
            done.set_exception(said)
        else:
            done.set_result(said)

    # A closed loop raises this; no caller is left then.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)


def _path(lease: str) -> str:
    return f"{PATH}/{quote(lease, safe='')}"


def _lease(said: Fields) -> Lease:
    holder = said.inner_or_none("holder")
    return Lease(
        id=said.text("id"),
        name=said.text("name"),
        token=said.whole("token"),
        claim=said.inner("claim").wholes(),
        priority=said.whole("priority", -WHOLE_MAX),
        preemptible=said.flag("preemptible"),
        state=said.text("state"),
        ttl_s=said.number("ttl_s"),
        expires_in_s=said.number("expires_in_s"),
        recall_in_s=said.number_or_none("recall_in_s"),
        holder=None if holder is None else _holder(holder),
        kind=said.text("kind"),
    )


def _holder(said: Fields) -> Holder:
    return Holder(said.text("host"), said.whole("pid"), said.whole("start_ticks"), said.whole("pid_ns"))


def _error(status: int, headers: Mapping[str, str], said: Fields) -> GreenroomError:
    """The gateway's error, with its message and numbers."""
    message, code = said.text("message"), said.text("code")
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or (StoreDown if status >= 500 else BadRequest)
    if kind is LeaseDenied and headers.get("x-should-retry") == "false":
        kind = LeaseTooLarge
    retry_after = headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() and len(retry_after) <= DIGITS_MAX else None
    beside = said.except_for(_SHOWN)
    return kind(message, param=said.text_or_none("param"), retry_after_s=retry_after_s, beside=beside)


_SHOWN: Final = frozenset({"message", "type", "code", "param", "details"})
