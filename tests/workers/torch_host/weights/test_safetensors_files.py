"""Untrusted headers: complete files are read, all others are refused by name and number."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from greenroom.workers.torch_host.failures import BadModel
from greenroom.workers.torch_host.weights.safetensors_files import (
    HEADER_MAX_BYTES,
    files_of,
    find_tensors,
    read_header,
)


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_are_found_with_their_place_in_the_file(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry([2], 16, 24), "a": entry([2, 2], 0, 16)}
    path = write(tmp_path / "model.safetensors", header, bytes(24))
    first, second = read_header(path)
    base = path.stat().st_size - 24
    assert (first.name, first.shape, first.offset, first.size) == ("a", (2, 2), base, 16)
    assert (second.name, second.offset, second.size) == ("b", base + 16, 8)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry([4], 0, 16)}, bytes(15), "is cut off: tensor a ends at byte"),
        ({"a": entry([4], 0, 12)}, bytes(12), "of shape [4], which are 16 bytes; its place has 12"),
        ({"a": entry([2**40, 2**40], 0, 16)}, bytes(16), "its place has 16"),
        ({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24), "tensors a and b lie over each other"),
        ({"a": entry([-1], 0, 4)}, bytes(4), "has a shape that is none"),
        ({"a": entry([True], 0, 4)}, bytes(4), "has a shape that is none"),
        ({"a": entry([1] * 17, 0, 4)}, bytes(4), "has a shape that is none"),
        ({"a": entry([0], 8, 4)}, bytes(8), "has a place that is none"),
        ({"a": entry([1], -4, 0)}, bytes(8), "has a place that is none"),
        ({"a": entry([1], 0, 4, "F31")}, bytes(4), "unknown kind 'F31'"),
        ({"a": entry([1], 0, 4, ["F32"])}, bytes(4), "unknown kind"),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "lacks its kind, shape or place"),
        ({"a": "F32"}, bytes(4), "lacks its kind, shape or place"),
        ([1, 2], b"", "not a table of tensors"),
        (b'{"a": ', b"", "is not JSON"),
        (b"[" * 100_000, b"", "is not JSON"),
        (b'{"a": 1, "a": 2}', b"", "'a' is there twice"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(BadModel) as refused:
        read_header(path)
    assert says in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("length", [0, 1, 10_000, HEADER_MAX_BYTES + 1, 2**63, 2**64 - 1])
def test_a_length_that_cannot_be_is_refused_without_reading_it(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", {"a": entry([1], 0, 4)}, bytes(4), length)
    with pytest.raises(BadModel, match="its header would have"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0"])
def test_a_file_shorter_than_its_first_number_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    said = rf"only a part of one: it has {len(content)} bytes, fewer than its first number\.$"
    with pytest.raises(BadModel, match=said):
        find_tensors(tmp_path)


def test_a_pipe_in_place_of_a_model_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match="is not a file"):
        find_tensors(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with pytest.raises(BadModel, match=r"one\.safetensors cannot be opened: No such file"):
        find_tensors(tmp_path)


def test_shards_are_found_through_links_of_a_hubs_cache(tmp_path: Path) -> None:
    blob = write(tmp_path / "blob", {"a": entry([1], 0, 4)}, bytes(4))
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "one.safetensors").symlink_to(blob)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert set(find_tensors(folder)) == {"a"}
    assert files_of(folder) == [folder / "one.safetensors"]


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "a/../../one", "", ".", "one\0two"])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(tmp_path / "one.safetensors", {"a": entry([1], 0, 4)}, bytes(4))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(BadModel, match="not inside the model's folder"):
        find_tensors(folder)


def test_an_index_that_names_a_tensor_no_shard_has_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"a": entry([1], 0, 4)}, bytes(4))
    placed = {"a": "one.safetensors", "b": "one.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(BadModel, match=r"says that b is in one\.safetensors, where it is not"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BadModel, match=r"index of safetensors files|names no files"):
        files_of(tmp_path)
