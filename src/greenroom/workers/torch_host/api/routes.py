"""One model's OpenAI API on a Unix socket. Owns the routes and what they need. The socket stays open while the
model sleeps; the gateway sends no requests then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...serving.errors import ApiError, encoded, unsupported
from ...serving.fields import parse_body
from ...serving.http import AnswerWriter, HttpServer
from ...serving.request_reader import Request
from ..engine.requests import CallbackQueue, InferenceEngine
from ..sandbox.grammar import Grammars
from ..sandbox.pool import SandboxPool
from ..sandbox.schema_trials import SchemaTrials
from ..text.harmony import Harmony
from ..text.templates import RENDER_DEADLINE_S, ChatTemplate
from ..text.tokens import TextCodec, read_config
from ..weights.sentence_config import SentenceConfig
from .completions import chat, complete
from .embeddings import embed
from .model_context import ModelContext, Origin

# Larger bodies are parsed in a thread, so that other streams go on meanwhile.
INLINE_BODY_BYTES_MAX = 64 * 1024

_POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_GETS = ("/health", "/v1/models")


class ModelServer(HttpServer):
    """To be made on the loop that serves it. Closing it cuts all connections and cancels their sequences."""

    def __init__(
        self,
        text: TextCodec,
        engine: InferenceEngine,
        model: str,
        *,
        templates: SandboxPool,
        trials: SchemaTrials,
        sentence: SentenceConfig | None = None,
        template_deadline_s: float = RENDER_DEADLINE_S,
    ) -> None:
        super().__init__(self.handle)
        template = ChatTemplate(text, templates, template_deadline_s)
        self.model = ModelContext(
            name=model,
            engine=engine,
            text=text,
            template=template,
            grammars=Grammars(text, trials),
            callbacks=CallbackQueue(asyncio.get_running_loop()),
            harmony=Harmony.of(text, template.source),
            sentence=sentence,
            dimensions=_dimensions(text.folder),
        )
        self._opened = int(time.time())

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self.model.grammars.close()

    async def handle(self, request: Request, answer: AnswerWriter) -> None:
        try:
            if request.path in _GETS:
                self._look(request, answer)
            elif request.path in _POSTS:
                await self._ask(request, answer)
            else:
                raise ApiError(f"There is no {request.path[:200]}.", status=404, code="not_found")
        except RecursionError:
            raise ApiError("The body is nested too deeply.") from None

    def _look(self, request: Request, answer: AnswerWriter) -> None:
        if request.method != "GET":
            raise ApiError(f"{request.path} is read with GET.", status=405, code="method_not_allowed")
        body: Mapping[str, Any] = {"status": "ok"}
        if request.path == "/v1/models":
            model = {"id": self.model.name, "object": "model", "created": self._opened, "owned_by": "greenroom"}
            body = {"object": "list", "data": [model]}
        answer.whole(200, encoded(body))

    async def _ask(self, request: Request, answer: AnswerWriter) -> None:
        if request.method != "POST":
            raise ApiError(f"{request.path} is asked with POST.", status=405, code="method_not_allowed")
        origin = Origin.of(request.headers)
        body = await _body(request.body)
        if request.path == "/v1/embeddings":
            if self.model.sentence is None:
                raise unsupported(f"{self.model.name} writes text. For vectors, set embedding: true for it.")
            await embed(self.model, self.model.sentence, body, answer)
            return
        if self.model.sentence is not None:
            raise unsupported(f"{self.model.name} makes vectors: ask /v1/embeddings.")
        respond = chat if request.path == "/v1/chat/completions" else complete
        await respond(self.model, body, origin, answer)


async def _body(raw: bytes) -> dict[str, Any]:
    if len(raw) <= INLINE_BODY_BYTES_MAX:
        return parse_body(raw)
    return await asyncio.to_thread(parse_body, raw)


def _dimensions(folder: Path) -> frozenset[int]:
    """The vector lengths that the model was trained for, besides its full one."""
    said = read_config(folder / "config.json").get("matryoshka_dimensions")
    return frozenset(size for size in said if isinstance(size, int)) if isinstance(said, list) else frozenset()
