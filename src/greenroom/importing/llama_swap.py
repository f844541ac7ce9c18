"""A llama-swap file as a configuration of ours: every key of it is mapped, or named with the reason why not.

Owns the mapping of all keys but those of one model. Rules about which models run together are taken over as they are,
and memory does not count beside them, so that the same models are unloaded for the same requests as before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom.config.kinds import id_problem
from greenroom.config.reader import Lines, Problem, Value, Where, dotted, read, refusal
from greenroom.errors import ConfigError
from greenroom.importing.llama_swap_keys import SourceKeys, SwapMacros, variables_of
from greenroom.importing.llama_swap_models import PeerModels, model_of
from greenroom.importing.result import Imported, Notes, nothing_found

PORT: Final = 8080
PORTS: Final = 1_000
PORT_MAX: Final = 65_535
PRIORITY_MAX: Final = 100
NORMAL: Final = 1
TENANT: Final = "everyone"
_LEVELS: Final = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}
_NOT_KEPT: Final = "bodies of requests are never kept"
NOT_MAPPED: Final = {
    "logTimeFormat": "the time in log lines has one format; log.format: json has the date too",
    "logToStdout": "the gateway logs to standard error; `greenroom logs MODEL` shows what an engine prints",
    "logRequests": "llama-swap ignores it; see /api/v1/requests",
    "store.path": "usage is kept in state_dir (server.usage_days), each request in the file server.record_activity",
    "metricsMaxInMemory": "how many requests are remembered is fixed; see /api/v1/requests",
    "captureBuffer": _NOT_KEPT,
    "ui.activity.session_id": "requests are shown by key, tenant and client; no header names a session",
    "performance.disabled": "server.metrics turns metrics off; memory is looked at in any case",
    "performance.every": "memory.look_every_s says how often memory is looked at",
    "sendLoadingState": "server.heartbeat keeps a stream open while its model loads, without text in the answer",
    "includeAliasesInList": "/v1/models shows aliases in each model's entry, not as entries of their own",
    "upstream.ignorePaths": "every path below /upstream loads its model",
    "profiles": "names cannot be led elsewhere while the gateway runs; change the file and type: greenroom reload",
    "globalConcurrencyLimit": "each model has its own concurrency, and keys and tenants have limits",
    "security.cors": "server.allowed_origins says which pages may ask; without it, none of another host",
    "routing.scheduler.use": "requests are ordered by priority and waiting time; see scheduler.policy",
}


def import_file(path: Path) -> Imported:
    """Read a file of llama-swap. Raises ConfigError with a line for each mistake that llama-swap would refuse too, or
    for each reason if none of its models can be run here."""
    source = read(path)
    if not isinstance(source.tree.get("models"), dict) or not source.tree["models"]:
        raise ConfigError(f"{path}: has no models; is it a configuration of llama-swap?")
    made = _Import(source.tree)
    tree = made.whole()
    if wrong := [*source.problems, *made.problems]:
        raise refusal(str(path), wrong, source.lines)
    if not tree["models"]:
        raise nothing_found(path, made.notes.found)
    return _ImportedFile(tree, tuple(made.notes.found), made.notes.mapped, str(path), source.lines)


@dataclass(frozen=True, slots=True)
class _ImportedFile(Imported):
    path: str
    lines: Lines

    def refused(self, problems: Sequence[Problem]) -> ConfigError:
        return refusal(self.path, (_in_source(problem, self.lines) for problem in problems), self.lines)


_RULES: Final = "routing.router.settings"
# Keys of ours, and the keys of llama-swap that they are made of, the one that wins first. `*` stands for any one key,
# which is the same in both.
_MADE_OF: Final[dict[str, tuple[str, ...]]] = {
    "ports": ("startPort",),
    "stay_warm": ("globalTTL",),
    "server.api_keys": ("apiKeys",),
    "scheduler.company.groups": (f"{_RULES}.groups", "groups"),
    "scheduler.company.matrix": ("matrix", f"{_RULES}.matrix"),
    "remotes": ("peers",),
    "tasks": ("selectors",),
    "models.*.cmd_stop": ("models.*.cmdStop",),
    "models.*.check_endpoint": ("models.*.checkEndpoint",),
    "models.*.use_model_name": ("models.*.useModelName",),
    "models.*.concurrency": ("models.*.concurrencyLimit",),
    "models.*.set_params": ("models.*.filters.setParams",),
    "models.*.strip_params": ("models.*.filters.stripParams",),
    "models.*.ttl_s": ("models.*.ttl",),
    "models.*.stop_timeout_s": ("models.*.unloadTimeout", "unloadTimeout"),
    "models.*.load_timeout_s": ("healthCheckTimeout",),
}


def _in_source(problem: Problem, lines: Lines) -> Problem:
    """The same problem in its place of llama-swap's file; it names our key if that file has no key for it."""
    # Of several places, the one of which most is in the file.
    where = min((_cut(place, lines) for place in _places(problem.where)), key=lambda found: found[1])[0]
    is_named = where == problem.where or len(where) > 2 or (bool(where) and where[0] != "models")
    return Problem(where, problem.message if is_named else f"{dotted(problem.where)}: {problem.message}")


