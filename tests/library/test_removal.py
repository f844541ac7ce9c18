"""What is deleted with a model, what stays, and how much comes free."""

import asyncio
import os
from pathlib import Path

import pytest

from greenroom.errors import ModelNotFound, RemovalFailed
from greenroom.library.library import Library
from greenroom.library.records import LibraryRecord, ModelFile, ModelKind, Source
from greenroom.library.removal import remove_files
from greenroom.library.roots import Roots
from tests.library.hub_cache import add_snapshot, folder_files, put, repository
from tests.models import tiny, tiny_hf, tiny_projector


async def library(*roots: Path) -> Library:
    shelf = Library(Roots(map(str, roots)), None)
    await shelf.refresh()
    return shelf


async def removed(shelf: Library, id: str) -> int:
    record = shelf.find(id)
    assert record is not None and record.id == id
    return await shelf.remove(record)


def left(folder: Path) -> list[str]:
    """Everything below it, links as they are."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


async def test_plain_model_goes_with_its_folder_and_leaves_others(tmp_path: Path) -> None:
    put(tmp_path / "org" / "a", tiny_hf("a"))
    put(tmp_path / "org" / "a" / "notes" / "readme.md", Path(__file__))
    put(tmp_path / "b.gguf", tiny("b"))
    shelf = await library(tmp_path)
    record = shelf.find("org/a")
    assert record is not None
    assert await removed(shelf, "org/a") == record.bytes
    assert left(tmp_path) == ["b.gguf"]
    assert [one.id for one in shelf.records] == ["b.gguf"]
    await removed(shelf, "b.gguf")
    assert tmp_path.is_dir(), "a root stays"


async def test_projector_stays_until_the_last_model_beside_it_goes(tmp_path: Path) -> None:
    put(tmp_path / "m" / "a.gguf", tiny("a"))
    put(tmp_path / "m" / "b.gguf", tiny("b"))
    put(tmp_path / "m" / "mmproj.gguf", tiny_projector())
    shelf = await library(tmp_path)
    await removed(shelf, "m/a.gguf")
    assert left(tmp_path) == ["m", "m/b.gguf", "m/mmproj.gguf"]
    await removed(shelf, "m/b.gguf")
    assert left(tmp_path) == []


async def test_model_inside_the_folder_of_another_stays(tmp_path: Path) -> None:
    put(tmp_path / "a", tiny_hf("a"))
    put(tmp_path / "a" / "checkpoint", tiny_hf("b"))
    shelf = await library(tmp_path)
    await removed(shelf, "a")
    assert {one.id for one in shelf.records} == {"a/checkpoint"}


async def test_repository_goes_as_a_whole(tmp_path: Path) -> None:
    add_snapshot(
        tmp_path, "org/name", "c1", {**folder_files(tiny_hf("a")), "README.md": b"read me"}, refs=("main", "v1")
    )
    marker = repository(tmp_path, "org/name") / ".no_exist" / "c1" / "chat_template.json"
    marker.parent.mkdir(parents=True)
    marker.touch()
    blobs = repository(tmp_path, "org/name") / "blobs"
    size = sum(blob.stat().st_size for blob in blobs.iterdir())
    shelf = await library(tmp_path)
    assert await removed(shelf, "org/name") == size
    assert left(tmp_path) == []


async def test_one_of_several_models_goes_and_the_snapshot_stays(tmp_path: Path) -> None:
    files: dict[str, Path | bytes] = {"x-Q4_K_M.gguf": tiny("a"), "x-Q8_0.gguf": tiny("b"), "README.md": b"read me"}
    folder = add_snapshot(tmp_path, "org/name", "c1", files)
    shelf = await library(tmp_path)
    assert await removed(shelf, "org/name:Q8_0") == tiny("b").stat().st_size
    assert left(folder) == ["README.md", "x-Q4_K_M.gguf"]
    assert len(list((repository(tmp_path, "org/name") / "blobs").iterdir())) == 2
    # It is the only one now.
    await removed(shelf, "org/name")
    assert left(tmp_path) == []


async def test_blobs_that_another_snapshot_needs_stay(tmp_path: Path) -> None:
    old = folder_files(tiny_hf("a"))
    add_snapshot(tmp_path, "org/name", "c1", old, refs=("v1",))
    add_snapshot(tmp_path, "org/name", "c2", {**old, "README.md": b"new"}, refs=("main",))
    shelf = await library(tmp_path)
    assert await removed(shelf, "org/name") == len(b"new")
    assert [one.source.commit for one in shelf.records] == ["c1"]
    assert not (repository(tmp_path, "org/name") / "refs" / "main").exists()
    # A snapshot that nothing names keeps its blobs, too.
    (repository(tmp_path, "org/name") / "refs" / "v1").unlink()
    add_snapshot(tmp_path, "org/name", "c3", old, refs=("main",))
    await shelf.refresh()
    assert await removed(shelf, "org/name") == 0
    await shelf.refresh()
    assert [one.source.commit for one in shelf.records] == ["c1"]


async def test_download_under_way_keeps_its_part(tmp_path: Path) -> None:
    add_snapshot(tmp_path, "org/name", "c1", folder_files(tiny_hf("a")))
    part = repository(tmp_path, "org/name") / "blobs" / "abc.incomplete"
    part.write_bytes(b"half")
    await removed(await library(tmp_path), "org/name")
    assert part.read_bytes() == b"half"


async def test_links_are_never_followed_out(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(outside / "precious" / "file", Path(__file__))
    folder = add_snapshot(root, "org/name", "c1", folder_files(tiny_hf("a")))
    (folder / "link").symlink_to(outside / "precious" / "file")
    (folder / "folder").symlink_to(outside / "precious")
    (folder / "fake").symlink_to(outside / "blobs" / "file")
    put(outside / "blobs" / "file", Path(__file__))
    (repository(root, "org/name") / "refs" / "out").symlink_to(outside / "precious")
    await removed(await library(root), "org/name")
    assert left(outside) == ["blobs", "blobs/file", "precious", "precious/file"]


def test_folder_that_became_a_link_is_not_entered(tmp_path: Path) -> None:
    """The tree was changed between the look and the removal."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(outside / "m.gguf", tiny("a"))
    root.mkdir()
    (root / "folder").symlink_to(outside)
    for path in (root / "folder" / "m.gguf", root / ".." / "outside" / "m.gguf"):
        record = LibraryRecord("m", str(path), str(root), ModelKind.GGUF, Source(), (ModelFile("m.gguf", 1),))
        with pytest.raises(OSError):
            remove_files(record, ())
    assert (outside / "m.gguf").exists()


