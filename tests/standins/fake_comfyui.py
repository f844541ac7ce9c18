"""A program that answers like ComfyUI, as its documented endpoints say, well or badly. Standard library only.

    python fake_comfyui.py --port 8188 --output-directory DIR --checkpoints DIR --journal FILE

Runs workflows of the usual nodes, one after the other, in steps of `--step-s`. A picture is the signature of a PNG and,
as JSON, what it was made from. Some words of a prompt are faults: `crash`, `fail`, `nothing`. The journal gets one JSON
line per event: start, begin, end (how), forget (what is left), free.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import json
import os
import struct
import sys
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.standins.fake_http import Connection, Gone, Reader, Request

PNG = b"\x89PNG\r\n\x1a\n"
NODES = {"CheckpointLoaderSimple", "CLIPTextEncode", "EmptyLatentImage", "KSampler", "VAEDecode", "SaveImage"}
MODEL_BYTES = 2 * 1024**3
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class FakeComfyUi:
    def __init__(self, switches: argparse.Namespace) -> None:
        self.switches = switches
        self.pending: list[dict[str, Any]] = []
        self.running: dict[str, Any] | None = None
        self.history: dict[str, Any] = {}
        self.is_interrupted = False
        self.held_bytes = 0
        self.flags: set[str] = set()
        self.sockets: dict[str, asyncio.StreamWriter] = {}
        self.changed = asyncio.Event()
        self.made = 0

    def note(self, event: str, **more: Any) -> None:
        if self.switches.journal:
            line = json.dumps({"t": time.monotonic(), "pid": os.getpid(), "event": event, **more}) + "\n"
            with open(self.switches.journal, "a", encoding="utf-8") as file:
                file.write(line)

    async def run(self) -> None:
        self.note("start", argv=sys.argv[1:], gpus=os.environ.get("CUDA_VISIBLE_DEVICES"))
        await asyncio.sleep(self.switches.load_s)
        loop = asyncio.get_running_loop()
        await loop.create_server(self._protocol, "127.0.0.1", self.switches.port)
        while True:
            await self.changed.wait()
            self.changed.clear()
            while self.pending:
                self.running = self.pending.pop(0)
                await self._execute(self.running)
                self.running = None
            if self.flags:
                await self._free()

    async def _free(self) -> None:
        await asyncio.sleep(self.switches.free_s)
        self.flags.clear()
        self.held_bytes = 0
        self.note("free")

    # --- workflows ----------------------------------------------------------------------------------------------------

    async def _execute(self, item: dict[str, Any]) -> None:
        self.is_interrupted = False
        nodes, prompt_id = item["prompt"], item["id"]
        sampler = next(name for name, node in nodes.items() if node["class_type"] == "KSampler")
        text = nodes[nodes[sampler]["inputs"]["positive"][0]]["inputs"]["text"]
        steps = nodes[sampler]["inputs"]["steps"]
        self.note("begin", id=prompt_id, text=text)
        self.held_bytes = MODEL_BYTES
        self.send(item, "execution_start", {"prompt_id": prompt_id})
        for step in range(steps):
            if self.is_interrupted:
                break
            if text == "crash" and step == steps // 2:
                os._exit(3)
            await asyncio.sleep(self.switches.step_s)
            self.send(item, "progress", {"value": step + 1, "max": steps, "prompt_id": prompt_id, "node": sampler})
            self.send_preview(item)
        how = "interrupted" if self.is_interrupted else "failed" if text == "fail" else "success"
        self._keep(item, how, nodes, sampler, text)
        self.note("end", id=prompt_id, how=how)
        self.send(item, f"execution_{'error' if how == 'failed' else how}", {"prompt_id": prompt_id})
        self.send(item, "executing", {"node": None, "prompt_id": prompt_id})

    def _keep(self, item: dict[str, Any], how: str, nodes: dict[str, Any], sampler: str, text: str) -> None:
        images = self._images(nodes, sampler, text) if how == "success" and text != "nothing" else []
        about = {"node_id": sampler, "node_type": "KSampler", "exception_message": "as told"}
        messages = {"success": "execution_success", "failed": "execution_error", "interrupted": "execution_interrupted"}
        status = "success" if how == "success" else "error"
        self.history[item["id"]] = {
            "prompt": [],
            "outputs": {"9": {"images": images}} if images else {},
            "status": {"status_str": status, "completed": how == "success", "messages": [[messages[how], about]]},
        }

    def _images(self, nodes: dict[str, Any], sampler: str, text: str) -> list[dict[str, str]]:
        inputs = nodes[sampler]["inputs"]
        latent = nodes[inputs["latent_image"][0]]["inputs"]
        made = {"text": text, "latent": latent, "negative": nodes[inputs["negative"][0]]["inputs"]["text"]}
        made |= {name: inputs[name] for name in ("seed", "steps", "cfg")}
        found = []
        for number in range(latent["batch_size"]):
            self.made += 1
            name = f"ComfyUI_{self.made:05}_.png"
            Path(self.switches.output_directory, name).write_bytes(PNG + json.dumps(made | {"of": number}).encode())
            found.append({"filename": name, "subfolder": "", "type": "output"})
        return found

    def _problems(self, nodes: dict[str, Any]) -> dict[str, Any]:
        found = {}
        there = os.listdir(self.switches.checkpoints) if self.switches.checkpoints else []
        for name, node in nodes.items():
            errors = []
            if node["class_type"] not in NODES:
                errors.append({"type": "unknown", "message": "Unknown node", "details": node["class_type"]})
            if "ckpt_name" in node["inputs"] and node["inputs"]["ckpt_name"] not in there:
                details = f"ckpt_name: '{node['inputs']['ckpt_name']}' not in {there}"
                errors.append({"type": "value_not_in_list", "message": "Value not in list", "details": details})
            if node["inputs"].get("cfg", 0) == 66:
                errors.append(
                    {"type": "value_bigger_than_max", "message": "Value 66 bigger than max", "details": "cfg"}
                )
            if errors:
                found[name] = {"errors": errors, "dependent_outputs": ["9"], "class_type": node["class_type"]}
        return found

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        reader = Reader()
        tasks: set[asyncio.Task[None]] = set()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        return asyncio.StreamReaderProtocol(reader, connected)

    async def _serve(self, reader: Reader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        with contextlib.suppress(ConnectionError, Gone, asyncio.IncompleteReadError):
            while request := await connection.request():
                if request.path == "/ws":
                    await self._websocket(request, reader, writer)
                    break
                self._answer(connection, request)
                await connection.flush()
        writer.close()

    def _answer(self, connection: Connection, request: Request) -> None:
        body, path = request.json(), request.path
        if self.switches.garbage_at and path.startswith(self.switches.garbage_at) and self.made:
            connection.send_bytes("text/html", b"<html>")
        elif path == "/system_stats":
            device = {"name": "fake", "type": "cuda", "index": 0, "torch_vram_total": self.held_bytes}
            connection.send_json(200, {"system": {}, "devices": [device]})
        elif request.method == "POST" and path == "/prompt":
            self._submit(connection, body)
        elif path == "/queue" and request.method == "GET":
            running = [] if self.running is None else [[0, self.running["id"], {}, {}, []]]
            pending = [[0, item["id"], {}, {}, []] for item in self.pending]
            connection.send_json(200, {"queue_running": running, "queue_pending": pending})
        elif path == "/queue":
            self.pending = [item for item in self.pending if item["id"] not in body.get("delete", [])]
            connection.send_bytes("text/plain", b"")
        elif path == "/interrupt":
            self.is_interrupted = True
            connection.send_bytes("text/plain", b"")
        elif path == "/free":
            self.flags |= {name for name, wanted in body.items() if wanted}
            self.changed.set()
            connection.send_bytes("text/plain", b"")
        elif path == "/history" and request.method == "POST":
            for id in body.get("delete", []):
                self.history.pop(id, None)
            self.note("forget", left=len(self.history))
            connection.send_bytes("text/plain", b"")
        elif path.startswith("/history/"):
            id = path.rpartition("/")[2]
            connection.send_json(200, {id: self.history[id]} if id in self.history else {})
        elif path == "/view":
            name = parse_qs(urlsplit(request.target).query)["filename"][0]
            connection.send_bytes("image/png", Path(self.switches.output_directory, name).read_bytes())
        else:
            connection.send_json(404, {})

    def _submit(self, connection: Connection, body: dict[str, Any]) -> None:
        problems = self._problems(body["prompt"])
        if problems:
            error = {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed validation"}
            connection.send_json(400, {"error": error | {"details": ""}, "node_errors": problems})
            return
        item = {"id": str(uuid.uuid4()), "prompt": body["prompt"], "client": body.get("client_id")}
        self.pending.append(item)
        self.changed.set()
        connection.send_json(200, {"prompt_id": item["id"], "number": 1, "node_errors": {}})

    # --- events -------------------------------------------------------------------------------------------------------

    async def _websocket(self, request: Request, reader: Reader, writer: asyncio.StreamWriter) -> None:
        if self.switches.no_events:
            return
        accept = base64.b64encode(hashlib.sha1(request.get("sec-websocket-key").encode() + _GUID).digest()).decode()
        head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        writer.write(f"{head}Sec-WebSocket-Accept: {accept}\r\n\r\n".encode())
        self.sockets[parse_qs(urlsplit(request.target).query)["clientId"][0]] = writer
        writer.write(frame(1, json.dumps({"type": "status", "data": {"sid": "x"}}).encode()) + frame(9, b"ping"))
        await reader.gone.wait()

    def send(self, item: dict[str, Any], kind: str, data: dict[str, Any]) -> None:
        writer = self.sockets.get(item["client"])
        if writer is not None:
            # In two frames, as any server may.
            text = json.dumps({"type": kind, "data": data}).encode()
            writer.write(frame(1, text[:5], last=False) + frame(0, text[5:]))

    def send_preview(self, item: dict[str, Any]) -> None:
        writer = self.sockets.get(item["client"])
        if writer is not None:
            writer.write(frame(2, bytes(70_000)))


def frame(code: int, payload: bytes, *, last: bool = True) -> bytes:
    first = (0x80 if last else 0) | code
    if len(payload) < 126:
        return bytes((first, len(payload))) + payload
    if len(payload) < 65536:
        return bytes((first, 126)) + struct.pack(">H", len(payload)) + payload
    return bytes((first, 127)) + struct.pack(">Q", len(payload)) + payload


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--output-directory", required=True)
    parser.add_argument("--disable-auto-launch", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--checkpoints")
    parser.add_argument("--journal")
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--free-s", type=float, default=0.3)
    parser.add_argument("--garbage-at", help="after its first picture, paths that begin so answer nonsense")
    parser.add_argument("--no-events", action="store_true")
    asyncio.run(FakeComfyUi(parser.parse_args()).run())


if __name__ == "__main__":
    main()
