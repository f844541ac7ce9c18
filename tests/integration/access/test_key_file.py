"""A gateway whose keys come from a file: they come and go while it runs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.cli.main import main
from greenroom.errors import ConfigError
from tests.harness import fake, gateway
from tests.integration.facts import edit
from tests.integration.raw import CHAT, Answer, Raw, asking, http, request_bytes
from tests.waiting import until

BOSS = {"name": "boss", "key": "boss-key", "admin": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class KeyFile:
    """The file of a gateway, changed as its operator changes it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = folder / "keys.json"
        self._capsys = capsys

    def new(self, name: str, *words: str) -> str:
        assert main(["key", "new", name, "--file", str(self.path), "--json", *words]) == 0
        made: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return str(made["key"])

    def revoke(self, name: str) -> None:
        assert main(["key", "revoke", name, "--file", str(self.path)]) == 0


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> KeyFile:
    return KeyFile(tmp_path, capsys)


def server(keys: KeyFile, *api_keys: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"key_file": str(keys.path), "api_keys": list(api_keys), **more}


async def say(app: App, key: str, model: str = "m", **more: Any) -> Answer:
    return await http(app, "POST", CHAT, asking(model, **more), headers=bearer(key))


async def until_status(app: App, key: str, status: int) -> None:
    async def is_so() -> bool:
        return (await http(app, "GET", "/v1/models", headers=bearer(key))).status == status

    await until(is_so, f"a {status}", every_s=0.05)


async def test_without_a_key_file_every_request_is_refused_until_there_is_one(tmp_path: Path, keys: KeyFile) -> None:
    # An address that others reach: the file counts as keys.
    async with gateway(tmp_path, {"m": fake("m")}, server=server(keys, host="0.0.0.0")) as app:
        for path in ("/v1/models", "/api/v1/status", "/metrics"):
            assert (await http(app, "GET", path)).status == 401
        assert (await say(app, "guess")).status == 401
        assert (await http(app, "GET", "/health")).json()["keyFile"] == "stale"
        key = keys.new("team", "--tenant", "lab", "--model", "m")
        await until_status(app, key, 200)
        assert (await say(app, key)).status == 200
        assert (await say(app, key, "other")).status == 404
        assert (await http(app, "GET", "/health")).json()["keyFile"] == "ok"
        assert (await http(app, "GET", "/v1/models")).status == 401
        keys.revoke("team")
        await until_status(app, key, 401)
        refused = await say(app, key)
        assert (refused.error["code"], key in refused.body.decode()) == ("api_key_revoked", False)
        assert "team was revoked" in refused.error["message"]


async def test_a_revoked_key_ends_at_the_next_request_and_a_stream_goes_on(tmp_path: Path, keys: KeyFile) -> None:
    key, other = keys.new("team"), keys.new("other")
    async with gateway(tmp_path, {"m": fake("m")}, server=server(keys)) as app:
        async with await Raw.open(app) as raw:
            raw.ask(asking("m", stream=True, tokens=60, token_s=0.1), headers=bearer(key))
            assert (await raw.head())[0] == 200 and await raw.chunk()
            keys.revoke("team")
            await until_status(app, key, 401)
            rest = b""
            while chunk := await raw.chunk():
                rest += chunk
            assert chunk == b"" and b"[DONE]" in rest
            # The same connection is no excuse.
            raw.ask(asking("m"), headers=bearer(key))
            assert (await raw.answer()).status == 401
        assert (await say(app, other)).status == 200


async def test_limits_of_keys_count_as_soon_as_they_are_read(tmp_path: Path, keys: KeyFile) -> None:
    free = keys.new("free")
    async with gateway(tmp_path, {"m": fake("m")}, server=server(keys, BOSS)) as app:
        assert "x-ratelimit-limit" not in (await say(app, free)).headers
        tight = keys.new("tight", "--requests-per-minute", "2", "--tenant", "lab")
        await until_status(app, tight, 200)
        answers = [await say(app, tight) for _ in range(3)]
        # The minute may turn in between.
        assert [answer.status for answer in answers].count(200) in (2, 3)
        assert answers[0].headers["x-ratelimit-limit"] == "2"
        while (answer := await say(app, tight)).status != 429:
            pass
        assert answer.error["code"] == "rate_limit_exceeded"
        assert (await say(app, free)).status == 200
        # What is counted stays counted when the file is read again.
        keys.new("more")
        await until(lambda: app.keys.keys.named("more"))
        assert (await say(app, tight)).status == 429
        # Its tenant is one that the operator has named.
        figures = (await http(app, "GET", "/metrics", headers=bearer("boss-key"))).body.decode()
        assert 'tenant="lab"' in figures


