"""From a folder to a model in an arena: the numbers Transformers itself would load, and typed errors for the rest."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM

from greenroom.workers.torch_host.failures import BadModel, OutOfMemory, WorkCancelled
from greenroom.workers.torch_host.weights import building, loading
from greenroom.workers.torch_host.weights.building import BuildOptions
from greenroom.workers.torch_host.weights.device_weights import DeviceWeights
from greenroom.workers.torch_host.weights.loading import LoadedModule, TextModel, load
from greenroom.workers.torch_host.weights.reading import LoadContext
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from greenroom.workers.torch_host.weights.upload import CopyRate
from tests.workers.torch_host.samples import tiny

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("llama"), "llama")


def options(folder: Path, **changes: Any) -> BuildOptions:
    return BuildOptions(folder, attention="eager", **changes)


def loaded(folder: Path, descriptor: int, filled: bool = False, **changes: Any) -> LoadedModule:
    return load(TextModel(options(folder, **changes)), descriptor, filled, LoadContext())


@pytest.fixture
def is_fallback(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    """Whether Transformers had to load weights since this was last asked."""
    caplog.set_level("INFO")

    def asked() -> bool:
        found = "weights are loaded by Transformers" in caplog.text
        caplog.clear()
        return found

    return asked


def answer(found: LoadedModule) -> torch.Tensor:
    weights = DeviceWeights(found.module, found.arena, CPU, 0, CopyRate())
    weights.wake()
    with torch.no_grad():
        return weights.module(TOKENS)[0]


def own_answer(folder: Path, kind: Any = AutoModelForCausalLM, **how: Any) -> torch.Tensor:
    model = kind.from_pretrained(folder, attn_implementation="eager", **how).eval()
    with torch.no_grad():
        out: torch.Tensor = model(TOKENS)[0]
    return out


@pytest.mark.parametrize("kind", sorted(tiny.KINDS))
def test_a_model_read_straight_from_its_files_computes_what_transformers_does(
    kind: str, tmp_path: Path, descriptor: int, is_fallback: Callable[[], bool]
) -> None:
    folder = tiny.make_model(tmp_path, kind, shards=3)
    expected = own_answer(folder, AutoModel if kind in tiny.ENCODERS else AutoModelForCausalLM)
    assert_close(
        answer(loaded(folder, descriptor, sentence=SentenceConfig() if kind in tiny.ENCODERS else None)), expected
    )
    assert not is_fallback()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_weights_are_converted_to_the_wanted_dtype(
    stored: torch.dtype, wanted: str, tmp_path: Path, descriptor: int
) -> None:
    folder = tiny.make_model(tmp_path, "llama", dtype=stored)
    expected = own_answer(folder, dtype=wanted)
    found = answer(loaded(folder, descriptor, dtype=wanted))
    assert str(found.dtype) == f"torch.{wanted}"
    assert_close(found, expected)


def test_dtype_auto_is_the_configurations(tmp_path: Path, descriptor: int) -> None:
    folder = tiny.make_model(tmp_path, "llama", dtype=torch.bfloat16)
    assert answer(loaded(folder, descriptor)).dtype == torch.bfloat16


def test_dtype_auto_is_the_files_where_the_configuration_has_none(tmp_path: Path, descriptor: int) -> None:
    folder = tiny.make_model(tmp_path, "llama", dtype=torch.float16)
    change_config(folder, lambda config: (config.pop("dtype", None), config.pop("torch_dtype", None)))
    assert answer(loaded(folder, descriptor)).dtype == torch.float16


def test_tied_weights_lie_in_the_arena_once_and_stay_one_object(tmp_path: Path, descriptor: int) -> None:
    found = loaded(tiny.make_model(tmp_path, "llama-tied"), descriptor)
    places = found.arena.layout.places
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]
    weights = DeviceWeights(found.module, found.arena, CPU, 0, CopyRate())
    model: Any = weights.module
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_lie_in_the_order_of_computation(llama: Path, descriptor: int) -> None:
    places = loaded(llama, descriptor).arena.layout.places
    names = sorted(places, key=lambda name: places[name].offset)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)


def test_a_filled_arena_is_adopted_without_reading(llama: Path, descriptor: int) -> None:
    first = loaded(llama, descriptor)
    expected = answer(first)
    again = loaded(llama, descriptor, filled=True)
    assert first.read_bytes > 0
    assert again.read_bytes == 0
    assert_close(answer(again), expected)


def test_an_arena_of_files_that_have_changed_is_filled_anew(tmp_path: Path, descriptor: int) -> None:
    folder = tiny.make_model(tmp_path, "llama", seed=1)
    loaded(folder, descriptor)
    tiny.make_model(tmp_path, "llama", seed=2)
    again = loaded(folder, descriptor, filled=True)
    assert again.read_bytes > 0
    assert_close(answer(again), own_answer(folder))


def test_a_model_saved_without_its_head_serves_embeddings_and_the_other_way_round(
    llama: Path, tmp_path: Path, descriptor: int, is_fallback: Callable[[], bool]
) -> None:
    expected = own_answer(llama, AutoModel)
    assert_close(answer(loaded(llama, descriptor, sentence=SentenceConfig())), expected)
    bare = tmp_path / "bare"
    tiny.make_model(bare, "llama")
    weights = load_file(bare / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in weights.items()}, bare / "model.safetensors")
    assert_close(answer(loaded(bare, descriptor, sentence=SentenceConfig())), expected)
    assert not is_fallback()


EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    # Here Transformers has other names for nearly everything than the files.
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("kind", sorted(EXPERTS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stored_one_by_one_are_read_straight_to_where_they_are_used(
    kind: str, dtype: str, tmp_path: Path, descriptor: int, is_fallback: Callable[[], bool]
) -> None:
    folder = make_moe(tmp_path, kind)
    expected = own_answer(folder, dtype=dtype)
    found = loaded(folder, descriptor, dtype=dtype)
    assert any(name.endswith("experts.gate_up_proj") for name in found.arena.layout.places)
    assert_close(answer(found), expected)
    assert not is_fallback()


def test_what_only_transformers_can_make_of_the_files_is_adopted_without_it(
    tmp_path: Path, descriptor: int, is_fallback: Callable[[], bool]
) -> None:
    folder = tiny.store_oddly(make_moe(tmp_path, "qwen3_moe"))
    expected = own_answer(folder)
    assert_close(answer(loaded(folder, descriptor)), expected)
    assert is_fallback()
    again = loaded(folder, descriptor, filled=True)
    assert again.read_bytes == 0 and not is_fallback()
    assert_close(answer(again), expected)


def test_an_expert_that_is_not_there_is_a_bad_model(tmp_path: Path, descriptor: int) -> None:
    folder = make_moe(tmp_path, "qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(BadModel):
        loaded(folder, descriptor)
    assert os.fstat(descriptor).st_size == 0


def make_moe(folder: Path, kind: str) -> Path:
    """A mixture of experts as it is published: every expert's weights under a name of their own."""
    from transformers import AutoConfig

    base = {**tiny.SHARED, **tiny.KINDS["qwen3"], "model_type": kind, **EXPERTS[kind]}
    config = AutoConfig.for_model(**base)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tiny.fill(model, 5)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert any(".experts.3." in name for name in stored)
    return folder


