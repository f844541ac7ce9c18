"""Pictures as URLs through a running gateway: asked for, served, gone, refused; in answers and in jobs."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.jobs.test_jobs import ended, post, result, submit
from tests.integration.raw import Answer, Raw, http, request_bytes
from tests.later import Later
from tests.samples.sounds import FORM, form
from tests.waiting import until

openai = Later("openai")

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"
# Decoded in several steps, the last of which has padding.
JPEG = b"\xff\xd8\xff\xe0" + b"pixels" * 100_000
WEBP = b"RIFF\x04\x00\x00\x00WEBPVP8 "
KEYS = [{"name": "ann", "key": "ann-key"}]


def coded(content: bytes) -> dict[str, str]:
    return {"b64_json": base64.b64encode(content).decode()}


def asking(*pictures: bytes, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "a", "response_format": "url", "data": [coded(one) for one in pictures], **more}


EDIT = form([("model", "m"), ("prompt", "a"), ("response_format", "url")], b"xyz", name="image")


async def urls(app: App, body: dict[str, Any], path: str = GENERATIONS) -> list[str]:
    answer = await http(app, "POST", path, body)
    assert answer.status == 200, answer.body
    return [item["url"] for item in answer.json()["data"]]


async def fetch(app: App, address: str, method: str = "GET", **headers: str) -> Answer:
    return await http(app, method, urlsplit(address).path, headers=headers)


def stored(app: App) -> list[str]:
    return os.listdir(app.state_dir.path / "pictures")


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    async with gateway(tmp_path, {"m": fake("m")}, images={"store_mib": 1}) as app:
        yield app
        assert app.edge.bodies.memory_bytes == app.edge.bodies.spool_bytes == 0


# --- the way of a picture -------------------------------------------------------------------------------------------


async def test_answers_hold_urls_that_serve_the_pictures(app: App) -> None:
    answer = await http(app, "POST", GENERATIONS, asking(PNG, JPEG, WEBP))
    said = answer.json()
    # The engine is asked for the pictures themselves.
    assert (answer.status, said["asked_for"], said["created"]) == (200, "b64_json", 1)
    assert answer.headers["x-request-id"]
    assert [list(item) for item in said["data"]] == [["url"]] * 3
    kinds = []
    for item, content in zip(said["data"], (PNG, JPEG, WEBP), strict=True):
        assert item["url"].startswith("http://localhost/v1/images/img-")
        got = await fetch(app, item["url"])
        assert (got.status, got.body) == (200, content)
        kinds.append(got.headers["content-type"])
        assert got.headers["x-content-type-options"] == "nosniff"
        assert got.headers["content-security-policy"].startswith("sandbox")
        assert got.headers["content-disposition"].startswith("inline")
        assert got.headers["content-length"] == str(len(content))
    assert kinds == ["image/png", "image/jpeg", "image/webp"]


@pytest.mark.parametrize("said", ["b64_json", None])
async def test_other_answers_are_the_engines_own(app: App, said: str | None) -> None:
    answer = await http(app, "POST", GENERATIONS, asking(PNG) | {"response_format": said})
    assert answer.json()["asked_for"] == said
    assert answer.json()["data"] == [coded(PNG)]
    assert not stored(app)


async def test_other_fields_and_an_engines_own_urls_stay(app: App) -> None:
    data = [{**coded(PNG), "revised_prompt": "b"}, {"url": "https://elsewhere/x.png"}, {"b64_json": None, "url": "u"}]
    answer = await http(app, "POST", GENERATIONS, asking() | {"data": data})
    first, *others = answer.json()["data"]
    assert (first["revised_prompt"], "b64_json" in first) == ("b", False)
    assert others == [{"url": "https://elsewhere/x.png"}, {"url": "u"}]
    assert len(stored(app)) == 1


async def test_edits_are_forms(app: App) -> None:
    answer = await http(app, "POST", EDITS, body=EDIT, headers=FORM)
    assert answer.status == 200, answer.body
    assert answer.json()["sizes"]["response_format"] == len("b64_json")
    [item] = answer.json()["data"]
    assert (await fetch(app, item["url"])).headers["content-type"] == "image/png"
    as_json = await http(app, "POST", EDITS, asking(JPEG))
    as_job = await http(app, "POST", "/v1/jobs", {"route": EDITS, "body": asking(JPEG)})
    later = await http(app, "POST", EDITS, asking(JPEG), headers={"Prefer": "respond-async"})
    for refused in (as_json, as_job, later):
        assert refused.status == 400 and "form" in refused.error["message"], refused.body


async def test_jobs_results_hold_urls(app: App) -> None:
    job = await submit(app, asking(PNG), GENERATIONS)
    assert (await ended(app, job))["status"] == "done"
    [item] = (await result(app, job)).json()["data"]
    assert item["url"].startswith("http://localhost/v1/images/")
    assert (await fetch(app, item["url"])).body == PNG
    taken = await post(app, EDITS, EDIT, FORM | {"Prefer": "respond-async", "Host": "127.0.0.1:99"})
    await ended(app, taken.json()["id"])
    [item] = (await result(app, taken.json()["id"])).json()["data"]
    assert item["url"].startswith("http://127.0.0.1:99/v1/images/")


async def test_operators_parameters_count(tmp_path: Path) -> None:
    models = {
        "always": fake("a", set_params={"response_format": "url"}),
        "m": fake("m", strip_params=["response_format"]),
    }
    async with gateway(tmp_path, models) as app:
        assert len(await urls(app, {"model": "always", "prompt": "a"})) == 1
        answer = await http(app, "POST", GENERATIONS, asking(PNG))
        # It does not know the field, and answers with pictures all the same.
        assert (answer.json()["asked_for"], list(answer.json()["data"][0])) == (None, ["url"])


# --- who sees it, and how long --------------------------------------------------------------------------------------


async def test_url_needs_no_key_and_no_page_of_ours(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, server={"api_keys": KEYS}) as app:
        answer = await http(app, "POST", GENERATIONS, asking(PNG), headers={"Authorization": "Bearer ann-key"})
        address = answer.json()["data"][0]["url"]
        assert (await fetch(app, address)).status == 200
        # Only the whole address opens without a key.
        for path in ("/v1/images/img-1", "/v1/images/", urlsplit(address).path + "/x", f"/v1/images/img-{'g' * 32}"):
            assert (await http(app, "GET", path)).status == 401
        gone = await http(app, "GET", f"/v1/images/img-{'0' * 32}")
        assert (gone.status, gone.error["code"]) == (404, "not_found")


async def test_other_sites_pages_may_show_a_picture_they_were_given(app: App) -> None:
    [address] = await urls(app, asking(PNG))
    page = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image", "Sec-Fetch-Mode": "no-cors"}
    assert (await fetch(app, address, **page)).status == 200
    assert (await fetch(app, address, Host="evil.example")).status == 403


async def test_url_is_that_of_the_configuration(tmp_path: Path) -> None:
    server = {"public_url": "https://models.example.org/ai/"}
    async with gateway(tmp_path, {"m": fake("m")}, server=server) as app:
        [address] = await urls(app, asking(PNG))
        assert address.startswith("https://models.example.org/ai/v1/images/img-")


async def test_odd_hosts_get_into_no_url(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, server={"allowed_hosts": ["*"]}) as app:
        for host in ('a"b', "a b", "a/b", "a@b", "a?b", "[::1", "a:b", "ä"):
            answer = await http(app, "POST", GENERATIONS, asking(PNG), headers={"Host": host})
            assert answer.status == 400, (host, answer.body)
            assert not stored(app)


async def test_caller_without_a_host_is_told(app: App) -> None:
    body = json.dumps(asking(PNG)).encode()
    async with await Raw.open(app) as raw:
        raw.send(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (GENERATIONS.encode(), len(body)) + body)
        answer = await raw.answer()
    assert (answer.status, "public_url" in answer.error["message"]) == (400, True)


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([{"b64_json": "no base64!"}], "no base64"),
        ([{"b64_json": "AAA"}], "no base64"),
        ([{"b64_json": f"{'A' * (256 * 1024 - 2)}==AAAA"}], "no base64"),
        ([coded(b"<html><script>")], "neither PNG"),
        ([coded(PNG), coded(b"GIF89a")], "neither PNG"),
        ([{"b64_json": 7}], "something else"),
        ("pictures", "something else"),
        ([1], "something else"),
        (None, "something else"),
    ],
)
async def test_garbage_of_an_engine_is_its_fault_and_leaves_nothing(app: App, data: Any, words: str) -> None:
    answer = await http(app, "POST", GENERATIONS, asking() | {"data": data})
    assert (answer.status, answer.error["code"]) == (502, "engine_error")
    assert words in answer.error["message"]
    assert not stored(app)
    [record] = app.activity.recent(1)
    assert (record.status, record.error_code) == (502, "engine_error")


async def test_engines_own_error_is_passed_on(app: App) -> None:
    answer = await http(app, "POST", GENERATIONS, asking(PNG, fail=[500, "no tea"]))
    assert (answer.status, answer.error["message"]) == (500, "no tea")


async def test_stream_has_no_urls(app: App) -> None:
    answer = await http(app, "POST", GENERATIONS, asking(PNG, stream=True))
    assert (answer.status, answer.error["param"]) == (400, "response_format")


async def test_pictures_larger_than_the_store_are_refused(app: App) -> None:
    [before] = await urls(app, asking(PNG))
    big = PNG + bytes(1_100_000)
    answer = await http(app, "POST", GENERATIONS, asking(big))
    assert (answer.status, answer.error["code"]) == (507, "result_too_large")
    # Not even collected.
    answer = await http(app, "POST", GENERATIONS, asking(*[big] * 4))
    assert (answer.status, answer.error["code"]) == (507, "result_too_large")
    assert (await fetch(app, before)).status == 200
    assert len(stored(app)) == 1
    job = await submit(app, asking(big), GENERATIONS)
    row = await ended(app, job)
    assert (row["status"], row["error"]["code"]) == ("failed", "result_too_large")
    assert (await result(app, job)).status == 507


async def test_caller_that_leaves_while_the_engine_works_leaves_nothing(app: App) -> None:
    await urls(app, asking(PNG))
    async with await Raw.open(app) as raw:
        raw.send(request_bytes("POST", GENERATIONS, json.dumps(asking(PNG, picture_s=30)).encode()))
        await until(lambda: app.inference.running == 1)
    await until(lambda: app.inference.running == 0)
    assert len(stored(app)) == 1


# --- answers of jobs on our own origin ------------------------------------------------------------------------------


async def test_result_of_a_job_can_do_nothing_in_a_browser(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m", routes=["/page"])}) as app:
        job = await submit(app, {}, "/upstream/m/page")
        await ended(app, job)
        kept = await result(app, job)
        assert (kept.headers["content-type"], b"<script>" in kept.body) == ("text/html", True)
        assert kept.headers["x-content-type-options"] == "nosniff"
        assert kept.headers["content-security-policy"].startswith("sandbox")
