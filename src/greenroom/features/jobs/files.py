"""What is kept of a job: the head of its request, and its answer, written as it comes.

Owns which headers are kept, and how what an exchange sends becomes a head and a body on disk. Where that is, and how
much of it may be, is said by `runtime/operations/table.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from greenroom.dialects.dialect import Route
from greenroom.errors import BadRequest, GatewayBug, OperationStoreFull, shown
from greenroom.http.exchange import RawReceiver
from greenroom.http.headers import NEVER_FORWARDED
from greenroom.http.request import Head
from greenroom.runtime.operations.files import ResultPart
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


def unwritten() -> AnswerFile:
    """For a request that is only read, and never answered."""
    return AnswerFile(_no_answer, lambda: None)


def _split(data: bytes) -> tuple[StoredAnswer, bytes]:
    """The head that an exchange wrote, and what follows it."""
    head, _, body = data.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    pairs = (header.partition(b": ") for header in headers)
    kept = tuple(
        (name.decode("latin-1"), value.decode("latin-1")) for name, _, value in pairs if name not in _OF_THE_MOMENT
    )
    return StoredAnswer(int(line.split(b" ")[1]), kept), body


def _no_answer() -> ResultPart:
    raise GatewayBug("A request that is only read was answered.")


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
