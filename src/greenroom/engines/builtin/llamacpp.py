"""llama.cpp: the `llama-server` binary when there is one, otherwise the embedded build from PyPI. GGUF files.

Owns the argument list, which is the same for both. The embedded build runs in a child process too: a model file is
hostile input, and a crash must not reach the gateway.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

import msgspec

from greenroom.config.schema import Ability, Model
from greenroom.config.sections.engine_keys import sharing_variables
from greenroom.config.sections.model import TEMPLATE_ENDING
from greenroom.engines.base import (
    LLAMACPP_PATHS,
    CacheFigures,
    EngineFacts,
    Launch,
    LaunchPlace,
    Listens,
    ProcessEngine,
    Split,
    UsageSource,
    environment,
)
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.estimates.gguf import check_gguf, estimate_gguf, files_of, header_of
from greenroom.engines.estimates.gguf_header import BadModelFile, has_tools, split_names
from greenroom.engines.estimates.llama_options import BATCH, UBATCH, LlamaOptions, read
from greenroom.engines.identity import embedded_identity, file_identity, packages_missing, program_identity
from greenroom.engines.usage import Usage, from_timings, from_usage
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command

WORKER = Path(__file__).parents[2] / "workers" / "llamacpp_server.py"
# No prompt cache in host memory: it is not part of the plan.
CACHE_RAM_MIB = 0


class LlamaCppEngine(ProcessEngine):
    name = "llamacpp"
    listens = Listens.SOCKET
    usage_source = UsageSource.TIMINGS
    metrics_path = "/slots"
    keeps_json = True
    takes_functions_only = True
    speaks = frozenset({*LLAMACPP_PATHS, "/v1/messages/count_tokens"})
    fetches_media = True

    def facts(self, model: Model) -> EngineFacts:
        options = of_model(model)
        # Whether it reuses prefixes of texts to embed or to rank depends on the model, and it does not tell.
        slots = 0 if options.embedding or options.reranking else options.sequences
        return EngineFacts(
            abilities_of(model),
            keeps_prefixes=True if slots else None,
            prompt_slots=slots,
            can_split=Split.PROPORTIONAL,
        )

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        # The embedded build keeps logits of sampled tokens only; a binary of unknown version may keep a whole batch.
        return estimate_gguf(of_model(model), gpus, logits_all=_binary(model) is not None)

    def identity(self, model: Model) -> tuple[str, str]:
        binary = _binary(model)
        program = embedded_identity(model.python) if binary is None else program_identity((binary,))
        return file_identity(files_of(of_model(model))), program

    def concurrency(self, model: Model) -> int:
        options = of_model(model)
        slots = options.sequences
        if model.concurrency is None or options.embedding or options.reranking or model.isolate_tenants == "off":
            return model.concurrency or slots
        # More would wait for a slot inside, where no request is told its place in the queue.
        return min(model.concurrency, slots)

    def files(self, model: Model) -> list[Path]:
        return list(files_of(of_model(model)))

    def unusable(self, model: Model) -> str | None:
        try:
            check_gguf(of_model(model))
        except BadModelFile as error:
            return error.message.rstrip(".")
        return None

    def missing(self, model: Model) -> str | None:
        if _binary(model) is not None:
            return None
        if model.program is not None:
            return f"there is no program {model.program}; correct `program`"
        why = packages_missing(model, ("xllamacpp",), "llamacpp")
        return why if why is None or model.python is not None else f"{why}, or put llama-server on PATH"

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        options = of_model(model)
        _check_files(model_id, model, options)
        argv = (*_program(model), *_arguments(model_id, model, options, place))
        env = environment(model, place)
        if model.isolate_tenants is None:
            # What it would inherit from the gateway.
            for name in list(sharing_variables(self.name, env)):
                del env[name]
        return Launch(Command(argv, env, model.cwd), "/health")

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        # Embeddings and rerank answers have `usage` alone.
        return from_timings(tail) or from_usage(tail)

    def cache_figures(self, metrics: bytes, model: Model) -> CacheFigures | None:
        """From its list of slots: the tokens that each holds, and how many it could; unified, all share these."""
        try:
            slots = msgspec.json.decode(metrics, type=list[_Slot])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        sizes = [slot.n_ctx for slot in slots]
        tokens = max(sizes, default=0) if read(model.args).unified else sum(sizes)
        held = [0 if slot.id_task < 0 else slot.n_prompt_tokens for slot in slots]
        if tokens <= 0 or any(count < 0 for count in held):
            return None
        return CacheFigures(min(1.0, sum(held) / tokens), kv_tokens=tokens)


class _Slot(msgspec.Struct):
    n_ctx: int
    # Its last request; below zero if there was none.
    id_task: int = -1
    # Those of the answer included. Older servers do not tell.
    n_prompt_tokens: int = -1


def _binary(model: Model) -> str | None:
    """The llama-server to run, the operator's or the one on PATH; None for the embedded build."""
    if model.program is not None:
        return shutil.which(model.program)
    return shutil.which("llama-server") if model.python is None else None


