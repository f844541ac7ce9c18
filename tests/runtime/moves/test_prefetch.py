"""Files of models that are waited for are read into the page cache, and only as long as that makes sense."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from greenroom.core.model import RequestId, Tier
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.moves.admission import MIB, FileRange, Prefetch, pieces_of, read_ahead
from greenroom.runtime.observer import Observer
from tests.api.management_rig import FakeGateway, model
from tests.waiting import PATIENCE_S, until

PLENTY_MIB = 1_000_000


# Temporary files may lie in memory, whatever one does.
READ = partial(read_ahead, is_cached=lambda descriptor, piece: False)


def cold_file(path: Path, mib: int) -> Path:
    """A file whose pages were written to disk and dropped from memory."""
    path.write_bytes(os.urandom(mib * MIB))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return path


def cached_mib(path: Path) -> int:
    """How many of its MiB can be had without the disk, by one page of each."""
    descriptor, found = os.open(path, os.O_RDONLY), 0
    for offset in range(0, path.stat().st_size, MIB):
        try:
            found += os.preadv(descriptor, [bytearray(1)], offset + MIB // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
    os.close(descriptor)
    return found


class Rig:
    """A gateway with two GGUF models and one of our own workers, and what was told of reading."""

    def __init__(
        self,
        folder: Path,
        available_mib: int = PLENTY_MIB,
        read: Callable[[FileRange], int] = READ,
        piece_max_s: float = 60.0,
    ) -> None:
        self.files = {name: cold_file(folder / f"{name}.gguf", 6) for name in ("a", "b")}
        models = {name: model(engine="llamacpp", path=str(path), cmd=None) for name, path in self.files.items()}
        models["hosted"] = model(engine="transformers", path=str(folder), cmd=None)
        self.gateway = FakeGateway(models)
        self.told: list[tuple[str, int]] = []
        self.prefetch = Prefetch(
            self.gateway.state,
            lambda: available_mib,
            cast(Observer, SimpleNamespace(prefetched=lambda name, size, took_s: self.told.append((name, size)))),
            read=read,
            piece_bytes=MIB,
            piece_max_s=piece_max_s,
        )

    def entry(self, name: str) -> Entry:
        found = self.gateway.catalog.find(name)
        assert found is not None
        return found

    def wait_for(self, name: str, number: int = 1) -> None:
        self.gateway.add_waiter(name, number)
        self.prefetch.waits(self.entry(name))

    async def done(self) -> None:
        await until(nothing_is_read)


def nothing_is_read() -> bool:
    return not any(task.get_name() == "prefetch" for task in asyncio.all_tasks())


async def test_a_model_that_is_waited_for_is_read_ahead(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.wait_for("a")
    await rig.done()
    assert cached_mib(rig.files["a"]) == 6
    assert rig.told == [("a", 6 * MIB)]


async def test_models_that_are_waited_for_are_read_one_after_the_other(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.wait_for("a", 1)
    rig.wait_for("b", 2)
    rig.wait_for("a", 3)
    await rig.done()
    assert [name for name, _ in rig.told] == ["a", "b"]
    assert cached_mib(rig.files["b"]) == 6


def held(
    read: Callable[[FileRange], int], until_piece: int
) -> tuple[Callable[[FileRange], int], threading.Event, list[FileRange]]:
    """The same reading, which stops before that piece until it is let go on."""
    go_on, seen = threading.Event(), list[FileRange]()

    def reading(piece: FileRange) -> int:
        if len(seen) == until_piece:
            go_on.wait(20)
        seen.append(piece)
        return read(piece)

    return reading, go_on, seen


@pytest.mark.parametrize("ends", ["nobody waits", "it is ready", "shutdown"])
async def test_reading_stops_as_soon_as_it_makes_no_more_sense(ends: str, tmp_path: Path) -> None:
    reading, go_on, seen = held(read_ahead, 2)
    rig = Rig(tmp_path, read=reading)
    rig.wait_for("a")
    await until(lambda: len(seen) == 2)
    if ends == "nobody waits":
        rig.gateway.state.waitlist.remove(RequestId("r-1"), rig.gateway.state.accounts)
    elif ends == "it is ready":
        rig.gateway.add_slot("a", Tier.READY)
    else:
        rig.prefetch.close()
    go_on.set()
    await rig.done()
    assert len(seen) <= 3


async def test_no_more_than_half_of_the_memory_that_can_be_had_is_used(tmp_path: Path) -> None:
    reading, _, seen = held(read_ahead, 99)
    rig = Rig(tmp_path, available_mib=7, read=reading)
    rig.wait_for("a")
    await rig.done()
    assert [piece.offset // MIB for piece in seen] == [0, 1, 2]


async def test_a_model_that_is_ready_hosted_or_not_waited_for_is_not_read_ahead(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.gateway.add_slot("a", Tier.READY)
    rig.wait_for("a", 1)
    rig.wait_for("hosted", 2)
    rig.prefetch.waits(rig.entry("b"))
    assert nothing_is_read()


async def test_a_disk_that_hangs_is_given_up_and_others_are_still_read(tmp_path: Path) -> None:
    let_go = threading.Event()
    rig = Rig(
        tmp_path,
        read=lambda piece: let_go.wait(PATIENCE_S) if piece.file.name == "a.gguf" else READ(piece),
        piece_max_s=0.2,
    )
    rig.wait_for("a", 1)
    rig.wait_for("b", 2)
    await rig.done()

    async def is_read() -> bool:
        # The limit is short for a good read, too, where the machine is busy.
        if not rig.told:
            rig.prefetch.waits(rig.entry("b"))
            await rig.done()
        return bool(rig.told)

    await until(is_read)
    assert not let_go.is_set()
    let_go.set()
    assert [name for name, _ in rig.told] == ["b"]


def test_what_is_in_memory_already_is_not_read_again(tmp_path: Path) -> None:
    file = cold_file(tmp_path / "m", 2)
    file.read_bytes()
    assert read_ahead(FileRange(file, 0, 2 * MIB)) == 0


def test_pieces_cover_every_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * (2 * MIB + 5))
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    files = [tmp_path / name for name in ("one", "empty", "fifo", "missing", ".")]
    assert [(piece.file.name, piece.offset, piece.length) for piece in pieces_of(files, MIB)] == [
        ("one", 0, MIB),
        ("one", MIB, MIB),
        ("one", 2 * MIB, 5),
    ]


@pytest.mark.parametrize("name", ["missing", ".", "fifo"])
def test_what_cannot_be_read_costs_nothing(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert read_ahead(FileRange(tmp_path / name, 0, MIB)) == 0


def test_a_file_that_became_shorter_ends_where_it_ends(tmp_path: Path) -> None:
    file = cold_file(tmp_path / "m", 1)
    assert read_ahead(FileRange(file, MIB // 2, MIB)) == MIB // 2
