"""state_dir.py"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from greenroom import errors
from greenroom.process.state_dir import SOCKET_NAME_BYTES_MAX, StateDir
from tests.full_disk import full_disk


@pytest.fixture
def path() -> Iterator[Path]:
    """A short path, whatever the length of the test's name."""
    with tempfile.TemporaryDirectory(prefix="gr-", dir="/tmp") as folder:
        yield Path(folder) / "state"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_everything_is_private(path: Path) -> None:
    path.mkdir(mode=0o755)
    state = StateDir.open(path)
    assert mode_of(path) == mode_of(state.run_dir) == 0o700
    assert mode_of(path / "id") == mode_of(path / "lock") == 0o600
    state.close()


def test_id_lasts_and_run_does_not(path: Path) -> None:
    first = StateDir.open(path)
    first.close()
    second = StateDir.open(path)
    assert first.id == second.id
    assert first.run != second.run
    assert second.identity("s-1") == f"{second.id}:{second.run}:s-1"
    assert second.identity("s-1").startswith(second.prefix)
    second.close()


@pytest.mark.parametrize("damaged", ["", "not-an-id", "ABC"])
def test_damaged_id_is_replaced(path: Path, damaged: str) -> None:
    StateDir.open(path).close()
    (path / "id").write_text(damaged)
    state = StateDir.open(path)
    state.close()
    again = StateDir.open(path)
    again.close()
    assert state.id == again.id != damaged


def test_a_second_gateway_is_told_which_process_has_the_directory(path: Path) -> None:
    state = StateDir.open(path)
    with pytest.raises(errors.StateDirBusy, match=f"pid {os.getpid()};"):
        StateDir.open(path)
    state.close()
    state.close()
    StateDir.open(path).close()


def test_one_of_many_that_race_gets_it(path: Path) -> None:
    gate = threading.Barrier(8)

    def race(_: int) -> StateDir | None:
        gate.wait(timeout=30)
        try:
            return StateDir.open(path)
        except errors.StateDirBusy:
            return None

    with ThreadPoolExecutor(8) as threads:
        winners = [state for state in threads.map(race, range(8)) if state]
    assert len(winners) == 1
    assert (path / "id").read_text().strip() == winners[0].id
    winners[0].close()


def test_killed_gateway_lets_go_of_it(path: Path) -> None:
    program = (
        "import sys, time\nfrom greenroom.process.state_dir import StateDir\n"
        "state = StateDir.open(sys.argv[1])\nprint(state.id, flush=True)\ntime.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other_id = other.stdout.readline().strip()
        with pytest.raises(errors.StateDirBusy, match=f"pid {other.pid};"):
            StateDir.open(path)
        other.send_signal(signal.SIGKILL)
    state = StateDir.open(path)
    assert state.id == other_id
    state.close()


def test_leftovers_in_the_run_directory_are_removed_at_open_and_close(path: Path) -> None:
    StateDir.open(path).close()
    run_dir = path / "run"
    (run_dir / "folder").mkdir(parents=True)
    (run_dir / "folder" / "file").touch()
    (run_dir / "link").symlink_to(path.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "old.sock"))
    state = StateDir.open(path)
    assert state.run_dir == run_dir
    assert list(run_dir.iterdir()) == []
    assert path.parent.exists()
    (run_dir / "new.sock").touch()
    state.close()
    assert list(run_dir.iterdir()) == []


def test_long_path_gets_a_short_run_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    state = StateDir.open(path / ("long" * 25))
    assert state.run_dir == Path("/tmp") / f"greenroom-{state.id}"
    assert mode_of(state.run_dir) == 0o700
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(state.run_dir / ("s" * SOCKET_NAME_BYTES_MAX)))
    state.close()
    assert not state.run_dir.exists()


def test_long_path_uses_the_users_runtime_directory_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = path.parent / "xdg"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    state = StateDir.open(path / ("long" * 25))
    assert state.run_dir.parent == runtime
    state.close()


def test_a_run_directory_that_is_a_foreign_link_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = path.parent / "xdg"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    long = path / ("long" * 25)
    state = StateDir.open(long)
    state.close()
    (runtime / f"greenroom-{state.id}").symlink_to(path.parent)
    with pytest.raises(errors.ConfigError, match="link"):
        StateDir.open(long)
    # The failed attempt does not hold the lock.
    (runtime / f"greenroom-{state.id}").unlink()
    StateDir.open(long).close()


