"""Every causal family of the installed Transformers as a tiny model with random weights, and what becomes of it here.

`tried` makes one, has it answer from paged KV memory and compares with Transformers' own answer. As a program it prints
the table in `docs/transformers.md`, and with `--write` puts it there:
`PYTHONPATH=src python -m tests.workers.torch_host.families [--write] [FAMILY …]`. Needs torch.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from greenroom.workers.torch_host.engine.model_check import ModelCheck
from greenroom.workers.torch_host.engine.requests import Sampling
from greenroom.workers.torch_host.engine.runner import DecodeRow, ModelRunner, PrefillChunk
from greenroom.workers.torch_host.failures import BadModel
from greenroom.workers.torch_host.kernels.attention import IMPLEMENTATION, paged_attention
from tests.workers.torch_host.engine_rig import device_model_of, running, said

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
DOCUMENT = Path(__file__).parents[3] / "docs" / "transformers.md"
SERVED = "served"
# Logits are spread by one or more. Sums in another order move them by up to 3e-5 here; the smallest mistake by 1e-2.
TOLERANCE = 1e-4
SPREAD_MIN = 0.5

VOCABULARY = 120
WINDOW = 12
CONTEXT = 128
# Sizes by their names in configurations. A family gets those that it has.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "encoder_layers": 1,
    "decoder_layers": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "patch_size": 8,
    "image_size": 16,
    "logit_scale": 1.0,
    "is_decoder": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_NO_INPUT_PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
# Other sizes, by the model type of a configuration or of a part of it.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bamba": _MAMBA,
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cpmant": {"dim_ff": 48, "dim_head": 8},
    "ctrl": {"dff": 48},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": CONTEXT,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32},
    },
    "deepseek_v4": {"o_lora_rank": 8, "o_groups": 2},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": _MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {
        "head_dim": 4,
        "moe_topk": 2,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8},
    "modernbert-decoder": {"local_attention": 2 * WINDOW},
    "moshi": {"audio_vocab_size": VOCABULARY},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    # Real ones have a window as long as their context.
    "phimoe": {"sliding_window": CONTEXT},
    "prophetnet": {"num_decoder_layers": 2, "num_encoder_layers": 1},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen4_exp_text": {**_LINEAR, **_INDEXER},
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"shape_vocab_size": 20, "pronunciation_vocab_size": 20},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {"num_hidden_layers": 12, "layers_block_type": ["mamba", "hybrid"] * 6},
    "zaya": {"num_experts_per_tok": 1},
}
# Families of which Transformers makes no model here, and why.
NOT_TRIED: Mapping[str, str] = {
    "gemma3n": "needs `timm` and `pillow` to be built",
    "musicgen": "Transformers makes no such model from this configuration",
    "musicgen_melody": "Transformers makes no such model from this configuration",
}

_random = torch.Generator().manual_seed(5)
# Two are longer than three windows and two blocks; a third joins when it has one token.
SEQUENCES = [torch.randint(3, 110, (tokens,), generator=_random).tolist() for tokens in (45, 27, 9)]
BLOCKS = ([2, 5, 1], [4, 3], [6])
PIECES = ((9, 13, 15), (11, 8), (1,))
CACHE_TOKENS = 128
ROWS = len(SEQUENCES)


# --- tiny models ----------------------------------------------------------------------------------------------------


def tiny_config(family: str) -> Any:
    return CONFIG_MAPPING[family](**_shrunk(CONFIG_MAPPING[family]))


def _shrunk(kind: Any) -> dict[str, Any]:
    known = {*kind.__dataclass_fields__, *kind.attribute_map}
    known -= {name for name in known if isinstance(getattr(kind, name, None), property)}
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if name in known}
    if "kv_lora_rank" in sizes:
        # Keys of latent attention are unfolded to one for each query.
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name, part in kind.sub_configs.items():
        if part is AutoConfig:
            part = CONFIG_MAPPING[kind.sub_configs_defaults[name].model_type]
        sizes[name] = {**_shrunk(part), "model_type": part.model_type}
    if kind.model_type.endswith("_assistant"):
        sizes["text_config"] |= _NO_INPUT_PER_LAYER
    return sizes | dict(OVERRIDES.get(kind.model_type, {}))


def tiny_model(family: str, seed: int = 1) -> Any:
    """In float32, with weights spread so that whatever goes wrong in attention shows in the logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.25)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


# --- both answers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The logits after one token of one sequence."""

    sequence: int
    token: int
    logits: torch.Tensor


def plain_logits(model: Any, sequences: Iterable[Sequence[int]] = SEQUENCES) -> list[torch.Tensor]:
    """Transformers' logits for every token, each sequence alone and as a whole."""
    # Its plainest attention: others leave out soft caps and sinks.
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [model(input_ids=torch.tensor([one]), use_cache=False).logits[0] for one in sequences]


