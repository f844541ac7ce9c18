"""What an operator can say about one model, and the rules between its keys.

Owns the keys; `engine_keys.py` says which engine each belongs to. Looks at nothing of the machine: see `problems.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from greenroom.config.kinds import (
    COUNT_MAX,
    Count,
    CountFromZero,
    HostName,
    Mib,
    MibAboveZero,
    ModelId,
    NotBool,
    RoutePattern,
    Seconds,
    SecondsAboveZero,
    Section,
    unsplittable,
)
from greenroom.config.reader import Problem, break_on
from greenroom.config.sections.engine_keys import (
    KEYS_OF_ENGINES,
    LOCAL_KEYS,
    WITH_EMBEDDING,
    WITH_PATH,
    inferred_engine,
    keys_of_other_engines,
    unknown_engine,
)
from greenroom.config.sections.shared_caches import sharing_problems
from greenroom.config.sections.tenants import RateLimits
from greenroom.config.sections.versions import ModelVersions

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
_Int8 = Literal["int8", "int8_float32", "int8_float16", "int8_bfloat16"]
ComputeType = _Int8 | Literal["default", "auto", "int16", "float16", "bfloat16", "float32"]

# A chat template with another name is one that llama.cpp knows.
TEMPLATE_ENDING = ".jinja"

GpuShare = Annotated[float, Field(gt=0, le=1), NotBool]
PRIORITY_NAMES = {"high": 0, "normal": 1, "low": 2}


class Ability(StrEnum):
    """What a model can be asked for, by route; then what it takes besides text, and whether it calls tools."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    IMAGES = "images"
    IMAGE_EDITS = "image_edits"
    TRANSCRIPTION = "transcription"
    TRANSLATION = "translation"
    SPEECH = "speech"
    VISION = "vision"
    AUDIO = "audio"
    TOOLS = "tools"


