"""The fake engine does what its switches say: other tests rest on it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.standins.fake_switches import parse_switches
from tests.waiting import until_now

from .trees import is_alive

FAKE = Path(__file__).parents[1] / "standins" / "fake_engine.py"


class Running:
    """A fake engine on a Unix socket, and the little that is needed to talk to it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.process = process

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(30)
        connection.sock.connect(str(self.folder / "s"))
        return connection

    def call(self, path: str, body: object = None, method: str = "POST", **headers: str) -> http.client.HTTPResponse:
        connection = self.connect()
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        return connection.getresponse()

    def health(self) -> int:
        try:
            return self.call("/health", method="GET").status
        except OSError:
            return 0

    def accepts(self) -> bool:
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def chat(self, **body: Any) -> http.client.HTTPResponse:
        request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
        return self.call("/v1/chat/completions", request, **{"X-Request-Id": "r-1"})

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "journal").read_text().splitlines()]

    def events(self) -> list[str]:
        return [line["event"] for line in self.journal()]


@contextmanager
def fake(tmp_path: Path, *switches: str, until_ready: bool = True) -> Iterator[Running]:
    # Relative, as the path of a Unix socket must be short: the test works in its own folder.
    argv = [sys.executable, "-I", "-S", str(FAKE), "--uds", "s", "--name", "alpha", "--journal", "journal", *switches]
    with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        engine = Running(Path("."), process)
        try:
            if until_ready:
                until_now(lambda: engine.health() == 200)
            yield engine
        finally:
            process.kill()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stream_of(response: http.client.HTTPResponse) -> list[str]:
    return [line.decode().removeprefix("data: ") for line in response.read().split(b"\n\n") if line]


def text_of(events: list[str]) -> str:
    choices = (json.loads(event)["choices"] for event in events if event != "[DONE]")
    return "".join(choice[0]["delta"].get("content", "") for choice in choices if choice)


def test_chat_is_answered_with_the_name(folder: Path) -> None:
    with fake(folder) as engine:
        answer = json.load(engine.chat(tokens=3))
        assert answer["choices"][0]["message"]["content"] == "alpha 1 2"
        assert answer["usage"]["completion_tokens"] == 3
        text = json.load(engine.call("/v1/completions", {"prompt": "hi", "tokens": 2}))["choices"][0]["text"]
        assert text == "alpha 1"
        # The client may have its answer a moment before the journal says so.
        until_now(lambda: engine.events() == ["start", "ready", "request", "done", "request", "done"])
    assert engine.journal()[2] | {"t": 0, "pid": 0} == {
        "t": 0,
        "pid": 0,
        "name": "alpha",
        "event": "request",
        "id": "r-1",
        "model": "m",
        "path": "/v1/chat/completions",
    }


def test_stream_has_usage_only_when_it_is_asked_for(folder: Path) -> None:
    with fake(folder) as engine:
        plain = stream_of(engine.chat(stream=True))
        asked = stream_of(engine.chat(stream=True, stream_options={"include_usage": True}))
    assert text_of(plain) == text_of(asked) == "alpha 1 2 3"
    assert plain[-1] == asked[-1] == "[DONE]"
    assert not any("usage" in event for event in plain)
    assert json.loads(asked[-2])["choices"] == []
    assert json.loads(asked[-2])["usage"]["completion_tokens"] == 4


def test_engine_without_usage_never_tells_it(folder: Path) -> None:
    with fake(folder, "--no-usage") as engine:
        assert "usage" not in json.load(engine.chat())
        assert b"usage" not in engine.chat(stream=True, stream_options={"include_usage": True}).read()


def test_embeddings_and_rerank_answer_per_text(folder: Path) -> None:
    with fake(folder) as engine:
        rows = json.load(engine.call("/v1/embeddings", {"input": ["a", "b"]}))["data"]
        ranks = json.load(engine.call("/v1/rerank", {"query": "q", "documents": ["a", "b", "c"]}))["results"]
    assert rows[0]["embedding"] != rows[1]["embedding"]
    assert [rank["index"] for rank in ranks] == [0, 1, 2]


def test_echo_shows_the_request_as_it_came(folder: Path) -> None:
    with fake(folder) as engine:
        seen = json.load(engine.call("/echo/a%2Fb?x=1", {"k": 1}, method="PUT", Accept="a/b"))
        assert engine.call("/echo/x", method="HEAD").read() == b""
        connection = engine.connect()
        connection.request("POST", "/echo/chunked", iter([b"ab", b"cde"]), encode_chunked=True)
        first = json.load(connection.getresponse())
        # The same connection again.
        connection.request("GET", "/echo/again")
        assert json.load(connection.getresponse())["path"] == "/echo/again"
    assert (seen["method"], seen["path"], seen["json"]) == ("PUT", "/echo/a%2Fb?x=1", {"k": 1})
    assert ["accept", "a/b"] in seen["headers"]
    assert first["body_length"] == 5


def test_multipart_fields_are_seen_in_their_order(folder: Path) -> None:
    part = b'--xyz\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    body = part % (b"file", b"\x00\r\n\x01") + part % (b"model", b"whisper") + b"--xyz--\r\n"
    with fake(folder) as engine:
        kind = {"Content-Type": "multipart/form-data; boundary=xyz"}
        answer = json.load(engine.call("/v1/audio/transcriptions", body, **kind))
    assert answer["fields"] == ["file", "model"]
    assert answer["sizes"]["file"] == 4
    assert answer["model"] == "whisper"


