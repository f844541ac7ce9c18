"""Where a request goes is the configuration's alone: nothing that a caller sends leads it, or our key, elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import gateway, served
from tests.integration.facts import Journal
from tests.integration.raw import http
from tests.standins.standin_provider import KEY, provider

MESSAGES = [{"role": "user", "content": "hi"}]
# The same request in each dialect.
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/api/chat": {"messages": MESSAGES, "stream": False},
}
FIELDS = (
    *("api_base", "base_url", "api_url", "url", "endpoint", "azure_endpoint", "server_url", "host", "proxy"),
    *("openai_api_base", "upstream", "target", "webhook", "callback_url"),
)
HEADERS = (
    *("api-base", "x-api-base", "base-url", "x-base-url", "openai-api-base", "x-litellm-api-base", "x-upstream"),
    *("x-target-url", "helicone-target-url", "x-original-url", "x-rewrite-url", "x-forwarded-host", "forwarded"),
    *("x-forwarded-server", "x-host", "proxy-authorization", "location", "destination"),
)


@dataclass
class Trap:
    """A server that nothing may ask."""

    port: int
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def body(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The request with every field by which some gateway is told where to ask, at the top and below."""
        fields = dict.fromkeys(FIELDS, self.url)
        nested = {"litellm_params": fields, "metadata": {"api_base": self.url}, "extra_body": fields}
        keys = {"api_key": "sk-of-the-caller", "custom_llm_provider": "openai", "extra_headers": {"host": "trap"}}
        return {**asked, "model": "m", **fields, **nested, **keys}

    def headers(self) -> dict[str, str]:
        return dict.fromkeys(HEADERS, self.url)


@contextlib.asynccontextmanager
async def trap() -> AsyncIterator[Trap]:
    def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        set_up.connections += 1
        writer.close()

    server = await asyncio.start_server(taken, "127.0.0.1", 0)
    set_up = Trap(server.sockets[0].getsockname()[1])
    async with server:
        yield set_up


async def test_a_remote_request_goes_to_its_provider_whatever_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KEY", KEY)
    model = {"engine": "remote", "remote": "acme", "use_model_name": "large"}
    # Even those that the operator passes on to engines.
    server = {"forward_headers": list(HEADERS)}
    async with trap() as other, provider(tmp_path) as there:
        async with gateway(tmp_path, {"m": model}, remotes={"acme": there.remote(retries_max=0)}, server=server) as app:
            for path, asked in ASKED.items():
                query = f"{path}?api_base={other.url}&base_url={other.url}"
                await http(app, "POST", query, other.body(asked), headers=other.headers())
                plain = await http(app, "POST", path, {**asked, "model": "m"}, headers=other.headers())
                assert plain.status == 200, (path, plain.body)
            named = {**other.body(ASKED["/v1/chat/completions"]), "model": f"acme:{other.url}"}
            await http(app, "POST", "/v1/chat/completions", named)
        assert len(there.calls) >= 2 * len(ASKED) - 2
        for call in there.calls:
            assert call.headers["host"] == f"localhost:{there.port}" and call.target.startswith("/api/v1/")
            assert "127.0.0.1" not in call.target and call.headers["authorization"] == f"Bearer {KEY}"
            assert not set(HEADERS) & set(call.headers)
            # A provider that is a gateway itself may follow them, with its own key.
            assert not {"api_base", "base_url", "api_key", "custom_llm_provider", "litellm_params"} & set(call.body)
        assert not other.connections


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_request_for_a_local_server_stays_there_whatever_the_caller_sends(tmp_path: Path, kind: str) -> None:
    journal = Journal(tmp_path)
    model = served(kind, tmp_path / "server", *journal.switches)
    asked = {path: ASKED[path] for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat")}
    async with trap() as other, gateway(tmp_path, {"m": model}) as app:
        for path, body in asked.items():
            answer = await http(app, "POST", f"{path}?api_base={other.url}", other.body(body), headers=other.headers())
            assert answer.status in (200, 400), (path, answer.body)
            before = journal.count("asked")
            plain = await http(app, "POST", path, {**body, "model": "m"}, headers=other.headers())
            assert plain.status == 200 and journal.count("asked") == before + 1, (path, plain.body)
        assert not other.connections


# Fields by which a part of one server is told where another is, to fetch what that computed.
PEERS = {
    "vllm": {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1},
        "ec_transfer_params": {"peer_host": "127.0.0.1", "peer_port": 1},
    },
    "sglang": {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1},
}


@pytest.mark.parametrize("kind", PEERS)
async def test_callers_name_no_other_host_to_a_local_server(tmp_path: Path, kind: str) -> None:
    journal = Journal(tmp_path)
    model = served(kind, tmp_path / "server", *journal.switches, routes=["/v1/**"])
    async with gateway(tmp_path, {"m": model}) as app:
        body = {"model": "m", "messages": MESSAGES, "max_tokens": 9}
        for path in ("/v1/chat/completions", "/v1/messages"):
            assert (await http(app, "POST", path, {**body, **PEERS[kind]})).status == 200
        before = journal.count("asked")
        assert before == 2 and not any(set(PEERS[kind]) & set(line["fields"]) for line in journal.lines("asked"))
        for name, value in PEERS[kind].items():
            passed = await http(app, "POST", "/upstream/m/v1/chat/completions", {**body, name: value})
            assert (passed.status, passed.error["param"]) == (400, name), passed.body
        assert (await http(app, "POST", "/upstream/m/v1/chat/completions", body)).status == 200
        assert journal.count("asked") == before + 1
