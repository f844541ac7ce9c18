"""Which files of a version are needed by others: the deletion of real ones is tested with gateways."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from greenroom.config.schema import Model
from greenroom.features.library.downloads import Downloads
from greenroom.features.versions.weights import VersionWeights, _is_needed
from greenroom.library.download_locks import FETCHING, FOLDER, DownloadLocks
from greenroom.library.records import LibraryRecord, ModelFile, ModelKind, Source
from greenroom.library.roots import Roots
from tests.library.hub_cache import add_snapshot
from tests.waiting import PATIENCE_S, until


class SlowRoots:
    """Roots on a disk that answers only when it may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def locate(self, name: str) -> None:
        return None

    def real(self) -> list[str]:
        self.asked.set()
        self.may_answer.wait(PATIENCE_S)
        return [str(self.folder)]


async def test_a_fetch_that_is_cancelled_while_it_begins_leaves_no_lock(tmp_path: Path) -> None:
    roots = SlowRoots(tmp_path)
    library = SimpleNamespace(roots=roots, locks=DownloadLocks(lambda: cast(Roots, roots)))
    weights = VersionWeights(cast(Downloads, SimpleNamespace(library=library)))
    fetching = asyncio.ensure_future(weights.found(cast(Model, None), "org/name", None, set()))
    await until(roots.asked.is_set)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    roots.may_answer.set()

    def is_free() -> bool:
        try:
            with (tmp_path / FOLDER / FETCHING).open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return False
        return True

    await until(is_free)


def record(folder: Path, *names: str) -> LibraryRecord:
    files = tuple(ModelFile(name, 1) for name in names)
    return LibraryRecord(folder.name, str(folder / names[0]), str(folder.parent), ModelKind.GGUF, Source(), files)


def revision(root: Path, name: str) -> Path:
    """A revision of a repository: links to the same bytes as all others."""
    (root / "blob").write_bytes(b"x")
    folder = root / name
    folder.mkdir()
    for file in ("a.gguf", "mmproj.gguf"):
        (folder / file).symlink_to("../blob")
    return folder


def test_a_file_is_needed_by_its_name_and_by_links_to_it(tmp_path: Path) -> None:
    old = revision(tmp_path, "old")
    (tmp_path / "link").symlink_to(old / "mmproj.gguf")
    (tmp_path / "folder").symlink_to(old)
    ours = record(old, "a.gguf", "mmproj.gguf")
    for used in (old / "mmproj.gguf", tmp_path / "link", tmp_path / "folder" / "mmproj.gguf"):
        assert _is_needed(ours, [], [str(used)])
    assert not _is_needed(ours, [], [str(old / "other.gguf")])


def test_the_same_bytes_in_another_revision_are_no_need_for_this_one(tmp_path: Path) -> None:
    old, new = revision(tmp_path, "old"), revision(tmp_path, "new")
    assert not _is_needed(record(old, "a.gguf", "mmproj.gguf"), [], [str(new / "mmproj.gguf")])


def test_a_file_that_stays_for_another_model_beside_it_is_not_lost(tmp_path: Path) -> None:
    old = revision(tmp_path, "old")
    other = record(old, "b.gguf", "mmproj.gguf")
    assert not _is_needed(record(old, "a.gguf", "mmproj.gguf"), [other], [str(old / "mmproj.gguf")])


def test_an_adapter_that_would_go_with_its_snapshot_is_needed_by_the_model_that_names_it(tmp_path: Path) -> None:
    folder = add_snapshot(tmp_path, "org/name", "c1", {"a.gguf": b"a", "lora.gguf": b"b"})
    path = str(folder / "a.gguf")
    ours = LibraryRecord("name", path, str(tmp_path), ModelKind.GGUF, Source(), (ModelFile("a.gguf", 1),))
    assert _is_needed(ours, [], [str(folder / "lora.gguf")])
    beside = LibraryRecord("b", str(folder / "b.gguf"), str(tmp_path), ModelKind.GGUF, Source(), ())
    assert not _is_needed(ours, [beside], [str(folder / "lora.gguf")]), "the snapshot stays for the other"


def test_a_blob_that_a_link_elsewhere_leads_to_is_needed_if_it_would_go(tmp_path: Path) -> None:
    folder = add_snapshot(tmp_path, "org/name", "c1", {"a.gguf": b"a"})
    path = str(folder / "a.gguf")
    ours = LibraryRecord("name", path, str(tmp_path), ModelKind.GGUF, Source(), (ModelFile("a.gguf", 1),))
    (tmp_path / "mine.gguf").symlink_to((folder / "a.gguf").resolve())
    assert _is_needed(ours, [], [str(tmp_path / "mine.gguf")])
    again = add_snapshot(tmp_path, "org/name", "c2", {"a.gguf": b"a"})
    other = LibraryRecord("b", str(again / "a.gguf"), str(tmp_path), ModelKind.GGUF, Source(), ())
    assert not _is_needed(ours, [other], [str(tmp_path / "mine.gguf")]), "the other revision keeps the blob"


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert not _is_needed(record(revision(tmp_path, "old"), "a.gguf"), [], [str(tmp_path / "loop")])
