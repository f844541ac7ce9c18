"""Marks of fetched weights: who may delete what, where folders are shared and where nothing can be locked."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from greenroom.library.fetched_marks import FetchedMarks
from greenroom.library.roots import Roots


def marks(root: Path) -> FetchedMarks:
    return FetchedMarks(lambda: Roots([str(root)]))


def test_the_last_gateway_that_uses_them_deletes_them(tmp_path: Path) -> None:
    first, second, path = marks(tmp_path), marks(tmp_path), tmp_path / "a.gguf"
    path.touch()
    assert first.use(str(path), is_fetched=True)
    assert second.use(str(path), is_fetched=False), "another gateway has fetched them"
    assert first.take(str(path)) is None, "the second one uses them"
    lock = second.take(str(path))
    assert lock is not None
    with pytest.raises(BlockingIOError):
        first.use(str(path), is_fetched=False)
    path.unlink()
    second.let_go(str(path), lock)
    assert not first.use(str(path), is_fetched=False), "the mark is gone with them"


def test_what_no_update_fetched_has_no_mark(tmp_path: Path) -> None:
    assert not marks(tmp_path).use(str(tmp_path / "mine.gguf"), is_fetched=False)
    assert not marks(tmp_path).use("/elsewhere/a.gguf", is_fetched=True)


def test_where_nothing_can_be_locked_they_are_used_and_never_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    one, path = marks(tmp_path), str(tmp_path / "a.gguf")
    assert not one.use(path, is_fetched=True)
    assert one.take(path) is None
