"""The README's first conversation works as printed: its blocks run against a real demo, on another port."""

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

import pytest

from tests.ports import free_port
from tests.waiting import until_now

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# The first time, the demo's models are fetched and made ready.
DEMO_S = 170.0
BLOCK_S = 120.0


def conversation() -> list[tuple[str, str]]:
    """The fenced blocks under the heading, each with its language."""
    text = (ROOT / "README.md").read_text()
    section = text.split("## A first conversation\n")[1].split("\n## ")[0]
    return re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port, log = free_port(), tmp_path_factory.mktemp("demo") / "log"
    with log.open("wb") as out:
        argv = [sys.executable, "-m", "greenroom", "demo", "--port", str(port)]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        until_healthy(port, process, log)
        yield port
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()[-2000:]


def until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    def is_healthy() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        with (
            contextlib.suppress(OSError, HTTPException),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5),
        ):
            return True
        return False

    until_now(is_healthy, log.read_text, DEMO_S)


def run(language: str, block: str, port: int) -> str:
    block = block.replace("127.0.0.1:8210", f"127.0.0.1:{port}").replace(
        ".venv/bin/", f"{Path(sys.executable).parent}/"
    )
    argv = ["bash", "-euo", "pipefail", "-c", block] if language == "bash" else [sys.executable, "-c", block]
    env = os.environ | {"GREENROOM_URL": f"http://127.0.0.1:{port}"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=BLOCK_S)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(400)
def test_first_conversation_works_as_printed(demo: int) -> None:
    blocks = conversation()
    assert [language for language, _ in blocks] == ["bash", "bash", "bash", "python", "bash"]
    said = [run(language, block, demo) for language, block in blocks]
    chat, embedding = json.loads(said[0]), json.loads(said[1])
    assert chat["model"] == "smollm2" and len(chat["choices"][0]["message"]["content"]) > 20
    assert len(embedding["data"][0]["embedding"]) == 384
    tiers = {words[0]: words[1] for words in (line.split() for line in said[2].splitlines()) if len(words) > 1}
    assert (tiers["smollm2"], tiers["minilm"]) == ("cold", "ready")
    assert "2 vectors of 384 numbers" in said[3]
    assert said[4].strip()
