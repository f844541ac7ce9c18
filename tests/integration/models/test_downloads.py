"""Downloads through a running gateway: ordered, watched, cancelled, killed, kept over a restart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.dialects.ollama.requests import tagged
from greenroom.features.library.downloads import LOST_MAX
from tests.harness import fake, gateway, gateway_process, url
from tests.integration.facts import OVER, over
from tests.integration.raw import http
from tests.later import Later
from tests.models import tiny
from tests.standins.standin_hub import StandinHub
from tests.waiting import until, until_now

ollama = Later("ollama")

DOWNLOADS = "/v1/models/download"
REPO = "org/name"
TOKEN = "hf_verysecretindeed"
FILES = {"model.safetensors": random.Random(1).randbytes(400_000), "config.json": b"{}", "pytorch_model.bin": b"pickle"}


@pytest.fixture
def hub(hub: StandinHub) -> StandinHub:
    hub.repos[REPO] = dict(FILES)
    return hub


def options(tmp_path: Path, **library: Any) -> dict[str, Any]:
    return {"model_roots": [str(tmp_path / "models")], "library": library}


async def post(app: App, body: Any) -> tuple[int, Any]:
    answer = await http(app, "POST", DOWNLOADS, body)
    return answer.status, answer.json()


async def ordered(app: App, **body: Any) -> str:
    status, said = await post(app, {"model": REPO, **body} if "url" not in body else body)
    assert (status, said["status"]) == (202, "pending"), said
    return str(said["job_id"])


async def shown(app: App, id: str) -> dict[str, Any]:
    answer = await http(app, "GET", f"{DOWNLOADS}/{id}")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


async def ended(app: App, id: str) -> dict[str, Any]:
    return await over(app, f"{DOWNLOADS}/{id}")


async def begun(app: App, id: str, size: int = 10_000) -> None:
    async def is_there() -> bool:
        return bool((await shown(app, id))["bytes"] >= size)

    await until(is_there, f"{id} has begun")


async def test_ordered_watched_and_done(hub: StandinHub, tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        id = await ordered(app)
        done = await ended(app, id)
        assert (done["status"], done["progress"], done["error"]) == ("completed", 1.0, None)
        size = len(FILES["model.safetensors"]) + 2
        assert (done["bytes"], done["total_bytes"], done["files_downloaded"]) == (size, size, 2)
        assert done["files"][0] == {"path": "model.safetensors", "bytes": 400_000, "total_bytes": 400_000}
        assert done["duration_seconds"] > 0 and done["commit"] == hub.commit(REPO)
        assert done["destination"] == str(tmp_path / f"models/models--org--name/snapshots/{hub.commit(REPO)}")
        assert Path(done["destination"], "model.safetensors").read_bytes() == FILES["model.safetensors"]
        listed = (await http(app, "GET", DOWNLOADS)).json()["data"]
        assert listed == [done]
        assert (await http(app, "GET", f"{DOWNLOADS}?status=failed")).json()["data"] == []
        # It has ended, and stays so.
        assert (await http(app, "DELETE", f"{DOWNLOADS}/{id}")).json() == done


async def test_refusals(hub: StandinHub, tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        for body in (
            {},
            {"model": "../../etc"},
            {"model": REPO, "unknown": 1},
            {"model": REPO, "destination": "../out"},
            {"model": REPO, "destination": "/etc"},
            {"model": REPO, "include": ["x"] * 99},
            {"model": REPO, "include": "x"},
            {"url": "https://elsewhere.example/x.gguf"},
            {"url": "https://169.254.169.254/latest"},
        ):
            status, said = await post(app, body)
            assert (status, said["error"]["type"]) == (400, "invalid_request_error"), said
        missing = await http(app, "GET", f"{DOWNLOADS}/download-nothing")
        assert (missing.status, missing.error["message"]) == (404, "Download job not found: download-nothing")
        assert (await http(app, "DELETE", f"{DOWNLOADS}/job-1")).status == 404
        assert [path.name for path in tmp_path.iterdir() if path.name == "out"] == []


async def test_failures_have_a_code(hub: StandinHub, tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        failed = await ended(app, await ordered(app, quantization="Q4_0"))
        assert (failed["status"], failed["error"]["code"]) == ("failed", "no_such_quantization")
        failed = await ended(app, await ordered(app, model="org/other"))
        assert (failed["status"], failed["error"]["code"]) == ("failed", "repo_not_found")


async def test_destination_and_listed_hosts(hub: StandinHub, tmp_path: Path) -> None:
    hub.plain["/files/m.gguf"] = b"gguf" * 1000
    host = f"localhost:{hub.port}"
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path, hosts=[host])) as app:
        done = await ended(app, await ordered(app, url=f"http://{host}/files/m.gguf", destination="mine"))
        assert (done["status"], done["destination"]) == ("completed", str(tmp_path / "models/mine/m.gguf"))
        assert (done["bytes"], done["total_bytes"], done["files_downloaded"]) == (4000, 4000, 1)
        assert (tmp_path / "models/mine/m.gguf").read_bytes() == b"gguf" * 1000
        page = f"{hub.url}/{REPO}/resolve/main/config.json"
        done = await ended(app, await ordered(app, url=page, destination="plain"))
        assert done["destination"] == str(tmp_path / "models/plain/config.json")


@pytest.mark.slow
async def test_library_knows_where_a_model_in_a_plain_folder_came_from(hub: StandinHub, tmp_path: Path) -> None:
    data = tiny("a").read_bytes()
    hub.repos[REPO] = {"m-Q8_0.gguf": data}
    hub.plain["/files/other.gguf"] = data
    host = f"localhost:{hub.port}"
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path, hosts=[host])) as app:
        assert (await ended(app, await ordered(app, destination="mine")))["status"] == "completed"
        url = f"http://{host}/files/other.gguf"
        assert (await ended(app, await ordered(app, url=f"{url}?key=secret", destination="mine")))[
            "status"
        ] == "completed"
        told = {one["id"]: one for one in (await http(app, "GET", "/v1/models/inventory")).json()["data"]}
        ours, other = told["mine/m-Q8_0.gguf"], told["mine/other.gguf"]
        assert ours["source"] == {"hub_id": REPO, "commit": hub.commit(REPO), "url": None}
        assert ours["files"][0]["sha256"] == hashlib.sha256(data).hexdigest()
        assert other["source"] == {"hub_id": None, "commit": None, "url": url}


async def test_cancelled_and_ordered_again_it_goes_on(hub: StandinHub, tmp_path: Path) -> None:
    hub.faults.drip_s = 0.02
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        id = await ordered(app)
        await begun(app, id)
        cancelled = (await http(app, "DELETE", f"{DOWNLOADS}/{id}")).json()
        assert cancelled["status"] == "cancelled" and cancelled["bytes"] > 0
        assert not (tmp_path / "models/models--org--name/snapshots").exists()
        hub.faults.drip_s, sent = 0.0, hub.sent
        assert (await ended(app, await ordered(app)))["status"] == "completed"
        assert hub.sent - sent < len(FILES["model.safetensors"])


@pytest.mark.slow
async def test_only_so_many_run_at_once_and_what_waits_can_be_cancelled(hub: StandinHub, tmp_path: Path) -> None:
    hub.faults.drip_s = 0.02
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path, downloads_max=1)) as app:
        first = await ordered(app)
        second, third = await ordered(app, destination="b"), await ordered(app, destination="c")
        await begun(app, first)
        assert [(await shown(app, id))["status"] for id in (second, third)] == ["pending", "pending"]
        assert (await http(app, "DELETE", f"{DOWNLOADS}/{second}")).json()["status"] == "cancelled"
        hub.faults.drip_s = 0.0
        assert [(await ended(app, id))["status"] for id in (first, second, third)] == [
            "completed",
            "cancelled",
            "completed",
        ]


def fetchers(parent: int | None = None) -> list[int]:
    """Programs that fetch, below this process or another."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"fetching.main" in (path / "cmdline").read_bytes():
                stat = (path / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == (parent or os.getpid()) and stat[0] != "Z":
                    found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
async def test_a_killed_program_is_started_again(hub: StandinHub, tmp_path: Path) -> None:
    hub.faults.drip_s = 0.02
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        id = await ordered(app)
        await begun(app, id)
        [pid] = fetchers()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: [one for one in fetchers() if one != pid])
        hub.faults.drip_s = 0.0
        assert (await ended(app, id))["status"] == "completed"


