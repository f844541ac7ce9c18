"""What is found on disk, under which ids, and how quickly changes are seen."""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom.base.detached import run_detached
from greenroom.library.facts import FILE_NAME
from greenroom.library.folders import FolderTree, Pace
from greenroom.library.library import Library, LookTimes, look_once
from greenroom.library.models import PROBLEMS_MAX
from greenroom.library.records import LibraryRecord, ModelKind, told_problem
from greenroom.library.roots import Roots
from tests.library.hub_cache import add_snapshot, folder_files, put, repository
from tests.models import tiny, tiny_ears, tiny_hf, tiny_lora, tiny_projector
from tests.samples.split_gguf import split_gguf
from tests.waiting import PATIENCE_S, until


def found(*roots: Path) -> dict[str, LibraryRecord]:
    return {record.id: record for record in look_once(Roots(map(str, roots)))[0]}


def library(*roots: Path, state_dir: Path | None = None, **settings: Any) -> Library:
    return Library(Roots(map(str, roots)), state_dir, **settings)


async def looked(*roots: Path, **settings: Any) -> Library:
    """A library after its first look."""
    shelf = library(*roots, **settings)
    await shelf.refresh()
    return shelf


# --- plain folders ----------------------------------------------------------------------------------------------------


def test_plain_files_and_folders_are_named_by_their_path(tmp_path: Path) -> None:
    put(tmp_path / "one.gguf", tiny("one"))
    put(tmp_path / "org" / "two-Q8_0.gguf", tiny("two"))
    put(tmp_path / "org" / "three", tiny_hf("three"))
    put(tmp_path / "ears", tiny_ears("hello"))
    (tmp_path / "notes.txt").write_text("no model")
    records = found(tmp_path)
    assert {id: record.kind for id, record in records.items()} == {
        "one.gguf": ModelKind.GGUF,
        "org/two-Q8_0.gguf": ModelKind.GGUF,
        "org/three": ModelKind.SAFETENSORS,
        "ears": ModelKind.WHISPER,
    }
    one, three = records["one.gguf"], records["org/three"]
    assert (one.path, one.root) == (str(tmp_path / "one.gguf"), str(tmp_path))
    assert one.bytes == (tmp_path / "one.gguf").stat().st_size
    assert (one.quantization, one.context_length) == ("F16", 4096)
    assert records["org/two-Q8_0.gguf"].quantization == "Q8_0"
    assert (three.quantization, three.context_length) == ("fp32", 4096)
    # The same Llama: counted from the tensors of either format.
    assert one.parameters == three.parameters == 362_624
    assert one.memory_mib and three.memory_mib and records["ears"].memory_mib
    assert one.source.hub_id is None and one.added > 0 and one.last_used is None


def test_parts_are_one_model_and_projectors_belong_to_the_models_beside_them(tmp_path: Path) -> None:
    split = _split(tmp_path / "split", "big-Q4_K_M")
    put(tmp_path / "split" / "mmproj-F16.gguf", tiny_projector())
    put(tmp_path / "lora.gguf", tiny_lora("a"))
    records = found(tmp_path)
    assert list(records) == ["split/big-Q4_K_M-00001-of-00002.gguf"]
    record = records["split/big-Q4_K_M-00001-of-00002.gguf"]
    assert [file.name for file in record.files] == [split[0].name, split[1].name, "mmproj-F16.gguf"]
    assert (record.quantization, record.path) == ("Q4_K_M", str(split[0]))
    assert record.projector == str(tmp_path / "split" / "mmproj-F16.gguf")
    put(tmp_path / "split" / "mmproj-Q8_0.gguf", tiny_projector())
    assert next(iter(found(tmp_path).values())).projector is None, "one of two cannot be chosen"


def test_model_whose_parts_are_not_all_there_is_none_yet(tmp_path: Path) -> None:
    _split(tmp_path, "big")[1].unlink()
    put(tmp_path / "sharded", tiny_hf("a"))
    (tmp_path / "sharded" / "model.safetensors").rename(tmp_path / "sharded" / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    records, problems = look_once(Roots([str(tmp_path)]))
    assert not records
    assert {Path(problem.path).name for problem in problems} == {"big-00001-of-00002.gguf", "sharded"}
    assert all("not there" in problem.why for problem in problems)


def test_file_that_is_cut_short_or_still_written_is_no_model(tmp_path: Path) -> None:
    whole = tiny("a").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-1])
    (tmp_path / "b.gguf.part").write_bytes(whole)
    (tmp_path / "c.gguf.incomplete").write_bytes(whole)
    (tmp_path / ".d.gguf").write_bytes(whole)
    records, problems = look_once(Roots([str(tmp_path)]))
    assert not records
    assert [Path(problem.path).name for problem in problems] == ["cut.gguf"]


