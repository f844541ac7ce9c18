"""A program that speaks as vLLM or SGLang do, by their documented switches and endpoints. Standard library only.

    python -I -S fake_server.py vllm serve FOLDER --uds PATH --served-model-name alpha --gpu-memory-utilization 0.5 …
    python -I -S fake_server.py tgi --model-id FOLDER --hostname 127.0.0.1 --port 9000 …
    python -I -S fake_server.py sglang serve --model-path FOLDER --port 9000 --served-model-name alpha …

It answers like the fake engine, whose switches it takes from FAKE_SWITCHES, and beside that: other models than its own
are 404, prompts it has seen with the same `cache_salt` are cached tokens, `/metrics` tells of its cache, a request that
comes while it is asleep waits until it is woken, every upgrade is taken, and a child of its own outlives it if it is
killed. FAKE_FAULTS has words: sleep-fails, sleep-lies, sleep-keeps-half (of its GPU memory), is_sleeping-garbage,
wake-fails, wake-hangs, wake-garbage (it has lost its weights), metrics-garbage, metrics-hangs.
"""

from __future__ import annotations

import gc
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.standins.lean_imports import put_off

if __name__ == "__main__":
    put_off()

import argparse
import asyncio
import json
import math
import signal
import time
from typing import Any

from tests.standins.fake_answers import error
from tests.standins.fake_engine_acts import Engine, Hung
from tests.standins.fake_http import Connection, Request
from tests.standins.fake_switches import Switches, parse_switches

FAULTS = frozenset(os.environ.get("FAKE_FAULTS", "").split())
# What the first token after any prompt is worth, with the weights and without.
LOGPROB, LOST_LOGPROB = -0.25, -math.log(32_000)
SLEEPS = ("/sleep", "/release_memory_occupation")
CONTROL = {
    "vllm": ("/sleep", "/wake_up", "/is_sleeping"),
    "sglang": ("/release_memory_occupation", "/resume_memory_occupation"),
}


class Server(Engine):
    """`kind` is vllm or sglang; `own` are the switches that real servers have."""

    def __init__(self, kind: str, own: argparse.Namespace, switches: Switches) -> None:
        super().__init__(switches)
        self.kind = kind
        self.own = own
        self.awake = asyncio.Event()
        self.awake.set()
        self.has_weights = True
        self.seen: set[tuple[str, str]] = set()
        self.queries = self.hits = 0

    async def _route(self, connection: Connection, request: Request) -> None:
        path = request.path
        if request.get("upgrade"):
            await connection.echo_raw(request.get("upgrade"))
        elif path in CONTROL[self.kind]:
            self._control(connection, path)
        elif path == "/v1/models":
            connection.send_json(200, {"object": "list", "data": [{"id": self.switches.name, "object": "model"}]})
        elif path == "/metrics":
            self._metrics(connection)
        elif (named := request.json().get("model")) not in (None, self.switches.name):
            connection.send_json(404, error(f"The model `{named}` does not exist.", "NotFoundError"))
        else:
            await self.awake.wait()
            self._cache(request)
            if path == "/v1/completions" and request.json().get("logprobs"):
                connection.send_json(200, self._probed())
            else:
                await super()._route(connection, request)

    def _control(self, connection: Connection, path: str) -> None:
        if path == "/is_sleeping":
            if "is_sleeping-garbage" in FAULTS:
                connection.send_bytes("application/json", b'{"is_sleeping": "perhaps"}')
            else:
                connection.send_json(200, {"is_sleeping": not self.awake.is_set()})
            return
        what = "sleep" if path in SLEEPS else "wake"
        if f"{what}-hangs" in FAULTS:
            raise Hung
        if f"{what}-fails" in FAULTS:
            connection.send_json(500, error(f"cannot {what}, as told", "server_error"))
            return
        self.journal.note(what)
        if what == "sleep" and "sleep-lies" not in FAULTS:
            self.awake.clear()
            self._hold(0.5 if "sleep-keeps-half" in FAULTS else 0)
        elif what == "wake":
            self.has_weights = "wake-garbage" not in FAULTS
            self._hold(1)
            self.awake.set()
        connection.send_json(200, {})

    def _hold(self, share: float) -> None:
        """Take so much of what its switches give it on each GPU it sees."""
        if self.switches.gpu_file:
            self._take_gpu_memory(int(self.switches.gpu_mib * share))

    def _cache(self, request: Request) -> None:
        body = request.json()
        key = (str(body.get("cache_salt")), json.dumps(body.get("messages") or body.get("prompt")))
        self.queries += 10
        self.hits += 10 if key in self.seen else 0
        self.journal.note("asked", salt=body.get("cache_salt"), is_cached=key in self.seen, fields=sorted(body))
        self.seen.add(key)

    def _probed(self) -> dict[str, Any]:
        logprobs = {"tokens": [" a"], "token_logprobs": [LOGPROB if self.has_weights else LOST_LOGPROB]}
        choice = {"index": 0, "text": " a", "logprobs": logprobs, "finish_reason": "length"}
        return {"id": "cmpl-1", "object": "text_completion", "model": self.switches.name, "choices": [choice]}

    def _metrics(self, connection: Connection) -> None:
        if "metrics-hangs" in FAULTS:
            raise Hung
        if "metrics-garbage" in FAULTS:
            connection.send_bytes("text/plain", b"vllm:kv_cache_usage_perc{ NaN\n\xff\xfe" * 1000)
            return
        label = f'{{model_name="{self.switches.name}"}}'
        figures = {
            "vllm": {
                "vllm:kv_cache_usage_perc": 0.25,
                "vllm:prefix_cache_queries_total": self.queries,
                "vllm:prefix_cache_hits_total": self.hits,
            },
            "sglang": {
                "sglang:token_usage": 0.25,
                "sglang:prompt_tokens_total": self.queries,
                "sglang:cached_tokens_total": self.hits,
            },
        }[self.kind]
        if self.kind == "vllm":
            # A number as a series, whose labels are what is meant.
            figures['vllm:cache_config_info{block_size="16",num_gpu_blocks="128"}'] = 1.0
        else:
            figures["sglang:max_total_num_tokens"] = 2_048
        lines = [
            "# HELP some words",
            *(f"{name}{'' if '{' in name else label} {value}" for name, value in figures.items()),
            "",
        ]
        connection.send_bytes("text/plain", "\n".join(lines).encode())


