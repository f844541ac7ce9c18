"""A gateway does what pages print: their configurations serve, and their commands answer as they say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT, blocks, section
from tests.harness import FAKE_SERVER, gateway, served, tiny, url
from tests.integration.conftest import hub
from tests.integration.facts import view
from tests.integration.raw import chat
from tests.integration.versions.test_version_fetch import options
from tests.models import tiny as tiny_file
from tests.ports import free_port
from tests.standins.standin_hub import StandinHub
from tests.waiting import PATIENCE_S, until_now

__all__ = ["hub"]

GPUS = [{"memory_mib": 81_920, "margin_mib": 512}] * 2
# The first time, the demo's models are fetched and made ready.
DEMO_S = 170.0


def run(program: str, text: str) -> str:
    """What a block prints, typed in bash or given to Python."""
    argv = ["bash", "-euo", "pipefail", "-c", text] if program == "bash" else [sys.executable, "-c", text]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- the first conversation of the README -----------------------------------------------------------------------------


@contextlib.contextmanager
def demo(log: Path) -> Iterator[str]:
    """The address of a real one, on a port of its own."""
    port = free_port()
    with log.open("wb") as out:
        argv = [sys.executable, "-m", "greenroom", "demo", "--port", str(port)]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def is_healthy() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(OSError, HTTPException):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return True
        return False

    try:
        until_now(is_healthy, log.read_text, DEMO_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()[-2000:]


@pytest.mark.slow
def test_the_first_conversation_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = re.findall(r"```(\w+)\n(.*?)```", section("README.md", "A first conversation"), re.DOTALL)
    assert [language for language, _ in printed] == ["bash", "bash", "bash", "python", "bash"]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    with demo(tmp_path / "log") as address:
        monkeypatch.setenv("GREENROOM_URL", address)
        here = [(language, text.replace("http://127.0.0.1:8210", address)) for language, text in printed]
        said = [run(language, text.replace(".venv/bin/", "")) for language, text in here]
    talk, embedding = json.loads(said[0]), json.loads(said[1])
    assert talk["model"] == "smollm2" and len(talk["choices"][0]["message"]["content"]) > 20
    assert len(embedding["data"][0]["embedding"]) == 384
    tiers = {words[0]: words[1] for words in map(str.split, said[2].splitlines()) if len(words) > 1}
    assert (tiers["smollm2"], tiers["minilm"]) == ("cold", "ready")
    assert "2 vectors of 384 numbers" in said[3]
    assert said[4].strip()


# --- vLLM, with stand-ins for the programs that the page names --------------------------------------------------------


async def test_models_of_the_page_about_vllm_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: dict[str, dict[str, Any]] = {
        name: model
        for block in blocks("docs/vllm.md", "yaml")
        for name, model in yaml.safe_load(block)["models"].items()
    }
    assert {model.get("engine") for model in models.values()} == {"vllm", "sglang", None}
    launcher = tmp_path / "text-generation-launcher"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKE_SERVER} tgi "$@"\n')
    launcher.chmod(0o700)
    for name, model in models.items():
        if "engine" in model:
            made = served(model["engine"], tmp_path / name)
            model |= {key: made[key] for key in ("path", "env", "program")}
            del model["python"]
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    async with gateway(tmp_path, models, gpus=GPUS) as app:
        for name in models:
            answer = await chat(app, name)
            assert answer.status == 200 and answer.text.startswith("tgi" if name == "zephyr" else name), answer.body
        assert (await view(app, "coder"))["capabilities"] == ["chat", "completions"]
        assert (await view(app, "zephyr"))["memory"] in ({"gpu0": 32_000}, {"gpu1": 32_000})


# --- versions ---------------------------------------------------------------------------------------------------------


async def test_commands_of_the_page_about_versions_update_show_and_go_back(hub: StandinHub, tmp_path: Path) -> None:
    hub.repos["org/chat-7b"] = {"model.gguf": tiny_file("bravo").read_bytes()}
    hub.tags.add("step-1200")
    models = {"chat": tiny(tiny_file("alpha"), versions={"repo_id": "org/chat-7b"})}
    async with gateway(tmp_path, models, **options(tmp_path)) as app:
        updated, shown, asked, back = [
            await asyncio.to_thread(run, "bash", block.replace("http://127.0.0.1:8210", url(app)))
            for block in blocks("docs/versions.md", "bash")
            if block.startswith("curl ")
        ]
        done = json.loads(updated)
        assert (done["status"], done["model_version"], done["revision"]) == ("completed", 2, "step-1200")
        now, listed = (json.loads(one) for one in re.split(r"(?<=})(?={)", shown))
        assert (now["model_version"], now["commit"]) == (2, hub.commit("org/chat-7b"))
        assert [one["model_version"] for one in listed["data"]] == [2, 1]
        assert asked.split() == ["x-model-version:", "2", "x-model-repo-id:", "org/chat-7b"]
        assert json.loads(back)["model_version"] == 3
