"""`greenroom lease -- CMD` and `greenroom leases`: a program that runs with memory of its own, and what each holds."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from greenroom.app import App
from greenroom.cli.main import main
from greenroom.features.leases.cli_program import LeasedProgram
from greenroom.leases.records import LeaseAsk
from greenroom.leases.shared.redis_store import RedisStore
from greenroom.process import keeper, proc, program_keeper
from tests.cli.command import Cli
from tests.cli.fake_gateway import FakeGateway, answer
from tests.harness import fake, gateway, url
from tests.redis_server import redis_server
from tests.waiting import until

T = TypeVar("T")

LEASE = {
    "id": "l-1",
    "name": "fine tune",
    "kind": "program",
    "state": "held",
    "token": 7,
    "claim": {"gpu0": 20_000},
    "cuda_visible_devices": "gpu0",
    "priority": 2,
    "preemptible": True,
    "ttl_s": 30.0,
    "expires_in_s": 24.0,
    "recall_in_s": None,
    "overdue": False,
    "holder": {"host": "box", "pid": 42, "start_ticks": 1, "pid_ns": 2},
}


# --- leases ---------------------------------------------------------------------------------------------------------


def test_the_table_lists_each_lease_with_its_memory_and_holder(gateway: FakeGateway, cli: Cli) -> None:
    slot = LEASE | {"id": "s3", "name": "qwen", "kind": "slot", "holder": None, "preemptible": False}
    leases = [
        LEASE,
        LEASE | {"id": "l-2", "recall_in_s": 12.0},
        LEASE | {"id": "l-3", "recall_in_s": -65.0, "overdue": True},
        LEASE | {"id": "l-4", "state": "waiting", "claim": {}, "holder": None},
        slot,
    ]
    gateway.on("GET", "/api/v1/leases", answer({"leases": leases}))
    lines = [line.split(maxsplit=8) for line in cli("leases").lines]
    assert lines[0] == ["LEASE", "NAME", "KIND", "STATE", "MEMORY_MIB", "PRIORITY", "PID", "EXPIRES", "NOTE"]
    assert lines[1] == ["l-1", "fine_tune", "program", "held", "gpu0=20,000", "2", "42", "24s", "preemptible"]
    assert lines[2][-1] == "recalled: leaves within 12s" and lines[3][-1] == "overdue: was to leave 1m ago"
    assert lines[4][3:5] == ["waiting", "-"] and lines[4][6:8] == ["-", "-"]
    assert lines[5] == ["s3", "qwen", "model", "held", "gpu0=20,000", "2", "-", "-", "-"]


def test_leases_in_redis_are_shown_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    async def take(address: str) -> None:
        store = RedisStore(address, "box", grace_s=0, offers={"gpu0": 10_000})
        await store.acquire(LeaseAsk("l-1", "train", 4_000))
        await store.close()

    monkeypatch.setenv("GREENROOM_HOST", "box")
    with redis_server(tmp_path / "redis") as server:
        asyncio.run(take(server.url))
        row = cli("leases", "--url", server.url).lines[1].split()
        assert row[:6] == ["l-1", "train", "program", "held", "gpu0=4,000", "1"]


# --- lease ----------------------------------------------------------------------------------------------------------


def test_without_a_gateway_nothing_is_run(cli: Cli, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert (
        "http://127.0.0.1:9 does not answer"
        in cli("lease", "--mib", "1", "--url", "http://127.0.0.1:9", "--", "touch", made, status=3).err
    )
    assert not made.exists()


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    async with gateway(tmp_path, {}) as app:
        yield app


def greenroom_lease(app: App, options: Sequence[str], command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "greenroom", "lease", "--url", url(app), *options, "--", *command]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)


def is_keeper(pid: int) -> bool:
    return program_keeper.__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def held(app: App) -> int:
    return sum(slot.lease is not None for slot in app.loop.scheduler.state.slots.values())


async def told(process: subprocess.Popen[str], ask: Callable[[], T]) -> T:
    """What the process answers. One that does not is ended, or the thread that asks it would be waited for as long."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(ask), 60)
    except TimeoutError:
        process.kill()
        raise


async def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    return await told(process, process.communicate)


async def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await told(process, process.stdout.readline)).strip()


async def test_a_program_runs_with_its_gpus_and_its_status_is_ours(app: App) -> None:
    shown = "print(*(os.environ[n] for n in ('CUDA_VISIBLE_DEVICES', 'GREENROOM_LEASE_TOKEN')), *sys.argv[1:])"
    code = f"import os, sys; {shown}; sys.exit(7)"
    process = greenroom_lease(
        app, ["--mib", "4000", "--priority", "low"], [sys.executable, "-c", code, "--lr", "3", "--", "x"]
    )
    out, err = await ended(process)
    assert process.returncode == 7
    assert out.split()[0] == "0" and out.split()[1].isdigit() and out.split()[2:] == ["--lr", "3", "--", "x"]
    # There may be no GPU: then the memory is the host's.
    assert "waiting for 4,000 MiB\n" in err and "holds gpu0 after" in err
    await until(lambda: held(app) == 0, "given back")


@pytest.mark.parametrize(("command", "status"), [(["/no/such/program"], 127), ([""], 127), (["/"], 126)])
async def test_what_cannot_be_run_is_said_as_shells_say_it(app: App, command: list[str], status: int) -> None:
    process = greenroom_lease(app, ["--mib", "1"], command)
    _, err = await ended(process)
    assert process.returncode == status and f"{command[0]} cannot be run" in err
    await until(lambda: held(app) == 0, "given back")