def test_pipeline_is_one_model_with_its_components(tmp_path: Path) -> None:
    put(tmp_path / "flux" / "unet", tiny_hf("a"))
    put(tmp_path / "flux" / "text_encoder", tiny_hf("b"))
    index = {"_class_name": "X", "unet": ["diffusers", "U"], "text_encoder": ["transformers", "T"]}
    (tmp_path / "flux" / "model_index.json").write_text(json.dumps(index))
    record = found(tmp_path)["flux"]
    assert record.kind is ModelKind.PIPELINE and len(found(tmp_path)) == 1
    assert record.files[0].name == "model_index.json"
    assert "unet/model.safetensors" in {file.name for file in record.files}
    assert record.parameters == 2 * 362_624


def test_quantization_of_a_folder_is_told_by_its_configuration(tmp_path: Path) -> None:
    folder = put(tmp_path / "awq", tiny_hf("a"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert found(tmp_path)["awq"].quantization == "awq-4bit"
    config["quantization_config"] = {"quant_method": "<script>" * 9, "bits": 10**9}
    (folder / "config.json").write_text(json.dumps(config))
    assert found(tmp_path)["awq"].quantization == "fp32"


def test_root_may_be_a_model_itself(tmp_path: Path) -> None:
    put(tmp_path / "llama", tiny_hf("a"))
    put(tmp_path / "llama" / "more" / "b.gguf", tiny("b"))
    records = found(tmp_path / "llama")
    assert set(records) == {"llama", "more/b.gguf"}
    assert records["llama"].path == str(tmp_path / "llama")


# --- the hub's cache --------------------------------------------------------------------------------------------------


def test_repository_is_named_by_its_hub_id(tmp_path: Path) -> None:
    folder = add_snapshot(tmp_path, "org/name", "c1", folder_files(tiny_hf("a")))
    records = found(tmp_path)
    assert list(records) == ["org/name"]
    record = records["org/name"]
    assert (record.source.hub_id, record.source.commit, record.path) == ("org/name", "c1", str(folder))
    assert all(file.sha256 is not None and len(file.sha256) == 64 for file in record.files)


def test_several_models_of_a_repository_are_told_apart(tmp_path: Path) -> None:
    files: dict[str, Path | bytes] = {
        "x-Q4_K_M.gguf": tiny("a"),
        "x-Q8_0.gguf": tiny("b"),
        "y-Q8_0.gguf": tiny("c"),
        "deep/x-UD-Q2_K_XL.gguf": tiny("d"),
    }
    add_snapshot(tmp_path, "org/name", "c1", files)
    ids = {"org/name:Q4_K_M", "org/name:x-Q8_0", "org/name:y-Q8_0", "org/name:UD-Q2_K_XL"}
    assert set(found(tmp_path)) == ids


def test_every_snapshot_that_a_ref_names_counts_else_the_newest(tmp_path: Path) -> None:
    files = folder_files(tiny_hf("a"))
    add_snapshot(tmp_path, "org/name", "c1", files, refs=("main",))
    add_snapshot(tmp_path, "org/name", "c2", files, refs=("v2", "refs/pr/1"))
    add_snapshot(tmp_path, "org/name", "c3", files, refs=())
    assert {id: record.source.commit for id, record in found(tmp_path).items()} == {
        "org/name": "c1",
        "org/name@refs/pr/1": "c2",
    }
    for number, commit in enumerate(("c1", "c2")):
        folder = add_snapshot(tmp_path, "org/other", commit, files, refs=())
        os.utime(folder, (1_000 + number, 1_000 + number))
    assert found(tmp_path)["org/other"].source.commit == "c2"


async def test_ref_that_is_rewritten_in_place_is_seen(tmp_path: Path) -> None:
    files = folder_files(tiny_hf("a"))
    for commit in ("c1", "c2"):
        add_snapshot(tmp_path, "org/name", commit, files)
    shelf = await looked(tmp_path)
    assert shelf.records[0].source.commit == "c2"
    (repository(tmp_path, "org/name") / "refs" / "main").write_text("c1")
    await shelf.refresh()
    assert shelf.records[0].source.commit == "c1"


def test_what_is_no_snapshot_of_a_model_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path / "models--org--name" / "blobs" / "abc.gguf", tiny("a"))
    (tmp_path / "models--org--name" / "snapshots" / "c1").mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("../../../..")
    (tmp_path / "models--" / "snapshots").mkdir(parents=True)
    assert not found(tmp_path)


# --- names ------------------------------------------------------------------------------------------------------------


async def test_model_is_found_by_every_name_it_has(tmp_path: Path) -> None:
    hub, plain = tmp_path / "hub", tmp_path / "plain"
    folder = add_snapshot(hub, "org/name", "c1", {"x-Q8_0.gguf": tiny("a"), "x-Q4_K_M.gguf": tiny("b")})
    put(plain / "lm" / "one" / "m.gguf", tiny("c"))
    shelf = await looked(hub, plain)
    names = {
        "org/name:Q8_0": "org/name:Q8_0",
        "org/name:q8_0": "org/name:Q8_0",
        "org/name": "org/name:Q4_K_M",
        "org/name@main": "org/name:Q4_K_M",
        "org/name@c1": "org/name:Q4_K_M",
        str(folder / "x-Q8_0.gguf"): "org/name:Q8_0",
        "lm/one/m.gguf": "lm/one/m.gguf",
        "lm/one": "lm/one/m.gguf",
        str(plain / "lm" / "one"): "lm/one/m.gguf",
    }
    assert {name: record.id for name in names if (record := shelf.find(name))} == names
    for name in ("", "/", ".", "..", "org", "lm", str(tmp_path), str(plain), "org/name:Q2_K", "../hub"):
        assert shelf.find(name) is None, name


def test_ids_are_unique_and_can_be_asked_for(tmp_path: Path) -> None:
    for root in ("a", "b"):
        put(tmp_path / root / "same.gguf", tiny("x"))
    put(tmp_path / "a" / "download" / "m.gguf", tiny("y"))
    put(tmp_path / "a" / "line\nbreak.gguf", tiny("z"))
    put(tmp_path / "a" / os.fsdecode(b"\xff.gguf"), tiny("z"))
    assert set(found(tmp_path / "a", tmp_path / "b")) == {"same.gguf", "b/same.gguf", "a/download/m.gguf"}


def test_root_inside_another_is_looked_at_once(tmp_path: Path) -> None:
    put(tmp_path / "outer" / "inner" / "m.gguf", tiny("x"))
    assert set(found(tmp_path / "outer", tmp_path / "outer" / "inner")) == {"m.gguf"}


# --- hostile trees ----------------------------------------------------------------------------------------------------


def test_special_files_and_links_out_are_passed_over(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(outside / "secret.gguf", tiny("a"))
    root.mkdir()
    os.mkfifo(root / "pipe.gguf")
    (root / "device.gguf").symlink_to("/dev/zero")
    (root / "out.gguf").symlink_to(outside / "secret.gguf")
    (root / "folder").symlink_to(outside)
    (root / "round").symlink_to(".")
    (root / "gone.gguf").symlink_to("nowhere")
    (root / "self.gguf").symlink_to("self.gguf")
    put(root / "h", tiny_hf("h"))
    (root / "h" / "config.json").unlink()
    os.mkfifo(root / "h" / "config.json")
    assert look_once(Roots([str(root)])) == ((), ())


def test_links_to_files_below_the_roots_are_followed(tmp_path: Path) -> None:
    put(tmp_path / "a" / "real.gguf", tiny("a"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "link.gguf").symlink_to(tmp_path / "a" / "real.gguf")
    assert set(found(tmp_path / "a", tmp_path / "b")) == {"real.gguf", "link.gguf"}
    assert set(found(tmp_path / "b")) == set()


def test_folders_too_deep_are_left_out(tmp_path: Path) -> None:
    put(tmp_path.joinpath(*"abcdefghijkl", "deep.gguf"), tiny("a"))
    put(tmp_path.joinpath(*"ABCDEFGHIJKLM", "deeper.gguf"), tiny("a"))
    assert [Path(id).name for id in found(tmp_path)] == ["deep.gguf"]


def test_lies_about_parameters_are_bounded_by_the_file(tmp_path: Path) -> None:
    import struct

    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 1_000, 1) + text("general.architecture") + struct.pack("<I", 8)
    head += text("llama")
    # All tensors claim the same thousand bytes.
    for number in range(1_000):
        head += text(f"t{number}") + struct.pack("<IQIQ", 1, 1_000, 24, 0)
    (tmp_path / "liar.gguf").write_bytes(head + b"\0" * 2_000)
    record = found(tmp_path)["liar.gguf"]
    assert record.parameters is not None and record.parameters <= 8 * record.bytes


# --- following the disk -----------------------------------------------------------------------------------------------


async def test_changes_are_found_and_only_changed_folders_and_files_are_read(tmp_path: Path) -> None:
    for number in range(20):
        put(tmp_path / f"f{number}" / "m.gguf", tiny("a"))
    _age(tmp_path)
    shelf = await looked(tmp_path)
    assert len(shelf.records) == 20
    listed, read = shelf.work_done
    assert (listed, read) == (21, 20)
    await shelf.refresh()
    assert shelf.work_done == (listed, read), "nothing changed"
    put(tmp_path / "f3" / "new.gguf", tiny("b"))
    await shelf.refresh()
    assert shelf.find("f3/new.gguf") is not None
    assert shelf.work_done == (listed + 1, read + 1)
    (tmp_path / "f4" / "m.gguf").unlink()
    await shelf.refresh()
    assert shelf.find("f4/m.gguf") is None and len(shelf.records) == 20
    assert shelf.work_done[1] == read + 1


async def test_file_that_grows_is_found_when_it_is_whole(tmp_path: Path) -> None:
    whole = tiny("a").read_bytes()
    with open(tmp_path / "m.gguf", "wb") as file:
        file.write(whole[:1_000])
        file.flush()
        shelf = library(tmp_path)
        await shelf.refresh()
        assert shelf.find("m.gguf") is None and len(shelf.problems) == 1
        file.write(whole[1_000:])
    await shelf.refresh()
    assert shelf.find("m.gguf") is not None and not shelf.problems


async def test_root_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    put(root / "m.gguf", tiny("a"))
    shelf = await looked(root)
    root.rename(tmp_path / "away")
    await shelf.refresh()
    assert not shelf.records and "not there" in shelf.problems[0].why
    (tmp_path / "away").rename(root)
    await shelf.refresh()
    assert shelf.find("m.gguf") is not None and not shelf.problems


async def test_root_that_hangs_delays_neither_the_loop_nor_other_roots(tmp_path: Path) -> None:
    """Stands in for a dead file server: the thread that looks at one root does not come back until it is let go."""
    slow, quick = tmp_path / "slow", tmp_path / "quick"
    put(slow / "a.gguf", tiny("a"))
    put(quick / "b.gguf", tiny("b"))
    release, hung = threading.Event(), threading.Event()
    hangs = False

    async def run(work: Callable[[], Any], name: str) -> Any:
        def hang() -> Any:
            release.wait(PATIENCE_S)
            return work()

        # The first look of a round is that of the first root. Threads may begin in another order.
        if hangs and name == "look at models" and not hung.is_set():
            hung.set()
            return await run_detached(hang, name)
        return await run_detached(work, name)

    shelf = Library(Roots([str(slow), str(quick)]), None, run=run, times=LookTimes(max_s=0.2))

    async def looked_until(fact: Callable[[], object]) -> None:
        """A good look may take longer than its limit where the machine is busy. The next one finds more."""

        async def is_so() -> object:
            await shelf.refresh()
            return fact()

        await until(is_so)

    await looked_until(lambda: len(shelf.records) == 2)
    hangs = True
    (slow / "a.gguf").unlink()
    put(quick / "c.gguf", tiny("c"))
    await looked_until(lambda: shelf.find("c.gguf") is not None)
    assert hung.is_set() and not release.is_set()
    assert shelf.find("a.gguf") is not None, "its records stay"
    release.set()
    await looked_until(lambda: shelf.find("a.gguf") is None)


async def test_roots_follow_a_reload(tmp_path: Path) -> None:
    put(tmp_path / "a" / "a.gguf", tiny("a"))
    put(tmp_path / "b" / "b.gguf", tiny("b"))
    shelf = await looked(tmp_path / "a")
    shelf.use_roots(Roots([str(tmp_path / "b")]))
    await shelf.refresh()
    assert [record.id for record in shelf.records] == ["b.gguf"]
    shelf.use_roots(Roots([]))
    await shelf.refresh()
    assert not shelf.records


async def test_refreshes_at_the_same_time_share_a_look(tmp_path: Path) -> None:
    shelf = library(tmp_path)
    await asyncio.gather(*(shelf.refresh() for _ in range(50)))
    assert shelf.work_done[0] <= 2


# --- last use ---------------------------------------------------------------------------------------------------------


async def test_last_use_is_kept_across_restarts(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    state.mkdir()
    put(root / "m.gguf", tiny("a"))
    shelf = await looked(root, state_dir=state, clock=lambda: 1_000.0)
    record = shelf.find("m.gguf")
    assert record is not None
    shelf.used(record)
    assert (again := shelf.find("m.gguf")) is not None and again.last_used == 1_000.0
    await shelf.close()
    later = await looked(root, state_dir=state)
    assert later.records[0].last_used == 1_000.0


async def test_headers_are_not_read_again_after_a_restart(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    state.mkdir()
    put(root / "a.gguf", tiny("a"))
    put(root / "b", tiny_hf("b"))
    shelf = await looked(root, state_dir=state)
    before = shelf.records
    await shelf.close()
    put(root / "c.gguf", tiny("c"))
    later = await looked(root, state_dir=state)
    assert later.work_done[1] == 1
    assert set(before) < set(later.records)
    on_gpu = await looked(root, state_dir=state, on_gpu=True)
    assert on_gpu.work_done[1] == 3, "memory is another figure there"


async def test_models_of_a_large_tree_are_found_bit_by_bit(tmp_path: Path) -> None:
    for number in range(5):
        put(tmp_path / f"m{number}.gguf", tiny("a"))
    seen: list[int] = []

    async def run(work: Callable[[], Any], name: str) -> Any:
        seen.append(len(shelf.records))
        return await run_detached(work, name)

    shelf = Library(Roots([str(tmp_path)]), None, run=run, times=LookTimes(slice_s=0))
    await shelf.refresh()
    assert len(shelf.records) == 5 and {0, 1, 2, 3, 4} <= set(seen)
    assert shelf.work_done[1] == 5


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', '{"version": 1, "used": {"/m": "x", "/n": -1}}'])
async def test_file_of_last_uses_that_is_not_ours_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    shelf = await looked(tmp_path, state_dir=tmp_path)
    assert not shelf.records


def _split(folder: Path, stem: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"{stem}-0000{number}-of-00002.gguf" for number in (1, 2)]
    split_gguf(tiny("a"), *parts)
    return parts


def _age(folder: Path) -> None:
    """As if everything had been there for a while."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1_000_000, 1_000_000))


# --- odd names and odd roots ------------------------------------------------------------------------------------------


def test_models_whose_names_cannot_be_asked_for_are_told_and_escaped(tmp_path: Path) -> None:
    for name in (b"bell\x07.gguf", b"latin-\xe9.gguf"):
        put(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)), tiny("odd"))
    records, problems = look_once(Roots([str(tmp_path)]))
    assert not records
    told = sorted(told_problem(one)["path"] for one in problems)
    assert [Path(path).name for path in told] == ["bell\\x07.gguf", "latin-\\udce9.gguf"]
    assert all("cannot be asked for" in one.why and "rename" in one.why for one in problems)


def test_problems_that_are_too_many_are_counted(tmp_path: Path) -> None:
    for number in range(PROBLEMS_MAX + 3):
        (tmp_path / f"{number:04}.gguf").write_bytes(b"GGUF")
    problems = look_once(Roots([str(tmp_path)]))[1]
    assert len(problems) == PROBLEMS_MAX + 1 and problems[-1].why.startswith("3 more")


def test_folders_of_the_kernel_are_not_looked_into() -> None:
    tree = FolderTree("/proc", lambda: ())
    assert tree.look() is None and tree.listed == 0


def test_a_long_look_rests_longer_than_it_works(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / str(number)).mkdir()
    now, rested = [0.0], [0.0]

    def clock() -> float:
        now[0] += 0.05
        return now[0]

    def rest(seconds: float) -> None:
        rested[0] += seconds

    FolderTree(str(tmp_path), lambda: (), pace=Pace(rest, clock)).look()
    assert rested[0] > now[0]


async def test_the_library_says_that_its_first_look_is_under_way(tmp_path: Path) -> None:
    shelf = library(tmp_path)
    assert shelf.is_looking
    await shelf.refresh()
    assert not shelf.is_looking
