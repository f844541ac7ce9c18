"""The record of one model on disk: what it is, where it came from, how large it is. Plain values. Sizes are those of
the files themselves, never what a file says about itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from greenroom.engines.builtin.llamacpp import PROJECTOR


class ModelKind(StrEnum):
    """The format of its files, which decides the engines that can run it."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    PIPELINE = "pipeline"
    WHISPER = "whisper"


# The engine that runs a kind where nothing else is asked for.
ENGINE_OF_KIND: Final[Mapping[ModelKind, str]] = {
    ModelKind.GGUF: "llamacpp",
    ModelKind.SAFETENSORS: "transformers",
    ModelKind.PIPELINE: "diffusers",
    ModelKind.WHISPER: "whisper",
}


@dataclass(frozen=True, slots=True)
class ModelFile:
    """`name` is relative to the model's folder."""

    name: str
    bytes: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where it was fetched from. All None: it was put there by hand."""

    hub_id: str | None = None
    commit: str | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """What is known of a file since it was fetched, at this Unix time. `bytes` is None if that was not told."""

    source: Source
    at: float
    bytes: int | None = None
    sha256: str | None = None

    def is_of(self, size: int, changed: float) -> bool:
        """False if the file was changed since."""
        return self.bytes in (None, size) and changed <= self.at


@dataclass(frozen=True, slots=True)
class LibraryRecord:
    """`id` is the hub id, `org/name` or `org/name:Q4_K_M`; of plain files the path relative to its root. `path` is
    absolute, and what the key `path` of a model takes: a folder, or a GGUF file (of a split set the first)."""

    id: str
    path: str
    root: str
    kind: ModelKind
    source: Source
    files: tuple[ModelFile, ...]
    quantization: str | None = None
    context_length: int | None = None
    parameters: int | None = None
    memory_mib: int | None = None
    abilities: tuple[str, ...] = ()
    added: float = 0.0
    last_used: float | None = None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def folder(self) -> str:
        """The folder that the names of its files are relative to."""
        return os.path.dirname(self.path) if self.kind is ModelKind.GGUF else self.path

    @property
    def projector(self) -> str | None:
        """The projector beside a GGUF model, if there is exactly one."""
        return projector_of(self.kind, self.folder, [file.name for file in self.files])


def projector_of(kind: ModelKind, folder: str, names: Sequence[str]) -> str | None:
    found = [name for name in names if PROJECTOR in name.lower()] if kind is ModelKind.GGUF else []
    return os.path.join(folder, found[0]) if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """Something that looks like a model and is none."""

    path: str
    why: str


def told(record: LibraryRecord, *, with_paths: bool) -> dict[str, Any]:
    """A record as the API and the command line tell it."""
    return {
        "id": record.id,
        "kind": record.kind.value,
        "source": {"hub_id": record.source.hub_id, "commit": record.source.commit, "url": record.source.url},
        "files": [{"name": as_text(file.name), "bytes": file.bytes, "sha256": file.sha256} for file in record.files],
        "bytes": record.bytes,
        "quantization": record.quantization,
        "context_length": record.context_length,
        "parameters": record.parameters,
        "memory_mib": record.memory_mib,
        "added": record.added,
        "last_used": record.last_used,
        "path": as_text(record.path) if with_paths else None,
        "root": as_text(record.root) if with_paths else None,
    }


def told_problem(problem: BrokenModel) -> dict[str, str]:
    return {"path": as_text(problem.path), "why": as_text(problem.why)}


def as_text(name: str) -> str:
    """The name of a file as text that can be shown: it may be any bytes. What is no character is escaped."""
    if name.isprintable():
        return name
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


class Version(msgspec.Struct, frozen=True):
    """`repo_id` is told to callers, see `shown_as`; `path` is what the key `path` of a model takes."""

    number: int
    repo_id: str
    path: str
    commit: str | None = None
    # An update fetched it, so its files may be deleted when it is no longer kept.
    is_fetched: bool = False
    since: float = 0.0
    # The number of the desired state that asked for it; 0 if none did.
    state: int = 0


def shown_as(repo_id: str, *, to_operator: bool) -> str:
    """What a caller is told of where weights come from: of an absolute path, only operators see more than its name."""
    is_path = repo_id.startswith(("/", "~"))
    return os.path.basename(repo_id.rstrip("/")) if is_path and not to_operator else repo_id
