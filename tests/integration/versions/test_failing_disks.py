"""Updates while a disk is full, read-only or does not answer: the old version serves, and a later update succeeds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness import GatewayProcess, gateway_process
from tests.integration.raw import CHAT
from tests.integration.versions.test_version_fetch import models
from tests.integration.versions.test_versions import says
from tests.library.hub_cache import add_snapshot
from tests.models import tiny
from tests.standins.standin_hub import StandinHub
from tests.waiting import until_now

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None or not os.path.exists("/dev/fuse"),
        reason="mounts need root, unshare and /dev/fuse",
    ),
]

# Fetching leaves 64 MiB of every disk free.
DISK_MIB: Final = 80
# The library looks at the disk every two seconds.
LOOKED_S: Final = 5.0
# Mounts a file system whose server has died: everything in the folder fails with ENOTCONN.
DEAD: Final = """
import ctypes, os, sys
server = os.open("/dev/fuse", os.O_RDWR)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % server
sys.exit(ctypes.CDLL(None).mount(b"dead", os.fsencode(sys.argv[1]), b"fuse", 0, options))
"""


class Disk:
    """A disk of its own below this folder, which only the gateway sees."""

    def __init__(self, gate: GatewayProcess, folder: Path) -> None:
        self._gate, self._folder = gate, folder

    def _do(self, *command: str) -> None:
        inside = ("nsenter", "--mount", "--target", str(self._gate.process.pid), *command)
        subprocess.run(inside, cwd="/", check=True)

    def fail(self, how: str) -> None:
        match how:
            case "full":
                fill = 'dd if=/dev/zero of="$0/.filler" bs=64k 2>&1 | grep -q "No space"'
                self._do("sh", "-c", fill, str(self._folder))
            case "read-only":
                # As after an error of the disk: what is open for writing stays so.
                self._do("mount", "--bind", str(self._folder), str(self._folder))
                self._do("mount", "-o", "remount,bind,ro", str(self._folder))
            case "dead":
                self._do(sys.executable, "-I", "-S", "-c", DEAD, str(self._folder))

    def heal(self, how: str) -> None:
        self._do(*(("rm", f"{self._folder}/.filler") if how == "full" else ("umount", "--lazy", str(self._folder))))


@contextmanager
def in_namespace(tmp_path: Path, mount: str, models: dict[str, Any]) -> Iterator[GatewayProcess]:
    """A gateway that has run this command in a namespace of its own for mounts."""
    inside = ("unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mount} && exec "$@"', "sh")
    with gateway_process(tmp_path, models, inside=inside, library={"roots": [str(tmp_path / "models")]}) as gate:
        yield gate


@contextmanager
def on_disk(tmp_path: Path, name: str) -> Iterator[tuple[GatewayProcess, Disk]]:
    """A gateway with a version, and this folder on a disk of its own."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    mount = f'mount -t tmpfs -o size={DISK_MIB}m none "{folder}"'
    with in_namespace(tmp_path, mount, models()) as gate:
        until_now(lambda: gate.call("GET", "/readyz")[0] == 200, "it has its first version")
        yield gate, Disk(gate, folder)


def update(gate: GatewayProcess, repo_id: str) -> tuple[int, Any]:
    status, _, answer = gate.call("POST", "/update-model?wait=true", {"model_repo_id": repo_id})
    return status, answer


def known(gate: GatewayProcess) -> list[str]:
    return [one["id"] for one in gate.call("GET", "/v1/models/inventory")[2]["data"]]


@pytest.mark.parametrize("fault", ["full", "read-only", "dead"])
@pytest.mark.parametrize("name", ["models", "state"])
def test_the_old_version_serves_until_the_disk_is_well(hub: StandinHub, tmp_path: Path, name: str, fault: str) -> None:
    is_state = name == "state"
    with on_disk(tmp_path, name) as (gate, disk):
        assert says(gate) == (1, "alpha")
        disk.fail(fault)
        status, answer = update(gate, "org/bravo")
        reason = {"full": "bytes free|No space left", "read-only": "Read-only file system", "dead": "not connected"}[
            fault
        ]
        assert status in (502, 507) and re.search(reason, answer["error"]["message"]), answer
        time.sleep(LOOKED_S)
        if not (is_state and fault == "dead"):
            # The way to its engine lies in the state directory.
            assert says(gate) == (1, "alpha")
        assert known(gate) == ["org/alpha"]
        disk.heal(fault)
        status, answer = update(gate, "org/charlie")
        assert (status, answer.get("model_version")) == (200, 2), answer
        assert says(gate) == (2, "charlie")
        assert set(known(gate)) >= {"org/alpha", "org/charlie"}
        assert sum("could not be looked at" in line for line in gate.lines()) == (fault == "dead" and not is_state)


def test_a_model_is_loaded_again_when_its_disk_is_back(hub: StandinHub, tmp_path: Path) -> None:
    with on_disk(tmp_path, "models") as (gate, disk):
        assert says(gate) == (1, "alpha")
        assert gate.call("POST", "/api/v1/models/m/unload", {})[0] == 200
        disk.fail("dead")
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        status, _, answer = gate.call("POST", CHAT, body)
        assert (status, answer["error"]["code"]) == (503, "model_load_failed"), answer
        assert "Transport endpoint is not connected" in answer["error"]["message"]
        disk.heal("dead")

        def serves() -> bool:
            return gate.call("POST", CHAT, body)[0] == 200

        # A load that failed is not tried again at once.
        until_now(serves, "it is loaded again")


def test_nothing_is_deleted_while_it_cannot_be_told_what_other_models_need(tmp_path: Path) -> None:
    cache = tmp_path / "models"
    other = add_snapshot(cache, "org/name", "c1", {"m.gguf": tiny("alpha")}, refs=("old",))
    add_snapshot(cache, "org/name", "c2", {"m.gguf": tiny("alpha")})
    with in_namespace(tmp_path, "true", {}) as gate:
        until_now(lambda: len(known(gate)) == 2, "both are found")
        disk = Disk(gate, other)
        disk.fail("dead")
        status, _, answer = gate.call("DELETE", "/v1/models/inventory/org%2Fname")
        assert (status, answer["error"]["code"]) == (500, "removal_failed"), answer
        assert (other / "m.gguf").exists()
        disk.heal("dead")
        assert gate.call("DELETE", "/v1/models/inventory/org%2Fname")[0] == 200
        assert (other / "m.gguf").exists() and known(gate) == ["org/name"]
