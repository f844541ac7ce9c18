"""The API itself, where the gateway is in no way needed: progress, sleep, and what is not there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from greenroom.workers.serving.http import HttpServer
from greenroom.workers.whisper.api import AudioApi
from greenroom.workers.whisper.main import BODY_BYTES_MAX
from greenroom.workers.whisper.transcribing import Transcriber
from tests.samples.sounds import BOUNDARY, form, silence
from tests.waiting import until
from tests.workers.whisper.test_sound import ScriptedModel

PATH = "/v1/audio/transcriptions"
WAIT_S = 30


class Worker:
    """A server of the API with a model that hears what it is told to."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.model = ScriptedModel(every_s=10)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Worker]:
        api = AudioApi(Transcriber(self.model, beam_size=1, at_once=2))
        server = HttpServer(api.handle, body_bytes_max=BODY_BYTES_MAX)
        await server.open(self.socket)
        try:
            yield self
        finally:
            self.model.may_go_on.set()
            await server.close()

    async def ask(self, method: str, path: str, body: bytes = b"", request_id: str = "") -> tuple[int, Any]:
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {kind}\r\n"
        writer.write(f"{head}X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        writer.close()
        said, _, rest = answer.partition(b"\r\n\r\n")
        return int(said.split()[1]), json.loads(rest)


async def test_progress_is_the_part_of_the_sound_that_was_heard(socket_folder: Path) -> None:
    async with Worker(socket_folder / "s").serving() as worker:
        worker.model.may_go_on.clear()
        body = form([("model", "x")], silence(100))
        asked = asyncio.ensure_future(worker.ask("POST", PATH, body, "r-7"))
        await until(lambda: bool(worker.model.asked), "it hears")
        assert await worker.ask("GET", "/progress?request=r-7") == (200, {"progress": 0.0})
        assert await worker.ask("GET", "/progress?request=r-8") == (200, {"progress": None})
        worker.model.may_go_on.set()
        status, answer = await asked
        assert (status, answer["text"]) == (200, " ".join(f"w{number}" for number in range(10)))
        assert (await worker.ask("GET", "/progress?request=r-7"))[1] == {"progress": None}


async def test_model_asleep_is_not_asked_until_it_is_woken(socket_folder: Path) -> None:
    async with Worker(socket_folder / "s").serving() as worker:
        assert await worker.ask("POST", "/control/sleep") == (200, {"asleep": True})
        assert (await worker.ask("GET", "/health"))[1]["asleep"] is True
        status, answer = await worker.ask("POST", PATH, form([("model", "x")], silence(10)))
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert await worker.ask("POST", "/control/wake") == (200, {"asleep": False})
        assert (await worker.ask("POST", PATH, form([("model", "x")], silence(10))))[0] == 200
        assert worker.model.moves == ["sleep", "wake"]


async def test_what_is_not_there_is_refused(socket_folder: Path) -> None:
    async with Worker(socket_folder / "s").serving() as worker:
        assert (await worker.ask("GET", PATH))[0] == 405
        assert (await worker.ask("POST", "/v1/chat/completions"))[0] == 404
        status, answer = await worker.ask("POST", PATH, b"--other\r\n")
        assert (status, answer["error"]["code"]) == (400, "broken_form")
        include = form([("model", "x"), ("include[]", "logprobs")], silence(10))
        assert (await worker.ask("POST", PATH, include))[1]["error"]["code"] == "unsupported"
