"""Peers of a llama-swap file as remote models: servers elsewhere that answer as OpenAI does.

Owns how a peer is named here and how its models are: `PEER/MODEL`, and the bare name where that is clear. A key
never goes into the file: it is read from an environment variable.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final
from urllib.parse import urlsplit

from greenroom.config.kinds import id_problem
from greenroom.config.reader import Value
from greenroom.importing.llama_swap_macros import variables_of
from greenroom.importing.llama_swap_models import params_of
from greenroom.importing.source_keys import SourceKeys

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
        return next(name for name in _numbered(plain) if name not in self.remotes)


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


def _remote(peer: str, keys: SourceKeys) -> dict[str, Value] | None:
    """The address of a peer and how long it is waited for; None if it cannot be asked from here."""
    proxy, key = keys.text("proxy"), keys.text("apiKey")
    times = keys.below("timeouts")
    connect_s, first_s = times.number("connect"), times.number("responseHeader")
    times.name_rest(_TIMES)
    if proxy is None or not _is_address(proxy):
        keys.notes.unmapped((*keys.where, "proxy"), "the whole peer: http://HOST or https://HOST is wanted")
        return None
    if key is not None and urlsplit(proxy).scheme == "http" and not _is_here(proxy):
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


def _is_here(proxy: str) -> bool:
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
