"""Two tenants and an engine that prints every prompt and crashes: neither learns of the other, an operator of all.

An ordinary key fetches all there is; each answer is searched for the prompts, for paths and for the other's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.facts import at_rest
from tests.integration.hosted_rig import Folder, nothing_left
from tests.integration.raw import CHAT, Answer, Raw, asking, chat, http, request_bytes

pytestmark = pytest.mark.slow

__all__ = ["nothing_left"]

MARKER = "marker-of-a-secret-prompt"
LAB, SHOP, OPS = "tenant-of-the-lab", "tenant-of-the-shop", "ops"
KEYS = [{"name": name, "key": f"key-{number}", "admin": name == OPS} for number, name in enumerate((LAB, SHOP, OPS))]
HEADERS = {key["name"]: {"Authorization": f"Bearer {key['key']}"} for key in KEYS}
SERVER = {"api_keys": KEYS, "heartbeat_after_s": 0.2, "heartbeat_every_s": 0.1}
# A pause that no test outlasts: the last request of each is refused within it.
BACKOFF = {"backoff_s": 100.0}
CRASHED = "fatal: crashing as told"
ENDLESS = ("/events", "/logs/stream")


async def ask(app: App, who: str, text: str = "hi", *, model: str = "alpha", **more: Any) -> Answer:
    return await chat(app, model, headers=HEADERS[who], messages=[{"role": "user", "content": text}], **more)


async def fetch(app: App, who: str, path: str) -> Answer:
    return await http(app, "GET", path, headers=HEADERS[who])


async def paths_to_fetch(app: App, ids: Mapping[str, str]) -> list[str]:
    """Every path that takes GET, by the gateway's own word, with these requests in the place of ids."""
    schema = (await fetch(app, OPS, "/api/v1/openapi.json")).json()
    paths = ["/models", "/api/v1/docs", "/api/v1/openapi.json", "/upstream/alpha/health", "/upstream/alpha/echo/x"]
    for path, methods in schema["paths"].items():
        if "get" not in methods:
            continue
        path = path.replace("{model_id}", "alpha").replace("{lease_id}", "l-1")
        paths += [path.replace("{request_id}", id) for id in ids.values()] if "{request_id}" in path else [path]
    return paths


async def all_that(app: App, who: str, ids: Mapping[str, str]) -> dict[str, Answer]:
    """What this key is answered, by path."""
    answers: dict[str, Answer] = {}
    for path in await paths_to_fetch(app, ids):
        if path.endswith(ENDLESS):
            async with await Raw.open(app) as raw:
                raw.send(request_bytes("GET", path, None, HEADERS[who]))
                assert (await raw.head())[0] == 403, path
            continue
        answers[path] = await fetch(app, who, path)
    answers["flush"] = await http(app, "POST", "/v1/cache/flush", {"scope": "tenant"}, headers=HEADERS[who])
    return answers


def assert_nothing_of_others(answer: Answer, who: str, folder: Path, about: str) -> None:
    shown = answer.body.decode("utf-8", "replace") + repr(answer.headers)
    other = SHOP if who == LAB else LAB
    for secret in (MARKER, str(folder), other, ".sock", "fake_engine"):
        assert secret not in shown, f"{about} tells {who} of {secret}: {shown}"


async def assert_apart(app: App, folder: Path, told: Mapping[str, Answer]) -> None:
    """Neither what both were `told` nor anything that they can fetch now says anything of the other's."""
    ids = {who: answer.headers["x-request-id"] for who, answer in told.items()}
    for who in (LAB, SHOP):
        if who in told:
            assert_nothing_of_others(told[who], who, folder, "the answer")
        for path, answer in (await all_that(app, who, ids)).items():
            assert_nothing_of_others(answer, who, folder, path)
            if path == f"/api/v1/requests/{ids.get(who)}":
                assert answer.status == 200 and answer.json()["tenant"] == who
            elif path.startswith("/api/v1/requests/"):
                # Another's request and one that never was are answered alike.
                unknown = await fetch(app, who, "/api/v1/requests/r-0-0")
                assert answer.status == unknown.status == 404
                assert re.sub(r"r-[0-9a-f]+-[0-9]+", "", answer.error["message"]) == re.sub(
                    r"r-[0-9a-f]+-[0-9]+", "", unknown.error["message"]
                )


async def reason(app: App, answer: Answer) -> str:
    """What an operator finds under the number that the caller was given."""
    shown = (await fetch(app, OPS, f"/api/v1/requests/{answer.headers['x-request-id']}")).json()
    return f"{shown['reason']}\n{shown['details']}"


