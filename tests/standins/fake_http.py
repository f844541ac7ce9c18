"""HTTP/1.1 as far as the fake engine needs it: requests in, answers out, and the news that a client has gone.

Never checks what it is sent: its only client is the gateway under test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

HEADER_BYTES_MAX = 64 * 1024
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many", 500: "Error", 503: "Unavailable"}


class Gone(Exception):
    """The client closed its connection."""


class Reader(asyncio.StreamReader):
    """A stream reader that says at once when the client has gone, also while nothing reads."""

    def __init__(self) -> None:
        super().__init__(limit=HEADER_BYTES_MAX)
        self.gone = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.gone.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.gone.set()


class Request:
    def __init__(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.method = method
        self.target = target
        self.path = target.partition("?")[0]
        self.headers = headers
        self.body = body

    def get(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class Connection:
    """HTTP/1.1 on one connection: requests in, answers out, and the news that the client has gone."""

    def __init__(self, reader: Reader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.before_last_bytes: Callable[[], None] = lambda: None

    async def request(self) -> Request | None:
        """The next request, None when the client is done."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        headers = [(name.lower(), value.strip()) for name, _, value in pairs]
        request = Request(method, target, headers, b"")
        request.body = await self._body(request)
        return request

    async def _body(self, request: Request) -> bytes:
        if request.get("transfer-encoding").lower() != "chunked":
            return await self._reader.readexactly(int(request.get("content-length") or 0))
        body = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")
        return body

    def send_json(self, status: int, value: object, *, head_only: bool = False) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self.before_last_bytes()
        self._writer.write(head.encode() + b"\r\n\r\n" + (b"" if head_only else body))

    def send_bytes(self, kind: str, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.before_last_bytes()
        self._writer.write(head.encode() + body)

    def send_half_json(self, value: object) -> None:
        """The head with its promised length, and the first half of the body."""
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body[: len(body) // 2])

    def start_sse(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._writer.write(head)

    def send_chunk(self, data: bytes, split_bytes: int = 0) -> None:
        """As one chunk, or as several of this size."""
        step = split_bytes or len(data)
        for piece in (data[at : at + step] for at in range(0, len(data), step)):
            self._writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end_chunks(self) -> None:
        self.before_last_bytes()
        self._writer.write(b"0\r\n\r\n")

    async def flush(self) -> None:
        """Wait until the client has taken most of what was written. Raises Gone when it has left."""
        await self._writer.drain()
        if self._reader.gone.is_set():
            raise Gone

    async def pause(self, seconds: float) -> None:
        """Sleep, unless the client leaves. Raises Gone then."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reader.gone.wait(), timeout=seconds)
        else:
            # The loop must get its turn to notice that the client has gone.
            await asyncio.sleep(0)
        if self._reader.gone.is_set():
            raise Gone

    async def never_answer(self) -> None:
        await self._reader.gone.wait()
        raise Gone

    async def echo_raw(self, protocol: str) -> None:
        """Switch protocols and send every byte back until the client leaves."""
        head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n"
        self._writer.write(head.encode())
        while data := await self._reader.read(64 * 1024):
            self._writer.write(data)
            await self._writer.drain()
        raise Gone


def multipart(request: Request) -> Iterator[tuple[str, bytes]]:
    """(name, value) of each field, in the order they were sent."""
    boundary = request.get("content-type").partition("boundary=")[2].strip('"').encode()
    for part in request.body.split(b"--" + boundary)[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        yield head.partition(b'name="')[2].partition(b'"')[0].decode(), value.removesuffix(b"\r\n")
