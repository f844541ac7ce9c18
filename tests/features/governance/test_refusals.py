"""Refused calls in the audit log: each reason is told at once, and repeating it makes the log hardly grow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from greenroom.errors import AuditUnavailable
from greenroom.features.governance.audit import verify
from greenroom.features.governance.gate import Refusals
from tests.features.governance.test_gate import code, lines
from tests.features.governance.token_rig import call, key_file, opened, shared_token
from tests.waiting import until


async def test_a_caller_cannot_have_the_log_grow_by_calling(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    for _ in range(500):
        assert await code(gate, call(None)) == "token_missing"
        assert await code(gate, call("x")) == "token_malformed"
    assert [line.get("code") for line in lines(tmp_path)] == [None, "token_missing", "token_malformed"]
    # What is permitted meanwhile has its line, and the end tells the numbers.
    assert await code(gate, call(shared_token())) == ""
    await gate.close()
    told = {line["code"]: line for line in lines(tmp_path) if "repeats" in line}
    assert {name: line["repeats"] for name, line in told.items()} == {"token_missing": 499, "token_malformed": 499}
    assert told["token_missing"]["key"] == "ops" and told["token_missing"]["operations"] == ["model-load"]
    assert told["token_missing"]["lastRequest"] == "r-1" and told["token_missing"]["lastAt"] > 0
    assert verify(tmp_path / "audit.jsonl").problem is None
    assert (tmp_path / "audit.jsonl").stat().st_size < 5_000


async def test_numbers_are_written_when_their_time_is_over_and_reasons_are_told_anew(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path), fold_s=0.05)
    for _ in range(3):
        await code(gate, call(None))
    await until(lambda: any("repeats" in line for line in lines(tmp_path)), "the number is written")
    assert await code(gate, call(None)) == "token_missing"
    refused = [line.get("repeats") for line in lines(tmp_path) if line["event"] == "refused"]
    assert refused[0] is None and sum(one or 1 for one in refused) == 4
    await gate.close()


async def test_another_key_has_lines_of_its_own(tmp_path: Path) -> None:
    gate = await opened(tmp_path, key_path=key_file(tmp_path))
    for key in ("ops", "other", "ops", "other"):
        await code(gate, call(None, about={"request": "r", "route": "POST /v1/models/load", "key": key}))
    assert [line["key"] for line in lines(tmp_path)[1:]] == ["ops", "other"]
    await gate.close()


async def test_what_cannot_be_written_is_counted_until_it_can() -> None:
    is_full, written = True, list[Mapping[str, Any]]()

    async def append(fields: Mapping[str, Any]) -> None:
        if is_full:
            raise AuditUnavailable("full", retry_after_s=1)
        written.append(fields)

    refusals = Refusals(append, fold_s=0.02)
    for _ in range(3):
        await refusals.add({"code": "token_missing", "key": "ops", "operation": "model-load"})
    await asyncio.sleep(0.1)
    is_full = False
    await until(lambda: bool(written), "it is written")
    assert [line["repeats"] for line in written] == [3]
    await refusals.close()
    assert len(written) == 1 and json.dumps(written[0])


@pytest.mark.parametrize("count", [0, 1])
async def test_closing_writes_what_is_left_once(count: int) -> None:
    written = list[Mapping[str, Any]]()

    async def append(fields: Mapping[str, Any]) -> None:
        written.append(fields)

    refusals = Refusals(append)
    for _ in range(1 + count):
        await refusals.add({"code": "token_missing", "key": "ops"})
    await refusals.close()
    await refusals.close()
    assert len(written) == 1 + count
