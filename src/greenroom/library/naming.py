"""Ids of models on disk, and the other names by which each can be asked for.

Owns the way from found models to records: `org/name` for a repository of the hub, `org/name:Q4_K_M` for one of several
GGUF models in it, `org/name@ref` for a snapshot beside the main one, and the path relative to its root for plain files.
Pure: reads no disk. Every id is one that a request can name; two models never have the same.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from greenroom.config.kinds import id_problem
from greenroom.engines.estimates.gguf_header import split_stem
from greenroom.errors import BadRequest, shown
from greenroom.library.folders import SeenFile
from greenroom.library.models import MAIN, FoundModel, HubSnapshot
from greenroom.library.records import BrokenModel, FetchedFile, LibraryRecord, ModelFile, ModelKind, Source

# Taken where a repository is named that has several GGUF models, if it is there; else the first of them.
QUANTIZATION_DEFAULT: Final = "Q4_K_M"
UNNAMED_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class FoundRoot:
    """The models of one root. `folder` is as the operator wrote it, `real` with links resolved."""

    folder: str
    real: str
    models: tuple[FoundModel, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """All records by id, and the id by every name. `unnamed` are models that cannot be asked for."""

    records: Mapping[str, LibraryRecord] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    unnamed: tuple[BrokenModel, ...] = ()

    def find(self, name: str) -> LibraryRecord | None:
        found = self.names.get(name) or self.names.get(name.casefold())
        return None if found is None else self.records.get(found)


def inventory_of(roots: Sequence[FoundRoot], fetched: Mapping[str, FetchedFile] | None = None) -> Inventory:
    """Give every model an id. A model whose file names cannot be part of an id is none of the records. `fetched` is
    known of files in plain folders, by path."""
    records: dict[str, LibraryRecord] = {}
    names: dict[str, str] = {}
    unnamed: list[BrokenModel] = []
    for root in roots:
        for model, wanted in _wanted_ids(root):
            id = _free_id(wanted, root, records)
            if id is None:
                why = id_problem(wanted) or "the ids that it could have are taken"
                unnamed.append(BrokenModel(model.path, f"it cannot be asked for: {why}; rename it"))
                continue
            records[id] = _record(id, model, root, fetched or {})
            for name in _other_names(model, root):
                names.setdefault(name, id)
    for id, record in records.items():
        names.setdefault(id.casefold(), id)
        for name in _names_of_source(record):
            names.setdefault(name, id)
    # An id is never hidden by another name.
    return Inventory(records, names | {id: id for id in records}, tuple(unnamed[:UNNAMED_MAX]))


def _free_id(wanted: str, root: FoundRoot, taken: Mapping[str, LibraryRecord]) -> str | None:
    """The id, behind the name of its root where another root has the same or the word is reserved."""
    for id in (wanted, f"{os.path.basename(root.real)}/{wanted}"):
        if id not in taken and id_problem(id) is None:
            return id
    return None


def _wanted_ids(root: FoundRoot) -> Iterator[tuple[FoundModel, str]]:
    by_snapshot: dict[HubSnapshot, list[FoundModel]] = {}
    for model in root.models:
        if model.snapshot is None:
            yield model, _relative(model.path, root.real)
        else:
            by_snapshot.setdefault(model.snapshot, []).append(model)
    for snapshot, models in by_snapshot.items():
        yield from _ids_in(snapshot, models)


def _relative(path: str, root: str) -> str:
    relative = os.path.relpath(path, root)
    return os.path.basename(root) if relative == "." else relative


def _ids_in(snapshot: HubSnapshot, models: Sequence[FoundModel]) -> Iterator[tuple[FoundModel, str]]:
    """The model of a snapshot that has only one, or that is the snapshot, is named by it; others by what they are."""
    base = _base(snapshot)
    labels = Counter(model.facts.quantization for model in models if model.kind is ModelKind.GGUF)
    for model in sorted(models, key=_by_default):
        inside = os.path.relpath(model.path, snapshot.folder)
        label = model.facts.quantization
        if len(models) == 1 or inside == ".":
            yield model, base
        elif model.kind is ModelKind.GGUF:
            yield model, f"{base}:{label if label and labels[label] == 1 else split_stem(inside)}"
        else:
            yield model, f"{base}:{inside}"


def _by_default(model: FoundModel) -> tuple[bool, bool, str]:
    """The one that is meant by the name of the repository alone comes first."""
    return (
        model.path != (model.snapshot.folder if model.snapshot else ""),
        model.facts.quantization != QUANTIZATION_DEFAULT,
        model.path,
    )


def _base(snapshot: HubSnapshot) -> str:
    if snapshot.is_main:
        return snapshot.hub_id
    ref = next((ref for ref in snapshot.refs if ref != MAIN), snapshot.commit)
    return f"{snapshot.hub_id}@{ref}"


def _other_names(model: FoundModel, root: FoundRoot) -> Iterator[str]:
    """Its path and, for the first model of a folder or repository, the path and name of that."""
    places = [model.path, model.folder]
    if model.snapshot is not None:
        snapshot = model.snapshot
        places.append(os.path.dirname(os.path.dirname(snapshot.folder)))
        yield _base(snapshot)
        yield f"{snapshot.hub_id}@{snapshot.commit}"
        yield from (f"{snapshot.hub_id}@{ref}" for ref in snapshot.refs)
        if model.facts.quantization is not None:
            yield f"{_base(snapshot)}:{model.facts.quantization}".casefold()
    for place in places:
        yield place
        relative = os.path.relpath(place, root.real)
        if relative != ".":
            yield relative
        # The same by the name that the operator gave the root.
        yield os.path.normpath(os.path.join(root.folder, relative))


def _names_of_source(record: LibraryRecord) -> Iterator[str]:
    """The hub id of what was fetched into a plain folder, unless the hub's cache has it too."""
    if record.source.hub_id is not None:
        yield record.source.hub_id
        yield f"{record.source.hub_id}:{record.quantization}".casefold()


