"""Requests that were answered leave no cycles: their memory is given back at once, not when the collector comes."""

import gc
import json
from pathlib import Path

import pytest

from tests.harness import fake, gateway
from tests.integration.raw import Raw, asking, request_bytes

pytestmark = pytest.mark.slow

REQUESTS = 100


async def test_answered_requests_leave_nothing_to_the_collector(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app, await Raw.open(app) as raw:
        for stream in (False, True):
            body = json.dumps(asking("a", stream=stream)).encode()
            asked = request_bytes("POST", "/v1/chat/completions", body)
            for _ in range(5):
                raw.send(asked)
                assert (await raw.answer()).status == 200
            gc.collect()
            gc.disable()
            try:
                for _ in range(REQUESTS):
                    raw.send(asked)
                    await raw.answer()
                found = gc.collect()
            finally:
                gc.enable()
            # A cycle a request would be hundreds of objects; what tests and loop leave behind is a handful.
            assert found < REQUESTS / 2, f"{found} objects in cycles after {REQUESTS} requests, stream={stream}"
