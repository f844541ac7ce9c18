"""What callers and operators see of the green room where an engine has none, and what is done for them anyway."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness import fake, gateway
from tests.integration.raw import Raw, asking, chat, http
from tests.waiting import until

FLUSH = "/v1/cache/flush"
MIB = 2**20


@pytest.mark.parametrize("stream", [False, True])
async def test_of_an_engine_that_does_not_tell_a_cache_hit_is_unknown(tmp_path: Path, stream: bool) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        answer = await chat(app, "a", stream=stream, headers={"X-Cache-Mode": "none", "X-Cache-Tag": "session-1"})
        gone = await chat(app, "a", headers={"X-Request-Timeout-S": "0.2"}, token_s=5)
        remembered = await http(app, "GET", f"/api/v1/requests/{answer.headers['x-request-id']}")
    assert (answer.headers["x-cache-hit"], answer.headers["x-cache-tokens-reused"]) == ("unknown", "0")
    assert "x-gpu-time-ms" not in answer.headers
    loaded_ms, ready_ms = (int(one.headers["x-queue-wait-ms"]) for one in (answer, gone))
    assert gone.status >= 400 and 0 <= ready_ms < loaded_ms, "only the first waited for its model"
    assert (remembered.json()["cached_tokens"], remembered.json()["gpu_time_ms"]) == (None, None)


async def test_words_about_caches_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        long = await chat(app, "a", headers={"X-Cache-Tag": "x" * 65})
        odd = await chat(app, "a", headers={"X-Cache-Mode": "always"})
    assert (long.status, long.error["param"]) == (400, "X-Cache-Tag")
    assert (odd.status, odd.error["param"]) == (400, "X-Cache-Mode")


async def test_cache_headers_are_not_sent_to_an_engine_without_a_cache(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with gateway(tmp_path, {"a": fake("a", "--journal", str(journal), "--record")}) as app:
        await chat(app, "a", headers={"X-Cache-Tag": "secret-tag", "X-Tenant-ID": "lab"})
    assert "secret-tag" not in journal.read_text() and "x-tenant-id" not in journal.read_text().lower()


async def test_a_key_that_may_only_ask_may_flush_its_own_tenant_only(tmp_path: Path) -> None:
    keys = [{"name": "lab", "key": "lab-key"}, {"name": "admin", "key": "admin-key", "admin": True}]
    async with gateway(tmp_path, {"a": fake("a")}, server={"api_keys": keys}) as app:
        lab, admin = ({"Authorization": f"Bearer {key}"} for key in ("lab-key", "admin-key"))
        assert (await http(app, "POST", FLUSH, {"scope": "all"})).status == 401
        assert (await http(app, "POST", FLUSH, {"scope": "all"}, headers=lab)).status == 403
        assert (await http(app, "POST", FLUSH, {"scope": "tenant", "tenantId": "x"}, headers=lab)).status == 403
        own = await http(app, "POST", FLUSH, {"scope": "tenant"}, headers=lab)
        everything = await http(app, "POST", FLUSH, {"scope": "all"}, headers=admin)
    assert own.json() == everything.json() == {"flushed": True, "entriesRemoved": 0, "memoryFreedMB": 0.0}


@pytest.mark.parametrize("order", ["sleep", "prepare"])
async def test_an_engine_that_cannot_sleep_says_which_it_is_and_what_to_do(tmp_path: Path, order: str) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        await chat(app, "a")
        answer = await http(app, "POST", f"/api/v1/models/a/{order}")
        still = await http(app, "GET", "/api/v1/models/a")
    assert (answer.status, answer.error["code"]) == (422, "unsupported")
    assert "command" in answer.error["message"] and "unload" in answer.error["message"]
    assert still.json()["tier"] == "ready"


async def test_a_models_file_is_read_ahead_while_its_caller_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ready model answers slowly; the other, which will replace it, is read meanwhile and never loaded."""
    plain = os.preadv

    def nothing_cached(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        """Also where temporary files lie in memory."""
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", nothing_cached)
    (tmp_path / "b.gguf").write_bytes(bytes(3 * MIB))
    models = {
        "a": fake("a", "--token-s", "0.2", "--tokens", "500"),
        "b": {"path": str(tmp_path / "b.gguf"), "memory_mib": 100},
    }
    async with (
        gateway(tmp_path, models, budget_mib=100) as app,
        await Raw.open(app) as busy,
        await Raw.open(app) as raw,
    ):
        busy.ask(asking("a", stream=True))
        await busy.head()
        raw.ask(asking("b"))
        counts = app.metrics.green_room._prefetched
        await until(lambda: counts.at("b").value == 3 * MIB, "the file was read")
        assert not any(slot.model == "b" and slot.move for slot in app.loop.scheduler.state.slots.values())
        raw.leave()
        busy.leave()
        await asyncio.sleep(0)
