"""`/api/v1/config/effective`: every value that counts, where it is from, and what the file says by now.

`/api/v1/config`: what changes while the gateway runs. `/api/v1/remotes`: what providers cost. The first reads the file
again and applies nothing. It is for admins: a configuration names paths, tenants and other machines. What may be a
secret is never told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from greenroom.access.keys import Permission
from greenroom.api.declared import Routes, get, of_all, put
from greenroom.api.overview import Overview
from greenroom.api.views import Order, View
from greenroom.base.detached import run_detached
from greenroom.config import environment, loader, mistakes
from greenroom.config.diff import diff
from greenroom.config.loader import LoadedConfig
from greenroom.config.problems import problems
from greenroom.config.reader import Where, dotted
from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.runtime.remote.fallback import CloudFallback
from greenroom.runtime.remote.spending import Spending
from greenroom.runtime.shell import Shell

PATH: Final = "/api/v1/config/effective"
_HIDDEN: Final = mistakes.SECRET_KEYS | mistakes.COMMAND_KEYS
# Names within mappings that users fill as they like (`set_params`, `options`, `metadata` …).
_SECRET_NAME: Final = re.compile(r"key|secret|passw|auth|bearer|credential|token(?!s|_id|iz)", re.IGNORECASE)
_FREE: Final = frozenset({"set_params", "options", "metadata", "chat_template_kwargs", "headers"})

# An address with a user's name has a password, too; what follows a question mark may be one.
_SECRET_URL: Final = re.compile(r"://.*[@?]|^/.*\?")

Source = Literal["file", "environment", "default", "other"]


class ConfigValue(View):
    key: str
    """As in messages: `models.qwen.ctx_size`."""
    value: Any
    """As it counts, with defaults and absolute paths; `(hidden)` if it may be a secret."""
    source: Source | None
    """other: the command line, or what another key implies. Null while the file cannot be used."""
    variable: str | None
    """The environment variable that says it."""


class ConfigCheck(View):
    """What `greenroom check` says of the keys of the file, as it is now."""

    problems: list[str]
    """Why a reload would be refused; empty if it would not."""
    warnings: list[str]


class PendingChanges(View):
    """What differs between what runs and what would be read now: ids of models, and keys."""

    added: list[str]
    changed: list[str]
    relabelled: list[str]
    removed: list[str]
    at_once: list[str]
    needs_restart: list[str]
    """While there is one, a reload is refused."""


class EffectiveConfig(View):
    file: str | None
    """Null where the gateway was started without one."""
    values: list[ConfigValue]
    """All keys of sections; of models, tenants and what else has names those that differ from their defaults."""
    check: ConfigCheck
    pending: PendingChanges | None
    """What a reload would do; null if there is nothing to read, or it cannot be used."""


class ConfigRoutes(Routes):
    def __init__(self, gateway: Overview) -> None:
        self._gateway = gateway

    @get(PATH, needs=Permission.MANAGE)
    async def effective_config(self) -> EffectiveConfig:
        """The configuration that counts, where each value is from, and what a reload would change. Changes nothing."""
        path = self._gateway.path
        # In threads: of hundreds of models each of these takes longer than the loop may wait.
        loaded, wrong = await run_detached(lambda: _read(path), "read the configuration")
        config = self._gateway.shell.config
        warnings = (
            await run_detached(lambda: problems(config), "check the configuration")
            if loaded is None
            else loaded.warnings
        )
        return EffectiveConfig(
            file=None if path is None else str(path),
            values=await run_detached(lambda: list(_values(config, loaded)), "list the configuration"),
            check=ConfigCheck(problems=wrong, warnings=list(warnings)),
            pending=None if loaded is None else await self._pending(),
        )

    async def _pending(self) -> PendingChanges | None:
        try:
            now, then = self._gateway.shell.config, await self._gateway.reread()
            changes = await run_detached(lambda: diff(now, then), "compare configurations")
        except ConfigError:
            # There is no file, or it has become unusable just now.
            return None
        return PendingChanges.model_validate(changes, from_attributes=True)


def _read(path: Path | None) -> tuple[LoadedConfig | None, list[str]]:
    try:
        return loader.load(path, to_serve=True), []
    except ConfigError as error:
        return None, error.message.splitlines()


def _values(config: Config, loaded: LoadedConfig | None) -> Iterator[ConfigValue]:
    defaults = dict(_leaves((), Config().model_dump(mode="json")))
    said = dict(_leaves((), config.model_dump(mode="json", exclude_defaults=True)))
    filled = {where[:size] for where in said for size in range(len(where))}
    variables = environment.said(os.environ).names
    places = None if loaded is None else loaded.places
    for where, value in (defaults | said).items():
        # Of a mapping that is empty by default, what it holds is told instead.
        if where in filled:
            continue
        variable = variables.get(where)
        source = "environment" if variable is not None else _source(where, places, is_default=where not in said)
        yield ConfigValue(key=dotted(where), value=_told(where, value), source=source, variable=variable)


def _source(where: Where, places: frozenset[Where] | None, *, is_default: bool) -> Source | None:
    if places is not None and where in places:
        return "file"
    return "default" if is_default else "other" if places is not None else None


def _leaves(where: Where, value: Any) -> Iterator[tuple[Where, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves((*where, str(key)), inner)
    else:
        yield where, value


def _told(where: Where, value: Any) -> Any:
    """The value without secrets, which may be inside of lists, too."""
    if (_HIDDEN.intersection(where) or _is_free_secret(where)) and value not in (None, [], {}):
        return environment.HIDDEN
    if isinstance(value, Mapping):
        return {key: _told((*where, str(key)), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_told((*where, at), inner) for at, inner in enumerate(value)]
    return environment.HIDDEN if isinstance(value, str) and _SECRET_URL.search(value) else value


def _is_free_secret(where: Where) -> bool:
    return bool(_FREE.intersection(where)) and any(_SECRET_NAME.search(str(name)) for name in where)


# --- what changes while it runs, and providers ------------------------------------------------------------------------


RUNTIME_PATH = "/api/v1/config"
REMOTES_PATH = "/api/v1/remotes"


class RuntimeConfig(View):
    allowCloudFallback: bool  # noqa: N815
    """Whether a request for a task may fall to a remote model that is not the first of its candidates."""


class RuntimeConfigChange(Order):
    allowCloudFallback: bool  # noqa: N815
    """As in the answer."""


class RemoteView(View):
    name: str
    """The prefix of its models' names."""
    provider: str
    spent_today: float
    """Since midnight (UTC), with what requests that are under way may cost; 0 where no cost is configured."""
    budget_per_day: float | None
    """Null if there is none."""
    problem: str | None
    """Why it is not known what was spent, so that a provider with a budget is not asked; null if it is known."""


