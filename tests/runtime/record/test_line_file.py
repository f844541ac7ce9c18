"""Lines reach the file in order, within bounds and beside the loop; only regular files of ours are written."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from greenroom.runtime.record.line_file import Appended, LineFile, set_aside
from tests.full_disk import full_disk
from tests.waiting import until


def opened(path: Path, **options: Any) -> LineFile[str]:
    said: dict[str, Any] = {"head": "head", "bytes_max": 10_000, "rotates": True, **options}
    encode = said.pop("encode", str)
    file: LineFile[str] = LineFile(path, encode, **said)
    file.open()
    return file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


async def test_lines_are_written_in_order_soon_and_at_the_end(path: Path) -> None:
    file = opened(path)
    file.put("one")
    await until(lambda: path.read_text() == "head\none\n", "written without being asked")
    file.put("two")
    file.put("three")
    await file.close()
    assert path.read_text() == "head\none\ntwo\nthree\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_file_that_is_there_already_is_continued_without_a_second_head(path: Path) -> None:
    for line in ("one", "two"):
        file = opened(path)
        file.put(line)
        await file.close()
    assert path.read_text() == "head\none\ntwo\n"


async def test_full_file_becomes_the_old_one_and_only_one_old_one_is_kept(path: Path, tmp_path: Path) -> None:
    file = opened(path, bytes_max=len("head\none\ntwo\n"))
    for line in ("one", "two", "three", "four", "five"):
        file.put(line)
        await file.flush()
    await file.close()
    assert path.read_text() == "head\nfive\n"
    assert (tmp_path / "lines.1").read_text() == "head\nthree\nfour\n"
    assert sorted(os.listdir(tmp_path)) == ["lines", "lines.1"]


async def test_file_that_may_not_rotate_takes_no_more_but_a_last_line(path: Path) -> None:
    file = opened(path, bytes_max=8, rotates=False)
    assert file.put("one")
    await file.flush()
    assert not file.put("two")
    assert file.put("end", must=True)
    await file.close()
    assert path.read_text() == "head\none\nend\n"
    assert file.dropped == 1


async def test_slow_disk_costs_lines_never_the_loop(tmp_path: Path) -> None:
    path, disk, waits = tmp_path / "lines", threading.Event(), threading.Event()

    def slow(line: str) -> str:
        waits.set()
        assert disk.wait(60)
        return line

    file = opened(path, encode=slow, waiting_max=3)
    assert file.put("one")
    await until(waits.is_set, "the thread has begun")
    # The loop goes on although the thread stands still.
    assert [file.put(line) for line in ("two", "three", "four", "five")] == [True, True, True, False]
    disk.set()
    await file.close()
    assert path.read_text() == "head\none\ntwo\nthree\nfour\n"
    assert file.dropped == 1


async def test_disk_that_was_full_is_told_once_and_costs_neither_lines_nor_halves_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines"
    file = opened(path)
    # Half of a line still fits.
    with full_disk(len("head\non")):
        for line in ("one", "two"):
            file.put(line)
            with pytest.raises(OSError, match="File too large"):
                await file.flush()
        told = "recording failed and is tried again"
        await until(lambda: told in capsys.readouterr().err, "it is told")
    file.put("three")
    await file.close()
    assert path.read_text() == "head\none\ntwo\nthree\n"
    assert file.dropped == 0


async def test_end_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    disk = threading.Event()

    def hanging(line: str) -> str:
        disk.wait(60)
        return line

    file = opened(tmp_path / "lines", encode=hanging, close_max_s=0.05)
    file.put("one")
    try:
        await asyncio.wait_for(file.close(), 30)
    finally:
        disk.set()
    assert file.dropped == 1


async def test_nothing_is_taken_after_the_end(tmp_path: Path) -> None:
    file = opened(tmp_path / "lines")
    await file.close()
    assert not file.put("late") and not file.put("last", must=True)
    assert (tmp_path / "lines").read_text() == "head\n"


def test_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        opened(tmp_path / "nowhere" / "lines")


def test_file_is_not_touched_before_it_is_opened(tmp_path: Path) -> None:
    LineFile(tmp_path / "lines", str, head="head", bytes_max=10, rotates=True)
    assert os.listdir(tmp_path) == []


async def test_lines_put_before_the_file_is_opened_wait_for_it(path: Path) -> None:
    file: LineFile[str] = LineFile(path, str, head="head", bytes_max=10_000, rotates=True)
    file.put("early")
    file.open()
    await until(lambda: path.read_text() == "head\nearly\n", "written without being asked again")
    await file.close()


async def test_name_that_is_no_text_does_not_end_the_recording(path: Path) -> None:
    file = opened(path)
    for line in ("odd \udc80", "even"):
        file.put(line)
        await file.flush()
    await file.close()
    assert path.read_text() == "head\nodd \\udc80\neven\n"


@pytest.mark.parametrize("fails", ["line_file.os.replace", "line_file.os.open", "line_file.Appended"])
async def test_rotation_that_fails_goes_on_in_the_old_file_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "lines"
    file = opened(path, bytes_max=len("head\none\n"))

    def refused(*said: Any, **options: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    file.put("one")
    # Which of the three fails cannot be arranged on a disk.
    with monkeypatch.context() as patched:
        patched.setattr(f"greenroom.runtime.record.{fails}", refused)
        await file.flush()
    # A file that is opened now must not get what was meant for the recording.
    with (tmp_path / "other").open("wb"):
        file.put("two")
        await file.flush()
        file.put("3")
        await file.close()
    assert path.read_text() == "head\n3\n"
    assert (tmp_path / "other").read_bytes() == b""
    assert (tmp_path / "lines.1").read_text() == "head\none\ntwo\n"
    assert file.dropped == 0


async def test_file_that_can_never_be_rotated_does_not_grow_for_ever(path: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.1").write_text("somebody's\n")
    file = opened(path, bytes_max=10)
    for _ in range(10):
        file.put("1234")
        await file.flush()
    await file.close()
    assert path.read_text() == "head\n" + 3 * "1234\n" and file.dropped == 7
    assert (tmp_path / "lines.1").read_text() == "somebody's\n"


async def test_hanging_disk_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    program = """
import asyncio, pathlib, sys, threading
from greenroom.runtime.record import line_file
async def main():
    file = line_file.LineFile(
        pathlib.Path(sys.argv[1]),
        lambda line: threading.Event().wait(),
        head="head",
        bytes_max=99,
        rotates=True,
        close_max_s=0.05,
    )
    file.open()
    file.put("one")
    await file.close()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "lines")], timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    target = path.with_name("target")
    target.write_text("head\n")
    path.symlink_to(target)


