"""What the gateway keeps on disk beyond one run; and traffic that was recorded, played with other hardware."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.events import RequestArrived
from greenroom.core.model import ModelId, MoveKind
from greenroom.runtime.record.recording import read_events
from tests.harness import fake, gateway, served
from tests.integration.facts import at_rest
from tests.integration.raw import Answer, chat, http

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


PATH = "/api/v1/simulate"
MODELS: dict[str, Any] = {"a": fake("a", memory_mib=900, aliases=["other"]), "b": fake("b", memory_mib=900)}
ONE_GPU: dict[str, Any] = {"gpus": [{"memory_mib": 1_500, "margin_mib": 0}]}


async def post(app: App, path: str, body: dict[str, Any]) -> Answer:
    return await http(app, "POST", path, body)


@pytest.mark.slow
async def test_recorded_requests_are_played_with_other_hardware(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, **ONE_GPU, server={"stream_wait_max_s": 1_234}) as app:
        refused = await post(app, PATH, {})
        assert (refused.status, refused.error["param"]) == (400, "rate")
        for name in ("a", "b", "other"):
            assert (await chat(app, name)).status == 200
        there = (await http(app, "GET", PATH)).json()
        assert (there["requests"], there["source"], there["gpus"], there["gpu_mib"]) == (3, "memory", 1, 1_500)
        assert {"default", "fifo"} <= set(there["policies"])
        playing = asyncio.create_task(post(app, PATH, {"gpus": [1, 2]}))
        others: set[int] = set()
        # While it runs others are refused, whatever they ask for; this one would be anyway.
        while not playing.done():
            others.add((await post(app, PATH, {"policy": ["none"]})).status)
            await asyncio.wait((playing,), timeout=0.05)
        assert 503 in others
        said = (await playing).json()
    assert [(case["gpus"], case["requests"], case["served"]) for case in said["cases"]] == [(1, 3, 3), (2, 3, 3)]
    # The two models fit on one GPU only one after the other.
    first, second = (case["waits"]["max_s"] for case in said["cases"])
    assert first > second
    assert said["bottom_line"]
    assert "after 1,234 s (server.stream_wait_max_s)" in "\n".join(said["assumed"])
    assert not [sentence for sentence in said["assumed"] if "/tmp" in sentence or str(tmp_path) in sentence]


async def test_models_sleep_in_the_green_room_of_the_gateway(tmp_path: Path) -> None:
    models: dict[str, Any] = {name: served("vllm", tmp_path / name) for name in ("a", "b")}
    models |= {"on_host": fake("on_host", memory_mib=5_000, device="cpu")}
    budget: dict[str, Any] = {"gpus": [{"memory_mib": 2_500, "margin_mib": 0}], "memory": {"green_room_mib": 9_000}}
    async with gateway(tmp_path, models, **budget, host={"memory_mib": 20_000}) as app:
        said = (await post(app, PATH, {"rate": 0.02})).json()
        none = (await post(app, PATH, {"rate": 0.02, "green_room_mib": [0]})).json()
    assert said["cases"][0]["wakes"] and said["bottom_line"][0].startswith("As it is (default), all ")
    assert not none["cases"][0]["wakes"] and none["bottom_line"][0].startswith("In the first case (default, no green")
    assert [one for one in said["assumed"] if "gpu0 2,500 MiB, host 20,000 MiB" in one]


async def test_a_model_that_names_a_gpu_and_needs_memory_of_the_host_only_is_played(tmp_path: Path) -> None:
    models = {"a": fake("a", memory_mib=0, host_memory_mib=500, devices=["gpu0"])}
    async with gateway(tmp_path, models, **ONE_GPU, host={"memory_mib": 20_000}) as app:
        assert (await post(app, PATH, {"rate": 0.02})).status == 200


async def test_orders_that_cannot_be_played_are_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, **ONE_GPU) as app:
        await chat(app, "a")
        many = await post(app, PATH, {"gpus": [1, 2, 3, 4], "concurrency": [1, 2, 3, 4]})
        assert many.status == 400 and "16 cases" in many.error["message"]
        for name in ("default,fifo", ""):
            strange = await post(app, PATH, {"policy": [name]})
            assert (strange.status, strange.error["param"]) == (400, "policy")
        assert (await post(app, PATH, {"gpus": [0]})).status == 400


async def test_where_no_file_can_be_written_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(tmp_path, MODELS, **ONE_GPU) as app:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        answer = await post(app, PATH, {"rate": 1})
        assert answer.status == 503 and "cannot be started" in answer.error["message"]


async def test_a_recording_is_played_where_there_is_one(tmp_path: Path) -> None:
    recorded = tmp_path / "activity.csv"
    rows = [f"{1_700_000_000 + 60 * number}.000,{'ab'[number % 2]},20,10,,1,0.000,0.500" for number in range(10)]
    head = "t,model,prompt_len,output_len,tenant,priority,wait_s,total_s"
    # Rows that are none, torn ones and times that are no times hide no other.
    odd = [
        "gone,wrong",
        '12.5,"a,20',
        f"{rows[0][:14]},{'a' * 200_000}" + ",1" * 6,
        "\u00b2" + rows[0][14:],
        rows[0][14:],
    ]
    odd += ["nan" + rows[0][14:], "9" * 400 + rows[0][14:]]
    recorded.write_text("\n".join([head, *odd[:4], *rows, *odd[4:]]) + "\n")
    async with gateway(tmp_path, MODELS, server={"record_activity": str(recorded)}, **ONE_GPU) as app:
        there = (await http(app, "GET", PATH)).json()
        assert (there["requests"], there["seconds"], there["source"]) == (10, 540.0, "recording")
