"""What llama-server's command line says about memory, in every way it can be written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config.schema import Model
from greenroom.engines.estimates.llama_model import of_model
from greenroom.engines.estimates.llama_options import ALL, LlamaOptions, read


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
