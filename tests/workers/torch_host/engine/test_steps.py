"""Each kind of step against attention written out by hand, and models that run as Transformers runs them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from greenroom.workers.torch_host.engine.model_shape import LayerShape, kv_bytes, slots_for
from greenroom.workers.torch_host.engine.runner import (
    DecodeInputs,
    DecodeRow,
    ModelRunner,
    PrefillChunk,
    batch_sizes,
    bucket,
    token_sizes,
)
from greenroom.workers.torch_host.engine.steps import DecodeStep, PrefillStep, Span, slots_of
from greenroom.workers.torch_host.failures import BadModel
from greenroom.workers.torch_host.kernels.attention import (
    AttentionKernels,
    AttentionOptions,
    LayerKV,
    as_current_step,
    paged_attention,
    stores_in,
)
from tests.workers.torch_host.engine_rig import device_model_of, generated, prompt, random_model
from tests.workers.torch_host.samples.tiny import SHARED, SIZES

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 6, 2, 8, 12
SHAPE = LayerShape(KV_HEADS, KEY_DIM, VALUE_DIM)
SINKS = torch.linspace(-1, 2, HEADS)
HOWS = [
    AttentionOptions(scale=0.3),
    AttentionOptions(scale=0.3, window=5),
    AttentionOptions(scale=0.7, softcap=2.0),
    AttentionOptions(scale=0.3, sinks=SINKS),
    AttentionOptions(scale=0.5, window=3, softcap=1.5, sinks=SINKS),
]
BLOCKS = [[3, 1, 5], [2, 7, 4]]


def some(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size)))


def by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: int, how: AttentionOptions
) -> torch.Tensor:
    """One token's `[heads, dim]` over the `[tokens, kv heads, dim]` it may see."""
    first = 0 if how.window is None else max(0, at - how.window + 1)
    out = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = [float(query[head] @ keys[one, shared]) * how.scale for one in range(first, at + 1)]
        if how.softcap is not None:
            scores = [how.softcap * math.tanh(score / how.softcap) for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (0 if how.sinks is None else math.exp(float(how.sinks[head])))
        out.append(sum(weight / total * values[first + one, shared] for one, weight in enumerate(weights)))
    return torch.stack(out)  # type: ignore[arg-type]


def store() -> LayerKV:
    memory = torch.zeros(16 * 1024, dtype=torch.float32).view(torch.uint8)
    return stores_in(memory, [SHAPE], torch.float32, 7 * 16)[0]


# Query, key and value of one token, and the step that computes it.
TOKEN = some(1, HEADS, 1, KEY_DIM), some(1, KV_HEADS, 1, KEY_DIM), some(1, KV_HEADS, 1, VALUE_DIM)


def first_step() -> DecodeStep:
    return DecodeStep([store()], AttentionKernels(), torch.tensor([0]), torch.tensor([[1]], dtype=torch.int32))


@pytest.mark.parametrize("how", HOWS)
def test_pieces_of_prompts_see_their_own_past_and_nothing_else(how: AttentionOptions) -> None:
    kept = store()
    counts, query = [20, 11], [some(31, HEADS, KEY_DIM, seed=n) for n in (1, 2)]
    keys, values = (
        [some(31, KV_HEADS, KEY_DIM, seed=n) for n in (3, 4)],
        [some(31, KV_HEADS, VALUE_DIM, seed=n) for n in (5, 6)],
    )
    done = [0, 0]
    for pieces in ([9, 11], [11, 0]):
        spans, write, read, asks, new_keys, new_values = [], [], [], [], [], []
        for one, count in enumerate(pieces):
            if count:
                past = done[one]
                spans.append(Span(len(write), count, past))
                write += slots_of(BLOCKS[one], past, past + count)
                read += slots_of(BLOCKS[one], 0, past + count)
                asks.append(query[one][past : past + count])
                new_keys.append(keys[one][past : past + count])
                new_values.append(values[one][past : past + count])
        step = PrefillStep([kept], AttentionKernels(), spans, torch.tensor(write), torch.tensor(read))
        out = step.attend(0, *(torch.cat(part).transpose(0, 1)[None] for part in (asks, new_keys, new_values)), how)[0]
        at = 0
        for one, count in enumerate(pieces):
            for place in range(done[one], done[one] + count):
                want = by_hand(query[one][place], keys[one], values[one], place, how)
                assert torch.allclose(out[at], want, atol=1e-4)
                at += 1
            done[one] += count
    assert done == counts


@pytest.mark.parametrize("how", HOWS)
def test_each_row_decodes_over_its_own_pages(how: AttentionOptions) -> None:
    kept = store()
    lengths = [33, 7]
    keys, values = (
        [some(40, KV_HEADS, KEY_DIM, seed=n) for n in (3, 4)],
        [some(40, KV_HEADS, VALUE_DIM, seed=n) for n in (5, 6)],
    )
    for row, length in enumerate(lengths):
        slots = torch.tensor(slots_of(BLOCKS[row], 0, length - 1))
        kept.key[slots], kept.value[slots] = keys[row][: length - 1], values[row][: length - 1]
    query = some(2, HEADS, 1, KEY_DIM)
    step = DecodeStep([kept], AttentionKernels(), torch.tensor(lengths) - 1, torch.tensor(BLOCKS, dtype=torch.int32))
    newest = [torch.stack([part[row][length - 1] for row, length in enumerate(lengths)]) for part in (keys, values)]
    out = step.attend(0, query, newest[0][:, :, None], newest[1][:, :, None], how)
    for row, length in enumerate(lengths):
        want = by_hand(query[row, :, 0], keys[row], values[row], length - 1, how)
        assert torch.allclose(out[row, 0], want, atol=1e-4)


def test_stores_lie_one_after_the_other_and_fill_what_was_counted() -> None:
    config: Any = type(
        "C", (), {"model_type": "x", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
    )()
    memory = torch.zeros(kv_bytes(config, 2, 40), dtype=torch.uint8)
    stores = stores_in(memory, [LayerShape(4, 8, 8)] * 3, torch.float16, 40)
    for number, one in enumerate(stores):
        one.key.fill_(2 * number + 1)
        one.value.fill_(2 * number + 2)
    assert stores[0].key.shape == (slots_for(40), 4, 8)
    assert [float(part.float().mean()) for one in stores for part in (one.key, one.value)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("layer", "key", "why"),
    [
        (None, (1, KV_HEADS, 1, KEY_DIM), "number None"),
        (1, (1, KV_HEADS, 1, KEY_DIM), "number 1"),
        (0, (1, 3, 1, 8), "3 heads"),
    ],
)
def test_a_model_that_does_otherwise_than_it_said_is_refused(layer: int | None, key: tuple[int, ...], why: str) -> None:
    query, _, value = TOKEN
    with pytest.raises(BadModel, match=why):
        first_step().attend(layer, query, some(*key), value, AttentionOptions(scale=1.0))


def test_a_layer_that_attends_twice_in_a_step_is_refused() -> None:
    step = first_step()
    step.attend(0, *TOKEN, AttentionOptions(scale=1.0))
    with pytest.raises(BadModel, match="layer 0 attends twice"):
        step.attend(0, *TOKEN, AttentionOptions(scale=1.0))


def test_a_mask_of_the_models_own_and_a_look_ahead_are_refused_where_pages_are_read() -> None:
    class Attention(torch.nn.Module):
        layer_idx, is_causal = 0, True

    module, mask = Attention(), torch.zeros(1, 1, 1, 1)
    step = first_step()
    with as_current_step(step), pytest.raises(BadModel, match="Attention makes an attention mask of its own"):
        paged_attention(module, *TOKEN, mask)
    with as_current_step(step), pytest.raises(BadModel, match="Attention looks at later tokens"):
        paged_attention(module, *TOKEN, None, is_causal=False)
    with as_current_step(step):
        assert paged_attention(module, *TOKEN, None)[0].shape == (1, 1, HEADS, VALUE_DIM)


def test_attention_outside_of_a_step_and_a_bias_by_position_are_refused() -> None:
    module = torch.nn.Module()
    with pytest.raises(RuntimeError, match="outside"):
        paged_attention(module, *TOKEN, None)
    with as_current_step(first_step()), pytest.raises(BadModel, match="bias"):
        paged_attention(module, *TOKEN, None, position_bias=torch.zeros(1))


CPU = torch.device("cpu")


def config_of(**said: Any) -> Any:
    return AutoConfig.for_model(**{**SHARED, **said})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "bloom", "hidden_size": 64, "n_layer": 1, "n_head": 4}, "way of its own"),
        (
            {"model_type": "roberta", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
            "counts positions",
        ),
        ({"model_type": "lfm2", **SIZES, "layer_types": ["conv", "full_attention", "conv"]}, "conv"),
        ({"model_type": "gemma4_unified_text", **SIZES, "head_dim": 8, "global_head_dim": 16}, "different widths"),
    ],
)
def test_a_model_whose_state_is_no_flat_kv_is_refused_by_name(config: dict[str, Any], why: str) -> None:
    model = AutoModelForCausalLM.from_config(config_of(**config))
    on_device = SimpleNamespace(module=model, config=model.config, device=CPU, dtype=torch.float32, kv=None)
    with pytest.raises(BadModel, match=why):
        ModelRunner(on_device, 64, 1, 64)  # type: ignore[arg-type]