@pytest.mark.parametrize("held", ["greenroom.yaml", "run/weights.bin", "id/of/mine"])
def test_directory_with_other_files_is_refused_and_left_as_it_is(path: Path, held: str) -> None:
    file = path / held
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    path.chmod(0o755)
    with pytest.raises(errors.ConfigError, match="holds other files"):
        StateDir.open(path)
    assert file.read_text() == "precious"
    assert mode_of(path) == 0o755
    assert not (path / "lock").exists()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: (StateDir.open(path).close(), (path / "beside").touch()), id="files put beside ours"),
        pytest.param(
            lambda path: (path.mkdir(), (path / "lock").touch(), (path / "id.new").touch()),
            id="a start that broke off before the id was written",
        ),
        pytest.param(lambda path: (path / "lost+found").mkdir(parents=True), id="an empty volume of a file system"),
    ],
)
def test_what_is_no_obstacle_is_left_there(path: Path, make: Callable[[Path], object]) -> None:
    make(path)
    StateDir.open(path).close()
    left = {"beside", "lost+found"} & {file.name for file in path.iterdir()}
    StateDir.open(path).close()
    assert left <= {file.name for file in path.iterdir()}


def test_directory_that_cannot_be_written_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.ConfigError, match=f"{path} cannot be used: No space left"):
        StateDir.open(path)
    assert sorted(file.name for file in path.iterdir()) == ["lock"]


def test_texts_for_callers_name_none_of_our_folders_and_leave_others_alone(tmp_path: Path) -> None:
    state_dir = StateDir.open(str(tmp_path / "state"))
    try:
        told = state_dir.unnamed(f"{state_dir.run_dir}/a.sock, {state_dir.path}, {state_dir.path}-of-another/b")
    finally:
        state_dir.close()
    assert told == f"a.sock, the state directory, {tmp_path / 'state'}-of-another/b"


def test_a_directory_that_is_read_only_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir(mode=0o755)
    path.chmod(0o555)
    # The superuser may write in any case; what matters is that no permission was added.
    with contextlib.suppress(OSError):
        StateDir.open(path).close()
    assert path.stat().st_mode & 0o777 == 0o500


def test_a_full_disk_does_not_keep_a_gateway_from_starting_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = StateDir.open(path)
    before.close()
    mkdir = os.mkdir

    def mkdir_without_room(folder: Path, mode: int) -> None:
        if not folder.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(folder, mode)

    monkeypatch.setattr(os, "mkdir", mkdir_without_room)
    with full_disk():
        again = StateDir.open(path)
    assert again.id == before.id
    again.close()


FILES = ("lock", "id", "learned.json", "needs.json", "library.json", "leases.jsonl", "usage.db", "versions.json")
FOLDERS = ("run", "jobs", "pictures", "governance")


@pytest.mark.parametrize(
    ("name", "make", "told"),
    [
        *((name, make, "is no plain file") for name in FILES for make in (os.mkfifo, os.mkdir)),
        *((name, os.mkfifo, "is no folder") for name in FOLDERS),
    ],
)
def test_what_is_no_file_or_folder_where_one_is_expected_is_refused(
    path: Path, name: str, make: Callable[[Path], None], told: str
) -> None:
    StateDir.open(path).close()
    with contextlib.suppress(FileNotFoundError):
        (path / name).rmdir() if name in FOLDERS else (path / name).unlink()
    make(path / name)
    with pytest.raises(errors.ConfigError, match=f"{name} {told}; move it away"):
        StateDir.open(path)


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to(path)], ids=["file", "link to itself"])
def test_path_that_cannot_be_a_directory_is_refused(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises(errors.ConfigError, match=r"(state_dir:|directory) .* cannot be used"):
        StateDir.open(path)


def test_a_link_into_nothing_hides_no_other_thing(path: Path) -> None:
    StateDir.open(path).close()
    (path / "checked").symlink_to(path / "nothing")
    os.mkfifo(path / "learned.json")
    with pytest.raises(errors.ConfigError, match=r"learned\.json is no plain file; move it away"):
        StateDir.open(path)
