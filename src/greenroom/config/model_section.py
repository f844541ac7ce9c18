"""What an operator can say about one model, and the rules between its keys.

Owns the keys and which engine each belongs to. Looks at the names of installed engines and at nothing else of the
machine: see `problems.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from greenroom.config.kinds import (
    COUNT_MAX,
    Count,
    CountFromZero,
    Mib,
    MibAboveZero,
    ModelId,
    NotBool,
    RoutePattern,
    Seconds,
    SecondsAboveZero,
    Section,
    words,
)
from greenroom.config.plugins import ENGINE_GROUP
from greenroom.config.reader import Problem, break_on

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]

# A chat template with another name is one that llama.cpp knows.
TEMPLATE_ENDING = ".jinja"

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
    """llamacpp, transformers, command, or an engine of another package (see `greenroom engines`); inferred from
    category, path (a .gguf file or a folder) or cmd when not given."""
    options: dict[str, JsonValue] = {}
    """Engines of other packages: their own options, as their documentation says."""
    path: str | None = None
    """llamacpp, transformers: the model file, or the folder with config.json and safetensors or with one GGUF; relative
    paths start at the folder of the configuration file."""
    cmd: str | tuple[str, ...] | None = None
    """command: the program and its arguments, split like a shell would, never run by one. ${PORT} is a free port;
    ${GPUS}, ${GPU_COUNT} and ${TENSOR_SPLIT} are its GPUs, their number, and the MiB on each; a command without any of
    these is never spread over several."""
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
    """llamacpp: the llama-server binary to run; otherwise the one on PATH, otherwise the embedded build."""
    python: str | None = None
    """llamacpp, transformers: Python interpreter that has the engine's packages; the gateway's own when not given."""
    ctx_size: CountFromZero = 4096
    """llamacpp, transformers: context length in tokens; 0 takes the model's own."""
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
    """llamacpp, transformers: CPU threads; the engine's own choice when not given."""
    embedding: bool = False
    """llamacpp, transformers: serve embeddings instead of text. When not given, as the model's files say."""
    reranking: bool = False
    """llamacpp: serve /v1/rerank instead of text. When not given, as the file says."""
    mmproj: str | None = None
    """llamacpp: the projector (a GGUF file) by which it takes images or sound; in a folder the one that is there."""
    lora: dict[str, Annotated[float, Field(ge=-100, le=100), NotBool]] = {}
    """llamacpp: LoRA adapters (GGUF files), each with its scale; 1 applies it as it was trained."""
    draft_model: str | None = None
    """llamacpp: a small GGUF model of the same vocabulary that drafts tokens ahead (speculative decoding)."""
    chat_template: str | None = None
    """llamacpp: a file with a Jinja template (its name ends in .jinja), or the name of one that llama.cpp knows, such
    as chatml; the model's own when not given."""
    reasoning: Literal["auto", "on", "off"] = "auto"
    """llamacpp: whether a model that can reason before it answers does; auto leaves it to its chat template."""
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] = "auto"
    """llamacpp: where thoughts go: none leaves them in the text, deepseek puts them in reasoning_content."""
    reasoning_budget: Annotated[int, Field(ge=-1, le=COUNT_MAX), NotBool] = -1
    """llamacpp: tokens it may think for; -1 has no limit, 0 ends thinking at once."""
    args: tuple[str, ...] = ()
    """llamacpp: further arguments for llama-server, as they are."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """transformers: the dtype of its weights; auto takes that of the files."""
    cache_tokens: Count | None = None
    """transformers: tokens in the KV cache for all requests together; four contexts when not given."""
    isolate: bool = False
    """transformers: a worker process of its own, so that a crash of it or of other models stays apart."""
    trust_remote_code: bool = False
    """transformers: run Python code from the model's folder. Only for folders you trust like a program."""
    allow_pickle: bool = False
    """transformers: load .bin files, which can run any code. Only for folders you trust like a program."""
    skip_check: bool = False
    """transformers: skip the comparison with plain Transformers, which refuses a model whose answers differ."""
    aliases: tuple[ModelId, ...] = ()
    """Other ids this model answers to."""
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
    routes: tuple[RoutePattern, ...] = ()
    """Paths of its engine that every key may use behind /upstream/MODEL; * is one part, ** at the end all that follow.
    Keys with admin may use all."""
    memory_mib: Mib | None = None
    """Memory it needs when ready, on a GPU or, without GPUs, on the host; estimated from the file when not given."""
    host_memory_mib: Mib = 0
    """Host memory it needs in addition when it is on a GPU."""
    gpu_memory_budget_mib: MibAboveZero | None = None
    """Upper bound of the GPU memory planned for it, whatever was estimated or measured."""
    device: Literal["auto", "cpu"] = "auto"
    """cpu: run it on the host only, even if there are GPUs."""
    devices: tuple[str, ...] = ()
    """Devices it must be placed on (gpu0, gpu1 or a GPU's UUID; host); any when not given."""
    concurrency: Count | None = None
    """Requests it answers at once; further ones wait. The engine's own number when not given."""
    priority: Literal["high", "normal", "low"] | Annotated[int, Field(ge=0, le=100), NotBool] = "normal"
    """Priority of its requests when they name none; lower numbers go first (high 0, normal 1, low 2)."""
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
        if said.get("engine") is None and (engine := _inferred_engine(said)):
            said = {**said, "engine": engine}
        if said.get("category") == "embedding" and said.get("engine") in _WITH_EMBEDDING:
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


