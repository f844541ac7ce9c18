"""A pull that fails tells the same in a stream as in one answer: bounded, and without control characters; and errors
of all of Ollama's pages have its shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from greenroom.dialects.ollama import OLLAMA
from greenroom.features.library.ollama_routes import OllamaRoutes
from greenroom.library.orders import OrderRules
from greenroom.runtime.operations.files import Operation, OperationError, OperationKind, OperationStatus
from tests.api.management_rig import Client, FakeGateway

SAID = "the hub said \x1b[31mno\x1b[0m\x07 " + "x" * 10_000


class FailedDownloads:
    """Every download has failed already."""

    rules = OrderRules()

    def __init__(self, said: str) -> None:
        self._row = Operation(
            *("d-1", OperationKind.DOWNLOAD, "lab", "key", "org/name", "/api/pull", 1, False, 0.0),
            status=OperationStatus.FAILED,
            error=OperationError("fetch_failed", said),
        )

    async def submit(self, *_: Any, **__: Any) -> Operation:
        return self._row

    async def ended(self, _: str) -> Operation:
        return self._row

    def get(self, _: str) -> Operation:
        return self._row


@pytest.mark.parametrize("is_admin", [True, False])
async def test_a_failed_pull_tells_no_more_in_a_stream_than_in_an_answer(is_admin: bool) -> None:
    gateway: Any = FakeGateway()
    gateway.downloads = FailedDownloads(SAID)
    client = Client(gateway, is_admin=is_admin)
    whole = await client.post("/api/pull", {"model": "hf.co/org/name", "stream": False})
    stream = await client.post("/api/pull", {"model": "hf.co/org/name"})
    assert (whole.status, stream.status) == (502, 200)
    lines = [json.loads(line) for line in stream.body.splitlines()]
    assert lines[-1] == whole.json == {"error": whole.error}
    assert len(whole.error) <= 2_048 and "\x1b" not in whole.error


def test_the_record_of_the_dialect_names_every_page() -> None:
    declared = {route.path for member in vars(OllamaRoutes).values() for route in getattr(member, "declared", ())}
    # Whoever looks at the root need not mean Ollama.
    assert {page.decode() for page in OLLAMA.pages} == declared - {"/"}
