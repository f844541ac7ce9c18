from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from greenroom.workers.torch_host.engine.runner import (
    DecodeInputs,
    DecodeRow,
    ModelRunner,
    PrefillChunk,
    batch_sizes,
    bucket,
    token_sizes,
)
from greenroom.workers.torch_host.failures import BadModel
from tests.workers.torch_host.engine_rig import device_model_of, generated, prompt, random_model
from tests.workers.torch_host.samples.tiny import SHARED, SIZES

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
