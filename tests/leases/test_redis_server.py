"""The Redis of tests leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

from tests.redis_server import redis_server

DAY_S = 24 * 3_600


def test_a_server_with_a_clock_of_its_own_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    pids = []
    with redis_server(tmp_path / "redis", has_own_clock=True) as server:
        pids.append(server.pid)
        server.restart_empty()
        pids.append(server.pid)
        server.set_clock(DAY_S)
        server.say("SET", "key", "value", "EX", "100")
        ends_at = int(server.say("EXPIRETIME", "key").removeprefix(":"))
        assert ends_at > time.time() + DAY_S, "its clock goes as it was told to"
    left = [path.name for path in Path("/dev/shm").iterdir() if path.name.rpartition("_")[2] in map(str, pids)]
    assert left == []
