"""What is estimated for GGUF files: where each part lies, and how it compares with what llama.cpp itself takes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.config.schema import Model
from greenroom.core.model import Need
from greenroom.engines.builtin.llamacpp import LlamaCppEngine
from greenroom.engines.estimates import gguf as module
from greenroom.engines.estimates.estimate import Estimate, EstimatePart
from greenroom.engines.estimates.gguf import estimate_gguf, files_of
from greenroom.engines.estimates.gguf_header import read_header
from greenroom.engines.estimates.kv_cache import Cells, attention_bytes, gguf_cache, state_bytes
from greenroom.engines.estimates.llama_options import LlamaOptions, read
from tests.engines.estimates import estimate_models
from tests.engines.llamacpp_worker import SMALL, Worker, worker
from tests.models import tiny, tiny_embedding
from tests.samples.split_gguf import split_gguf
from tests.waiting import until_now

# Buffers are bounded from above; the widest step of some graphs is narrower than the bound.
COMPUTE_FACTOR = 2.0
LOG_MAX_S = 30
MIB = 2**20


def estimated(path: Path, gpus: int = 1, *words: str, logits_all: bool = False) -> Estimate:
    found = estimate_gguf(read(words, LlamaOptions(model=str(path), context=4096)), gpus, logits_all=logits_all)
    assert found is not None
    return found


def parts(found: Estimate) -> dict[str, EstimatePart]:
    return {part.what: part for part in found.parts}


def big() -> Path:
    """Sixteen layers of 18 MiB each: large enough for whole MiB to say something."""
    return tiny("big", noise=True, hidden=1024, layers=16)


def sparse(folder: Path, name: str = "m.gguf", mib: int = 100) -> Path:
    path = folder / name
    with path.open("wb") as file:
        file.truncate(mib * MIB)
    return path


# --- against the engine itself --------------------------------------------------------------------------------------

Made = Callable[[Path], Path]
SHAPES: dict[str, tuple[Made, tuple[str, ...]]] = {
    "llama": (lambda _: tiny("alpha"), ("--ctx-size", "8192")),
    "large batch": (lambda _: tiny("alpha"), ("--ctx-size", "8192", "-b", "2048", "-ub", "2048")),
    "no flash attention": (lambda _: tiny("alpha"), ("--ctx-size", "8192", "-fa", "off")),
    "own cells, quantised": (
        lambda _: tiny("alpha"),
        ("--ctx-size", "1000", "--no-kv-unified", "--parallel", "3", "-ctk", "q8_0", "-ctv", "q4_0"),
    ),
    "300 MB": (lambda _: big(), ()),
    "encoder": (lambda _: tiny_embedding(), ("--embedding",)),
    "windows": (lambda folder: estimate_models.windowed(folder / "w.gguf"), ("--ctx-size", "8192")),
    "windows apart": (
        lambda folder: estimate_models.windowed(folder / "w.gguf"),
        ("--ctx-size", "8192", "--no-kv-unified", "--parallel", "4"),
    ),
    "windows kept whole": (
        lambda folder: estimate_models.windowed(folder / "w.gguf"),
        ("--ctx-size", "8192", "--swa-full"),
    ),
    "compressed": (lambda folder: estimate_models.compressed(folder / "c.gguf"), ("--ctx-size", "8192")),
    "hybrid": (lambda folder: estimate_models.hybrid(folder / "h.gguf"), ("--ctx-size", "4096", "--parallel", "3")),
    "recurrent": (lambda folder: estimate_models.recurrent(folder / "r.gguf"), ("--parallel", "3")),
}


def logged(log: str, what: str) -> float:
    """What the engine says it took, in MiB: the sum of its buffers of this kind."""
    return sum(float(size) for size in re.findall(rf"{what} buffer size = +([\d.]+) MiB", log))


def said_by(started: Worker) -> str:
    """Its log. The engine writes it from a thread of its own, which may be behind."""
    until_now(lambda: "compute buffer size" in started.log.read_text(), started.log.read_text, LOG_MAX_S)
    return started.log.read_text()


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_weights_and_cache_are_what_the_engine_takes(shape: str, tmp_path: Path) -> None:
    make, words = SHAPES[shape]
    path = make(tmp_path)
    with worker(path, "--log-verbosity", "5", *words) as started:
        log = said_by(started)
    options = read((*SMALL, *words), LlamaOptions(model=str(path)))
    header = read_header(path)
    cells = Cells(options.context, options.parallel, options.unified, options.ubatch, options.windows_whole)
    cache = gguf_cache(header)
    # The log has two digits behind the point.
    rounding = pytest.approx(0, abs=0.011 * (2 if "windows" in shape else 1))
    assert header.weights.total_bytes / MIB - logged(log, "model") == rounding
    kv_bytes = sum(attention_bytes(layer, cells, options.type_k, options.type_v) for layer in cache)
    assert kv_bytes / MIB - logged(log, "KV") == rounding
    assert sum(state_bytes(layer, options.parallel) for layer in cache) / MIB - logged(log, "RS") == rounding

    found = parts(estimate_gguf(options, 0, logits_all=False) or Estimate((), ""))
    compute_mib = logged(log, "compute")
    # Whole MiB, rounded up.
    assert compute_mib / COMPUTE_FACTOR <= found["compute buffers"].host_mib <= compute_mib * COMPUTE_FACTOR + 1
    assert found["weights"].host_mib - logged(log, "model") < 1.02
    assert all(part.gpu_mib == 0 for part in found.values())


# --- where it lies --------------------------------------------------------------------------------------------------


def test_all_layers_on_the_gpu_leave_the_table_of_embeddings_on_the_host() -> None:
    weights = parts(estimated(big()))["weights"]
    header = read_header(big()).weights
    assert weights.gpu_mib == -(-(header.total_bytes - header.input_bytes) // MIB)
    assert weights.host_mib == -(-header.input_bytes // MIB)


def test_layers_go_to_the_gpu_from_the_last_one_back_and_the_output_first() -> None:
    header = read_header(big()).weights
    layer_mib = sum(header.layers[0]) / MIB
    only_output = parts(estimated(big(), 1, "-ngl", "1"))
    assert only_output["weights"].gpu_mib == -(-header.output_bytes // MIB)
    assert only_output["KV cache"].gpu_mib == 0
    some = parts(estimated(big(), 1, "-ngl", "5"))
    assert some["weights"].gpu_mib == pytest.approx(4 * layer_mib + header.output_bytes / MIB, abs=1)
    # The cache goes with its layers: 8 MiB each.
    assert (some["KV cache"].gpu_mib, some["KV cache"].host_mib) == (4 * 8, 12 * 8)
    total = some["weights"].gpu_mib + some["weights"].host_mib
    assert total == pytest.approx(header.total_bytes / MIB, abs=2)


def test_a_head_that_is_the_table_of_embeddings_is_on_both(tmp_path: Path) -> None:
    path = estimate_models.windowed(tmp_path / "w.gguf", layers=2, hidden=1024)
    header = read_header(path).weights
    assert not header.has_head and header.embedding_bytes
    weights = parts(estimated(path))["weights"]
    assert weights.gpu_mib == -(-header.total_bytes // MIB) and weights.host_mib == 1


@pytest.mark.parametrize("words", [("-ngl", "0"), ("--device", "none"), ("--n-gpu-layers=0",)])
def test_what_uses_no_gpu_needs_none(words: tuple[str, ...]) -> None:
    need = estimated(big(), 1, *words).need
    assert need.gpu_mib == 0 and need.host_mib > 289 + 128
    assert need == estimated(big(), 0).need


def test_a_model_on_the_cpu_by_its_key_needs_no_gpu() -> None:
    found = LlamaCppEngine().estimate(Model(path=str(big()), device="cpu"), 1)
    assert found is not None and found.need.gpu_mib == 0


def test_a_cache_kept_on_the_host_is_counted_there() -> None:
    found = parts(estimated(big(), 1, "--no-kv-offload"))
    assert (found["KV cache"].gpu_mib, found["KV cache"].host_mib) == (0, 128)
    assert found["weights"].gpu_mib > 280


def test_a_context_is_taken_on_each_gpu_it_is_split_over() -> None:
    one, two = parts(estimated(big(), 1)), parts(estimated(big(), 2))
    assert two["context"].gpu_mib == 2 * one["context"].gpu_mib == 2 * module.CONTEXT_MIB
    assert "context" not in parts(estimated(big(), 0))


def test_experts_that_stay_on_the_host_are_counted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(big())
    whole = header.weights.dense
    halves = {layer: size // 2 for layer, size in whole.items()}
    experts = {layer: size - halves[layer] for layer, size in whole.items()}
    split = replace(header, weights=replace(header.weights, dense=halves, experts=experts))
    monkeypatch.setattr(module, "_header", lambda *stamp: split)
    all_on_gpu = parts(estimated(big(), 1))["weights"]
    some = parts(estimated(big(), 1, "--n-cpu-moe", "4"))["weights"]
    moved = sum(experts[layer] for layer in range(4)) / MIB
    assert all_on_gpu.gpu_mib - some.gpu_mib == pytest.approx(moved, abs=1)
    assert some.host_mib - all_on_gpu.host_mib == pytest.approx(moved, abs=1)
    assert parts(estimated(big(), 1, "-cmoe"))["weights"].gpu_mib < some.gpu_mib


# --- what is loaded besides -----------------------------------------------------------------------------------------


def test_projectors_adapters_and_drafts_come_on_top(tmp_path: Path) -> None:
    projector, adapter = sparse(tmp_path, "mmproj.gguf", 50), sparse(tmp_path, "lora.gguf", 20)
    found = parts(estimated(big(), 1, "--mmproj", str(projector), f"--lora={adapter}", "-md", str(tiny("alpha"))))
    assert found["projector"] == EstimatePart("projector", 65, 0)
    assert found["adapters"] == EstimatePart("adapters", 20, 0)
    assert found["draft weights"].gpu_mib == 1 and "draft context" not in found
    assert parts(estimated(big(), 1, "--mmproj", str(projector), "--no-mmproj-offload"))["projector"].host_mib == 65
    options = read(("--mmproj", str(projector), "-md", "d.gguf"), LlamaOptions(model=str(big())))
    assert files_of(options) == [big(), projector, Path("d.gguf")]


def test_room_for_the_logits_of_a_whole_batch_is_counted_where_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(big())
    wide = replace(header, weights=replace(header.weights, vocabulary=150_000))
    monkeypatch.setattr(module, "_header", lambda *stamp: wide)

    def buffers(logits_all: bool, *words: str) -> int:
        return parts(estimated(big(), 1, *words, logits_all=logits_all))["compute buffers"].gpu_mib

    assert buffers(True) - buffers(False) > 250
    # Embeddings have none.
    assert buffers(True, "--embedding") == buffers(False, "--embedding")


def test_encoders_look_at_a_whole_batch_and_remember_nothing() -> None:
    found = parts(estimated(tiny_embedding(), 1, "-b", "8192", "-ub", "8192", "-c", "8192", "-fa", "off"))
    assert "KV cache" not in found
    # Scores of four heads and a mask, for each token with each.
    assert found["compute buffers"].gpu_mib >= 8192 * 8192 * 4 * (4 + 1) // MIB


def test_longer_contexts_and_wider_numbers_take_more() -> None:
    def cache(*words: str) -> int:
        return parts(estimated(big(), 1, *words))["KV cache"].gpu_mib

    assert cache("-c", "8192") == 2 * cache("-c", "4096") == 256
    assert cache("-ctk", "q8_0", "-ctv", "q8_0") == 68
    # 0 takes the model's own, which is 4,096 here.
    assert cache("-c", "0") == 128


# --- files that do not say ------------------------------------------------------------------------------------------


def test_a_file_whose_header_is_bad_is_judged_by_its_size(tmp_path: Path) -> None:
    path = sparse(tmp_path)
    assert estimated(path, 1) == Estimate((EstimatePart("file", 111, 0),), "file size")
    assert estimated(path, 0).need == Need(0, 111)
    assert estimated(path, 1, "-ngl", "0").need == Need(0, 111)


def test_all_parts_of_a_split_file_count(tmp_path: Path) -> None:
    first = sparse(tmp_path, "big-00001-of-00002.gguf", mib=50)
    sparse(tmp_path, "big-00002-of-00002.gguf", mib=50)
    assert estimated(first).need == Need(111, 0)


def test_a_file_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.gguf", tmp_path, Path("/\0.gguf"), Path("/" + "x" * 300)):
        assert estimate_gguf(LlamaOptions(model=str(path)), 1, logits_all=False) is None


def test_split_models_are_read_in_all_their_files(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    split_gguf(tiny("alpha"), first, second)
    whole = read_header(tiny("alpha")).weights
    model = module._Model.of(first)
    assert model.weights == whole and model.header.shard_count == 2
    assert files_of(LlamaOptions(model=str(first))) == [first, second]
    second.unlink()
    assert estimated(first).source == "file size"


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(tiny("alpha"), path)
    small = estimated(path).need
    shutil.copy(big(), path)
    assert estimated(path).need.gpu_mib > small.gpu_mib + 200
