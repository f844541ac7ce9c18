"""What callers cannot do to vLLM and SGLang: control them through the gateway, find the prefixes of others,
or have them fetch from inside the network."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from tests.harness import fake, gateway, served
from tests.integration.facts import Journal
from tests.integration.raw import CHAT, Raw, chat, http, request_bytes

KEYS = [
    {"name": "lab", "key": "key-lab"},
    {"name": "shop", "key": "key-shop"},
    {"name": "ops", "key": "key-ops", "admin": True},
]
HEADERS = {key["name"]: {"Authorization": f"Bearer {key['key']}"} for key in KEYS}


@contextlib.asynccontextmanager
async def serving(folder: Path, kind: str, **keys: Any) -> AsyncIterator[tuple[App, Journal]]:
    journal = Journal(folder)
    model = served(kind, folder / "server", *journal.switches, **keys)
    async with gateway(folder, {"alpha": model}, server={"api_keys": KEYS}) as app:
        yield app, journal


SPELLINGS = (
    "{path}",
    "{path}/",
    "/{path}",
    "{path}?level=1",
    "/.{path}",
    "/x/..{path}",
    "/v1/..{path}",
    "/v1/models/..%2f..{path}",
    "/%2e{path}",
    "{path};x=1",
    "{path}%20",
    "{path}%00",
    "{upper}",
    "{escaped}",
)


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("vllm", ("/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/reset_prefix_cache", "/pause", "/resume")),
        ("vllm", ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/a_new_one")),
        ("sglang", ("/release_memory_occupation", "/resume_memory_occupation", "/flush_cache", "/abort_request")),
        ("sglang", ("/update_weights_from_disk", "/load_lora_adapter", "/pause_generation", "/set_internal_state")),
    ],
)
async def test_control_paths_are_refused_to_admins_too_however_they_are_written(
    tmp_path: Path, kind: str, paths: tuple[str, ...]
) -> None:
    async with serving(tmp_path, kind, routes=["/**"]) as (app, journal):
        for path in paths:
            escaped = "/" + "".join(f"%{ord(letter):02x}" for letter in path[1:])
            for spelling in SPELLINGS:
                target = "/upstream/alpha" + spelling.format(path=path, upper=path.upper(), escaped=escaped)
                for who in ("ops", "lab"):
                    answer = await http(app, "POST", target, {}, headers=HEADERS[who])
                    assert answer.status in (400, 403), (who, target, answer.body)
        assert not journal.lines("request", "sleep", "wake"), "nothing came to the engine"
        assert not app.slots.live, "nothing was even started"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_paths_that_answer_are_passed_on(tmp_path: Path, kind: str) -> None:
    async with serving(tmp_path, kind, routes=["/v1/**"]) as (app, _):
        assert (await http(app, "GET", "/upstream/alpha/v1/models", headers=HEADERS["lab"])).status == 200
        assert (await http(app, "GET", "/upstream/alpha/metrics", headers=HEADERS["ops"])).status == 200
        assert (await http(app, "GET", "/upstream/alpha/metrics", headers=HEADERS["lab"])).status == 403


@pytest.mark.parametrize(("protocol", "status"), [("websocket", 101), ("h2c", 200), ("websocket, h2c", 200)])
async def test_no_path_leads_to_a_protocol_that_has_paths_of_its_own(
    tmp_path: Path, protocol: str, status: int
) -> None:
    async with serving(tmp_path, "vllm", routes=["/v1/**"]) as (app, _):
        for who in ("ops", "lab"):
            headers = HEADERS[who] | {"Connection": "Upgrade", "Upgrade": protocol}
            async with await Raw.open(app) as raw:
                raw.send(request_bytes("GET", "/upstream/alpha/v1/models", None, headers))
                assert (await raw.head())[0] == status, who


async def test_a_prompt_whose_tokens_are_counted_by_a_chat_is_kept_apart_too(tmp_path: Path) -> None:
    async with serving(tmp_path, "sglang") as (app, journal):
        asked = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}
        for who in ("lab", "shop"):
            answer = await http(app, "POST", "/v1/messages/count_tokens", asked, headers=HEADERS[who])
            assert answer.status == 200, answer.body
        salts = [line["salt"] for line in journal.lines("asked")]
        assert all(isinstance(salt, str) for salt in salts) and len(set(salts)) == 2


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/pooling", {"input": "hi"}),
        ("/score", {"text_1": "hi", "text_2": "ho"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/rerank", {"query": "hi", "documents": ["ho"]}),
    ],
)
async def test_prompts_that_are_answered_with_numbers_are_kept_apart_too(
    tmp_path: Path, path: str, asked: dict[str, Any]
) -> None:
    async with serving(tmp_path, "vllm", abilities=["embeddings", "rerank"]) as (app, journal):
        for who in ("lab", "shop", "lab"):
            await http(app, "POST", path, {"model": "alpha", **asked}, headers=HEADERS[who])
        salts = [line["salt"] for line in journal.lines("asked")]
        assert all(isinstance(salt, str) for salt in salts) and len(set(salts)) == 2
        assert salts[0] == salts[2] != salts[1]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_prefixes_are_kept_apart_by_tenant_and_tag(tmp_path: Path, kind: str) -> None:
    async with serving(tmp_path, kind, aliases=["omega"]) as (app, journal):

        async def is_cached(who: str, tag: str = "", model: str = "alpha", **more: Any) -> bool:
            """Whether the engine knew this prompt."""
            headers = HEADERS[who] | ({"X-Cache-Tag": tag} if tag else {})
            before = journal.count("asked")
            assert (await chat(app, model, headers=headers, **more)).status == 200
            (line,) = journal.lines("asked")[before:]
            assert isinstance(line["salt"], str) and who not in line["salt"]
            salts[who, tag] = line["salt"]
            return bool(line["is_cached"])

        salts: dict[tuple[str, str], str] = {}
        assert not await is_cached("lab")
        assert await is_cached("lab"), "its own"
        assert await is_cached("lab", model="omega"), "by another name of the model, too"
        assert not await is_cached("shop")
        assert not await is_cached("lab", "session")
        assert await is_cached("lab", "session")
        assert not await is_cached("shop", cache_salt=salts["lab", ""]), "a salt that was found out is of no use"
        assert not await is_cached("lab", cache_salt="mine")
        assert await is_cached("lab", cache_salt="mine"), "further apart, if it wants to be"


# --- what they fetch for callers ----------------------------------------------------------------------------------

INSIDE = "http://169.254.169.254/latest/meta-data/"
LISTED = "https://pictures.example.org/a.png"


def seeing(place: str, **more: Any) -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": place}, **more}
    return [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "command"])
async def test_media_of_other_hosts_is_refused_before_anything_is_loaded(tmp_path: Path, kind: str) -> None:
    models = {
        "command": lambda: fake("alpha"),
        "llamacpp": lambda: {"path": str(tmp_path / "alpha.gguf"), "memory_mib": 100},
    }
    model = models.get(kind, lambda: served(kind, tmp_path / "server"))() | {
        "media_hosts": ["Pictures.example.org"],
        "routes": ["/v1/**"],
    }
    async with gateway(tmp_path, {"alpha": model}, server={"api_keys": KEYS}) as app:
        headers = HEADERS["lab"]
        for place in (INSIDE, "file:///etc/hostname", "/etc/hostname.png"):
            answer = await chat(app, "alpha", headers=headers, messages=seeing(place))
            assert (answer.status, answer.error["code"]) == (400, "media_refused"), answer.body
            assert "pictures.example.org" in answer.error["message"]
        answer = await chat(app, "alpha", headers=headers, messages=seeing(LISTED, uuid="logo"))
        assert (answer.status, answer.error["param"]) == (400, "uuid")
        body = {"model": "alpha", "messages": seeing(INSIDE)}
        job = await http(app, "POST", "/v1/jobs", {"route": CHAT, "body": body}, headers=headers)
        later = await http(app, "POST", CHAT, body, headers=headers | {"Prefer": "respond-async"})
        assert {job.status, later.status} == {400}, "nor is it a job"
        if kind != "command":
            for who in ("lab", "ops"):
                passed = await http(app, "POST", f"/upstream/alpha{CHAT}", body, headers=HEADERS[who])
                assert (passed.status, passed.error["code"]) == (400, "media_refused")
        assert not app.slots.live, "nothing was started"


@pytest.mark.parametrize("kind", ["vllm", "command"])
async def test_data_and_media_of_listed_hosts_are_passed_on(tmp_path: Path, kind: str) -> None:
    keys = {"media_hosts": ["pictures.example.org"]}
    model = fake("alpha", **keys) if kind == "command" else served(kind, tmp_path / "server", **keys)
    async with gateway(tmp_path, {"alpha": model}) as app:
        for place in (LISTED, "data:image/png;base64,iVBORw0KGgo="):
            assert (await chat(app, "alpha", messages=seeing(place))).status == 200
            passed = await http(app, "POST", f"/upstream/alpha{CHAT}", {"model": "alpha", "messages": seeing(place)})
            assert passed.status == 200, passed.body