# --- which engine a key belongs to; keys in no set belong to every engine -------------------------------------------

LLAMACPP_KEYS = frozenset(
    {
        "path",
        "program",
        "python",
        "ctx_size",
        "cache_type_k",
        "cache_type_v",
        "n_gpu_layers",
        "flash_attn",
        "parallel",
        "threads",
        "embedding",
        "reranking",
        "mmproj",
        "lora",
        "draft_model",
        "chat_template",
        "reasoning",
        "reasoning_format",
        "reasoning_budget",
        "args",
    }
)
TRANSFORMERS_KEYS = frozenset(
    {
        "path",
        "python",
        "ctx_size",
        "threads",
        "embedding",
        "dtype",
        "cache_tokens",
        "isolate",
        "trust_remote_code",
        "allow_pickle",
        "skip_check",
    }
)
COMMAND_KEYS = frozenset({"cmd", "cmd_stop", "check_endpoint", "listener", "sizes_itself"})
KEYS_OF_ENGINES = {"llamacpp": LLAMACPP_KEYS, "transformers": TRANSFORMERS_KEYS, "command": COMMAND_KEYS}


# --- the rules between keys -----------------------------------------------------------------------------------------

NO_CHECK = "none"

# `model` decides the route and `stream` the shape of the answer; both are used before params are applied.
PARAMS_NOT_OURS_TO_CHANGE = frozenset({"model", "stream"})

# The engine of a model whose path is not a .gguf file, where its category tells more than the path.
_ENGINE_OF_CATEGORY = {"diffusion": "diffusers", "transcription": "whisper"}
_WITH_EMBEDDING = ("llamacpp", "transformers")

# Engines that take what a key says as arguments instead.
_ARGUMENTS_IN = {"llamacpp": "args", "command": "cmd"}


def _problems(model: Model) -> Iterator[Problem]:
    if model.engine is None:
        yield _engine_in_doubt(model)
        return
    if model.engine not in KEYS_OF_ENGINES and model.engine not in (others := _engines_of_packages()):
        yield _unknown_engine(model, others)
        return
    yield from _keys_of_other_engines(model, model.engine)
    yield from _params(model)
    yield from _environment(model)
    for path in model.lora:
        if any(letter in path for letter in ':,"'):
            yield Problem(("lora", path), "llama.cpp takes no adapter whose path has a colon, comma or quote in it")
    if model.abilities == ():
        yield Problem(("abilities",), "may not be empty; without the key it is asked for anything")
    if model.engine in ("llamacpp", "transformers") and not model.path:
        yield Problem((), f"engine {model.engine} needs path")
    if model.engine == "command":
        yield from _command(model)
    if model.device == "cpu" and any(device != "host" for device in model.devices):
        yield Problem(("devices",), "names a GPU, but device: cpu keeps it on the host")


