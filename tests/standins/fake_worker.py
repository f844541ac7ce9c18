"""A program that behaves like a worker that hosts slots, well or badly, as a file in each model's folder says.

    python -I -S fake_worker.py --control SOCKET

Standard library only. Speaks the control protocol and answers HTTP like the fake engine, one socket a slot. `fake.json`
in a model's folder is read anew for each operation: `at` says how each shall go wrong ("crash", "mute", "hang",
"fail KIND", "slow SECONDS", "deaf SECONDS", which cannot be called off, or "deaf", until the file says so no more; with
"once " before it only the next time), `mib` what it takes of its GPUs, `arena_mib` of the host, `tokens`, `token_s` and
`talkative` how it answers. With CUDA_FAKE_GPUS it takes memory of GPUs that this file describes. The journal, `journal`
in the model's folder, gets one JSON line for each operation.
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
import socket
import time
from pathlib import Path
from typing import Any

from tests.standins import fake_gpu
from tests.standins.fake_engine_acts import Engine
from tests.standins.fake_switches import parse_switches

ARENA_MIB = 3
KV_BYTES = 1024 * 1024
MIB = 1024 * 1024
GPUS = os.environ.get("CUDA_FAKE_GPUS")


class Failure(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Slot:
    def __init__(self, said: dict[str, Any], fd: int) -> None:
        self.id, self.model, self.folder = said["slot"], said["model"], Path(said["path"])
        self.fd = fd
        self.is_awake = False
        self.switches = parse_switches(["--uds", said["socket"], "--name", said["model"]])
        self.engine = Engine(self.switches)
        self.server: asyncio.Server | None = None

    @property
    def conduct(self) -> dict[str, Any]:
        return read_conduct(self.folder)

    @property
    def arena_bytes(self) -> int:
        return int(self.conduct.get("arena_mib", ARENA_MIB)) * MIB

    def note(self, event: str, **more: Any) -> None:
        line = {"t": time.monotonic(), "pid": os.getpid(), "name": self.model, "event": event, **more}
        with (self.folder / "journal").open("a") as journal:
            journal.write(json.dumps(line) + "\n")


def read_conduct(folder: Path) -> dict[str, Any]:
    try:
        conduct: dict[str, Any] = json.loads((folder / "fake.json").read_text())
    except FileNotFoundError:
        return {}
    return conduct


async def until_told(folder: Path, op: str) -> None:
    while read_conduct(folder).get("at", {}).get(op) == "deaf":  # noqa: ASYNC110 Another process changes it.
        await asyncio.sleep(0.02)


class Worker:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.slots: dict[str, Slot] = {}
        self.turns: dict[str, asyncio.Lock] = {}
        self.opening: dict[str, asyncio.Task[Any]] = {}

    async def serve(self) -> None:
        """Until the gateway hangs up."""
        loop, rest, fds = asyncio.get_running_loop(), b"", []
        tasks = set()
        while True:
            data, files, _, _ = await loop.run_in_executor(None, socket.recv_fds, self.connection, 65536, 16)
            fds += files
            if not data:
                os._exit(0)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                fd = fds.pop(0) if said["op"] == "open" else -1
                task = asyncio.create_task(self.handle(said, fd))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                if said["op"] == "open":
                    self.opening[said["slot"]] = task

    async def handle(self, said: dict[str, Any], fd: int) -> None:
        number, slot = said["id"], said.get("slot", "")
        try:
            if said["op"] == "close" and (opening := self.opening.pop(slot, None)) is not None:
                opening.cancel()
                await asyncio.wait((opening,))
            async with self.turns.setdefault(slot, asyncio.Lock()):
                answer = await self.carry_out(said, fd)
            self.send({"id": number, "ok": True, **answer})
        except Failure as failure:
            self.send({"id": number, "ok": False, "kind": failure.kind, "message": str(failure)})
        except asyncio.CancelledError:
            self.send({"id": number, "ok": False, "kind": "failed", "message": "it is not wanted any more"})

    def send(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    async def carry_out(self, said: dict[str, Any], fd: int) -> dict[str, Any]:
        match said["op"]:
            case "hello":
                return {"pid": os.getpid(), "torch": "0", "device": "cuda" if GPUS else "cpu", "python": "3"}
            case "open":
                return await self.open(said, fd)
            case "close" if said["slot"] not in self.slots:
                raise Failure("unknown_slot", "there is no such slot")
        slot = self.slots[said["slot"]]
        slot.note(said["op"])
        await self.misbehave(slot.folder, said["op"])
        return await getattr(self, said["op"])(slot, said)

    async def misbehave(self, folder: Path, op: str) -> None:
        conduct = read_conduct(folder)
        how = conduct.get("at", {}).get(op, "")
        if how.startswith("once "):
            del conduct["at"][op]
            (folder / "fake.json").write_text(json.dumps(conduct))
        match how.removeprefix("once ").split():
            case ["crash"]:
                sys.stderr.write(f"worker: fatal: crashing as told at {op}\n")
                sys.stderr.flush()
                os._exit(70)
            case ["mute"]:
                # It lives on and cannot be spoken to any more.
                self.connection.shutdown(socket.SHUT_WR)
                await asyncio.sleep(3600)
            case ["hang"]:
                await asyncio.sleep(3600)
            case ["fail", "path"]:
                raise Failure("failed", f"{op} fails as told: nobody listens on {self.connection.getsockname()}.")
            case ["fail", "folder"]:
                raise Failure("bad_model", f"{op} fails as told: {folder} has no config.json.")
            case ["fail", kind]:
                raise Failure(kind, f"{op} fails as told.")
            case ["slow", seconds]:
                await asyncio.sleep(float(seconds))
            case ["deaf", *seconds]:
                pause = asyncio.sleep(float(seconds[0])) if seconds else until_told(folder, op)
                beside = asyncio.create_task(pause)
                try:
                    await asyncio.shield(beside)
                finally:
                    await beside

    async def open(self, said: dict[str, Any], fd: int) -> dict[str, Any]:
        try:
            return await self._open(said, fd)
        except BaseException:
            os.close(fd)
            raise

    async def _open(self, said: dict[str, Any], fd: int) -> dict[str, Any]:
        if said.get("gpus") is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = said["gpus"]
        slot = Slot(said, fd)
        slot.note("open", filled=said["filled"], options=said["options"], gpus=said.get("gpus"))
        sys.stderr.write(f"worker: opening {slot.model}\n")
        sys.stderr.flush()
        self.send({"id": said["id"], "progress": 0.5})
        await self.misbehave(slot.folder, "open")
        if said["filled"]:
            if os.pread(fd, 100, 0).rstrip(b"\0") != slot.model.encode():
                raise Failure("failed", "this arena is another's")
        else:
            os.ftruncate(fd, slot.arena_bytes)
            os.pwrite(fd, slot.model.encode(), 0)
        slot.server = await slot.engine.listen(asyncio.get_running_loop())
        self.slots[slot.id] = slot
        size = slot.arena_bytes
        return {"arena_bytes": size, "kv_bytes": KV_BYTES, "seconds": 0.01, "read_bytes": 0 if said["filled"] else size}

    async def wake(self, slot: Slot, said: dict[str, Any]) -> dict[str, Any]:
        slot.is_awake = True
        if not self.take():
            slot.is_awake = False
            raise Failure("out_of_memory", "the GPU is full.")
        slot.switches.tokens = slot.conduct.get("tokens", 4)
        slot.switches.token_s = slot.conduct.get("token_s", 0.0)
        slot.switches.talkative = slot.conduct.get("talkative", False)
        slot.engine.is_ready = True
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        each = [self.size(slot) // len(gpus)] * len(gpus)
        said = {"device_bytes": self.size(slot), "each_device_bytes": each}
        return {"bytes": slot.arena_bytes, **said, "expected_s": slot.conduct.get("expected_s", 0)}

    async def sleep(self, slot: Slot, said: dict[str, Any]) -> dict[str, Any]:
        slot.engine.is_ready = slot.is_awake = False
        self.take()
        return {"seconds": 0.001}

    async def flush(self, slot: Slot, said: dict[str, Any]) -> dict[str, Any]:
        return {"entries": 2, "bytes": 1024, "tenant": said["tenant"]}

    async def close(self, slot: Slot, said: dict[str, Any]) -> dict[str, Any]:
        del self.slots[slot.id]
        if slot.server is not None:
            slot.server.close()
        os.close(slot.fd)
        self.take()
        return {}

    def size(self, slot: Slot) -> int:
        return int(slot.conduct.get("mib", 0)) * MIB if GPUS else KV_BYTES

    def take(self) -> bool:
        """What awake slots take together, and what the process takes for itself once it has touched the GPU."""
        if not GPUS:
            return True
        awake = sum(self.size(slot) for slot in self.slots.values() if slot.is_awake) // MIB
        own = max([int(slot.conduct.get("own_mib", 0)) for slot in self.slots.values()], default=0)
        return fake_gpu.take(GPUS, awake + own)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module", help="which worker it stands for, as launch.py is told")
    parser.add_argument("--program")
    parser.add_argument("--control", required=True)
    path = parser.parse_args().control
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    connection, _ = listener.accept()
    asyncio.run(Worker(connection).serve())


if __name__ == "__main__":
    gc.enable()
    main()
