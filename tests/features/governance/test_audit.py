"""The audit log: every change to it is found, a crash is marked, and refused calls make it hardly grow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.errors import AuditUnavailable, ConfigError
from greenroom.features.governance.audit import BEGINNING, AuditLog, head_path, verify
from greenroom.features.governance.gate import Refusals
from tests.features.governance.test_gate import code, lines
from tests.features.governance.token_rig import call, in_place, key_file, opened, shared_token
from tests.waiting import until


async def written(path: Path, count: int = 4) -> list[bytes]:
    log = AuditLog(path, in_place)
    await log.open()
    for number in range(count):
        await log.append({"event": "permitted", "model": f"m{number}"})
    await log.close()
    return path.read_bytes().splitlines(keepends=True)


async def test_a_log_that_is_as_it_was_written_is_good(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = await written(path)
    first = verify(path)
    assert first.problem is None and first.lines == len(lines) == 5
    await written(path)
    again = verify(path, expected_head=first.head)
    assert again.problem is None and again.lines == 10 and again.head != first.head
    assert verify(path, expected_head=BEGINNING).problem is None


@pytest.mark.parametrize(
    ("change", "bad_line"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b"m1", b"mX"), *lines[3:]], 3),
        (lambda lines: [*lines[:2], lines[2].replace(b'"m1"', b' "m1"'), *lines[3:]], 3),
        (lambda lines: [*lines[:2], b"rubbish\n", *lines[3:]], 3),
        (lambda lines: [*lines[:2], b"7\n", *lines[3:]], 3),
        (lambda lines: [*lines[:2], *lines[3:]], 3),
        (lambda lines: lines[1:], 1),
        (lambda lines: [*lines[:2], lines[3], lines[2], lines[4]], 3),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4),
        (lambda lines: lines[:-1], 5),
        (lambda lines: [], 1),
        (lambda lines: [*lines, b"x\n"], 6),
    ],
)
async def test_the_first_bad_line_is_told(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], bad_line: int
) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b"".join(change(await written(path))))
    assert verify(path).bad_line == bad_line
    # A start goes on, and what it found stays told.
    log = AuditLog(path, in_place)
    await log.open()
    assert log.problem is not None
    await log.close()
    assert verify(path).problem is not None


async def test_lines_taken_from_the_end_are_found_by_a_hash_kept_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = await written(path)
    head = verify(path).head
    path.write_bytes(b"".join(lines[:3]))
    head_path(path).unlink()
    assert verify(path).problem is None
    assert "expected" in (verify(path, expected_head=head).problem or "")


@pytest.mark.parametrize("keep", [1, 40, -2, -1])
async def test_a_line_that_a_crash_cut_is_marked_and_the_chain_goes_on(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "audit.jsonl"
    *before, last = await written(path)
    path.write_bytes(b"".join(before) + last[:keep])
    # The head is kept after the line is on disk, so a cut line is never the head.
    head_path(path).unlink()
    assert (verify(path).problem is None) == (keep == -1), "only the end of the line is missing"
    await written(path)
    found = verify(path)
    assert found.problem is None and found.cut == (() if keep == -1 else (5,))


async def test_two_gateways_cannot_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, in_place)
    await log.open()
    with pytest.raises(ConfigError, match="another gateway"):
        await AuditLog(path, in_place).open()
    await log.close()


async def test_a_line_is_taken_back_if_its_number_cannot_be_kept(tmp_path: Path) -> None:
    """The line fits on the disk and the file beside it does not: the operation is refused, and the chain goes on."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, in_place)
    await log.open()
    (tmp_path / "audit.jsonl.new").mkdir()
    with pytest.raises(AuditUnavailable):
        await log.append({"event": "permitted", "model": "never"})
    (tmp_path / "audit.jsonl.new").rmdir()
    await log.append({"event": "permitted", "model": "m"})
    await log.close()
    assert verify(path).problem is None and verify(path).lines == 2
    assert b"never" not in path.read_bytes()


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

    refusals = Refusals(cast(AuditLog, SimpleNamespace(append=append)), fold_s=0.02)
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

    refusals = Refusals(cast(AuditLog, SimpleNamespace(append=append)))
    for _ in range(1 + count):
        await refusals.add({"code": "token_missing", "key": "ops"})
    await refusals.close()
    await refusals.close()
    assert len(written) == 1 + count
