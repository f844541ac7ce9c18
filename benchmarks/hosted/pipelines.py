"""The pipeline of `images`: diffusers' SDXL in its real size, with random weights.

    python -m benchmarks.hosted.pipelines FOLDER NAME …

Writes one folder a pipeline where it is not there yet. Only writing needs torch, Transformers and diffusers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.rig.random_models import WRITTEN, make, write_missing

SDXL, TINY = "sdxl", "tiny-sdxl"
LETTERS: Final = [chr(code) for code in range(33, 127)]
# As the published SDXL has them; the tiny one is to try this where there is no GPU.
_ENCODERS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    SDXL: (
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20},
    ),
    TINY: (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
}
_UNETS: Final[dict[str, dict[str, Any]]] = {
    SDXL: {
        "sample_size": 128,
        "layers_per_block": 2,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "transformer_layers_per_block": (1, 2, 10),
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 6 * 256 + 1280,
    },
    TINY: {
        "sample_size": 16,
        "layers_per_block": 1,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 64,
        "attention_head_dim": (2, 4),
        "transformer_layers_per_block": 1,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
    },
}
_VAE_WIDTHS: Final = {SDXL: (128, 256, 512, 512), TINY: (32, 32)}


def make_pipelines(python: str, folders: Path, *names: str) -> None:
    make(python, "benchmarks.hosted.pipelines", folders, [[name] for name in names])


def write(name: str, folder: Path) -> str:
    import diffusers
    import torch
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(1)
    tokenizers = [_tokenizer(), _tokenizer()]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        first = _encoder(CLIPTextModel, _ENCODERS[name][0], tokenizers[0])
        second = _encoder(CLIPTextModelWithProjection, _ENCODERS[name][1], tokenizers[1])
        unet = diffusers.UNet2DConditionModel(
            in_channels=4,
            out_channels=4,
            use_linear_projection=True,
            addition_embed_type="text_time",
            **_UNETS[name],
        )
        count = len(_VAE_WIDTHS[name])
        vae = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * count,
            up_block_types=("UpDecoderBlock2D",) * count,
            block_out_channels=_VAE_WIDTHS[name],
            layers_per_block=2,
            latent_channels=4,
            scaling_factor=0.13025,
            force_upcast=True,
            sample_size=1024,
        )
    for part in (first, second, unet, vae):
        torch.nn.Module.to(part, torch.bfloat16)
    diffusers.StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=first,
        text_encoder_2=second,
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", timestep_spacing="leading"),
    ).save_pretrained(folder)
    (folder / WRITTEN).write_text(json.dumps({"bytes": pipeline_bytes(folder)}))
    return f"{pipeline_bytes(folder) / 1e9:.1f} GB written"


def _tokenizer() -> Any:
    from transformers import CLIPTokenizer

    words = [*LETTERS, *(letter + "</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: place for place, word in enumerate(words)}, merges=[], model_max_length=77)


def _encoder(kind: Any, shape: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import CLIPTextConfig

    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    # The vocabulary of CLIP, of which the tokenizer uses a part: its table is part of what is copied.
    config = CLIPTextConfig(vocab_size=49_408, projection_dim=shape["hidden_size"], pad_token_id=1, **ends, **shape)
    return kind(config)


def pipeline_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*/*.safetensors"))


if __name__ == "__main__":
    write_missing(Path(sys.argv[1]), sys.argv[2:], write)
