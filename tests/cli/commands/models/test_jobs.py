from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.main import main
from greenroom.features.jobs import cli as jobs
from tests.cli.command import Cli, in_terminal
from tests.cli.fake_gateway import Answer, FakeGateway, answer

ID = "job-" + "5c" * 16


def job(**more: Any) -> dict[str, Any]:
    return {
        "id": ID,
        "object": "job",
        "status": "running",
        "route": "/v1/images/generations",
        "model": "sdxl",
        "created": time.time() - 90,
        "started": None,
        "ended": None,
        "retry": False,
        "position": None,
        "progress": 0.42,
        "eta_s": 12.0,
        "result_bytes": 0,
        "error": None,
        "request_id": None,
        "tenant": None,
        **more,
    }


def cells(line: str) -> list[str]:
    return line.split(None, len(jobs.TITLES) - 1)


def test_list_shows_each_job_on_a_line(gateway: FakeGateway, cli: Cli) -> None:
    failed = {"code": "engine_lost", "message": "It is gone."}
    rows = [
        job(),
        job(status="queued", position=3, progress=0.0, eta_s=None),
        job(status="failed", error=failed, progress=None, eta_s=None),
        job(status="done", result_bytes=1234567, progress=1.0, eta_s=None),
    ]
    gateway.on("GET", "/v1/jobs", answer({"object": "list", "data": rows}))
    titles, running, queued, broken, done = cli("jobs", "--status", "done", "--limit", "7").lines
    assert cells(titles)[:5] == ["JOB", "STATUS", "MODEL", "ROUTE", "PROGRESS"]
    assert cells(running)[1:6] == ["running", "sdxl", "/v1/images/generations", "####------_42%", "12s"]
    assert cells(queued)[-1] == "place 3"
    assert cells(broken)[-1] == "engine_lost: It is gone."
    assert cells(done)[-1] == "1,234,567 bytes"
    assert gateway.asked[-1].target == "/v1/jobs?limit=7&status=done"


def test_show_and_cancel_are_of_one_job(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("GET", f"/v1/jobs/{ID}", answer(job()))
    gateway.on("DELETE", f"/v1/jobs/{ID}", answer(job(status="cancelled")))
    assert cli("jobs", "show", ID, "--json").json["progress"] == 0.42
    assert "cancelled" in cli("jobs", "cancel", ID).out


def test_ids_stay_one_part_of_the_path(gateway: FakeGateway) -> None:
    assert main(["jobs", "show", "../models?x"]) == 1
    assert gateway.asked[-1].target == "/v1/jobs/..%2Fmodels%3Fx"


def test_result_is_written_as_it_is(gateway: FakeGateway, tmp_path: Path, capfdbinary: Any) -> None:
    gateway.on("GET", f"/v1/jobs/{ID}/result", Answer(b"RIFF\0\xff", content_type="audio/wav"))
    assert main(["jobs", "result", ID, "-o", str(tmp_path / "a.wav")]) == 0
    assert (tmp_path / "a.wav").read_bytes() == b"RIFF\0\xff"
    assert main(["jobs", "result", ID]) == 0
    assert capfdbinary.readouterr().out == b"RIFF\0\xff"
    assert main(["jobs", "result", ID, "-o", str(tmp_path / "none" / "a.wav")]) == 1


def test_result_that_is_cut_leaves_no_file(gateway: FakeGateway, tmp_path: Path, cli: Cli) -> None:
    gateway.on("GET", f"/v1/jobs/{ID}/result", Answer(b"half", cut=True))
    assert "went away" in cli("jobs", "result", ID, "-o", tmp_path / "a", status=1).err
    assert list(tmp_path.iterdir()) == []


def test_wait_ends_with_the_job(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(jobs, "LOOK_EVERY_S", 0.0)
    steps = iter((job(progress=0.5), job(progress=0.9), job(status="failed", error={"code": "c", "message": "m"})))
    first = answer(job())

    def next_step() -> None:
        if (step := next(steps, None)) is not None:
            first.body = json.dumps(step).encode()

    first.before = next_step
    gateway.on("GET", f"/v1/jobs/{ID}", first)
    out, err = cli("jobs", "wait", ID, status=1)
    assert err.splitlines() == ["sdxl running 50%", "sdxl running 90%"]
    assert "c: m" in out


def test_a_terminal_shows_a_bar(gateway: FakeGateway) -> None:
    turns = iter((job(), job(), job(status="done", result_bytes=10, progress=1.0)))
    said = answer(job())

    def next_turn() -> None:
        said.body = json.dumps(next(turns, job(status="done"))).encode()

    said.before = next_turn
    gateway.on("GET", f"/v1/jobs/{ID}", said)
    shown = in_terminal(["jobs", "wait", ID, "--url", gateway.url])
    assert "42%" in shown and "12s left" in shown and "greenroom jobs result" in shown
