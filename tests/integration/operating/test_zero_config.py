"""From an empty folder to answers: `serve --models`, `pull`, then asked for by every name; no configuration at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import PATIENCE_S, GatewayProcess
from tests.later import Later
from tests.models import tiny as tiny_model
from tests.standins.standin_hub import StandinHub
from tests.waiting import until_now

openai = Later("openai")


@pytest.fixture
def home(tmp_path: Path, hub: StandinHub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which programs run that find a stand-in of the hub."""
    data = {name: tiny_model(name).read_bytes() for name in ("alpha", "beta")}
    hub.repos["org/pair-GGUF"] = {"pair-Q4_K_M.gguf": data["alpha"], "pair-Q8_0.gguf": data["beta"]}
    hub.repos["org/single"] = {"single-Q8_0.gguf": data["beta"]}
    for name in [name for name in os.environ if name.startswith("GREENROOM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def serving(home: Path) -> Iterator[GatewayProcess]:
    """`greenroom serve --models DIR`."""
    gate = GatewayProcess(home, None, words=("--models", "models"))
    try:
        yield gate
    finally:
        gate.stop()
        assert gate.nothing_left()


def run(gate: GatewayProcess, *words: str) -> str:
    command = [sys.executable, "-m", "greenroom", *words, "--url", gate.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def said_by(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=8)
    assert answer.model == model
    return answer.choices[0].message.content or ""


@pytest.mark.slow
def test_an_empty_folder_a_pull_and_answers_by_every_name(home: Path) -> None:
    with serving(home) as gate, openai.OpenAI(base_url=f"{gate.url}/v1", api_key="none") as client:
        assert gate.call("GET", "/v1/models")[2]["data"] == []
        run(gate, "pull", "org/pair-GGUF", "--quantization", "Q4_K_M")
        assert [one["id"] for one in gate.call("GET", "/v1/models")[2]["data"]] == ["org/pair-GGUF"]
        assert "org/pair-GGUF" in run(gate, "models")
        (path,) = home.glob("models/models--org--pair-GGUF/snapshots/*/pair-Q4_K_M.gguf")
        for name in ("org/pair-GGUF", "org/pair-GGUF:Q4_K_M", str(path), str(path.relative_to(home / "models"))):
            assert "alpha says" in said_by(client, name), name
        assert "org/pair-GGUF" in run(gate, "ps")


@pytest.mark.slow
def test_a_load_fetches_what_is_not_there_and_is_polled_until_it_is_done(home: Path) -> None:
    """As a client in a browser does it: a task, asked for again and again, sixty times at most."""
    (home / "greenroom.yaml").write_text("library: {download: true}\n")
    with serving(home) as gate, openai.OpenAI(base_url=f"{gate.url}/v1", api_key="none") as client:
        task = gate.call("POST", "/v1/models/load", {"modelId": "org/single"})[2]["taskId"]
        for _ in range(60):
            said = gate.call("GET", f"/v1/models/load/{task}")[2]
            if said["status"] != "loading":
                break
            time.sleep(0.5)
        assert (said["status"], said["modelId"], said["error"]) == ("completed", "org/single", None)
        assert "beta says" in said_by(client, "org/single")
        task = gate.call("POST", "/v1/models/load", {"modelId": "org/nothing"})[2]["taskId"]
        until_now(lambda: gate.call("GET", f"/v1/models/load/{task}")[2]["status"] == "failed", gate.log.read_text)
        assert "could not be fetched" in gate.call("GET", f"/v1/models/load/{task}")[2]["error"]


@pytest.mark.parametrize(("words", "said"), [((), "nothing to serve"), (("--models", "nowhere"), "there is no folder")])
def test_without_models_and_a_file_it_says_what_to_type(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GREENROOM_", "MODEL_"))}
    command = [sys.executable, "-m", "greenroom", "serve", "--port", "0", *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and said in done.stderr and "--models" in done.stderr
