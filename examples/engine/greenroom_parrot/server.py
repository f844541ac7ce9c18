"""The program that answers: `server.py PORT MODEL PREFIX`. Any language will do; it must speak HTTP."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, MODEL, PREFIX = int(sys.argv[1]), sys.argv[2], sys.argv[3]


class Parrot(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"status": "ok"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = PREFIX + asked["messages"][-1]["content"]
        message = {"role": "assistant", "content": said}
        words = len(said.split())
        self._send(
            {
                "object": "chat.completion",
                "model": MODEL,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": words, "completion_tokens": words, "total_tokens": 2 * words},
            }
        )

    def _send(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", PORT), Parrot).serve_forever()
