"""Looking again finds what looking anew would find, and reads no more than it must."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.library.folders import FolderTree
from greenroom.library.library import Library, look_once
from greenroom.library.models import ModelFinder
from greenroom.library.naming import FoundRoot, inventory_of
from greenroom.library.records import LibraryRecord, told
from greenroom.library.roots import Roots
from tests.full_disk import descriptors
from tests.library.hub_cache import add_snapshot, put
from tests.models import tiny, tiny_hf

SEEDS = range(12)
STEPS = 25


class Disk:
    """A tree that is changed at random. Each change gives its folder a time of its own, however coarse the clock is."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random = root, random.Random(seed)
        self._models = [tiny("a"), tiny("b")]
        self._times = iter(range(1_000_000_000, 2_000_000_000))
        self._touch(root)

    def _touch(self, folder: Path) -> None:
        moment = next(self._times)
        os.utime(folder, (moment, moment))

    def _folders(self) -> list[Path]:
        inside = (path for path in self.root.rglob("*") if path.is_dir() and not path.is_symlink())
        return [self.root, *sorted(path for path in inside if "models--" not in str(path))]

    def _files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*.gguf") if not path.is_symlink())

    def step(self) -> None:
        kinds = (self.add_file, self.add_file, self.add_folder, self.add_model_folder, self.drop_file, self.drop_folder)
        self.random.choice((*kinds, self.rename, self.add_repository))()

    def _name(self) -> str:
        return self.random.choice(("a", "b", "c", "d"))

    def add_file(self) -> None:
        folder = self.random.choice(self._folders())
        name = self._name() + self.random.choice((".gguf", ".gguf", ".gguf.part", "-mmproj.gguf", ".txt"))
        shutil.copyfile(self.random.choice(self._models), folder / name)
        self._age(folder / name)
        self._touch(folder)

    def add_folder(self) -> None:
        folder = self.random.choice(self._folders())
        path = folder / self._name()
        path.mkdir(exist_ok=True)
        self._touch(path)
        self._touch(folder)

    def add_model_folder(self) -> None:
        folder = self.random.choice(self._folders())
        if not (path := folder / f"hf-{self._name()}").exists():
            shutil.copytree(tiny_hf("a"), path)
            self._touch(path)
            self._touch(folder)

    def add_repository(self) -> None:
        commit = self.random.choice(("c1", "c2"))
        folder = self.root / "models--org--name" / "snapshots" / commit
        if not folder.exists():
            add_snapshot(self.root, "org/name", commit, {"m-Q8_0.gguf": tiny("a")})
        else:
            shutil.rmtree(folder)
        for path in (*(self.root / "models--org--name").rglob("*"), self.root / "models--org--name", self.root):
            if path.is_dir():
                self._touch(path)

    def drop_file(self) -> None:
        for path in self._files()[:1]:
            path.unlink()
            self._touch(path.parent)

    def drop_folder(self) -> None:
        if len(folders := self._folders()) > 3:
            path = self.random.choice(folders[1:])
            shutil.rmtree(path)
            self._touch(path.parent)

    def rename(self) -> None:
        if files := self._files():
            path, folder = self.random.choice(files), self.random.choice(self._folders())
            path.rename(folder / f"{self._name()}-Q4_K_M.gguf")
            self._touch(path.parent)
            self._touch(folder)

    def overwrite(self) -> None:
        """As a copy over a file does it: the folder shows nothing of it, and the next look at all files does."""
        if files := self._files():
            path = self.random.choice(files)
            path.write_bytes(self._models[0].read_bytes()[: self.random.choice((100, None))])
            self._age(path)

    def _age(self, path: Path) -> None:
        moment = next(self._times)
        os.utime(path, (moment, moment))


