"""What a configuration says of a model's memory; and inputs that are embedded in groups."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.workers.torch_host.engine.embedding import TOKENS_MAX, group_by_length
from greenroom.workers.torch_host.engine.engine_loop import EngineLoop
from greenroom.workers.torch_host.engine.model_shape import (
    BLOCK_TOKENS,
    LayerShape,
    blocks_for,
    kv_bytes,
    layer_shapes,
)
from greenroom.workers.torch_host.engine.prefix_cache import BlockPool
from greenroom.workers.torch_host.engine.requests import PromptTooLong, Vectors
from greenroom.workers.torch_host.failures import BadModel
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from tests.workers.torch_host.engine_rig import WAIT_S, ask, prompt, random_model, running


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
    assert kv_bytes(config(), "bfloat16", 100) == 4 * 2 * 8 * 32 * 2 * (7 + 1) * BLOCK_TOKENS
    assert kv_bytes(config(), "torch.float32", 100) == 2 * kv_bytes(config(), "bfloat16", 100)


def test_blocks_are_numbers_taken_once_and_given_back() -> None:
    blocks = BlockPool(100)
    taken = blocks.take(7)
    assert sorted(taken) == [1, 2, 3, 4, 5, 6, 7]
    assert blocks.free == 0
    blocks.give(taken[:3])
    assert sorted(blocks.take(3)) == sorted(taken[:3])
    blocks.clear()
    assert blocks.free == blocks.total == 7


def test_a_block_more_than_there_are_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        BlockPool(16).take(2)


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


MEAN = SentenceConfig()
INPUTS = [prompt(length) for length in (9, 3, 30, 9, 17)]


def embedded(engine: EngineLoop, inputs: list[list[int]], skipped: list[int] | None = None) -> Vectors | Exception:
    results: list[Vectors | Exception] = []
    done = threading.Event()

    def on_done(result: Vectors | Exception) -> None:
        results.append(result)
        done.set()

    engine.embed(inputs, on_done, skipped)
    assert done.wait(WAIT_S)
    assert len(results) == 1
    return results[0]


def test_a_model_embeds_or_writes_text_and_says_which() -> None:
    with running(random_model("bert"), cache_tokens=0, sentence=MEAN) as engine, pytest.raises(PromptTooLong):
        engine.submit(ask(prompt(3))[0])
    with running(random_model("llama")) as engine:
        assert isinstance(embedded(engine, INPUTS), PromptTooLong)


def test_an_input_too_long_or_empty_is_said_and_not_computed() -> None:
    with running(random_model("bert"), cache_tokens=0, context=64, sentence=MEAN) as engine:
        assert isinstance(embedded(engine, [prompt(65)]), PromptTooLong)
        assert isinstance(embedded(engine, [prompt(5), []]), PromptTooLong)
        assert isinstance(embedded(engine, []), PromptTooLong)


def test_a_failure_reaches_its_request_and_the_next_is_served() -> None:
    model = random_model("bert")
    with running(model, cache_tokens=0, sentence=MEAN) as engine:
        broken = model.register_forward_pre_hook(lambda *_: 1 / 0)
        assert isinstance(embedded(engine, INPUTS), Exception)
        broken.remove()
        assert isinstance(embedded(engine, INPUTS), list)
        assert engine.in_flight == 0


def test_a_prompt_that_is_all_of_an_input_leaves_its_last_token() -> None:
    with running(random_model("bert"), cache_tokens=0, sentence=SentenceConfig(pooling=("max",))) as engine:
        vectors = embedded(engine, [prompt(5), prompt(3)], [9, 0])
        last = embedded(engine, [prompt(5)], [4])
    assert isinstance(vectors, list) and isinstance(last, list)
    assert vectors[0] == pytest.approx(last[0], abs=1e-4)


@pytest.mark.parametrize(("pads", "count"), [(True, 4), (False, 5)])
def test_groups_are_as_large_as_they_may_be_and_hold_each_input_once(pads: bool, count: int) -> None:
    inputs = [[0] * length for length in (5000, 3, 2000, 2000, 2000, 2000, 8192, 1)]
    groups = group_by_length(inputs, pads)
    assert sorted(number for group in groups for number in group) == list(range(len(inputs)))
    assert all(len(group) * max(len(inputs[number]) for number in group) <= TOKENS_MAX for group in groups)
    assert len(groups) == count
