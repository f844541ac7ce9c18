"""What the gateway keeps on disk beyond one run: learned times, and recordings if they are asked for."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from greenroom.app import App
from greenroom.core.events import RequestArrived
from greenroom.core.model import ModelId, MoveKind
from greenroom.runtime.record.recording import read_events
from tests.harness import fake, gateway
from tests.integration.facts import at_rest
from tests.integration.raw import chat, http

A = ModelId("a")


def load_s(app: App) -> float | None:
    learned = app.loop.scheduler.view.learned().get(A)
    return None if learned is None else learned.moves_s.get(MoveKind.LOAD)


async def explained_eta_s(app: App) -> float | None:
    answer = await http(app, "POST", "/api/v1/explain", {"model": "a"})
    eta_s: float | None = answer.json()["eta_s"]
    return eta_s


async def test_times_learned_in_one_run_are_known_in_the_next(tmp_path: Path) -> None:
    models = {"a": fake("a", "--load-s", "0.5")}
    async with gateway(tmp_path, models) as app:
        assert load_s(app) is None and await explained_eta_s(app) is None
        assert (await chat(app, "a")).status == 200
        learned_s = load_s(app)
        assert learned_s is not None and learned_s >= 0.5
    async with gateway(tmp_path, models) as app:
        assert load_s(app) == round(learned_s, 4)
        eta_s = await explained_eta_s(app)
        assert eta_s is not None and eta_s >= 0.5
    # Another program under the same name has everything to learn anew.
    async with gateway(tmp_path, {"a": fake("a", "--load-s", "0.1")}) as app:
        assert load_s(app) is None


async def test_a_broken_file_of_times_does_not_stop_the_start(tmp_path: Path) -> None:
    models = {"a": fake("a")}
    async with gateway(tmp_path, models) as app:
        assert (await chat(app, "a")).status == 200
    file = tmp_path / "state" / "learned.json"
    file.write_text(file.read_text()[:20])
    async with gateway(tmp_path, models) as app:
        assert (await chat(app, "a")).status == 200
    assert "a" in json.loads(file.read_text())["models"]


async def test_nothing_is_recorded_unless_asked_for(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        assert (await chat(app, "a")).status == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["greenroom.yaml", "state"]


async def test_recordings_hold_requests_and_never_what_they_say(tmp_path: Path) -> None:
    # Relative paths begin at the configuration file.
    files = {"record_activity": "activity.csv", "record_events": "events.jsonl"}
    async with gateway(tmp_path, {"a": fake("a")}, server=files) as app:
        secret = [{"role": "user", "content": "hush-hush"}]
        answer = await chat(app, "a", headers={"X-Tenant-ID": "lab"}, messages=secret, x_priority="low")
        assert answer.status == 200
        assert (await chat(app, "nobody")).status == 404
        await at_rest(app)
    head, row = (tmp_path / "activity.csv").read_text().splitlines()
    assert head == "t,model,prompt_len,output_len,tenant,priority,wait_s,total_s"
    assert row.split(",")[1] == "a" and row.split(",")[3:6] == ["4", "lab", "2"]
    wait_s, total_s = map(float, row.split(",")[6:])
    assert 0 < wait_s <= total_s
    arrived = [event for event in read_events(tmp_path / "events.jsonl") if isinstance(event, RequestArrived)]
    assert [event.request for event in arrived] == [answer.headers["x-request-id"]]
    assert "hush" not in (tmp_path / "activity.csv").read_text() + (tmp_path / "events.jsonl").read_text()


async def test_start_that_fails_leaves_recordings_alone_and_nothing_listening(tmp_path: Path) -> None:
    files = {"record_activity": "activity.csv", "record_events": "events.jsonl"}
    async with gateway(tmp_path, {"a": fake("a")}, server=files):
        pass
    before = (tmp_path / "events.jsonl").read_text()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(3):
            with pytest.raises(OSError):
                async with gateway(tmp_path, {}, server={**files, "port": taken.getsockname()[1]}):
                    pass
    (tmp_path / "activity.csv").unlink()
    os.mkfifo(tmp_path / "activity.csv")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(OSError, match="is not a regular file"):
        async with gateway(tmp_path, {}, server={**files, "port": port}):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)
    assert (tmp_path / "events.jsonl").read_text() == before and not (tmp_path / "events.jsonl.1").exists()
