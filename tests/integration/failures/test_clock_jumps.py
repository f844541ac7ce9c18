"""A gateway whose wall clock jumps while it runs, by an hour and by a year: it serves on, no token works twice, and no
jump is told as a duration.

Its clock is set by libfaketime; its other clock, by which all durations are measured, runs on as it does on a machine
whose time is corrected.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.features.governance.token_rig import shared_token
from tests.harness import GatewayProcess, fake, gateway_process
from tests.integration.governance.test_governance import now, with_key
from tests.integration.raw import asking
from tests.redis_server import clock_env
from tests.waiting import until_now

HOUR, YEAR = 3_600, 365 * 86_400


def load(gate: GatewayProcess, token: Any) -> str:
    """What a load is answered with: its status word or its error's code."""
    said = gate.call("POST", "/v1/models/load", {"modelId": "m", "verifiedOpToken": token})[2]
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
            assert load(gate, token) in ("loading", "token_issued_before_start")
            used.append(token)
            codes = {load(gate, one) for one in used}
            assert codes <= {"token_replayed", "token_issued_before_start", "token_expired", "token_not_yet_valid"}
            assert load(gate, used[0]) != "loading"
            # Requests, health and durations do not mind.
            body = asking("m")
            assert gate.call("POST", "/v1/chat/completions", body)[0] == 200
            status, _, health = gate.call("GET", "/health")
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
        answer = pool.submit(gate.call, "POST", "/v1/chat/completions", body)
        job = gate.call("POST", "/v1/jobs", {"route": "/v1/chat/completions", "body": body})[2]["id"]
        until_now(lambda: gate.call("GET", f"/v1/jobs/{job}")[2]["status"] == "running", "the job runs")
        set_clock(clock, jump_s)
        assert answer.result()[0] == 200
        until_now(lambda: gate.call("GET", f"/v1/jobs/{job}")[2]["status"] == "done", "the job is done")
        asked = gate.call("GET", "/api/v1/requests")[2]["requests"]
        used = gate.call("GET", "/api/v1/usage?by=model&since=730d")[2]
        spans = [one for one in gate.call("GET", "/api/v1/timeline")[2]["spans"] if one["ended"] is not None]
        told, passed_s = gate.call("GET", f"/v1/jobs/{job}")[2], time.monotonic() - began + 1
    assert len(asked) == 2 and all(1.5 <= one["total_s"] <= passed_s for one in asked)
    assert 0 <= told["ended"] - told["started"] <= passed_s
    assert all(0 <= one["ended"] - one["began"] <= passed_s for one in spans)
    assert used["total"]["answer_s"] <= 2 * passed_s


def set_clock(file: Path, seconds: int) -> None:
    new = file.with_suffix(".new")
    new.write_text(f"{seconds:+d}\n")
    new.replace(file)
