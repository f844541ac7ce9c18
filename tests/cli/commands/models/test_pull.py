"""`greenroom pull`, by a gateway and without one, against a hub on loopback."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.main import main
from greenroom.features.library import cli_pull as pull
from greenroom.library.download_locks import DownloadLocks
from greenroom.library.roots import Roots
from tests.cli.command import Cli, in_terminal
from tests.cli.fake_gateway import FakeGateway, answer, error
from tests.standins.standin_hub import StandinHub, standin_hub
from tests.waiting import until_now

REPO = "org/name"
MODEL = random.Random(1).randbytes(300_000)
ID = "download-" + "5c" * 16


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandinHub]:
    with standin_hub() as hub:
        hub.repos[REPO] = {"model-Q4_0.gguf": MODEL, "model-Q8_0.gguf": MODEL * 2, "config.json": b"{}"}
        for name in [*os.environ]:
            if name.startswith(("HF_", "MODEL_BASE", "TRANSFORMERS_CACHE", "GREENROOM_")):
                monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        # No gateway is found by chance.
        monkeypatch.setattr("greenroom.cli.address.DEFAULT_URL", "http://127.0.0.1:9")
        yield hub


def test_without_a_gateway_it_fetches_into_the_hubs_cache(hub: StandinHub, tmp_path: Path, cli: Cli) -> None:
    said = cli("pull", REPO, "--quantization", "q4_0")
    snapshot = tmp_path / "hf/hub/models--org--name/snapshots" / hub.commit(REPO)
    assert said.out == f"{snapshot}\n"
    assert (snapshot / "model-Q4_0.gguf").read_bytes() == MODEL
    assert [path.name for path in snapshot.iterdir()] == ["model-Q4_0.gguf"]
    assert "fetching org/name: 1 file, 300 kB" in said.err
    assert "model-Q4_0.gguf: 300 kB" in said.err


def test_what_is_pulled_is_no_longer_deleted_by_updates_that_fetched_it(hub: StandinHub, tmp_path: Path) -> None:
    assert main(["pull", REPO, "--quantization", "q4_0"]) == 0
    root = tmp_path / "hf" / "hub"
    path = str(root / "models--org--name/snapshots" / hub.commit(REPO) / "model-Q4_0.gguf")
    marks = DownloadLocks(lambda: Roots([str(root)]))
    marks.mark(path)
    assert marks.use(path)
    assert main(["pull", REPO, "--quantization", "q4_0"]) == 0
    assert marks.take(path) is None


def test_without_a_gateway_it_fetches_to_where_the_configuration_here_would_find_it(
    hub: StandinHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "greenroom.yaml").write_text("model_roots: [models]\n")
    (tmp_path / "models").mkdir()
    assert cli("pull", REPO, "--quantization", "q4_0").out.startswith(f"{tmp_path}/models/models--org--name/snapshots/")


def test_to_a_folder_as_json(hub: StandinHub, tmp_path: Path, cli: Cli) -> None:
    page = f"{hub.url}/{REPO}/blob/main/config.json"
    said = cli("pull", page, "--to", tmp_path / "new", "--json").json
    assert (said["status"], said["files_downloaded"], said["bytes"]) == ("completed", 1, 2)
    assert said["destination"] == str(tmp_path / "new/config.json")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["../../etc"], 1, "is no model of the hub"),
        (["org/other"], 1, "has no org/other"),
        ([REPO, "--quantization", "Q5"], 1, "model-Q4_0.gguf, model-Q8_0.gguf"),
        ([REPO, "--url", "http://127.0.0.1:9"], 3, "no gateway answers"),
    ],
)
def test_failures_are_one_line(hub: StandinHub, cli: Cli, words: list[str], status: int, said: str) -> None:
    assert said in cli("pull", *words, status=status).err


# --- by a gateway -----------------------------------------------------------------------------------------------------


def view(**more: Any) -> dict[str, Any]:
    return {
        "job_id": ID,
        "status": "completed",
        "model": REPO,
        "progress": 1.0,
        "bytes": 10,
        "total_bytes": 10,
        "rate": None,
        "eta": None,
        "waiting": False,
        "destination": "/models/x",
        "files": [{"path": "a", "bytes": 10, "total_bytes": 10}],
        "files_downloaded": 1,
        "files_total": 1,
        "error": None,
        **more,
    }


def test_a_gateway_that_runs_fetches(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("POST", pull.DOWNLOADS, answer({"job_id": ID, "status": "pending"}, 202))
    gateway.on("GET", f"{pull.DOWNLOADS}/{ID}", answer(view()))
    assert (
        cli("pull", REPO, "--revision", "v1", "--include", "a", "--include", "b", "--to", "mine").out == "/models/x\n"
    )
    assert gateway.asked[0].json == {"model": REPO, "revision": "v1", "include": ["a", "b"], "destination": "mine"}


def test_a_gateways_refusal_and_failure_are_told(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("POST", pull.DOWNLOADS, error(403, "not_allowed", "Not for this key."))
    assert "Not for this key." in cli("pull", REPO, status=1).err
    gateway.on("POST", pull.DOWNLOADS, answer({"job_id": ID, "status": "pending"}, 202))
    failed = view(status="failed", error={"code": "gated", "message": "Ask its owner."})
    gateway.on("GET", f"{pull.DOWNLOADS}/{ID}", answer(failed))
    assert "Ask its owner." in cli("pull", REPO, status=1).err


# --- a terminal, and an interrupt -------------------------------------------------------------------------------------


# No gateway is found by chance.
WITHOUT_GATEWAY = (
    "-c",
    "import sys; from greenroom.cli import address; address.DEFAULT_URL = 'http://127.0.0.1:9'; "
    "from greenroom.cli.main import main; sys.exit(main())",
)


@pytest.mark.slow
def test_an_interrupt_leaves_what_the_same_command_goes_on_with(hub: StandinHub, tmp_path: Path) -> None:
    hub.faults.drip_s = 0.02
    command = [sys.executable, *WITHOUT_GATEWAY, "pull", REPO]
    pulling = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until_now(lambda: hub.sent > 50_000)
    pulling.send_signal(signal.SIGINT)
    out, said = pulling.communicate(timeout=30)
    assert (pulling.returncode, out) == (130, b"")
    assert pull.STOPPED.encode() in said and b"Traceback" not in said
    blobs = tmp_path / "hf/hub/models--org--name/blobs"
    have = sum(path.stat().st_size for path in blobs.glob("*.part"))
    assert have > 0
    hub.faults.drip_s, sent = 0.0, hub.sent
    assert main(["pull", REPO]) == 0
    assert hub.sent - sent <= len(MODEL) * 3 + 2 - have


@pytest.mark.slow
def test_bars_at_a_terminal(hub: StandinHub) -> None:
    hub.faults.drip_s = 0.01
    shown = in_terminal(["pull", REPO], program=WITHOUT_GATEWAY)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "org/name" in text and "model-Q8_0.gguf" in text and "━" in text and "kB" in text


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (None, "size not known"),
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (42_000_000_000, "42 GB"),
        (9_990, "10 kB"),
    ],
)
def test_sizes_are_short(count: int | None, said: str) -> None:
    assert pull.size(count) == said


@pytest.mark.parametrize("name", ["org/name:", "org/name@", "org/name:@", ":Q4"])
def test_a_name_that_is_none_is_said_as_it_was_typed(hub: StandinHub, name: str, cli: Cli) -> None:
    assert f"greenroom: {name} is no model of the hub: one is org/name" in cli("pull", name, status=1).err


def test_a_name_with_a_space_is_quoted(hub: StandinHub, cli: Cli) -> None:
    assert "greenroom: 'org/na me' is no model of the hub: one is org/name" in cli("pull", "org/na me", status=1).err


def test_a_hub_that_cannot_be_reached_is_named_with_the_variable(
    hub: StandinHub, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    assert "HF_ENDPOINT is 'nonsense', which is no address" in cli("pull", REPO, status=1).err


def test_a_hub_that_does_not_answer_is_said_soon(hub: StandinHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    command = [sys.executable, "-m", "greenroom", "pull", REPO]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline() + process.stderr.readline()
        assert "127.0.0.1" in said and "HF_ENDPOINT is http://127.0.0.1:9" in said
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_cache_that_cannot_be_written_names_the_variable_and_the_path(
    hub: StandinHub, variable: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv(variable, "/dev/null")
    said = cli("pull", REPO, status=1).err
    assert "/dev/null" in said and f"{variable} says so" in said
