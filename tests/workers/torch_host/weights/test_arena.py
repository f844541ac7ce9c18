"""Files of safetensors, and arenas: tensors in memory that workers share, taken from a device and given back."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.control import resources
from greenroom.workers.torch_host.control.resources import numbers_in, processors_near, settle_near
from greenroom.workers.torch_host.failures import BadModel, OutOfMemory
from greenroom.workers.torch_host.weights.arena import ALIGN_BYTES, HostArena, Layout, TensorPlace, lay_out, view_of
from greenroom.workers.torch_host.weights.device_memory import BorrowedArena, PrivateArena
from greenroom.workers.torch_host.weights.fold import ChunkTable
from greenroom.workers.torch_host.weights.safetensors_files import HEADER_MAX_BYTES, files_of, find_tensors, read_header
from greenroom.workers.torch_host.weights.upload import RATE_UNKNOWN, CopyRate, hooked_modules


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    return lay_out((f"t{number}", torch.empty(shape, device="meta")) for number, shape in enumerate(shapes))


def test_tensors_lie_in_order_and_aligned() -> None:
    layout = layout_of((3, 5), (1,), (200,))
    offsets = [place.offset for place in layout.places.values()]
    assert offsets == [0, ALIGN_BYTES, 2 * ALIGN_BYTES]
    assert layout.bytes == 4 * ALIGN_BYTES


def test_tied_tensors_lie_there_once() -> None:
    shared, other = torch.nn.Parameter(torch.ones(4)), torch.ones(4)
    layout = lay_out([("in", shared), ("out", shared), ("view", shared.detach()), ("other", other)])
    assert layout.places["in"] == layout.places["out"] == layout.places["view"]
    assert layout.places["other"].offset == ALIGN_BYTES
    assert layout.bytes == 2 * ALIGN_BYTES


def test_views_share_the_arenas_memory(descriptor: int) -> None:
    arena = HostArena.create(descriptor, layout_of((4, 4), (2,)), "x", None)
    view_of(arena.tensor, arena.layout.places["t1"]).fill_(7.0)
    assert os.pread(descriptor, 4, ALIGN_BYTES) == torch.tensor(7.0).numpy().tobytes()


def test_a_sealed_arena_is_adopted_by_another_worker(descriptor: int) -> None:
    arena = HostArena.create(descriptor, layout_of((4, 4), (2,)), "these files", None)
    view_of(arena.tensor, arena.layout.places["t0"]).fill_(3.0)
    assert HostArena.adopt(descriptor, "these files", unfolds=True) is None
    arena.seal(ChunkTable(arena.layout.bytes))
    arena.close()
    adopted = HostArena.adopt(os.dup(descriptor), "these files", unfolds=True)
    assert adopted is not None
    assert adopted.layout == arena.layout
    assert torch.equal(view_of(adopted.tensor, adopted.layout.places["t0"]), torch.full((4, 4), 3.0))


def test_the_arena_of_other_files_is_not_adopted(descriptor: int) -> None:
    layout = layout_of((4,))
    HostArena.create(descriptor, layout, "these files", None).seal(ChunkTable(layout.bytes))
    assert HostArena.adopt(descriptor, "those files", unfolds=True) is None


@pytest.mark.parametrize("damage", ["empty", "short", "magic", "length", "json", "place"])
def test_a_damaged_arena_is_not_adopted(descriptor: int, damage: str) -> None:
    arena = HostArena.create(descriptor, layout_of((4,)), "x", None)
    if damage == "place":
        arena.layout = Layout({"t0": TensorPlace("float32", (4,), 8192, 16)}, 512)
    arena.seal(ChunkTable(arena.layout.bytes))
    end = os.fstat(descriptor).st_size
    if damage in ("empty", "short"):
        os.ftruncate(descriptor, 0 if damage == "empty" else end - 3)
    elif damage == "magic":
        os.pwrite(descriptor, b"?", end - 24)
    elif damage == "length":
        os.pwrite(descriptor, b"\xff" * 8, end - 8)
    elif damage == "json":
        os.pwrite(descriptor, b"[", 4096)
    assert HostArena.adopt(descriptor, "x", unfolds=True) is None


def test_an_arena_larger_than_allowed_is_refused_with_both_numbers(descriptor: int) -> None:
    with pytest.raises(OutOfMemory, match="take 4,096 bytes of host memory and 4,095 are allowed"):
        HostArena.create(descriptor, layout_of((1024,)), "x", 4095)
    assert os.fstat(descriptor).st_size == 0


def test_an_arena_larger_than_memory_is_refused_before_it_is_made(descriptor: int) -> None:
    with pytest.raises(OutOfMemory, match="are free"):
        HostArena.create(descriptor, layout_of((2**45,)), "x", None)
    assert os.fstat(descriptor).st_size == 0


def test_an_arena_larger_than_what_the_gateway_says_is_free_is_refused_with_both_numbers(descriptor: int) -> None:
    with pytest.raises(OutOfMemory, match="take 4,096 bytes of host memory and 4,095 are free"):
        HostArena.create(descriptor, layout_of((1024,)), "x", None, 4095)
    assert os.fstat(descriptor).st_size == 0


def test_a_discarded_arena_leaves_nothing_to_its_holder(descriptor: int) -> None:
    arena = HostArena.create(descriptor, layout_of((1024,)), "x", None)
    arena.discard()
    assert os.fstat(descriptor).st_size == 0


def test_a_closed_arena_is_unmapped(descriptor: int) -> None:
    arena = HostArena.create(descriptor, layout_of((4096, 16)), "x", None)
    inode = os.fstat(descriptor).st_ino
    assert mappings(inode) == 1
    arena.close()
    assert mappings(inode) == 0


def mappings(inode: int) -> int:
    with open("/proc/self/maps") as lines:
        return sum(1 for line in lines if line.split()[4] == str(inode) and "memfd:arena" in line)


SIZE = 64 * 2**20


def resident_bytes() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * 4096


def test_unmapping_gives_the_memory_back_and_keeps_the_address() -> None:
    arena = PrivateArena(SIZE)
    arena.map()
    view, address = arena.tensor.view(torch.float32), arena.tensor.data_ptr()
    before = resident_bytes()
    view.fill_(1.0)
    filled = resident_bytes()
    arena.unmap()
    emptied = resident_bytes()
    assert filled - before > SIZE * 0.9
    assert filled - emptied > SIZE * 0.9
    arena.map()
    assert arena.tensor.data_ptr() == address
    # What was written before is gone: nothing of one tenant's text outlives a sleep.
    assert view.count_nonzero() == 0


def test_an_arena_of_nothing_still_has_an_address() -> None:
    arena = PrivateArena(0)
    arena.map()
    assert arena.tensor.numel() == arena.size > 0


def test_borrowed_memory_is_the_lenders() -> None:
    lent = torch.zeros(64, dtype=torch.uint8)
    arena = BorrowedArena(lent)
    arena.map()
    arena.tensor.fill_(3)
    arena.unmap()
    assert lent.sum() == 192
    arena.close()
    assert lent.numel() == 64


def test_blocks_wait_as_a_whole_and_what_is_around_them_for_itself() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(4, 2)
    model.body = torch.nn.Module()
    model.body.layers = torch.nn.ModuleList([block, block])
    model.head = torch.nn.Linear(2, 4)
    found = list(hooked_modules(model))
    expected = [(model, False), (model.embed, False), (model.body, False), (block, True), (block, True)]
    assert found == [*expected, (model.head, False)]


def test_what_a_wake_will_take_is_learned_from_the_last_one() -> None:
    copy_rate = CopyRate()
    assert copy_rate.expected_s(int(RATE_UNKNOWN)) == 1.0
    copy_rate.record(1_000, 0.0)
    copy_rate.record(50 * 10**9, 1.0)
    assert copy_rate.expected_s(25 * 10**9) == 0.5


def test_the_kernels_lists_of_processors_are_read() -> None:
    assert numbers_in("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numbers_in("\n") == set()


def test_where_all_memory_is_equally_near_cuda_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking makes the device's context, for which the first read would wait."""
    asked: list[torch.device] = []
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(resources, "NODES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked.append)
    assert processors_near(torch.device("cuda", 0)) == set()
    assert asked == []
    (tmp_path / "node1").mkdir()
    assert processors_near(torch.device("cuda", 0)) == set()
    assert asked == [torch.device("cuda", 0)]


def test_without_a_gpu_threads_stay_where_they_are() -> None:
    assert processors_near(torch.device("cpu")) == set()
    settle_near(torch.device("cpu"))


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
