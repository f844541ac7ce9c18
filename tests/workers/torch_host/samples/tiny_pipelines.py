"""Tiny pipelines of diffusers made by code, shaped like SDXL, FLUX and SD 3: real components with random weights.

`make_pipeline` writes one as a folder of safetensors; the same seed gives the same weights. As a program:
`python -m tests.workers.torch_host.samples.tiny_pipelines FOLDER [KIND …]`. Needs torch, Transformers and diffusers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WIDTH = 32
BEGIN, END = "<|startoftext|>", "<|endoftext|>"
LETTERS = [chr(code) for code in range(33, 127)]


def clip_tokenizer() -> CLIPTokenizer:
    words = [*LETTERS, *(letter + "</w>" for letter in LETTERS), BEGIN, END]
    return CLIPTokenizer(vocab={word: place for place, word in enumerate(words)}, merges=[], model_max_length=77)


def clip(kind: Any, tokenizer: CLIPTokenizer) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=48,
        projection_dim=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return kind(config)


def t5() -> tuple[Any, Any]:
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    made = T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0)
    config = T5Config(vocab_size=len(made), d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return made, T5EncoderModel(config)


def vae(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        "block_out_channels": (16, 32),
        "latent_channels": 4,
        "norm_num_groups": 8,
        "sample_size": 64,
    }
    return diffusers.AutoencoderKL(**{**settings, **changes})


def sdxl() -> Any:
    first, second = clip_tokenizer(), clip_tokenizer()
    unet = diffusers.UNet2DConditionModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=2 * WIDTH,
        attention_head_dim=(2, 4),
        transformer_layers_per_block=1,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        norm_num_groups=8,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(force_upcast=True, scaling_factor=0.13025),
        text_encoder=clip(CLIPTextModel, first),
        text_encoder_2=clip(CLIPTextModelWithProjection, second),
        tokenizer=first,
        tokenizer_2=second,
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", timestep_spacing="leading"),
    )


def flux() -> Any:
    tokenizer, (tokenizer_2, encoder) = clip_tokenizer(), t5()
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=clip(CLIPTextModel, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=encoder,
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )


def sd3() -> Any:
    first, second, (third, encoder) = clip_tokenizer(), clip_tokenizer(), t5()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * WIDTH,
        out_channels=16,
        pos_embed_max_size=96,
    )
    encoders = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(**encoders, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=clip(CLIPTextModelWithProjection, first),
        tokenizer=first,
        text_encoder_2=clip(CLIPTextModelWithProjection, second),
        tokenizer_2=second,
        text_encoder_3=encoder,
        tokenizer_3=third,
    )


KINDS: Mapping[str, Callable[[], Any]] = {"sdxl": sdxl, "flux": flux, "sd3": sd3}


def make_pipeline(folder: Path, kind: str, *, seed: int = 1, dtype: torch.dtype = torch.float32, **how: Any) -> Path:
    """Write a pipeline of this kind to the folder. `how` are arguments of `save_pretrained`, such as `variant`."""
    torch.manual_seed(seed)
    made = KINDS[kind]()
    for part in made.components.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.to(part, dtype)
    made.save_pretrained(folder, **how)
    return folder


if __name__ == "__main__":
    for name in sys.argv[2:] or KINDS:
        make_pipeline(Path(sys.argv[1]) / name, name)
