"""A plain HTTP/1.1 client that hides nothing: half requests, single events, and both ways of leaving."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from greenroom.app import App
from greenroom.http.edge import Edge
from tests.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"
LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
    """`whole` is False when the connection ended before the answer did."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool = True

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json()["error"]
        return found

    @property
    def text(self) -> str:
        """What the model said, also in a stream, which must be whole then."""
        if "event-stream" not in self.headers.get("content-type", ""):
            said: str = self.json()["choices"][0]["message"]["content"]
            return said
        assert self.whole and self.data[-1] == "[DONE]"
        choices = [choice for event in self.data[:-1] for choice in event["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    @property
    def events(self) -> list[str]:
        """The events of a stream, comments included."""
        return [event for event in self.body.decode().replace("\r\n", "\n").split("\n\n") if event]

    @property
    def data(self) -> list[Any]:
        """The decoded data of a stream's events; the last one, [DONE], stays text."""
        found = (event[6:] for event in self.events if event.startswith("data: "))
        return [value if value == "[DONE]" else json.loads(value) for value in found]


class Raw:
    """One connection to a gateway."""

    def __init__(self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._sock = sock
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, app: App, edge: Edge | None = None) -> Raw:
        """`edge` is another listener of this gateway."""
        host, _, port = (edge or app.edge).addresses[0].rpartition(":")
        sock = socket.create_connection((host, int(port)))
        sock.setblocking(False)
        return cls(sock, *await asyncio.open_connection(sock=sock, limit=LIMIT_BYTES))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(self, body: Mapping[str, Any], *, path: str = CHAT, headers: Mapping[str, str] | None = None) -> None:
        self.send(request_bytes("POST", path, json.dumps(body).encode(), headers))

    async def head(self) -> tuple[int, dict[str, str]]:
        """The head of the next answer."""
        async with asyncio.timeout(PATIENCE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        pairs = (line.partition(":") for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """The next answer, to its end."""
        status, headers = await self.head()
        if bodiless or status in (204, 304):
            return Answer(status, headers, b"")
        async with asyncio.timeout(PATIENCE_S):
            return await self.rest(status, headers)

    async def rest(self, status: int, headers: dict[str, str]) -> Answer:
        """The answer whose head was this."""
        if "content-length" in headers:
            try:
                return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            except asyncio.IncompleteReadError as cut:
                return Answer(status, headers, cut.partial, whole=False)
        body = b""
        while (chunk := await self.chunk()) is not None:
            if not chunk:
                return Answer(status, headers, body)
            body += chunk
        return Answer(status, headers, body, whole=False)

    async def chunk(self) -> bytes | None:
        """The next chunk; empty at the end of the answer, None when the connection ended before it."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                size = int(await self.reader.readuntil(b"\r\n"), 16)
                if not size:
                    # Trailers, to the empty line.
                    while await self.reader.readuntil(b"\r\n") != b"\r\n":
                        pass
                    return b""
                return (await self.reader.readexactly(size + 2))[:-2]
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def is_closed(self) -> bool:
        """Wait until the other side has closed; whether it said nothing more."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True

    def leave(self, how: str = "FIN") -> None:
        """Go without a word, in order (FIN) or abruptly (RST); or only say that nothing more is sent (HALF)."""
        if how == "HALF":
            self.writer.write_eof()
            return
        if how == "RST":
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort() if how == "RST" else self.writer.close()

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()


def request_bytes(method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None) -> bytes:
    named = {"Host": "localhost", **(headers or {})}
    if body is not None:
        named = {"Content-Type": "application/json", "Content-Length": str(len(body)), **named}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


async def http(
    app: App,
    method: str,
    path: str,
    value: Any = None,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    edge: Edge | None = None,
) -> Answer:
    """One request on a connection of its own. `value` is sent as JSON, `body` as it is."""
    if value is not None:
        body = json.dumps(value).encode()
    async with await Raw.open(app, edge) as raw:
        raw.send(request_bytes(method, path, body, headers))
        return await raw.answer(bodiless=method == "HEAD")


def asking(model: str, **more: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}


async def chat(app: App, model: str, *, headers: Mapping[str, str] | None = None, **more: Any) -> Answer:
    return await http(app, "POST", CHAT, asking(model, **more), headers=headers)
