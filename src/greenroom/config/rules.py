"""Rules between keys: what no single type can say.

Owns the checks of one section against itself and of the whole file against itself. The schema calls them, so that a
`Config`, however it was made, obeys them. Never reads files and never looks at the machine: see `problems.py` for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from greenroom.config import coresidency, kinds, store_address
from greenroom.config.fields import KEYS_OF_ENGINES
from greenroom.config.kinds import words
from greenroom.config.report import Problem

if TYPE_CHECKING:
    from greenroom.config.schema import ApiKey, Config, Leases, Model, Ports, Scheduler

NO_CHECK = "none"

# `model` decides the route and `stream` the shape of the answer; both have been acted on when these are applied.
PARAMS_NOT_OURS_TO_CHANGE = frozenset({"model", "stream"})

# Where else what a key of another engine is meant for could be said.
_INSTEAD = {
    "llamacpp": "llamacpp takes its arguments in args",
    "transformers": "transformers has nothing like it",
    "command": "command takes its arguments in cmd",
}


def inferred_engine(model: Mapping[str, object]) -> str | None:
    """The engine of a model that names none, if its keys leave no doubt."""
    path, cmd = model.get("path"), model.get("cmd")
    if cmd is not None and path is None:
        return "command"
    if cmd is None and isinstance(path, str) and path:
        return "llamacpp" if path.lower().endswith(".gguf") else "transformers"
    return None


def of_model(model: Model) -> Iterator[Problem]:
    if model.engine is None:
        yield _engine_in_doubt(model)
        return
    yield from _keys_of_other_engines(model, model.engine)
    yield from _params(model)
    yield from _environment(model)
    if model.engine in ("llamacpp", "transformers") and not model.path:
        yield Problem((), f"engine {model.engine} needs path")
    if model.engine == "command":
        yield from _command(model)
    if model.device == "cpu" and any(device != "host" for device in model.devices):
        yield Problem(("devices",), "names a GPU, but device: cpu keeps it on the host")


def of_api_key(key: ApiKey) -> Iterator[Problem]:
    if (key.key is None) == (key.sha256 is None):
        yield Problem((), f"give exactly one of key and sha256 for {key.name}")
    if key.key is not None and (not key.key or not key.key.isascii() or any(c <= " " or c == "\x7f" for c in key.key)):
        # Such a key could not be sent in a header, or would be no secret at all.
        yield Problem(("key",), "must be visible ASCII characters without spaces, at least one")


def of_scheduler(scheduler: Scheduler) -> Iterator[Problem]:
    if scheduler.backoff_s > scheduler.backoff_max_s:
        yield Problem(("backoff_s",), f"may not be more than backoff_max_s ({scheduler.backoff_max_s:g})")
    if not scheduler.fit_memory and scheduler.company is None:
        yield Problem(("fit_memory",), "may only be false with company; nothing else says who may be ready together")


def of_leases(leases: Leases) -> Iterator[Problem]:
    if leases.store is not None and (why := store_address.problem(leases.store)):
        yield Problem(("store",), why)


def of_ports(ports: Ports) -> Iterator[Problem]:
    if ports.first > ports.last:
        yield Problem(("first",), f"may not be more than last ({ports.last})")


def of_config(config: Config) -> Iterator[Problem]:
    yield from kinds.clashes((name, model.aliases) for name, model in config.models.items())
    yield from _equal_api_keys(config)
    yield from _company(config)
    yield from _memory(config)


def _memory(config: Config) -> Iterator[Problem]:
    memory = config.memory
    if (memory.probe == "file") != (memory.file is not None):
        yield Problem(("memory", "file"), "goes with probe: file, and only with it")
    if config.gpus and memory.probe in ("nvml", "file"):
        yield Problem(("gpus",), f"are simulated and cannot be had beside memory.probe: {memory.probe}")


def _company(config: Config) -> Iterator[Problem]:
    company = config.scheduler.company
    if company is not None:
        aliases_of = {name: model.aliases for name, model in config.models.items()}
        for problem in coresidency.of_models(company, aliases_of):
            yield Problem(("scheduler", "company", *problem.where), problem.message)


def _engine_in_doubt(model: Model) -> Problem:
    if model.path and model.cmd:
        return Problem((), "give path (engine llamacpp or transformers) or cmd (engine command), not both")
    return Problem((), "give path (a .gguf file or a folder) or cmd (for engine command)")


def _keys_of_other_engines(model: Model, engine: str) -> Iterator[Problem]:
    strange = frozenset().union(*KEYS_OF_ENGINES.values()) - KEYS_OF_ENGINES[engine]
    for key in sorted(strange & model.model_fields_set):
        if getattr(model, key) is not None:
            owners = " or ".join(name for name, keys in KEYS_OF_ENGINES.items() if key in keys)
            yield Problem((key,), f"{key} is for engine {owners}; {_INSTEAD[engine]}")


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


def _equal_api_keys(config: Config) -> Iterator[Problem]:
    """The same name or the same secret twice would make it a matter of luck whose limits count."""
    name_of: dict[str, str] = {}
    names_seen: set[str] = set()
    for position, key in enumerate(config.server.api_keys):
        digest = key.sha256 or hashlib.sha256((key.key or "").encode()).hexdigest()
        if key.name in names_seen:
            yield Problem(("server", "api_keys", position, "name"), f"{key.name} names another key already")
        if digest in name_of:
            yield Problem(("server", "api_keys", position), f"is the same key as {name_of[digest]}")
        names_seen.add(key.name)
        name_of.setdefault(digest, key.name)
