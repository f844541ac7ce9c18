"""Rotary embeddings whose factors depend on the length of a sequence, against plain Transformers with each alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from greenroom.workers.torch_host.engine.batch_scheduler import PrefillLimits
from greenroom.workers.torch_host.engine.requests import Sampling
from greenroom.workers.torch_host.engine.runner import UNCAPTURABLE, ModelRunner
from greenroom.workers.torch_host.engine.steps import DecodeStep
from greenroom.workers.torch_host.failures import BadModel
from greenroom.workers.torch_host.kernels.attention import AttentionKernels, as_current_step
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from tests.workers.torch_host.engine.test_model_check import embedded
from tests.workers.torch_host.engine_rig import Answer, ask, device_model_of, prompt, running, together
from tests.workers.torch_host.samples.tiny import SHARED, SIZES

pytestmark = pytest.mark.slow

ORIGINAL, CONTEXT = 40, 160
# Log probabilities of the twenty likeliest tokens are compared.
TOLD = Sampling(temperature=0.0, logprobs=20)
TOLERANCE = 1e-4


def longrope(pairs: int, original: int = ORIGINAL, **more: Any) -> dict[str, Any]:
    """Factors far enough apart that the wrong ones are noticed."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * pair for pair in range(pairs)],
        "long_factor": [2.0 + 0.7 * pair for pair in range(pairs)],
        "original_max_position_embeddings": original,
        **more,
    }


_LONG = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
_PHI3 = {"model_type": "phi3", **_LONG, "original_max_position_embeddings": ORIGINAL}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_STRETCHED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
# Those whose factors depend on the length, in every form in which Transformers computes them.
SWITCHING: dict[str, dict[str, Any]] = {
    "phi3": {**_PHI3, "rope_parameters": longrope(8)},
    "phi4-mini": {
        **_PHI3,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
        "rope_parameters": longrope(6, attention_factor=1.3),
    },
    "phimoe": {
        "model_type": "phimoe",
        **_LONG,
        **_MOE,
        "original_max_position_embeddings": ORIGINAL,
        "rope_parameters": longrope(8, short_mscale=1.1, long_mscale=1.4),
    },
    "llama": {"model_type": "llama", **_LONG, "rope_parameters": longrope(8, factor=4.0)},
    # Pairs that lie side by side; complex numbers instead of two angles; one rotary embedding for each kind of layer.
    "cohere": {"model_type": "cohere", **_LONG, "rope_parameters": longrope(8, factor=4.0)},
    "deepseek_v2": {"model_type": "deepseek_v2", **_LONG, **_LATENT, "rope_parameters": longrope(4, factor=4.0)},
    "gemma3": {
        "model_type": "gemma3_text",
        **_LONG,
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": longrope(8, 70, factor=2.0),
            "full_attention": longrope(8, factor=4.0),
        },
    },
}
# Those whose factors are the same for every length that is served.
STEADY: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    "yarn": {"rope_type": "yarn", **_STRETCHED},
    "llama3": {"rope_type": "llama3", **_STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "longrope-within": longrope(8, CONTEXT, factor=4.0),
}


def built(name: str) -> Any:
    torch.manual_seed(1)
    said = SWITCHING.get(name) or {"model_type": "llama", **_LONG, "rope_parameters": STEADY[name]}
    # Transformers changes its arguments.
    config = AutoConfig.for_model(**{**SHARED, **copy.deepcopy(said)})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
    return model


@pytest.fixture(params=[*SWITCHING, *STEADY])
def model(request: pytest.FixtureRequest) -> Any:
    return built(request.param)


@torch.no_grad()
def check(plain: Any, tokens: Sequence[int], answer: Answer, apart: float = TOLERANCE) -> None:
    """Each token was as likely as plain Transformers finds it, computing all tokens before it at once and alone."""
    assert answer.end.reason == "length"
    whole = [*tokens, *answer.ids]
    for at, token in enumerate(answer.tokens, start=len(tokens)):
        logits = plain(input_ids=torch.tensor([whole[:at]]), use_cache=False).logits[0, -1]
        want = logits.log_softmax(-1)
        assert token.logprob is not None
        assert dict(token.top) == pytest.approx({one: float(want[one]) for one, _ in token.top}, abs=apart), at
        assert token.logprob == pytest.approx(float(want.max()), abs=apart), at


SHORT, LONG = prompt(20), prompt(100)


def test_a_sequence_alone_is_turned_as_its_length_asks(model: Any) -> None:
    plain = copy.deepcopy(model)
    with running(model, context=CONTEXT, prefill=PrefillLimits(tokens_max=32, tokens_first=32)) as engine:
        for one in (SHORT, LONG, SHORT):
            check(plain, one, *together(engine, [one], 4, TOLD, uses_cache=False))


