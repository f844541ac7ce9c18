"""Remote models and their names end to end: the OpenAI package, the gateway, a provider that counts its calls."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId, Tier
from greenroom.runtime.known_models import RemoteNames
from tests.harness import fake, gateway, url, write_config
from tests.integration.raw import CHAT, asking, chat, http
from tests.later import Later
from tests.standins.standin_provider import KEY, Provider, provider
from tests.waiting import PATIENCE_S, until

openai = Later("openai")
HELLO: Any = [{"role": "user", "content": "hi"}]
JSON = "content-type: application/json\r\n"
pytestmark = pytest.mark.asyncio


def cloud(**keys: Any) -> dict[str, Any]:
    return {"engine": "remote", "remote": "acme", "use_model_name": "acme-large", **keys}


def client_of(app: App, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url(app) + "/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


async def test_the_openai_client_talks_to_a_remote_model_whole_and_as_a_stream(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, {"cloud": cloud()}, remotes={"acme": there.remote()}) as app, client_of(app) as client:
        answer = await client.chat.completions.create(model="cloud", messages=HELLO)
        assert answer.choices[0].message.content == "hello" and answer.usage and answer.usage.prompt_tokens == 1000
        stream = await client.chat.completions.create(model="cloud", messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "hello"
        # It was asked for the usage of the stream, which the caller did not ask for.
        assert all(chunk.usage is None for chunk in chunks)
        calls = there.calls
        assert [call.target for call in calls] == ["/api/v1/chat/completions"] * 2
        assert all(call.headers["authorization"] == f"Bearer {KEY}" for call in calls)
        assert all(call.headers["host"] == f"localhost:{there.port}" for call in calls)
        assert calls[0].body == {"model": "acme-large", "messages": HELLO}
        # The connection was used again.
        assert there.connections == 1
        # A provider may know tools that no engine here does.
        search: Any = [{"type": "web_search"}]
        await client.chat.completions.create(model="cloud", messages=HELLO, tools=search)
        assert there.calls[-1].body == {"model": "acme-large", "messages": HELLO, "tools": search}


async def test_neither_key_goes_where_it_does_not_belong(
    there: Provider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = {"api_keys": [{"name": "ops", "key": "sk-of-the-caller", "admin": True}]}
    server["forward_headers"] = ["x-trace-id", "x-api-key"]
    headers = {"x-api-key": "sk-of-the-caller", "cookie": "a=b", "x-trace-id": "t", "openai-organization": "theirs"}
    remotes = {"acme": there.remote(retries_max=0)}
    async with gateway(tmp_path, {"cloud": cloud()}, remotes=remotes, server=server) as app:
        told = [await chat(app, "cloud", headers=headers)]
        assert set(there.calls[0].headers) == {
            *("host", "x-request-id", "content-length", "user-agent", "authorization", "content-type")
        }
        # A provider that repeats the key it was given.
        there.script += [(401, JSON, f'{{"error": "{KEY} is wrong"}}'.encode())]
        told.append(await chat(app, "cloud", headers=headers))
        for path in ("/api/v1/status", "/api/v1/models/cloud", "/api/v1/events/none", "/api/v1/requests"):
            told.append(await http(app, "GET", path, headers=headers))
        log = app.slots.log(ModelId("cloud")).tail(100)
    assert told[0].status == 200 and told[1].status == 502 and told[1].error["code"] == "remote_refused"
    assert told[1].headers["x-should-retry"] == "false"
    assert not any(KEY in str(answer.headers) + answer.body.decode() for answer in told)
    assert not {"set-cookie", "openai-organization", "x-ratelimit-remaining-tokens"} & set(told[0].headers)
    assert KEY not in caplog.text + "".join(log) and KEY not in repr(app.slots.live)


async def test_it_takes_no_memory_and_is_always_ready(there: Provider, tmp_path: Path) -> None:
    models = {"cloud": cloud(concurrency=2), "one": fake("one", memory_mib=100), "two": fake("two", memory_mib=100)}
    company = {"groups": {"all": {"members": ["one", "two"], "swap": True, "exclusive": True}}}
    remotes, scheduler = {"acme": there.remote()}, {"company": company}
    async with gateway(tmp_path, models, budget_mib=100, remotes=remotes, scheduler=scheduler) as app:
        view = app.loop.scheduler.view

        def slot_of(model: str) -> Any:
            return next(iter(view.slots_of(ModelId(model))), None)

        await until(lambda: slot_of("cloud") is not None and slot_of("cloud").is_serving, "it is ready from the start")
        slot = slot_of("cloud").id
        for model in ("one", "cloud", "two", "cloud"):
            assert (await chat(app, model)).status == 200
        assert slot_of("cloud").id == slot and slot_of("cloud").tier is Tier.READY
        assert not view.ledger.held_by(slot)
        assert slot_of("two").is_serving and (slot_of("one") is None or not slot_of("one").is_serving)
        # As many at once as it may be asked.
        there.may_answer.clear()
        asked = [asyncio.create_task(chat(app, "cloud")) for _ in range(4)]
        await until(lambda: len(there.calls) == 4, "two at once beside the two before")
        await until(lambda: sum(1 for _ in app.tickets.open) == 4, "all have come")
        assert len(there.calls) == 4
        there.may_answer.set()
        assert [(await one).status for one in asked] == [200] * 4
        told = (await http(app, "GET", "/api/v1/models/cloud")).json()
        assert told["engine"] == "remote"
        assert (await http(app, "POST", "/api/v1/models/cloud/sleep")).status == 422
        assert (await http(app, "GET", "/upstream/cloud/v1/models")).status == 403


async def test_certificates_are_checked(there: Provider, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with provider(tmp_path / "other", name="elsewhere.example") as impostor:
        by_system = {**there.remote(retries_max=0)}
        del by_system["ca_file"]
        remotes = {"acme": by_system, "other": impostor.remote(retries_max=0)}
        models = {"stranger": cloud(), "impostor": cloud(remote="other")}
        async with gateway(tmp_path, models, remotes=remotes) as app:
            for model in models:
                answer = await chat(app, model)
                assert answer.status == 502 and answer.error["code"] == "remote_failed"
                assert "certificate" in answer.error["message"] and "localhost" not in answer.error["message"]
        assert there.calls == impostor.calls == []


async def test_a_busy_provider_is_asked_again_before_the_first_byte(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, {"cloud": cloud()}, remotes={"acme": there.remote(retries_max=2)}) as app:
        there.script += [(429, JSON + "retry-after: 0\r\n", b"{}"), (503, JSON, b"{}")]
        async with client_of(app) as client:
            stream = await client.chat.completions.create(model="cloud", messages=HELLO, stream=True)
            said = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
        assert "".join(said) == "hello" and len(there.calls) == 3
        assert all(call.body == there.calls[0].body for call in there.calls)
        # Not asked again: the caller's own mistake, a wait that is too long, a provider that says no.
        for status, header, code in (
            (400, "", None),
            (429, "retry-after: 3600\r\n", "remote_busy"),
            (500, "x-should-retry: false\r\n", "remote_failed"),
            (302, "location: https://elsewhere.example/\r\n", "remote_failed"),
        ):
            there.calls.clear()
            there.script.append((status, JSON + header, b'{"error": {"message": "theirs"}}'))
            answer = await chat(app, "cloud")
            assert len(there.calls) == 1
            assert answer.status == {None: 400, "remote_busy": 429}.get(code, 502)
            assert answer.error["message"] == "theirs" if code is None else answer.error["code"] == code
            assert answer.headers.get("retry-after") == ("3600" if code == "remote_busy" else None)
        # And no more often than it may.
        there.calls.clear()
        there.script += [(529, JSON + "retry-after: 0\r\n", b"{}")] * 3
        with pytest.raises(openai.APIStatusError) as failed:
            async with client_of(app) as client:
                await client.chat.completions.create(model="cloud", messages=HELLO)
        assert failed.value.status_code == 502 and len(there.calls) == 3


async def test_a_provider_that_does_not_answer_is_given_up(there: Provider, tmp_path: Path) -> None:
    remotes = {"acme": there.remote(first_byte_timeout_s=0.3, retries_max=0), "gone": there.remote(retries_max=1)}
    remotes["gone"]["base_url"] = "https://localhost:1/v1"
    async with gateway(tmp_path, {"cloud": cloud(), "gone": cloud(remote="gone")}, remotes=remotes) as app:
        there.may_answer.clear()
        answer = await chat(app, "cloud")
        assert answer.status == 504 and answer.error["code"] == "remote_timeout"
        there.may_answer.set()
        answer = await chat(app, "gone")
        assert answer.status == 502 and "cannot be reached" in answer.error["message"]


async def test_a_caller_that_leaves_while_it_waits_is_not_asked_for_again(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, {"cloud": cloud()}, remotes={"acme": there.remote()}) as app:
        there.script += [(503, JSON + "retry-after: 1\r\n", b"{}")]
        leaving = asyncio.create_task(chat(app, "cloud"))
        await until(lambda: there.calls, "the first call")
        leaving.cancel()
        await until(lambda: not app.tickets.open, "the request has ended")
        assert (await chat(app, "cloud")).status == 200
        await asyncio.sleep(1.2)
        assert len(there.calls) == 2


async def test_a_model_without_its_key_fails_alone_and_a_reload_brings_it(there: Provider, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    acme = there.remote(api_key_file=str(secret))
    del acme["api_key_env"]
    models = {"cloud": cloud(), "local": fake("local")}
    async with gateway(tmp_path, models, remotes={"acme": acme}) as app:
        answer = await chat(app, "cloud")
        assert answer.status == 503 and str(secret) in answer.error["message"]
        assert (await chat(app, "local")).status == 200
        secret.write_text(f"{KEY}\n")
        secret.chmod(0o600)
        write_config(tmp_path, models, remotes={"acme": {**acme, "connect_timeout_s": 5}})
        changes = await app.reload()
        assert changes.changed == ("cloud",) and changes.at_once == ("remotes",)
        answer = await chat(app, "cloud")
        assert answer.status == 200 and there.calls[0].headers["authorization"] == f"Bearer {KEY}"


async def test_requests_that_would_break_the_head_never_leave(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, {"cloud": cloud()}, remotes={"acme": there.remote()}) as app:
        answer = await http(app, "POST", CHAT + "?api-version=1&key=x", asking("cloud"))
        assert answer.status == 200 and there.calls[0].target == "/api/v1/chat/completions"
        assert (await http(app, "POST", "/tokenize", {"model": "cloud", "content": "hi"})).status == 400


async def test_callers_choose_neither_the_model_nor_its_price(there: Provider, tmp_path: Path) -> None:
    chosen = {"models": ["dear"], "fallbacks": ["dear"], "route": "fallback", "provider": {"order": ["dear"]}}
    chosen |= {
        "plugins": [{"id": "web"}],
        "service_tier": "priority",
        "chat_template_kwargs": {"enable_thinking": True},
    }
    models = {"cloud": cloud(), "flexible": cloud(set_params={"service_tier": "flex"})}
    async with gateway(tmp_path, models, remotes={"acme": there.remote()}) as app:
        for model in models:
            assert (await chat(app, model, **chosen)).status == 200
        plain, flexible = (call.body for call in there.calls)
        assert not chosen.keys() & plain.keys()
        assert chosen.keys() & flexible.keys() == {"service_tier"} and flexible["service_tier"] == "flex"


KEYS = [
    {"name": "ops", "key": "ops", "admin": True},
    {"name": "plain", "key": "plain"},
    {"name": "cloud", "key": "cloud", "verbs": ["remote"]},
    {"name": "fenced", "key": "fenced", "verbs": ["remote"], "models": ["acme:l*"]},
]


def as_(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_names_need_the_verb_and_go_to_the_provider(there: Provider, tmp_path: Path) -> None:
    models: dict[str, Any] = {"local": fake("local"), "acme:mine": {"remote": "acme", "use_model_name": "theirs"}}
    remotes = {"acme": there.remote(names={"l": "acme-large"})}
    async with gateway(tmp_path, models, remotes=remotes, server={"api_keys": KEYS}) as app:
        refused = await chat(app, "acme:l", headers=as_("plain"))
        assert refused.status == 403 and refused.error["code"] == "not_allowed"
        assert (await chat(app, "acme:m", headers=as_("fenced"))).status == 404
        assert (await chat(app, "none:l", headers=as_("ops"))).status == 404
        assert (await chat(app, "acme:", headers=as_("ops"))).status == 400
        assert there.calls == []
        for key, name in (("cloud", "l"), ("cloud", "any/thing:8b"), ("fenced", "l"), ("ops", "gpt\u00e9")):
            answer = await chat(app, f"acme:{name}", headers=as_(key))
            assert answer.status == 200 and answer.text == "hello"
        # That it is known by now opens it to no other key.
        assert (await chat(app, "acme:l", headers=as_("plain"))).status == 403
        # One that is configured is for every key.
        assert (await chat(app, "acme:mine", headers=as_("plain"))).status == 200
        asked = [call.body["model"] for call in there.calls]
        assert asked == ["acme-large", "any/thing:8b", "acme-large", "gpt\u00e9", "theirs"]
        listed = [one["id"] for one in (await http(app, "GET", "/v1/models", headers=as_("cloud"))).json()["data"]]
        assert set(listed) == {"local", "acme:mine"}
        usage = (await http(app, "GET", "/api/v1/usage", headers=as_("ops"))).json()
        assert "acme:l" in str(usage)
        assert (await http(app, "GET", "/upstream/acme:l/v1/models", headers=as_("ops"))).status == 403


async def test_names_are_forgotten_when_their_provider_changes(there: Provider, tmp_path: Path) -> None:
    models = {"local": fake("local")}
    async with gateway(tmp_path, models, remotes={"acme": there.remote(), "other": there.remote()}) as app:
        assert (await chat(app, "acme:l")).status == (await chat(app, "other:l")).status == 200
        write_config(tmp_path, models, remotes={"acme": there.remote(names={"l": "changed"})})
        await app.reload()
        assert app.catalog.find("acme:l") is None is app.catalog.find("other:l")
        assert (await chat(app, "other:l")).status == 404
        assert (await chat(app, "acme:l")).status == 200
        assert there.calls[-1].body["model"] == "changed"
        view = app.loop.scheduler.view
        await until(lambda: not view.slots_of(ModelId("other:l")), "its slot has left")


async def test_only_so_many_names_are_remembered(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, {"local": fake("local")}, remotes={"acme": there.remote()}) as app:
        app.resolver.remote_names = RemoteNames(app.catalog, app.state, app.models.known, names_max=2)
        for name in ("a", "b", "c"):
            assert (await chat(app, f"acme:{name}")).status == 200
        assert [app.catalog.is_known(f"acme:{name}") for name in "abc"] == [False, True, True]
        there.may_answer.clear()
        busy = [asyncio.create_task(chat(app, f"acme:{name}")) for name in ("b", "c")]
        await until(lambda: len(there.calls) == 5, "both are asked")
        full = await chat(app, "acme:d")
        assert full.status == 503 and full.error["code"] == "too_many_models"
        there.may_answer.set()
        assert [(await one).status for one in busy] == [200, 200]
