"""The commands of docs/versions.md do what it says."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from tests.cli.test_guides import blocks
from tests.harness import gateway, tiny, url
from tests.integration.versions.test_version_fetch import hub, options
from tests.models import tiny as tiny_file
from tests.standins.standin_hub import StandinHub
from tests.waiting import PATIENCE_S

__all__ = ["hub"]


async def run(command: str) -> str:
    argv = ("bash", "-euo", "pipefail", "-c", command)
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, command
    return out.decode()


async def test_the_commands_of_the_guide_update_show_and_go_back(hub: StandinHub, tmp_path: Path) -> None:
    hub.repos["org/chat-7b"] = {"model.gguf": tiny_file("bravo").read_bytes()}
    hub.tags.add("step-1200")
    models = {"chat": tiny(tiny_file("alpha"), versions={"repo_id": "org/chat-7b"})}
    async with gateway(tmp_path, models, **options(tmp_path)) as app:
        commands = [
            block.replace("http://127.0.0.1:8210", url(app))
            for block in blocks("docs/versions.md", "bash")
            if block.startswith("curl ")
        ]
        updated, shown, asked, back = [await run(command) for command in commands]
        done = json.loads(updated)
        assert (done["status"], done["model_version"], done["revision"]) == ("completed", 2, "step-1200")
        now, listed = (json.loads(one) for one in re.split(r"(?<=})(?={)", shown))
        assert (now["model_version"], now["commit"]) == (2, hub.commit("org/chat-7b"))
        assert [one["model_version"] for one in listed["data"]] == [2, 1]
        assert asked.split() == ["x-model-version:", "2", "x-model-repo-id:", "org/chat-7b"]
        assert json.loads(back)["model_version"] == 3