async def test_a_program_that_is_always_lost_is_told(hub: StandinHub, tmp_path: Path) -> None:
    hub.faults.api_refuse, hub.faults.retry_after = 99, "60"
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        id = await ordered(app)
        killed: set[int] = set()
        while len(killed) < LOST_MAX:
            await until(lambda: set(fetchers()) - killed)
            [pid] = set(fetchers()) - killed
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        failed = await ended(app, id)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "fetcher_lost")


@pytest.mark.slow
async def test_a_restart_in_the_middle_goes_on(hub: StandinHub, tmp_path: Path) -> None:
    hub.faults.drip_s = 0.02
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        id = await ordered(app)
        await begun(app, id)
    assert fetchers() == []
    hub.faults.drip_s, sent = 0.0, hub.sent
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        assert (await ended(app, id))["status"] == "completed"
        assert hub.sent - sent < len(FILES["model.safetensors"])
    # What is known of it stays known.
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        kept = await shown(app, id)
        assert (kept["status"], kept["files_downloaded"]) == ("completed", 2)


@pytest.mark.slow
async def test_what_is_completed_is_found_by_its_id(hub: StandinHub, tmp_path: Path) -> None:
    hub.repos[REPO] = {"a-Q4_0.gguf": tiny("a").read_bytes(), "a-Q8_0.gguf": tiny("b").read_bytes()}
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        assert app.library.find(REPO) is None
        id = await ordered(app, model=f"{REPO}:Q4_0")
        assert (await ended(app, id))["status"] == "completed"
        found = app.library.find(REPO)
        assert found is not None and found.source.commit == hub.commit(REPO)
        assert [file.name for file in found.files] == ["a-Q4_0.gguf"]


