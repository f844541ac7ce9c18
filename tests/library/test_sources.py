"""Where models in plain folders came from: what is known since they were fetched."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from greenroom.library.library import NOTED_S, Library
from greenroom.library.records import Source
from greenroom.library.roots import Roots
from tests.library.hub_cache import add_snapshot, put
from tests.models import tiny

SOURCE = Source("org/name", "c1")


async def library(root: Path, state: Path | None = None) -> Library:
    shelf = Library(Roots([str(root)]), state)
    await shelf.refresh()
    return shelf


async def fetched(shelf: Library, path: Path, source: Source = SOURCE) -> str:
    """A file has come from elsewhere. Returns its hash."""
    put(path, tiny("a"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    shelf.fetched({str(path): (path.stat().st_size, digest)}, source)
    await shelf.refresh()
    return digest


async def test_model_in_a_folder_is_known_by_its_source(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    state.mkdir()
    shelf = await library(root, state)
    digest = await fetched(shelf, root / "mine" / "m-Q8_0.gguf")
    await shelf.close()
    for known in (shelf, await library(root, state)):
        record = known.find("org/name")
        assert record is not None and record == known.find("org/name:Q8_0")
        assert (record.id, record.source, record.files[0].sha256) == ("mine/m-Q8_0.gguf", SOURCE, digest)


async def test_what_was_fetched_and_is_of_no_model_is_forgotten(tmp_path: Path) -> None:
    root, state, now = tmp_path / "root", tmp_path / "state", [time.time() + 60]
    state.mkdir()
    shelf = Library(Roots([str(root)]), state, clock=lambda: now[0])
    await fetched(shelf, root / "mine" / "m-Q8_0.gguf")
    shelf.fetched({str(root / "mine" / f"{number}.json"): (2, None) for number in range(1_000)}, SOURCE)
    now[0] += 1
    await shelf.close()
    assert (state / "library.json").read_text().count(".json") == 1_000, "a look may be under way that found no model"
    now[0] += NOTED_S
    await shelf.close()
    assert ".json" not in (state / "library.json").read_text()
    record = (await library(root, state)).find("mine/m-Q8_0.gguf")
    assert record is not None and record.source == SOURCE


async def test_file_that_was_replaced_is_not_what_was_fetched(tmp_path: Path) -> None:
    shelf = await library(tmp_path)
    await fetched(shelf, tmp_path / "m.gguf", Source(url="https://host/m.gguf"))
    assert shelf.records[0].source.url == "https://host/m.gguf"
    put(tmp_path / "m.gguf", tiny("b"))
    os.utime(tmp_path / "m.gguf", (4_000_000_000, 4_000_000_000))
    await shelf.refresh()
    assert shelf.records[0].source == Source() and shelf.records[0].files[0].sha256 is None


async def test_cache_of_the_hub_goes_before_a_folder_with_the_same_model(tmp_path: Path) -> None:
    shelf = await library(tmp_path)
    await fetched(shelf, tmp_path / "mine" / "m-Q8_0.gguf")
    add_snapshot(tmp_path, "org/name", "c2", {"m-Q8_0.gguf": tiny("a"), "m-Q4_0.gguf": tiny("b")})
    await shelf.refresh()
    for name in ("org/name", "org/name:q8_0"):
        record = shelf.find(name)
        assert record is not None and record.source.commit == "c2"


async def test_folder_with_the_name_of_a_part_of_the_cache_is_a_plain_one(tmp_path: Path) -> None:
    shelf = await library(tmp_path)
    await fetched(shelf, tmp_path / "a" / "snapshots" / "b" / "m.gguf")
    put(tmp_path / "a" / "keep.gguf", tiny("a"))
    await shelf.refresh()
    record = shelf.find("a/snapshots/b/m.gguf")
    assert record is not None
    await shelf.remove(record)
    assert [one.name for one in (tmp_path / "a").iterdir()] == ["keep.gguf"]
