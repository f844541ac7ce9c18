"""A model with attention of its own, which paged attention does not know. Its folder brings this file as code.

What attention gives is made larger after the softmax; `own_mask` in its configuration has it make a mask as well.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward


class OwnConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "own_attention"
    own_mask: bool = False


def enlarged(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any
) -> tuple[torch.Tensor, Any]:
    out, weights = eager_attention_forward(module, query, key, value, attention_mask, **more)
    return out * 2, weights


class OwnAttention(LlamaAttention):  # type: ignore[misc]
    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **more: Any
    ) -> tuple[torch.Tensor, Any]:
        before = hidden_states.shape[:-1]
        parts = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (part(hidden_states).view(*before, -1, self.head_dim).transpose(1, 2) for part in parts)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if self.config.own_mask:
            attention_mask = torch.zeros(1, 1, query.shape[2], key.shape[2])
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, enlarged)
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.o_proj(out.reshape(*before, -1)), weights


class OwnForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = OwnConfig
    _supports_sdpa = False

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = OwnAttention(config, number)
        self.post_init()
