"""The longest gap of a paced stream while one other caller sends the worst bodies of every route.

One gateway, two engines: one sends an event each 5 ms to a reader in a process of its own; the other answers the
hostile bodies that are accepted. Printed for each body are its size, how it was answered, how long that took, the
longest gap of the stream meanwhile, and by how much the gateway's memory grew at its peak, beside the body's size (its
answer and what the allocator keeps included). `quiet` is the same stream with no other request. The best of all rounds
counts, because other load on the machine can only add.

    python -m benchmarks.gateway.hostile [--rounds 3] [--only WORD] [--python PYTHON]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.rig.gateways import Gateway, gateway
from benchmarks.rig.processes import engine_argv, free_port, memory_mib
from benchmarks.rig.result import Run, options_of

GOALS = {"gap_ms_max": 50.0, "memory_ratio_max": 4.0, "memory_mib_max": 32.0}
CHUNK_S = 0.005
QUIET_S = 3.0
MIB = 1024 * 1024
# Below the limit of JSON bodies, 64 MiB, and of those of the management API, 1 MiB.
LARGE = 57 * MIB
SMALL = 1000 * 1024
ANSWER_MAX_S = 120.0
BOUNDARY = "bound"


@dataclass(frozen=True, slots=True)
class Case:
    """`body` makes what is sent: the same each time."""

    name: str
    path: str
    body: Callable[[], bytes]
    content_type: str = "application/json"
    is_chunked: bool = False


# --- bodies ---------------------------------------------------------------------------------------------------------


def filled(head: str, unit: bytes, tail: str, size: int = LARGE) -> Callable[[], bytes]:
    """JSON whose middle is one unit, as often as it fits."""
    return lambda: head.encode() + unit * ((size - len(head) - len(tail)) // len(unit)) + tail.encode()


def said(before: str, unit: bytes, after: str, *, size: int = LARGE, model: str = "sink") -> Callable[[], bytes]:
    return filled('{"model":"' + model + '","max_tokens":5,' + before, unit, after + "}", size)


def times(before: str, unit: bytes, after: str, count: int, *, model: str = "sink") -> Callable[[], bytes]:
    """The same with a number of units: the most that the count of values lets through."""
    return said(before, unit, after, size=len(unit) * count + 200, model=model)


def fields(before: str, *, model: str = "sink") -> Callable[[], bytes]:
    """One field is an object of as many others as the length of an outline lets through."""
    others = ",".join(f'"{at:0120}":"{at:0120}"' for at in range(55_000))
    return lambda: f'{{"model":"{model}",{before}:{{{others}}}}}'.encode()


PICTURE = b"iVBORw0KGgoAAAANSUhEUgAA"
USER = '"messages":[{"role":"user","content":'
TURN = b'{"role":"user","content":"hello"},'
LAST_TURN = '{"role":"user","content":"hello"}]'
ASSISTANT = '"messages":[{"role":"user","content":"a"},{"role":"assistant","content":['


def json_cases() -> Iterator[Case]:
    chat, embed = "/v1/chat/completions", "/v1/embeddings"
    end = '{"type":"image_url","image_url":{"url":"data:,"}}]}]'
    yield Case("objects", chat, said(USER + "[", b"{},", end))
    yield Case("lists", chat, said(USER + "[", b"[],", end))
    yield Case("numbers", chat, said(USER + "[", b"1,", end))
    yield Case("texts", chat, said(USER + "[", b'"a",', end))
    yield Case("fields", chat, lambda: b'{"model":"sink",%b}' % b",".join(b'"k%d":1' % at for at in range(4_000_000)))
    yield Case("depth", chat, said(USER, b"[", ""))
    yield Case(
        "picture",
        chat,
        said(USER + '[{"type":"image_url","image_url":{"url":"data:image/png;base64,', PICTURE, '"}}]}]'),
    )
    yield Case("escapes", chat, said(USER + '"', rb"\"", '"}]'))
    yield Case("unicode escapes", chat, said(USER + '"', rb"\u4e2d", '"}]'))
    yield Case("emoji", chat, said(USER + '"', "😀".encode(), '"}]'))
    yield Case("not UTF-8", chat, said(USER + '"', b"\xf0\x9f\x98", '"}]'))
    yield Case("cut off", chat, said(USER + '"', b"a", "", size=LARGE))
    yield Case("spaces", chat, said("", b" ", '"stop":null,' + USER + '"a"}]'))
    yield Case("digits", chat, said('"seed":', b"1", "," + USER + '"a"}]'))
    yield Case(
        "parts at the limit",
        chat,
        times(USER + "[", b'{"type":"image_url","image_url":{"url":"data:,"}},', end, 19_000),
    )
    yield Case("texts of 600", chat, said(USER + "[", b'{"type":"text","text":"%b"},' % (b"x" * 4000), end, size=LARGE))
    escapes = rb'{"type":"text","text":"%b"},' % (rb"\n" * 170)
    yield Case("texts of escapes at the limit", chat, times(USER + "[", escapes, end, 31_000))
    yield Case("turns at the limit", chat, times('"messages":[', TURN, LAST_TURN, 33_000))
    yield Case(
        "of a task",
        chat,
        times(USER + "[", b'{"type":"image_url","image_url":{"url":"data:,"}},', end, 19_000, model="any"),
    )
    yield Case("digits of a fraction", chat, said('"seed":0.', b"0", "1," + USER + '"a"}]', size=13 * MIB))
    one = '"messages":[' + LAST_TURN
    yield Case("options of a stream", chat, fields(one + ',"stream":true,"stream_options"'))
    yield Case("answers of a provider", chat, fields(one + ',"n"', model="far"))
    yield Case("prompts of a provider", "/v1/completions", times('"prompt":[', b'"a",', '"a"]', 98_000, model="far"))
    yield Case("completions: tokens", "/v1/completions", said('"prompt":[', b"12345,", "1]"))
    yield Case("completions: texts", "/v1/completions", said('"prompt":[', b'"aaaaaaaa",', '""]'))
    yield Case("embeddings: 6 million inputs", embed, said('"input":[', b'"aaaaaaa",', '""]'))
    yield Case("embeddings: texts at the limit", embed, said('"input":[', b'"' + b"x" * 600 + b'",', '"{}"]'))
    yield Case("embeddings: tokens", embed, said('"input":[', b"[1,2,3],", "[1]]"))
    yield Case("rerank: documents", "/v1/rerank", said('"query":"q","documents":[', b'{"text":"a"},', '{"text":"b"}]'))
    yield Case("images", "/v1/images/generations", said('"prompt":"', b"a", '"'))
    yield Case("speech", "/v1/audio/speech", said('"voice":"a","input":"', b"a", '"'))


def dialect_cases() -> Iterator[Case]:
    anthropic = "/v1/messages"
    picture = '[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"'
    tool = ASSISTANT + '{"type":"tool_use","id":"a","name":"b","input":{"text":"'
    yield Case("messages: picture", anthropic, said(USER + picture, PICTURE, '"}}]}]'))
    yield Case("messages: tool", anthropic, said(tool, rb"\n\"", '"}}]}]'))
    yield Case("messages: turns", anthropic, said('"messages":[', TURN, LAST_TURN))
    yield Case("messages: at the limit", anthropic, times('"messages":[', TURN, LAST_TURN, 19_000))
    yield Case(
        "messages: texts", anthropic, times('"messages":[', TURN.replace(b"hello", b"x" * 3_000), LAST_TURN, 19_000)
    )
    yield Case("messages: of a task", anthropic, times('"messages":[', TURN, LAST_TURN, 19_000, model="any"))
    yield Case("count_tokens", "/v1/messages/count_tokens", times('"messages":[', TURN, LAST_TURN, 19_000))
    items = b'{"type":"message","role":"user","content":[{"type":"input_text","text":"a"}]},'
    yield Case("responses: at the limit", "/v1/responses", times('"input":[', items, items.decode()[:-1] + "]", 9_000))
    yield Case("responses: text", "/v1/responses", said('"input":"', rb"\n", '"'))
    yield Case("responses: objects", "/v1/responses", said('"input":[', b"{},", "{}]"))
    yield Case("ollama chat: pictures", "/api/chat", said('"messages":[{"role":"user","images":["', PICTURE, '"]}]'))
    yield Case("ollama chat: at the limit", "/api/chat", times('"messages":[', TURN, LAST_TURN, 19_000))
    yield Case(
        "ollama chat: 19,000 pictures",
        "/api/chat",
        times('"messages":[{"role":"user","images":[', b'"%b",' % (PICTURE * 120), '""]}]', 19_000),
    )
    yield Case("ollama generate", "/api/generate", said('"prompt":"', "é".encode(), '"'))
    yield Case("ollama embed", "/api/embed", said('"input":[', b'"a",', '""]'))
    yield Case("tokenize", "/tokenize", said('"content":"', b"a ", '"', model="native"))
    yield Case("completion", "/completion", said('"prompt":[', b"{},", "{}]", model="native"))
    yield Case("infill", "/infill", times('"input_extra":[', b'{"image":1},', '""]', 33_000, model="native"))
    yield Case("pass-through", "/upstream/native/completion", said('"prompt":[', b"{},", "{}]", model="native"))
    yield Case("pass-through: numbers", "/upstream/native/completion", said('"prompt":[', b"1,", "1]", model="native"))


def other_cases() -> Iterator[Case]:
    job = '{"route":"/v1/chat/completions","body":'
    yield Case("job", "/v1/jobs", filled(job + '{"model":"sink",' + USER + '"', b"a", '"}]}}'))
    yield Case("job: objects", "/v1/jobs", filled(job + '{"model":"sink",' + USER + "[", b"{},", "{}]}]}}"))
    for path, before, unit, after in (
        ("/api/v1/simulate", '{"scenario":{"models":[', b"{},", "{}]}}"),
        ("/api/v1/leases", '{"memory":{', b'"a":1,', '"b":1}}'),
        ("/api/v1/models/sink/load", '{"evict":[', b"1,", "1]}"),
        ("/api/show", '{"model":[', b"{},", "{}]}"),
        ("/models/load", '{"model":[', b"[],", "[]]}"),
    ):
        yield Case(f"management: {path}", path, filled(before, unit, after, SMALL))
        yield Case(f"management: {path}, short", path, filled(before, unit, after, 60_000))
    form = f"multipart/form-data; boundary={BOUNDARY}"
    path = "/v1/audio/transcriptions"
    yield Case(
        "form: file",
        path,
        lambda: _form([_part("model", b"sink"), _part("file", b"\r\n--boun" * (LARGE // 8), 'filename="a.wav"')]),
        form,
    )
    heads = "\r\n".join(f"x{at}:" for at in range(1_900))
    yield Case(
        "form: headers", path, lambda: _form([_part(f"f{at}", b"", more="\r\n" + heads) for at in range(99)]), form
    )
    names = "".join(f";a{at}=b" for at in range(1_900))
    yield Case("form: parameters", path, lambda: _form([_part(f"f{at}", b"", names[1:]) for at in range(99)]), form)
    yield Case("form: parts", path, lambda: _form([_part("f", b"") for _ in range(900_000)]), form)
    yield Case(
        "chunks of 6 bytes", "/v1/chat/completions", said(USER + '"', b"a", '"}]', size=8 * MIB), is_chunked=True
    )
    yield Case("chunk of line breaks", "/v1/chat/completions", filled(" ", b"\r\n", "{}", 4 * MIB), is_chunked=True)


def _part(name: str, content: bytes, parameters: str = "", more: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"{"; " if parameters else ""}{parameters}{more}'
    return f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + content + b"\r\n"


def _form(parts: list[bytes]) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


# --- the stream -----------------------------------------------------------------------------------------------------


def watch(port: int, pipe: Connection) -> None:
    """Read one stream. Each time it is told the moment at which something began, say the longest gap since then."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_MAX_S)
    asked = {"model": "steady", "stream": True, "messages": [{"role": "user", "content": "a"}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
    sock, seen = connection.sock, [time.monotonic()]
    while True:
        if not sock.recv(65536):
            raise SystemExit("the stream has ended")
        seen.append(time.monotonic())
        if pipe.poll():
            begun = pipe.recv()
            seen = [at for at in seen if at >= begun - 2 * CHUNK_S]
            pipe.send(max((later - earlier for earlier, later in pairwise(seen)), default=0.0))


@contextlib.contextmanager
def watched(port: int) -> Iterator[Callable[[float], float]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=watch, args=(port, theirs), daemon=True)
    process.start()

    def longest_gap(begun: float) -> float:
        ours.send(begun)
        gap: float = ours.recv()
        return gap

    try:
        longest_gap(time.monotonic())
        yield longest_gap
    finally:
        process.terminate()
        process.join()


# --- one body -------------------------------------------------------------------------------------------------------


def send(port: int, case: Case, body: bytes) -> tuple[int, bytes]:
    """Status and beginning of the answer."""
    with socket.create_connection(("127.0.0.1", port), ANSWER_MAX_S) as sock:
        framing = "Transfer-Encoding: chunked" if case.is_chunked else f"Content-Length: {len(body)}"
        head = f"POST {case.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {case.content_type}\r\n{framing}\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            # One that is refused early is answered before it is sent.
            sock.sendall(head.encode())
            sock.sendall(_in_chunks(case, body) if case.is_chunked else body)
        with contextlib.suppress(ConnectionError):
            answer = sock.recv(4096)
            return int(answer[9:12] or 0), answer.partition(b"\r\n\r\n")[2][:160]
    return 0, b""


def _in_chunks(case: Case, body: bytes) -> bytes:
    if "line breaks" in case.name:
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return b"".join(b"6\r\n%b\r\n" % body[at : at + 6] for at in range(0, len(body) - 5, 6)) + b"0\r\n\r\n"


def measure(own: Gateway, longest_gap: Callable[[float], float], case: Case) -> dict[str, Any]:
    body = case.body()
    Path(f"/proc/{own.pid}/clear_refs").write_text("5")
    before_mib, begun = memory_mib(own.pid), time.monotonic()
    status, answer = send(own.port, case, body)
    took_s = time.monotonic() - begun
    # What it leaves to do may be done after its answer.
    time.sleep(0.1)
    return {
        "mib": len(body) / MIB,
        "status": status,
        "took_s": took_s,
        "gap_ms": 1000 * longest_gap(begun),
        "memory_mib": max(0.0, memory_mib(own.pid, "VmHWM") - before_mib),
        "answer": answer.decode("utf-8", "replace"),
    }


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    kept = {name: min(one[name] for one in rounds) for name in ("mib", "took_s", "gap_ms", "memory_mib")}
    return {"status": rounds[0]["status"], **{name: round(value, 2) for name, value in kept.items()}}


def llamacpp(folder: Path) -> dict[str, Any]:
    """A model of llama.cpp whose program is the mock engine: its bodies are looked into."""
    program, weights = folder / "llama-server", folder / "model.gguf"
    program.write_text("#!/bin/sh\nexec " + shlex.join(engine_argv("0")[:2]) + ' "$@"\n')
    program.chmod(0o755)
    weights.write_bytes(b"GGUF")
    return {"path": str(weights), "program": str(program), "memory_mib": 10, "concurrency": 64, "preload": True}


def figures_of(python: str, rounds: int, only: str) -> dict[str, Any]:
    def model(**more: Any) -> dict[str, Any]:
        argv = engine_argv("${PORT}", chunks=10**9, chunk_s=CHUNK_S)
        return {"cmd": argv, "memory_mib": 10, "concurrency": 64, "preload": True, **more}

    models = {"steady": model(), "sink": model(), "other": model()}
    cases = [case for case in (*json_cases(), *dialect_cases(), *other_cases()) if only in f"{case.name} {case.path}"]
    taken: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    quiet = []
    models["far"] = {"remote": "nobody"}
    # Nothing answers there.
    nobody = {"base_url": f"http://127.0.0.1:{free_port()}/v1", "retries_max": 0, "cost": {"input": 1, "output": 1}}
    tasks = {"any": {"candidates": ["sink", "other"]}}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models["native"] = llamacpp(folder)
        own = stack.enter_context(gateway(models=models, python=python, tasks=tasks, remotes={"nobody": nobody}))
        longest_gap = stack.enter_context(watched(own.port))
        for number in range(rounds):
            begun = time.monotonic()
            time.sleep(QUIET_S)
            quiet.append(1000 * longest_gap(begun))
            print(f"round {number + 1}: longest gap with no other request: {quiet[-1]:.1f} ms", flush=True)
            for case in cases:
                seen = measure(own, longest_gap, case)
                taken[case.name].append(seen)
                print(
                    f"{case.name:36} {seen['mib']:6.1f} MiB  {seen['status']}  {seen['took_s']:6.2f} s  "
                    f"gap {seen['gap_ms']:7.1f} ms  memory {seen['memory_mib']:7.1f} MiB  {seen['answer'][:90]}",
                    flush=True,
                )
    bodies = {name: best(rounds) for name, rounds in taken.items()}
    longest = max(bodies, key=lambda name: bodies[name]["gap_ms"])
    return {
        "quiet_gap_ms": round(min(quiet), 2),
        "gap_ms": bodies[longest]["gap_ms"],
        "gap_ratio": round(bodies[longest]["gap_ms"] / min(quiet), 1),
        "longest_by": longest,
        "memory_ratio": round(max(_ratio(one) for one in bodies.values()), 2),
        "bodies": bodies,
    }


def _ratio(seen: dict[str, Any]) -> float:
    """Of memory to size; what every small body may cost counts for nothing."""
    return 0.0 if seen["memory_mib"] <= GOALS["memory_mib_max"] else seen["memory_mib"] / max(seen["mib"], 0.01)


def main() -> None:
    parser: argparse.ArgumentParser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="send only the bodies whose name or path has this word")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the gateway")
    options = parser.parse_args()
    run = Run("gateway_hostile", options)
    figures = figures_of(options.python, options.rounds, options.only)
    met = figures["gap_ms"] <= GOALS["gap_ms_max"] and figures["memory_ratio"] <= GOALS["memory_ratio_max"]
    run.report(figures, GOALS, met)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
