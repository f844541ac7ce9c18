"""A model of llama.cpp by its keys and files: which file of a folder it is, what it does, with which options.

Owns the way from a model's keys to the options of llama-server. Reads headers and lists folders; never raises.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from greenroom.config.schema import Ability, Model
from greenroom.config.sections.model import TEMPLATE_ENDING
from greenroom.engines.estimates.gguf import header_of, split_names
from greenroom.engines.estimates.gguf_header import has_tools
from greenroom.engines.estimates.llama_options import BATCH, UBATCH, LlamaOptions, read

# Files of a folder that are looked at.
NAMES_MAX: Final = 10_000
PROJECTOR: Final = "mmproj"
# Batch size for inputs that must fit one batch, if the context length is the model's own.
BATCH_EMBEDDING: Final = 8_192


def of_model(model: Model) -> LlamaOptions:
    """The options that our launch makes from a model's keys and files, changed by its `args`."""
    path, projector = files_in(model.path or "")
    embeds, ranks = _mode(model, path)
    batch = (model.ctx_size or BATCH_EMBEDDING) if embeds or ranks else None
    projector = model.mmproj or projector
    keys = LlamaOptions(
        model=path,
        context=model.ctx_size,
        gpu_layers=model.n_gpu_layers,
        type_k=model.cache_type_k,
        type_v=model.cache_type_v,
        parallel=model.parallel,
        batch=batch or BATCH,
        ubatch=batch or UBATCH,
        flash=model.flash_attn != "off",
        no_gpu=model.device == "cpu",
        projectors=() if projector is None else (projector,),
        adapters=tuple(model.lora),
        draft=model.draft_model,
        embedding=embeds,
        reranking=ranks,
    )
    return read(model.args, keys)


def files_in(path: str) -> tuple[str, str | None]:
    """The model and the projector of a folder that holds one model, perhaps split; otherwise the path itself."""
    try:
        names = sorted(name for name in os.listdir(path)[:NAMES_MAX] if name.lower().endswith(".gguf"))
    except (OSError, ValueError):
        return path, None
    projectors = [name for name in names if PROJECTOR in name.lower()]
    models = [name for name in names if name not in projectors]
    whole = {one.name for one in split_names(Path(models[0]))} if models else set()
    if not models or not whole.issuperset(models):
        return path, None
    return os.path.join(path, models[0]), os.path.join(path, projectors[0]) if len(projectors) == 1 else None


def abilities_of(model: Model) -> frozenset[Ability]:
    options = of_model(model)
    if options.reranking:
        return frozenset({Ability.RERANK})
    if options.embedding:
        return frozenset({Ability.EMBEDDINGS})
    found = {Ability.CHAT, Ability.COMPLETIONS}
    for header in map(header_of, options.projectors):
        # A projector that does not tell is one for images.
        hears = header is not None and bool(header.number("has_audio_encoder"))
        sees = header is None or bool(header.number("has_vision_encoder")) or not hears
        found |= {Ability.AUDIO} if hears else set()
        found |= {Ability.VISION} if sees else set()
    return frozenset(found | ({Ability.TOOLS} if _has_tools(model, options) else set()))


def _mode(model: Model, path: str) -> tuple[bool, bool]:
    """Whether it embeds, and whether it ranks: as the operator says, else as the file says."""
    if model.says_mode:
        return model.embedding, model.reranking
    header = header_of(path)
    return (False, False) if header is None else (header.is_embedding, header.is_reranking)


def _has_tools(model: Model, options: LlamaOptions) -> bool:
    if model.chat_template is None:
        header = header_of(options.model or "")
        return header is not None and header.has_tools
    return model.chat_template.endswith(TEMPLATE_ENDING) and has_tools(Path(model.chat_template))
