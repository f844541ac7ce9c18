"""Marks of fetched weights: which gateway may delete what, in shared folders and where nothing can be locked."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from greenroom.library.download_locks import FOLDER, MARK_BYTES_MAX, DownloadLocks, close_all, disown
from greenroom.library.roots import Roots


def marks(root: Path) -> DownloadLocks:
    return DownloadLocks(lambda: Roots([str(root)]))


def fetched(root: Path, name: str) -> tuple[DownloadLocks, Path]:
    """A gateway that uses a file which an update of it has fetched."""
    one, path = marks(root), root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights")
    one.mark(str(path))
    assert one.use(str(path))
    return one, path


def test_weights_on_a_disk_that_fails_are_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = fetched(tmp_path, "a.gguf")
    other, there = marks(tmp_path), len(os.listdir("/proc/self/fd"))

    def fail(fd: int) -> NoReturn:
        raise OSError(errno.ESTALE, "stale")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        assert not other.use(str(path))
    assert len(os.listdir("/proc/self/fd")) == there


def test_the_last_gateway_that_uses_them_deletes_them(tmp_path: Path) -> None:
    (first, path), second = fetched(tmp_path, "a.gguf"), marks(tmp_path)
    assert second.use(str(path)), "another gateway has fetched them"
    assert first.take(str(path)) is None, "the second one uses them"
    lock = second.take(str(path))
    assert lock is not None
    with pytest.raises(BlockingIOError):
        first.use(str(path))
    path.unlink()
    second.let_go(str(path), lock)
    assert not first.use(str(path)), "the mark is gone with them"


def test_weights_of_another_gateway_are_known_to_be_used(tmp_path: Path) -> None:
    (first, path), second = fetched(tmp_path, "a.gguf"), marks(tmp_path)
    assert second.is_used_elsewhere(str(path))
    assert not first.is_used_elsewhere(str(path)), "it is the only one"
    first.use_only(())
    assert not second.is_used_elsewhere(str(path))
    assert second.use(str(path)), "the question left no lock"
    assert not second.is_used_elsewhere(str(tmp_path / "mine.gguf")), "no update fetched it"


def test_no_gateway_begins_to_use_what_another_one_is_told_to_delete(tmp_path: Path) -> None:
    (first, path), second = fetched(tmp_path, "a.gguf"), marks(tmp_path)
    with pytest.raises(BlockingIOError), second.deleting(str(path), force=False):
        pytest.fail("the first one uses it")
    with second.deleting(str(path), force=True):
        pass
    first.use_only(())
    with second.deleting(str(path), force=False), pytest.raises(BlockingIOError):
        first.use(str(path))
    assert first.use(str(path)), "it was not deleted"
    with first.deleting(str(path), force=False):
        path.unlink()
    assert os.listdir(tmp_path / FOLDER) == [], "the mark is gone with it"


@pytest.mark.parametrize("deletes", ["the one that uses them", "another one"])
def test_weights_that_are_fetched_again_after_they_were_deleted_are_locked(tmp_path: Path, deletes: str) -> None:
    (first, path), second = fetched(tmp_path, "a.gguf"), marks(tmp_path)
    with (first if deletes == "the one that uses them" else second).deleting(str(path), force=True):
        path.unlink()
    path.write_bytes(b"weights again")
    first.mark(str(path))
    assert first.use(str(path))
    assert second.is_used_elsewhere(str(path)) and second.take(str(path)) is None


def test_a_first_fetch_looks_for_other_roots_as_deep_as_models_may_lie(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"abcdefghijklmnop")
    deep.mkdir(parents=True)
    close_all(marks(deep).begin_fetch())
    close_all(marks(tmp_path / "a" / "b").begin_fetch())
    locks = marks(tmp_path).begin_fetch()
    assert len(locks) == 2, "its own, and that of a/b"
    close_all(locks)


def test_nothing_is_deleted_while_a_gateway_fetches_and_nothing_fetched_while_one_deletes(tmp_path: Path) -> None:
    (one, path), other = fetched(tmp_path, "a.gguf"), marks(tmp_path)
    fetching = [*one.begin_fetch(), *other.begin_fetch()]
    with pytest.raises(BlockingIOError):
        one.take(str(path))
    close_all(fetching)
    locks = one.take(str(path))
    assert locks is not None
    with pytest.raises(BlockingIOError):
        other.begin_fetch()
    one.let_go(str(path), locks)
    close_all(other.begin_fetch())


@pytest.mark.parametrize(("fetches", "deletes"), [(".", "hub"), ("hub", "."), (".", "hub/org"), ("hub/org", ".")])
def test_nothing_is_deleted_while_a_gateway_fetches_into_a_root_above_or_below(
    tmp_path: Path, fetches: str, deletes: str
) -> None:
    one, path = fetched(tmp_path / "hub" / "org", "a.gguf")
    one.use_only(())
    close_all(marks(tmp_path / fetches).begin_fetch())
    deleting = marks(tmp_path / deletes)
    locks = marks(tmp_path / fetches).begin_fetch()
    deleting.mark(str(path))
    with pytest.raises(BlockingIOError):
        deleting.take(str(path))
    close_all(locks)
    taken = deleting.take(str(path))
    assert taken is not None
    with pytest.raises(BlockingIOError):
        marks(tmp_path / fetches).begin_fetch()
    close_all(taken)


def test_a_first_fetch_waits_for_a_deletion_that_began_below(tmp_path: Path) -> None:
    """The gateway that deletes found no lock file above it, because none had fetched there yet."""
    one, path = fetched(tmp_path / "hub" / "org", "a.gguf")
    taken = one.take(str(path))
    assert taken is not None
    above = marks(tmp_path)
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            above.begin_fetch()
    close_all(taken)
    close_all(above.begin_fetch())


def test_nothing_is_deleted_while_it_cannot_be_told_whether_another_gateway_fetches(tmp_path: Path) -> None:
    one, path = fetched(tmp_path / "hub", "a.gguf")
    (tmp_path / FOLDER).mkdir()
    # No gateway follows a link there.
    (tmp_path / FOLDER / "fetching").symlink_to("elsewhere")
    with pytest.raises(BlockingIOError):
        one.take(str(path))
    (tmp_path / FOLDER / "fetching").unlink()
    assert one.take(str(path)) is not None, "it was only put off"


@pytest.mark.parametrize("others", [["hub"], ["."], ["hub", "."]])
def test_gateways_that_name_the_folder_by_other_roots_know_of_each_other(tmp_path: Path, others: list[str]) -> None:
    path = tmp_path / "hub" / "a.gguf"
    path.parent.mkdir()
    path.write_bytes(b"weights")
    first = DownloadLocks(lambda: Roots([str(tmp_path), str(tmp_path / "hub")]))
    second = DownloadLocks(lambda: Roots([str(tmp_path / other) for other in others]))
    first.mark(str(path))
    assert second.use(str(path)) and first.use(str(path))
    assert first.take(str(path)) is None, "the second one uses them"
    locks = second.take(str(path))
    assert locks is not None
    path.unlink()
    second.let_go(str(path), locks)
    assert not first.use(str(path))


def test_a_gateway_that_may_only_read_the_folder_locks_what_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, path), second = fetched(tmp_path, "a.gguf"), marks(tmp_path)
    opened = os.open

    def read_only(name: str, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return opened(name, flags, *more, **options)

    with monkeypatch.context() as other_user:
        other_user.setattr(os, "open", read_only)
        assert second.use(str(path))
        fetching = second.begin_fetch()
    assert first.take(str(path)) is None, "the second one uses them"
    close_all(fetching)


def test_what_no_update_fetched_has_no_mark(tmp_path: Path) -> None:
    one = marks(tmp_path)
    one.mark("/elsewhere/a.gguf")
    assert not one.use(str(tmp_path / "mine.gguf")) and not one.use("/elsewhere/a.gguf")
    assert one.take(str(tmp_path / "mine.gguf")) is None


def test_where_nothing_can_be_locked_they_are_used_and_never_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    one, path = marks(tmp_path), str(tmp_path / "a.gguf")
    one.mark(path)
    assert not one.use(path)
    assert one.take(path) is None


@pytest.mark.parametrize("is_held", [True, False])
def test_a_file_that_was_replaced_since_is_not_deleted(tmp_path: Path, is_held: bool) -> None:
    one, path = fetched(tmp_path, "a.gguf")
    path.unlink()
    path.write_bytes(b"fetched again, by hand")
    assert (one if is_held else marks(tmp_path)).take(str(path)) is None


def test_a_folder_with_a_file_that_was_replaced_is_not_deleted_and_one_with_more_or_fewer_files_is(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    (folder / "unet").mkdir(parents=True)
    for name in ("config.json", "a.safetensors", "unet/config.json", "unet/b.safetensors"):
        (folder / name).write_text(name)
    one = marks(tmp_path)
    one.mark(str(folder))
    (folder / "unet" / "cache").mkdir()
    (folder / "unet" / "config.json").unlink()
    lock = one.take(str(folder))
    assert lock is not None, "an engine has left something there, and a deletion was broken off"
    one.let_go(str(folder), lock)
    (folder / "unet" / "b.safetensors").write_text("other weights")
    assert one.take(str(folder)) is None


def test_disowned_weights_are_not_deleted(tmp_path: Path) -> None:
    one, path = fetched(tmp_path, "hub/models--a/snapshots/1/a.gguf")
    other, neighbour = fetched(tmp_path, "hub/models--a/snapshots/2/a.gguf")
    (tmp_path / "link").symlink_to(tmp_path / "hub")
    disown([str(tmp_path / "link" / path.relative_to(tmp_path / "hub"))])
    assert one.take(str(path)) is None and marks(tmp_path).take(str(path)) is None
    assert other.take(str(neighbour)) is not None


def test_a_mark_for_which_the_disk_has_no_room_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    one, path = marks(tmp_path), tmp_path / "a.gguf"
    path.write_bytes(b"weights")
    one.mark(str(path))
    assert not one.use(str(path)) and one.take(str(path)) is None


PLANTED = [
    *(b"", b"{", b"[]", b"{}", b"null", b"[" * 100_000, b"\xff\xfe", b" " * (MARK_BYTES_MAX + 1)),
    *(json.dumps(said).encode() for said in ({"gone.gguf": [7, 7]}, {".": [7, 7]}, {"a.gguf": [7, 7]}, {".": None})),
]


@pytest.mark.parametrize("content", PLANTED, ids=lambda content: str(content[:20]))
@pytest.mark.parametrize("name", ["mine", "mine/a.gguf"])
def test_a_mark_that_does_not_tell_what_lies_there_is_none(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.gguf").write_bytes(b"weights")
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / hashlib.sha256(name.encode()).hexdigest()).write_bytes(content)
    one, path = marks(tmp_path), str(tmp_path / name)
    assert not one.use(path) and one.take(path) is None
    assert not one.use(path), "it is asked again"


def test_a_folder_of_marks_that_is_gone_or_not_writable_deletes_nothing(tmp_path: Path) -> None:
    one, path = fetched(tmp_path, "a.gguf")
    shutil.rmtree(tmp_path / FOLDER)
    assert one.take(str(path)) is None
    (tmp_path / FOLDER).write_text("no folder")
    one.mark(str(path))
    assert not one.use(str(path)) and one.take(str(path)) is None
