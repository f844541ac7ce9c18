"""The routes of the worker: pictures by OpenAI's API, how far one is, sleep, and whether ComfyUI is there.

Owns the order of one generation: submit, watch, fetch; and its end if the client leaves or ComfyUI does. One runs at a
time: ComfyUI has one queue, and the gateway has a better one.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ..serving.errors import ApiError, encoded, failed, new_id, unavailable
from ..serving.fields import parse_body
from ..serving.http import AnswerWriter
from ..serving.request_reader import Request
from .client import Comfy, ComfyGone
from .workflow import Workflow, WorkflowPlan

GENERATIONS = "/v1/images/generations"
# Its events say when a workflow has ended; if they are missed, this is how long that stays unknown.
LOOK_EVERY_S = 1.0
FREE_MAX_S = 60.0
CANCEL_MAX_S = 30.0
END_NOTICED_S = 1.0
# The gateway counts by it.
PICTURES_HEADER = "x-pictures"


class WorkflowRun:
    """One request, and how far it is."""

    def __init__(self, runs: int, samplers: int) -> None:
        self._runs, self._samplers = runs, max(1, samplers)
        self.prompt_id: str | None = None
        self.runs_done = 0
        self._done: set[str] = set()
        self._at: tuple[str, float] = ("", 0.0)
        self.changed = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        return self.runs_done > 0 or self.prompt_id is not None

    def next_run(self) -> None:
        self.runs_done += 1
        self._done, self._at, self.prompt_id = set(), ("", 0.0), None

    @property
    def progress(self) -> float:
        within = (len(self._done - {self._at[0]}) + self._at[1]) / self._samplers
        return min(1.0, (self.runs_done + min(1.0, within)) / self._runs)

    def hear(self, kind: object, data: Mapping[str, Any], samplers: frozenset[str]) -> None:
        """An event of ComfyUI. Those of other workflows, and nonsense, change nothing."""
        if data.get("prompt_id") != self.prompt_id:
            return
        node, value, most = str(data.get("node")), data.get("value"), data.get("max")
        if kind == "progress" and node in samplers and isinstance(value, int | float) and isinstance(most, int | float):
            if most > 0 and 0 <= value <= most:
                if self._at[0] != node:
                    self._done |= {self._at[0]} & samplers
                self._at = (node, value / most)
        elif kind in ("execution_success", "execution_error", "execution_interrupted") or data.get("node", "") is None:
            self.changed.set()


class WorkflowApi:
    def __init__(self, comfy: Comfy, plan: WorkflowPlan, output: Path) -> None:
        """`output` is a folder of its own, in which ComfyUI may leave pictures."""
        self._comfy = comfy
        self._output = output
        self._plan = plan
        self._samplers = plan.samplers
        self._turn = asyncio.Lock()
        self._generations: dict[str, WorkflowRun] = {}
        # Set when ComfyUI has ended; its words.
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cleaning: set[asyncio.Task[None]] = set()
        self.is_up = False
        # Set while no generation runs or waits.
        self.idle = asyncio.Event()
        self.idle.set()

    async def handle(self, request: Request, answer: AnswerWriter) -> None:
        routes = {
            ("GET", "/health"): self._health,
            ("GET", "/progress"): self._progress,
            ("POST", "/sleep"): self._sleep,
            ("POST", GENERATIONS): self._generate,
        }
        route = routes.get((request.method, request.path))
        if route is None:
            raise ApiError(f"There is no {request.method} {request.path}.", status=404, code="not_found")
        found = await route(request)
        answer.whole(200, encoded(found), _counted(found))

    async def listen(self) -> None:
        """Hear ComfyUI's events, for ever."""
        async for event in self._comfy.events():
            if isinstance(data := event.get("data"), dict):
                for generation in self._generations.values():
                    generation.hear(event.get("type"), data, self._samplers)

    def end(self, why: str) -> None:
        """ComfyUI has ended: those that wait for it are told."""
        self.is_up = False
        if not self._ended.done():
            self._ended.set_result(why)

    async def _health(self, request: Request) -> object:
        if not self.is_up:
            raise unavailable("ComfyUI is starting.")
        return {"status": "ok"}

    async def _progress(self, request: Request) -> object:
        found = self._generations.get((parse_qs(request.query).get("request") or [""])[0])
        if found is None:
            raise ApiError("There is no such request.", status=404, code="not_found")
        return {"progress": round(found.progress, 4)}

    async def _sleep(self, request: Request) -> object:
        try:
            async with asyncio.timeout(FREE_MAX_S), self._turn:
                await self._comfy.free()
        except TimeoutError:
            raise unavailable(f"ComfyUI did not free its memory within {FREE_MAX_S:g} s.") from None
        except ComfyGone as gone:
            raise self._gone(gone) from None
        return {}

    # --- a generation -------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> object:
        body = parse_body(request.body)
        if body.get("response_format") not in (None, "b64_json"):
            raise ApiError("response_format must be b64_json.", param="response_format")
        if body.get("stream"):
            raise ApiError("Pictures are not streamed.", param="stream")
        runs = self._plan.runs(body)
        request_id = request.headers.get("x-request-id") or new_id("request")
        self.idle.clear()
        generation = self._generations[request_id] = WorkflowRun(len(runs), len(self._samplers))
        pictures: list[bytes] | None = None
        try:
            async with self._turn:
                pictures = [picture for run in runs for picture in await self._run(generation, run)]
        except ComfyGone as gone:
            if generation.has_begun or not await self._has_ended():
                raise self._gone(gone) from None
        finally:
            del self._generations[request_id]
            if not self._generations:
                self.idle.set()
        if pictures is None:
            # Nothing of it was begun. Unanswered, its connection is cut, and the gateway asks the next ComfyUI.
            return await asyncio.get_running_loop().create_future()
        coded = [{"b64_json": base64.b64encode(picture).decode()} for picture in pictures]
        return {"created": int(time.time()), "data": coded}

    async def _run(self, generation: WorkflowRun, workflow: Workflow) -> list[bytes]:
        """The pictures of one workflow. Whatever goes wrong, nothing of it is left. Raises ApiError or ComfyGone."""
        submitted = asyncio.ensure_future(self._comfy.submit(workflow))
        try:
            # To the end even if the client leaves meanwhile: only its id can stop it.
            generation.prompt_id = await asyncio.shield(submitted)
            made = await self._made(generation, generation.prompt_id)
            pictures = [await self._comfy.picture(about) for about in made]
        except BaseException:
            await self._stop(submitted)
            raise
        await self._comfy.forget(generation.prompt_id)
        await asyncio.to_thread(_empty, self._output)
        generation.next_run()
        if not pictures:
            raise failed("The workflow made no picture: it needs a node that saves or shows one.")
        return pictures

    async def _made(self, generation: WorkflowRun, prompt_id: str) -> list[dict[str, str]]:
        while (made := await self._comfy.finished(prompt_id)) is None:
            heard = asyncio.ensure_future(generation.changed.wait())
            await asyncio.wait((heard, self._ended), timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            heard.cancel()
            generation.changed.clear()
            if self._ended.done():
                raise ComfyGone(self._ended.result())
        return made

    async def _stop(self, submitted: asyncio.Future[str]) -> None:
        """Take back what was submitted. The next generation waits for this, so that it is not interrupted instead."""

        async def stop() -> None:
            try:
                async with asyncio.timeout(CANCEL_MAX_S):
                    await self._comfy.cancel(await submitted)
                await asyncio.to_thread(_empty, self._output)
            except (ApiError, ComfyGone, TimeoutError):
                # It was refused, or there is nothing left to stop.
                return

        task = asyncio.get_running_loop().create_task(stop())
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                # The server closes; what was begun is finished all the same, within its bound.
                continue

    async def _has_ended(self) -> bool:
        """Whether the process has ended, which may be noticed a moment after its last words."""
        await asyncio.wait((self._ended,), timeout=END_NOTICED_S)
        return self._ended.done()

    def _gone(self, gone: ComfyGone) -> ApiError:
        why = self._ended.result() if self._ended.done() else f"ComfyUI is gone: {gone}."
        return ApiError(why, status=502, code="engine_lost")


def _empty(folder: Path) -> None:
    """Pictures that were sent are not kept."""
    for file in folder.rglob("*"):
        if file.is_file() or file.is_symlink():
            file.unlink(missing_ok=True)


def _counted(found: object) -> dict[str, str]:
    """The header that tells how many pictures an answer has."""
    pictures = found.get("data") if isinstance(found, dict) else None
    return {} if pictures is None else {PICTURES_HEADER: str(len(pictures))}
