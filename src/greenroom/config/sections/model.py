"""What an operator can say about one model, and the rules between its keys. Owns the keys; each is marked with the
engines that have it. Looks at nothing of the machine: see `problems.py`."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

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
from greenroom.config.marks import AT_ONCE, FILE, LOCAL, NEW_SLOT, PROGRAM, Engines, Example, Variable, engines_of
from greenroom.config.reader import Problem
from greenroom.config.sections.engine_keys import (
    WITH_PATH,
    inferred_engine,
    keys_of_engines,
    keys_of_other_engines,
    sharing_problems,
    unknown_engine,
)
from greenroom.config.sections.keys import RateLimits
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

    engine: Annotated[str | None, NEW_SLOT] = None
    """llamacpp, transformers, diffusers, vllm, sglang, comfyui, whisper, command, remote, or one of another package
    (see `greenroom engines`); inferred from category, path (a .gguf file or a folder), versions.repo_id, cmd or remote
    when not given."""
    options: Annotated[dict[str, JsonValue], NEW_SLOT] = {}
    """Engines of other packages: their own options, as their documentation says."""
    path: Annotated[
        str | None, Engines("llamacpp", "transformers", "diffusers", "vllm", "sglang", "comfyui", "whisper"), FILE
    ] = None
    """the model file, or the folder with config.json
    and safetensors, with model_index.json, with one GGUF, or with a Whisper model of CTranslate2; of ComfyUI its
    installation. Relative paths start at the folder of the configuration file. whisper also takes a size in the Hugging
    Face cache: tiny, base, small, medium (also with .en), large (the newest) or turbo."""
    cmd: Annotated[str | tuple[str, ...] | None, Engines("comfyui", "command")] = None
    """the program and its arguments, split like a shell would, never run by one. ${PORT} is a free
    port; ${GPUS}, ${GPU_COUNT} and ${TENSOR_SPLIT} are its GPUs, their number, and the MiB on each; a command without
    any of these is never spread over several."""
    remote: Annotated[str | None, Engines("remote")] = None
    """the entry of `remotes` whose model it is. `use_model_name` is its name there."""
    cmd_stop: Annotated[str | tuple[str, ...] | None, Engines("command"), AT_ONCE, Example("docker stop whisper")] = (
        None
    )
    """a program that stops the engine, instead of SIGTERM; ${PID} and ${PORT} are replaced."""
    check_endpoint: Annotated[str, Engines("command")] = "/health"
    """path that answers 200 once the engine is ready; "none" if a running process is ready."""
    listener: Annotated[Literal["own", "any"], Engines("command")] = "own"
    """own: only the engine's own process tree may hold the port; any: any process (containers of a daemon)."""
    sizes_itself: Annotated[bool | None, Engines("command"), AT_ONCE] = None
    """it takes as much GPU memory as it finds free, so its start waits for other moves on its GPUs,
    and other starts there wait for it. When not given, true for vLLM, SGLang, LMDeploy, TensorRT-LLM and TGI, as far
    as cmd shows them."""
    env: Annotated[dict[str, str], NEW_SLOT, LOCAL, Example({"OMP_NUM_THREADS": "4"})] = {}
    """Further environment variables of the engine; of the gateway's own it gets only PATH, HOME, CUDA_… and such."""
    cwd: Annotated[str | None, NEW_SLOT, LOCAL, FILE, Example("/srv/models")] = None
    """Working directory of the engine."""
    program: Annotated[
        str | None, Engines("llamacpp", "vllm", "sglang"), PROGRAM, Example("/opt/llama.cpp/bin/llama-server")
    ] = None
    """the program to run (llama-server, vllm or sglang); otherwise the one on PATH, otherwise
    the packages of `python`."""
    python: Annotated[
        str | None,
        Engines("llamacpp", "transformers", "diffusers", "vllm", "sglang", "comfyui", "whisper"),
        PROGRAM,
        Example("/opt/llama/bin/python"),
    ] = None
    """Python that has the engine's packages; the
    gateway's own when not given (of ComfyUI: the one in its folder)."""
    ctx_size: Annotated[CountFromZero, Engines("llamacpp", "transformers", "vllm", "sglang")] = 4096
    """context length in tokens; 0 takes the model's own."""
    cache_type_k: Annotated[CacheType, Engines("llamacpp")] = "f16"
    """how the keys of the KV cache are kept."""
    cache_type_v: Annotated[CacheType, Engines("llamacpp")] = "f16"
    """how its values are kept; anything but f16, bf16 and f32 needs flash attention."""
    n_gpu_layers: Annotated[int, Field(ge=-1, le=COUNT_MAX), NotBool, Engines("llamacpp")] = -1
    """layers on the GPU; -1 puts all there if there is one."""
    flash_attn: Annotated[Literal["auto", "on", "off"], Engines("llamacpp")] = "auto"
    """flash attention."""
    parallel: Annotated[int, Field(ge=1, le=256), NotBool, Engines("llamacpp")] = 4
    """requests answered at once; they share the context."""
    threads: Annotated[Count | None, Engines("llamacpp", "transformers", "diffusers", "whisper"), Example(8)] = None
    """CPU threads; the engine's own choice when not given."""
    embedding: Annotated[bool, Engines("llamacpp", "transformers", "vllm", "sglang")] = False
    """serve embeddings instead of text. When not given, as the model's files
    say."""
    reranking: Annotated[bool, Engines("llamacpp")] = False
    """serve /v1/rerank instead of text. When not given, as the file says."""
    mmproj: Annotated[str | None, Engines("llamacpp"), FILE, Example("models/mmproj.gguf")] = None
    """the projector (a GGUF file) by which it takes images or sound; in a folder the one that is there."""
    lora: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100), NotBool]],
        Engines("llamacpp"),
        FILE,
        Example({"models/lora.gguf": 0.5}),
    ] = {}
    """LoRA adapters (GGUF files), each with its scale; 1 applies it as it was trained."""
    draft_model: Annotated[str | None, Engines("llamacpp"), FILE, Example("models/draft.gguf")] = None
    """a small GGUF model of the same vocabulary that drafts tokens ahead (speculative decoding)."""
    chat_template: Annotated[str | None, Engines("llamacpp", "transformers", "vllm", "sglang"), Example("chatml")] = (
        None
    )
    """a file with a Jinja template (its name ends in .jinja), or, but for
    transformers, the name of one that the engine knows, such as chatml; the model's own when not given."""
    reasoning: Annotated[Literal["auto", "on", "off"], Engines("llamacpp")] = "auto"
    """whether a model that can reason before it answers does; auto leaves it to its chat template."""
    reasoning_format: Annotated[Literal["auto", "none", "deepseek", "deepseek-legacy"], Engines("llamacpp")] = "auto"
    """where thoughts go: none leaves them in the text, deepseek puts them in reasoning_content."""
    reasoning_budget: Annotated[int, Field(ge=-1, le=COUNT_MAX), NotBool, Engines("llamacpp")] = -1
    """tokens it may think for; -1 has no limit, 0 ends thinking at once."""
    args: Annotated[
        tuple[str, ...], Engines("llamacpp", "vllm", "sglang", "comfyui"), Example(["--cache-ram", "0"])
    ] = ()
    """further arguments for the server, as they are."""
    workflow: Annotated[str | None, Engines("comfyui"), FILE] = None
    """a file with the workflow that makes a picture, in ComfyUI's API format."""
    inputs: Annotated[dict[str, str | tuple[str, ...]], Engines("comfyui")] = {}
    """where in the workflow the fields of a request belong, as NODE.INPUT: prompt, negative_prompt, seed,
    width, height, steps, guidance_scale, n, or names of your own."""
    checkpoints: Annotated[str | None, Engines("comfyui"), FILE, Example("/opt/comfyui/models/checkpoints")] = None
    """the folder with its checkpoints, in which those of the workflow must be; models/checkpoints of path
    when not given."""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], Engines("transformers", "diffusers", "vllm", "sglang")
    ] = "auto"
    """the dtype of its weights; auto takes that of the files."""
    quantization: Annotated[str | None, Engines("vllm", "sglang"), Example("fp8")] = None
    """how weights are quantized (fp8, awq, gptq …), where the files do not tell."""
    cache_tokens: Annotated[Count | None, Engines("transformers", "vllm", "sglang"), Example(32768)] = None
    """tokens in the KV cache for all requests together. When not given, four contexts;
    vllm, sglang: one for each of `concurrency` requests."""
    device_map: Annotated[Literal["balanced", "one"], Engines("diffusers")] = "balanced"
    """balanced: if no GPU can hold the pipeline, or `devices` names several, its components are spread over
    GPUs, each whole on one; one: it is never spread."""
    isolate: Annotated[bool, Engines("transformers", "diffusers")] = False
    """a worker process of its own, so that crashes of it or of other models stay apart. Models
    with `versions` always have one."""
    trust_remote_code: Annotated[bool, Engines("transformers", "diffusers", "vllm", "sglang")] = False
    """run Python code from the model's folder. Only for folders you trust like
    a program."""
    allow_pickle: Annotated[bool, Engines("transformers", "diffusers")] = False
    """load .bin files, which can run any code. Only for folders you trust like a program."""
    skip_check: Annotated[bool, Engines("transformers")] = False
    """skip the comparison with plain Transformers, which refuses a model whose answers differ."""
    compute_type: Annotated[ComputeType, Engines("whisper")] = "default"
    """the type that is computed with; default takes that of the files, or the nearest the device has."""
    beam_size: Annotated[int, Field(ge=1, le=100), NotBool, Engines("whisper")] = 5
    """texts that are followed at the same time; 1 is quicker, more are sometimes better."""
    aliases: Annotated[tuple[ModelId, ...], Example(["gpt-4o-mini", "default"])] = ()
    """Other ids this model answers to."""
    exclusive: Annotated[bool, LOCAL] = False
    """Never in memory together with another configuration of the same path that is exclusive, too: one makes room for
    the other, between answers."""
    name: Annotated[str | None, Example("Qwen 7B")] = None
    """A name for people, shown in listings."""
    description: Annotated[str | None, Example("Good at code.")] = None
    """A sentence for people, shown in listings."""
    unlisted: bool = False
    """Leave it out of /v1/models; it can still be asked for."""
    metadata: Annotated[dict[str, JsonValue], Example({"licence": "apache-2.0"})] = {}
    """Anything; copied to listings."""
    use_model_name: Annotated[str | None, Example("Qwen/Qwen2.5-7B-Instruct")] = None
    """The model name sent to the engine instead of the id asked for."""
    strip_params: Annotated[tuple[str, ...], Example(["logit_bias"])] = ()
    """Top-level request fields removed before the engine sees them."""
    set_params: Annotated[dict[str, JsonValue], Example({"temperature": 0.7})] = {}
    """Top-level request fields set to these values whatever the caller sent."""
    strict_json: Annotated[bool | None, Example(True)] = None
    """Whether it keeps to a response_format of JSON, for tasks that need that; as its engine does when not given:
    llamacpp, transformers, vllm and sglang do."""
    routes: Annotated[tuple[RoutePattern, ...], LOCAL, Example(["/tokenize", "/v1/images/*"])] = ()
    """Paths of its engine that every key may use behind /upstream/MODEL; * is one part, ** at the end all that follow.
    Keys with admin may use all."""
    media_hosts: Annotated[tuple[HostName, ...], NEW_SLOT, Example(["pictures.example.org"])] = ()
    """Hosts from which it may fetch pictures, sound and films that callers name by URL; from no other. Callers may
    always send them as data: URLs."""
    memory_mib: Annotated[Mib | None, NEW_SLOT, LOCAL, Example(6144)] = None
    """Memory it needs when ready, on a GPU or, without GPUs, on the host; estimated from the file when not given."""
    host_memory_mib: Annotated[Mib, NEW_SLOT, LOCAL] = 0
    """Host memory it needs in addition when it is on a GPU."""
    gpu_memory_budget_mib: Annotated[MibAboveZero | None, NEW_SLOT, LOCAL] = None
    """Upper bound of the GPU memory planned for it, whatever was estimated or measured."""
    gpu_memory_utilization: Annotated[GpuShare | None, Engines("vllm", "sglang")] = None
    """the share of each of its GPUs that is planned for it, instead of memory_mib."""
    prefix_caching: Annotated[bool, Engines("vllm", "sglang")] = True
    """keep prefixes of prompts, apart for each tenant and cache tag."""
    isolate_tenants: Annotated[Literal["process", "off"] | None, NEW_SLOT, LOCAL] = None
    """How prompts of tenants are kept apart: as the engine can, if not given (`greenroom check --json` tells how).
    process: each tenant has a process of its own, for engines that cannot, such as a command. off: tenants may share
    what was computed for their prompts, and `args` may have a cache that they share."""
    device: Annotated[Literal["auto", "cpu"], NEW_SLOT, LOCAL] = "auto"
    """cpu: run it on the host only, even if there are GPUs."""
    devices: Annotated[tuple[str, ...], NEW_SLOT, LOCAL, Example(["gpu0"])] = ()
    """Devices it must be placed on (gpu0, gpu1 or a GPU's UUID; host); any when not given."""
    concurrency: Annotated[Count | None, NEW_SLOT, Example(4)] = None
    """Requests it answers at once; further ones wait. The engine's own number when not given; of llamacpp at most
    `parallel`."""
    priority: Literal["high", "normal", "low"] | Annotated[int, Field(ge=0, le=100), NotBool] = "normal"
    """Priority of its requests when they name none; lower numbers go first (high 0, normal 1, low 2)."""
    limits: Annotated[RateLimits | None, Example({"requests_per_minute": 600, "concurrent_max": 8})] = None
    """What all of its requests together may use."""
    category: Literal["llm", "vision", "embedding", "diffusion", "transcription", "speech"] = "llm"
    """The kind of model. It decides how long it stays ready (see stay_warm) and, where nothing else says it, its engine
    and its abilities."""
    abilities: Annotated[tuple[Ability, ...] | None, Example(["chat", "vision"])] = None
    """What it can be asked for; other routes are refused before it is loaded. When not given, what its files and
    category tell; if they tell nothing, it is asked for anything."""
    ttl_s: Annotated[Seconds | None, LOCAL] = None
    """Unload after this long without a request, unless its caller said keep_alive; 0 = never; else see stay_warm."""
    pinned: Annotated[bool, LOCAL] = False
    """Never evicted and never unloaded for being idle."""
    versions: Annotated[ModelVersions | None, LOCAL, Example({"repo_id": "org/name", "keep": 2})] = None
    """Put it under version control: `path` is its first version, and updates replace it while it serves."""
    preload: Annotated[bool, LOCAL] = False
    """Loaded at start, and again after a crash, as long as there is room."""
    load_timeout_s: Annotated[SecondsAboveZero, LOCAL] = 600
    """A load that is not ready by then has failed."""
    stop_timeout_s: Annotated[SecondsAboveZero, LOCAL] = 10
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
        if said.get("category") == "embedding" and said.get("engine") in engines_of(cls.model_fields["embedding"]):
            said = {"embedding": not said.get("reranking"), **said}
        return said

    def _problems(self) -> Iterator[Problem]:
        if self.engine is None:
            yield _engine_in_doubt(self)
            return
        if (problem := unknown_engine(self.engine, KEYS_OF_ENGINES)) is not None:
            yield problem
            return
        if self.options and self.engine in KEYS_OF_ENGINES:
            yield Problem(("options",), f"is for engines of other packages; {self.engine} has keys of its own")
        given = (key for key in self.model_fields_set if getattr(self, key) is not None)
        yield from keys_of_other_engines(self.engine, given, KEYS_OF_ENGINES)
        yield from _params(self)
        yield from _environment(self)
        if self.isolate_tenants is None:
            yield from sharing_problems(self.engine, self.args, self.env)
        for path in self.lora:
            if any(letter in path for letter in ':,"'):
                yield Problem(("lora", path), "llama.cpp takes no adapter whose path has a colon, comma or quote in it")
        template = self.chat_template
        if self.engine == "transformers" and template is not None and not template.endswith(TEMPLATE_ENDING):
            yield Problem(("chat_template",), "transformers knows no template by name; give a file that ends in .jinja")
        if self.abilities == ():
            yield Problem(("abilities",), "may not be empty; without the key it is asked for anything")
        is_fetched = self.versions is not None and self.versions.repo_id is not None
        if self.engine in WITH_PATH and not self.path and not is_fetched:
            yield Problem((), f"engine {self.engine} needs path")
        if self.versions is not None and self.engine not in WITH_PATH:
            yield Problem(("versions",), f"needs an engine that runs a `path`; {self.engine} does not")
        if self.versions is not None and self.isolate_tenants == "process":
            yield Problem(
                ("versions",),
                "does not go together with isolate_tenants: process: an update loads one process beside the old one, "
                "and there every tenant has its own. Remove isolate_tenants, or configure a model for each tenant",
            )
        if self.engine == "remote":
            yield from _remote(self)
        if self.engine == "command":
            yield from _command(self)
        if self.engine == "comfyui":
            yield from _comfyui(self)
        if self.device == "cpu" and any(device != "host" for device in self.devices):
            yield Problem(("devices",), "names a GPU, but device: cpu keeps it on the host")

    @property
    def says_mode(self) -> bool:
        """True if the operator says whether it embeds, ranks or writes; otherwise its files tell."""
        return bool(self.model_fields_set & {"embedding", "reranking"})

    @property
    def is_host_only(self) -> bool:
        """True if it uses no GPU: by its options, or because `devices` names the host alone."""
        return self.device == "cpu" or self.n_gpu_layers == 0 or set(self.devices) == {"host"}