async def test_hard_link_frees_nothing(tmp_path: Path) -> None:
    put(tmp_path / "a.gguf", tiny("a"))
    os.link(tmp_path / "a.gguf", tmp_path / "keep.bin")
    assert await removed(await library(tmp_path), "a.gguf") == 0
    assert left(tmp_path) == ["keep.bin"]


async def test_model_that_is_gone_already_is_not_found(tmp_path: Path) -> None:
    put(tmp_path / "a.gguf", tiny("a"))
    shelf = await library(tmp_path)
    record = shelf.records[0]
    told = await asyncio.gather(*(shelf.remove(record) for _ in range(3)), return_exceptions=True)
    assert sorted(type(one).__name__ for one in told) == ["ModelNotFound", "ModelNotFound", "int"]
    put(tmp_path / "b.gguf", tiny("b"))
    await shelf.refresh()
    (tmp_path / "b.gguf").unlink()
    with pytest.raises(ModelNotFound):
        await removed(shelf, "b.gguf")


async def test_failure_is_told_and_the_model_stays(tmp_path: Path) -> None:
    """A file that became a folder cannot be unlinked, even by root."""
    put(tmp_path / "a.gguf", tiny("a"))
    shelf = await library(tmp_path)
    (tmp_path / "a.gguf").unlink()
    (tmp_path / "a.gguf").mkdir()
    with pytest.raises(RemovalFailed) as told:
        await removed(shelf, "a.gguf")
    assert str(tmp_path) not in told.value.public