class RemoteList(View):
    remotes: list[RemoteView]


class RemoteRoutes(Routes):
    def __init__(self, shell: Shell, spending: Spending, fallback: CloudFallback) -> None:
        self._shell = shell
        self._spending = spending
        self._fallback = fallback

    @get(RUNTIME_PATH, needs=Permission.READ)
    async def runtime_config(self) -> RuntimeConfig:
        """What can be changed while the gateway runs, as it is now."""
        return RuntimeConfig(allowCloudFallback=self._fallback.is_allowed)

    @put(RUNTIME_PATH, needs=Permission.MANAGE, signed=of_all("config-reload"))
    async def change_runtime_config(self, change: RuntimeConfigChange) -> RuntimeConfig:
        """Change it, for requests that come from now on. It is kept over restarts."""
        await self._fallback.set(change.allowCloudFallback)
        return await self.runtime_config()

    @get(REMOTES_PATH, needs=Permission.READ)
    async def list_remotes(self) -> RemoteList:
        """Each provider of remote models, and what was spent there today."""
        spending, remotes = self._spending, self._shell.config.remotes
        return RemoteList(
            remotes=[
                RemoteView(
                    name=name,
                    provider=remote.provider,
                    spent_today=round(spending.spent(name), 6),
                    budget_per_day=remote.budget_per_day,
                    problem=spending.problem,
                )
                for name, remote in remotes.items()
            ]
        )