def _program(model: Model) -> tuple[str, ...]:
    """The program to run: the operator's binary, the one on PATH, or the embedded build."""
    if (binary := _binary(model)) is not None:
        return (binary,)
    return (model.python or sys.executable, str(WORKER))


def _check_files(model_id: str, model: Model, options: LlamaOptions) -> None:
    """Raises LoadFailed if a file is missing, or its disk fails."""
    if os.path.isdir(options.model or ""):
        raise LoadFailed(f"{model_id}: {model.path} does not hold one GGUF model. Name the file in `path`.")
    files = {"path": options.model, "mmproj": next(iter(options.projectors), None), "draft_model": options.draft}
    for key, file in (*files.items(), *(("lora", file) for file in model.lora)):
        if (file is not None or key == "path") and not os.path.isfile(file or ""):
            why = _failure(file or "")
            raise LoadFailed(f"{model_id}: there is no file {file}{why}. Correct `{key}` in the configuration.")


def _failure(file: str) -> str:
    """Why it cannot be looked at, if it is not simply missing."""
    try:
        os.stat(file)
    except (OSError, ValueError) as error:
        return "" if isinstance(error, FileNotFoundError) else f" ({getattr(error, 'strerror', error)})"
    return ""


def _arguments(model_id: str, model: Model, options: LlamaOptions, place: LaunchPlace) -> list[str]:
    argv = ["--model", str(options.model), "--alias", model_id, "--host", place.socket or "127.0.0.1"]
    argv += ["--port", str(place.port or 0)]
    if place.socket is not None:
        # Without a place for files it lets no slot be erased. None is written: nothing asks for that.
        argv += ["--slot-save-path", os.path.dirname(place.socket) + os.sep]
    argv += ["--ctx-size", str(model.ctx_size), "--parallel", str(model.parallel), "--kv-unified"]
    argv += ["--flash-attn", model.flash_attn, "--cache-ram", str(CACHE_RAM_MIB), "--no-webui"]
    argv += ["--cache-type-k", model.cache_type_k, "--cache-type-v", model.cache_type_v]
    argv += _on_devices(model, options, place)
    if model.threads is not None:
        argv += ["--threads", str(model.threads)]
    if options.embedding or options.reranking:
        # These take a whole input in one batch, so a batch must be as large as the context.
        argv += ["--reranking" if options.reranking else "--embedding"]
        argv += ["--batch-size", str(options.batch), "--ubatch-size", str(options.ubatch)]
    return [*argv, *_beside(model, options), *_chat(model), *model.args]


def _beside(model: Model, options: LlamaOptions) -> list[str]:
    """The files beside the model: projector, adapters, draft model. Those in `args` follow by themselves."""
    argv: list[str] = []
    if "--mmproj" not in model.args and "-mm" not in model.args:
        argv += [word for file in options.projectors for word in ("--mmproj", file)]
    if model.lora:
        argv += ["--lora-scaled", ",".join(f"{file}:{scale:g}" for file, scale in model.lora.items())]
    if model.draft_model is not None:
        # Without a type, llama-server loads a draft model and leaves it unused.
        argv += ["--model-draft", model.draft_model, "--spec-type", "draft-simple"]
    return argv


def _chat(model: Model) -> list[str]:
    argv: list[str] = []
    if model.chat_template is not None:
        is_file = model.chat_template.endswith(TEMPLATE_ENDING)
        argv += ["--chat-template-file" if is_file else "--chat-template", model.chat_template]
    if model.reasoning != "auto":
        argv += ["--reasoning", model.reasoning]
    if model.reasoning_format != "auto":
        argv += ["--reasoning-format", model.reasoning_format]
    if model.reasoning_budget >= 0:
        argv += ["--reasoning-budget", str(model.reasoning_budget)]
    return argv


def _on_devices(model: Model, options: LlamaOptions, place: LaunchPlace) -> list[str]:
    """Which devices it uses, and how much of it lies on each."""
    if model.device == "cpu" or place.gpus == ():
        # Even without layers on it, llama.cpp would use a GPU for large batches.
        argv = ["--n-gpu-layers", "0", "--no-op-offload"]
        argv += ["--no-mmproj-offload"] if options.projectors else []
        return [*argv, "--n-gpu-layers-draft", "0"] if options.draft is not None else argv
    argv = ["--n-gpu-layers", str(model.n_gpu_layers)] if model.n_gpu_layers >= 0 else []
    # Without a claim llama.cpp splits the model itself, by free memory.
    if len(place.gpus or ()) > 1 and place.claim:
        argv += ["--split-mode", "layer", "--tensor-split", ",".join(map(str, place.shares))]
    return argv


# --- the options of a model, by its keys and files --------------------------------------------------------------------


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