def _places(where: Where) -> list[Where]:
    """Where llama-swap's file may say what a key of ours was made of; at the same place if that is not known."""
    for ours, theirs in _MADE_OF.items():
        steps = ours.split(".")
        if len(where) >= len(steps) and all(step in ("*", said) for step, said in zip(steps, where, strict=False)):
            named = [said for step, said in zip(steps, where, strict=False) if step == "*"]
            return [(*_filled(place.split("."), named), *where[len(steps) :]) for place in theirs]
    return [where]


def _filled(steps: Sequence[str], named: Sequence[str | int]) -> Where:
    names = iter(named)
    return tuple(next(names) if step == "*" else step for step in steps)


def _cut(where: Where, lines: Lines) -> tuple[Where, int]:
    """The part of a place that is in the file, and how many steps are not."""
    size = next(size for size in range(len(where), -1, -1) if not size or where[:size] in lines)
    return where[:size], len(where) - size


class _Import:
    def __init__(self, tree: dict[str, Value]) -> None:
        said = tree.get("macros")
        self.macros = SwapMacros(said if isinstance(said, dict) else {})
        self.notes = Notes()
        self._tree = tree
        scope = self.macros.scope()
        outside = {key: value for key, value in tree.items() if key not in ("macros", "models")}
        if said is not None and not isinstance(said, dict):
            self.notes.unmapped(("macros",), "a mapping is wanted")
        self._top = SourceKeys(scope.expand(outside, ()), outside, (), self.notes)
        self.problems: list[Problem] = scope.problems
        self._tasks: dict[str, Value] = {}

    def whole(self) -> dict[str, Value]:
        models = self._models()
        sections: dict[str, Value] = {"server": self._server()}
        level = self._top.text("logLevel")
        if level in _LEVELS:
            sections["log"] = {"level": _LEVELS[level]}
        elif level is not None:
            self.notes.unmapped(("logLevel",), f"one of {', '.join(_LEVELS)} is wanted")
        if (first := self._top.number("startPort", least=1)) is not None:
            sections["ports"] = {"first": int(first), "last": min(int(first) + PORTS - 1, PORT_MAX)}
        # llama-swap keeps models for ever if nothing else is said.
        sections["stay_warm"] = {"llm_s": self._top.number("globalTTL") or 0}
        sections["scheduler"] = {"fit_memory": False, "company": self._rules(models)}
        self._set_priorities(models)
        self._set_preloads(models)
        if self.macros.kept and self.macros.defined:
            sections["macros"] = dict(self.macros.defined)
            self.notes.mapped += len(self.macros.defined)
        taken = [name for id, model in models.items() for name in (id, *_aliases(model))]
        peers = PeerModels(self._top.below("peers"), taken)
        if peers.remotes:
            sections["remotes"] = peers.remotes
        known = {*taken, *peers.models, *(name for one in peers.models.values() for name in _aliases(one))}
        if tasks := {**self._tasks, **_tasks_of(self._top.below("selectors"), known)}:
            sections["tasks"] = tasks
        self._top.name_rest(NOT_MAPPED)
        return {**sections, "models": {**models, **peers.models}}

    def _models(self) -> dict[str, dict[str, Value]]:
        limits = {"load_timeout_s": "healthCheckTimeout", "stop_timeout_s": "unloadTimeout"}
        shared: dict[str, Value] = {ours: said for ours, theirs in limits.items() if (said := self._top.number(theirs))}
        models = self._tree["models"]
        assert isinstance(models, dict)
        found: dict[str, dict[str, Value]] = {}
        for name, tree in models.items():
            made = model_of(name, self._keys_of(name, tree), shared)
            if made is not None:
                found[name], tasks = made
                self._tasks |= tasks
        return found

    def _keys_of(self, name: str, tree: Value) -> SourceKeys:
        """Macros of a model's own are written out, and with them all that it uses: they may stand in each other."""
        own = tree.get("macros") if isinstance(tree, dict) else None
        own = own if isinstance(own, dict) else {}
        scope = self.macros.scope_of(name, own)
        expanded = scope.expand(tree, ("models", name))
        if isinstance(expanded, dict):
            expanded = {**expanded, **_with_names(expanded.get("filters"), name)}
        self.problems += scope.problems
        is_kept = self.macros.kept and not own
        return SourceKeys(expanded, tree if is_kept else expanded, ("models", name), self.notes)

    def _server(self) -> Value:
        keys: list[Value] = []
        for number, key in enumerate(self._top.texts("apiKeys"), 1):
            name = f"key{number}"
            secret = {"key": key} if variables_of(key) else {"sha256": hashlib.sha256(key.encode()).hexdigest()}
            keys.append({"name": name, **secret, "tenant": TENANT, "admin": True})
        if not keys:
            return {"port": PORT}
        told = "as in llama-swap, each may do everything; leave out admin for those that shall only ask models"
        self.notes.differs(("apiKeys",), f"{told}. A key as the password of Basic is not accepted")
        return {"port": PORT, "api_keys": keys}

    # --- which models run together ----------------------------------------------------------------------------------

    def _rules(self, models: dict[str, dict[str, Value]]) -> dict[str, Value]:
        routing = self._top.below("routing")
        router = routing.below("router")
        used, settings = router.text("use"), router.below("settings")
        older, newer = self._top.below("matrix"), settings.below("matrix")
        matrix = [keys for keys in (older, newer) if keys.tree]
        groups = [keys for keys in (self._top.below("groups"), settings.below("groups")) if keys.tree]
        self._scheduling = routing.below("scheduler")
        self._priorities = self._scheduling.below("settings").below("fifo").below("priority")
        for keys in (settings, router):
            keys.name_rest()
        # Below `routing` groups decide unless it says otherwise; the older key decides by being there.
        if matrix and (used == "matrix" or (used is None and older.tree)):
            for unused in groups:
                self.notes.unmapped(unused.where, "a matrix is there too, which decides")
            return self._matrix(matrix[0], models)
        for unused in matrix:
            self.notes.unmapped(unused.where, "groups decide where routing.router.use is not matrix")
        return {"groups": {name: group for keys in groups for name, group in self._groups(keys, models).items()}}

    def _groups(self, keys: SourceKeys, models: dict[str, dict[str, Value]]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, group in keys.each():
            members: list[Value] = []
            for member in group.texts("members"):
                if member in models:
                    members.append(member)
                else:
                    self.notes.unmapped((*group.where, "members"), f"{member} is no model that was imported")
            said = {key: value for key in ("swap", "exclusive", "persistent") if (value := group.flag(key)) is not None}
            group.name_rest()
            found[name] = {"members": members, **said}
        return found

    def _matrix(self, keys: SourceKeys, models: dict[str, dict[str, Value]]) -> dict[str, Value]:
        """As it is; if a model that it may name was left out, one model at a time."""
        said = self._tree["models"]
        assert isinstance(said, dict)
        if missing := [name for name in said if name not in models]:
            told = f"{missing[0]} was not imported; until it is, one model runs at a time"
            self.notes.unmapped(keys.where, told)
            return {"groups": {}}
        made: dict[str, Value] = {}
        for key in ("vars", "evict_costs", "sets"):
            below = keys.below(key)
            self.notes.mapped += len(below.tree)
            if below.tree:
                made[key] = dict(below.tree)
        keys.name_rest()
        return {"matrix": made}

    # --- which go first, which are there from the start -------------------------------------------------------------

    def _set_priorities(self, models: dict[str, dict[str, Value]]) -> None:
        """There the higher number goes first, here the lower one. Only the order is taken over."""
        id_of = _ids(models)
        said = {
            id_of[name]: value for name in self._priorities.tree if (value := self._priority(name, id_of)) is not None
        }
        self._scheduling.name_rest({"use": NOT_MAPPED["routing.scheduler.use"]})
        order = sorted({0, *said.values()}, reverse=True)
        # Models without a number keep the priority that is normal here, if none is to come after them.
        first = NORMAL if order[0] == 0 else 0
        place = {value: min(at, PRIORITY_MAX) for at, value in enumerate(order, first)}
        for name, model in models.items():
            if (mine := place[said.get(name, 0)]) != NORMAL:
                model["priority"] = mine
        if said:
            told = "the order is reversed: here lower numbers go first"
            self.notes.differs(self._priorities.where, told)

    def _priority(self, name: str, id_of: dict[str, str]) -> float | None:
        value = self._priorities.number(name, least=float("-inf"))
        if name in id_of:
            return value
        self.notes.unmapped((*self._priorities.where, name), "is no model that was imported")
        return None

    def _set_preloads(self, models: dict[str, dict[str, Value]]) -> None:
        hooks = self._top.below("hooks")
        startup = hooks.below("on_startup")
        id_of = _ids(models)
        for asked in startup.texts("preload"):
            if asked in id_of:
                models[id_of[asked]]["preload"] = True
            else:
                self.notes.unmapped((*startup.where, "preload"), f"{asked} is no model that was imported")
        startup.name_rest({"profile": NOT_MAPPED["profiles"]})
        hooks.name_rest()


def _ids(models: dict[str, dict[str, Value]]) -> dict[str, str]:
    """The id of each model by its id and its aliases."""
    return {alias: name for name, model in models.items() for alias in (name, *_aliases(model))}


def _aliases(model: Value) -> list[str]:
    said = model.get("aliases") if isinstance(model, dict) else None
    return [str(alias) for alias in said] if isinstance(said, list) else []


def _with_names(filters: Value, name: str) -> dict[str, Value]:
    """The filters with `${MODEL_ID}` filled in the keys of `setParamsByID`: the only keys that are expanded."""
    by_id = filters.get("setParamsByID") if isinstance(filters, dict) else None
    if not isinstance(filters, dict) or not isinstance(by_id, dict):
        return {}
    named: Value = {key.replace("${MODEL_ID}", name): value for key, value in by_id.items()}
    return {"filters": {**filters, "setParamsByID": named}}


# --- selectors ------------------------------------------------------------------------------------------------------

CANDIDATES_MAX: Final = 16
# The target that is ready, else the first; or the first alone.
_STRATEGIES: Final[dict[str, dict[str, Value]]] = {"warm": {"prefer_first_s": 0}, "pin": {"pin_primary": True}}
_NOT_OF_A_TASK: Final = {
    "settings.spillover": "requests of one model are not spread over others",
    "name": "a task has no name for people",
    "metadata": "a task has no metadata",
}


def _tasks_of(selectors: SourceKeys, known: Collection[str]) -> dict[str, Value]:
    """Selectors as tasks: names, and the models that serve each. `known` are ids and aliases that were imported."""
    tasks: dict[str, Value] = {}
    for name, keys in selectors.each():
        strategy, targets = keys.text("strategy") or "", keys.texts("targets")
        candidates = [target for target in targets if target in known]
        for target in targets:
            if target not in known:
                keys.notes.unmapped((*keys.where, "targets"), f"{target} is no model that was imported")
        about: dict[str, Value] = {}
        if (description := keys.text("description")) is not None:
            about["description"] = description
        if keys.flag("unlisted"):
            about["unlisted"] = True
        keys.name_rest(_NOT_OF_A_TASK)
        if why := _why_not(name, strategy, candidates, known):
            keys.notes.unmapped(keys.where, f"the whole selector: {why}")
            continue
        tasks[name] = {"candidates": list(candidates), **_STRATEGIES[strategy], **about}
        keys.notes.differs(keys.where, "it is a task here: the next target serves if one fails")
    return tasks


def _why_not(name: str, strategy: str, candidates: list[str], known: Collection[str]) -> str | None:
    if (why := id_problem(name)) is not None:
        return why
    if name in known:
        return "a model has this name"
    if strategy not in _STRATEGIES:
        return "requests are not spread over models" if strategy == "spillover" else "its strategy is warm or pin"
    if not candidates:
        return "none of its targets was imported"
    return f"a task has at most {CANDIDATES_MAX} candidates" if len(candidates) > CANDIDATES_MAX else None
