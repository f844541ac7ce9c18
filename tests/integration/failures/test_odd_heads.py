"""What an engine puts before its answers: only what may pass reaches a caller, and no status that is none."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.harness import gateway
from tests.integration.raw import http
from tests.standins import odd_heads_engine

ENGINE = [sys.executable, "-I", "-S", odd_heads_engine.__file__, "--port", "${PORT}"]
OURS = {"content-type", "content-length", "date", "etag", "x-request-id", "x-queue-wait-ms"}


async def test_only_what_may_pass_of_an_engines_head_reaches_a_caller(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"odd": {"cmd": ENGINE, "memory_mib": 50}}) as app:
        answer = await http(app, "GET", "/upstream/odd/cookies")
        assert answer.status == 200 and {name.lower() for name in answer.headers} == OURS
        assert answer.headers["content-type"] == "application/json" and answer.headers["etag"] == "kept"
        assert answer.headers["x-request-id"].startswith("r-")
        for name in sorted(odd_heads_engine.HEADS.keys() - {"cookies"}):
            answer = await http(app, "GET", f"/upstream/odd/{name}")
            assert (answer.status, answer.error["code"]) == (502, "engine_lost"), name
