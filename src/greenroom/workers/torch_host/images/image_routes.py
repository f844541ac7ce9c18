"""One pipeline's images API on a Unix socket: generations, edits, and how far a request is. Owns the routes and the
shape of answers. A client that leaves cancels what is made for it."""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ...serving.errors import ApiError, encoded, failed, unavailable, unsupported
from ...serving.fields import parse_body
from ...serving.forms import read_form
from ...serving.http import AnswerWriter, HttpServer
from ...serving.request_reader import Request
from ..failures import Failure, OutOfMemory, WorkCancelled
from .image_engine import ImageEngine, ImageJob
from .image_fields import ImageRequest, read_edit, read_generation

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
VARIATIONS = "/v1/images/variations"
_GETS = ("/health", "/v1/models", "/progress")
ID_HEADER = "x-request-id"
# The gateway counts by it.
PICTURES_HEADER = "x-pictures"


class ImageApi:
    """Handles requests."""

    def __init__(self, engine: ImageEngine, model: str) -> None:
        self._engine, self._model = engine, model
        self._opened = int(time.time())
        self._jobs: dict[str, ImageJob] = {}

    async def handle(self, request: Request, answer: AnswerWriter) -> None:
        if request.path in _GETS:
            if request.method != "GET":
                raise ApiError(f"{request.path} is read with GET.", status=405, code="method_not_allowed")
            answer.whole(200, encoded(self._look(request)))
            return
        if request.path == VARIATIONS:
            raise unsupported("Pipelines make no variations: send the picture to /v1/images/edits with a prompt.")
        if request.path not in (GENERATIONS, EDITS):
            raise ApiError(f"There is no {request.path[:200]}.", status=404, code="not_found")
        if request.method != "POST":
            raise ApiError(f"{request.path} is asked with POST.", status=405, code="method_not_allowed")
        # Pictures are decoded in a thread: other requests go on meanwhile.
        asked = await asyncio.to_thread(self._read, request)
        job = await self._made(asked, request.headers.get(ID_HEADER, ""))
        answer.whole(200, await asyncio.to_thread(_answer, job), {PICTURES_HEADER: str(len(job.made))})

    def _look(self, request: Request) -> dict[str, Any]:
        if request.path == "/progress":
            job = self._jobs.get(parse_qs(request.query).get("request", [""])[0])
            return {"progress": round(job.progress, 4) if job is not None else None}
        if request.path == "/v1/models":
            model = {"id": self._model, "object": "model", "created": self._opened, "owned_by": "greenroom"}
            return {"object": "list", "data": [model]}
        return {"status": "ok"}

    def _read(self, request: Request) -> ImageRequest:
        pipelines = self._engine.pipelines
        if request.path == EDITS:
            return read_edit(pipelines, read_form(request.headers.get("content-type", ""), request.body))
        return read_generation(pipelines, parse_body(request.body))

    async def _made(self, asked: ImageRequest, request_id: str) -> ImageJob:
        job = ImageJob(asked)
        if request_id:
            self._jobs[request_id] = job
        try:
            self._engine.submit(job)
            await asyncio.wrap_future(job.done)
            return job
        except OutOfMemory:
            raise ApiError(
                "Memory does not suffice for a picture of this size. Ask for a smaller one.",
                status=503,
                code="out_of_memory",
            ) from None
        except WorkCancelled as error:
            raise unavailable(str(error)) from None
        except Failure as error:
            raise failed(str(error)) from None
        finally:
            self._engine.cancel(job)
            if self._jobs.get(request_id) is job:
                del self._jobs[request_id]


def _answer(job: ImageJob) -> bytes:
    data = [
        {"b64_json": base64.b64encode(picture).decode(), "seed": seed}
        for picture, seed in zip(job.made, job.asked.seeds, strict=True)
    ]
    timings = {"first_step_s": job.first_step_s, "whole_s": time.monotonic() - job.asked_at}
    return encoded({"created": int(time.time()), "output_format": job.asked.format, "data": data, "timings": timings})


async def serve_images(socket_path: Path, engine: ImageEngine, model: str) -> HttpServer:
    """Serve the pipeline's API here until it is closed. Raises OSError if the path cannot be listened on."""
    served = HttpServer(ImageApi(engine, model).handle)
    await served.open(socket_path)
    return served
