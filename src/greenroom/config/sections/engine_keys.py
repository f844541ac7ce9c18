"""Which engine each key of a model belongs to, and which engine a model has that names none.

Keys in no set belong to every engine. Looks at the names of installed engines and at nothing else of the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Final

from greenroom.config.plugins import ENGINE_GROUP
from greenroom.config.reader import Problem

LLAMACPP_KEYS: Final = frozenset(
    (
        *("path", "program", "python", "args", "ctx_size", "parallel", "threads", "n_gpu_layers", "flash_attn"),
        *("cache_type_k", "cache_type_v", "embedding", "reranking", "mmproj", "lora", "draft_model"),
        *("chat_template", "reasoning", "reasoning_format", "reasoning_budget"),
    )
)
TRANSFORMERS_KEYS: Final = frozenset(
    (
        *("path", "python", "ctx_size", "threads", "embedding", "dtype", "cache_tokens"),
        *("chat_template", "isolate", "trust_remote_code", "allow_pickle", "skip_check"),
    )
)
DIFFUSERS_KEYS: Final = frozenset(
    ("path", "python", "threads", "dtype", "device_map", "isolate", "trust_remote_code", "allow_pickle")
)
# Servers that have their own process for each model and their own command line.
SERVER_KEYS: Final = frozenset(
    (
        *("path", "program", "python", "args", "ctx_size", "embedding", "dtype", "quantization", "cache_tokens"),
        *("chat_template", "trust_remote_code", "gpu_memory_utilization", "prefix_caching"),
    )
)
COMFYUI_KEYS: Final = frozenset({"path", "python", "args", "cmd", "workflow", "inputs", "checkpoints"})
WHISPER_KEYS: Final = frozenset({"path", "python", "threads", "compute_type", "beam_size"})
COMMAND_KEYS: Final = frozenset({"cmd", "cmd_stop", "check_endpoint", "listener", "sizes_itself"})
REMOTE_KEYS: Final = frozenset({"remote"})
KEYS_OF_ENGINES: Final = {
    "llamacpp": LLAMACPP_KEYS,
    "transformers": TRANSFORMERS_KEYS,
    "diffusers": DIFFUSERS_KEYS,
    "vllm": SERVER_KEYS,
    "sglang": SERVER_KEYS,
    "comfyui": COMFYUI_KEYS,
    "whisper": WHISPER_KEYS,
    "command": COMMAND_KEYS,
    "remote": REMOTE_KEYS,
}
# Keys of models that run on this machine, by a process of ours.
LOCAL_KEYS: Final = frozenset(
    (
        *("env", "cwd", "memory_mib", "host_memory_mib", "gpu_memory_budget_mib", "isolate_tenants", "device"),
        *("devices", "exclusive", "ttl_s", "pinned", "preload", "load_timeout_s", "stop_timeout_s", "versions"),
        "routes",
    )
)
# The engines that cannot do without `path`, and those that can be told to embed.
WITH_PATH: Final = ("llamacpp", "transformers", "diffusers", "vllm", "sglang", "whisper")
WITH_EMBEDDING: Final = ("llamacpp", "transformers", "vllm", "sglang")
# The engine of a model whose path is not a .gguf file, where its category tells more than the path.
_ENGINE_OF_CATEGORY = {"diffusion": "diffusers", "transcription": "whisper"}
# Engines that take what a key says as arguments instead.
_ARGUMENTS_IN = {"llamacpp": "args", "vllm": "args", "sglang": "args", "command": "cmd"}


def inferred_engine(model: Mapping[str, object]) -> str | None:
    """The engine of a model that names none, if its keys leave no doubt."""
    path, cmd = model.get("path"), model.get("cmd")
    if model.get("remote") is not None and cmd is None and path is None:
        return "remote"
    if cmd is not None and path is None:
        return "command"
    if path is None:
        path = _path_like(model.get("versions"))
    if cmd is None and isinstance(path, str) and path:
        if path.lower().endswith(".gguf"):
            return "llamacpp"
        return _ENGINE_OF_CATEGORY.get(str(model.get("category")), "transformers")
    return None


def _path_like(versions: object) -> str | None:
    """The repository that a first version is fetched from, as a path that tells its engine in the same way."""
    repo_id = versions.get("repo_id") if isinstance(versions, Mapping) else None
    if not isinstance(repo_id, str):
        return None
    return f"{repo_id}.gguf" if ":" in repo_id or repo_id.lower().endswith("gguf") else repo_id


def unknown_engine(engine: str) -> Problem | None:
    """The problem of a name that is no engine, neither ours nor of a package that is installed."""
    if engine in KEYS_OF_ENGINES:
        return None
    others = sorted({entry.name for entry in entry_points(group=ENGINE_GROUP)} - KEYS_OF_ENGINES.keys())
    if engine in others:
        return None
    known = ", ".join(sorted([*KEYS_OF_ENGINES, *others]))
    return Problem(("engine",), f"there is no engine {engine!r}; there are {known}")


def keys_of_other_engines(engine: str, given: Iterable[str]) -> Iterator[Problem]:
    """Keys that are given and that this engine does not have. An engine of another package may read any key."""
    if engine not in KEYS_OF_ENGINES:
        return
    strange = frozenset().union(*KEYS_OF_ENGINES.values()) - KEYS_OF_ENGINES[engine]
    for key in sorted(strange.intersection(given)):
        owners = _either([name for name, keys in KEYS_OF_ENGINES.items() if key in keys])
        yield Problem((key,), f"{key} is for engine {owners}; {_instead(key, engine)}")


def _either(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _instead(key: str, engine: str) -> str:
    """Where to say the same for an engine that does not have the key."""
    is_about_the_process = key in COMMAND_KEYS and key != "cmd"
    if engine not in _ARGUMENTS_IN or is_about_the_process:
        return f"{engine} has nothing like it"
    return f"{engine} takes its arguments in {_ARGUMENTS_IN[engine]}"
