"""Which weights each name serves: numbered versions, kept in one file of the state directory.

Owns the numbers, which only grow, and what was promised: a version is in the file before a single request sees it. A
change is in memory only once it is on disk. Never loads anything and never deletes weights.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from greenroom.base.detached import run_detached
from greenroom.base.plain_file import replace_file, sync_folder
from greenroom.config.diff import Changes
from greenroom.config.part import Apply, GatewayState, Part
from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.library.records import Version
from greenroom.library.roots import Roots, pinned
from greenroom.runtime.operations.files import disk_failed

FILE_NAME: Final = "versions.json"


class NamedVersions(msgspec.Struct, frozen=True):
    """All versions of one model. `kept` are earlier ones, the newest first; `prepared` is being loaded. `state` is the
    number of the newest desired state that was taken. `leaving` are paths that updates fetched and no version needs:
    they are deleted next, also by the next start."""

    current: Version | None = None
    kept: tuple[Version, ...] = ()
    prepared: Version | None = None
    state: int = 0
    leaving: tuple[str, ...] = ()

    @property
    def last_number(self) -> int:
        return 0 if self.current is None else self.current.number

    def promoted(self, version: Version, keep: int) -> NamedVersions:
        """This version serves from now on. Those that are no longer kept leave, if an update fetched them."""
        before = () if self.current is None else (self.current,)
        earlier = tuple(one for one in (*before, *self.kept) if one.path != version.path)
        paths = (*self.leaving, *(one.path for one in earlier[keep - 1 :] if one.is_fetched))
        leaving = tuple(path for path in dict.fromkeys(paths) if path != version.path)
        return NamedVersions(version, earlier[: keep - 1], state=max(self.state, version.state), leaving=leaving)

    def failed(self, fetched: Iterable[str]) -> NamedVersions:
        """The coming version is not served. What its update fetched leaves, unless the first version is yet to come."""
        paths = self.leaving if self.current is None else (*self.leaving, *fetched)
        return msgspec.structs.replace(self, prepared=None, leaving=tuple(dict.fromkeys(paths)))


def _first_path(path: str, roots: Roots) -> str:
    """Where the configured weights lie now. Below no root only what is configured may be loaded, so that stays."""
    real = pinned(path)
    return real if os.path.isabs(path) and roots.holds(real) else path


class _Stored(msgspec.Struct, frozen=True):
    models: dict[str, NamedVersions] = {}
    format: int = 1


class VersionStore(Part):
    def __init__(self, folder: Path, live: GatewayState) -> None:
        self._path = folder / FILE_NAME
        self._live = live
        self._models: dict[str, NamedVersions] = {}
        # Written in threads, one at a time.
        self._writing = threading.Lock()

    async def open(self) -> None:
        self._read()
        self._begin_versions(self._live.config)

    async def draft(self, new: Config, changes: Changes) -> Apply:
        await run_detached(partial(self._begin_versions, new), "write versions")
        return await super().draft(new, changes)

    def _read(self) -> None:
        """Read what an earlier run wrote. Blocks. Raises ConfigError: without it, what was promised is not known."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror or error}.") from error
        try:
            self._models = dict(msgspec.json.decode(text, type=_Stored).models)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{self._path}, which says the versions of models, is damaged: {error}. Put back a copy, or remove it "
                "to begin again at version 1 of each."
            ) from error

    def of(self, model: str) -> NamedVersions:
        return self._models.get(model, NamedVersions())

    def kept_by(self, path: str) -> str | None:
        """The model of which this is a version that does not serve now, and is kept."""
        models = self._live.config.models
        return next((name for name in models for one in self.of(name).kept if one.path == path), None)

    async def put(self, model: str, versions: NamedVersions) -> None:
        """Write this. Raises OperationStoreFull if the disk does not take it, and then nothing has changed."""
        try:
            await run_detached(lambda: self._put([(model, versions)]), "write versions")
        except OSError as error:
            raise disk_failed(error) from error

    def _put(self, changes: Iterable[tuple[str, NamedVersions]]) -> None:
        """Blocks. Raises OSError, and then nothing has changed."""
        with self._writing:
            models = {**self._models, **dict(changes)}
            if models == self._models:
                return
            replace_file(self._path, msgspec.json.encode(_Stored(models)).decode())
            # The file has its new name; that the name outlives a loss of power is the directory's part.
            with contextlib.suppress(OSError):
                sync_folder(self._path.parent)
            self._models = models

    def _begin_versions(self, config: Config) -> None:
        """Number the configured weights of models that were put under version control. Blocks. Raises OSError."""
        roots, now = Roots(config.roots), round(time.time(), 3)
        firsts = {
            name: Version(1, model.versions.repo_id or model.path, _first_path(model.path, roots), since=now)
            for name, model in config.models.items()
            if model.versions is not None and model.path is not None and self.of(name).current is None
        }
        self._put((name, NamedVersions(first)) for name, first in firsts.items())
