"""An engine whose answers begin with the head that a request asks for: its last path segment names one of `HEADS`.

python -I -S odd_heads_engine.py --port 9000
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_BODY = b'{"choices": []}'
_FRAME = b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY
HEADS = {
    "cookies": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Type: text/html\r\nSet-Cookie: a=1\r\n"
    b"X-Model: theirs\r\nX-Model-Version: 9\r\nX-Request-Id: theirs\r\nX-RateLimit-Limit: 1\r\nClear-Site-Data: *\r\n"
    b"Refresh: 0; url=/\r\nETag: kept\r\n",
    "switches": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n",
    "switches_unsaid": b"HTTP/1.1 101 Switching Protocols\r\n",
    "status_099": b"HTTP/1.1 099 Odd\r\n",
    "status_600": b"HTTP/1.1 600 Odd\r\n",
}


class _Odd(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        head = HEADS.get(self.path.rpartition("/")[2], b"HTTP/1.1 200 OK\r\n")
        self.wfile.write(head + _FRAME)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), _Odd).serve_forever()