def talkative(folder: Path, *switches: str, **keys: Any) -> dict[str, Any]:
    return {"alpha": fake("alpha", "--talkative", "--journal", str(folder / "journal"), *switches, **keys)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_load_that_fails_after_others_were_served(tmp_path: Path, stream: bool) -> None:
    broken = tmp_path / "broken"
    models = talkative(tmp_path, "--crash-while", str(broken), "--load-s", "0.8" if stream else "0")
    async with gateway(tmp_path, models, server=SERVER, scheduler=BACKOFF) as app:
        assert (await ask(app, LAB, MARKER)).status == 200
        assert (await http(app, "POST", "/api/v1/models/alpha/unload", headers=HEADERS[OPS])).status == 200
        broken.touch()
        failed = await ask(app, SHOP, stream=stream)
        assert (failed.data[-1]["error"] if stream else failed.error)["code"] == "model_load_failed"
        assert failed.headers["x-request-id"] in failed.body.decode()
        await assert_apart(app, tmp_path, {SHOP: failed})
        # While it is backed off the same is told without a start.
        refused = await ask(app, LAB)
        assert refused.error["code"] == "model_load_failed" and "the engine ended" in refused.error["message"]
        await assert_apart(app, tmp_path, {LAB: refused, SHOP: failed})
        for answer in (failed, refused):
            found = await reason(app, answer)
            assert CRASHED in found and str(tmp_path) in found
            assert MARKER not in found, "lines of an earlier start are no evidence"
        assert MARKER in (await fetch(app, OPS, "/api/v1/models/alpha/logs")).body.decode()


async def test_an_engine_that_ends_before_the_first_byte_and_then_is_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path, talkative(tmp_path), server=SERVER, scheduler=BACKOFF) as app:
        crashed = await ask(app, LAB, MARKER, crash_at="request")
        assert crashed.error["code"] in ("engine_lost", "model_load_failed")
        await at_rest(app)
        refused = await ask(app, SHOP)
        assert refused.status == 503, refused.body
        await assert_apart(app, tmp_path, {LAB: crashed, SHOP: refused})
        assert CRASHED in await reason(app, refused)


async def test_an_engine_that_ends_before_the_first_byte_twice(tmp_path: Path) -> None:
    async with gateway(tmp_path, talkative(tmp_path), server=SERVER) as app:
        crashed = await ask(app, LAB, MARKER, crash_at="request")
        assert (crashed.error["code"], crashed.error["details"]) == ("engine_lost", None)
        await at_rest(app)
        await assert_apart(app, tmp_path, {LAB: crashed})
        assert (await reason(app, crashed)).startswith("alpha was lost: crashing as told; its engine ended (")
        told = await ask(app, OPS, crash_at="request")
        assert told.error["message"].startswith("alpha was lost: crashing as told; its engine ended ("), told.body


async def test_an_engine_that_ends_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    async with gateway(tmp_path, talkative(tmp_path), server=SERVER) as app:
        cut = await ask(app, LAB, MARKER, stream=True, crash_at="token:2")
        assert cut.data[-1]["error"]["code"] == "engine_lost"
        await at_rest(app)
        await assert_apart(app, tmp_path, {LAB: cut})
        assert (await ask(app, SHOP)).status == 200


async def test_an_engines_answer_to_a_request_is_the_callers_own(tmp_path: Path) -> None:
    """Heartbeats have begun the stream; without them the engine's answer would have come as it is."""
    models = talkative(tmp_path, "--sse-weird", "error-500", "--load-s", "0.8")
    async with gateway(tmp_path, models, server=SERVER) as app:
        refused = await ask(app, LAB, stream=True)
        assert b": waiting" in refused.body
        assert "the engine failed as told" in refused.data[-1]["error"]["details"]
        await assert_apart(app, tmp_path, {LAB: refused})


async def test_a_program_that_is_not_there_is_not_named(tmp_path: Path) -> None:
    models = {"alpha": {"cmd": [str(tmp_path / "no-such-program"), "--port", "${PORT}"], "memory_mib": 1}}
    async with gateway(tmp_path, models, server=SERVER, scheduler=BACKOFF) as app:
        failed = await ask(app, LAB)
        assert failed.status == 503
        await assert_apart(app, tmp_path, {LAB: failed, SHOP: await ask(app, SHOP)})
        assert str(tmp_path / "no-such-program") in await reason(app, failed)
        told = await http(app, "POST", CHAT, asking("alpha"), headers=HEADERS[OPS])
        assert str(tmp_path) in told.body.decode()


