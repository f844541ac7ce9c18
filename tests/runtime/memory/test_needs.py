"""What a slot needs is declared, else measured, else estimated, else guessed; and is remembered as it was seen.

Over restarts, too; a broken file never stops the gateway.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.schema import Config, Model
from greenroom.core.model import DeviceId, ModelId, Need
from greenroom.engines.registry import engine_for
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.memory.book import FILE_NAME, BookKey, Measured, MemoryNeedsStore
from greenroom.runtime.memory.needs import Needs, Subject, kind_of, warn
from tests.full_disk import full_disk
from tests.models import tiny

GPU, SECOND, HOST = DeviceId("GPU-a"), DeviceId("GPU-b"), DeviceId("host")
ONE = {GPU: "NVIDIA H200"}
TWO = {GPU: "NVIDIA H200", SECOND: "NVIDIA H200"}


def big() -> str:
    return str(tiny("big", noise=True, hidden=1024, layers=16))


def subject(name: str = "m", **keys: Any) -> Subject:
    model = Model(**keys) if "path" in keys else Model(**{"cmd": "serve --port ${PORT}", **keys})
    return Subject(ModelId(name), model, engine_for(model))


def needs_in(folder: Path | None = None, gpus: dict[DeviceId, str] | None = None) -> Needs:
    return Needs(MemoryNeedsStore(folder, warn), ONE if gpus is None else gpus)


# --- which figure counts --------------------------------------------------------------------------------------------


async def test_what_the_operator_says_comes_first() -> None:
    needs = needs_in()
    said = subject(path=big(), memory_mib=77, host_memory_mib=5)
    assert needs.need_of(said) == (Need(77, 5), "declared")
    needs.measured(said, {GPU: 500})
    assert needs.need_of(said) == (Need(77, 5), "declared")
    assert needs.need_of(subject(memory_mib=0))[0] == Need()
    await needs.close()


def test_share_of_a_gpu_is_declared_too(tmp_path: Path) -> None:
    needs = needs_in()
    needs.usable_mib = {GPU: 80_000}
    said = subject(engine="vllm", path=str(tmp_path), gpu_memory_utilization=0.5)
    assert needs.need_of(said) == (Need(40_000), "declared")
    assert needs.need_of(subject(engine="vllm", path=str(tmp_path), gpu_memory_utilization=0.5, memory_mib=7))[
        0
    ] == Need(7)


@pytest.mark.parametrize("keys", [{"n_gpu_layers": 0}, {"device": "cpu"}])
def test_what_runs_on_the_host_needs_no_gpu(keys: dict[str, Any]) -> None:
    needs = needs_in()
    assert needs.need_of(subject(path=big(), memory_mib=77, host_memory_mib=5, **keys))[0] == Need(0, 82)
    need, source = needs.need_of(subject(path=big(), **keys))
    assert need.gpu_mib == 0 and need.host_mib > 289 and source == "gguf"


async def test_what_was_measured_comes_before_what_is_estimated() -> None:
    needs, one = needs_in(), subject(path=big())
    estimated, source = needs.need_of(one)
    assert source == "gguf" and estimated.gpu_mib > 289
    assert needs.measured(one, {GPU: 1234})
    # The peak itself; of the host nothing was seen.
    assert needs.need_of(one) == (Need(1234, estimated.host_mib), "measured")
    assert not needs.measured(one, {GPU: 1000})
    assert needs.measured(one, {GPU: 1300, HOST: 40})
    assert needs.need_of(one)[0] == Need(1300, 40)
    await needs.close()


def test_without_headers_the_size_counts_and_then_the_name(tmp_path: Path) -> None:
    needs = needs_in()
    with (tmp_path / "m.gguf").open("wb") as file:
        file.truncate(100 * 2**20)
    assert needs.need_of(subject(path=str(tmp_path / "m.gguf"))) == (Need(111, 0), "file size")
    need, source = needs.need_of(subject("llama-8b-q4_k_m", path=str(tmp_path / "gone.gguf")))
    assert source == "name" and 4_000 < need.gpu_mib < 7_000
    assert needs.need_of(subject("chat")) == (Need(), "unknown")
    assert needs.need_of(subject(path="/\0.gguf")) == (Need(), "unknown")


def test_a_machine_without_gpus_uses_its_host() -> None:
    need, _ = needs_in(gpus={}).need_of(subject(path=big()))
    assert need.gpu_mib == 0 and need.host_mib > 289


def test_what_is_said_of_the_host_replaces_what_is_guessed_beside_a_gpu() -> None:
    assert needs_in().need_of(subject(path=big(), host_memory_mib=3))[0].host_mib == 3
    alone, _ = needs_in(gpus={}).need_of(subject(path=big()))
    assert needs_in(gpus={}).need_of(subject(path=big(), host_memory_mib=3))[0].host_mib == alone.host_mib + 3


async def test_a_budget_caps_whatever_is_known() -> None:
    needs = needs_in()
    one = subject(path=big(), gpu_memory_budget_mib=300)
    assert needs.need_of(one)[0].gpu_mib == 300 and needs.need_of(one)[1] == "budget"
    needs.measured(one, {GPU: 900})
    assert needs.need_of(one)[0].gpu_mib == 300
    assert needs.need_of(subject(memory_mib=500, gpu_memory_budget_mib=300))[0].gpu_mib == 300
    assert needs.need_of(subject(memory_mib=200, gpu_memory_budget_mib=300)) == (Need(200), "declared")
    await needs.close()


# --- what is remembered ---------------------------------------------------------------------------------------------


async def test_figures_outlive_a_restart_and_belong_to_one_file_arguments_and_gpu(tmp_path: Path) -> None:
    needs, one = needs_in(tmp_path), subject(path=big())
    needs.measured(one, {GPU: 1234})
    await needs.close()
    later = needs_in(tmp_path)
    assert later.need_of(subject(path=big()))[0].gpu_mib == 1234
    # The name, the place and what was said about it do not matter; the arguments and the GPU do.
    assert later.need_of(subject("other", path=big(), devices=("gpu0",), ttl_s=5))[0].gpu_mib == 1234
    assert later.need_of(subject(path=big(), ctx_size=8192))[1] == "gguf"
    assert later.need_of(subject(path=str(tiny("alpha"))))[1] == "gguf"
    assert needs_in(tmp_path, {GPU: "NVIDIA L4"}).need_of(one)[1] == "gguf"


async def test_an_unknown_command_is_fitted_from_its_second_load_on(tmp_path: Path) -> None:
    needs, one = needs_in(tmp_path), subject(cmd="serve --fast --port ${PORT}")
    assert needs.need_of(one) == (Need(), "unknown")
    assert needs.measured(one, {GPU: 4321})
    await needs.close()
    assert needs_in(tmp_path).need_of(one) == (Need(4321), "measured")
    assert needs_in(tmp_path).need_of(subject(cmd="serve --port ${PORT}"))[1] == "unknown"


async def test_nothing_seen_is_not_remembered() -> None:
    needs, one = needs_in(), subject()
    assert not needs.measured(one, {}) and not needs.measured(one, {GPU: 0})
    assert needs.need_of(one) == (Need(), "unknown")


async def test_a_split_has_a_figure_of_its_own_that_counts_until_one_gpu_was_enough() -> None:
    needs, one = needs_in(gpus=TWO), subject()
    needs.measured(one, {GPU: 600, SECOND: 700})
    assert needs.need_of(one)[0] == Need(1300)
    needs.measured(one, {SECOND: 900})
    assert needs.need_of(one)[0] == Need(900)
    await needs.close()


async def test_the_larger_figure_counts_where_gpus_differ() -> None:
    needs, one = needs_in(gpus={GPU: "NVIDIA H200", SECOND: "NVIDIA L4"}), subject()
    needs.measured(one, {GPU: 600, SECOND: 700})
    assert needs.need_of(one)[0] == Need(1300)
    needs.measured(one, {GPU: 900})
    needs.measured(one, {SECOND: 1000})
    assert needs.need_of(one)[0] == Need(1000)
    await needs.close()


def test_kinds_of_gpus_have_names() -> None:
    assert [kind_of([]), kind_of(["a"]), kind_of(["a", "a"]), kind_of(["a", "b"])] == ["", "a", "2×a", "a + b"]


async def test_running_out_of_memory_raises_the_figure_also_after_a_restart(tmp_path: Path) -> None:
    needs = needs_in(tmp_path)
    for one in (subject(memory_mib=100), subject(path=big())):
        needs.no_memory(one, Need(2000, 7), {GPU: 100})
        await needs.close()
        need, source = needs_in(tmp_path).need_of(one)
        assert need.gpu_mib == 2000 and need.host_mib >= 7 and source == "raised"


async def test_what_is_known_can_be_told_without_reading_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(Path(big()).read_bytes())
    needs, one = needs_in(), subject(path=str(path))
    need, _ = needs.need_of(one)
    path.unlink()
    needs.measured(one, {GPU: need.gpu_mib * 2})
    account = needs.account_of(one)
    assert account.need.gpu_mib == need.gpu_mib * 2 and account.source == "measured"
    assert account.estimate_error == pytest.approx(-0.5)
    assert needs.account_of(subject()).estimate_error is None
    # Looked at anew, the file is gone, and with it what it was known by.
    assert needs.need_of(one)[1] == "unknown"
    await needs.close()


async def test_writing_goes_on_beside_the_loop_until_all_is_written(tmp_path: Path) -> None:
    needs = needs_in(tmp_path)
    for number in range(20):
        needs.measured(subject(cmd=f"serve {number} --port ${{PORT}}"), {GPU: number + 1})
    await needs.close()
    later = needs_in(tmp_path)
    found = [later.need_of(subject(cmd=f"serve {number} --port ${{PORT}}"))[0] for number in range(20)]
    assert found == [Need(number + 1) for number in range(20)]


# --- the catalogue --------------------------------------------------------------------------------------------------


async def test_the_catalogue_gives_models_what_they_need() -> None:
    needs = needs_in()
    model = {"cmd": "serve --port ${PORT}"}
    config = Config.model_validate({"models": {"a": model, "b": {**model, "memory_mib": 9}}})
    needs.measured(subject("a"), {GPU: 55})
    specs = {spec.id: spec.need for spec in Catalog(needs).fill(config)}
    assert specs == {"a": Need(55), "b": Need(9)}
    alone = config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"fit_memory": False})})
    assert {spec.need for spec in Catalog(needs).fill(alone)} == {Need()}
    await needs.close()


# --- hosted models --------------------------------------------------------------------------------------------------


def hosted(folder: Path, **keys: Any) -> Subject:
    """A folder with 64 MiB of weights of a model that needs little else."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    size = 64 * 2**20
    head = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    return subject(path=str(folder), **keys)