def test_a_tied_head_that_is_stored_with_other_values_is_not_tied(tmp_path: Path, descriptor: int) -> None:
    folder = tiny.make_model(tmp_path, "llama-tied")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    save_file(weights, folder / "model.safetensors")
    found = loaded(folder, descriptor)
    assert found.arena.layout.places["lm_head.weight"] != found.arena.layout.places["model.embed_tokens.weight"]
    assert_close(answer(found), own_answer(folder))


def test_a_pickle_is_refused_and_taken_when_allowed(tmp_path: Path, descriptor: int) -> None:
    folder = tiny.make_model(tmp_path, "llama")
    expected = own_answer(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadModel, match=r"pytorch_model\.bin, a pickle.*allow_pickle: true"):
        loaded(folder, descriptor)
    assert os.fstat(descriptor).st_size == 0
    assert_close(answer(loaded(folder, descriptor, allow_pickle=True)), expected)


def test_a_pickle_that_runs_code_runs_none_even_when_allowed(tmp_path: Path, descriptor: int) -> None:
    folder = tiny.make_model(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    proof = tmp_path / "ran"
    torch.save({"x": _Runs(proof)}, folder / "pytorch_model.bin")
    with pytest.raises(BadModel, match="cannot load"):
        loaded(folder, descriptor, allow_pickle=True)
    assert not proof.exists()


class _Runs:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.proof,)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def shrink_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors")


def make_weights_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int64)
    save_file(weights, folder / "model.safetensors")


