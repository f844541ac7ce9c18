"""A gateway as far as the command line can tell: answers by path, and a record of what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    # What happens before the answer is sent.
    before: Callable[[], None] = lambda: None
    headers: tuple[tuple[str, str], ...] = ()
    # Close the connection in the middle of what was promised.
    cut: bool = False


def answer(value: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), status)


def error(status: int, code: str, message: str, details: str | None = None) -> Answer:
    told = {"message": message, "type": "t", "code": code, "param": None, "details": details}
    return answer({"error": told}, status)


def events(*lines: str) -> Answer:
    """An event stream; each argument is one event or comment."""
    return Answer("".join(f"{line}\n\n" for line in lines).encode(), content_type="text/event-stream; charset=utf-8")


class FakeGateway:
    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.answers: dict[tuple[str, str], Answer] = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.handle(self)

            def do_POST(self) -> None:
                fake.handle(self)

            def do_DELETE(self) -> None:
                fake.handle(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def on(self, method: str, path: str, what: Answer) -> None:
        """Answer this path, without its query, so from now on."""
        self.answers[method, path] = what

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length") or 0)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        asked = Asked(handler.command, handler.path, headers, handler.rfile.read(length))
        self.asked.append(asked)
        found = self.found(asked)
        found.before()
        # Some clients do not wait for the answer.
        with contextlib.suppress(ConnectionError):
            self._answer(handler, found)

    def found(self, asked: Asked) -> Answer:
        missing = error(404, "not_found", f"There is no {asked.target}.")
        return self.answers.get((asked.method, asked.target.partition("?")[0]), missing)

    def _answer(self, handler: BaseHTTPRequestHandler, found: Answer) -> None:
        handler.close_connection = True
        handler.send_response(found.status)
        handler.send_header("Content-Type", found.content_type)
        handler.send_header("Content-Length", str(len(found.body) + found.cut))
        for name, value in found.headers:
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(found.body)