def make_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [make_pipe, make_link, make_link_to_a_device, Path.mkdir])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: object) -> None:
    assert callable(make)
    path = tmp_path / "lines"
    make(path)
    with pytest.raises(OSError, match="is not a regular file"):
        Appended(path, "head")
    with pytest.raises(OSError, match="is not a regular file"):
        set_aside(path, "head")
    assert not (tmp_path / "lines.1").exists()


@pytest.mark.parametrize("text", ["notes of mine\n", "headline\n", "hea"])
def test_a_foreign_file_is_refused_and_left_as_it_is(path: Path, tmp_path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(FileExistsError, match="holds something else"):
        Appended(path, "head")
    with pytest.raises(FileExistsError, match="holds something else"):
        set_aside(path, "head")
    assert path.read_text() == text and os.listdir(tmp_path) == ["lines"]


def test_a_foreign_old_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("head\none\n")
    (tmp_path / "lines.1").write_text("notes of mine\n")
    with pytest.raises(FileExistsError, match=r"lines\.1"):
        set_aside(tmp_path / "lines", "head")
    assert (tmp_path / "lines.1").read_text() == "notes of mine\n"


def test_line_that_was_torn_does_not_spoil_the_next(path: Path) -> None:
    path.write_text("head\none\ntw")
    for line in (b"three\n", b"four\n"):
        file = Appended(path, "head")
        file.write(line)
        file.close()
    assert path.read_text() == "head\none\ntw\nthree\nfour\n"


def test_file_that_was_closed_writes_nowhere(tmp_path: Path) -> None:
    file = Appended(tmp_path / "lines", "head")
    file.close()
    # It gets the lowest free number, which is the one that was just closed.
    with (tmp_path / "other").open("wb") as other:
        with pytest.raises(OSError) as refused:
            file.write(b"one\n")
        file.close()
        other.write(b"mine")
    assert refused.value.errno == errno.EBADF
    assert (tmp_path / "other").read_bytes() == b"mine"


def test_file_that_could_not_be_begun_is_let_go_of(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("notes of mine\n")
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        with pytest.raises(OSError):
            Appended(tmp_path / "lines", "head")
    assert len(os.listdir("/proc/self/fd")) == len(before)
