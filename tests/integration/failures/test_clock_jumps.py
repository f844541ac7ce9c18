"""A gateway whose wall clock jumps while it runs, by an hour and by a year: it serves on, no token works twice, and no
jump is told as a duration.

Its clock is set by libfaketime; its other clock, by which all durations are measured, runs on as it does on a machine
whose time is corrected.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.features.governance.token_rig import shared_token
from tests.harness import fake, gateway_process
from tests.integration.governance.test_governance import now, with_key
from tests.integration.raw import asking
from tests.redis_server import clock_env
from tests.waiting import until_now

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
def test_a_clock_that_jumps_renews_no_token(
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
            body = asking("m")
            assert call(gate.url, "/v1/chat/completions", body)[0] == 200
            status, health = call(gate.url, "/health")
            assert status == 200 and 0 <= health["uptime"] <= time.monotonic() - began + 1


@pytest.mark.slow
@pytest.mark.parametrize("jump_s", [YEAR, -YEAR])
def test_a_clock_that_jumps_lengthens_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    clock = tmp_path / "clock"
    set_clock(clock, 0)
    for name, value in clock_env(clock).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with gateway_process(tmp_path, {"m": fake("m")}) as gate, ThreadPoolExecutor() as pool:
        body = asking("m", tokens=4, token_s=0.5)
        answer = pool.submit(call, gate.url, "/v1/chat/completions", body)
        job = call(gate.url, "/v1/jobs", {"route": "/v1/chat/completions", "body": body})[1]["id"]
        until_now(lambda: shown(gate.url, f"/v1/jobs/{job}")["status"] == "running", "the job runs")
        set_clock(clock, jump_s)
        assert answer.result()[0] == 200
        until_now(lambda: shown(gate.url, f"/v1/jobs/{job}")["status"] == "done", "the job is done")
        asked = shown(gate.url, "/api/v1/requests")["requests"]
        used = shown(gate.url, "/api/v1/usage?by=model&since=730d")
        spans = [one for one in shown(gate.url, "/api/v1/timeline")["spans"] if one["ended"] is not None]
        told, passed_s = shown(gate.url, f"/v1/jobs/{job}"), time.monotonic() - began + 1
    assert len(asked) == 2 and all(1.5 <= one["total_s"] <= passed_s for one in asked)
    assert 0 <= told["ended"] - told["started"] <= passed_s
    assert all(0 <= one["ended"] - one["began"] <= passed_s for one in spans)
    assert used["total"]["answer_s"] <= 2 * passed_s


def shown(url: str, path: str) -> Any:
    status, said = call(url, path)
    assert status == 200, said
    return said


def set_clock(file: Path, seconds: int) -> None:
    new = file.with_suffix(".new")
    new.write_text(f"{seconds:+d}\n")
    new.replace(file)
