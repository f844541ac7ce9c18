"""Safetensors headers: the sizes of good files, and one error for everything else, in bounded memory."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.engines.estimates import hf_folder
from greenroom.engines.estimates.gguf_header import BadModelFile
from greenroom.engines.estimates.hf_folder import read_all, read_safetensors

# The file is written anew for each example, so it may be shared by them.
HOSTILE = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensor(begin: int, end: int, dtype: str = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 2], "data_offsets": [begin, end]}


def content(tensors: dict[str, Any], data: int) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + bytes(data)


def write(path: Path, tensors: dict[str, Any], data: int) -> Path:
    path.write_bytes(content(tensors, data))
    return path


def test_bytes_are_summed_by_kind(tmp_path: Path) -> None:
    tensors = {
        "__metadata__": {"format": "pt"},
        "a": tensor(0, 100),
        "b": tensor(100, 160, "F32"),
        "c": tensor(160, 200),
    }
    found = read_safetensors(write(tmp_path / "m.safetensors", tensors, 200))
    assert found.tensor_bytes == 200 and found.by_dtype == {"BF16": 140, "F32": 60} and found.dtype == "BF16"


def test_files_of_one_model_are_summed(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{number}.safetensors", {"a": tensor(0, 10)}, 10) for number in range(3)]
    assert read_all(files).tensor_bytes == 30
    files[1].write_bytes(b"")
    with pytest.raises(BadModelFile, match=r"1\.safetensors"):
        read_all(files)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"", "ends inside"),
        (b"\x01\x02", "ends inside"),
        (struct.pack("<Q", 2**63), "header would have"),
        (struct.pack("<Q", 100) + b"{}", "header would have"),
        (struct.pack("<Q", 2) + b"[]", "not understood"),
        (struct.pack("<Q", 4) + b"nope", "not understood"),
        (content({"a": 5}, 0), "not understood"),
        (content({"a": {"data_offsets": [0, "x"]}}, 0), "not understood"),
        (content({"a": {"data_offsets": [0, 1, 2]}}, 3), "not understood"),
        (content({"a": tensor(0, 100)}, 99), "beyond its end"),
        (content({"a": tensor(-5, 5)}, 99), "beyond its end"),
        (content({"a": tensor(50, 10)}, 99), "beyond its end"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "not understood"),
    ],
)
def test_bad_files_are_refused_with_the_reason(tmp_path: Path, bad: bytes, reason: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(bad)
    with pytest.raises(BadModelFile, match=reason):
        read_safetensors(path)


def test_a_header_longer_than_any_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", hf_folder.HEADER_MAX_BYTES + 1))
        # The bytes it speaks of are there, at no cost on the disk.
        file.truncate(2**33)
    with pytest.raises(BadModelFile, match="header would have"):
        read_safetensors(path)


def test_what_is_no_file_is_refused_without_hanging(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, tmp_path / "missing", Path("bad\0name"), Path("/dev/zero")):
        with pytest.raises(BadModelFile):
            read_safetensors(path)


TIMES = itertools.count(1)


@HOSTILE
@given(header=st.binary(max_size=300), length=st.integers(0, 400))
def test_any_bytes_give_a_header_or_the_one_error(tmp_path: Path, header: bytes, length: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", length) + header)
    # Known by its time as well as its size: other bytes of the same size are another file.
    os.utime(path, ns=(next(TIMES), next(TIMES)))
    with contextlib.suppress(BadModelFile):
        assert read_safetensors(path).tensor_bytes >= 0