async def test_running_out_of_memory_is_told_without_the_engines_words(tmp_path: Path) -> None:
    said = f"import sys; sys.exit('{MARKER}: CUDA error: out of memory at {tmp_path}')"
    models = {"alpha": {"cmd": ["/usr/bin/env", "python3", "-c", said, "${PORT}"], "memory_mib": 1}}
    async with gateway(tmp_path, models, server=SERVER, scheduler=BACKOFF) as app:
        failed = await ask(app, LAB)
        assert failed.error["code"] == "model_out_of_memory"
        await assert_apart(app, tmp_path, {LAB: failed, SHOP: await ask(app, SHOP)})
        assert MARKER in await reason(app, failed)


async def test_a_model_outside_its_roots_is_told_without_them(tmp_path: Path) -> None:
    model = tmp_path / "elsewhere" / "alpha.gguf"
    model.parent.mkdir()
    model.write_bytes(b"GGUF")
    (tmp_path / "roots").mkdir()
    models = {"alpha": {"path": str(model), "memory_mib": 1}}
    more = {"server": SERVER, "scheduler": BACKOFF, "model_roots": [str(tmp_path / "roots")]}
    async with gateway(tmp_path, models, **more) as app:
        failed = await ask(app, LAB)
        assert failed.error["code"] == "path_outside_roots"
        await assert_apart(app, tmp_path, {LAB: failed})
        assert str(model) in await reason(app, failed)


async def test_lines_of_the_revision_that_still_serves_are_not_those_of_the_next(tmp_path: Path) -> None:
    """A changed model is started beside the one that drains; both print into one log."""
    broken = tmp_path / "broken"
    models = talkative(tmp_path, "--crash-while", str(broken), "--token-s", "0.05")
    async with gateway(tmp_path, models, server=SERVER, scheduler=BACKOFF) as app:
        async with await Raw.open(app) as raw:
            raw.ask(
                {"model": "alpha", "stream": True, "tokens": 100_000, "messages": [{"role": "user", "content": "x"}]},
                headers=HEADERS[LAB],
            )
            assert (await raw.head())[0] == 200
            broken.touch()
            path = tmp_path / "greenroom.yaml"
            path.write_text(path.read_text().replace("--talkative", "--talkative\n    - --load-s\n    - '1.5'"))
            assert (await http(app, "POST", "/api/v1/reload", headers=HEADERS[OPS])).status == 200
            async with await Raw.open(app) as second:
                second.ask(asking("alpha"), headers=HEADERS[SHOP])
                failed = await second.answer()
        assert failed.error["code"] == "model_load_failed"
        found = await reason(app, failed)
        assert CRASHED in found and "prompt of" not in found


@pytest.mark.usefixtures("nothing_left")
async def test_a_shared_workers_lines_are_no_models_own(tmp_path: Path) -> None:
    alpha, beta = Folder(tmp_path, "alpha"), Folder(tmp_path, "beta", talkative=True)
    models = {"alpha": alpha.model(), "beta": beta.model()}
    async with gateway(tmp_path, models, server=SERVER, scheduler=BACKOFF) as app:
        assert (await ask(app, LAB, f"{MARKER}: CUDA out of memory", model="beta")).status == 200
        alpha.behave(at={"open": "crash"})
        failed = await ask(app, SHOP)
        assert failed.error["code"] == "model_load_failed", "another model's line is no proof of this one's want"
        await assert_apart(app, tmp_path, {SHOP: failed})
        assert MARKER not in await reason(app, failed)
        status = (await fetch(app, OPS, "/api/v1/status")).json()
        assert MARKER not in str([model["last_error"] for model in status["models"]])


@pytest.mark.usefixtures("nothing_left")
async def test_a_worker_of_its_own_has_its_lines_told_to_operators(tmp_path: Path) -> None:
    alpha = Folder(tmp_path, "alpha", at={"open": "crash"})
    async with gateway(tmp_path, {"alpha": alpha.model()}, server=SERVER, scheduler=BACKOFF) as app:
        failed = await ask(app, SHOP)
        await assert_apart(app, tmp_path, {SHOP: failed})
        assert "crashing as told at open" in await reason(app, failed)


@pytest.mark.usefixtures("nothing_left")
async def test_a_workers_words_about_files_are_for_operators(tmp_path: Path) -> None:
    alpha = Folder(tmp_path, "alpha", at={"open": "fail folder"})
    async with gateway(tmp_path, {"alpha": alpha.model()}, server=SERVER, scheduler=BACKOFF) as app:
        failed = await ask(app, SHOP)
        assert failed.error["code"] == "bad_model"
        await assert_apart(app, tmp_path, {SHOP: failed})
        assert str(alpha.path) in await reason(app, failed)