def own_switches(words: list[str]) -> argparse.Namespace:
    """The switches of both servers that matter here; others are accepted and ignored, as far as they are known."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=("serve",))
    parser.add_argument("path", nargs="?")
    for name in ("--model-path", "--uds", "--host", "--port", "--served-model-name", "--dtype", "--quantization"):
        parser.add_argument(name)
    for name in ("--max-num-seqs", "--max-model-len", "--tensor-parallel-size", "--gpu-memory-utilization", "--runner"):
        parser.add_argument(name)
    for name in ("--kv-cache-memory-bytes", "--max-running-requests", "--context-length", "--tp-size", "--device"):
        parser.add_argument(name)
    for name in ("--mem-fraction-static", "--tool-call-parser", "--chat-template", "--kv-offloading-size"):
        parser.add_argument(name)
    parser.add_argument("--allowed-media-domains", nargs="*")
    for name in ("--enable-sleep-mode", "--enable-prefix-caching", "--enable-prompt-tokens-details", "--is-embedding"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    for name in ("--trust-remote-code", "--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-metrics"):
        parser.add_argument(name, action="store_true")
    for name in ("--enable-cache-report", "--disable-uvicorn-access-log"):
        parser.add_argument(name, action="store_true")
    return parser.parse_args(words)


def run_tgi(words: list[str]) -> None:
    """Text Generation Inference, as far as a `command` meets it: the fake engine on the port it is told."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model-id", "--hostname", "--port", "--num-shard", "--cuda-memory-fraction", "--max-total-tokens"):
        parser.add_argument(name, required=True)
    parser.add_argument("--shard-uds-path")
    own = parser.parse_args(words)
    engine = Engine(parse_switches(["--host", own.hostname, "--port", own.port, "--name", "tgi"]))
    signal.signal(signal.SIGTERM, engine.on_term)
    asyncio.run(engine.run())


def main() -> None:
    kind, *words = sys.argv[1:]
    if kind == "tgi":
        run_tgi(words)
        return
    own = own_switches(words)
    where = ["--uds", own.uds] if own.uds else ["--port", own.port]
    switches = parse_switches([*where, "--name", own.served_model_name, *json.loads(os.environ["FAKE_SWITCHES"])])
    if own.gpu_memory_utilization and switches.gpu_file:
        with open(switches.gpu_file) as file:
            total = json.load(file)["gpus"][0]["memory_mib"]
        switches.gpu_mib = int(float(own.gpu_memory_utilization) * total) * int(own.tensor_parallel_size)
    asyncio.run(run(kind, own, switches))


async def run(kind: str, own: argparse.Namespace, switches: Switches) -> None:
    server = Server(kind, own, switches)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: (kill_core(), server.on_term()))
    server.journal.note("start", argv=sys.argv[2:])
    core = start_core()
    server.journal.note("forked", child=core)
    await server.run()


_core: list[int] = []


def start_core() -> int:
    """A process in a session of its own that computes: it outlives this one unless that is asked to stop."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            time.sleep(3600)
    _core.append(child)
    return child


def kill_core() -> None:
    for child in _core:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    gc.enable()
    main()
