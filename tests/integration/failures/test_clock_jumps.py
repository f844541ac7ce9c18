"""A gateway whose wall clock jumps while it runs, by an hour and by a year: it serves on, and no token works twice.

Its clock is set by libfaketime; its other clock, by which all durations are measured, runs on as it does on a machine
whose time is corrected.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.harness import fake, gateway_process
from tests.integration.governance.test_governance import now, with_key
from tests.redis_server import clock_env
from tests.tenancy.governance.token_rig import shared_token

HOUR, YEAR = 3_600, 365 * 86_400


def call(url: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def load(url: str, token: Any) -> str:
    """What a load is answered with: its status word or its error's code."""
    _, said = call(url, "/v1/models/load", {"modelId": "m", "verifiedOpToken": token})
    return str(said.get("status") or said["error"]["code"])


@pytest.mark.slow
@pytest.mark.parametrize("jumps_s", [(HOUR, 0, -HOUR, 0), (YEAR, 0, -YEAR, 0), (-HOUR, YEAR, 0)])
def test_a_clock_that_jumps_lets_no_token_be_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jumps_s: tuple[int, ...]
) -> None:
    clock = tmp_path / "clock"
    set_clock(clock, 0)
    for name, value in clock_env(clock).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with gateway_process(tmp_path, {"m": fake("m")}, governance=with_key(tmp_path)) as gate:
        used: list[dict[str, Any]] = []
        for jump_s in (0, *jumps_s):
            set_clock(clock, jump_s)
            token = shared_token(modelId="m", issuedAt=now() + jump_s)
            assert load(gate.url, token) in ("loading", "token_issued_before_start")
            used.append(token)
            codes = {load(gate.url, one) for one in used}
            assert codes <= {"token_replayed", "token_issued_before_start", "token_expired", "token_not_yet_valid"}
            assert load(gate.url, used[0]) != "loading"
            # Requests, health and durations do not mind.
            body = {"model": "m", "messages": []}
            assert call(gate.url, "/v1/chat/completions", body)[0] == 200
            status, health = call(gate.url, "/health")
            assert status == 200 and 0 <= health["uptime"] <= time.monotonic() - began + 1


def set_clock(file: Path, seconds: int) -> None:
    new = file.with_suffix(".new")
    new.write_text(f"{seconds:+d}\n")
    new.replace(file)