async def test_a_denial_runs_nothing(app: App, tmp_path: Path) -> None:
    process = greenroom_lease(app, ["--mib", "99999"], ["touch", str(tmp_path / "made")])
    _, err = await ended(process)
    assert process.returncode == 1 and "can never be had" in err
    assert not (tmp_path / "made").exists()


SLEEPER = """
import os, signal, sys, time
def tell(number, frame):
    print("heard", number, flush=True)
    if number == signal.SIGTERM:
        sys.exit(3)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, tell)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


async def test_signals_reach_the_program(app: App) -> None:
    process = greenroom_lease(app, ["--mib", "1"], [sys.executable, "-c", SLEEPER])
    assert int(await first_line(process)) > 0
    for number, said in [(signal.SIGUSR1, "heard 10"), (signal.SIGINT, "heard 2"), (signal.SIGTERM, "heard 15")]:
        process.send_signal(number)
        assert await first_line(process) == said
    await ended(process)
    assert process.returncode == 3
    await until(lambda: held(app) == 0, "given back")


async def test_killing_the_wrapper_ends_the_program_and_frees_its_memory(app: App) -> None:
    process = greenroom_lease(app, ["--mib", "1", "--ttl-s", "3600"], [sys.executable, "-c", SLEEPER])
    child = int(await first_line(process))
    process.kill()
    await until(lambda: held(app) == 0, "given back")
    await until(lambda: not Path(f"/proc/{child}").exists(), "the program has ended")
    process.communicate()


async def test_what_is_left_when_the_keeper_itself_is_killed_is_ended_by_the_wrapper(app: App) -> None:
    command = shlex.join([sys.executable, "-c", SLEEPER])
    process = greenroom_lease(app, ["--mib", "1"], ["sh", "-c", f"{command}; true"])
    grandchild = int(await first_line(process))
    (keeper_pid,) = [pid for pid in proc.below(process.pid) if is_keeper(pid)]
    # What the wrapper left would be ours, as a zombie.
    keeper.set_for_this_process(keeper.PR_SET_CHILD_SUBREAPER, 1)
    try:
        os.kill(keeper_pid, signal.SIGKILL)
        await ended(process)
        assert process.returncode == 128 + signal.SIGKILL
        assert not Path(f"/proc/{grandchild}").exists(), "what the shell started has ended"
    finally:
        keeper.set_for_this_process(keeper.PR_SET_CHILD_SUBREAPER, 0)


async def test_what_the_wrapper_was_told_to_ignore_the_program_ignores_too(app: App) -> None:
    argv = [sys.executable, "-m", "greenroom", "lease", "--url", url(app), "--mib", "1", "--"]
    said = "import signal; print(signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM))"
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *argv, sys.executable, "-c", said],
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = await ended(process)
    assert out.split() == ["1", "0"], "SIG_IGN and SIG_DFL"


async def test_a_wrapper_that_was_paused_past_its_time_ends_its_program(app: App) -> None:
    process = greenroom_lease(app, ["--mib", "1", "--ttl-s", "1"], [sys.executable, "-c", SLEEPER])
    await first_line(process)
    process.send_signal(signal.SIGSTOP)
    await until(lambda: held(app) == 0, "lost")
    process.send_signal(signal.SIGCONT)
    out, err = await ended(process)
    assert process.returncode == 3 and "heard 15" in out and "the lease is lost; ending" in err


async def test_a_recalled_lease_ends_its_program_when_its_time_is_over(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a", memory_mib=8_000, priority="high")}) as app:
        options = ["--mib", "8000", "--priority", "low", "--preemptible", "--grace-s", "1"]
        process = greenroom_lease(app, options, [sys.executable, "-c", SLEEPER])
        await first_line(process)
        loading = asyncio.ensure_future(asyncio.to_thread(main, ["load", "a", "--url", url(app)]))
        out, err = await ended(process)
        assert process.returncode == 3 and "heard 15" in out
        assert "the lease is recalled" in err and "its time is over; ending" in err
        assert await asyncio.wait_for(loading, 60) == 0


async def test_a_gateway_that_is_away_does_not_end_the_program(tmp_path: Path) -> None:
    async with gateway(tmp_path, {}) as app:
        process = greenroom_lease(app, ["--mib", "1", "--ttl-s", "1"], [sys.executable, "-c", SLEEPER])
        await first_line(process)
    # The gateway is gone for longer than the lease lasts.
    await asyncio.sleep(2.5)
    assert process.poll() is None
    process.terminate()
    await ended(process)
    assert process.returncode == 3


@dataclass
class FakeHeld:
    """A lease that is lost as soon as the program says that it is up."""

    up: Path
    id: str = "l-1"
    token: int = 7
    cuda_visible_devices: str = "gpu0"
    recall_in_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.up.exists()


def test_a_program_that_does_not_heed_sigterm_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ignore = "import signal, time, pathlib, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{ignore}; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    up = tmp_path / "up"
    program = LeasedProgram([sys.executable, "-c", code, str(up)], FakeHeld(up), term_grace_s=0.5)  # type: ignore[arg-type]
    assert program.run() == 128 + signal.SIGKILL
    assert "the lease is lost; ending" in capsys.readouterr().err
