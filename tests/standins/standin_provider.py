"""A provider of remote models on loopback, under TLS with a certificate of the tests' own. It counts its calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

from tests.waiting import until

KEY = "sk-of-the-gateway"
# What a provider adds to its answers, and no caller may see.
THEIRS = "set-cookie: __cf_bm=1\r\nopenai-organization: org-secret\r\nx-ratelimit-remaining-tokens: 7\r\n"


@dataclass
class Call:
    """One request as the provider got it."""

    target: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Provider:
    """`script` holds answers for the next calls, as status, headers and body; then every call is answered well.

    An answer with the status 0 is none: the connection is cut.
    """

    port: int
    ca_file: Path
    calls: list[Call] = field(default_factory=list)
    connections: int = 0
    script: list[tuple[int, str, bytes]] = field(default_factory=list)
    # Cleared while answers are held back.
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    usage: dict[str, int] = field(default_factory=lambda: {"prompt_tokens": 1000, "completion_tokens": 200})

    def remote(self, **keys: Any) -> dict[str, Any]:
        """An entry of `remotes` that leads here."""
        address = f"https://localhost:{self.port}/api/v1"
        return {"base_url": address, "ca_file": str(self.ca_file), "api_key_env": "STANDIN_KEY", **keys}

    async def answer(self, call: Call) -> bytes:
        self.calls.append(call)
        await self.may_answer.wait()
        if self.script:
            status, headers, body = self.script.pop(0)
            return _message(status, headers, body) if status else b""
        return self._chat(call.body)

    def _chat(self, asked: dict[str, Any]) -> bytes:
        made = {"id": "c-1", "created": 1, "model": asked.get("model")}
        if not asked.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
            whole = {**made, "object": "chat.completion", "choices": [choice], "usage": self.usage}
            return _message(200, "content-type: application/json\r\n", json.dumps(whole).encode())
        made["object"] = "chat.completion.chunk"
        events: list[dict[str, Any]] = [
            {**made, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
            for word in ("hel", "lo")
        ]
        events.append({**made, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if asked.get("stream_options", {}).get("include_usage"):
            events.append({**made, "choices": [], "usage": self.usage})
        lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        lines.append(b"data: [DONE]\n\n")
        head = f"HTTP/1.1 200 OK\r\n{THEIRS}content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(line), line) for line in (*lines, b""))


def _message(status: int, headers: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} Told\r\n{THEIRS}{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextlib.asynccontextmanager
async def provider(folder: Path, name: str = "localhost") -> AsyncIterator[Provider]:
    """A provider whose certificate is for this name."""
    authority = trustme.CA()
    ca_file = folder / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there.connections += 1
        writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                said = await there.answer(await _call(reader))
                if not said:
                    writer.transport.abort()
                    break
                writer.write(said)
                await writer.drain()
        writers.discard(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    there = Provider(server.sockets[0].getsockname()[1], ca_file)
    there.may_answer.set()
    try:
        yield there
    finally:
        server.close()
        for writer in list(writers):
            writer.transport.abort()


async def long_before_midnight() -> None:
    """Wait until the day (UTC), by which spending is counted, does not end within a test: at most two minutes."""
    await until(lambda: time.time() % 86_400 < 86_280, "the next day has begun")


async def _call(reader: asyncio.StreamReader) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Call(first.split(" ")[1], headers, json.loads(body) if body else {})
