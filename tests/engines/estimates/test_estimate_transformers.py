"""What is estimated for folders that our own worker hosts: ready and asleep, on a GPU and on the host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.core.model import Need
from greenroom.engines.estimates import hosted as module
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.estimates.hf_folder import FolderOptions
from greenroom.engines.estimates.hosted import estimate_asleep, estimate_ready
from greenroom.workers.torch_host.engine.model_shape import kv_bytes
from tests.engines.estimates.test_estimate_hf import LLAMA, MIB, folder

ARENA = 64 + module.ARENA_ROUNDING_MIB
LATENT = {**LLAMA, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}


def ready(path: Path, gpus: int = 1, **options: Any) -> Estimate:
    found = estimate_ready(path, FolderOptions(**options), gpus)
    assert found is not None
    return found


def part(found: Estimate, what: str) -> tuple[int, int]:
    return next((one.gpu_mib, one.host_mib) for one in found.parts if one.what == what)


def test_on_a_gpu_the_weights_lie_there_and_once_more_in_the_green_room(tmp_path: Path) -> None:
    found = ready(folder(tmp_path / "m"), context=4096, cache_tokens=8192)
    assert found.source == "safetensors"
    assert part(found, "weights") == (ARENA, 0)
    assert part(found, "weights in the green room") == (0, ARENA)
    assert part(found, "graphs") == (module.GRAPHS_MIB, 0)
    assert found.need.host_mib == ARENA


def test_asleep_it_holds_its_arena_and_no_gpu(tmp_path: Path) -> None:
    found = estimate_asleep(folder(tmp_path / "m"), FolderOptions())
    assert found is not None and found.need == Need(gpu_mib=0, host_mib=ARENA)


def test_projections_of_an_embedding_model_are_counted(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    folder(path / "2_Dense", mib=8)
    assert part(ready(path), "weights") == (ARENA, 0)
    (path / "modules.json").write_text("[]")
    assert part(ready(path), "weights") == (ARENA + 8, 0)


def test_without_a_gpu_everything_lies_on_the_host_once(tmp_path: Path) -> None:
    on_gpu, on_host = (ready(folder(tmp_path / "m"), gpus, context=4096, cache_tokens=8192) for gpus in (1, 0))
    assert on_host.need.gpu_mib == 0
    assert on_host.need.host_mib == on_gpu.need.gpu_mib - module.GRAPHS_MIB
    assert part(on_host, "KV memory")[1] == part(on_gpu, "KV memory")[0]


@pytest.mark.parametrize("config", [LLAMA, {**LLAMA, "head_dim": 80}, {**LLAMA, "multi_query": True}, LATENT])
@pytest.mark.parametrize("tokens", [1, 16, 4096, 100_003])
def test_kv_memory_is_what_the_worker_takes_to_the_byte(tmp_path: Path, config: dict[str, Any], tokens: int) -> None:
    found = ready(folder(tmp_path / "m", config), cache_tokens=tokens)
    exact = kv_bytes(SimpleNamespace(**config), 2, tokens)
    assert part(found, "KV memory")[0] == -(-exact // MIB)


def test_kv_memory_holds_four_texts_by_default(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    assert part(ready(path, context=2048), "KV memory") == part(ready(path, cache_tokens=4 * 2048), "KV memory")
    assert part(ready(path), "KV memory") == part(ready(path, cache_tokens=4 * 8192), "KV memory")


def test_weights_are_kept_in_the_kind_of_number_that_is_wanted(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    assert part(ready(path, dtype="float32", cache_tokens=4096), "weights")[0] == 128 + module.ARENA_ROUNDING_MIB
    assert part(ready(path, dtype="auto", cache_tokens=4096), "weights")[0] == ARENA
    single, double = (
        part(ready(path, dtype=dtype, cache_tokens=4096), "KV memory")[0] for dtype in ("auto", "float32")
    )
    assert double == pytest.approx(2 * single, abs=1)


def test_auto_is_what_the_configuration_says_not_what_the_files_hold(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", dtype="F32")
    assert part(ready(path, dtype="auto"), "weights")[0] == 32 + module.ARENA_ROUNDING_MIB


def test_a_larger_batch_and_a_longer_cache_need_more_work(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    few, many = (part(ready(path, cache_tokens=4096, sequences=batch), "work")[0] for batch in (1, 129))
    # Three rows of 32,000 logits of four bytes for each of 128 more.
    assert many - few == pytest.approx(module.LOGITS_COPIES * 128 * 32_000 * 4 / MIB, abs=1)
    assert part(ready(path, cache_tokens=65_536), "work")[0] > part(ready(path, cache_tokens=4096), "work")[0]


def test_a_bad_header_leaves_the_files_size_and_the_cache(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"\xff" * (3 * MIB))
    found = ready(path, cache_tokens=4096)
    assert found.source == "file size"
    assert part(found, "weights")[0] == 3 + module.ARENA_ROUNDING_MIB
    assert part(found, "KV memory")[0] > 0


@pytest.mark.parametrize("config", ["[1]", "{", "", '{"num_hidden_layers": "many"}'])
def test_a_strange_configuration_leaves_the_weights(tmp_path: Path, config: str) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").write_text(config)
    assert part(ready(path), "weights")[0] == ARENA


def test_weights_that_are_no_safetensors_count_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\0" * (2 * MIB))
    found = ready(tmp_path, cache_tokens=1)
    assert (found.source, part(found, "weights")[0]) == ("file size", 2 + module.ARENA_ROUNDING_MIB)


def test_an_empty_or_missing_folder_says_nothing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", Path("/dev/null"), Path("a\0b")):
        assert estimate_ready(path, FolderOptions(), 1) is None
        assert estimate_asleep(path, FolderOptions()) is None
