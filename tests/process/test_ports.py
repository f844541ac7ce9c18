"""proc.py: ports"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from greenroom import errors
from greenroom.process import proc
from greenroom.process.proc import PortRange, is_ours, listener_pids

from .conftest import Start
from .trees import engine_argv, pids_of


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def free_run(length: int) -> int:
    """The first of some neighbouring ports that are free, below those the kernel hands out by itself."""
    # From a random place, as another run of these tests may be looking at the same moment.
    for _ in range(1000):
        first = random.randrange(11000, 20000)
        if all(proc.can_bind(first + offset) for offset in range(length)):
            return first
    raise AssertionError("no free ports")


def test_ports_are_given_in_turn() -> None:
    first = free_run(3)
    ports_of_range = PortRange(first, first + 2)
    assert [ports_of_range.pick(set()) for _ in range(4)] == [first, first + 1, first + 2, first]


def test_ports_to_avoid_are_not_given() -> None:
    first = free_run(3)
    assert PortRange(first, first + 2).pick({first, first + 1}) == first + 2


def test_port_that_is_listened_on_is_not_given(taken: int) -> None:
    with pytest.raises(errors.LoadFailed, match=f"{taken}-{taken}"):
        PortRange(taken, taken).pick(set())


def test_port_can_be_given_again_after_its_connections_closed() -> None:
    port = free_run(1)
    with socket.create_server(("127.0.0.1", port)) as listener, socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = listener.accept()
        # The side that closes first keeps the port in TIME_WAIT.
        accepted.close()
        assert client.recv(1) == b""
    assert PortRange(port, port).pick(set()) == port


@pytest.mark.parametrize(("first", "last"), [(0, 5), (9, 8), (1, 65536)])
def test_impossible_range_is_refused(first: int, last: int) -> None:
    with pytest.raises(errors.ConfigError):
        PortRange(first, last)


def test_listener_is_found_by_its_port(taken: int) -> None:
    assert listener_pids(taken) == frozenset({os.getpid()})
    assert listener_pids(free_run(1)) == frozenset()


async def test_engine_that_listens_is_ours(start: Start) -> None:
    port = free_run(1)
    child = await start("listen", str(port))
    await pids_of(child, 1)
    assert is_ours(port, child.tree()) and not is_ours(free_run(1), child.tree())
    assert listener_pids(port) == frozenset({child.pid})
    await child.stop(term_s=20)
    assert not is_ours(port, frozenset({child.pid}))


async def test_stranger_that_took_the_port_is_not_ours(start: Start) -> None:
    port = free_run(1)
    with subprocess.Popen(engine_argv("listen", str(port)), stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"listening\n"
        child = await start("plain")
        assert listener_pids(port) == frozenset({stranger.pid})
        assert not is_ours(port, child.tree())
        stranger.kill()
    await child.stop(term_s=20)


# --- what cannot be arranged on every machine, from a /proc made of files --------------------------------------------

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(address: bytes, port: int, inode: int, state: str = "0A") -> str:
    words = (address[at : at + 4] for at in range(0, len(address), 4))
    local = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words).hex().upper()
    return f"   0: {local}:{port:04X} 0:0 {state} 0:0 00:0 0 1000 0 {inode} 1 x 100 0 0 10 0\n"


def ipv4(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET, address)


def ipv6(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, address)


@dataclass(frozen=True)
class Sockets:
    """A /proc of which only sockets and their owners are of interest: inodes of each process, None if it hides them."""

    tcp: str = ""
    tcp6: str = ""
    processes: Mapping[int, tuple[int, ...] | None] = field(default_factory=lambda: {5: (77,)})

    def write(self, path: Path) -> None:
        (path / "net").mkdir()
        (path / "net/tcp").write_text(HEADER + self.tcp)
        (path / "net/tcp6").write_text(HEADER + self.tcp6)
        for pid, inodes in self.processes.items():
            (path / str(pid)).mkdir()
            (path / str(pid) / "stat").write_text(f"{pid} (x) S 1 {'0 ' * 30}")
            if inodes is not None:
                (path / str(pid) / "fd").mkdir()
                for fd, inode in enumerate(inodes):
                    (path / str(pid) / "fd" / str(fd)).symlink_to(f"socket:[{inode}]")


LOOPBACK, ANY = line(ipv4("127.0.0.1"), 8080, 77), line(ipv4("0.0.0.0"), 8080, 77)


@pytest.mark.parametrize(
    ("sockets", "listeners", "ours"),
    [
        # Nothing there answers at 127.0.0.1.
        pytest.param(Sockets(tcp6=line(ipv6("::1"), 8080, 77), processes={5: (76, 77)}), {5}, set(), id="IPv6 only"),
        pytest.param(Sockets(tcp6=line(ipv6("::"), 8080, 77)), {5}, {5}, id="a wildcard on IPv6 answers at loopback"),
        pytest.param(
            Sockets(line(ipv4("127.0.0.1"), 8080, 66), line(ipv6("::"), 8080, 77), {5: (77,), 6: (66,)}),
            {5, 6},
            {6},
            id="a stranger on IPv4 wins over our wildcard on IPv6",
        ),
        pytest.param(Sockets(ANY + line(ipv4("192.0.2.1"), 8080, 66)), None, {5}, id="a stranger on another address"),
        pytest.param(
            Sockets(
                line(ipv4("127.0.0.1"), 8080, 77, state="01") + line(ipv4("127.0.0.1"), 8081, 78), "", {5: (77, 78)}
            ),
            set(),
            set(),
            id="connections and other ports are no listeners",
        ),
        pytest.param(Sockets(LOOPBACK, "", {5: (70,)}), None, set(), id="an owner that cannot be seen is not ours"),
        # It gets the benefit of the doubt; 6, which has ended, gets none.
        pytest.param(Sockets(LOOPBACK, "", {5: None}), None, {5}, id="a member that cannot be looked into"),
    ],
)
def test_listeners_are_told_from_what_proc_shows(
    sockets: Sockets, listeners: set[int] | None, ours: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path)
    sockets.write(tmp_path)
    assert listener_pids(8080) == listeners
    assert {pid for pid in (5, 6) if is_ours(8080, frozenset({pid}))} == ours