@pytest.mark.parametrize("seed", SEEDS)
def test_looking_again_finds_what_looking_anew_finds(seed: int, tmp_path: Path) -> None:
    disk = Disk(tmp_path, seed)
    # Long after the last change, so that nothing is listed again for being new; all files are looked at in each look
    # that comes half a minute after the last.
    now = [3_000_000_000.0]
    tree, finder = FolderTree(str(tmp_path), frozenset, lambda: now[0]), ModelFinder(on_gpu=False)
    for _ in range(STEPS):
        change = disk.random.choice((disk.step, disk.step, disk.overwrite))
        change()
        now[0] += 31.0 if change == disk.overwrite or disk.random.random() < 0.2 else 1.0
        top = tree.look()
        assert top is not None
        seen = inventory_of([FoundRoot(str(tmp_path), tree.real, finder.find(top).models)]).records
        anew = {record.id: record for record in look_once(Roots([str(tmp_path)]))[0]}
        assert dict(_plain(seen.values())) == dict(_plain(anew.values()))


def _plain(records: object) -> Iterator[tuple[str, object]]:
    assert isinstance(records, type({}.values()))
    for record in records:
        assert isinstance(record, LibraryRecord)
        yield record.id, told(record, with_paths=True)


async def test_a_folder_that_cannot_be_listed_for_now_keeps_its_models(tmp_path: Path) -> None:
    put(tmp_path / "shelf" / "a.gguf", tiny("a"))
    library = Library(Roots([str(tmp_path)]), None)
    await library.refresh()
    put(tmp_path / "shelf" / "b.gguf", tiny("b"))
    with descriptors(0):
        await library.refresh()
        assert [one.id for one in library.records] == ["shelf/a.gguf"]
    await library.refresh()
    assert [one.id for one in library.records] == ["shelf/a.gguf", "shelf/b.gguf"]
    shutil.rmtree(tmp_path / "shelf")
    await library.refresh()
    assert not library.records


def test_what_cannot_be_read_for_now_is_read_later(tmp_path: Path) -> None:
    put(tmp_path / "a.gguf", tiny("a"))
    add_snapshot(tmp_path, "org/name", "c1", {"m.gguf": tiny("b")})
    add_snapshot(tmp_path, "org/name", "c2", {"m.gguf": tiny("a")}, refs=())
    tree, finder = FolderTree(str(tmp_path), frozenset), ModelFinder(on_gpu=False)
    top = tree.look()
    assert top is not None
    # Without its ref the newest snapshot would count, which is another.
    with descriptors(0), pytest.raises(OSError, match="Too many open files"):
        finder.find(top)
    shutil.rmtree(tmp_path / "models--org--name")
    top = tree.look()
    assert top is not None
    with descriptors(0):
        found = finder.find(top)
    assert found.error is not None and not found.models
    assert [one.path for one in finder.find(top).models] == [str(tmp_path / "a.gguf")]


@pytest.mark.slow
async def test_a_thousand_models(tmp_path: Path) -> None:
    root, model = tmp_path / "root", tiny("a")
    for number in range(1_000):
        folder = root / f"org{number % 10}" / f"name{number % 200}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            os.link(model, folder / f"m{number}.gguf")
        except OSError:
            put(folder / f"m{number}.gguf", model)
    for path, _, _ in os.walk(root):
        os.utime(path, (1_000_000, 1_000_000))
    os.utime(model, (1_000_000, 1_000_000))
    library = Library(Roots([str(root)]), None)
    await library.refresh()
    assert len(library.records) == 1_000
    folders = 1 + 10 + 200
    assert library.work_done == (folders, 1_000)
    # Nothing is listed, and nothing is read.
    await library.refresh()
    assert library.work_done == (folders, 1_000)
    put(root / "org3" / "name3" / "new.gguf", tiny("b"))
    await library.refresh()
    assert library.find("org3/name3/new.gguf") is not None
    assert library.work_done == (folders + 1, 1_001)
    began = time.process_time()
    assert len(json.dumps([told(record, with_paths=True) for record in library.records])) > 100_000
    # A twentieth of a second is what the whole answer may take; a busy machine gets ten times as long.
    assert time.process_time() - began < 0.5
