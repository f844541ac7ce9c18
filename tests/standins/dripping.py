"""A server whose answers never end: each byte comes before anybody would call it silent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

# What comes first, and what comes again and again.
DRIPS = {
    "head": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "one line": (b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "100": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}
EVERY_S = 0.02


@contextlib.contextmanager
def dripping_server(kind: str) -> Iterator[str]:
    """Its address. Every connection gets one of `DRIPS`."""
    over = threading.Event()

    def drip(caller: socket.socket) -> None:
        first, again = DRIPS[kind]
        with caller, contextlib.suppress(OSError):
            caller.sendall(first)
            while not over.wait(EVERY_S):
                caller.sendall(again)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