@pytest.mark.parametrize("fault", ["half", "open", "missing"])
async def test_a_file_that_cannot_be_used_is_told_and_its_keys_go_on(
    tmp_path: Path, keys: KeyFile, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    key = keys.new("team")
    whole = keys.path.read_bytes()
    async with gateway(tmp_path, {"m": fake("m")}, server=server(keys, BOSS)) as app:
        if fault == "open":
            keys.path.chmod(0o644)
        elif fault == "half":
            keys.path.write_bytes(whole[:40])
        else:
            keys.path.unlink()
        await until(lambda: app.keys.problems)
        assert (await say(app, key)).status == 200
        health = await http(app, "GET", "/health")
        assert (health.status, health.json()["keyFile"]) == (200, "stale")
        assert str(keys.path) not in health.body.decode()
        told = (await http(app, "GET", "/api/v1/status", headers=bearer("boss-key"))).json()["key_problems"]
        assert len(told) == 1 and str(keys.path) in told[0]
        logged = [line for line in capsys.readouterr().err.splitlines() if "cannot be used as it is" in line]
        assert len(logged) == 1 and "keys_that_count=1" in logged[0]
        # A reload for another reason goes by the last good keys as well.
        await app.reload()
        assert (await say(app, key)).status == 200
        keys.path.write_bytes(whole)
        keys.path.chmod(0o600)
        await until(lambda: not app.keys.problems)
        assert (await http(app, "GET", "/health")).json()["keyFile"] == "ok"


async def test_a_reload_takes_another_file_if_it_is_right(
    tmp_path: Path, keys: KeyFile, capsys: pytest.CaptureFixture[str]
) -> None:
    key, other = keys.new("team"), KeyFile(tmp_path, capsys)
    other.path = tmp_path / "other.json"
    async with gateway(tmp_path, {"m": fake("m")}, server=server(keys)) as app:
        edit(tmp_path, lambda said: said["server"].update(key_file=str(other.path)))
        with pytest.raises(ConfigError, match=r"server.key_file: .* is missing"):
            await app.reload()
        assert (await say(app, key)).status == 200
        second = other.new("second")
        assert (await app.reload()).at_once == ("server.key_file",)
        assert [(await say(app, one)).status for one in (key, second)] == [401, 200]
        other.revoke("second")
        await until_status(app, second, 401)


async def test_whatever_is_sent_as_a_key_is_refused_and_nothing_breaks(tmp_path: Path, keys: KeyFile) -> None:
    """The check of keys is reached by everyone: each way through it, errors included, ends in 400 or 401."""
    key = keys.new("team")
    chance = random.Random(42208)
    words = [key[:-1], key + "x", key.upper(), key.swapcase(), "' OR 1=1 --", "null", "*", "team", "%00", "${env.HOME}"]
    words += ["".join(chr(chance.randrange(0x21, 0x100)) for _ in range(chance.randrange(1, 80))) for _ in range(150)]
    words += [key[:place] + chance.choice("aZ0_") + key[place + 1 :] for place in range(3, len(key))]
    async with gateway(tmp_path, {"m": fake("m")}, server=server(keys)) as app:
        for word in words:
            if word == key:
                continue
            for header in ({"Authorization": f"Bearer {word}"}, {"x-api-key": word}):
                async with await Raw.open(app) as raw:
                    raw.send(request_bytes("GET", "/v1/models", None, header))
                    answer = await raw.answer()
                assert answer.status in (400, 401), header
                assert word not in answer.body.decode() or len(word) < 5
        await asyncio.sleep(0)
        assert (await say(app, key)).status == 200
