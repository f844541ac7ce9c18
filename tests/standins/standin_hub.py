"""A hub on loopback that misbehaves on command: repositories in memory, the API that huggingface_hub asks, and files.

Owns the bytes and every fault: a switch is a field of `Faults`, or a number of answers that it spoils first.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

PIECE = 4096


@dataclass
class Faults:
    """Numbers count down: that many answers for bytes are spoiled, then they are right."""

    refuse: int = 0
    refuse_with: int = 503
    retry_after: str | None = None
    cut: int = 0
    """The connection ends in the middle of the bytes."""
    stall: int = 0
    """Half of the bytes come, then nothing."""
    wrong_hash: int = 0
    wrong_size: int = 0
    html: int = 0
    no_ranges: bool = False
    wrong_range: int = 0
    redirect: str | None = None
    """Where bytes are instead: a prefix to which the path is added."""
    redirect_api: str | None = None
    gated: bool = False
    gated_bytes: bool = False
    """Every caller may look at the repository, but not every one at its files."""
    api_refuse: int = 0
    api_with: int = 503
    api_body: bytes | None = None
    """The answer about a repository, instead of the right one."""
    api_headers: dict[str, str] = field(default_factory=dict)
    drips: str | None = None
    """Of the answer about a repository, `head` or `body` comes byte by byte, and never ends."""
    drip_s: float = 0.0
    """Between two pieces."""
    etag: str | None = None
    """Empty: none is sent."""
    ignores_if_range: bool = False
    never_says_length: bool = False
    """The end of the connection is the end of the bytes."""

    def takes(self, name: str) -> bool:
        left = getattr(self, name)
        if left > 0:
            setattr(self, name, left - 1)
        return bool(left > 0)


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class StandinHub:
    port: int
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    small: frozenset[str] = frozenset({"config.json", "README.md"})
    """Names of files that are in git itself, and have no sha256."""
    listed: dict[str, Any] = field(default_factory=dict)
    """What the API says of a file instead of the truth, by path."""
    plain: dict[str, bytes] = field(default_factory=dict)
    """Files at paths of their own."""
    older: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """What repositories held before, by commit."""
    tags: set[str] = field(default_factory=set)
    """Names of the newest revision, besides main."""
    renamed: dict[str, str] = field(default_factory=dict)
    """New names of repositories by their old ones."""
    token: str | None = None
    """Without it every repository is hidden."""
    faults: Faults = field(default_factory=Faults)
    seen: list[Seen] = field(default_factory=list)
    sent: int = 0
    """Bytes of files that were sent."""
    stopping: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def files(self, repo: str, revision: str = "") -> dict[str, bytes]:
        return self.older.get(revision) or self.repos.get(repo, {})

    def commit(self, repo: str, revision: str = "") -> str:
        return hashlib.sha1(json.dumps(sorted(map(repr, self.files(repo, revision).items()))).encode()).hexdigest()

    def asked_for(self, name: str) -> list[Seen]:
        return [one for one in self.seen if one.method == "GET" and one.path.endswith(name)]

    def info(self, repo: str, revision: str = "") -> dict[str, Any]:
        siblings = [self._sibling(path, data) for path, data in self.files(repo, revision).items()]
        return {"id": repo, "modelId": repo, "sha": self.commit(repo, revision), "private": False, "siblings": siblings}

    def _sibling(self, path: str, data: bytes) -> dict[str, Any]:
        about: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
        if path not in self.small:
            sha256 = hashlib.sha256(data).hexdigest()
            about["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 130}
        return about | self.listed.get(path, {})


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandinHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.seen.append(Seen(self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        try:
            if path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"))
            else:
                self._file(path)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _api(self, rest: str) -> None:
        hub = self.hub
        repo, _, revision = rest.partition("/revision/")
        if hub.faults.redirect_api is not None:
            return self._say(307, {"Location": hub.faults.redirect_api})
        if repo in hub.renamed:
            return self._say(307, {"Location": f"/api/models/{hub.renamed[repo]}?blobs=true"})
        if hub.faults.takes("api_refuse"):
            return self._refused(hub.faults.api_with)
        if repo not in hub.repos or (hub.token and self.headers.get("authorization") != f"Bearer {hub.token}"):
            return self._say(404 if hub.token is None else 401, {"X-Error-Code": "RepoNotFound"})
        if hub.faults.gated:
            return self._say(403, {"X-Error-Code": "GatedRepo"})
        if revision not in ("", "main", hub.commit(repo), *hub.tags, *hub.older):
            return self._say(404, {"X-Error-Code": "RevisionNotFound"})
        if hub.faults.drips is not None:
            return self._drip(hub.faults.drips)
        body = json.dumps(hub.info(repo, revision)).encode() if hub.faults.api_body is None else hub.faults.api_body
        return self._say(200, {"Content-Type": "application/json", **hub.faults.api_headers}, body)

    def _drip(self, part: str) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        if part == "body":
            self.wfile.write(b"Content-Length: 1000000\r\n\r\n[")
        while not self.hub.stopping.wait(0.02):
            self.wfile.write(b" " if part == "body" else b"X: y\r\n")
            self.wfile.flush()

    def _file(self, path: str) -> None:
        hub, faults = self.hub, self.hub.faults
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo in hub.renamed:
            return self._say(307, {"Location": f"/{hub.renamed[repo]}/resolve/{rest}"})
        data = hub.plain.get(path) if path in hub.plain else hub.files(repo, revision).get(name)
        if data is None:
            return self._say(404, {})
        if faults.redirect is not None:
            return self._say(302, {"Location": faults.redirect + path})
        if faults.gated_bytes:
            return self._say(403, {"X-Error-Code": "GatedRepo"})
        if faults.takes("refuse"):
            return self._refused(faults.refuse_with)
        if faults.takes("html"):
            return self._say(200, {"Content-Type": "text/html; charset=utf-8"}, b"<h1>Please log in</h1>")
        return self._bytes(data, {} if path in hub.plain else self._about(hub.commit(repo, revision), name, data))

    def _about(self, commit: str, name: str, data: bytes) -> dict[str, str]:
        """What the hub's own client wants to know before it asks for bytes."""
        digest = git_sha1(data) if name in self.hub.small else hashlib.sha256(data).hexdigest()
        linked = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        return {"X-Repo-Commit": commit, "ETag": f'"{digest}"', **linked}

    def _refused(self, status: int) -> None:
        wait = self.hub.faults.retry_after
        self._say(status, {} if wait is None else {"Retry-After": wait})

    def _bytes(self, data: bytes, about: Mapping[str, str]) -> None:
        faults = self.hub.faults
        if faults.takes("wrong_hash"):
            data = data[:-1] + bytes([data[-1] ^ 1])
        if faults.takes("wrong_size"):
            data += b"more"
        etag = f'"{hashlib.md5(data).hexdigest()}"' if faults.etag is None else faults.etag
        start, asked = 0, self.headers.get("range", "")
        is_same = faults.ignores_if_range or self.headers.get("if-range", etag) == etag
        if asked and not faults.no_ranges and is_same:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        if start and start >= len(data):
            self._say(416, {})
            return
        headers = {"Content-Length": str(len(data) - start), "ETag": etag, **about}
        if faults.never_says_length:
            headers |= {"Content-Length": "", "Connection": "close"}
        if start:
            said = start + 1 if faults.takes("wrong_range") else start
            headers["Content-Range"] = f"bytes {said}-{len(data) - 1}/{len(data)}"
        self._head(206 if start else 200, {"Content-Type": "application/octet-stream"} | headers)
        if self.command == "HEAD":
            return
        end = len(data)
        cut, stall = faults.takes("cut"), faults.takes("stall")
        if cut or stall:
            end = start + (len(data) - start) // 2
        self._send(data[start:end])
        if stall:
            self.hub.stopping.wait(30)
        if cut or stall:
            self.close_connection = True

    def _send(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            self.wfile.write(piece)
            with self.hub.lock:
                self.hub.sent += len(piece)
            if self.hub.faults.drip_s:
                time.sleep(self.hub.faults.drip_s)

    def _say(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self._head(status, {"Content-Length": str(len(body)), **headers})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are killed in the middle of an answer."""


@contextmanager
def standin_hub(host: str = "127.0.0.1") -> Iterator[StandinHub]:
    server = _Server((host, 0), _Handler)
    hub = StandinHub(server.server_address[1])
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
