"""How far a load is that was never seen before: by what the engine's processes have read of the model's file."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from tests.harness import FAKE_ENGINE, gateway, tiny
from tests.integration.raw import http
from tests.models import tiny as tiny_model
from tests.waiting import until

MIB = 1024 * 1024
FILE_MIB = 400

# Takes as many MiB of its model as the file `upto` beside it says, by reading or by mapping, then serves.
SLOW_READER = """
import mmap, os, pathlib, sys, time

path = sys.argv[sys.argv.index("--model") + 1]
upto, is_mapped, taken = pathlib.Path(path).with_name("upto"), sys.argv[1] == "mmap", 0

def wait_for_the_end_of(name):
    while upto.with_name(name).exists():
        time.sleep(0.01)

with open(path, "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    while taken < int(upto.read_text()):
        if is_mapped:
            for at in range(taken << 20, taken + 1 << 20, mmap.PAGESIZE):
                pages[at]
        else:
            file.read(1 << 20)
        taken += 1
        while taken == int(upto.read_text()) < FILE_MIB:
            time.sleep(0.01)
    wait_for_the_end_of("mapped")
    # As loaders do that copy to a GPU.
    pages.close()
wait_for_the_end_of("starting")
socket = sys.argv[sys.argv.index("--host") + 1]
os.execv(sys.executable, [sys.executable, "-I", "-S", FAKE_ENGINE, "--name", "alpha", "--uds", socket])
"""


def slow_reader(folder: Path, way: str) -> dict[str, Any]:
    (folder / "m.gguf").write_bytes(tiny_model("alpha").read_bytes())
    with (folder / "m.gguf").open("r+b") as file:
        file.truncate(FILE_MIB * MIB)
    script = folder / "reader.py"
    script.write_text(SLOW_READER.replace("FILE_MIB", str(FILE_MIB)).replace("FAKE_ENGINE", repr(str(FAKE_ENGINE))))
    program = folder / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {script} {way} "$@"\n')
    program.chmod(0o755)
    return tiny(folder / "m.gguf", program=str(program), load_timeout_s=300)


def let_it_take(upto: Path, mib: int) -> None:
    upto.with_suffix(".new").write_text(str(mib))
    upto.with_suffix(".new").rename(upto)


async def told(app: App, task: str) -> dict[str, Any]:
    answer = await http(app, "GET", f"/v1/models/load/{task}")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("way", ["read", "mmap"])
async def test_a_first_load_tells_how_far_it_is_by_what_was_read(tmp_path: Path, way: str) -> None:
    upto, mapped, starting = (tmp_path / name for name in ("upto", "mapped", "starting"))
    let_it_take(upto, FILE_MIB // 4)
    mapped.touch()
    starting.touch()
    async with gateway(tmp_path, {"alpha": slow_reader(tmp_path, way)}) as app:
        taken = (await http(app, "POST", "/v1/models/load", {"modelId": "alpha"})).json()
        seen: list[float] = []

        async def is_at(least: float) -> bool:
            status = await told(app, taken["taskId"])
            assert status["status"] == "loading", status
            seen.append(status["progress"])
            return seen[-1] >= least

        await until(lambda: is_at(0.24))
        quarter = await told(app, taken["taskId"])
        assert 0.24 <= quarter["progress"] <= 0.32 and not quarter["estimated"]
        assert quarter["eta"] > 0
        shown = (await http(app, "GET", "/v1/capabilities")).json()["models"]["loading"]
        assert [(one["id"], one["eta"] is None) for one in shown] == [("alpha", False)]

        let_it_take(upto, FILE_MIB * 3 // 4)
        await until(lambda: is_at(0.74))
        assert seen[-1] < 0.85
        let_it_take(upto, FILE_MIB)
        await until(lambda: is_at(0.98))
        mapped.unlink()
        # It lets go of the file: what was told stays, and is never all.
        for _ in range(30):
            await asyncio.sleep(0.01)
            assert await is_at(0.98)
        assert seen == sorted(seen) and seen[-1] <= 0.99

        starting.unlink()

        async def is_done() -> bool:
            return (await told(app, taken["taskId"]))["status"] == "completed"

        await until(is_done)
        assert (await told(app, taken["taskId"]))["progress"] == 1.0
