"""Which engine a model has that names none, what is wrong with keys of other engines, and which arguments let tenants
share what was computed for prompts, although the gateway keeps those apart.

Owns the table of these arguments, by engine. An argument belongs there if with it a request can find, in its counts or
its time, what another tenant's prompt or answer left: docs/adr/0021. All others are the operator's business. Looks at
the names of installed engines and at nothing else of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Final, TypeVar

from pydantic import BaseModel

from greenroom.config.marks import engines_of
from greenroom.config.plugins import ENGINE_GROUP
from greenroom.config.reader import Problem

KeysOfEngines = Mapping[str, frozenset[str]]
# The engines that cannot do without `path`.
WITH_PATH: Final = ("llamacpp", "transformers", "diffusers", "vllm", "sglang", "whisper")
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


def keys_of_engines(model: type[BaseModel]) -> KeysOfEngines:
    """The keys of each engine, as their fields say it; in no set are keys that belong to every engine."""
    keys = [(engine, key) for key, field in model.model_fields.items() for engine in engines_of(field)]
    return {engine: frozenset(key for owner, key in keys if owner == engine) for engine, _ in keys}


def unknown_engine(engine: str, ours: KeysOfEngines) -> Problem | None:
    """The problem of a name that is no engine, neither ours nor of a package that is installed."""
    if engine in ours:
        return None
    others = sorted({entry.name for entry in entry_points(group=ENGINE_GROUP)} - ours.keys())
    if engine in others:
        return None
    known = ", ".join(sorted([*ours, *others]))
    return Problem(("engine",), f"there is no engine {engine!r}; there are {known}")


def keys_of_other_engines(engine: str, given: Iterable[str], ours: KeysOfEngines) -> Iterator[Problem]:
    """Keys that are given and that this engine does not have. An engine of another package may read any key."""
    if engine not in ours:
        return
    strange = frozenset().union(*ours.values()) - ours[engine]
    for key in sorted(strange.intersection(given)):
        owners = [name for name, keys in ours.items() if key in keys]
        yield Problem((key,), f"{key} is for engine {_either(owners)}; {_instead(owners, engine)}")


def _either(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _instead(owners: list[str], engine: str) -> str:
    """Where to say the same for an engine that does not have the key."""
    is_about_the_process = owners == ["command"]
    if engine not in _ARGUMENTS_IN or is_about_the_process:
        return f"{engine} has nothing like it"
    return f"{engine} takes its arguments in {_ARGUMENTS_IN[engine]}"


# --- arguments that let tenants share ---------------------------------------------------------------------------------

Known = TypeVar("Known")

WORDS_MAX: Final = 1_024
# These are Python programs, whose parsers take the beginning of a name for the whole.
_ABBREVIATING: Final = frozenset({"vllm", "sglang"})


def written(engine: str, args: Sequence[str], known: Mapping[str, Known]) -> Iterator[tuple[int, str, str, Known]]:
    """Those of the `known` arguments that are there: the position, the name as it stands, its value, what is known."""
    for position, word in enumerate(args[:WORDS_MAX]):
        said, is_joined, value = word.partition("=")
        whole = _whole(engine, argument_name(said), known)
        if whole is None:
            continue
        if not is_joined:
            value = args[position + 1] if position + 1 < len(args) else ""
        yield position, said, value, known[whole]


def is_abbreviating(engine: str) -> bool:
    return engine in _ABBREVIATING


def argument_name(said: str) -> str:
    name = said.partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _whole(engine: str, name: str, known: Mapping[str, Known]) -> str | None:
    if name in known:
        return name
    if not is_abbreviating(engine) or not name.startswith("-") or name in ("-", "--"):
        return None
    return next((whole for whole in known if whole.startswith(name)), None)


# True if the value shares.
Shares = Callable[[str], bool]


def _always(value: str) -> bool:
    return True


def _unless(*safe: str) -> Shares:
    return lambda value: value not in safe


def _with(*parts: str) -> Shares:
    return lambda value: any(part in value.lower() for part in parts)


ARGUMENTS: Final[Mapping[str, Mapping[str, Shares]]] = {
    "llamacpp": {
        # A cache of prompts of all slots in host memory.
        "--cache-ram -cram": _unless("0"),
        # The gateway's own is private. Slots that are saved elsewhere can be restored for another tenant.
        "--slot-save-path": _always,
        # Tokens that were seen after others, in answers to all requests: what is drafted tells of them.
        "--lookup-cache-dynamic -lcd": _always,
        "--spec-type": _with("ngram-mod", "ngram-cache"),
        "--spec-default": _always,
    },
    "vllm": {
        # Caches outside of vLLM need not know the salt by which the gateway keeps tenants apart.
        "--kv-transfer-config": _always,
        "--kv-offloading-backend": _unless("native"),
        # Two prompts can be made to have the same hash.
        "--prefix-caching-hash-algo": lambda value: not value.startswith("sha256"),
        # It drafts from answers to all requests.
        "--speculative-config -sc": _with("suffix"),
        "--spec-method": _with("suffix"),
    },
    "sglang": {
        "--hicache-storage-backend": _always,
        "--enable-lmcache": _always,
        # It drafts from answers to all requests.
        "--speculative-algorithm": _with("ngram"),
    },
}
_BY_NAME: Final = {
    engine: {name: shares for names, shares in spelled.items() for name in names.split()}
    for engine, spelled in ARGUMENTS.items()
}
# With it they read further arguments from a file.
_FILE: Final = "--config"
# Variables by which llama-server is told the same.
VARIABLES: Final[Mapping[str, Mapping[str, Shares]]] = {
    "llamacpp": {
        "LLAMA_ARG_CACHE_RAM": _unless("0"),
        "LLAMA_ARG_SLOT_SAVE_PATH": _always,
        "LLAMA_ARG_SPEC_TYPE": _with("ngram-mod", "ngram-cache"),
    }
}


def sharing_arguments(engine: str, args: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The arguments that share, each with its position."""
    for position, said, value, shares in written(engine, args, _BY_NAME.get(engine, {})):
        if shares(value):
            yield position, said


def files_of_arguments(engine: str, args: Sequence[str]) -> Iterator[int]:
    """The positions of arguments that name a file of further ones."""
    if is_abbreviating(engine):
        names = (argument_name(word.partition("=")[0]) for word in args[:WORDS_MAX])
        yield from (position for position, name in enumerate(names) if len(name) > 4 and _FILE.startswith(name))


def sharing_variables(engine: str, env: Mapping[str, str]) -> Iterator[str]:
    known = VARIABLES.get(engine, {})
    return (name for name, value in env.items() if name in known and known[name](value))


def sharing_problems(engine: str, args: Sequence[str], env: Mapping[str, str]) -> Iterator[Problem]:
    """The problems of a model whose arguments or variables let tenants share, and which does not say that they may."""
    told = (
        "lets tenants share what was computed for their prompts. Remove it, or give the model isolate_tenants: off, if "
        "they may, or process"
    )
    for position, argument in sharing_arguments(engine, args):
        yield Problem(("args", position), f"{argument} {told}")
    for position in files_of_arguments(engine, args):
        unseen = "names a file of arguments, which may let tenants share what was computed for their prompts"
        yield Problem(("args", position), f"{unseen}. Write them in args, or give the model isolate_tenants: off")
    for name in sharing_variables(engine, env):
        yield Problem(("env", name), told)
