"""From an empty folder to answers: `serve --models`, `pull`, then asked for by every name; no configuration at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.harness import PATIENCE_S, left_behind
from tests.later import Later
from tests.models import tiny as tiny_model
from tests.standins.standin_hub import StandinHub, standin_hub
from tests.waiting import until_now

openai = Later("openai")

PROGRAM = [sys.executable, "-m", "greenroom"]


class ZeroConfig:
    """`greenroom serve --models DIR` in an empty folder, beside a stand-in of the hub."""

    def __init__(self, folder: Path, hub: StandinHub, *more: str) -> None:
        self.folder, self.models, self.log = folder, folder / "models", folder / "gateway.log"
        self.models.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GREENROOM_"))}
        self.env = kept | {"HF_ENDPOINT": hub.url, "LOG_FORMAT": "json", "HOME": str(folder)}
        command = [*PROGRAM, "serve", "--models", "models", "--port", "0", "--state-dir", str(folder / "state"), *more]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env
            )
        until_now(lambda: self.url or self.process.poll() is not None, self.log.read_text)
        assert self.url, self.log.read_text()

    @property
    def url(self) -> str:
        for line in self.log.read_text().splitlines():
            if '"serving"' in line:
                return f"http://{json.loads(line)['address']}"
        return ""

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [*PROGRAM, *words],
            cwd=self.folder,
            env=self.env | {"GREENROOM_URL": self.url},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = Request(f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
        with urlopen(request, timeout=30) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def get(self, path: str) -> dict[str, Any]:
        with urlopen(f"{self.url}{path}", timeout=30) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)
        until_now(lambda: not left_behind(self.folder), "every engine is gone")


@pytest.fixture
def hub() -> Iterator[StandinHub]:
    with standin_hub() as hub:
        data = {name: tiny_model(name).read_bytes() for name in ("alpha", "beta")}
        hub.repos["org/pair-GGUF"] = {"pair-Q4_K_M.gguf": data["alpha"], "pair-Q8_0.gguf": data["beta"]}
        hub.repos["org/single"] = {"single-Q8_0.gguf": data["beta"]}
        yield hub


def said_by(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=8)
    assert answer.model == model
    return answer.choices[0].message.content or ""


@pytest.mark.slow
def test_an_empty_folder_a_pull_and_answers_by_every_name(tmp_path: Path, hub: StandinHub) -> None:
    gate = ZeroConfig(tmp_path, hub)
    try:
        assert gate.get("/v1/models")["data"] == []
        gate.run("pull", "org/pair-GGUF", "--quantization", "Q4_K_M")
        assert [one["id"] for one in gate.get("/v1/models")["data"]] == ["org/pair-GGUF"]
        assert "org/pair-GGUF" in gate.run("models")
        (path,) = gate.models.glob("models--org--pair-GGUF/snapshots/*/pair-Q4_K_M.gguf")
        with openai.OpenAI(base_url=f"{gate.url}/v1", api_key="none") as client:
            for name in ("org/pair-GGUF", "org/pair-GGUF:Q4_K_M", str(path), str(path.relative_to(gate.models))):
                assert "alpha says" in said_by(client, name), name
        assert "org/pair-GGUF" in gate.run("ps")
    finally:
        gate.stop()


@pytest.mark.slow
def test_a_load_fetches_what_is_not_there_and_is_polled_until_it_is_done(tmp_path: Path, hub: StandinHub) -> None:
    """As a client in a browser does it: a task, asked for again and again, sixty times at most."""
    (tmp_path / "greenroom.yaml").write_text("library: {download: true}\n")
    gate = ZeroConfig(tmp_path, hub)
    try:
        task = gate.post("/v1/models/load", {"modelId": "org/single"})["taskId"]
        for _ in range(60):
            said = gate.get(f"/v1/models/load/{task}")
            if said["status"] != "loading":
                break
            time.sleep(0.5)
        assert (said["status"], said["modelId"], said["error"]) == ("completed", "org/single", None)
        with openai.OpenAI(base_url=f"{gate.url}/v1", api_key="none") as client:
            assert "beta says" in said_by(client, "org/single")
        task = gate.post("/v1/models/load", {"modelId": "org/nothing"})["taskId"]
        until_now(lambda: gate.get(f"/v1/models/load/{task}")["status"] == "failed", gate.log.read_text)
        assert "could not be fetched" in gate.get(f"/v1/models/load/{task}")["error"]
    finally:
        gate.stop()


@pytest.mark.parametrize(("words", "said"), [((), "nothing to serve"), (("--models", "nowhere"), "there is no folder")])
def test_without_models_and_a_file_it_says_what_to_type(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GREENROOM_", "MODEL_"))}
    done = subprocess.run(
        [*PROGRAM, "serve", "--port", "0", *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and said in done.stderr and "--models" in done.stderr
