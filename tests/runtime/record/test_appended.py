"""Only regular files of ours are written, put aside or replaced; a number that was closed is never used again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from greenroom.runtime.record.line_file import Appended, set_aside


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
def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines"
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


def test_line_that_was_torn_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
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
