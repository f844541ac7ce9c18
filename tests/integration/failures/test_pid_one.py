"""A gateway that is process 1 of a container: processes that lose their parent become its children."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from greenroom.cli.address import parse
from greenroom.cli.client import Client
from greenroom.process import proc
from tests.harness import GatewayProcess, fake, write_config
from tests.waiting import until_now

pytestmark = pytest.mark.slow

# A new process namespace with its own /proc; all of it ends with the gateway, and the gateway with the test.
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def _can_contain() -> bool:
    if shutil.which(CONTAINER[0]) is None:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


def children(parent: int) -> list[int]:
    return [seen.pid for seen in filter(None, map(proc.stat, proc.pids())) if seen.parent == parent]


@pytest.mark.skipif(not _can_contain(), reason="a process namespace cannot be made here")
def test_what_a_killed_keeper_leaves_is_collected_by_a_gateway_that_is_process_1(tmp_path: Path) -> None:
    # The engine starts a process that outlives it, as engines with workers do.
    models = {"m": fake("m", "--fork-setsid", ttl_s=0)}
    gateway = GatewayProcess(tmp_path, write_config(tmp_path, models), inside=CONTAINER)
    try:
        (first,) = children(gateway.process.pid)
        client = Client(parse(gateway.url))
        client.post("/api/v1/models/m/load")
        (keeper,) = children(first)
        below = proc.below(keeper)
        assert below
        os.kill(keeper, signal.SIGKILL)
        until_now(lambda: not any(proc.stat(pid) for pid in (keeper, *below)), "all of them are ended and collected")
        # The gateway goes on: the next keeper's end is told to its waiter.
        client.post("/api/v1/models/m/load")
        client.post("/api/v1/models/m/unload")
        until_now(lambda: not children(first), "nothing is left")
    finally:
        gateway.process.send_signal(signal.SIGKILL)
        gateway.process.wait()
