"""front.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.api.front import prefers_later
from greenroom.http.request import Head
from tests.harness import gateway
from tests.integration.raw import CHAT, http

KEY = "gr-0123456789abcdef0123456789abcdef"
SHOWN = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({}, b"{}", "invalid_api_key"),
        ({**SHOWN, "Host": "evil.example"}, b"{}", "host_not_allowed"),
        ({**SHOWN, "Content-Length": "99999999999"}, b"", "body_too_large"),
        (SHOWN, b"{}", "invalid_request"),
    ],
)
async def test_every_refusal_is_counted_by_its_code(
    tmp_path: Path, headers: dict[str, str], body: bytes, code: str
) -> None:
    async with gateway(tmp_path, {}, server={"api_keys": [{"name": "me", "key": KEY, "admin": True}]}) as app:
        answer = await http(app, "POST", CHAT, body=body, headers=headers)
        assert answer.error["code"] == code
        metrics = (await http(app, "GET", "/metrics", headers=SHOWN)).body.decode()
        assert f'greenroom_edge_refusals_total{{code="{code}"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("lines", "later"),
    [
        ([b"respond-async"], True),
        ([b"wait=10, Respond-Async"], True),
        ([b"respond-async; wait=10"], True),
        ([b"return=minimal", b"respond-async"], True),
        ([b'a="x, y", respond-async'], True),
        ([b'a="x, respond-async, y"'], False),
        ([b"x; respond-async"], False),
        ([b"respond-asynchronously"], False),
        ([b"respond-async=no"], False),
        ([], False),
    ],
)
def test_what_a_caller_prefers_is_read_from_all_lines_as_rfc_7240_says(lines: list[bytes], later: bool) -> None:
    headers = [(b"host", b"here"), *((b"prefer", line) for line in lines)]
    assert prefers_later(Head(b"POST", b"/v1/chat/completions", headers, "1.1", "127.0.0.1", True)) is later