class Model(Section):
    """One model: what callers ask for, which engine runs it, what it needs."""

    engine: str | None = None
    """llamacpp, transformers, diffusers, vllm, sglang, comfyui, whisper, command, remote, or one of another package
    (see `greenroom engines`); inferred from category, path (a .gguf file or a folder), versions.repo_id, cmd or remote
    when not given."""
    options: dict[str, JsonValue] = {}
    """Engines of other packages: their own options, as their documentation says."""
    path: str | None = None
    """llamacpp, transformers, diffusers, vllm, sglang, comfyui, whisper: the model file, or the folder with config.json
    and safetensors, with model_index.json, with one GGUF, or with a Whisper model of CTranslate2; of ComfyUI its
    installation. Relative paths start at the folder of the configuration file. whisper also takes a size in the Hugging
    Face cache: tiny, base, small, medium (also with .en), large (the newest) or turbo."""
    cmd: str | tuple[str, ...] | None = None
    """comfyui, command: the program and its arguments, split like a shell would, never run by one. ${PORT} is a free
    port; ${GPUS}, ${GPU_COUNT} and ${TENSOR_SPLIT} are its GPUs, their number, and the MiB on each; a command without
    any of these is never spread over several."""
    remote: str | None = None
    """remote: the entry of `remotes` whose model it is. `use_model_name` is its name there."""
    cmd_stop: str | tuple[str, ...] | None = None
    """command: a program that stops the engine, instead of SIGTERM; ${PID} and ${PORT} are replaced."""
    check_endpoint: str = "/health"
    """command: path that answers 200 once the engine is ready; "none" if a running process is ready."""
    listener: Literal["own", "any"] = "own"
    """command: own: only the engine's own process tree may hold the port; any: any process (containers of a daemon)."""
    sizes_itself: bool | None = None
    """command: it takes as much GPU memory as it finds free, so its start waits for other moves on its GPUs,
    and other starts there wait for it. When not given, true for vLLM, SGLang, LMDeploy, TensorRT-LLM and TGI, as far
    as cmd shows them."""
    env: dict[str, str] = {}
    """Further environment variables of the engine; of the gateway's own it gets only PATH, HOME, CUDA_… and such."""
    cwd: str | None = None
    """Working directory of the engine."""
    program: str | None = None
    """llamacpp, vllm, sglang: the program to run (llama-server, vllm or sglang); otherwise the one on PATH, otherwise
    the packages of `python`."""
    python: str | None = None
    """llamacpp, transformers, diffusers, vllm, sglang, comfyui, whisper: Python that has the engine's packages; the
    gateway's own when not given (of ComfyUI: the one in its folder)."""
    ctx_size: CountFromZero = 4096
    """llamacpp, transformers, vllm, sglang: context length in tokens; 0 takes the model's own."""
    cache_type_k: CacheType = "f16"
    """llamacpp: how the keys of the KV cache are kept."""
    cache_type_v: CacheType = "f16"
    """llamacpp: how its values are kept; anything but f16, bf16 and f32 needs flash attention."""
    n_gpu_layers: Annotated[int, Field(ge=-1, le=COUNT_MAX), NotBool] = -1
    """llamacpp: layers on the GPU; -1 puts all there if there is one."""
    flash_attn: Literal["auto", "on", "off"] = "auto"
    """llamacpp: flash attention."""
    parallel: Annotated[int, Field(ge=1, le=256), NotBool] = 4
    """llamacpp: requests answered at once; they share the context."""
    threads: Count | None = None
    """llamacpp, transformers, diffusers, whisper: CPU threads; the engine's own choice when not given."""
    embedding: bool = False
    """llamacpp, transformers, vllm, sglang: serve embeddings instead of text. When not given, as the model's files
    say."""
    reranking: bool = False
    """llamacpp: serve /v1/rerank instead of text. When not given, as the file says."""
    mmproj: str | None = None
    """llamacpp: the projector (a GGUF file) by which it takes images or sound; in a folder the one that is there."""
    lora: dict[str, Annotated[float, Field(ge=-100, le=100), NotBool]] = {}
    """llamacpp: LoRA adapters (GGUF files), each with its scale; 1 applies it as it was trained."""
    draft_model: str | None = None
    """llamacpp: a small GGUF model of the same vocabulary that drafts tokens ahead (speculative decoding)."""
    chat_template: str | None = None
    """llamacpp, transformers, vllm, sglang: a file with a Jinja template (its name ends in .jinja), or, but for
    transformers, the name of one that the engine knows, such as chatml; the model's own when not given."""
    reasoning: Literal["auto", "on", "off"] = "auto"
    """llamacpp: whether a model that can reason before it answers does; auto leaves it to its chat template."""
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] = "auto"
    """llamacpp: where thoughts go: none leaves them in the text, deepseek puts them in reasoning_content."""
    reasoning_budget: Annotated[int, Field(ge=-1, le=COUNT_MAX), NotBool] = -1
    """llamacpp: tokens it may think for; -1 has no limit, 0 ends thinking at once."""
    args: tuple[str, ...] = ()
    """llamacpp, vllm, sglang, comfyui: further arguments for the server, as they are."""
    workflow: str | None = None
    """comfyui: a file with the workflow that makes a picture, in ComfyUI's API format."""
    inputs: dict[str, str | tuple[str, ...]] = {}
    """comfyui: where in the workflow the fields of a request belong, as NODE.INPUT: prompt, negative_prompt, seed,
    width, height, steps, guidance_scale, n, or names of your own."""
    checkpoints: str | None = None
    """comfyui: the folder with its checkpoints, in which those of the workflow must be; models/checkpoints of path
    when not given."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """transformers, diffusers, vllm, sglang: the dtype of its weights; auto takes that of the files."""
    quantization: str | None = None
    """vllm, sglang: how weights are quantized (fp8, awq, gptq …), where the files do not tell."""
    cache_tokens: Count | None = None
    """transformers, vllm, sglang: tokens in the KV cache for all requests together. When not given, four contexts;
    vllm, sglang: one for each of `concurrency` requests."""
    device_map: Literal["balanced", "one"] = "balanced"
    """diffusers: balanced: if no GPU can hold the pipeline, or `devices` names several, its components are spread over
    GPUs, each whole on one; one: it is never spread."""
    isolate: bool = False
    """transformers, diffusers: a worker process of its own, so that crashes of it or of other models stay apart. Models
    with `versions` always have one."""
    trust_remote_code: bool = False
    """transformers, diffusers, vllm, sglang: run Python code from the model's folder. Only for folders you trust like
    a program."""
    allow_pickle: bool = False
    """transformers, diffusers: load .bin files, which can run any code. Only for folders you trust like a program."""
    skip_check: bool = False
    """transformers: skip the comparison with plain Transformers, which refuses a model whose answers differ."""
    compute_type: ComputeType = "default"
    """whisper: the type that is computed with; default takes that of the files, or the nearest the device has."""
    beam_size: Annotated[int, Field(ge=1, le=100), NotBool] = 5
    """whisper: texts that are followed at the same time; 1 is quicker, more are sometimes better."""
    aliases: tuple[ModelId, ...] = ()
    """Other ids this model answers to."""
    exclusive: bool = False
    """Never in memory together with another configuration of the same path that is exclusive, too: one makes room for
    the other, between answers."""
    name: str | None = None
    """A name for people, shown in listings."""
    description: str | None = None
    """A sentence for people, shown in listings."""
    unlisted: bool = False
    """Leave it out of /v1/models; it can still be asked for."""
    metadata: dict[str, JsonValue] = {}
    """Anything; copied to listings."""
    use_model_name: str | None = None
    """The model name sent to the engine instead of the id asked for."""
    strip_params: tuple[str, ...] = ()
    """Top-level request fields removed before the engine sees them."""
    set_params: dict[str, JsonValue] = {}
    """Top-level request fields set to these values whatever the caller sent."""
    strict_json: bool | None = None
    """Whether it keeps to a response_format of JSON, for tasks that need that; as its engine does when not given:
    llamacpp, transformers, vllm and sglang do."""
    routes: tuple[RoutePattern, ...] = ()
    """Paths of its engine that every key may use behind /upstream/MODEL; * is one part, ** at the end all that follow.
    Keys with admin may use all."""
    media_hosts: tuple[HostName, ...] = ()
    """Hosts from which it may fetch pictures, sound and films that callers name by URL; from no other. Callers may
    always send them as data: URLs."""
    memory_mib: Mib | None = None
    """Memory it needs when ready, on a GPU or, without GPUs, on the host; estimated from the file when not given."""
    host_memory_mib: Mib = 0
    """Host memory it needs in addition when it is on a GPU."""
    gpu_memory_budget_mib: MibAboveZero | None = None
    """Upper bound of the GPU memory planned for it, whatever was estimated or measured."""
    gpu_memory_utilization: GpuShare | None = None
    """vllm, sglang: the share of each of its GPUs that is planned for it, instead of memory_mib."""
    prefix_caching: bool = True
    """vllm, sglang: keep prefixes of prompts, apart for each tenant and cache tag."""
    isolate_tenants: Literal["process", "off"] | None = None
    """How prompts of tenants are kept apart: as the engine can, if not given (`greenroom check --json` tells how).
    process: each tenant has a process of its own, for engines that cannot, such as a command. off: tenants may share
    what was computed for their prompts, and `args` may have a cache that they share."""
    device: Literal["auto", "cpu"] = "auto"
    """cpu: run it on the host only, even if there are GPUs."""
    devices: tuple[str, ...] = ()
    """Devices it must be placed on (gpu0, gpu1 or a GPU's UUID; host); any when not given."""
    concurrency: Count | None = None
    """Requests it answers at once; further ones wait. The engine's own number when not given; of llamacpp at most
    `parallel`."""
    priority: Literal["high", "normal", "low"] | Annotated[int, Field(ge=0, le=100), NotBool] = "normal"
    """Priority of its requests when they name none; lower numbers go first (high 0, normal 1, low 2)."""
    limits: RateLimits | None = None
    """What all of its requests together may use."""
    category: Literal["llm", "vision", "embedding", "diffusion", "transcription", "speech"] = "llm"
    """The kind of model. It decides how long it stays ready (see stay_warm) and, where nothing else says it, its engine
    and its abilities."""
    abilities: tuple[Ability, ...] | None = None
    """What it can be asked for; other routes are refused before it is loaded. When not given, what its files and
    category tell; if they tell nothing, it is asked for anything."""
    ttl_s: Seconds | None = None
    """Unload after this long without a request, unless its caller said keep_alive; 0 = never; else see stay_warm."""
    pinned: bool = False
    """Never evicted and never unloaded for being idle."""
    versions: ModelVersions | None = None
    """Put it under version control: `path` is its first version, and updates replace it while it serves."""
    preload: bool = False
    """Loaded at start, and again after a crash, as long as there is room."""
    load_timeout_s: SecondsAboveZero = 600
    """A load that is not ready by then has failed."""
    stop_timeout_s: SecondsAboveZero = 10
    """How long the engine may take to stop before it is killed."""
    grace_s: Seconds = 30
    """How long running answers may go on when the model is unloaded by an operator or a changed configuration."""

    @model_validator(mode="before")
    @classmethod
    def _infer_engine(cls, said: Any) -> Any:
        """Set `engine` if the keys make it certain; otherwise the rules below refuse the model."""
        if not isinstance(said, dict):
            return said
        if said.get("engine") is None and (engine := inferred_engine(said)):
            said = {**said, "engine": engine}
        if said.get("category") == "embedding" and said.get("engine") in WITH_EMBEDDING:
            said = {"embedding": not said.get("reranking"), **said}
        return said

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(_problems(self))
        return self

    @property
    def says_mode(self) -> bool:
        """True if the operator says whether it embeds, ranks or writes; otherwise its files tell."""
        return bool(self.model_fields_set & {"embedding", "reranking"})

    @property
    def is_host_only(self) -> bool:
        """True if it uses no GPU: by its options, or because `devices` names the host alone."""
        return self.device == "cpu" or self.n_gpu_layers == 0 or set(self.devices) == {"host"}


# --- the rules between keys -----------------------------------------------------------------------------------------

NO_CHECK = "none"

# `model` decides the route and `stream` the shape of the answer; both are used before params are applied.
PARAMS_NOT_OURS_TO_CHANGE = frozenset({"model", "stream"})


def _problems(model: Model) -> Iterator[Problem]:
    if model.engine is None:
        yield _engine_in_doubt(model)
        return
    if (problem := unknown_engine(model.engine)) is not None:
        yield problem
        return
    if model.options and model.engine in KEYS_OF_ENGINES:
        yield Problem(("options",), f"is for engines of other packages; {model.engine} has keys of its own")
    given = (key for key in model.model_fields_set if getattr(model, key) is not None)
    yield from keys_of_other_engines(model.engine, given)
    yield from _params(model)
    yield from _environment(model)
    if model.isolate_tenants is None:
        yield from sharing_problems(model.engine, model.args, model.env)
    for path in model.lora:
        if any(letter in path for letter in ':,"'):
            yield Problem(("lora", path), "llama.cpp takes no adapter whose path has a colon, comma or quote in it")
    template = model.chat_template
    if model.engine == "transformers" and template is not None and not template.endswith(TEMPLATE_ENDING):
        yield Problem(("chat_template",), "transformers knows no template by name; give a file that ends in .jinja")
    if model.abilities == ():
        yield Problem(("abilities",), "may not be empty; without the key it is asked for anything")
    is_fetched = model.versions is not None and model.versions.repo_id is not None
    if model.engine in WITH_PATH and not model.path and not is_fetched:
        yield Problem((), f"engine {model.engine} needs path")
    if model.versions is not None and model.engine not in WITH_PATH:
        yield Problem(("versions",), f"needs an engine that runs a `path`; {model.engine} does not")
    if model.versions is not None and model.isolate_tenants == "process":
        yield Problem(
            ("versions",),
            "does not go together with isolate_tenants: process: an update loads one process beside the old one, and "
            "there every tenant has its own. Remove isolate_tenants, or configure a model for each tenant",
        )
    if model.engine == "remote":
        yield from _remote(model)
    if model.engine == "command":
        yield from _command(model)
    if model.engine == "comfyui":
        yield from _comfyui(model)
    if model.device == "cpu" and any(device != "host" for device in model.devices):
        yield Problem(("devices",), "names a GPU, but device: cpu keeps it on the host")


def _engine_in_doubt(model: Model) -> Problem:
    if model.path and model.cmd:
        return Problem((), "give path (engine llamacpp or transformers) or cmd (engine command), not both")
    return Problem((), "give path (a .gguf file or a folder) or cmd (for engine command)")


def _command(model: Model) -> Iterator[Problem]:
    if not model.cmd:
        yield Problem((), "engine command needs cmd")
        return
    for key, command in (("cmd", model.cmd), ("cmd_stop", model.cmd_stop)):
        if command is not None and (why := unsplittable(command)):
            yield Problem((key,), why)
    if not model.check_endpoint.startswith("/") and model.check_endpoint != NO_CHECK:
        yield Problem(("check_endpoint",), f'must begin with / or be "{NO_CHECK}"')
    elif not model.check_endpoint.isascii() or any(c <= " " or c == "\x7f" for c in model.check_endpoint):
        yield Problem(("check_endpoint",), "may not contain spaces, control characters or other than ASCII")
    texts = ((model.cmd,) if isinstance(model.cmd, str) else model.cmd) + tuple(model.env.values())
    if model.check_endpoint != NO_CHECK and not any("${PORT}" in text for text in texts):
        yield Problem(("cmd",), f'needs ${{PORT}}, the port to listen on, unless check_endpoint is "{NO_CHECK}"')


def _remote(model: Model) -> Iterator[Problem]:
    if model.remote is None:
        yield Problem((), "engine remote needs remote, the name of an entry of remotes")
    for key in sorted(LOCAL_KEYS & model.model_fields_set):
        yield Problem((key,), "is for models that run here; a remote one takes no memory and is always ready")


def _comfyui(model: Model) -> Iterator[Problem]:
    if (model.cmd is None) == (model.path is None):
        yield Problem((), "engine comfyui needs path, the folder of its installation, or cmd, and not both")
    if model.cmd is not None and (why := unsplittable(model.cmd)):
        yield Problem(("cmd",), why)
    elif model.cmd is not None and "${PORT}" not in (model.cmd if isinstance(model.cmd, str) else " ".join(model.cmd)):
        yield Problem(("cmd",), "needs ${PORT}, the port to listen on")
    if model.workflow is None:
        yield Problem((), "engine comfyui needs workflow, a file in ComfyUI's API format")
    if "prompt" not in model.inputs:
        yield Problem(("inputs",), 'needs prompt, such as "6.text": the input of the workflow that takes it')
    for name, said in model.inputs.items():
        for place in (said,) if isinstance(said, str) else said:
            node, dot, field = place.partition(".")
            if not (node and dot and field):
                yield Problem(("inputs", name), "is written as NODE.INPUT, such as 6.text")


def _params(model: Model) -> Iterator[Problem]:
    for name in sorted(PARAMS_NOT_OURS_TO_CHANGE & set(model.set_params)):
        yield Problem(("set_params", name), f"{name} cannot be set; it has been acted on already")
    for position, name in enumerate(model.strip_params):
        if name in PARAMS_NOT_OURS_TO_CHANGE:
            yield Problem(("strip_params", position), f"{name} cannot be removed; it has been acted on already")


def _environment(model: Model) -> Iterator[Problem]:
    for name in model.env:
        if not name or "=" in name or not name.isprintable():
            yield Problem(("env", name), "is not a name an environment variable can have")
