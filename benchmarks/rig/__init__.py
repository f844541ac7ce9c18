"""What every benchmark needs: processes that are started, measured and ended by their own pid, and nginx beside
them; the gateway as users run it, and the words of its API.

Owns the numbers' meaning: CPU is user plus system time from /proc/PID/stat of a process and all below it, which other
load on the machine changes little. Wall-clock figures are only compared within one run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GREENROOM = (sys.executable, "-m", "greenroom")
START_TIMEOUT_S = 20.0
# A first load reads up to 16 GB and imports torch; then the longest prompt is read.
ASK_MAX_S = 300.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# nginx at its best as a reverse proxy: one worker, kept connections, no buffering of answers, no log.
_NGINX = """
daemon off; worker_processes 1; pid {dir}/pid; error_log {dir}/error.log;
{user}
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 100000000; tcp_nodelay on;
  client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f;
  uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  upstream engine {{ server 127.0.0.1:{engine_port}; keepalive 256; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(argv: list[str], port: int) -> Iterator[int]:
    """A process that listens on this port; gives its pid. Ended when the block is left."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        _wait_for_port(process, port)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def python(script: str, port: int, *arguments: str) -> Iterator[int]:
    """One of our own scripts, listening on this port."""
    with running([sys.executable, str(HERE.parent / script), "--port", str(port), *arguments], port) as pid:
        yield pid


@contextlib.contextmanager
def gateway(home: Path, models: Mapping[str, Mapping[str, Any]], *, probe: str = "nvml") -> Iterator[tuple[int, Path]]:
    """The gateway as users run it, its state in `home`, where it remembers; gives its port and its configuration."""
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    config = {
        "server": {"port": port},
        "log": {"level": "warning"},
        "memory": {"probe": probe},
        "state_dir": str(home / "state"),
        "models": models,
    }
    path = home / "greenroom.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(config))
    with running([*GREENROOM, "serve", "--config", str(path)], port):
        yield port, path


def ask(port: int, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the gateway answers; an error ends the benchmark."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=ASK_MAX_S) as answer:
            said: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{path} {(body or {}).get('model', '')}: {error.code} {error.read().decode()}") from error
    return said


def estimate(model: str, config: Path) -> dict[str, Any]:
    """As `greenroom estimate` tells it to an operator."""
    argv = [*GREENROOM, "estimate", model, "--config", str(config), "--json"]
    said: dict[str, Any] = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
    return said


@contextlib.contextmanager
def nginx(port: int, engine_port: int) -> Iterator[int]:
    """nginx in front of an engine; gives the pid of its master."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as directory:
        config = Path(directory) / "nginx.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        config.write_text(_NGINX.format(dir=directory, port=port, engine_port=engine_port, user=user))
        argv = [program, "-c", str(config), "-p", directory, "-e", f"{directory}/error.log"]
        with running(argv, port) as pid:
            yield pid


def load(kind: str, port: int, **options: object) -> dict[str, Any]:
    """Run the load generator in a process of its own and read its result."""
    argv = [sys.executable, str(HERE / "load.py"), kind, "--port", str(port)]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    result: dict[str, Any] = json.loads(subprocess.run(argv, check=True, capture_output=True, timeout=600).stdout)
    return result


def measure(port: int, cpu_s: Callable[[], float], *, requests: int, streams: int) -> dict[str, float]:
    """One round against one address; `cpu_s` says how much processor time it has used so far."""
    load("requests", port, concurrency=16, count=1_000)
    before_s = cpu_s()
    busy = load("requests", port, concurrency=16, count=requests)
    between_s = cpu_s()
    paced = load("streams", port, concurrency=streams)
    after_s = cpu_s()
    alone = load("requests", port, concurrency=1, count=3_000)
    if busy["count"] != requests:
        raise SystemExit(f"only {busy['count']} of {requests} requests were answered")
    return {
        "request_us": 1e6 * (between_s - before_s) / busy["count"],
        "chunk_us": 1e6 * (after_s - between_s) / paced["chunks"],
        "chunks_per_read": paced["chunks_per_read"],
        "p50_alone_us": alone["p50_us"],
        "per_s": busy["per_s"],
    }


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The best round of each: other load on the machine can only add."""
    chosen = {name: round(min(one[name] for one in rounds), 2) for name in rounds[0]}
    chosen["per_s"] = round(max(one["per_s"] for one in rounds))
    return chosen


def compare(
    sides: dict[str, tuple[int, Callable[[], float]]], rounds: int, *, requests: int, streams: int
) -> dict[str, dict[str, float]]:
    """Measure each side in turn, several rounds, and keep the best of each."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, (port, cpu_s) in sides.items():
            taken[name].append(measure(port, cpu_s, requests=requests, streams=streams))
            shown = {key: round(value, 1) for key, value in taken[name][-1].items()}
            print(f"round {number + 1} {name:10}", shown, flush=True)
    return {name: best(measured) for name, measured in taken.items()}


def cpu_s(pid: int) -> float:
    """Processor time used so far by this process and every process below it."""
    return sum(own_cpu_s(member) for member in _tree(pid))


def machine() -> str:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return f"{os.uname().machine}, {os.cpu_count()} cores, {model.partition(':')[2].strip() or 'unknown'}"


def report(bench: str, figures: dict[str, Any], goals: dict[str, Any], met: bool) -> None:
    """The last line of every benchmark."""
    print(json.dumps({"bench": bench, "figures": figures, "goals": goals, "met": met}))


def own_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid] + [member for child in children for member in _tree(int(child))]


def _wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SystemExit(f"{process.args!r} did not listen in time")
