"""What a signed operation really concerns: the model that a name leads to on disk, and the models that use its files.

Owns the names beside the one that was asked for by which rules are judged. A name is resolved here as the handler will
resolve it, so that another spelling, a link or the id of a file is no way around a rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from greenroom.config.sections.governance import Operation
from greenroom.errors import BadRequest, GreenroomError, ModelNotFound, NotAllowed, shown
from greenroom.library.quantization import choose
from greenroom.library.records import LibraryRecord
from greenroom.library.roots import Roots, is_below
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.detached import run_detached
from greenroom.server.admin.gateway import Gateway
from greenroom.tenancy.governance.gate import Done

LOOK_MAX_S: Final = 20.0


class GovernedModels:
    """`users_of` returns the models that are configured or in memory and need a file of the one to be deleted."""

    def __init__(self, gateway: Gateway, users_of: Callable[[str], Awaitable[Sequence[Entry]]]) -> None:
        self._gateway = gateway
        self._users_of = users_of

    async def done(
        self, operation: Operation, model: str | None, evicted: Sequence[str], fields: Mapping[str, Any]
    ) -> tuple[Done, ...]:
        """All that the rules are asked about besides the operation and model as named. Raises GreenroomError."""
        found: list[Done] = []
        for name in evicted:
            found += [("model-unload", one) for one in await self._names_of(name)]
        if operation == "model-update" and isinstance(repo := fields.get("model_repo_id"), str):
            found.append(("model-download", repo))
        if model is None or operation == "model-download":
            return tuple(found)
        found += [(operation, one) for one in await self._names_of(model, fields.get("quantization"))]
        if operation == "model-load" and self._gateway.must_fetch(model):
            found.append(("model-download", model))
        if operation == "model-delete":
            users = await self._users(model)
            found += [("model-delete", user) for user in users]
            if "force" in fields:
                found += [("model-unload", user) for user in users]
        return tuple(found)

    async def _users(self, model: str) -> list[str]:
        # What is not there is answered so once its token is used.
        with contextlib.suppress(ModelNotFound):
            return [entry.id for entry in await self._users_of(model)]
        return []

    async def _names_of(self, name: str, quantization: Any = None) -> list[str]:
        """The name, its ids on disk, and those of configured models with the same files. Raises GreenroomError."""
        _expect_normal(name)
        gateway, library = self._gateway, self._gateway.library
        entry, record = gateway.catalog.find(name), library.find(name)
        told = [entry.config.path if entry is not None else None, record.path if record is not None else None]
        configured = {str(one.id): one.config.path for one in gateway.catalog if one.config.path and not one.is_adhoc}
        try:
            async with asyncio.timeout(LOOK_MAX_S):
                places, same = await run_detached(
                    lambda: _on_disk(name, told, library.roots, configured), "look for a governed model"
                )
                if any(library.find(place) is None for place in places):
                    # It may have come since the last look.
                    await library.refresh()
        except TimeoutError:
            raise NotAllowed(f"The folders of models do not answer: what {shown(name)} is cannot be told.") from None
        on_disk = [one for place in places if (one := library.find(place)) is not None]
        if isinstance(quantization, str):
            on_disk += _chosen(on_disk, quantization, library.records)
        relative = _relative(places, library.real_roots())
        return list(dict.fromkeys((name, *places, *relative, *(one.id for one in on_disk), *same)))


def _expect_normal(name: str) -> None:
    """Raises BadRequest if this is a path with `//`, `.` or `..` in it, or with a slash at its end."""
    if "/" in name and (os.path.normpath(name) != name or name.startswith("//")):
        raise BadRequest(f"{shown(name)} is no path in its shortest form; name the model by that.", param="model")


def _relative(places: Iterable[str], roots: Collection[str]) -> list[str]:
    return [os.path.relpath(place, root) for place in places for root in roots if is_below(place, root)]


def _on_disk(
    name: str, told: Iterable[str | None], roots: Roots, configured: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The paths that this name leads to, with and without links, and the configured models of these. Blocks."""
    paths = [path for path in (*told, roots.locate(name)) if path is not None and "\0" not in path]
    places = list(dict.fromkeys(one for path in paths for one in (path, os.path.realpath(path))))
    return places, [model for model, path in configured.items() if os.path.realpath(path) in places]


def _chosen(
    records: Sequence[LibraryRecord], quantization: str, others: Sequence[LibraryRecord]
) -> list[LibraryRecord]:
    found = []
    for record in records:
        # The handler refuses what cannot be chosen.
        with contextlib.suppress(GreenroomError):
            found.append(choose(record, quantization, others)[0])
    return found
