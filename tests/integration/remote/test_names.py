"""PREFIX:NAME asks a provider for any of its models: for keys with the verb `remote`, and for no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.core.model import ModelId
from greenroom.runtime.remote.names import RemoteNames
from tests.harness import fake, gateway, write_config
from tests.integration.raw import chat, http
from tests.standins.standin_provider import KEY, Provider, provider
from tests.waiting import until

pytestmark = pytest.mark.asyncio

KEYS = [
    {"name": "ops", "key": "ops", "admin": True},
    {"name": "plain", "key": "plain"},
    {"name": "cloud", "key": "cloud", "verbs": ["remote"]},
    {"name": "fenced", "key": "fenced", "verbs": ["remote"], "models": ["acme:l*"]},
]


@pytest_asyncio.fixture
async def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Provider]:
    monkeypatch.setenv("STANDIN_KEY", KEY)
    async with provider(tmp_path) as one:
        yield one


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
        app.resolver.remote_names = RemoteNames(app.catalog, app.state, app.models, names_max=2)
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