def lie_about_a_size(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [1_000_000]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


BAD = {
    "missing config": (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "config"),
    "unknown kind": (
        lambda folder: change_config(folder, lambda config: config.update(model_type="nonesuch")),
        "nonesuch",
    ),
    "layers without end": (
        lambda folder: change_config(folder, lambda config: config.update(num_hidden_layers=10**9)),
        r"has 1,000,000,000 layers by its config\.json",
    ),
    "missing weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 300_000), "is cut off: tensor"),
    "lying header": (lie_about_a_size, r"of shape \[1000000\], which are 4,000,000 bytes"),
    "a weight is not there": (drop_a_weight, r"lacks 1 weights of LlamaForCausalLM.*layers\.1\.mlp\.down_proj"),
    "a weight of another shape": (shrink_a_weight, r"cannot load"),
    "a quantisation that is not installed": (
        lambda folder: change_config(
            folder,
            lambda config: config.update(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ),
        "cannot load",
    ),
    "code of its own": (
        lambda folder: change_config(
            folder, lambda config: config.update(model_type="own", auto_map={"AutoConfig": "own.Config"})
        ),
        "trust_remote_code: true",
    ),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_model_is_said_to_be_bad_and_leaves_nothing(name: str, tmp_path: Path, descriptor: int) -> None:
    folder = tiny.make_model(tmp_path, "llama")
    spoil, says = BAD[name]
    spoil(folder)
    with pytest.raises(BadModel, match=says):
        loaded(folder, descriptor)
    assert os.fstat(descriptor).st_size == 0


def test_whole_numbers_in_place_of_weights_are_never_taken_for_their_bits(tmp_path: Path, descriptor: int) -> None:
    folder = tiny.make_model(tmp_path, "llama")
    make_weights_numbers(folder)
    found = loaded(folder, descriptor)
    norm: Any = found.arena.layout.places["model.norm.weight"]
    assert norm.dtype == "float32"
    assert_close(answer(found), own_answer(folder))


def test_an_unknown_dtype_is_refused_with_the_known_ones(llama: Path, descriptor: int) -> None:
    with pytest.raises(BadModel, match=r"dtype 'int7' is not known; choose one of auto, bfloat16"):
        loaded(llama, descriptor, dtype="int7")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, descriptor: int) -> None:
    with pytest.raises(BadModel, match="is not a folder"):
        loaded(tmp_path / "nowhere", descriptor)


def test_a_model_larger_than_its_arena_may_be_is_refused(llama: Path, descriptor: int) -> None:
    with pytest.raises(OutOfMemory, match="100,000 are allowed"):
        load(TextModel(options(llama)), descriptor, False, LoadContext(arena_max_bytes=100_000))
    assert os.fstat(descriptor).st_size == 0


def test_a_cancelled_load_leaves_nothing(llama: Path, descriptor: int) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(WorkCancelled):
        load(TextModel(options(llama)), descriptor, False, LoadContext(cancelled=cancelled))
    assert os.fstat(descriptor).st_size == 0


@pytest.mark.parametrize("step", ["before it is built", "after it was built", "after Transformers had it", "poured"])
def test_a_load_is_called_off_between_its_steps_and_within_its_own(
    step: str, tmp_path: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.store_oddly(tiny.make_model(tmp_path, "llama"))
    cancelled, done = threading.Event(), list[str]()

    def during(owner: Any, name: str, at: str) -> None:
        call = getattr(owner, name)

        def calling(*given: Any, **named: Any) -> Any:
            done.append(name)
            if step == at:
                cancelled.set()
            return call(*given, **named)

        monkeypatch.setattr(owner, name, calling)

    # Between steps nothing is reported, so the steps themselves are watched.
    during(building, "read_config", "before it is built")
    during(building, "build", "after it was built")
    during(building, "load_whole", "after Transformers had it")
    during(loading, "view_of", "poured")
    with pytest.raises(WorkCancelled, match="no request waits"):
        load(TextModel(options(folder)), descriptor, False, LoadContext(cancelled=cancelled))
    last = {
        "before it is built": "read_config",
        "after it was built": "build",
        "after Transformers had it": "load_whole",
    }
    assert done[-1] == last.get(step, "view_of")
    assert done.count("view_of") == (step == "poured")
    assert os.fstat(descriptor).st_size == 0


def test_the_identity_of_an_arena_follows_files_dtype_and_kind(tmp_path: Path, descriptor: int) -> None:
    """What was filled as another is not adopted, but read again."""
    folder = tiny.make_model(tmp_path, "llama")

    def reads(**changes: Any) -> bool:
        return loaded(folder, descriptor, filled=True, **changes).read_bytes > 0

    assert reads() and not reads()
    assert reads(dtype="float16") and not reads(dtype="float16")
    assert reads(dtype="float16", sentence=SentenceConfig())
    assert not reads(dtype="float16", sentence=SentenceConfig())
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert reads(dtype="float16", sentence=SentenceConfig())
