"""A model's API on a Unix socket, with an engine that follows a script, and the clients that ask it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from greenroom.workers.serving.http import HttpServer
from greenroom.workers.torch_host.api.routes import ModelServer
from greenroom.workers.torch_host.engine.requests import GenerationRequest
from greenroom.workers.torch_host.sandbox.pool import SandboxPool
from greenroom.workers.torch_host.sandbox.schema_trials import SCHEMAS, SchemaTrials
from greenroom.workers.torch_host.text.templates import TEMPLATES
from greenroom.workers.torch_host.text.tokens import TextCodec
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from tests.workers.torch_host.fake_inference import FakeEngine
from tests.workers.torch_host.samples import tokenizer_folders

if TYPE_CHECKING:
    import httpx2
    import openai


@dataclass
class Rig:
    engine: FakeEngine
    text: TextCodec
    socket: Path
    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI
    served: HttpServer


Opener = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]


@pytest.fixture
def descriptor() -> Iterator[int]:
    """Memory in a file, for an arena."""
    made = os.memfd_create("arena")
    yield made
    os.close(made)


@pytest.fixture(scope="session")
def byte_text(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(tokenizer_folders.byte_level(tmp_path_factory.mktemp("byte") / "tiny-byte"))


@pytest.fixture(scope="session")
def sentence_text(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(tokenizer_folders.sentencepiece(tmp_path_factory.mktemp("sentence") / "tiny-sentence"))


@pytest.fixture
async def templates() -> AsyncIterator[SandboxPool]:
    made = SandboxPool(TEMPLATES)
    yield made
    await made.close()


@pytest.fixture
def open_api(byte_text: TextCodec, socket_folder: Path, templates: SandboxPool) -> Opener:
    """Serve an engine that answers every request with this text (or what a script says)."""

    @contextlib.asynccontextmanager
    async def opened(
        says: str | Callable[[GenerationRequest], Sequence[int]] = "hello world",
        text: TextCodec | None = None,
        context: int = 2048,
        embeds: bool = False,
        sentence: SentenceConfig | None = None,
        template_deadline_s: float = 30.0,
    ) -> AsyncIterator[Rig]:
        # Imported late: other tests of this folder run where no client is installed.
        import httpx2
        import openai

        own = text or byte_text
        script = says if callable(says) else lambda ask: own.tokens_of(says, False)
        engine = FakeEngine(script, context)
        path = socket_folder / "model.sock"
        served = ModelServer(
            own,
            engine,
            "tiny",
            templates=templates,
            trials=SchemaTrials(SandboxPool(SCHEMAS)),
            sentence=(sentence or SentenceConfig()) if embeds else None,
            template_deadline_s=template_deadline_s,
        )
        await served.open(path)
        # Certificates take longer to read than most tests, and no socket has one.
        transport = httpx2.AsyncHTTPTransport(uds=str(path), verify=False)
        http = httpx2.AsyncClient(transport=transport, base_url="http://model", timeout=60)
        client = openai.AsyncOpenAI(api_key="none", base_url="http://model/v1", http_client=http, max_retries=0)
        try:
            yield Rig(engine, own, path, http, client, served)
        finally:
            engine.go.set()
            await http.aclose()
            await served.close()

    return opened
