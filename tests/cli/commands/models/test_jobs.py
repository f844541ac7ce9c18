from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.commands.models import jobs
from greenroom.cli.main import main
from tests.cli.commands.operating.test_ps import in_terminal
from tests.cli.fake_gateway import Answer, FakeGateway, answer, error

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


def test_list_shows_each_job_on_a_line(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"code": "engine_lost", "message": "It is gone."}
    rows = [
        job(),
        job(status="queued", position=3, progress=0.0, eta_s=None),
        job(status="failed", error=failed, progress=None, eta_s=None),
        job(status="done", result_bytes=1234567, progress=1.0, eta_s=None),
    ]
    gateway.on("GET", "/v1/jobs", answer({"object": "list", "data": rows}))
    assert main(["jobs", "--status", "done", "--limit", "7"]) == 0
    titles, running, queued, broken, done = capsys.readouterr().out.splitlines()
    assert cells(titles)[:5] == ["JOB", "STATUS", "MODEL", "ROUTE", "PROGRESS"]
    assert cells(running)[1:6] == ["running", "sdxl", "/v1/images/generations", "####------_42%", "12s"]
    assert cells(queued)[-1] == "place 3"
    assert cells(broken)[-1] == "engine_lost: It is gone."
    assert cells(done)[-1] == "1,234,567 bytes"
    assert gateway.asked[-1].target == "/v1/jobs?limit=7&status=done"


def test_show_and_cancel_are_of_one_job(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.on("GET", f"/v1/jobs/{ID}", answer(job()))
    gateway.on("DELETE", f"/v1/jobs/{ID}", answer(job(status="cancelled")))
    assert main(["jobs", "show", ID, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["progress"] == 0.42
    assert main(["jobs", "cancel", ID]) == 0
    assert "cancelled" in capsys.readouterr().out


def test_ids_stay_one_part_of_the_path(gateway: FakeGateway) -> None:
    assert main(["jobs", "show", "../models?x"]) == 1
    assert gateway.asked[-1].target == "/v1/jobs/..%2Fmodels%3Fx"


@pytest.mark.parametrize("argv", [["show"], ["cancel"], ["result"], ["wait"], ["list", ID]])
def test_an_action_without_its_job_is_wrong_usage(
    argv: list[str], gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobs", *argv]) == 2
    assert "id" in capsys.readouterr().err
    assert not gateway.asked


def test_result_is_written_as_it_is(gateway: FakeGateway, tmp_path: Path, capfdbinary: Any) -> None:
    gateway.on("GET", f"/v1/jobs/{ID}/result", Answer(b"RIFF\0\xff", content_type="audio/wav"))
    assert main(["jobs", "result", ID, "-o", str(tmp_path / "a.wav")]) == 0
    assert (tmp_path / "a.wav").read_bytes() == b"RIFF\0\xff"
    assert main(["jobs", "result", ID]) == 0
    assert capfdbinary.readouterr().out == b"RIFF\0\xff"
    assert main(["jobs", "result", ID, "-o", str(tmp_path / "none" / "a.wav")]) == 1


def test_result_that_is_cut_leaves_no_file(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.on("GET", f"/v1/jobs/{ID}/result", Answer(b"half", cut=True))
    assert main(["jobs", "result", ID, "-o", str(tmp_path / "a")]) == 1
    assert "went away" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_result_that_is_not_there_is_told(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.on("GET", f"/v1/jobs/{ID}/result", error(409, "job_unfinished", "The job is running."))
    assert main(["jobs", "result", ID]) == 1
    assert "The job is running." in capsys.readouterr().err


def test_wait_ends_with_the_job(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "LOOK_EVERY_S", 0.0)
    steps = iter((job(progress=0.5), job(progress=0.9), job(status="failed", error={"code": "c", "message": "m"})))
    first = answer(job())

    def next_step() -> None:
        if (step := next(steps, None)) is not None:
            first.body = json.dumps(step).encode()

    first.before = next_step
    gateway.on("GET", f"/v1/jobs/{ID}", first)
    assert main(["jobs", "wait", ID]) == 1
    out, err = capsys.readouterr()
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
