"""api/ui/files.py: the dashboard's files over HTTP."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from greenroom.api.ui.files import ASSETS
from greenroom.app import App
from tests.harness import gateway
from tests.integration.raw import Answer, http

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYS = {"api_keys": [{"name": "me", "key": "gr-0123456789abcdef0123456789abcdef", "admin": True}]}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    """A gateway where every caller needs a key."""
    async with gateway(tmp_path_factory.mktemp("locked"), {}, server=KEYS) as app:
        yield app


async def ask(app: App, path: str, method: str = "GET", **headers: str) -> Answer:
    return await http(app, method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize("name", ["", "index.html", "app.js", "app.css", "icon.svg", "licences.txt"])
async def test_files_need_no_key_and_are_guarded(locked: App, name: str) -> None:
    answer = await ask(locked, f"/ui/{name}")
    assert answer.status == 200
    assert answer.body == (ASSETS / (name or "index.html")).read_bytes()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("path", "method"),
    [("/ui/app.js.map", "GET"), ("/ui/../app.py", "GET"), ("/ui/%61pp.js", "GET"), ("/ui//", "GET"), ("/ui/", "POST")],
)
async def test_nothing_else_is_open(locked: App, path: str, method: str) -> None:
    assert (await ask(locked, path, method)).status == 401


async def test_its_data_needs_the_key(locked: App) -> None:
    assert (await ask(locked, "/api/v1/status")).status == 401


async def test_browsers_are_led_to_it_and_programs_are_not(tmp_path: Path) -> None:
    async with gateway(tmp_path, {}) as app:
        for path in ("/", "/ui"):
            led = await ask(app, path, **BROWSER)
            assert (led.status, led.headers["location"]) == (302, "ui/")
            assert "default-src 'none'" in led.headers["content-security-policy"]
            assert led.headers["x-content-type-options"] == "nosniff"
        plain = await ask(app, "/")
        assert (plain.status, plain.body) == (200, b"Greenroom is running\n")


async def test_it_is_packed_and_not_sent_twice(locked: App) -> None:
    plain = await ask(locked, "/ui/app.js")
    packed = await ask(locked, "/ui/app.js", Accept_Encoding="gzip, br")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert packed.headers["etag"] != plain.headers["etag"]
    again = await ask(locked, "/ui/app.js", If_None_Match=plain.headers["etag"])
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", plain.headers["etag"])
    again = await ask(locked, "/ui/app.js", If_None_Match=packed.headers["etag"], Accept_Encoding="gzip")
    assert (again.status, again.headers["etag"]) == (304, packed.headers["etag"])
    other = await ask(locked, "/ui/app.js", If_None_Match=packed.headers["etag"])
    assert (other.status, other.body) == (200, plain.body)
    head = await ask(locked, "/ui/app.js", "HEAD")
    assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [("gzip;q=0", False), ("br, gzip; q=0.000", False), ("x-gzip-like", False), ("br, GZIP;q=0.1", True)],
)
async def test_it_is_packed_only_for_those_that_take_it(locked: App, accepted: str, packed: bool) -> None:
    answer = await ask(locked, "/ui/app.js", Accept_Encoding=accepted)
    assert ("content-encoding" in answer.headers) is packed


async def test_it_can_be_turned_off(tmp_path: Path) -> None:
    async with gateway(tmp_path, {}, server={"ui": False}) as app:
        assert (await ask(app, "/ui/")).status == 404
        assert (await ask(app, "/", **BROWSER)).body == b"Greenroom is running\n"
