"""Requests that come while the gateway starts wait until it knows its models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.harness import gateway
from tests.integration.raw import asking
from tests.integration.versions.test_versions import models, options
from tests.ports import free_port
from tests.waiting import PATIENCE_S

CALLERS = 8


async def first_answer(port: int) -> tuple[int, str | None]:
    """The status and the version of the first answer that this port gives, asked without a pause until it is there."""
    body = json.dumps(asking("m", max_tokens=2)).encode()
    sent = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    sent += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0)
            continue
        writer.write(sent)
        answer = (await reader.read()).decode()
        writer.close()
        found = [line for line in answer.splitlines() if line.lower().startswith("x-model-version")]
        return int(answer.split()[1]), found[0].split()[1] if found else None


async def test_requests_that_come_during_the_start_are_answered_by_the_promised_version(tmp_path: Path) -> None:
    port = free_port()
    callers = [asyncio.create_task(first_answer(port)) for _ in range(CALLERS)]
    async with gateway(tmp_path, models(tmp_path), server={"port": port}, **options(tmp_path)):
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*callers) == [(200, "1")] * CALLERS
