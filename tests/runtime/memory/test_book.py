"""Needs are remembered as they were measured, outlive restarts, and a broken file never stops the gateway."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.core.model import Need
from greenroom.runtime.memory.book import FILE_NAME, BookKey, Measured, MemoryNeedsStore
from tests.full_disk import full_disk

KEY = BookKey("file", "llamacpp 1", "arguments", "NVIDIA H200")
OTHER = BookKey("file", "llamacpp 1", "arguments", "NVIDIA L4")


class Warnings(list[str]):
    def __call__(self, what: str, error: str) -> None:
        self.append(f"{what}: {error}")


def open_book(folder: Path, warnings: Warnings | None = None) -> MemoryNeedsStore:
    return MemoryNeedsStore(folder, Warnings() if warnings is None else warnings)


def test_a_figure_is_the_peak_itself_and_known_after_a_restart(tmp_path: Path) -> None:
    book = open_book(tmp_path)
    book.note(KEY, Measured(1000))
    book.note(KEY, Measured(1234, 50))
    book.note(KEY, Measured(900, 20))
    assert book.recall(KEY) == Measured(1234, 50)
    book.writing()()
    later = open_book(tmp_path)
    assert later.recall(KEY) == Measured(1234, 50) and later.recall(OTHER) is None
    assert os.listdir(tmp_path) == [FILE_NAME]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("field", ["file", "engine", "arguments", "gpu"])
def test_anything_else_about_it_is_another_figure(tmp_path: Path, field: str) -> None:
    book = open_book(tmp_path)
    book.note(KEY, Measured(1000))
    assert book.recall(replace(KEY, **{field: "another"})) is None


def test_running_out_of_memory_raises_the_figure_and_outlives_a_restart(tmp_path: Path) -> None:
    book = open_book(tmp_path)
    book.note_no_memory(KEY, Need(1500, 10))
    book.note_no_memory(KEY, Need(1200, 20))
    book.writing()()
    assert open_book(tmp_path).recall(KEY) == Measured(raised=Need(1500, 20), raises=2)


def test_one_raise_is_forgiven_when_a_load_was_measured_and_two_are_not(tmp_path: Path) -> None:
    book = open_book(tmp_path)
    book.note_no_memory(KEY, Need(1500))
    # Nothing seen is nothing known.
    book.note(KEY, Measured())
    assert (book.recall(KEY) or Measured()).raised == Need(1500)
    book.note(KEY, Measured(1200))
    # What was declared too low stays raised to what was really taken.
    assert (book.recall(KEY) or Measured()).raised == Need(1200)
    book.note_no_memory(KEY, Need(1600))
    book.note(KEY, Measured(1200))
    assert book.recall(KEY) == Measured(1200, None, Need(1600), 2)


def test_only_so_many_figures_are_remembered(tmp_path: Path) -> None:
    book = MemoryNeedsStore(tmp_path, Warnings(), figures_max=1)
    book.note(KEY, Measured(1))
    book.note(OTHER, Measured(2))
    assert book.recall(KEY) is None and book.recall(OTHER) == Measured(2)


def test_a_book_without_a_folder_is_forgotten() -> None:
    book = MemoryNeedsStore(None, Warnings())
    book.note(KEY, Measured(1))
    book.writing()()
    assert book.recall(KEY) == Measured(1)


def test_nothing_is_written_while_nothing_is_new(tmp_path: Path) -> None:
    book = open_book(tmp_path)
    book.note(KEY, Measured(1))
    book.writing()()
    (tmp_path / FILE_NAME).unlink()
    book.note(KEY, Measured(1))
    book.writing()()
    assert os.listdir(tmp_path) == []


def figure(**changed: object) -> str:
    said = {"file": "f", "engine": "e", "arguments": "a", "gpu": "g", "gpu_mib": 1, "host_mib": None}
    return json.dumps({"version": 1, "needs": [{**said, "raised": [0, 0], "raises": 0, **changed}]})


def test_what_the_tests_below_break_is_whole_before(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(figure())
    assert open_book(tmp_path).recall(BookKey("f", "e", "a", "g")) == Measured(1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "half a fi", "[]", "null", '{"version": 2, "needs": []}', '{"version": 1}', '{"version": 1, "needs": 5}'),
        *('{"version": 1, "needs": [{}]}', '{"version": 1, "needs": ["x"]}', "[" * 100_000),
        *(figure(gpu_mib=-1), figure(gpu_mib=1.5), figure(gpu_mib=True), figure(gpu_mib="1"), figure(gpu_mib=2**40)),
        *(figure(host_mib=-1), figure(gpu=5), figure(gpu="x" * 600), figure(raised=[1]), figure(raised=None)),
        *(figure(raises="often"), figure()[:-20]),
    ],
)
def test_a_torn_or_foreign_file_is_ignored_with_a_warning_and_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    warnings = Warnings()
    book = open_book(tmp_path, warnings)
    assert book.recall(KEY) is None and len(warnings) == 1 and "measured anew" in warnings[0]
    book.note(KEY, Measured(7))
    book.writing()()
    assert open_book(tmp_path).recall(KEY) == Measured(7)


def test_a_file_that_is_not_text_or_no_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"\xff\xfe\x00")
    warnings = Warnings()
    assert open_book(tmp_path, warnings).recall(KEY) is None
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    book = open_book(tmp_path, warnings)
    book.note(KEY, Measured(1))
    with pytest.raises(IsADirectoryError):
        book.writing()()
    assert len(warnings) == 2 and book.recall(KEY) == Measured(1)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    book = open_book(tmp_path)
    book.note(KEY, Measured(1))
    book.writing()()
    book.note(KEY, Measured(2))
    with full_disk(10), pytest.raises(OSError, match="File too large"):
        book.writing()()
    assert open_book(tmp_path).recall(KEY) == Measured(1)
    assert os.listdir(tmp_path) == [FILE_NAME]
    # Once there is room again, it is written.
    book.writing()()
    assert open_book(tmp_path).recall(KEY) == Measured(2)
