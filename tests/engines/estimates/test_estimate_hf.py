"""What is estimated for folders of Transformers models, from their headers and configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.model import Need
from greenroom.engines.estimates import hf_folder as module
from greenroom.engines.estimates.estimate import Estimate, EstimatePart
from greenroom.engines.estimates.gguf_header import BadModelFile
from greenroom.engines.estimates.hf_folder import (
    Facts,
    FolderOptions,
    estimate_folder,
    folder_cache,
    is_folder,
    weight_files,
)
from greenroom.engines.estimates.kv_cache import LayerCache
from tests.engines.estimates.test_safetensors_header import tensor, write

MIB = 2**20
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def folder(path: Path, config: dict[str, Any] | None = None, mib: int = 64, dtype: str = "BF16") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    write(path / "model.safetensors", {"w": tensor(0, mib * MIB, dtype)}, 0)
    with (path / "model.safetensors").open("ab") as file:
        file.truncate(file.tell() + mib * MIB)
    return path


def parts(path: Path, gpus: int = 1, **options: Any) -> dict[str, EstimatePart]:
    found = estimate_folder(path, FolderOptions(**options), gpus)
    assert found is not None and found.source == "safetensors"
    return {part.what: part for part in found.parts}


def test_weights_and_cache_are_exact(tmp_path: Path) -> None:
    found = parts(folder(tmp_path / "m"), context=4096)
    assert found["weights"] == EstimatePart("weights", 64, 0)
    # Four layers, four heads of 64 numbers as keys and as values, two bytes each.
    assert found["KV cache"].gpu_mib == 4 * 4 * 64 * 2 * 2 * 4096 // MIB
    assert found["context"].gpu_mib == module.CONTEXT_MIB + module.WORKSPACE_MIB
    assert 0 < found["compute buffers"].gpu_mib < 200


def test_heads_that_share_keys_are_given_copies_of_them_while_attention_runs(tmp_path: Path) -> None:
    shared = parts(folder(tmp_path / "shared"), context=8192)["compute buffers"]
    whole = parts(folder(tmp_path / "whole", {**LLAMA, "num_key_value_heads": 16}), context=8192)["compute buffers"]
    # Sixteen heads of 64 numbers for each token, two bytes each.
    assert shared.gpu_mib - whole.gpu_mib == module.WIDENED_COPIES * 8192 * 16 * 64 * 2 // MIB


def test_the_models_own_context_is_taken_where_none_is_given(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    assert parts(path)["KV cache"].gpu_mib == 2 * parts(path, context=4096)["KV cache"].gpu_mib
    assert (
        parts(path, context=4096, sequences=3)["KV cache"].gpu_mib == 3 * parts(path, context=4096)["KV cache"].gpu_mib
    )


def test_without_gpus_all_is_on_the_host(tmp_path: Path) -> None:
    found = parts(folder(tmp_path / "m"), 0, context=4096)
    assert all(part.gpu_mib == 0 for part in found.values())
    assert found["weights"].host_mib == 64 and found["process"].host_mib == module.PROCESS_MIB


def test_numbers_of_another_kind_take_other_room(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", dtype="F32")
    assert parts(path, dtype="bfloat16")["weights"].gpu_mib == 32
    assert parts(path, dtype="float32", context=1024)["KV cache"].gpu_mib == 8
    assert parts(path)["weights"].gpu_mib == 64
    # Packed numbers stay as they are.
    packed = folder(tmp_path / "q", dtype="I32")
    assert parts(packed, dtype="float16")["weights"].gpu_mib == 64


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({}, [0, 0, 0, 0]),
        ({"sliding_window": 512}, [0, 0, 0, 0]),
        ({"sliding_window": 512, "use_sliding_window": True}, [512] * 4),
        ({"sliding_window": 512, "model_type": "mistral"}, [512] * 4),
        ({"sliding_window": 512, "sliding_window_pattern": 2}, [512, 0, 512, 0]),
        ({"sliding_window": 512, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, [512, 512, 512, 0]),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 4}, [0, 0, 0, 0]),
    ],
)
def test_windows_are_as_the_configuration_says(more: dict[str, Any], windows: list[int]) -> None:
    assert [layer.window for layer in folder_cache(Facts({**LLAMA, **more}))] == windows


def test_layers_without_attention_keep_no_keys() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    assert [bool(layer.keys) for layer in folder_cache(Facts({**LLAMA, "layer_types": kinds}))] == [False] * 3 + [True]


def test_heads_of_compressed_attention_are_kept_whole_by_transformers() -> None:
    said = {**LLAMA, "num_key_value_heads": 16, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}
    assert folder_cache(Facts(said))[0] == LayerCache(16 * 192, 16 * 96)


def test_the_language_part_of_a_model_that_sees_is_found() -> None:
    assert len(folder_cache(Facts({"model_type": "vlm", "text_config": LLAMA}))) == 4


def test_parts_of_a_split_are_not_counted_beside_the_whole(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    assert [file.name for file in weight_files(path)] == ["model.safetensors"]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        write(path / name, {"a": tensor(0, 10)}, 10)
    assert [file.name for file in weight_files(path)] == names


def test_components_of_a_pipeline_are_summed(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    for name in ("unet", "vae"):
        folder(tmp_path / name, mib=32)
    assert is_folder(tmp_path)
    assert parts(tmp_path)["weights"].gpu_mib == 64


def test_bad_headers_are_judged_by_the_files_size(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(100 * MIB)
    assert estimate_folder(path, FolderOptions(), 1) == Estimate((EstimatePart("files", 131, 0),), "file size")
    found = estimate_folder(path, FolderOptions(), 0)
    assert found is not None and found.need == Need(0, 131)


@pytest.mark.parametrize("config", ["", "{", "[" * 10_000, "\xff"])
def test_a_bad_configuration_is_judged_by_the_files_size(tmp_path: Path, config: str) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").write_text(config)
    found = estimate_folder(path, FolderOptions(), 1)
    assert found is not None and found.source == "file size"


@pytest.mark.parametrize(
    "config",
    [{}, {"num_hidden_layers": "many"}, {"num_hidden_layers": 2**60}, {"num_hidden_layers": -1, "vocab_size": True}],
)
def test_strange_configurations_leave_the_weights(tmp_path: Path, config: dict[str, Any]) -> None:
    found = parts(folder(tmp_path / "m", config))
    assert found["weights"].gpu_mib == 64 and "KV cache" not in found


def test_folders_without_weights_say_nothing(tmp_path: Path) -> None:
    assert estimate_folder(tmp_path, FolderOptions(), 1) is None
    assert not is_folder(tmp_path) and not is_folder(Path("bad\0name"))
    assert weight_files(Path("bad\0name")) == []


def test_a_pipe_in_place_of_the_configuration_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BadModelFile, match="not a plain file"):
        module.folder_config(tmp_path)
