"""Starts ComfyUI as a child on a private port, and serves its pictures on a Unix socket.

    python launch.py comfyui.main --socket PATH --settings JSON

SETTINGS: `command` (with ${PORT} and ${OUTPUT}), `workflow` (a file), `inputs` (field → NODE.INPUT …). Ends with its
child, and ends its child with itself; the gateway's keeper ends whatever is left of both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ..serving.http import HttpServer
from .api import WorkflowApi
from .client import Comfy
from .workflow import WorkflowPlan

STOP_MAX_S = 5.0
# Those that are told that ComfyUI has ended get their answers.
LAST_ANSWERS_S = 1.0
# A program that listens on all addresses of IPv6 is reached by those of IPv4, too.
TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"
_OUTPUT_ENDING = ".out"

_log = logging.getLogger("comfyui")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    said = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    plan = WorkflowPlan.of(json.loads(Path(said.settings["workflow"]).read_bytes()), said.settings["inputs"])
    output = _output_beside(said.socket)
    try:
        return asyncio.run(_serve(said.socket, plan, said.settings["command"], output))
    finally:
        shutil.rmtree(output, ignore_errors=True)


def _output_beside(socket_path: Path) -> Path:
    """A folder for pictures until they are sent. Those of programs that were killed are removed."""
    for old in socket_path.parent.glob(f"*{_OUTPUT_ENDING}"):
        if not old.with_suffix(socket_path.suffix).exists():
            shutil.rmtree(old, ignore_errors=True)
    output = socket_path.with_suffix(_OUTPUT_ENDING)
    output.mkdir(mode=0o700, exist_ok=True)
    return output


async def _serve(socket_path: Path, plan: WorkflowPlan, command: Sequence[str], output: Path) -> int:
    port = _free_port()
    comfy = Comfy(port, secrets.token_hex(16))
    api = WorkflowApi(comfy, plan, output)
    server = HttpServer(api.handle)
    await server.open(socket_path)
    holes = {"PORT": str(port), "OUTPUT": str(output)}
    child = await asyncio.create_subprocess_exec(
        *(_filled(word, holes) for word in command), stdin=asyncio.subprocess.DEVNULL
    )
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    tasks = [asyncio.ensure_future(_become_ready(comfy, api, port)), asyncio.ensure_future(api.listen())]
    ended = asyncio.ensure_future(child.wait())
    stopped = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    for task in (*tasks, stopped):
        task.cancel()
    if ended.done():
        await _tell(api, f"ComfyUI has ended ({_exit(ended.result())}).")
    # First the child: what runs there is not worth an interrupt any more.
    await _stop(child)
    await server.close()
    return 0 if stopping.is_set() else 1


async def _become_ready(comfy: Comfy, api: WorkflowApi, port: int) -> None:
    await comfy.up()
    if not is_ours(port, await asyncio.to_thread(listeners)):
        _log.error("another user's program listens on ComfyUI's port %d", port)
        return
    api.is_up = True


async def _tell(api: WorkflowApi, why: str) -> None:
    _log.error(why)
    api.end(why)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_ANSWERS_S):
            await api.idle.wait()
    # The last bytes leave.
    await asyncio.sleep(0.05)


async def _stop(child: asyncio.subprocess.Process) -> None:
    if child.returncode is not None:
        return
    child.terminate()
    try:
        async with asyncio.timeout(STOP_MAX_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


def listeners() -> str:
    """The sockets of this machine, as the kernel lists them."""
    return "".join(table.read_text() for table in TCP_TABLES if table.exists())


def is_ours(port: int, table: str) -> bool:
    """True unless another user's program listens on the port; `table` as in /proc/net/tcp."""
    users = [
        parts[7] for line in table.splitlines() if (parts := line.split())[3] == _LISTENING and _port(parts[1]) == port
    ]
    return all(int(user) == os.getuid() for user in users)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _filled(text: str, holes: dict[str, str]) -> str:
    for name, value in holes.items():
        text = text.replace(f"${{{name}}}", value)
    return text


def _exit(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {-code}"