def test_a_hosted_model_needs_its_weights_twice_when_ready_and_once_asleep(tmp_path: Path) -> None:
    needs, one = needs_in(), hosted(tmp_path)
    need, asleep = needs.need_of(one)[0], needs.asleep_of(one)
    assert asleep is not None and asleep.gpu_mib == 0 and asleep.host_mib >= 64
    assert need.gpu_mib > asleep.host_mib == need.host_mib
    assert needs.asleep_of(subject(path=big())) is None


def test_without_gpus_a_hosted_model_has_its_weights_once(tmp_path: Path) -> None:
    needs, one = needs_in(gpus={}), hosted(tmp_path)
    need, asleep = needs.need_of(one)[0], needs.asleep_of(one)
    assert asleep is not None and need.gpu_mib == 0 and asleep.host_mib < need.host_mib < 2 * asleep.host_mib + 1_000
    said = hosted(tmp_path, memory_mib=500, host_memory_mib=10)
    assert needs.need_of(said)[0] == Need(0, 510)


def test_the_declared_need_of_a_ready_model_includes_its_sleeping_copy(tmp_path: Path) -> None:
    needs, said = needs_in(), hosted(tmp_path, memory_mib=500)
    asleep = needs.asleep_of(said)
    assert asleep is not None and needs.need_of(said)[0] == Need(500, asleep.host_mib)


async def test_what_was_measured_of_a_hosted_model_can_only_make_it_more(tmp_path: Path) -> None:
    needs, one = needs_in(), hosted(tmp_path)
    need = needs.need_of(one)[0]
    needs.measured(one, {GPU: 10, HOST: 10})
    assert needs.need_of(one)[0] == need
    needs.measured(one, {GPU: need.gpu_mib + 50, HOST: 10})
    assert needs.need_of(one)[0] == Need(need.gpu_mib + 50, need.host_mib)
    await needs.close()


def test_a_catalogue_says_what_sleepers_need(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    one = hosted(tmp_path / "m")
    catalog = Catalog(needs_in())
    specs = catalog.fill(Config(models={"m": one.config, "g": Model(path=big())}))
    assert [spec.need_asleep is not None for spec in specs] == [True, False]


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