def test_upgraded_connection_sends_everything_back(folder: Path) -> None:
    with fake(folder) as engine, engine.connect().sock as raw:
        raw.sendall(b"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        head = raw.recv(4096)
        assert head.startswith(b"HTTP/1.1 101 ")
        raw.sendall(b"\x81\x00any bytes")
        assert raw.recv(4096) == b"\x81\x00any bytes"


def test_health_is_503_while_it_loads(folder: Path) -> None:
    with fake(folder, "--load-s", "3600", until_ready=False) as engine:
        until_now(lambda: engine.health() == 503)
        assert engine.chat().status == 503
        assert "ready" not in engine.events()


@pytest.mark.parametrize("switches", [("--token-s", "3600"), ("--stall-after", "2"), ("--hang", "serve")])
def test_client_that_leaves_is_noticed_at_once(folder: Path, switches: tuple[str, ...]) -> None:
    with fake(folder, *switches) as engine:
        connection = engine.connect()
        connection.request("POST", "/v1/chat/completions", b'{"stream": true}')
        until_now(lambda: engine.events()[-1] == "request")
        connection.close()
        until_now(lambda: engine.events()[-1] == "cancelled")
        assert engine.health() == 200


def test_hang_while_loading_accepts_and_never_answers(folder: Path) -> None:
    with fake(folder, "--hang", "load", until_ready=False) as engine:
        until_now(engine.accepts)
        raw = engine.connect().sock
        raw.settimeout(0.3)
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises(TimeoutError):
            raw.recv(1)


@pytest.mark.parametrize(
    ("switches", "code"),
    [
        (("--crash-at", "load"), 1),
        (("--crash-at", "load", "--exit-code", "9"), 9),
        (("--exit-before-bind",), 1),
        (("--exit-zero-without-listening",), 0),
    ],
)
def test_engine_that_ends_before_it_is_ready(folder: Path, switches: tuple[str, ...], code: int) -> None:
    with fake(folder, *switches, until_ready=False) as engine:
        assert engine.process.wait(timeout=30) == code
    assert engine.events() == ["start"]


@pytest.mark.parametrize("at", ["request", "token:0", "token:2", "token:4"])
def test_crash_cuts_the_answer_where_it_was_told(folder: Path, at: str) -> None:
    with fake(folder, "--crash-at", at, "--exit-code", "5") as engine:
        with pytest.raises((http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionResetError)) as cut:
            engine.chat(stream=True).read()
        assert engine.process.wait(timeout=30) == 5
    partial = cut.value.partial if isinstance(cut.value, http.client.IncompleteRead) else b""
    assert partial.count(b"\n\n") == {"token:2": 2, "token:4": 4}.get(at, 0)
    assert engine.events()[-1] == "request"


def test_weird_streams(folder: Path) -> None:
    def answer(kind: str) -> tuple[http.client.HTTPResponse, bytes]:
        with fake(folder, "--sse-weird", kind) as engine:
            response = engine.chat(stream=True)
            try:
                return response, response.read()
            except http.client.IncompleteRead as cut:
                return response, cut.partial
            finally:
                Path("s").unlink()

    assert b"[DONE]" not in answer("no-done")[1]
    assert answer("broken-event")[1].endswith(b'{"del')
    assert max(map(len, answer("huge-line")[1].split(b"\n"))) > 2 * 1024 * 1024
    response, body = answer("non-sse-200")
    assert (response.status, response.getheader("Content-Type")) == (200, "application/json")
    assert b"alpha" in body
    assert answer("error-500")[0].status == 500


def test_term_ends_it_unless_it_is_deaf(folder: Path) -> None:
    with fake(folder) as engine:
        engine.process.terminate()
        assert engine.process.wait(timeout=30) == 0
        assert engine.events()[-1] == "term"
    Path("s").unlink()
    with fake(folder, "--ignore-term") as engine:
        engine.process.terminate()
        until_now(lambda: engine.events()[-1] == "term")
        assert engine.health() == 200


def test_forked_child_outlives_a_killed_engine(folder: Path) -> None:
    with fake(folder, "--fork-setsid") as engine:
        (child,) = (line["child"] for line in engine.journal() if line["event"] == "forked")
        engine.process.kill()
        engine.process.wait(timeout=30)
        assert is_alive(child)
        os.kill(child, signal.SIGKILL)


def test_engine_listens_on_a_port(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-I", "-S", str(FAKE), "--port", str(port)]
    with subprocess.Popen(argv) as process:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

        def is_up() -> bool:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except OSError:
                connection.close()
                return False

        try:
            until_now(is_up)
        finally:
            process.kill()


def test_value_of_a_switch_comes_after_a_space_or_an_equals_sign() -> None:
    spaced = parse_switches(["--port", "1", "--journal", "a=b", "--say", "/x"])
    joined = parse_switches(["--port=1", "--journal=a=b", "--say=/x"])
    assert spaced == joined and (joined.journal, joined.say) == ("a=b", "/x")
