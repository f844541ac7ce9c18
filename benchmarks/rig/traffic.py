"""The same load on several addresses in turn: CPU per request and per chunk, beside nginx in the same run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rig.processes import RIG, move_to_last_core, own_cpu_s, running, tree

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

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Side:
    """What answers at an address. nginx works in processes below its own; an engine below a gateway is not its part."""

    port: int
    pid: int
    with_children: bool = False
    is_engine: bool = False

    @property
    def pids(self) -> list[int]:
        return tree(self.pid) if self.with_children else [self.pid]

    def cpu_s(self) -> float:
        return sum(own_cpu_s(pid) for pid in self.pids)

    def take_core(self) -> None:
        """Have a core alone, if it is what stands between callers and an engine."""
        for pid in self.pids if not self.is_engine else ():
            move_to_last_core(pid)


def compare(sides: dict[str, Side], rounds: int, *, requests: int, streams: int) -> dict[str, Any]:
    """Measure each side in turn, and keep the best round of each. Call `leave_last_core` before they start."""
    taken: dict[str, list[Figures]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            taken[name].append(measure(side, requests=requests, streams=streams))
            shown = {key: round(value, 1) for key, value in taken[name][-1].items()}
            print(f"round {number + 1} {name:10}", shown, flush=True)
    return {name: best(measured) for name, measured in taken.items()}


def measure(side: Side, *, requests: int, streams: int) -> Figures:
    """One round. A gateway has started its engine once it has answered."""
    load("requests", side.port, concurrency=16, count=1_000)
    side.take_core()
    before_s = side.cpu_s()
    busy = load("requests", side.port, concurrency=16, count=requests)
    between_s = side.cpu_s()
    paced = load("streams", side.port, concurrency=streams)
    after_s = side.cpu_s()
    alone = load("requests", side.port, concurrency=1, count=3_000)
    if busy["count"] != requests:
        raise SystemExit(f"only {busy['count']} of {requests} requests were answered")
    return {
        "request_us": 1e6 * (between_s - before_s) / busy["count"],
        "chunk_us": 1e6 * (after_s - between_s) / paced["chunks"],
        "chunks_per_read": paced["chunks_per_read"],
        "p50_alone_us": alone["p50_us"],
        "per_s": busy["per_s"],
    }


def best(rounds: list[Figures]) -> Figures:
    """The best round of each figure: other load on the machine can only add."""
    chosen = {name: round(min(one[name] for one in rounds), 2) for name in rounds[0]}
    chosen["per_s"] = round(max(one["per_s"] for one in rounds))
    return chosen


def cost_ratios(own: Figures, nginx: Figures) -> Figures:
    """What a request and a chunk cost, in units of what they cost nginx."""
    return {name.replace("_us", "_ratio"): round(own[name] / nginx[name], 2) for name in ("request_us", "chunk_us")}


def load(kind: str, port: int, **options: object) -> Figures:
    """Run the load generator in a process of its own and read its result."""
    argv = [sys.executable, str(RIG / "load.py"), kind, "--port", str(port)]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    result: Figures = json.loads(subprocess.run(argv, check=True, capture_output=True, timeout=600).stdout)
    return result


@contextlib.contextmanager
def nginx(port: int, engine_port: int) -> Iterator[int]:
    """nginx in front of an engine; gives the pid of its master. Raises SystemExit if it is not installed."""
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if program is None:
        raise SystemExit("nginx is not installed, and this benchmark compares with it; `apt-get install nginx-light`")
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as directory:
        config = Path(directory) / "nginx.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        config.write_text(_NGINX.format(dir=directory, port=port, engine_port=engine_port, user=user))
        argv = [program, "-c", str(config), "-p", directory, "-e", f"{directory}/error.log"]
        with running(argv, port) as pid:
            yield pid