def _inferred_engine(model: Mapping[str, object]) -> str | None:
    """The engine of a model that names none, if its keys leave no doubt."""
    path, cmd = model.get("path"), model.get("cmd")
    if cmd is not None and path is None:
        return "command"
    if cmd is None and isinstance(path, str) and path:
        if path.lower().endswith(".gguf"):
            return "llamacpp"
        return _ENGINE_OF_CATEGORY.get(str(model.get("category")), "transformers")
    return None


def _engines_of_packages() -> list[str]:
    return sorted({entry.name for entry in entry_points(group=ENGINE_GROUP)} - KEYS_OF_ENGINES.keys())


def _unknown_engine(model: Model, others: list[str]) -> Problem:
    known = ", ".join(sorted([*KEYS_OF_ENGINES, *others]))
    if model.engine == _ENGINE_OF_CATEGORY.get(model.category):
        why = f"category {model.category} needs engine {model.engine}, which is not installed"
        return Problem(("category",), f"{why}; there are {known}. Give cmd to use a program of your own")
    return Problem(("engine",), f"there is no engine {model.engine!r}; there are {known}")


def _engine_in_doubt(model: Model) -> Problem:
    if model.path and model.cmd:
        return Problem((), "give path (engine llamacpp or transformers) or cmd (engine command), not both")
    return Problem((), "give path (a .gguf file or a folder) or cmd (for engine command)")


def _keys_of_other_engines(model: Model, engine: str) -> Iterator[Problem]:
    if engine not in KEYS_OF_ENGINES:
        # An engine of another package reads the keys that it wants.
        return
    if model.options:
        yield Problem(("options",), f"is for engines of other packages; {engine} has keys of its own")
    strange = frozenset().union(*KEYS_OF_ENGINES.values()) - KEYS_OF_ENGINES[engine]
    for key in sorted(strange & model.model_fields_set):
        if getattr(model, key) is not None:
            owners = " or ".join(name for name, keys in KEYS_OF_ENGINES.items() if key in keys)
            yield Problem((key,), f"{key} is for engine {owners}; {_instead(key, engine)}")


def _instead(key: str, engine: str) -> str:
    """Where to say the same for an engine that does not have the key."""
    is_about_the_process = key in COMMAND_KEYS and key != "cmd"
    if engine not in _ARGUMENTS_IN or is_about_the_process:
        return f"{engine} has nothing like it"
    return f"{engine} takes its arguments in {_ARGUMENTS_IN[engine]}"


def _command(model: Model) -> Iterator[Problem]:
    if not model.cmd:
        yield Problem((), "engine command needs cmd")
        return
    for key, command in (("cmd", model.cmd), ("cmd_stop", model.cmd_stop)):
        if command is not None and (why := _unsplittable(command)):
            yield Problem((key,), why)
    if not model.check_endpoint.startswith("/") and model.check_endpoint != NO_CHECK:
        yield Problem(("check_endpoint",), f'must begin with / or be "{NO_CHECK}"')
    elif not model.check_endpoint.isascii() or any(c <= " " or c == "\x7f" for c in model.check_endpoint):
        yield Problem(("check_endpoint",), "may not contain spaces, control characters or other than ASCII")
    texts = ((model.cmd,) if isinstance(model.cmd, str) else model.cmd) + tuple(model.env.values())
    if model.check_endpoint != NO_CHECK and not any("${PORT}" in text for text in texts):
        yield Problem(("cmd",), f'needs ${{PORT}}, the port to listen on, unless check_endpoint is "{NO_CHECK}"')


def _unsplittable(command: str | tuple[str, ...]) -> str | None:
    try:
        split = words(command)
    except ValueError as error:
        return f"cannot be split into words: {str(error).lower()}"
    return None if split and split[0] else "is empty"


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
