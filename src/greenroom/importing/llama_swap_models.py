"""The models of a llama-swap file as models of ours: commands, and those of its peers as remote models.

Owns the mapping of the keys below `models`, and how a port that is fixed there becomes one that is free at each start.
Owns also how a peer is named here and how its models are: `PEER/MODEL`, and the bare name where that is clear. A key
never goes into the file: it is read from an environment variable.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Collection
from itertools import chain, count
from pathlib import PurePath
from typing import Final
from urllib.parse import urlsplit

from greenroom.config.kinds import id_problem, words
from greenroom.config.reader import Value
from greenroom.config.sections.model import PARAMS_NOT_OURS_TO_CHANGE
from greenroom.importing.llama_swap_keys import PID, PORT, SourceKeys, variables_of
from greenroom.importing.result import Unimportable

_NO_DEFAULTS: Final = "set_params replaces what a request says; a field cannot be set only where a request does not"
_ALL_TIMES: Final = "connections to engines have times of their own; see server.answer_idle_max_s"
NOT_MAPPED: Final = {
    "healthCheckTimeout": "llama-swap ignores it here; set load_timeout_s",
    "sendLoadingState": "server.heartbeat keeps a stream open while its model loads, without text in the answer",
    "compat.ignoreWebsockets": "a WebSocket counts as a request for as long as it is open",
    "capabilities.disableAuto": "what an engine tells of itself is always shown",
    "capabilities.context": "it is only shown by llama-swap; the engine's own context counts",
    **{
        f"timeouts.{key}": _ALL_TIMES
        for key in ("connect", "keepalive", "responseHeader", "tlsHandshake", "expectContinue", "idleConn")
    },
}
_URL: Final = re.compile(
    r"(?P<scheme>[a-z]+)://(?P<host>\[[^\]]*\]|[^:/]*)(?::(?P<port>\$\{PORT\}|\d{1,5}))?(?P<path>/.*)?"
)
# How programs are told a port; an address may stand before it.
_PORT_OPTION: Final = r"((?:--port|--publish|--http-port|-p)[ =]\s*(?:[\d.]+:)?)"
# The ports of their containers are held by a daemon.
_CONTAINERS: Final = frozenset(("docker", "podman", "nerdctl"))
# llama-swap serves the model of this id at a path of its own.
_COMFYUI: Final = "comfyui_auto"
_NO_PORT: Final = "write ${PORT} in its cmd, where it listens, and import again"


def model_of(name: str, keys: SourceKeys, shared: dict[str, Value]) -> tuple[dict[str, Value], dict[str, Value]] | None:
    """The model as ours, and tasks that ask it with parameters of their own; None if it cannot be run here: then a note
    says why. `shared` is what the file says for all models."""
    try:
        if why := id_problem(name):
            raise Unimportable(why)
        process = _process(keys)
    except Unimportable as error:
        keys.notes.unmapped(keys.where, f"the whole model: {error}")
        return None
    filters = keys.below("filters")
    tasks = _tasks(name, filters.below("setParamsByID"))
    made = {**process, **_about(keys, tasks), **_request(keys, filters), **_stay(keys, shared)}
    keys.name_rest(NOT_MAPPED)
    if name == _COMFYUI:
        keys.notes.differs(keys.where, f"it is not at /comfyui/ here but at /upstream/{name}/")
    return made, tasks


# --- the process ----------------------------------------------------------------------------------------------------


def _process(keys: SourceKeys) -> dict[str, Value]:
    cmd, stop = keys.text("cmd"), keys.text("cmdStop")
    if cmd is None:
        raise Unimportable("it has no cmd")
    env, proxy = _environment(keys), keys.text("proxy")
    made: dict[str, Value] = {"cmd": keys.written("cmd")}
    if (port := _fixed_port(proxy)) is not None:
        made["cmd"], env = _with_free_port(cmd, env, port)
        keys.notes.differs((*keys.where, "proxy"), f"port {port} became ${{PORT}}, which is free at each start")
    elif not any(PORT in text for text in (cmd, *env.values())):
        raise Unimportable(f"no port can be given to it; {_NO_PORT}")
    if stop is not None:
        made["cmd_stop"] = keys.written("cmdStop")
    if (check := _plain(keys, "checkEndpoint")) is not None:
        made["check_endpoint"] = check
    if _is_container(cmd):
        made["listener"] = "any"
    if env:
        made["env"] = dict(env)
    return made


def _fixed_port(proxy: str | None) -> int | None:
    """The port that a proxy URL fixes; None if it is `${PORT}`. Raises Unimportable."""
    if proxy is None:
        return None
    url = _URL.fullmatch(proxy.strip())
    if url is None or url["scheme"] != "http":
        raise Unimportable("its proxy is no http:// address of a port, which is how engines are asked here")
    if not _is_here(url["host"].strip("[]")):
        raise Unimportable("its proxy is on another host; a command is asked on this one")
    if url["path"] not in (None, "/"):
        raise Unimportable("its proxy has a path; an engine's paths begin at / here")
    if url["port"] is None:
        raise Unimportable("its proxy names no port")
    return None if url["port"] == PORT else int(url["port"])


def _is_here(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _with_free_port(cmd: str, env: dict[str, str], port: int) -> tuple[str, dict[str, str]]:
    """The same with `${PORT}` for a fixed port. Raises Unimportable if it cannot be told where that is."""
    named, count = re.subn(rf"{_PORT_OPTION}{port}(?![\w.])", rf"\g<1>{PORT}", cmd)
    if count:
        return named, env
    alone = re.compile(rf"(?<![\w.]){port}(?![\w.])")
    if sum(len(alone.findall(text)) for text in (cmd, *env.values())) != 1:
        raise Unimportable(f"where port {port} of its proxy is set cannot be told from its cmd; {_NO_PORT}")
    return alone.sub(PORT, cmd), {name: alone.sub(PORT, value) for name, value in env.items()}


def _environment(keys: SourceKeys) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in keys.texts("env"):
        name, equals, value = line.partition("=")
        if not name or not equals:
            # The value may be a secret.
            keys.notes.unmapped((*keys.where, "env"), "a line of it is not NAME=value")
        else:
            found[name] = value
    return found


def _is_container(cmd: str) -> bool:
    try:
        said = words(cmd)
    except ValueError:
        return False
    return bool(said) and PurePath(said[0]).name in _CONTAINERS


# --- what is shown of it ----------------------------------------------------------------------------------------------


def _about(keys: SourceKeys, tasks: Collection[str]) -> dict[str, Value]:
    made: dict[str, Value] = {}
    aliases: list[str] = []
    for alias in keys.texts("aliases"):
        if why := id_problem(alias.strip()):
            keys.notes.unmapped((*keys.where, "aliases"), why)
        elif alias.strip() not in (*aliases, *tasks):
            aliases.append(alias.strip())
    if aliases:
        made["aliases"] = list(aliases)
    made |= {key: value for key in ("name", "description") if (value := _plain(keys, key)) is not None}
    if keys.flag("unlisted"):
        made["unlisted"] = True
    metadata = keys.below("metadata")
    if metadata.tree:
        made["metadata"] = _settled(metadata)
    if abilities := _abilities(keys.below("capabilities")):
        made["abilities"] = abilities
    return made


def _abilities(said: SourceKeys) -> list[Value]:
    """The routes that a model answers, by what it takes and gives. Nothing is said: nothing is known."""
    takes, gives = said.texts("in"), said.texts("out")
    tools, reranks = said.flag("tools"), said.flag("reranker")
    said.name_rest({key: NOT_MAPPED[f"capabilities.{key}"] for key in ("context", "disableAuto")})
    if not (takes or gives or tools or reranks):
        return []
    found = ["rerank"] if reranks else []
    if "text" in (gives or ["text"]):
        found += [] if reranks else ["chat", "completions", "embeddings"]
        found += ["transcription", "translation"] if "audio" in takes else []
    found += ["images"] if "image" in gives else []
    found += ["image_edits"] if "image" in gives and "image" in takes else []
    found += ["speech"] if "audio" in gives else []
    found += ["vision"] if "image" in takes else []
    found += ["audio"] if "audio" in takes else []
    said.notes.differs(said.where, "mapped to abilities: routes that they do not name are refused")
    return [*found, "tools"] if tools else [*found]


# --- what becomes of requests -----------------------------------------------------------------------------------------


def _request(keys: SourceKeys, filters: SourceKeys) -> dict[str, Value]:
    made: dict[str, Value] = {}
    if (sent_as := _plain(keys, "useModelName")) is not None:
        made["use_model_name"] = sent_as
    made |= params_of(filters)
    filters.name_rest()
    if limit := keys.number("concurrencyLimit"):
        made["concurrency"] = int(limit)
        keys.notes.differs((*keys.where, "concurrencyLimit"), "further requests wait instead of getting 429")
    return made


def params_of(filters: SourceKeys) -> dict[str, Value]:
    """The fields of requests that are removed, and those that are set."""
    made: dict[str, Value] = {}
    stripped, older = filters.text("stripParams"), filters.text("strip_params")
    strip = list(dict.fromkeys(name for part in (stripped or older or "").split(",") if (name := part.strip())))
    kept = [name for name in strip if name not in PARAMS_NOT_OURS_TO_CHANGE]
    if len(kept) < len(strip):
        filters.notes.unmapped((*filters.where, "stripParams"), "model and stream cannot be removed")
    if kept:
        made["strip_params"] = list(kept)
    if forced := _forced(filters.below("setParams")):
        made["set_params"] = forced
    return made


def _tasks(model: str, by_id: SourceKeys) -> dict[str, Value]:
    """A task for each id with parameters of its own, which asks the model with them."""
    tasks: dict[str, Value] = {}
    for name, params in by_id.each():
        forced = _forced(params)
        if name == model:
            by_id.notes.unmapped(params.where, "a model's own id gets the parameters of setParams alone")
        elif (why := id_problem(name)) is not None:
            by_id.notes.unmapped(params.where, why)
        else:
            # As an alias, which is not listed.
            tasks[name] = {"candidates": [model], "set_params": forced, "unlisted": True}
    return tasks


def _forced(params: SourceKeys) -> dict[str, Value]:
    """The fields that are set, without those that cannot be."""
    refused = {name: f"{name} cannot be set" for name in PARAMS_NOT_OURS_TO_CHANGE & params.tree.keys()}
    # There a ? at the end sets a field only for requests that do not.
    refused |= dict.fromkeys((name for name in params.tree if name.endswith("?")), _NO_DEFAULTS)
    for name in sorted(refused):
        params.notes.unmapped((*params.where, name), refused[name])
    return _settled(params, refused)


def _settled(keys: SourceKeys, without: Collection[str] = ()) -> dict[str, Value]:
    """A mapping as it is, without these keys and without values that hold a port: that is free at each start."""
    made: dict[str, Value] = {}
    for key, value in keys.tree.items():
        if key in without:
            continue
        if _has_hole(value):
            keys.notes.unmapped((*keys.where, key), "${PORT} and ${PID} are known only once an engine starts")
        else:
            keys.notes.mapped += 1
            made[key] = keys.written(key)
    return made


def _plain(keys: SourceKeys, key: str) -> Value:
    """A text in which no port can be."""
    text = keys.text(key)
    if text is not None and _has_hole(text):
        keys.notes.unmapped((*keys.where, key), "${PORT} and ${PID} are known only once an engine starts")
        return None
    # A macro that is a number stays one where it is the whole value.
    return keys.written(key) if text is not None and isinstance(keys.tree.get(key), str) else text


def _has_hole(value: Value) -> bool:
    if isinstance(value, dict | list):
        return any(_has_hole(one) for one in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and (PORT in value or PID in value)


# --- how long it stays ------------------------------------------------------------------------------------------------


def _stay(keys: SourceKeys, shared: dict[str, Value]) -> dict[str, Value]:
    made: dict[str, Value] = {}
    ttl_s, stop_s = keys.number("ttl", least=-1), keys.number("unloadTimeout")
    if ttl_s is not None and ttl_s >= 0:
        made["ttl_s"] = ttl_s
    made |= shared
    if stop_s:
        made["stop_timeout_s"] = stop_s
    keys.below("macros")
    return made


# --- peers ------------------------------------------------------------------------------------------------------------


# Below this path a peer answers as OpenAI does.
API: Final = "/v1"
NAME_CHARS_MAX: Final = 32
_BY_ID: Final = {"setParamsByID": "parameters are set for a model, not for one of its names"}
_TIMES: Final = dict.fromkeys(
    ("keepalive", "tlsHandshake", "expectContinue", "idleConn"), "connections to other servers have no such time"
)


class PeerModels:
    """What the peers of a file become. `remotes` and `models` are for our file."""

    def __init__(self, peers: SourceKeys, taken: Collection[str]) -> None:
        """`taken` are ids and aliases of models that run here: they win over bare names."""
        self.remotes: dict[str, Value] = {}
        self.models: dict[str, Value] = {}
        self._taken = set(taken)
        said = [(name, keys, keys.texts("models")) for name, keys in peers.each()]
        counts = Counter(model for _, _, models in said for model in set(models))
        for name, keys, models in said:
            self._add(name, keys, {model: counts[model] == 1 for model in models})

    def _add(self, peer: str, keys: SourceKeys, models: dict[str, bool]) -> None:
        """`models` says of each whether its bare name is clear."""
        remote = _remote(peer, keys)
        filters = keys.below("filters")
        shared = params_of(filters)
        filters.name_rest(_BY_ID)
        keys.name_rest()
        if remote is None:
            return
        called = self._name(peer)
        self.remotes[called] = remote
        for model, is_clear in models.items():
            id = f"{peer}/{model}"
            if why := id_problem(id):
                keys.notes.unmapped((*keys.where, "models"), f"{model}: {why}")
                continue
            made: dict[str, Value] = {"engine": "remote", "remote": called, "use_model_name": model}
            if is_clear and model not in self._taken and id_problem(model) is None:
                made["aliases"] = [model]
            self.models[id] = {**made, **shared}

    def _name(self, peer: str) -> str:
        """A name that a remote can have, and that no other has."""
        plain = re.sub(r"[^a-z0-9_-]+", "-", peer.lower()).strip("-_")[: NAME_CHARS_MAX - 4] or "peer"
        names = chain((plain,), (f"{plain}-{number}" for number in count(2)))
        return next(name for name in names if name not in self.remotes)


def _remote(peer: str, keys: SourceKeys) -> dict[str, Value] | None:
    """The address of a peer and how long it is waited for; None if it cannot be asked from here."""
    proxy, key = keys.text("proxy"), keys.text("apiKey")
    times = keys.below("timeouts")
    connect_s, first_s = times.number("connect"), times.number("responseHeader")
    times.name_rest(_TIMES)
    if proxy is None or not _is_address(proxy):
        keys.notes.unmapped((*keys.where, "proxy"), "the whole peer: http://HOST or https://HOST is wanted")
        return None
    if key is not None and urlsplit(proxy).scheme == "http" and not _is_peer_here(proxy):
        keys.notes.unmapped(keys.where, "the whole peer: its key would be sent without encryption; use https")
        return None
    made: dict[str, Value] = {"provider": "compatible", "base_url": proxy.rstrip("/") + API}
    if key is not None:
        made["api_key_env"] = _variable(peer, key, keys)
    made |= {"connect_timeout_s": connect_s} if connect_s else {}
    return made | ({"first_byte_timeout_s": first_s} if first_s else {})


def _is_address(proxy: str) -> bool:
    try:
        parts = urlsplit(proxy)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc


def _is_peer_here(proxy: str) -> bool:
    host = urlsplit(proxy).hostname or ""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _variable(peer: str, key: str, keys: SourceKeys) -> str:
    """The environment variable that has the key of a peer."""
    named = variables_of(key)
    if len(named) == 1 and key == f"${{env.{named[0]}}}":
        return named[0]
    name = "PEER_" + re.sub(r"[^A-Z0-9]+", "_", peer.upper())[:100] + "_KEY"
    keys.notes.differs((*keys.where, "apiKey"), f"no key is written here: set the environment variable {name} to it")
    return name
