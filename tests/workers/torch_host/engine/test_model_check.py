"""What a configuration says of a model, inputs in groups, and the check that it answers as Transformers does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.control.preparing import PreparedText, prepare
from greenroom.workers.torch_host.control.resources import DeviceContext
from greenroom.workers.torch_host.control.slot_options import Opening, SlotOptions
from greenroom.workers.torch_host.engine.block_manager import PrefixCache
from greenroom.workers.torch_host.engine.embedding import TOKENS_MAX, group_by_length
from greenroom.workers.torch_host.engine.engine_loop import EngineLoop, EngineSizes
from greenroom.workers.torch_host.engine.model_check import ModelCheck
from greenroom.workers.torch_host.engine.model_shape import BLOCK_TOKENS, LayerShape, blocks_for, kv_bytes, layer_shapes
from greenroom.workers.torch_host.engine.requests import PromptTooLong, Vectors
from greenroom.workers.torch_host.failures import BadModel, Failure, OutOfMemory
from greenroom.workers.torch_host.kernels.attention import IMPLEMENTATION, register
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from greenroom.workers.torch_host.weights.upload import CopyRate
from tests.torch_python import bring_own_attention
from tests.workers.torch_host.engine_rig import WAIT_S, FakeDeviceModel, Flat, ask, prompt, random_model, running, said
from tests.workers.torch_host.families import CONTEXT, SEQUENCES, tiny_model
from tests.workers.torch_host.samples import tiny
from tests.workers.torch_host.samples.own_attention import OwnConfig, OwnForCausalLM


def own_model(**changes: Any) -> Any:
    torch.manual_seed(1)
    model = OwnForCausalLM(OwnConfig(**{**tiny.SHARED, **tiny.SIZES, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    return model


# --- what is refused ------------------------------------------------------------------------------------------------


def test_attention_that_is_not_the_models_own_is_refused_with_both_numbers() -> None:
    words = (
        r"OwnForCausalLM answers otherwise.*differ by \d.* of their spread, and rounding explains \d.*skip_check: true"
    )
    with pytest.raises(BadModel, match=words), running(own_model(), check=ModelCheck(None)):
        pass


def test_without_the_check_it_is_served() -> None:
    with running(own_model()) as engine:
        assert len(said(engine, prompt(20), 4).ids) == 4


def test_a_mask_of_the_models_own_is_refused_before_the_first_request() -> None:
    with (
        pytest.raises(BadModel, match="OwnAttention makes an attention mask"),
        running(own_model(own_mask=True), check=ModelCheck(None)),
    ):
        pass


def test_a_window_that_no_layer_speaks_of_is_refused_where_texts_can_be_longer() -> None:
    """Phimoe masks by it and does not hand it on. Within the window all is well."""
    model = tiny_model("phimoe")
    model.config.sliding_window = 40
    with pytest.raises(BadModel, match="ctx_size to at most 40"), running(model, check=ModelCheck(None), context=64):
        pass
    with running(model, check=ModelCheck(None), context=40) as engine:
        assert said(engine, SEQUENCES[1], 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "qwen3_moe"])
def test_rounding_is_no_reason_to_refuse(family: str, dtype: torch.dtype) -> None:
    with awake(tiny_model(family).to(dtype), dtype):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wrong_answer_is_told_from_rounding(dtype: torch.dtype) -> None:
    with pytest.raises(BadModel, match="answers otherwise"), awake(own_model().to(dtype), dtype):
        pass


def with_check(model: Any, dtype: torch.dtype) -> EngineLoop:
    """An engine that is asleep and has a check to make."""
    register()
    model.set_attn_implementation(IMPLEMENTATION)
    kv = torch.zeros(kv_bytes(model.config, dtype.itemsize, CONTEXT), dtype=torch.uint8)
    return EngineLoop(
        FakeDeviceModel(model, model.config, Flat(kv), dtype=dtype),
        EngineSizes(CONTEXT, batch_max=1, context=CONTEXT),
        on_fatal=lambda error, say: pytest.fail(f"the thread has ended: {error}"),
        check=ModelCheck(None),
    )


@contextmanager
def awake(model: Any, dtype: torch.dtype) -> Iterator[EngineLoop]:
    made = with_check(model, dtype)
    try:
        made.on_wake()
        yield made
    finally:
        made.close()


def test_a_model_with_fewer_places_than_the_check_needs_is_served_without() -> None:
    with running(random_model("gpt2", n_positions=16), context=16, check=ModelCheck(None)) as engine:
        assert len(said(engine, prompt(8), 4).ids) == 4


# --- what happens around it -----------------------------------------------------------------------------------------


def test_memory_that_is_short_is_no_difference_and_the_next_wake_tries_again() -> None:
    model = random_model("llama")
    failures = [torch.OutOfMemoryError("out of memory")]
    calls: list[int] = []

    def fail_first(*_: object) -> None:
        calls.append(1)
        if failures:
            raise failures.pop()

    model.register_forward_pre_hook(fail_first)
    with pytest.raises(OutOfMemory), running(model, check=ModelCheck(None)) as engine:
        pass
    with running(model, check=ModelCheck(None)) as engine:
        assert said(engine, prompt(20), 4)


def test_a_model_that_was_refused_can_be_woken_again_and_is_refused_again() -> None:
    made = with_check(own_model(), torch.float32)
    for _ in range(2):
        with pytest.raises(BadModel, match="answers otherwise"):
            made.on_wake()
    made.close()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny.make_model(tmp_path / "llama", "llama")


class Counted:
    """A model prepared from its folder, whose forward passes are counted from then on."""

    def __init__(self, folder: Path, **more: Any) -> None:
        order = SlotOptions("s", "m", folder, Path("unused"), device="cpu", cache_tokens=512, **more)
        around = DeviceContext(torch.device("cpu"), CopyRate(), on_fatal=lambda error, say: say())
        self._memory = os.memfd_create("arena")
        self.made: PreparedText = prepare(order, self._memory, around, Opening())
        self.forwards = 0
        self.made.weights.module.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.forwards += 1

    def woken(self) -> int:
        """Wake and go to sleep again. Says how many forward passes that took."""
        before = self.forwards
        self.made.weights.wake()
        self.made.engine.on_wake()
        self.made.engine.on_sleep()
        self.made.weights.sleep()
        return self.forwards - before

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.made.engine.close()
        self.made.weights.close()
        self.made.text.close()
        os.close(self._memory)


def test_each_set_of_files_is_checked_once_whatever_process_comes_next(llama: Path, tmp_path: Path) -> None:
    checked = tmp_path / "checked"
    with Counted(llama, checked=checked) as first:
        assert first.woken() > 0
        assert first.woken() == 0
    with Counted(llama, checked=checked) as again:
        assert again.woken() == 0
    with Counted(llama, checked=checked, dtype="bfloat16") as other_dtype:
        assert other_dtype.woken() > 0
    tiny.make_model(llama, "llama", seed=2)
    with Counted(llama, checked=checked) as other_weights:
        assert other_weights.woken() > 0


def test_an_operator_can_leave_it_out_and_what_only_embeds_has_none(llama: Path) -> None:
    with Counted(llama, skip_check=True) as skipped:
        assert skipped.woken() == 0
    with Counted(llama, embedding=True) as embedding:
        assert embedding.woken() == 0


def test_code_that_comes_with_a_model_is_compared_with_itself(tmp_path: Path) -> None:
    folder = tiny.make_model(tmp_path / "own", "llama")
    bring_own_attention(folder)
    with pytest.raises(BadModel, match="answers otherwise"), Counted(folder, trust_remote_code=True) as own:
        own.woken()
    with Counted(folder, trust_remote_code=True, skip_check=True) as own:
        assert own.woken() == 0


def config(**changes: Any) -> Any:
    plain = {"model_type": "some", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256}
    return SimpleNamespace(**{**plain, **changes})


def test_layers_keep_as_many_heads_as_the_configuration_says() -> None:
    assert layer_shapes(config()) == (LayerShape(8, 32, 32),) * 4
    assert layer_shapes(config(num_key_value_heads=2, head_dim=64)) == (LayerShape(2, 64, 64),) * 4
    assert layer_shapes(config(multi_query=True)) == (LayerShape(1, 32, 32),) * 4


def test_latent_attention_is_kept_unfolded() -> None:
    latent = config(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    assert layer_shapes(latent)[0] == LayerShape(8, 24, 12)


def test_the_language_model_of_a_larger_one_is_what_counts() -> None:
    assert layer_shapes(SimpleNamespace(get_text_config=config)) == layer_shapes(config())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_kv_shared_layers": 2}, "shares keys"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_key_value_heads": [1, 2, 3, 4]}, "different widths"),
    ],
)
def test_what_does_not_fit_pages_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BadModel, match=why) as refused:
        layer_shapes(config(**changes))
    assert "some" in str(refused.value)


def test_kv_bytes_count_tokens_layers_and_the_scratch_block() -> None:
    # 4 layers, keys and values, 8 heads of 32 numbers of 2 bytes; 100 tokens are 7 blocks, plus the scratch block.
    assert kv_bytes(config(), 2, 100) == 4 * 2 * 8 * 32 * 2 * (7 + 1) * BLOCK_TOKENS
    assert kv_bytes(config(), 4, 100) == 2 * kv_bytes(config(), 2, 100)


def test_blocks_are_numbers_taken_once_and_given_back() -> None:
    blocks = PrefixCache(100, 1)
    taken = blocks.take(7)
    assert sorted(taken) == [1, 2, 3, 4, 5, 6, 7]
    assert blocks.available == 0
    blocks.give(taken[:3])
    assert sorted(blocks.take(3)) == sorted(taken[:3])
    blocks.clear()
    assert blocks.available == blocks.total == 7


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


MEAN = SentenceConfig()
INPUTS = [prompt(length) for length in (9, 3, 30, 9, 17)]


def embedded(engine: EngineLoop, inputs: list[list[int]], skipped: list[int] | None = None) -> Vectors:
    return engine.embed(inputs, skipped or [0] * len(inputs)).result(WAIT_S)


def test_a_model_embeds_or_writes_text_and_says_which() -> None:
    with running(random_model("bert"), cache_tokens=0, sentence=MEAN) as engine, pytest.raises(PromptTooLong):
        engine.submit(ask(prompt(3))[0])
    with running(random_model("llama")) as engine, pytest.raises(PromptTooLong):
        embedded(engine, INPUTS)


def test_an_input_too_long_or_empty_is_said_and_not_computed() -> None:
    with running(random_model("bert"), cache_tokens=0, context=64, sentence=MEAN) as engine:
        for inputs in ([prompt(65)], [prompt(5), []], []):
            with pytest.raises(PromptTooLong):
                embedded(engine, inputs)


def test_a_failure_reaches_its_request_and_the_next_is_served() -> None:
    model = random_model("bert")
    with running(model, cache_tokens=0, sentence=MEAN) as engine:
        broken = model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(Failure):
            embedded(engine, INPUTS)
        broken.remove()
        assert len(embedded(engine, INPUTS)) == len(INPUTS)
        assert engine.in_flight == 0


def test_a_prompt_that_is_all_of_an_input_leaves_its_last_token() -> None:
    with running(random_model("bert"), cache_tokens=0, sentence=SentenceConfig(pooling=("max",))) as engine:
        vectors = embedded(engine, [prompt(5), prompt(3)], [9, 0])
        last = embedded(engine, [prompt(5)], [4])
    assert vectors[0] == pytest.approx(last[0], abs=1e-4)


@pytest.mark.parametrize(("pads", "count"), [(True, 4), (False, 5)])
def test_groups_are_as_large_as_they_may_be_and_hold_each_input_once(pads: bool, count: int) -> None:
    inputs = [[0] * length for length in (5000, 3, 2000, 2000, 2000, 2000, 8192, 1)]
    groups = group_by_length(inputs, pads)
    assert sorted(number for group in groups for number in group) == list(range(len(inputs)))
    assert all(len(group) * max(len(inputs[number]) for number in group) <= TOKENS_MAX for group in groups)
    assert len(groups) == count
