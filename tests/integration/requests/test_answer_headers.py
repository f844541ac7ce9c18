"""What answers tell of cache and cost: the same headers on every engine and route, each once, and nothing made up."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway, tiny, url
from tests.integration.raw import CHAT, Raw, asking, http, request_bytes
from tests.later import Later
from tests.models import tiny as tiny_model
from tests.models import tiny_embedding
from tests.standins import odd_heads_engine
from tests.standins.standin_provider import KEY, provider
from tests.waiting import PATIENCE_S

openai = Later("openai")
pytestmark = pytest.mark.asyncio(loop_scope="module")

Pairs = list[tuple[str, str]]
HIT, REUSED, GPU_TIME = "x-cache-hit", "x-cache-tokens-reused", "x-gpu-time-ms"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
NONE = {"X-Cache-Mode": "none"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    folder = tmp_path_factory.mktemp("told")
    models = {
        "alpha": tiny(tiny_model("alpha")),
        "bag": tiny(tiny_embedding()),
        "command": fake("command"),
        "slow": fake("slow", "--load-s", "1"),
        "cloud": {"engine": "remote", "remote": "acme", "use_model_name": "acme-large"},
    }
    server = {"heartbeat_after_s": 0.1, "metrics_aliases": "runner-api"}
    tenants = {"lab": {"requests_per_minute": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_KEY", KEY)
        async with provider(folder) as there:
            remotes = {"acme": there.remote()}
            async with gateway(folder, models, server=server, remotes=remotes, tenants=tenants) as app:
                yield app


def _pairs(lines: str) -> Pairs:
    found = (line.partition(":") for line in lines.split("\r\n") if line)
    return [(name.lower(), value.strip()) for name, _, value in found]


async def sent(app: App, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Pairs, Pairs]:
    """The status, every line of the head, and every trailer."""
    async with await Raw.open(app) as raw:
        close = {"Connection": "close", **(headers or {})}
        raw.send(request_bytes("POST", path, json.dumps(body).encode(), close))
        async with asyncio.timeout(PATIENCE_S):
            whole = (await raw.reader.read(-1)).decode("latin-1")
    head, _, rest = whole.partition("\r\n\r\n")
    first, _, lines = head.partition("\r\n")
    trailers = rest.rpartition("\r\n0\r\n")[2] if "transfer-encoding: chunked" in lines else ""
    return int(first.split(" ")[1]), _pairs(lines), _pairs(trailers)


def values(pairs: Pairs, name: str) -> list[str]:
    return [value for known, value in pairs if known == name]


@pytest.mark.parametrize(
    ("model", "path", "body", "headers", "told"),
    [
        ("alpha", CHAT, {"messages": MESSAGES}, {}, ("true", "false")),
        ("alpha", CHAT, {"messages": MESSAGES}, NONE, ("false",)),
        ("alpha", CHAT, {"messages": MESSAGES, "stream": True}, {}, ("unknown",)),
        ("alpha", CHAT, {"messages": MESSAGES, "stream": True}, NONE, ("false",)),
        ("alpha", "/v1/completions", {"prompt": "hi", "max_tokens": 2}, {}, ("true", "false")),
        ("alpha", "/completion", {"prompt": "hi", "n_predict": 2}, {}, ("true", "false")),
        ("alpha", "/v1/messages", {"messages": MESSAGES, "max_tokens": 2}, NONE, ("false",)),
        ("alpha", "/v1/messages", {"messages": MESSAGES, "max_tokens": 2, "stream": True}, {}, ("unknown",)),
        ("alpha", "/api/chat", {"messages": MESSAGES}, {}, ("unknown",)),
        ("alpha", "/v1/responses", {"input": "hi", "max_output_tokens": 16, "stream": True}, {}, ("unknown",)),
        ("alpha", "/tokenize", {"content": "hi"}, {}, ("false",)),
        ("bag", "/v1/embeddings", {"input": "hi"}, {}, ("unknown",)),
        ("command", CHAT, {"messages": MESSAGES}, {}, ("unknown",)),
        ("command", CHAT, {"messages": MESSAGES, "stream": True}, {}, ("unknown",)),
        ("command", CHAT, {"messages": MESSAGES}, NONE, ("unknown",)),
        ("cloud", CHAT, {"messages": MESSAGES}, {}, ("unknown", "true", "false")),
        ("cloud", CHAT, {"messages": MESSAGES, "stream": True}, {}, ("unknown",)),
    ],
)
async def test_the_headers_of_the_cache_are_there_exactly_once(
    app: App, model: str, path: str, body: dict[str, Any], headers: dict[str, str], told: tuple[str, ...]
) -> None:
    status, head, trailers = await sent(app, path, {"model": model, **body}, headers)
    assert status == 200
    (hit,), (reused,) = values(head, HIT), values(head, REUSED)
    assert hit in told
    assert (int(reused) > 0) == (hit == "true")
    assert values(trailers, HIT) == values(trailers, REUSED) == []


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
async def test_the_end_of_a_stream_tells_how_long_the_engine_computed(app: App, path: str) -> None:
    body = {"model": "alpha", "messages": MESSAGES, "max_tokens": 4, "stream": True}
    _, head, trailers = await sent(app, path, body)
    assert (values(head, "trailer"), values(head, GPU_TIME)) == ([GPU_TIME], [])
    (time_ms,) = values(trailers, GPU_TIME)
    assert int(time_ms) >= 0
    # One that does not tell is not guessed.
    assert (await sent(app, CHAT, {"model": "command", "messages": MESSAGES, "stream": True}))[2] == []


async def test_a_stream_that_began_with_heartbeats_tells_the_same(app: App) -> None:
    status, head, _ = await sent(app, CHAT, asking("slow", stream=True))
    assert (status, values(head, "x-queue-wait-ms")) == (200, []), "its head came before its model"
    assert (values(head, HIT), values(head, REUSED), values(head, "trailer")) == (["unknown"], ["0"], [GPU_TIME])


async def test_the_openai_client_reads_a_stream_with_a_trailer(app: App) -> None:
    async with openai.AsyncOpenAI(base_url=url(app) + "/v1", api_key="none", timeout=PATIENCE_S) as client:
        # Twice by one connection: nothing of the first answer is left in it.
        for _ in range(2):
            stream = await client.chat.completions.create(model="alpha", messages=MESSAGES, max_tokens=4, stream=True)
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason is not None
        raw = await client.chat.completions.with_raw_response.create(model="alpha", messages=MESSAGES, max_tokens=2)
        assert int(raw.headers[GPU_TIME]) >= 0 and raw.parse().choices


async def test_refusals_are_counted_as_errors_of_their_tenant(app: App) -> None:
    async def errors(model: str, tenant: str) -> float:
        async with await Raw.open(app) as raw:
            raw.send(request_bytes("GET", "/metrics", None))
            text = (await raw.answer()).body.decode()
        line = f'vllm_requests_total{{model="{model}",status="error",tenant="{tenant}"}} '
        other = f'vllm_requests_total{{model="{model}",tenant="{tenant}",status="error"}} '
        found = [one for one in text.splitlines() if one.startswith((line, other))]
        return float(found[0].rpartition(" ")[2]) if found else 0.0

    before = await errors("alpha", ""), await errors("unknown", ""), await errors("unknown", "lab")
    bad = {"model": "alpha", "messages": "no list"}
    by_lab = {"X-Tenant-ID": "lab"}
    statuses = [(await sent(app, CHAT, bad))[0], (await sent(app, CHAT, {"model": "nothing", "messages": MESSAGES}))[0]]
    statuses += [(await sent(app, CHAT, asking("command"), by_lab))[0] for _ in range(2)]
    assert statuses == [400, 404, 200, 429]
    after = await errors("alpha", ""), await errors("unknown", ""), await errors("unknown", "lab")
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 1]


ENGINE = [sys.executable, "-I", "-S", odd_heads_engine.__file__, "--port", "${PORT}"]
OURS = {"content-type", "content-length", "date", "etag", "x-request-id", "x-queue-wait-ms"}


async def test_only_what_may_pass_of_an_engines_head_reaches_a_caller(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"odd": {"cmd": ENGINE, "memory_mib": 50}}) as app:
        answer = await http(app, "GET", "/upstream/odd/cookies")
        assert answer.status == 200 and {name.lower() for name in answer.headers} == OURS
        assert answer.headers["content-type"] == "application/json" and answer.headers["etag"] == "kept"
        assert answer.headers["x-request-id"].startswith("r-")
        for name in sorted(odd_heads_engine.HEADS.keys() - {"cookies"}):
            answer = await http(app, "GET", f"/upstream/odd/{name}")
            assert (answer.status, answer.error["code"]) == (502, "engine_lost"), name