def test_a_neighbour_of_another_length_changes_nothing(model: Any) -> None:
    plain = copy.deepcopy(model)
    prompts = [SHORT, LONG, prompt(ORIGINAL - 9), prompt(ORIGINAL), prompt(ORIGINAL + 1)]
    with running(model, context=CONTEXT) as engine:
        for one, answer in zip(prompts, together(engine, prompts, 6, TOLD, uses_cache=False), strict=True):
            check(plain, one, answer)


def test_an_answer_that_outgrows_the_original_length_goes_on_as_a_long_one(model: Any) -> None:
    plain = copy.deepcopy(model)
    prompts = [prompt(ORIGINAL - 5), prompt(ORIGINAL - 2, 1), SHORT, LONG, prompt(68)]
    with running(model, context=CONTEXT, batch_max=4) as engine:
        for _ in range(2):
            for one, answer in zip(prompts, together(engine, prompts, 12, TOLD), strict=True):
                check(plain, one, answer)


def test_cached_blocks_are_shared_by_sequences_of_one_kind_only(model: Any) -> None:
    plain = copy.deepcopy(model)
    long, others = prompt(100, 2), [prompt(20, seed) for seed in (3, 4)]
    short = long[: ORIGINAL - 4]
    for first, second in ((short, long), (long, short)):
        with running(model, context=CONTEXT) as engine:
            together(engine, [first], 1, TOLD)
            for one in (second, first + others[0][:3], second + others[1][:1]):
                check(plain, one, *together(engine, [one], 3, TOLD))


@pytest.mark.parametrize("name", ["phi3", "phimoe", "gemma3"])
def test_a_prompt_finds_its_own_kind_in_the_cache(name: str) -> None:
    long = prompt(100)
    short = long[:36]
    with running(built(name), context=CONTEXT) as engine:
        found = [together(engine, [one], 1, TOLD)[0].cached_tokens for one in (short, long, short, long)]
    assert found == [0, 0, 32, 96]
    flushed = engine.flush(None, None)
    assert flushed[0] == 16 * (2 + 6)


@pytest.mark.parametrize("name", ["phi3", "phi4-mini", "phimoe", "llama"])
def test_inputs_of_any_length_are_embedded_as_each_alone(name: str) -> None:
    model = built(name).base_model
    inputs = [SHORT, LONG, prompt(ORIGINAL), prompt(ORIGINAL + 1)]
    with torch.no_grad():
        alone = [copy.deepcopy(model)(torch.tensor([one])).last_hidden_state[0, -1] for one in inputs]
    sentence = SentenceConfig(pooling=("lasttoken",))
    with running(model, cache_tokens=0, sentence=sentence, context=CONTEXT) as engine:
        vectors = embedded(engine, inputs)
    for vector, one in zip(vectors, alone, strict=True):
        assert (torch.tensor(vector) - one).norm() < TOLERANCE * one.norm()


def test_a_sampled_answer_that_outgrows_the_original_length_is_the_same_in_any_batch() -> None:
    model = built("phi3")
    sampling = Sampling(temperature=0.8, seed=11)
    with running(model, context=CONTEXT) as engine:
        alone, answer = ask(prompt(ORIGINAL - 6), 20, sampling)
        engine.submit(alone)
        assert answer.end.reason == "length"
        asked = [ask(prompt(ORIGINAL - 6), 20, sampling), ask(LONG, 20), ask(SHORT, 30)]
        engine.submit(*(one for one, _ in asked))
        assert [one.end.reason for _, one in asked] == ["length"] * 3
    assert asked[0][1].ids == answer.ids


@pytest.mark.parametrize("name", [name for name in (*SWITCHING, *STEADY) if name not in UNCAPTURABLE])
def test_turning_asks_nothing_of_the_host_in_the_middle_of_a_step(name: str) -> None:
    model = built(name)
    ModelRunner(device_model_of(model, 64), 64, 2, CONTEXT)
    # Meta tensors: reading a value fails, as it would while a step is captured.
    embedding = model.model.rotary_emb.to("meta")
    positions, table = torch.zeros(2, dtype=torch.long, device="meta"), torch.zeros(2, 4, device="meta")
    hidden_states = torch.zeros(2, 1, 64, device="meta")
    layers = {"layer_type": "full_attention"} if name == "gemma3" else {}
    with as_current_step(DecodeStep((), AttentionKernels(), positions, table.int())):
        turned = embedding(hidden_states, position_ids=positions[:, None], **layers)
    assert all(one.shape[:2] == (2, 1) for one in (turned if isinstance(turned, tuple) else (turned,)))


def test_a_model_that_scales_positions_in_code_of_its_own_is_refused() -> None:
    model = built("llama")
    model.model.rotary_emb = Own(model.model.rotary_emb)
    with pytest.raises(BadModel, match="longrope"):
        ModelRunner(device_model_of(model, 64), 64, 1, 64)


class Own(torch.nn.Module):
    """A rotary embedding that tells nothing of itself."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.turn = inner.forward

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.turn(x, position_ids)
