"""What the fake engine does: its life, its connections, its routes. `fake_engine.py` starts it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.standins import fake_gpu
from tests.standins.fake_answers import Answer, error, event, vector
from tests.standins.fake_http import Connection, Gone, Reader, Request, multipart
from tests.standins.fake_switches import ERRORS, Switches, parse_switches

# Any bytes will do for a picture.
PIXEL = "iVBORw0KGgo="
NATIVE = ("/completion", "/infill", "/tokenize", "/detokenize", "/apply-template", "/pooling", "/score")


class Hung(Exception):
    """This request is never answered."""


class Cut(Exception):
    """The connection ends here, on purpose."""


class Journal:
    """One line per event, each appended by one write, so that several engines may share a file."""

    def __init__(self, path: str | None, name: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if path else None
        self._name = name

    def note(self, event: str, **more: Any) -> None:
        if self._fd is None:
            return
        line = {"t": time.monotonic(), "pid": os.getpid(), "name": self._name, "event": event, **more}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Engine:
    """The whole program: its switches, its state, and one coroutine per connection."""

    def __init__(self, switches: Switches) -> None:
        self.switches = switches
        self.journal = Journal(switches.journal, switches.name)
        self.is_ready = False
        self.answering = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        # When each picture was begun, and what was asked, by request.
        self._drawing: dict[str, tuple[float, dict[str, Any]]] = {}

    # --- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        if self.switches.talkative:
            self._say(f"started as {sys.argv}")
        loop = asyncio.get_running_loop()
        self._server = await self.listen(loop)
        loop.add_signal_handler(signal.SIGUSR1, lambda: self._keep(asyncio.create_task(self._go_deaf())))
        await self._load()
        await loop.create_future()

    async def listen(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        if self.switches.uds:
            return await loop.create_unix_server(self._protocol, self.switches.uds)
        return await loop.create_server(self._protocol, self.switches.host, self.switches.port, reuse_address=True)

    async def _load(self) -> None:
        self._take_gpu_memory(self.switches.gpu_mib)
        if self.switches.crash_at == "load" or os.path.exists(self.switches.crash_while or ""):
            await asyncio.sleep(self.switches.load_s / 2)
            self._crash()
        await asyncio.sleep(self.switches.load_s)
        self.is_ready = True
        self.journal.note("ready")

    def _take_gpu_memory(self, mib: int) -> None:
        """As much as this in all, or out of memory, as a real engine would be."""
        if self.switches.gpu_file and not fake_gpu.take(self.switches.gpu_file, mib):
            sys.stderr.write(f"{self.switches.name}: CUDA error: out of memory\n")
            self._crash()

    def on_term(self, *_: object) -> None:
        self.journal.note("term", answering=self.answering)
        if not self.switches.ignore_term:
            os._exit(0)

    async def _go_deaf(self) -> None:
        """Stop listening and cut every connection (or none), then end; or listen again after a while."""
        self._server.close()
        for writer in () if self.switches.drains else self._writers:
            writer.transport.abort()
        self.journal.note("deaf")
        await asyncio.sleep(self.switches.deaf_s)
        if not self.switches.listens_again:
            self.journal.note("end")
            os._exit(self.switches.exit_code)
        self._server = await self.listen(asyncio.get_running_loop())
        self.journal.note("listens")

    def _crash(self) -> None:
        self._say("fatal: crashing as told")
        os._exit(self.switches.exit_code)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{self.switches.name}: {text}\n")
        sys.stderr.flush()

    # --- connections -----------------------------------------------------------------------------------------------

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        reader = Reader()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._keep(asyncio.create_task(self._serve(reader, writer)))

        return asyncio.StreamReaderProtocol(reader, connected)

    def _keep(self, task: asyncio.Task[None]) -> None:
        """The loop itself keeps no task alive."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: Reader, writer: asyncio.StreamWriter) -> None:
        """Answer one request after the other until the client leaves."""
        self._writers.add(writer)
        connection = Connection(reader, writer)
        with contextlib.suppress(ConnectionError, Gone, Cut, asyncio.IncompleteReadError):
            while request := await connection.request():
                await self._answer(connection, request)
                if request.get("connection").lower() == "close":
                    break
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, connection: Connection, request: Request) -> None:
        """Answer one request, and note how it went."""
        if request.path == "/health":
            await self._health(connection)
            return
        about = {"id": request.get("x-request-id"), "model": request.json().get("model"), "path": request.path}
        self.journal.note("request", **about, **self._recorded(request))
        self.answering += 1
        told = False

        def tell(outcome: str) -> None:
            nonlocal told
            if not told:
                told = True
                self.answering -= 1
                self.journal.note(outcome, **about)

        # Told before the last bytes go: a client that has them may stop this program before its next step.
        connection.before_last_bytes = lambda: tell("done")
        try:
            await self._route(connection, request)
            await connection.flush()
        except Cut:
            tell("done")
            raise
        except Hung:
            await connection.never_answer()
        except (TypeError, ValueError, AttributeError) as wrong:
            connection.send_json(400, error(repr(wrong), "invalid_request_error"))
        finally:
            tell("cancelled")

    def _recorded(self, request: Request) -> dict[str, Any]:
        """The request as it came, byte by byte, if the switches say so."""
        if not self.switches.record:
            return {}
        return {"method": request.method, "headers": request.headers, "body": request.body.decode("latin-1")}

    async def _health(self, connection: Connection) -> None:
        if self.switches.hang == "load":
            await connection.never_answer()
        elif self.is_ready:
            connection.send_json(200, {"status": "ok", "name": self.switches.name})
        else:
            connection.send_json(503, error("Loading model", "unavailable_error"))
        await connection.flush()

    async def _route(self, connection: Connection, request: Request) -> None:
        if self.switches.hang is not None:
            raise Hung
        if not self.is_ready:
            connection.send_json(503, error("Loading model", "unavailable_error"))
        elif request.path.startswith("/echo/"):
            connection.send_json(200, self._echo(request), head_only=request.method == "HEAD")
        elif request.path == "/progress":
            connection.send_bytes("application/json", self._progress(request.target.rpartition("=")[2]))
        elif request.path == "/page":
            connection.send_bytes("text/html", b"<script>alert(1)</script>")
        elif request.path == "/ws" and request.get("upgrade"):
            await connection.echo_raw(request.get("upgrade"))
        elif request.method == "POST" and request.path.startswith("/v1/"):
            await self._work(connection, request)
        elif request.method == "POST" and request.path in NATIVE:
            connection.send_json(200, {"content": self.switches.name, "tokens": [1, 2], "asked": request.json()})
        else:
            connection.send_json(404, error(f"no such route: {request.path}", "not_found_error"))

    # --- the API ---------------------------------------------------------------------------------------------------

    async def _work(self, connection: Connection, request: Request) -> None:
        body = request.json()
        if self.switches.talkative:
            self._say(f"prompt of {request.get('x-request-id')}: {request.body.decode('utf-8', 'replace')}")
        if body.get("crash_at", self.switches.crash_at) == "request":
            self._crash()
        if self.switches.gpu_grow_mib:
            self._take_gpu_memory(self.switches.gpu_mib + self.switches.gpu_grow_mib)
        match request.path:
            case "/v1/chat/completions" | "/v1/completions":
                await self._generate(connection, Answer(self.switches, request.path, body))
            case "/v1/embeddings":
                connection.send_json(200, self._embeddings(body))
            case "/v1/rerank":
                connection.send_json(200, self._rerank(body))
            case "/v1/images/generations":
                await self._draw(connection, request.get("x-request-id"), body)
            case "/v1/audio/speech":
                connection.send_bytes("audio/wav", f"RIFF {self.switches.name}: {body.get('input')}".encode())
            case "/v1/images/edits" | "/v1/images/variations":
                read = body if body else self._transcription(request)
                connection.send_json(200, {**self._pictures(body), **read})
            case "/v1/audio/transcriptions" | "/v1/audio/translations":
                connection.send_json(200, self._transcription(request))
            case _:
                connection.send_json(404, error(f"no such route: {request.path}", "not_found_error"))

    async def _generate(self, connection: Connection, answer: Answer) -> None:
        weird = self.switches.sse_weird if answer.is_stream else None
        if weird is not None and weird in ERRORS:
            connection.send_json(int(weird[-3:]), error("the engine failed as told", "server_error"))
        elif weird == "non-sse-200" or not answer.is_stream:
            async for _ in self._paced(connection, answer):
                pass
            if self.switches.half_body:
                connection.send_half_json(answer.whole())
                raise Hung
            connection.send_json(200, answer.whole())
        else:
            await self._stream(connection, answer, weird)

    async def _stream(self, connection: Connection, answer: Answer, weird: str | None) -> None:
        connection.start_sse()
        for delta in answer.told:
            connection.send_chunk(event(answer.delta(delta)), self.switches.split_bytes)
        async for token in self._paced(connection, answer):
            connection.send_chunk(event(answer.chunk(token)), self.switches.split_bytes)
        if weird == "broken-event":
            connection.send_chunk(b'data: {"choices":[{"del')
            await connection.flush()
            raise Cut
        if weird == "error-event":
            connection.send_chunk(event(error("no memory", "server_error")))
            connection.end_chunks()
            return
        if weird == "huge-line":
            connection.send_chunk(event(answer.chunk("x" * self.switches.huge_line_bytes)))
        connection.send_chunk(event(answer.chunk(None)))
        if answer.wants_usage_event:
            connection.send_chunk(event(answer.usage_event()), self.switches.split_bytes)
        if weird != "no-done":
            connection.send_chunk(b"data: [DONE]\n\n", self.switches.split_bytes)
        if weird == "no-end":
            raise Hung
        connection.end_chunks()

    async def _paced(self, connection: Connection, answer: Answer) -> AsyncIterator[str]:
        """The tokens at their pace, or until the point where something is told to go wrong."""
        for number, token in enumerate(answer.tokens()):
            if answer.crash_at == f"token:{number}":
                await connection.flush()
                self._crash()
            if answer.stall_after == number:
                raise Hung
            await connection.pause(answer.token_s)
            yield token
            await connection.flush()
        # The fault may be set for the moment after the last token.
        if answer.crash_at == f"token:{answer.count}":
            self._crash()
        if answer.stall_after == answer.count:
            raise Hung

    async def _draw(self, connection: Connection, request_id: str, body: dict[str, Any]) -> None:
        """Pictures after `picture_s`, or the error `fail` (status and words). Meanwhile /progress tells of it."""
        self._drawing[request_id] = (time.monotonic(), body)
        await connection.pause(body.get("picture_s", 0))
        if "fail" in body:
            status, words = body["fail"]
            connection.send_json(status, error(words, "server_error"))
        else:
            connection.send_json(200, self._pictures(body))

    def _progress(self, request_id: str) -> bytes:
        """The part of `picture_s` that has passed; or what `says` says, one after the other."""
        began, body = self._drawing[request_id]
        if says := body.get("says"):
            return str(says.pop(0) if len(says) > 1 else says[0]).encode()
        return json.dumps({"progress": (time.monotonic() - began) / body["picture_s"]}).encode()

    def _pictures(self, body: dict[str, Any]) -> dict[str, Any]:
        """As told by `data`, or `n` times the same; with `response_format` as it came."""
        data = body.get("data", [{"b64_json": PIXEL}] * body.get("n", 1))
        return {"created": 1, "data": data, "asked_for": body.get("response_format")}

    def _embeddings(self, body: dict[str, Any]) -> dict[str, Any]:
        texts = body.get("input", "")
        texts = texts if isinstance(texts, list) else [texts]
        rows = [{"object": "embedding", "index": at, "embedding": vector(text)} for at, text in enumerate(texts)]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return self._with_usage({"object": "list", "model": self.switches.name, "data": rows}, usage)

    def _rerank(self, body: dict[str, Any]) -> dict[str, Any]:
        documents = body.get("documents", [])
        rows = [{"index": at, "relevance_score": 1.0 / (1 + at)} for at in range(len(documents))]
        usage = {"prompt_tokens": len(documents), "total_tokens": len(documents)}
        return self._with_usage({"model": self.switches.name, "results": rows}, usage)

    def _with_usage(self, answer: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        return answer if self.switches.no_usage else {**answer, "usage": usage}

    def _transcription(self, request: Request) -> dict[str, Any]:
        fields = dict(multipart(request))
        model = fields.get("model", b"").decode("utf-8", "replace")
        sizes = {name: len(value) for name, value in fields.items()}
        return {"text": f"{self.switches.name} heard", "fields": list(fields), "sizes": sizes, "model": model}

    def _echo(self, request: Request) -> dict[str, Any]:
        return {
            "name": self.switches.name,
            "method": request.method,
            "path": request.target,
            "headers": request.headers,
            "body_length": len(request.body),
            "body_sha256": hashlib.sha256(request.body).hexdigest(),
            "json": request.json() or None,
        }


def fork_setsid(journal: Journal) -> None:
    """Leave a child in a session of its own, deaf to SIGTERM, as engines with worker processes do."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(3600)
    journal.note("forked", child=child)


def note_if_doubled(path: str, journal: Journal) -> None:
    """Hold a lock until the last process of this engine has ended: if it is held, a second engine of the model runs."""
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        journal.note("doubled")


def main() -> None:
    switches = parse_switches()
    engine = Engine(switches)
    signal.signal(signal.SIGTERM, engine.on_term)
    engine.journal.note("start", port=switches.port)
    if switches.lock:
        note_if_doubled(switches.lock, engine.journal)
    if switches.exit_zero_without_listening:
        sys.exit(0)
    if switches.exit_before_bind:
        sys.stderr.write(f"{switches.name}: fatal: could not open the model file\n")
        sys.exit(switches.exit_code)
    if switches.fork_setsid:
        fork_setsid(engine.journal)
    asyncio.run(engine.run())
