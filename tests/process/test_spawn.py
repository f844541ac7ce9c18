"""spawn.py and keeper.py together, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from greenroom import errors
from greenroom.process import orphans
from greenroom.process.logs import LogRing
from greenroom.process.spawn import Child, Command, Exit, spawn
from tests.waiting import until, until_now

from .conftest import Start
from .trees import engine_argv, is_alive, is_stopped, keeper_of, open_fds, pids_of


async def test_plain_engine_runs_and_leaves_when_asked(start: Start) -> None:
    child = await start("plain")
    assert child.is_running
    assert await pids_of(child, 1) == {child.pid}
    assert child.tree() == {child.pid}
    assert await child.stop(term_s=20) == Exit(code=None, signal=signal.SIGTERM)
    assert not child.is_running
    assert not is_alive(child.pid)
    assert child.tree() == frozenset()


async def test_start_time_is_that_of_the_engine(start: Start) -> None:
    child = await start("plain")
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    assert child.start_ticks == int(fields[19])
    await child.stop(term_s=20)


async def test_engine_that_ignores_term_is_killed(start: Start) -> None:
    child = await start("deaf")
    await pids_of(child, 1)
    assert await child.stop(term_s=0.2) == Exit(code=None, signal=signal.SIGKILL)


async def test_stopped_engine_is_killed(start: Start) -> None:
    child = await start("plain")
    await pids_of(child, 1)
    os.kill(child.pid, signal.SIGSTOP)
    # Until it has really stopped, SIGTERM would still overtake.
    await until(lambda: is_stopped(child.pid))
    assert await child.stop(term_s=0.2) == Exit(code=None, signal=signal.SIGKILL)


@pytest.mark.parametrize("mode", ["fork-setsid", "daemon"])
async def test_processes_that_left_the_session_end_with_the_engine(start: Start, mode: str) -> None:
    child = await start(mode)
    pids = await pids_of(child, 2)
    assert child.tree() == pids
    await child.stop(term_s=20)
    assert not any(map(is_alive, pids))


async def test_kill_takes_the_whole_tree_at_once(start: Start) -> None:
    child = await start("fork-setsid")
    pids = await pids_of(child, 2)
    child.kill()
    assert await child.wait() == Exit(code=None, signal=signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)))
    await child.stop(term_s=0)


@pytest.mark.parametrize("code", [0, 3])
async def test_exit_code_of_an_engine_that_ends_at_once_is_known(start: Start, code: int) -> None:
    child = await start("exit", str(code))
    ended = await child.wait()
    assert ended == Exit(code=code, signal=None)
    assert str(ended) == f"exit code {code}"
    assert await child.stop(term_s=20) == ended


async def test_signal_that_ended_an_engine_is_known_by_name(start: Start) -> None:
    child = await start("segv")
    assert str(await child.wait()) == "killed by SIGSEGV"
    await child.stop(term_s=20)


async def test_what_an_engine_leaves_behind_is_ended(start: Start) -> None:
    child = await start("leave-behind", "0")
    (left,) = await pids_of(child, 1)
    assert await child.wait() == Exit(code=0, signal=None)
    await until(lambda: not is_alive(left))
    await child.stop(term_s=0)


async def test_exit_is_called_back_once_even_when_asked_late(start: Start) -> None:
    child = await start("exit", "5")
    calls: list[Exit] = []
    child.on_exit(calls.append)
    await child.wait()
    child.on_exit(calls.append)
    await child.stop(term_s=20)
    await until(lambda: len(calls) == 2)
    assert calls == [Exit(5, None), Exit(5, None)]


async def test_last_words_are_there_when_the_end_is_told(start: Start) -> None:
    child = await start("last-words", "1")
    seen: list[list[str]] = []
    child.on_exit(lambda _: seen.append(child.log.tail(2)))
    await child.wait()
    await until(lambda: bool(seen))
    assert seen == [["line 499", "error: no such tensor"]]
    await child.stop(term_s=20)


async def test_last_words_are_there_even_when_the_end_is_read_first(start: Start) -> None:
    child = await start("usr1-ends")
    await pids_of(child, 1)
    keeper = keeper_of(child)
    os.kill(child.pid, signal.SIGUSR1)
    # The loop gets no turn until everything is in the pipes; then the keeper's report is looked at before the log.
    until_now(lambda: not is_alive(keeper))
    # Which of two pipes the loop reads first is up to the kernel.
    link = child._link
    assert link is not None
    link._read_status()
    assert child.exit == Exit(code=7, signal=None)
    assert child.log.tail(1) == ["last words"]
    await child.stop(term_s=20)


async def test_last_words_do_not_run_into_the_first_of_the_next_engine(start: Start) -> None:
    log = LogRing()
    for _ in range(2):
        child = await start("last-words", "1", log=log)
        await child.wait()
        await child.stop(term_s=20)
    assert log.lines_seen == 2 * 501
    assert log.tail(501)[0] == "line 0"


async def test_program_that_does_not_exist_is_named(start: Start) -> None:
    with pytest.raises(errors.LoadFailed) as failure:
        await spawn(Command(("no-such-server", "-m", "x"), env={}), identity=start.identity(), log=LogRing())
    assert failure.value.message == "no-such-server could not be started: No such file or directory: 'no-such-server'"


async def test_folder_that_does_not_exist_is_named(start: Start, tmp_path: Path) -> None:
    command = Command(engine_argv("plain"), env={}, cwd=str(tmp_path / "absent"))
    with pytest.raises(errors.LoadFailed, match=r"No such file or directory: '.*absent'"):
        await spawn(command, identity=start.identity(), log=LogRing())


@pytest.mark.parametrize(
    "command",
    [Command((), env={}), Command(("true", "a\0b"), env={}), Command(("true",), env={"A=B": ""})],
    ids=["empty", "zero-byte", "bad-name"],
)
async def test_command_that_no_program_can_be_given_is_refused(start: Start, command: Command) -> None:
    with pytest.raises(errors.LoadFailed, match="could not be started"):
        await spawn(command, identity=start.identity(), log=LogRing())


async def test_engine_gets_its_environment_and_nothing_else(start: Start, tmp_path: Path) -> None:
    identity = start.identity()
    command = Command(engine_argv("show"), env={"LC_CTYPE": "C.UTF-8", "KEY": "ü\nx"}, cwd=str(tmp_path))
    # As when the gateway was started in the background by a shell.
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    child = await spawn(command, identity=identity, log=LogRing())
    signal.signal(signal.SIGQUIT, before)
    await child.wait()
    said = dict(line.split("=", 1) for line in child.log.tail(20))
    assert said["cwd"] == str(tmp_path)
    assert said["ignored"] == "[]"
    assert said["fds"] == "[0, 1, 2]"
    assert said["stdin"] == "b''"
    assert said["session"] == "True"
    expected = {"GREENROOM_IDENTITY": identity, "KEY": "ü\nx", "LC_CTYPE": "C.UTF-8"}
    assert said["env"] == str(sorted(expected.items()))
    await child.stop(term_s=20)


async def test_secrets_of_an_engine_are_not_in_the_keepers_arguments(start: Start) -> None:
    command = Command(engine_argv("plain"), env={"API_KEY": "hush-hush"})
    child = await spawn(command, identity=start.identity(), log=LogRing())
    keeper = Path(f"/proc/{keeper_of(child)}")
    assert b"hush-hush" not in (keeper / "cmdline").read_bytes() + (keeper / "environ").read_bytes()
    assert "hush-hush" not in repr(command)
    await child.stop(term_s=20)


async def test_environment_larger_than_a_pipe_arrives(start: Start) -> None:
    value = "v" * 100_000
    command = Command(
        (sys.executable, "-c", "import os; print(len(os.environ['A']) + len(os.environ['B']))"),
        env={"A": value, "B": value},
    )
    child = await spawn(command, identity=start.identity(), log=LogRing())
    await child.wait()
    assert child.log.tail(1) == ["200000"]
    await child.stop(term_s=20)


# --- stop ------------------------------------------------------------------------------------------------------------


async def test_stop_command_is_run_with_the_pid_of_the_engine(start: Start) -> None:
    stop_argv = (sys.executable, "-I", "-S", "-c", "import os,sys; os.kill(int(sys.argv[1]), 10)", "${PID}")
    command = Command(engine_argv("usr1-ends"), env={}, stop_argv=stop_argv)
    child = await spawn(command, identity=start.identity(), log=LogRing())
    await pids_of(child, 1)
    assert await child.stop(term_s=20) == Exit(code=7, signal=None)


@pytest.mark.parametrize("stop_argv", [(sys.executable, "-c", "raise SystemExit(1)"), ("no-such-stopper",)])
async def test_stop_command_that_fails_is_followed_by_term(start: Start, stop_argv: tuple[str, ...]) -> None:
    command = Command(engine_argv("plain"), env={}, stop_argv=stop_argv)
    child = await spawn(command, identity=start.identity(), log=LogRing())
    await pids_of(child, 1)
    assert await child.stop(term_s=20) == Exit(code=None, signal=signal.SIGTERM)


async def test_stop_command_that_hangs_is_killed_with_the_tree(start: Start) -> None:
    command = Command(engine_argv("plain"), env={}, stop_argv=engine_argv("deaf"))
    child = await spawn(command, identity=start.identity(), log=LogRing())
    await pids_of(child, 1)
    stopping = asyncio.create_task(child.stop(term_s=20))
    pids = await pids_of(child, 2)
    child.kill()
    assert await stopping == Exit(code=None, signal=signal.SIGKILL)
    assert not any(map(is_alive, pids))


async def test_stop_may_be_called_by_many_and_again(start: Start) -> None:
    child = await start("deaf")
    await pids_of(child, 1)
    ends = await asyncio.gather(child.stop(term_s=600), child.stop(term_s=0.1), child.stop(term_s=600))
    assert set(ends) == {Exit(None, signal.SIGKILL)}
    assert await child.stop(term_s=600) == Exit(None, signal.SIGKILL)


async def test_stop_goes_on_when_its_caller_is_cancelled(start: Start) -> None:
    child = await start("deaf")
    await pids_of(child, 1)
    stopping = asyncio.create_task(child.stop(term_s=0.2))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert await child.wait() == Exit(None, signal.SIGKILL)
    await child.stop(term_s=0)


async def test_cancelled_wait_does_not_disturb_another(start: Start) -> None:
    child = await start("plain")
    first, second = asyncio.create_task(child.wait()), asyncio.create_task(child.wait())
    await asyncio.sleep(0)
    first.cancel()
    await child.stop(term_s=20)
    assert await second == child.exit
    assert first.cancelled()


async def test_cancelled_spawn_leaves_nothing(start: Start) -> None:
    fds = open_fds()
    for turns in range(4):
        identity = start.identity()
        spawning = asyncio.create_task(start("fork-setsid", identity=identity))
        await asyncio.sleep(turns * 0.02)
        spawning.cancel()
        outcome = (await asyncio.gather(spawning, return_exceptions=True))[0]
        # A slow cancel may find the engine already started: then the caller has it and must stop it.
        if isinstance(outcome, Child):
            await outcome.stop(term_s=0)
        assert orphans.find(identity) == []
    assert open_fds() <= fds


# --- the keeper is in trouble ----------------------------------------------------------------------------------------


async def test_keeper_killed_takes_everything_with_it(start: Start) -> None:
    child = await start("fork-setsid")
    pids = await pids_of(child, 2)
    ends: list[Exit] = []
    child.on_exit(ends.append)
    os.kill(keeper_of(child), signal.SIGKILL)
    assert str(await child.wait()) == "lost together with its keeper"
    await child.stop(term_s=5)
    assert not any(map(is_alive, pids))
    assert ends == [Exit(None, None)]


async def test_engine_that_carries_nothing_of_ours_ends_when_its_keeper_is_killed(start: Start) -> None:
    child = await start("forget")
    await pids_of(child, 1)
    os.kill(keeper_of(child), signal.SIGKILL)
    await child.stop(term_s=5)
    assert not is_alive(child.pid)


async def test_engine_dies_with_its_keeper_before_anything_is_swept(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end_none(found: object, term_s: float) -> int:
        return 0

    child = await start("deaf")
    await pids_of(child, 1)
    # This would end the engine as well, a moment later.
    with monkeypatch.context() as patch:
        patch.setattr(orphans, "end", end_none)
        os.kill(keeper_of(child), signal.SIGKILL)
        await child.stop(term_s=5)
    await until(lambda: not is_alive(child.pid))


async def test_keeper_that_is_stuck_is_killed_in_the_end(start: Start) -> None:
    child = await start("fork-setsid", keeper_grace_s=0.3)
    pids = await pids_of(child, 2)
    os.kill(keeper_of(child), signal.SIGSTOP)
    await child.stop(term_s=0.1)
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_keeper_is_deaf_to_what_is_meant_for_the_gateway(start: Start, number: signal.Signals) -> None:
    child = await start("plain")
    await pids_of(child, 1)
    os.kill(keeper_of(child), number)
    # Had the keeper ended, the engine would have ended with it, and not by our signal.
    assert await child.stop(term_s=20) == Exit(None, signal.SIGTERM)


async def test_start_that_hangs_is_given_up(start: Start) -> None:
    identity = start.identity()
    with pytest.raises(errors.LoadFailed, match="nothing happened within"):
        await start("fork-setsid", identity=identity, start_s=0.0)
    assert orphans.find(identity) == []


# --- resources -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_descriptors_are_back_to_base_after_twenty_cycles(start: Start) -> None:
    await (await start("plain")).stop(term_s=20)
    fds = open_fds()
    for cycle in range(20):
        child = await start("plain" if cycle % 2 else "exit", "0")
        await child.stop(term_s=20)
    assert open_fds() <= fds


async def test_failed_starts_give_their_descriptors_back(start: Start) -> None:
    fds = open_fds()
    for _ in range(5):
        with pytest.raises(errors.LoadFailed):
            await spawn(Command(("no-such-server",), env={}), identity=start.identity(), log=LogRing())
    assert open_fds() <= fds


async def test_log_flood_is_read_without_stopping_the_loop(start: Start) -> None:
    child = await start("flood", "200000")
    await until(lambda: child.log.lines_seen > 200_000)
    assert "line 199999" in child.log.tail(3)
    assert len(child.log.tail(100_000)) == 2000
    await child.stop(term_s=20)


async def test_many_engines_start_and_stop_at_once(start: Start) -> None:
    children = await asyncio.gather(*(start("plain") for _ in range(8)))
    assert len({child.pid for child in children}) == 8
    await asyncio.gather(*(child.stop(term_s=30) for child in children))
    assert not any(is_alive(child.pid) for child in children)