def paged_logits(model: Any, attention: Callable[..., Any] = paged_attention) -> Iterator[Place]:
    """The runner's logits: prompts in packed chunks, then decoded in one batch of unequal lengths."""
    runner = ModelRunner(device_model_of(model, CACHE_TOKENS), CACHE_TOKENS, ROWS, CONTEXT)
    AttentionInterface.register(IMPLEMENTATION, attention)
    runner.on_wake()
    done = [0] * ROWS
    for turn in range(max(map(len, PIECES))):
        taking = [row for row in range(ROWS) if turn < len(PIECES[row])]
        pieces = [_piece(row, done[row], PIECES[row][turn]) for row in taking]
        for row, piece, logits in zip(taking, pieces, runner.prefill(pieces), strict=True):
            done[row] += len(piece.tokens)
            yield Place(row, done[row] - 1, logits)
    while done[0] < len(SEQUENCES[0]):
        runner.inputs.set_rows([DecodeRow(SEQUENCES[row][done[row]], done[row], BLOCKS[row]) for row in range(ROWS)])
        for row, logits in enumerate(runner.decode(ROWS, max(done) + 1)):
            yield Place(row, done[row], logits.clone())
            done[row] += 1


def _piece(row: int, past: int, count: int) -> PrefillChunk:
    return PrefillChunk(SEQUENCES[row][past : past + count], past, BLOCKS[row], True)


def apart(places: Iterable[Place], plain: Sequence[torch.Tensor]) -> float:
    return max(float((one.logits - plain[one.sequence][one.token]).abs().max()) for one in places)


def cached_apart(model: Any) -> float:
    """How far log probabilities are off in an answer whose prompt was in part found in the prefix cache."""
    likeliest = Sampling(temperature=0.0, logprobs=5)
    prompts = [SEQUENCES[0][:38], [*SEQUENCES[0][:33], *SEQUENCES[2][:4]]]
    with running(model, cache_tokens=CACHE_TOKENS, batch_max=2, context=64) as engine:
        answers = [said(engine, prompt, 4, likeliest) for prompt in prompts]
    assert answers[1].cached_tokens == 32, "the prefix cache was not used"
    plain = plain_logits(model, [[*prompt, *answer.ids] for prompt, answer in zip(prompts, answers, strict=True)])
    worst = 0.0
    for prompt, answer, logits in zip(prompts, answers, plain, strict=True):
        known = logits.log_softmax(dim=-1)
        for place, token in enumerate(answer.tokens, len(prompt) - 1):
            for other, value in token.top:
                worst = max(worst, abs(value - float(known[place, other])))
    return worst


def tried(family: str) -> str:
    """`served`, or why it is refused at load. Raises AssertionError if Transformers answers otherwise."""
    if family in NOT_TRIED:
        return f"not tried: {NOT_TRIED[family]}"
    model = tiny_model(family)
    try:
        with running(model, cache_tokens=CACHE_TOKENS, check=ModelCheck(None)):
            pass
    except BadModel as refusal:
        return _told(str(refusal))
    places, plain = list(paged_logits(model)), plain_logits(model)
    assert float(plain[0].std()) > SPREAD_MIN, "the logits lie too close together to show anything"
    assert apart(places, plain) < TOLERANCE
    assert cached_apart(model) < TOLERANCE
    return SERVED


def _told(refusal: str) -> str:
    """The reason without names and numbers, so that families with the same one are listed together."""
    words = refusal.split(". ")[0].rstrip(".")
    words = re.sub(r"^(?!layer )\S+ ", "", words)
    words = re.sub(r"of kind .*, whose", "of a kind whose", words)
    return re.sub(r"\d+", "…", words)


# --- the table ------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- families: made by tests.workers.torch_host.families -->", "<!-- families: end -->"


def written(verdicts: Mapping[str, str]) -> str:
    """The part of the document that lists what is served."""
    groups: dict[str, list[str]] = defaultdict(list)
    for family, verdict in sorted(verdicts.items()):
        groups[verdict].append(family)
    served = groups.pop(SERVED, [])
    lines = [
        _BEGIN,
        f"With Transformers {transformers.__version__}, of {len(verdicts)} families {len(served)} are served:",
        "",
    ]
    lines += [
        *textwrap.wrap(", ".join(served) + ".", 120, break_on_hyphens=False),
        "",
        "| what it does | refused |",
        "|---|---|",
    ]
    lines += [
        f"| {why} | {', '.join(names)} |"
        for why, names in sorted(groups.items(), key=lambda one: (-len(one[1]), one[0]))
    ]
    return "\n".join([*lines, _END])


def documented() -> dict[str, str]:
    """Each family's entry in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    part = text[text.index(_BEGIN) : text.index(_END)]
    served = part.split(":\n\n")[1].split("\n\n")[0].removesuffix(".")
    found = dict.fromkeys(re.split(r",\s+", served), SERVED)
    for line in part.splitlines():
        if line.startswith("| ") and "what it does" not in line:
            why, names = line.strip("| ").split(" | ")
            found |= dict.fromkeys(names.split(", "), why)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Try families and print which are served.")
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--write", action="store_true", help="put the table into docs/transformers.md")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    text = written({family: tried(family) for family in asked.families})
    sys.stdout.write(text + "\n")
    if asked.write:
        old = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(old[: old.index(_BEGIN)] + text + old[old.index(_END) + len(_END) :], encoding="utf-8")


if __name__ == "__main__":
    main()
