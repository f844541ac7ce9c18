"""Limits through a running gateway: refused before the body, told in every answer, for jobs too, freed at the end."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from greenroom.api.reports.snapshot import BUILD
from tests.harness import fake, gateway, tiny
from tests.integration.facts import at_rest, edit, over
from tests.integration.raw import CHAT, Answer, Raw, asking, chat, http, request_bytes
from tests.models import tiny as tiny_model
from tests.redis_server import redis_server
from tests.waiting import until

JOBS = "/v1/jobs"
RATES = ("x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset")


def by(tenant: str) -> dict[str, str]:
    return {"X-Tenant-ID": tenant}


def rates(answer: Answer) -> list[int]:
    return [int(answer.headers[name]) for name in RATES]


def is_limited(answer: Answer) -> bool:
    if answer.status != 429:
        assert answer.status < 300, answer.body
        return False
    error = answer.error
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert rates(answer) == [error["limit"], error["remaining"], error["resetAt"]]
    assert int(answer.headers["retry-after"]) >= 1
    return True


async def test_limits_hold_for_a_tenant_beyond_ascii(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, tenants={"müller": {"requests_per_minute": 1}}) as app:
        # As on the wire: UTF-8.
        headers = by("müller".encode().decode("latin-1"))
        assert [is_limited(await chat(app, "m", headers=headers)) for _ in range(2)] == [False, True]


@pytest.mark.slow
async def test_refused_before_the_body_is_sent_and_others_go_on(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, tenants={"lab": {"requests_per_minute": 2}}) as app:
        began = time.time()
        answers = [await chat(app, "m", headers=by("lab")) for _ in range(2)]
        assert [rates(answer)[:2] for answer in answers] == [[2, 1], [2, 0]]
        assert began < rates(answers[1])[2] <= time.time() + 60
        async with await Raw.open(app) as raw:
            head = request_bytes("POST", CHAT, b"", {"Content-Length": "1000000", **by("lab")})
            raw.send(head)
            assert is_limited(await raw.answer())
        other = await chat(app, "m", headers=by("other"))
        assert other.status == 200 and not [name for name in RATES if name in other.headers]
        metrics = await http(app, "GET", "/metrics")
        assert b'code="rate_limit_exceeded"' in metrics.body


async def test_jobs_are_counted_and_wait_while_there_is_no_place(tmp_path: Path) -> None:
    tenants = {"default": {"requests_per_minute": 3, "concurrent_max": 1}}
    async with gateway(tmp_path, {"m": fake("m", "--token-s", "0.05", "--tokens", "6")}, tenants=tenants) as app:
        order = {"route": CHAT, "body": asking("m")}
        submitted = [await http(app, "POST", JOBS, order) for _ in range(2)]
        later = await http(app, "POST", CHAT, asking("m"), headers={"Prefer": "respond-async"})
        made = [*submitted, later]
        assert [(answer.status, *rates(answer)[:2]) for answer in made] == [(202, 3, 2), (202, 3, 1), (202, 3, 0)]
        assert is_limited(await http(app, "POST", JOBS, order))
        for answer in made:
            assert (await over(app, f"{JOBS}/{answer.json()['id']}"))["status"] == "done"
        assert (await http(app, "GET", JOBS)).status == 200, "looking at jobs is not counted"


@pytest.mark.parametrize("spelling", ["/v1/%6aobs", "/v1%2Fjobs"])
async def test_no_other_spelling_of_the_path_of_jobs_goes_uncounted(tmp_path: Path, spelling: str) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, tenants={"default": {"requests_per_minute": 2}}) as app:
        order = {"route": CHAT, "body": asking("m")}
        assert not is_limited(await http(app, "POST", spelling, order))
        assert not is_limited(await http(app, "POST", JOBS, order))
        assert is_limited(await http(app, "POST", spelling, order))


async def test_a_reload_changes_limits_and_keeps_the_counts(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, tenants={"default": {"requests_per_minute": 1}}) as app:
        assert not is_limited(await chat(app, "m"))
        assert is_limited(await chat(app, "m"))
        edit(tmp_path, lambda said: said["tenants"]["default"].update(requests_per_minute=2))
        assert "tenants" in (await app.reload()).at_once
        assert not is_limited(await chat(app, "m"))
        assert is_limited(await chat(app, "m"))


@pytest.mark.skipif(BUILD == "compiled", reason="machine code cannot be replaced")
@pytest.mark.parametrize("broken", ["begin", "end"])
async def test_a_request_that_breaks_the_gateway_gives_back_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError("what no one thought of")

    tenants = {"default": {"concurrent_max": 1, "tokens_per_minute": 100}}
    async with gateway(tmp_path, {"m": fake("m")}, tenants=tenants) as app:
        assert (await chat(app, "m", max_tokens=1)).status == 200
        await at_rest(app)
        with monkeypatch.context() as fault:
            fault.setattr(app.activity, broken, fails)
            answer = await chat(app, "m", max_tokens=80)
            assert (answer.status == 500) is (broken == "begin")
        assert (await chat(app, "m", max_tokens=80)).status == 200


# --- whatever a model is called, and however it is reached ------------------------------------------------------------


@pytest.mark.slow
async def test_a_models_limit_holds_by_whatever_name_its_file_is_asked_for(tmp_path: Path) -> None:
    root = tmp_path / "models"
    (root / "sub").mkdir(parents=True)
    file = root / "sub" / "alpha-Q8_0.gguf"
    shutil.copy(tiny_model("alpha"), file)
    shutil.copy(tiny_model("beta"), root / "beta.gguf")
    (root / "link.gguf").symlink_to(file)
    names: list[dict[str, Any]] = [
        {"model": "usual"},
        {"model": str(file)},
        {"model": f"{root}/./sub/../sub/alpha-Q8_0.gguf"},
        {"model": "sub/alpha-Q8_0.gguf"},
        {"model": str(root / "link.gguf")},
        {"model": str(root / "sub")},
        {"model": str(file), "device": "cpu"},
        {"model": str(file), "backend": "llamacpp"},
    ]
    models = {"m": tiny(file, aliases=["usual"], limits={"requests_per_minute": len(names)})}
    async with gateway(tmp_path, models, library={"roots": [str(root)]}) as app:
        for asked in names:
            answer = await http(app, "POST", CHAT, saying(**asked))
            assert (answer.status, rates(answer)[0]) == (200, len(names)), asked
        assert len(list(app.catalog)) > 1, "some of the names made another model"
        while not is_limited(refused := await http(app, "POST", CHAT, saying(model=str(file)))):
            pass
        assert refused.error["message"] == f"Model m exceeded {len(names)} req/min"
        other = await http(app, "POST", CHAT, saying(model="beta.gguf"))
        assert other.status == 200 and RATES[0] not in other.headers


def saying(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}


def websocket(model: str, path: str = "ws") -> bytes:
    headers = {"Connection": "upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    return request_bytes("GET", f"/upstream/{model}/{path}", None, headers)


async def test_connections_that_leave_http_hold_a_place_until_they_end(tmp_path: Path) -> None:
    limited, minute = fake("m", aliases=["usual"], limits={"concurrent_max": 1}), time.time() // 60
    async with gateway(tmp_path, {"m": limited}, tenants={"default": {"requests_per_minute": 6}}) as app:
        async with await Raw.open(app) as raw:
            raw.send(websocket("usual"))
            assert (await raw.head())[0] == 101
            raw.send(b"hello")
            assert await raw.reader.readexactly(5) == b"hello"
            for path in ("m/ws", "usual/echo/x"):
                refused = await http(app, "GET", f"/upstream/{path}")
                assert is_limited(refused) and refused.error["message"].startswith("Model m has 1 requests at once")
            async with await Raw.open(app) as second:
                second.send(websocket("m"))
                assert is_limited(await second.answer())
        await at_rest(app)
        passed = await http(app, "GET", "/upstream/m/echo/x")
        # In another minute, some of the first may count no more.
        assert passed.status == 200 and (rates(passed)[:2] == [6, 1] or time.time() // 60 != minute)
        while rates(passed)[1]:
            passed = await http(app, "GET", "/upstream/m/echo/x")
            assert passed.status == 200
        async with await Raw.open(app) as raw:
            raw.send(websocket("m"))
            assert is_limited(await raw.answer()), "those of its tenant are used up"


async def test_white_space_behind_a_header_makes_no_other_tenant_nor_key(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, tenants={"lab": {"requests_per_minute": 2}}) as app:
        for tenant in ("lab ", "lab\t"):
            mode = {"X-Cache-Mode": "none ", "X-Priority": "low ", "X-Facts": "off\t"}
            assert rates(await chat(app, "m", headers={**by(tenant), **mode}))[0] == 2
        assert is_limited(await chat(app, "m", headers=by("lab \t")))
    keys = [{"name": "a", "key": "ka"}]
    async with gateway(tmp_path, {"m": fake("m")}, server={"api_keys": keys}) as app:
        for header in ({"x-api-key": "ka "}, {"Authorization": "Bearer ka\t"}):
            assert (await http(app, "GET", "/v1/models", headers=header)).status == 200


def told_of_loss(capsys: pytest.CaptureFixture[str]) -> bool:
    return "the store of limits cannot be used" in capsys.readouterr().err


async def test_two_gateways_that_share_a_store_admit_the_limit_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit, block = 40, 5
    options = {"tenants": {"lab": {"requests_per_minute": limit}}}
    with redis_server(tmp_path / "redis") as redis:
        options["limits"] = {"store": redis.url}
        folders = tmp_path / "one", tmp_path / "two"
        for folder in folders:
            folder.mkdir()
        async with (
            gateway(folders[0], {"m": fake("m")}, **options) as one,
            gateway(folders[1], {"m": fake("m")}, **options) as two,
        ):
            began, admitted = time.monotonic(), 0

            async def press() -> None:
                nonlocal admitted
                for app in (one, two):
                    admitted += not is_limited(await chat(app, "m", headers=by("lab"), tokens=1))

            async def is_used_up() -> bool:
                await press()
                return admitted >= limit - 2 * block

            await until(is_used_up, lambda: f"only {admitted} were admitted")
            for _ in range(20):
                await press()
            # More than that only if a busy machine let the store seem lost, and each gateway held its share.
            assert admitted <= limit * (1 + (time.monotonic() - began) / 60) + (
                limit / 2 if told_of_loss(capsys) else 0
            )
            redis.kill()
            assert (await chat(one, "m", headers=by("other"))).status == 200