class Vllm(Section):
    """What models of vLLM get that do not say it themselves, ad-hoc models included."""

    ctx_size: Annotated[
        CountFromZero | None,
        Variable("VLLM_MAX_MODEL_LEN", "Context length of models of vLLM that have no ctx_size of their own."),
    ] = None
    """Context length in tokens; 0 takes the model's own. As `ctx_size` of a model when not given."""
    gpu_memory_utilization: Annotated[
        GpuShare | None,
        Variable(
            "VLLM_GPU_MEMORY_UTILIZATION", "Share of a GPU for models of vLLM that have no memory_mib of their own."
        ),
    ] = None
    """Share of a GPU for models without memory_mib. When not given, what a configured model is estimated to need, and
    0.7 for an ad-hoc model."""
    prefix_caching: Annotated[
        bool,
        Variable("VLLM_ENABLE_PREFIX_CACHING", "Whether models of vLLM that do not say it keep prefixes of prompts."),
    ] = True
    """Whether prefixes of prompts are kept."""


# Which engine has which keys, by its name. Keys in no set belong to every engine.
KEYS_OF_ENGINES: Final = keys_of_engines(Model)
# Keys of models that run on this machine, by a process of ours.
LOCAL_KEYS: Final = frozenset(key for key, field in Model.model_fields.items() if LOCAL in field.metadata)

# --- the rules between keys -----------------------------------------------------------------------------------------

NO_CHECK = "none"

# `model` decides the route and `stream` the shape of the answer; both are used before params are applied.
PARAMS_NOT_OURS_TO_CHANGE = frozenset({"model", "stream"})


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