def test_a_model_built_with_another_attention_is_refused() -> None:
    model = random_model("llama")
    on_device = device_model_of(model, 64)
    model.set_attn_implementation("sdpa")
    with pytest.raises(BadModel, match="sdpa"):
        ModelRunner(on_device, 64, 1, 64)


@pytest.mark.parametrize(
    "config",
    [
        # Memory viewed in another shape; sinks and windows; keys wider than values; positions that are learned.
        {"model_type": "afmoe", **SIZES, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "gpt_oss", **SIZES, "head_dim": 16, "sliding_window": 24, "num_local_experts": 4},
        {
            "model_type": "deepseek_v3",
            **SIZES,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "num_experts_per_tok": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        {"model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128},
    ],
    ids=lambda config: config["model_type"],
)
def test_unusual_models_choose_as_transformers_does(config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(**config, word_embed_proj_dim=64), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 or "sinks" in name:
                weight.normal_(0, 0.2)
    want = generated(model, prompt(30), 8)
    runner = ModelRunner(device_model_of(model, 64), 64, 1, 64)
    runner.on_wake()
    assert decoded(runner, prompt(30), [2, 4, 1], 8) == want


def decoded(runner: ModelRunner, tokens: list[int], blocks: list[int], count: int) -> list[int]:
    chosen = [int(runner.prefill([PrefillChunk(tokens, 0, blocks, True)]).argmax(-1))]
    runner.inputs.set_rows([DecodeRow(chosen[0], len(tokens), blocks)])
    for _ in range(count - 1):
        token = runner.decode(1, len(tokens) + len(chosen)).argmax(-1)
        runner.inputs.set_tokens(token)
        chosen.append(int(token))
    return chosen


def test_a_model_that_cannot_leave_logits_out_is_served_too() -> None:
    model = random_model("llama")
    want = generated(model, prompt(20), 5)

    class Plain(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:
            return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    model.__class__ = Plain
    runner = ModelRunner(device_model_of(model, 64), 64, 1, 64)
    runner.on_wake()
    assert decoded(runner, prompt(20), [1, 2], 5) == want


def test_rows_that_only_fill_up_stand_still_on_the_scratch_block() -> None:
    rows = DecodeInputs(4, 6, CPU)
    rows.set_rows([DecodeRow(7, 20, [3, 4]), DecodeRow(8, 5, [5]), DecodeRow(9, 1, [6])])
    rows.advance(4)
    tokens, positions, table = rows.views(4, 3)
    assert (tokens.tolist(), positions.tolist()) == ([7, 8, 9, 0], [21, 6, 2, 0])
    assert table.tolist() == [[3, 4, 0], [5, 0, 0], [6, 0, 0], [0, 0, 0]]
    rows.grow(0, 2, [9])
    rows.set_rows([DecodeRow(1, 2, [8])])
    rows.advance(4)
    tokens, positions, table = rows.views(4, 3)
    assert (tokens.tolist(), positions.tolist()) == ([1, 0, 0, 0], [3, 0, 0, 0])
    assert table.tolist() == [[8, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_sizes_double_up_to_the_largest_and_the_smallest_that_fits_is_taken() -> None:
    assert batch_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert token_sizes(1040) == (256, 512, 1024, 1040)
    assert token_sizes(100) == (100,)
    assert [bucket(count, (1, 2, 4)) for count in (1, 2, 3, 4)] == [1, 2, 4, 4]
