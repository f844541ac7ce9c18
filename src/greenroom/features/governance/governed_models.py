"""What a signed operation really concerns: the model that a name leads to, and the models that use its files.

Owns the names by which rules are judged. A name is resolved here as the handler will resolve it, and a rule fits if it
fits any name of what was found, so that no spelling, link or id of a file is a way around a rule. What a call fetches
is resolved here alone: the handler carries out the order that was judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from greenroom.access.keys import Caller
from greenroom.api.declared import NeededOperation
from greenroom.base.detached import run_detached
from greenroom.base.names import public_name
from greenroom.config.hub import whisper_names, whisper_repository
from greenroom.config.sections.governance import Operation
from greenroom.dialects.ollama.requests import LATEST
from greenroom.errors import BadRequest, GreenroomError, ModelNotFound, NotAllowed, shown
from greenroom.features.governance.gate import Done
from greenroom.features.library.downloads import Downloads
from greenroom.features.library.routes import LibraryRoutes
from greenroom.features.versions.updates import Updates
from greenroom.library.library import Library
from greenroom.library.naming import choose
from greenroom.library.orders import DownloadOrder, place_of, read_order
from greenroom.library.records import LibraryRecord
from greenroom.library.roots import Roots, is_below
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.shell import Shell
from greenroom.serving.versioned import versioned_model

LOOK_MAX_S: Final = 20.0
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class GovernedModels:
    _shell: Shell
    _resolver: Resolver
    _library: Library
    _downloads: Downloads
    _updates: Updates
    _deletion: LibraryRoutes

    async def judged(
        self, needed: NeededOperation, fields: Mapping[str, Any], caller: Caller
    ) -> tuple[tuple[Done, ...], DownloadOrder | None]:
        """All that a call does, by which the rules judge it, and what it may fetch; None for nothing. Raises
        GreenroomError."""
        operation, model = needed.operation, needed.model
        done = [Done("model-unload", await self._names_of(name)) for name in needed.evicted]
        if operation == "model-update":
            model = self._updated(model, caller)
            done += await (self._kept(model, fields) if needed.is_rollback else self._weights(fields))
        fetch = self._fetch(needed, fields)
        if operation != "model-download":
            names = None if model is None else await self._names_of(model, needed.quantization)
            done.append(Done(operation, names))
        if fetch is not None:
            done += await self._fetched(operation, fetch)
        if operation == "model-delete" and model is not None:
            users = [await self._names_of(user) for user in await self._users(model)]
            done += [Done("model-delete", names) for names in users]
            if "force" in fields:
                done += [Done("model-unload", names) for names in users]
        return tuple(done), fetch

    def _updated(self, model: str | None, caller: Caller) -> str | None:
        """The model that an update is for. What is refused later may be any."""
        with contextlib.suppress(BadRequest, ModelNotFound):
            return versioned_model(self._shell.config, model, caller)
        return model

    async def _kept(self, model: str | None, fields: Mapping[str, Any]) -> list[Done]:
        """Where the weights come from that an update goes back to. The handler refuses what is not kept."""
        number, kept = fields.get("version"), self._updates.of(model or "").kept
        version = next((one for one in kept if number in (None, one.number)), None)
        if version is None:
            return []
        done = [Done("model-update", await self._names_of(version.path))]
        with contextlib.suppress(BadRequest):
            repo = read_order(self._downloads.rules, model=version.repo_id).repo
            done.append(Done("model-update", frozenset({repo or ""}), is_repository=True))
        return done

    async def _weights(self, fields: Mapping[str, Any]) -> list[Done]:
        """What an update takes its weights from, if that is a path."""
        if not isinstance(name := fields.get("model_repo_id"), str) or "://" in name:
            return []
        names = await self._names_of(name)
        return [Done("model-update", names), Done("model-download", names)]

    def _must_fetch(self, model: str) -> bool:
        """True if a load of this model would begin with a download."""
        is_here = self._shell.catalog.is_known(model) or self._library.find(model) is not None
        return self._shell.config.library.download and not is_here

    def _fetch(self, needed: NeededOperation, fields: Mapping[str, Any]) -> DownloadOrder | None:
        """What the call may fetch. Raises BadRequest for an order to download that cannot be read."""
        if needed.read_fetch is None:
            return None
        rules = self._downloads.rules
        if needed.operation == "model-download":
            return needed.read_fetch(rules)
        if needed.operation == "model-load" and not self._must_fetch(needed.model or ""):
            return None
        # A name that is none of the hub is of a path, or the handler refuses it.
        with contextlib.suppress(BadRequest):
            return needed.read_fetch(rules)
        return None

    async def _fetched(self, operation: Operation, fetch: DownloadOrder) -> list[Done]:
        """What is fetched, where it replaces files of other models, and what is done with it then."""
        repo = (fetch.repo or "").casefold()
        sizes = [name for name in whisper_names() if (whisper_repository(name) or "").casefold() == repo]
        names = frozenset({fetch.repo or fetch.url or "", fetch.name, *sizes})
        done = [Done("model-download", names, is_repository=fetch.repo is not None)]
        if operation != "model-download":
            done.append(Done(operation, names, is_repository=True))
        if fetch.destination is not None or fetch.repo is None:
            done.append(Done("model-download", await self._names_at(fetch)))
        return done

    async def _users(self, model: str) -> list[str]:
        # What is not there is answered so once its token is used.
        with contextlib.suppress(ModelNotFound):
            return [entry.id for entry in await self._deletion.users_of(model)]
        return []

    async def _names_of(self, name: str, quantization: str | None = None) -> frozenset[str]:
        """Every name of the model that this one leads to, itself too. Raises GreenroomError."""
        _expect_normal(name)
        names = await self._names_of_one(name, quantization)
        # The handler of Ollama's names takes off the tag that its lists add.
        plain = name.removesuffix(LATEST)
        return names if plain == name else names | await self._names_of_one(plain, quantization)

    async def _names_of_one(self, name: str, quantization: str | None) -> frozenset[str]:
        library = self._library
        entry, record = self._shell.catalog.find(name), library.find(name)
        told = [entry.config.path if entry is not None else None, record.path if record is not None else None]
        places = await self._looked(lambda: _on_disk(told, name, library.roots), name)
        if any(library.find(place) is None for place in places):
            # It may have come since the last look.
            await _answered(library.refresh(), name)
        on_disk = [one for place in places if (one := library.find(place)) is not None]
        # The order that stands for a name may have chosen another file.
        if ordered := [one for record in on_disk if (one := self._resolver.ordered(record)) is not record]:
            on_disk += ordered
            places += await self._looked(lambda: _on_disk([one.path for one in ordered], None, library.roots), name)
        if quantization is not None and (chosen := _chosen(on_disk, quantization, library.records)):
            on_disk = chosen
            places = await self._looked(lambda: _on_disk([one.path for one in chosen], None, library.roots), name)
        bases = () if entry is None else (public_name(entry.id), entry.base_id)
        return frozenset({name, *bases, *await self._named_by(places, on_disk, name, bases)})

    async def _names_at(self, fetch: DownloadOrder) -> frozenset[str]:
        """The names of the folder that a download writes to, and of the models that lie in it or that it lies in."""
        library = self._library
        place = await self._looked(lambda: _destination(fetch, library.roots), fetch.name)
        if place is None:
            # The handler refuses it.
            return frozenset()
        there = [one for one in library.records if is_below(one.path, place) or is_below(place, one.folder)]
        named = await self._named_by([place, *(one.path for one in there)], there, fetch.name, ())
        return named | {one.id for one in self._configured() if is_below(one.real_path, place)}

    async def _named_by(
        self, places: Sequence[str], records: Sequence[LibraryRecord], name: str, bases: Iterable[str]
    ) -> frozenset[str]:
        """The names by which these places, records and configured models can be asked for."""
        library = self._library
        configured = self._configured()
        same = await self._looked(lambda: _same_files(places, configured), name)
        known = [one for id in (*same, *bases) if (one := self._shell.catalog.find(id)) is not None]
        return frozenset(
            {
                *places,
                *_relative(places, library.real_roots()),
                *library.names_of(records),
                *(one for entry in known for one in (public_name(entry.id), *entry.config.aliases)),
            }
        )

    def _configured(self) -> list[Entry]:
        return [one for one in self._shell.catalog if one.config.path and not one.is_adhoc]

    async def _looked(self, look: Callable[[], Answer], name: str) -> Answer:
        return await _answered(run_detached(look, "look for a governed model"), name)


async def _answered(asked: Awaitable[Answer], name: str) -> Answer:
    """The answer of the disk. Raises NotAllowed if there is none."""
    try:
        async with asyncio.timeout(LOOK_MAX_S):
            return await asked
    except TimeoutError:
        raise NotAllowed(f"The folders of models do not answer: what {shown(name)} is cannot be told.") from None


def _expect_normal(name: str) -> None:
    """Raises BadRequest if this is a path with `//`, `.` or `..` in it, or with a slash at its end."""
    if "/" in name and (os.path.normpath(name) != name or name.startswith("//")):
        raise BadRequest(f"{shown(name)} is no path in its shortest form; name the model by that.", param="model")


def _relative(places: Iterable[str], roots: Collection[str]) -> list[str]:
    return [os.path.relpath(place, root) for place in places for root in roots if is_below(place, root)]


def _on_disk(told: Iterable[str | None], name: str | None, roots: Roots) -> list[str]:
    """The paths that these and this name lead to, with and without links. Blocks."""
    located = None if name is None else roots.locate(name)
    paths = [path for path in (*told, located) if path is not None and "\0" not in path]
    return list(dict.fromkeys(one for path in paths for one in (path, os.path.realpath(path))))


def _same_files(places: Sequence[str], configured: Iterable[Entry]) -> list[str]:
    """The configured models of these paths. Blocks."""
    wanted = set(places)
    return [one.id for one in configured if os.path.realpath(one.config.path or "") in wanted]


def _destination(fetch: DownloadOrder, roots: Roots) -> str | None:
    """Blocks."""
    with contextlib.suppress(BadRequest):
        return place_of(fetch, roots, None).path
    return None


def _chosen(
    records: Sequence[LibraryRecord], quantization: str, others: Sequence[LibraryRecord]
) -> list[LibraryRecord]:
    found = []
    for record in records:
        # The handler refuses what cannot be chosen.
        with contextlib.suppress(GreenroomError):
            found.append(choose(record, quantization, others)[0])
    return found
