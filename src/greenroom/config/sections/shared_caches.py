"""Arguments of engines that let tenants share what was computed for prompts, although the gateway keeps those apart.

Owns the table, by engine. An argument belongs here if with it a request can find, in its counts or its time, what
another tenant's prompt or answer left: docs/adr/0021. All others are the operator's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from greenroom.config.reader import Problem

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
