from __future__ import annotations

from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.kernels.fuse import fuse_modules, without_fused_modules
from tests.workers.torch_host.engine_rig import random_model


def in_one_buffer(model: Any) -> None:
    """All weights one after the other, as in an arena."""
    weights = [
        (module, name) for module in model.modules() for name, one in module._parameters.items() if one is not None
    ]
    arena = torch.zeros(sum(module._parameters[name].numel() for module, name in weights))
    offset = 0
    for module, name in weights:
        weight = module._parameters[name]
        view = arena[offset : offset + weight.numel()].view(weight.shape)
        view.copy_(weight.detach())
        module._parameters[name] = torch.nn.Parameter(view, requires_grad=False)
        offset += weight.numel()


def changed(model: Any) -> set[str]:
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


@pytest.mark.parametrize(
    ("kind", "touched"),
    [
        ("llama", {"LlamaRMSNorm", "Linear"}),
        # Biases lie between these weights: nothing to join but the two of the feed-forward part.
        ("qwen2", {"Qwen2RMSNorm", "Linear"}),
        # This norm adds one to its weight: it is not the plain one and stays as it is.
        ("gemma2", {"Linear"}),
        ("gpt2", set()),
    ],
)
@torch.no_grad()
def test_a_quickened_model_computes_the_same(kind: str, touched: set[str]) -> None:
    model = random_model(kind)
    in_one_buffer(model)
    ids = torch.randint(3, 300, (2, 17))
    before = model(ids).logits
    fuse_modules(model)
    assert changed(model) == touched
    assert torch.allclose(model(ids).logits, before, atol=1e-4)
    assert torch.allclose(model(ids).logits, before, atol=1e-4)


@torch.no_grad()
def test_weights_that_lie_apart_are_not_joined() -> None:
    model = random_model("llama")
    fuse_modules(model)
    assert changed(model) == {"LlamaRMSNorm"}


@torch.no_grad()
def test_a_projection_called_with_something_else_computes_for_itself() -> None:
    model = random_model("llama")
    in_one_buffer(model)
    attention = model.model.layers[0].self_attn
    one, other = torch.randn(1, 64), torch.randn(1, 64)
    want = attention.k_proj(other)
    fuse_modules(model)
    attention.q_proj(one)
    assert torch.allclose(attention.k_proj(other), want, atol=1e-5)


def test_a_fused_model_runs_its_own_code_for_a_while() -> None:
    model = random_model("llama")
    in_one_buffer(model)
    fuse_modules(model)
    fused = changed(model)
    with without_fused_modules(model):
        assert changed(model) == set()
    assert changed(model) == fused
