"""Every command that changes models, against a gateway where operations are signed: refused, then with --token."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.core.model import ModelId
from greenroom.features.governance.tokens import as_text
from tests.features.governance.token_rig import PUBLIC, signed_token
from tests.harness import fake, gateway, url
from tests.integration.governance.test_governance import KEYS, audited, now, with_key
from tests.models import tiny
from tests.standins.standin_hub import StandinHub

REPO = "org/name"
SECONDS_MAX = 120.0


@pytest_asyncio.fixture
async def app(tmp_path: Path, hub: StandinHub) -> AsyncIterator[App]:
    hub.repos[REPO] = {"model.safetensors": b"x" * 1_000, "config.json": b"{}"}
    shutil.copy(tiny("alpha"), tmp_path / "models" / "old.gguf")
    options = {"model_roots": [str(tmp_path / "models")], "library": {"download": True}, "server": {"api_keys": KEYS}}
    # Every signer binds the body: a command must send what was signed.
    async with gateway(tmp_path, {"m": fake("m")}, governance=with_key(tmp_path, signers=PUBLIC), **options) as app:
        await app.library.looked()
        yield app


async def command(app: App, *words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "greenroom", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"GREENROOM_URL": url(app), "GREENROOM_API_KEY": "ops-key"},
    )
    async with asyncio.timeout(SECONDS_MAX):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


# What `lease` sends unless it is told otherwise.
LEASE = {"devices": [], "gpus": 1, "grace_s": 30, "preemptible": False, "priority": 1, "ttl_s": 30}
COMMANDS: list[tuple[list[str], str, str | None, dict[str, Any]]] = [
    (["load", "m"], "model-load", "m", {}),
    (["flush", "m", "--tenant", "lab"], "cache-flush", "m", {"scope": "tenant", "modelId": "m", "tenantId": "lab"}),
    (["flush"], "cache-flush", None, {"scope": "all"}),
    (["unload", "m", "--grace-s", "5"], "model-unload", "m", {"grace_s": 5}),
    (["rm", "old.gguf", "--yes"], "model-delete", "old.gguf", {}),
    (["pull", REPO], "model-download", REPO, {"model": REPO}),
    (["reload"], "config-reload", None, {}),
    (
        ["lease", "--mib", "8", "--name", "train", "--wait", "5", "--", sys.executable, "-c", "print('held')"],
        "model-unload",
        None,
        {"mib": 8, "name": "train", "wait_s": 5, **LEASE},
    ),
]


@pytest.mark.slow
async def test_every_command_needs_its_token_and_sends_it(app: App, tmp_path: Path) -> None:
    file = tmp_path / "token"
    for words, operation, model, body in COMMANDS:
        status, _, err = await command(app, *words)
        assert status != 0 and "token" in err, (words, err)
        token = signed_token("alice", body=body, operation=operation, modelId=model, issuedAt=now())
        file.write_text(as_text(token) + "\n")
        at = words.index("--") if "--" in words else len(words)
        status, out, err = await command(app, *words[:at], "--token", str(file), *words[at:])
        permitted = [line for line in audited(tmp_path) if line["event"] == "permitted"]
        assert permitted and permitted[-1]["operation"] == operation, (words, err)
        # What a stand-in engine has not, it cannot flush: that is the answer of the gateway, not of the gate.
        assert status == 0 or (words[0] == "flush" and "no way to flush" in err), (words, out, err)
    assert not (tmp_path / "models" / "old.gguf").exists()
    assert list((tmp_path / "models").rglob("model.safetensors")) and "held" in out
    assert not app.loop.scheduler.state.slots_of(ModelId("m"))


async def test_moves_that_an_engine_cannot_make_are_told_behind_the_gate(app: App, tmp_path: Path) -> None:
    for order, operation in (("prepare", "model-load"), ("sleep", "model-unload")):
        token = signed_token("alice", operation=operation, modelId="m", issuedAt=now())
        (tmp_path / "token").write_text(as_text(token))
        status, _, err = await command(app, order, "m", "--token", str(tmp_path / "token"))
        assert status == 1 and "token" not in err, err


async def test_a_token_comes_by_standard_input_too(app: App, tmp_path: Path) -> None:
    token = signed_token("alice", operation="config-reload", modelId=None, issuedAt=now())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "greenroom", "reload", "--token", "-", "--json"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"GREENROOM_URL": url(app), "GREENROOM_API_KEY": "ops-key"},
    )
    async with asyncio.timeout(SECONDS_MAX):
        out, _ = await process.communicate(as_text(token).encode())
    assert process.returncode == 0 and isinstance(json.loads(out), dict)
