"""Runs an ASGI application behind our edge, for the management API: rare, small requests with a published schema.

Owns the translation between an exchange and ASGI's messages, back-pressure and a leaving client included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypedDict

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

from greenroom.access.keys import STRANGER, Caller
from greenroom.errors import BadRequest, GatewayBug, NotAllowed
from greenroom.http.body import Body
from greenroom.http.exchange import Exchange
from greenroom.http.request import Head
from greenroom.library.orders import DownloadOrder
from greenroom.serving import render
from greenroom.serving.body.outline import count_values
from greenroom.telemetry.logs import get_logger

_log = get_logger("server")

JOBS_PATH: Final = b"/v1/jobs"
# The management API takes small JSON only, but for orders of jobs.
MANAGEMENT_BODY_MAX: Final = 1024 * 1024
# Values in one body: each may become a mistake that is told. Bodies up to this size cannot have more.
VALUES_MAX: Final = 10_000
COUNTED_BYTES: Final = 16 * 1024


class AsgiBridge:
    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(
        self, exchange: Exchange, path: bytes, request_id: str, *, is_admin: bool, caller: Caller | None = None
    ) -> None:
        """Answer this request. Handlers find `request_id`, `is_admin` and `caller` in the scope's state."""
        state = {"request_id": request_id, "is_admin": is_admin, "caller": caller, "body": exchange.body}
        # Made before its task runs: the client may leave first, and the application must be told.
        call = _AsgiCall(exchange, request_id)
        running = self._run(call, exchange, scope_of(exchange.head, path, state), request_id)
        task = asyncio.get_running_loop().create_task(running, name=f"asgi {request_id}")
        self._tasks.add(task)
        # By callback: a task that is cancelled before its first step never enters its body.
        task.add_done_callback(lambda task: self._ended(task, exchange))

    def close(self) -> None:
        """End streams that would go on for ever (events, logs)."""
        for task in list(self._tasks):
            task.cancel()

    async def _run(self, call: _AsgiCall, exchange: Exchange, scope: Scope, request_id: str) -> None:
        try:
            # The values of a job's request are counted when it is read.
            if len(exchange.body) > COUNTED_BYTES and scope["path"] != JOBS_PATH.decode():
                await count_values(exchange.body, VALUES_MAX)
            await self._application(scope, call.receive, call.send)
        except BadRequest as error:
            exchange.respond(*render.response(error, request_id, to_operator=False))
        except Exception as bug:
            _log.error("management request broke", request=request_id, path=scope["path"], error=repr(bug))
            if not exchange.started and not exchange.gone:
                told = GatewayBug("Something went wrong in the gateway.")
                exchange.respond(*render.response(told, request_id, to_operator=False))

    def _ended(self, task: asyncio.Task[None], exchange: Exchange) -> None:
        self._tasks.discard(task)
        if exchange.started:
            exchange.finish()
        else:
            exchange.cut()


def asked_by_admin(request: Request) -> bool:
    """Whether the caller may see everything: an admin, or a key with the verb `read`."""
    return bool(request.scope.get("state", {}).get("is_admin"))


def caller_of(request: Request) -> Caller:
    """The caller, also of the open paths, which have none to know."""
    caller = request.scope.get("state", {}).get("caller")
    return caller if isinstance(caller, Caller) else STRANGER


class OperationOwner(TypedDict):
    tenant: str
    key: str


def owner_of(request: Request) -> OperationOwner:
    """In whose name an operation is kept."""
    caller = caller_of(request)
    return OperationOwner(tenant=caller.tenant or caller.name, key=caller.name)


def order_to_fetch(request: Request, read: Callable[[], DownloadOrder]) -> DownloadOrder:
    """What this call may fetch: the order that was judged when its token was checked, else what `read` makes of it.

    Raises NotAllowed if the call was judged as one that fetches nothing.
    """
    state = request.scope.get("state", {})
    if "fetch" not in state:
        return read()
    order = state["fetch"]
    if not isinstance(order, DownloadOrder):
        raise NotAllowed("The model was on disk when the token was checked, and is not any more. Sign the call again.")
    return order


def body_of(request: Request) -> Body:
    """The body as the edge holds it, for what is too long to be read at once."""
    body = request.scope["state"]["body"]
    assert isinstance(body, Body)
    return body


class _AsgiCall:
    """One request as ASGI sees it."""

    def __init__(self, exchange: Exchange, request_id: str) -> None:
        self._exchange = exchange
        self._request_id = request_id
        self._body_given = False
        self._left = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        exchange.listener = self
        # Status, headers and the length, if the application gives it.
        self._head: tuple[int, list[tuple[bytes, bytes]], int | None] | None = None

    def client_gone(self) -> None:
        self._left.set()
        self._may_write.set()

    def client_paused(self) -> None:
        self._may_write.clear()

    def client_resumed(self) -> None:
        self._may_write.set()

    async def receive(self) -> Message:
        if not self._body_given and not self._exchange.gone:
            self._body_given = True
            return {"type": "http.request", "body": self._exchange.body.read(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        exchange = self._exchange
        if exchange.gone:
            return
        if message["type"] == "http.response.start":
            given = [(name.lower(), value) for name, value in message["headers"]]
            length = next((int(value) for name, value in given if name == b"content-length"), None)
            headers = [(name, value) for name, value in given if name != b"content-length"]
            self._head = (message["status"], [*headers, (b"x-request-id", self._request_id.encode())], length)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._head is not None:
            (status, headers, length), self._head = self._head, None
            if not more:
                exchange.respond(status, headers, body)
                return
            exchange.start(status, headers, length)
        await self._may_write.wait()
        exchange.write(body)
        if not more:
            exchange.finish()


def scope_of(head: Head, path: bytes, state: dict[str, Any]) -> Scope:
    """A request as ASGI describes it; `path` is the path to route."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": head.http_version,
        "method": head.method.decode("ascii"),
        "scheme": "http",
        "path": path.decode("utf-8", "replace"),
        "raw_path": head.path,
        "query_string": head.query,
        "root_path": "",
        "headers": head.headers,
        "client": (head.peer_ip, 0),
        "server": None,
        "state": state,
    }