@pytest.mark.slow
def test_a_killed_gateway_takes_its_programs_along_and_the_next_goes_on(hub: StandinHub, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(3_000_000)
    hub.repos[REPO], hub.faults.drip_s = {"model.safetensors": data}, 0.01
    sections, id = options(tmp_path), ""
    for _ in range(4):
        with gateway_process(tmp_path, {"m": fake("m")}, **sections) as gate:
            id = id or gate.call("POST", DOWNLOADS, {"model": REPO})[2]["job_id"]
            sent = hub.sent
            until_now(lambda sent=sent: hub.sent > sent + 50_000, "bytes come")
            [pid] = fetchers(gate.process.pid)
            gate.kill()
            until_now(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "the program is gone")
    hub.faults.drip_s = 0.0
    with gateway_process(tmp_path, {"m": fake("m")}, **sections) as gate:
        path = f"{DOWNLOADS}/{id}"
        until_now(lambda: gate.call("GET", path)[2]["status"] in OVER, "it is over")
        done = gate.call("GET", path)[2]
        assert done["status"] == "completed", done
        assert Path(done["destination"], "model.safetensors").read_bytes() == data
    # Each kill loses what was on its way, never what was here.
    assert hub.sent < 2 * len(data)


@pytest.mark.slow
async def test_progress_is_told_as_events(hub: StandinHub, tmp_path: Path) -> None:
    hub.faults.drip_s = 0.02
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        with app.hub.subscribe() as events:
            id = await ordered(app)
            seen = []
            async with asyncio.timeout(30):
                async for event in events:
                    if event.kind == "download":
                        seen.append((event.data["status"], event.data["progress"]))
                        hub.faults.drip_s = 0.0 if event.data["progress"] else 0.02
                        if event.data["status"] == "done":
                            break
        assert id and {status for status, _ in seen} == {"queued", "running", "done"}
        assert any(progress is not None and 0 < progress <= 1 for _, progress in seen)


@pytest.mark.slow
async def test_bandwidth_is_shared_and_a_reload_changes_it(hub: StandinHub, tmp_path: Path) -> None:
    hub.repos[REPO] = {"model.safetensors": random.Random(3).randbytes(3_000_000)}
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path, bandwidth_mib_s=0.1)) as app:
        id = await ordered(app)
        await begun(app, id, 20_000)
        await asyncio.sleep(0.5)
        seen = await shown(app, id)
        assert seen["status"] == "downloading" and seen["rate"] < 0.3 * 1024 * 1024
        config = tmp_path / "greenroom.yaml"
        config.write_text(config.read_text().replace("bandwidth_mib_s: 0.1", "bandwidth_mib_s: 100"))
        assert (await http(app, "POST", "/api/v1/reload")).status == 200
        # At the first rate it would take longer.
        async with asyncio.timeout(20):
            assert (await ended(app, id))["status"] == "completed"


async def test_the_token_goes_to_the_hub_alone(
    hub: StandinHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.token, hub.faults.drip_s = TOKEN, 0.01
    async with gateway(tmp_path, {"m": fake("m")}, **options(tmp_path)) as app:
        assert (await http(app, "POST", "/api/v1/models/m/load")).status == 200
        id = await ordered(app)
        await begun(app, id)
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes()
                environment = (path / "environ").read_bytes()
            except OSError:
                continue
            assert TOKEN.encode() not in command
            if b"fake_engine" in command:
                assert TOKEN.encode() not in environment
        done = await ended(app, id)
        assert done["status"] == "completed" and TOKEN not in json.dumps(done)
        assert {one.headers["authorization"] for one in hub.asked_for(".safetensors")} == {f"Bearer {TOKEN}"}
    for path in (tmp_path / "state").rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    said = capfd.readouterr()
    assert TOKEN not in said.out + said.err


@pytest.mark.slow
async def test_ollamas_client_pulls_and_deletes(hub: StandinHub, tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}, **options(tmp_path)) as app, ollama.AsyncClient(url(app)) as client:
        hub.repos["org/tiny"] = {"tiny.gguf": tiny("alpha").read_bytes()}
        told = [part async for part in await client.pull("hf.co/org/tiny", stream=True)]
        assert (told[0].status, told[-1].status) == ("pulling manifest", "success")
        assert (await client.pull("org/tiny")).status == "success"
        with pytest.raises(ollama.ResponseError) as caught:
            await client.pull("org/nothing")
        assert caught.value.status_code == 502
        with pytest.raises(ollama.ResponseError):
            [part async for part in await client.pull("org/nothing", stream=True)]
        await until(lambda: app.library.records, "it is found")
        [record] = app.library.records
        assert Path(record.path).exists() and tagged(record.id) in {one.model for one in (await client.list()).models}
        await client.delete(tagged(record.id))
        assert not Path(record.path).exists()
