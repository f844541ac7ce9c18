"""The example engine, installed as its page says: a package of its own that touches no file of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.harness import gateway_process, write_config

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "engine"
INSTALL_S = 100.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it and nothing else. A build leaves files behind, so it is made from a copy."""
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "engine")
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=INSTALL_S)
    return site


@pytest.mark.timeout(200)
def test_an_installed_engine_is_listed_and_serves(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    models = {
        "polly": {"engine": "parrot", "options": {"prefix": "Squawk! "}},
        "mute": {"engine": "parrot", "path": "x"},
    }
    file = write_config(tmp_path, models)
    rows = {row["engine"]: row for row in json.loads(greenroom("engines", "--json", "-c", str(file)))["engines"]}
    assert rows["parrot"]["installed"] and rows["parrot"]["versions"] == {"greenroom-parrot": "1.0"}
    assert rows["parrot"]["models"] == ["mute", "polly"]
    assert json.loads(greenroom("check", "--json", str(file)))["models"][1]["memory_mib"] == 20
    with gateway_process(tmp_path, models) as gate:
        said = ask(
            f"{gate.url}/v1/chat/completions", {"model": "polly", "messages": [{"role": "user", "content": "hi"}]}
        )
        assert said["choices"][0]["message"]["content"] == "Squawk! hi"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(f"{gate.url}/v1/embeddings", {"model": "polly", "input": "hi"})
        assert gate.stop() == 0


def greenroom(*words: str) -> str:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "greenroom", *words]
    return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=60)


def ask(url: str, body: object) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
