"""What commands and names give away of their memory, in every way in which options can be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config.schema import Model
from greenroom.engines.builtin.command import estimate_command, files_of_command, folder_options
from greenroom.engines.builtin.llamacpp import of_model
from greenroom.engines.estimates.hf_folder import FolderOptions
from greenroom.engines.estimates.llama_options import ALL, LlamaOptions, read
from greenroom.engines.identity import arguments_identity, embedded_identity
from greenroom.engines.registry import engine_for
from greenroom.runtime.memory.needs import bits_of, estimate_by_name, parameters_billion
from tests.engines.estimates.test_estimate_hf import folder
from tests.models import tiny


def test_a_gguf_file_among_the_words_is_read_with_the_options_beside_it() -> None:
    path = str(tiny("big", noise=True, hidden=1024, layers=16))
    short = estimate_command(("llama-server", "-m", path, "-c", "4096", "--port", "1"), 1)
    longer = estimate_command(("llama-server", f"--model={path}", "--ctx-size=8192"), 1)
    assert short is not None and longer is not None and short.source == "gguf"
    assert longer.need.gpu_mib - short.need.gpu_mib >= 128
    on_host = estimate_command(("llama-server", "-m", path, "-ngl", "0"), 1)
    assert on_host is not None and on_host.need.gpu_mib == 0
    assert files_of_command(("llama-server", "-m", path)) == [Path(path)]


def test_a_folder_among_the_words_is_read_with_the_options_beside_it(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    found = estimate_command(("python", "-m", "server", str(path), "--max-model-len", "4096"), 1)
    assert found is not None and {part.what: part.gpu_mib for part in found.parts}["KV cache"] == 16
    assert files_of_command(("serve", str(path))) == [path / "config.json", path / "model.safetensors"]


@pytest.mark.parametrize(
    "words", [(), ("serve",), ("serve", "/nowhere/m.gguf"), ("serve", "/", "bad\0name.gguf", "/\0")]
)
def test_other_commands_give_nothing_away(words: tuple[str, ...]) -> None:
    assert estimate_command(words, 1) is None
    assert files_of_command(words) == []


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("--ctx", "100"), FolderOptions(100)),
        (("--max-model-len=200", "--ctx-size", "300"), FolderOptions(300)),
        (("--dtype", "float16", "--max-num-seqs", "4"), FolderOptions(None, 4, "float16")),
        (("--dtype", "auto", "--ctx", "many", "--ctx", "9" * 5_000), FolderOptions()),
        (("--ctx",), FolderOptions()),
    ],
)
def test_words_about_memory_are_understood(words: tuple[str, ...], options: FolderOptions) -> None:
    assert folder_options(words) == options


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-7b-instruct", 7),
        ("Qwen3-0.6B", 0.6),
        ("mixtral-8x7b", 8 * 7 * 0.83),
        ("gemma-3-270m-it", 0.27),
        ("qwen3-30b-a3b", 30),
        ("llama_3_70B_q4", 70),
        ("gpt-4", None),
        ("sub2b2", None),
        ("2024b-release", None),
        ("0b", None),
        ("a", None),
        ("9" * 10_000 + "b", None),
    ],
)
def test_parameters_are_read_from_names(name: str, billions: float | None) -> None:
    found = parameters_billion(name)
    assert found == (None if billions is None else pytest.approx(billions))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("m-q4_k_m.gguf", 4.85),
        ("m-Q8_0", 8.5),
        ("m-iq2_xs", 3.0),
        ("m-bf16", 16),
        ("m-awq", 4.85),
        ("m-fp8", 8.5),
        ("m", None),
    ],
)
def test_quantisations_are_read_from_names(name: str, bits: float | None) -> None:
    assert bits_of(name) == bits


def test_a_name_is_better_than_nothing() -> None:
    model = Model(cmd="serve --port ${PORT}")
    found = estimate_by_name("llama-8b-q4_k_m", model, 1)
    assert found is not None and found.source == "name"
    assert 4_600 < found.need.gpu_mib < 6_000 and found.need.host_mib == 0
    on_host = estimate_by_name("llama-8b-q4_k_m", model, 0)
    assert on_host is not None and on_host.need.host_mib == found.need.gpu_mib
    in_words = estimate_by_name("chat", Model(cmd="serve hub/Qwen2.5-7B-Instruct-AWQ --port ${PORT}"), 1)
    assert in_words is not None and in_words.need.gpu_mib < 6_000
    in_file = estimate_by_name("chat", Model(path="/gone/qwen-7b.gguf"), 1)
    assert in_file is not None and in_file.need.gpu_mib < 6_000
    assert estimate_by_name("chat", model, 1) is None


# --- which engine it is -----------------------------------------------------------------------------------------------


def test_another_file_engine_or_program_is_another_identity(tmp_path: Path) -> None:
    server, weights = tmp_path / "server.py", folder(tmp_path / "m")
    server.write_text("one")

    def identity(*more: str) -> tuple[str, str]:
        model = Model(cmd=("python3", str(server), str(weights), "--port", "${PORT}", *more))
        return engine_for(model).identity(model)

    file, program = identity()
    assert identity() == (file, program) == identity("--ctx", "5")
    server.write_text("another version")
    assert identity()[0] == file and identity()[1] != program
    (weights / "config.json").write_text("{}")
    assert identity()[0] != file


def test_a_gguf_files_identity_is_what_it_holds_and_not_where_it_lies(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    shutil.copy2(tiny("alpha"), first)
    shutil.copy2(first, second)

    def identity(path: Path) -> tuple[str, str]:
        model = Model(path=str(path))
        return engine_for(model).identity(model)

    assert identity(first) == identity(second)
    changed = bytearray(first.read_bytes())
    changed[100] ^= 1
    second.write_bytes(changed)
    kept = first.stat()
    os.utime(second, ns=(kept.st_atime_ns, kept.st_mtime_ns + 1))
    assert identity(first)[0] != identity(second)[0]
    assert identity(tmp_path / "gone.gguf")[0] == ""


def test_a_fifo_in_place_of_a_model_blocks_no_estimate(tmp_path: Path) -> None:
    fifo = tmp_path / "m.gguf"
    os.mkfifo(fifo)
    model = Model(path=str(fifo))
    assert engine_for(model).identity(model)[0] == "", "there is no file"
    assert engine_for(model).estimate(model, 1) is None


def test_the_embedded_engine_is_known_by_its_installed_version(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "xllamacpp-1.0.dist-info").mkdir(parents=True)
    python = str(tmp_path / "bin" / "python")
    first = embedded_identity(python)
    assert first == embedded_identity(python) != embedded_identity(None)
    (packages / "xllamacpp-1.0.dist-info").rename(packages / "xllamacpp-2.0.dist-info")
    assert embedded_identity(python) != first


def test_arguments_differ_where_the_process_would_take_other_memory() -> None:
    def identity(**keys: Any) -> str:
        return arguments_identity(Model(path="m.gguf", **keys))

    same = identity()
    assert same == identity(devices=("gpu0",), memory_mib=5, concurrency=3, pinned=True, ttl_s=9)
    others = (
        {"ctx_size": 1},
        {"args": ("-fa", "off")},
        {"env": {"X": "1"}},
        {"cache_type_k": "q8_0"},
        {"device": "cpu"},
    )
    found = {identity(**keys) for keys in others}
    assert len(found) == len(others) and same not in found


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("-c", "8192"), "context", 8192),
        (("--ctx-size=8192",), "context", 8192),
        (("-c", "1", "--ctx-size", "2"), "context", 2),
        (("-ngl", "7"), "gpu_layers", 7),
        (("--gpu-layers", "all"), "gpu_layers", -1),
        (("--n-gpu-layers=auto",), "gpu_layers", -1),
        (("-ctk", "q8_0"), "type_k", "q8_0"),
        (("--cache-type-v=q4_0",), "type_v", "q4_0"),
        (("-np", "9"), "sequences", 9),
        (("-np", "-1"), "sequences", 4),
        (("-b", "99"), "batch", 99),
        (("-ub=64",), "ubatch", 64),
        (("--no-kv-offload",), "kv_offload", False),
        (("-nkvo", "--kv-offload"), "kv_offload", True),
        (("-fa", "off"), "flash", False),
        (("-fa",), "flash", True),
        (("-fa", "off", "--flash-attn", "auto"), "flash", True),
        (("--no-kv-unified",), "unified", False),
        (("--swa-full",), "windows_whole", True),
        (("--device", "none"), "no_gpu", True),
        (("--device", "CUDA0"), "no_gpu", False),
        (("--cpu-moe",), "cpu_experts", ALL),
        (("-ncmoe", "5"), "cpu_experts", 5),
        (("--mmproj", "p.gguf"), "projectors", ("p.gguf",)),
        (("--mmproj=p.gguf", "--no-mmproj"), "projectors", ()),
        (("--lora", "a,b", "--lora", "c"), "adapters", ("a", "b", "c")),
        (("--lora-scaled", "a:0.5"), "adapters", ("a",)),
        (("-md", "d.gguf"), "draft", "d.gguf"),
        (("-m", "m.gguf"), "model", "m.gguf"),
    ],
)
def test_options_are_read_in_all_their_spellings(words: tuple[str, ...], field: str, value: object) -> None:
    assert getattr(read(words), field) == value


@pytest.mark.parametrize(
    "words",
    [
        ("-c",),
        ("-c", "many"),
        ("-c", "9" * 5_000),
        ("-ctk", "q9"),
        ("-np", "½"),
        ("-c", "-5"),
        ("-ub=-1",),
        ("--what", "-c"),
        ("-m", ""),
    ],
)
def test_what_cannot_be_understood_changes_nothing(words: tuple[str, ...]) -> None:
    assert read(words) == LlamaOptions()


@given(st.lists(st.text() | st.sampled_from(["-c", "-ngl", "-fa", "--lora", "-md", "-5", "=", "-c="])))
def test_any_words_give_options(words: list[str]) -> None:
    assert isinstance(read(words), LlamaOptions)


def test_a_models_keys_are_read_as_our_launch_writes_them() -> None:
    model = Model(
        path="m.gguf",
        ctx_size=2048,
        n_gpu_layers=3,
        cache_type_k="q8_0",
        flash_attn="off",
        parallel=2,
        args=("--ctx-size", "512", "-ctv=q5_1"),
    )
    said = of_model(model)
    assert (said.model, said.context, said.gpu_layers, said.parallel) == ("m.gguf", 512, 3, 2)
    assert (said.type_k, said.type_v, said.flash) == ("q8_0", "q5_1", False)
    assert (said.batch, said.ubatch, said.no_gpu) == (2048, 512, False)


def test_embedding_models_compute_a_whole_input_at_once() -> None:
    assert of_model(Model(path="m.gguf", embedding=True, ctx_size=2000)).ubatch == 2000
    assert of_model(Model(path="m.gguf", reranking=True, ctx_size=0)).batch == 8192
    assert of_model(Model(path="m.gguf", device="cpu")).no_gpu