def _record(id: str, model: FoundModel, root: FoundRoot, fetched: Mapping[str, FetchedFile]) -> LibraryRecord:
    facts = model.facts
    notes = [_note(model, file, fetched) for file in model.files]
    return LibraryRecord(
        id=id,
        path=model.path,
        root=root.real,
        kind=model.kind,
        source=_source(model, notes[0]),
        files=tuple(
            ModelFile(one.name, one.bytes, one.sha256 or (None if note is None else note.sha256))
            for one, note in zip(model.files, notes, strict=True)
        ),
        quantization=facts.quantization,
        context_length=facts.context_length,
        parameters=facts.parameters,
        memory_mib=facts.memory_mib,
        abilities=facts.abilities,
        added=max((one.added for one in model.files), default=0.0),
    )


def _note(model: FoundModel, file: SeenFile, fetched: Mapping[str, FetchedFile]) -> FetchedFile | None:
    note = fetched.get(os.path.join(model.folder, file.name)) if model.snapshot is None and fetched else None
    return note if note is not None and note.is_of(file.bytes, file.changed_ns / 1e9) else None


def _source(model: FoundModel, note: FetchedFile | None) -> Source:
    if model.snapshot is not None:
        return Source(model.snapshot.hub_id, model.snapshot.commit)
    return Source() if note is None else note.source


# --- other quantizations of a model -----------------------------------------------------------------------------------


DTYPES: Final = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16"}
_GGUF_NAMES: Final = {"fp16": "f16", "fp32": "f32"}


def choose(
    record: LibraryRecord, quantization: str, records: Iterable[LibraryRecord]
) -> tuple[LibraryRecord, str | None]:
    """The model of the same name with this quantization, and the dtype to load it with if that is what was asked for.
    Raises BadRequest."""
    wanted = quantization.lower()
    if record.kind is ModelKind.GGUF:
        alike = [one for one in records if _is_alike(one, record)]
        name = _GGUF_NAMES.get(wanted, wanted)
        found = next((one for one in alike if (one.quantization or "").lower() == name), None)
        if found is None:
            raise _refused(quantization, (one.quantization for one in alike))
        return found, None
    # `awq-4bit` is told by the files as awq, with or without its bits.
    own = (record.quantization or "").lower()
    if own and wanted.split("-")[0] == own.split("-")[0]:
        return record, None
    if wanted in DTYPES and not own:
        return record, DTYPES[wanted]
    raise _refused(quantization, [record.quantization or "fp16, bf16"])


def _is_alike(one: LibraryRecord, other: LibraryRecord) -> bool:
    if one.kind is not ModelKind.GGUF:
        return False
    if other.source.hub_id is not None:
        return one.source.hub_id == other.source.hub_id
    return os.path.dirname(one.path) == os.path.dirname(other.path) and _stem(one) == _stem(other)


def _stem(record: LibraryRecord) -> str:
    """The name of its file without the quantization."""
    name = os.path.basename(record.path).lower()
    return name.replace((record.quantization or "").lower(), "") if record.quantization else name


def _refused(quantization: str, there: Iterable[str | None]) -> BadRequest:
    known = ", ".join(sorted({one for one in there if one})) or "none"
    return BadRequest(
        f"This model is not on disk as {shown(quantization)}; there is {known}. POST /v1/models/download fetches more.",
        param="quantization",
    )
