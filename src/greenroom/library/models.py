"""The models in a tree of folders: which files belong together, and what they are.

Owns the recognition of models by the names of their files: GGUF files (the parts of a split one are one model, and
projectors belong to the models beside them), folders of Transformers, pipelines of diffusers, Whisper models of
CTranslate2, and repositories of the hub's cache, of which every snapshot that a ref names counts, else the newest.
Headers are read once for each state of the files. What is incomplete or damaged is no model; why not is told apart.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from greenroom.base.plain_file import read_plain
from greenroom.config.hub import repository_of
from greenroom.engines.builtin.llamacpp import PROJECTOR
from greenroom.engines.estimates.gguf_header import BadModelFile, split_names
from greenroom.engines.estimates.hf_folder import CONFIG_MAX_BYTES
from greenroom.engines.estimates.hosted import INDEX, pipeline_files
from greenroom.library.facts import NOTHING, FileFacts, NoModel, read_facts
from greenroom.library.folders import SeenFile, SeenFolder, may_pass
from greenroom.library.records import BrokenModel, ModelKind, projector_of

# Files of one folder model; what is beyond is not counted.
MODEL_FILES_MAX: Final = 5_000
# Files of refs that are read, and the bytes of one.
REFS_MAX: Final = 64
REF_BYTES_MAX: Final = 256
PROBLEMS_MAX: Final = 1_000
# Of one folder; each belongs to every model in it.
PROJECTORS_MAX: Final = 16
MAIN: Final = "main"
_COMMIT: Final = re.compile(r"[0-9A-Za-z._-]{1,128}")
_GGUF: Final = ".gguf"
_SAFETENSORS: Final = ".safetensors"
_SHARD_INDEX: Final = "model.safetensors.index.json"
# Files whose change means that the headers must be read again.
_TELLING: Final = (_GGUF, _SAFETENSORS, ".json", ".bin")


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """One state of a repository of the hub: its folder, its commit, and the refs that name it."""

    hub_id: str
    folder: str
    commit: str
    refs: tuple[str, ...]
    # The one that is meant where none is named.
    is_main: bool


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model without an id. The names of `files` are relative to its folder; the first is the one that makes it one.
    `snapshot` is None for plain files."""

    path: str
    folder: str
    kind: ModelKind
    files: tuple[SeenFile, ...]
    facts: FileFacts = NOTHING
    snapshot: HubSnapshot | None = None

    def state(self) -> str:
        """A short text that stays the same as long as its headers need not be read again."""
        telling = (one for one in self.files if one.name.lower().endswith(_TELLING))
        parts = [f"{one.name}\0{one.bytes}\0{one.changed_ns}\0{one.inode}" for one in telling]
        whole = "\0".join((self.kind, self.path, *parts))
        return hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()[:32]


@dataclass(slots=True)
class _Remembered:
    version: int
    models: tuple[FoundModel, ...]
    loose: tuple[SeenFile, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """`is_whole` is False if time ran out before all headers were read. `error` is why some could not be read now."""

    models: tuple[FoundModel, ...] = ()
    problems: tuple[BrokenModel, ...] = ()
    is_whole: bool = True
    error: OSError | None = field(default=None, compare=False)


class ModelFinder:
    """Finds the models of one root. Used by one thread at a time. `on_gpu`: their memory is estimated for a GPU.
    `known` are facts that an earlier run read, by the model's state."""

    def __init__(self, *, on_gpu: bool, known: Mapping[str, FileFacts] | None = None) -> None:
        self._on_gpu = on_gpu
        self._known: dict[str, _Remembered] = {}
        self._facts: dict[str, FileFacts | BrokenModel | None] = dict(known or {})
        # States whose headers could not be read for now, and why.
        self._unread: dict[str, OSError] = {}
        # How many models had their headers read, for tests and benchmarks.
        self.read = 0

    @property
    def facts(self) -> dict[str, FileFacts]:
        """What was read, by the state of the model."""
        return {state: told for state, told in self._facts.items() if isinstance(told, FileFacts)}

    def find(self, top: SeenFolder, within_s: float = math.inf) -> Found:
        """All models below this folder, and what is none. Reads headers that are not known, at least one. Blocks.
        Raises OSError if it cannot be told now which snapshots of a repository count."""
        self._unread.clear()
        candidates = [(one, one.state()) for one in self._in(top, is_root=True).models]
        here = {top.path, *(folder.path for folder in top.below())}
        self._known = {path: known for path, known in self._known.items() if path in here}
        facts: dict[str, FileFacts | BrokenModel | None] = {}
        deadline, before, is_whole = time.monotonic() + within_s, self.read, True
        for model, state in candidates:
            if state not in self._facts and self.read > before and time.monotonic() > deadline:
                is_whole = False
            else:
                facts[state] = self._facts_of(model, state)
        # States that are gone are forgotten once all others are known.
        known = facts if is_whole else self._facts | facts
        self._facts = {state: one for state, one in known.items() if state not in self._unread}
        told = ((model, facts.get(state)) for model, state in candidates)
        models = tuple(replace(model, facts=one) for model, one in told if isinstance(one, FileFacts))
        problems = [one for one in facts.values() if isinstance(one, BrokenModel)]
        if (more := len(problems) - PROBLEMS_MAX) > 0:
            problems[PROBLEMS_MAX:] = [BrokenModel(top.path, f"{more:,} more below it are no models either")]
        return Found(models, tuple(problems), is_whole, next(iter(self._unread.values()), None))

    def _facts_of(self, model: FoundModel, state: str) -> FileFacts | BrokenModel | None:
        """None for a file that is no model by itself."""
        if state in self._facts:
            return self._facts[state]
        self.read += 1
        try:
            if missing := _missing_files(model):
                return BrokenModel(model.path, f"{len(missing):,} of its files are not there, such as {missing[0]}")
            size_bytes = sum(one.bytes for one in model.files)
            projector = projector_of(model.kind, model.folder, [one.name for one in model.files])
            weights, on_gpu = _weights(model), self._on_gpu
            return read_facts(model.kind, model.path, weights, size_bytes, projector=projector, on_gpu=on_gpu)
        except NoModel:
            return None
        except Exception as error:
            if may_pass(reason := error.__cause__ or error):
                self._unread[state] = reason
            # One odd file must not hide all the others.
            why = error.message if isinstance(error, BadModelFile) else f"it could not be read: {error!r:.200}"
            return BrokenModel(model.path, why)

    # --- which files belong together ----------------------------------------------------------------------------------

    def _in(self, folder: SeenFolder, *, is_root: bool = False) -> _Remembered:
        known = self._known.get(folder.path)
        if known is None or known.version != folder.version:
            known = self._known[folder.path] = self._look_into(folder, is_root)
        return known

    def _look_into(self, folder: SeenFolder, is_root: bool) -> _Remembered:
        if folder.is_repository and (hub_id := repository_of(folder.path)) is not None:
            return _Remembered(folder.version, tuple(self._in_repository(folder, hub_id)), ())
        below = [(child.name, self._in(child)) for child in folder.folders.values()]
        if INDEX in folder.files:
            # The components are models of their own by their files, and still parts of this one.
            files = (folder.files[INDEX], *_all_files(folder, INDEX))
            return _Remembered(folder.version, (_folder_model(folder, ModelKind.PIPELINE, files),), ())
        models = [model for _, inside in below for model in inside.models]
        models += _gguf_models(folder)
        loose = [one for one in folder.files.values() if not _is_gguf(one.name)]
        if not is_root:
            loose += [replace(one, name=f"{name}/{one.name}") for name, inside in below for one in inside.loose]
        kind, first = _kind(folder)
        if kind is None:
            # What lies beside models is no part of a model further up.
            return _Remembered(folder.version, tuple(models), () if models else tuple(loose[:MODEL_FILES_MAX]))
        files = (folder.files[first], *(one for one in loose if one.name != first))
        models.append(_folder_model(folder, kind, files))
        return _Remembered(folder.version, tuple(models), ())

    def _in_repository(self, folder: SeenFolder, hub_id: str) -> Iterator[FoundModel]:
        for snapshot, inside in _snapshots(folder, hub_id):
            yield from (replace(model, snapshot=snapshot) for model in self._in(inside).models)


def _kind(folder: SeenFolder) -> tuple[ModelKind | None, str]:
    """The kind of model that a folder as a whole is, and the file that makes it one."""
    names = folder.files
    if "model.bin" in names and any(name.startswith("vocabulary.") for name in names):
        return ModelKind.WHISPER, "model.bin"
    if "config.json" in names and any(name.endswith(_SAFETENSORS) for name in names):
        return ModelKind.SAFETENSORS, "config.json"
    return None, ""


def _folder_model(folder: SeenFolder, kind: ModelKind, files: Iterable[SeenFile]) -> FoundModel:
    return FoundModel(folder.path, folder.path, kind, tuple(files)[:MODEL_FILES_MAX])


def _all_files(folder: SeenFolder, but: str = "") -> Iterator[SeenFile]:
    """The files in it and below it, with names relative to it."""
    yield from (one for one in folder.files.values() if one.name != but)
    for child in folder.folders.values():
        yield from (replace(one, name=f"{child.name}/{one.name}") for one in _all_files(child))


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(_GGUF)


def _gguf_models(folder: SeenFolder) -> Iterator[FoundModel]:
    """Each GGUF file or split set, with the projectors beside it."""
    names = [name for name in folder.files if _is_gguf(name)]
    projectors = [folder.files[name] for name in names if PROJECTOR in name.lower()][:PROJECTORS_MAX]
    taken: set[str] = set()
    for name in names:
        if PROJECTOR in name.lower() or name in taken:
            continue
        parts = [one.name for one in split_names(Path(name))]
        # A number beyond the count is no part.
        parts = parts if name in parts else [name]
        taken.update(parts)
        files = [folder.files[part] for part in parts if part in folder.files]
        yield FoundModel(os.path.join(folder.path, parts[0]), folder.path, ModelKind.GGUF, (*files, *projectors))


def _missing_files(model: FoundModel) -> Sequence[str]:
    """Files that the model says it consists of and that are not there: it is still being fetched or copied."""
    names = {one.name for one in model.files}
    if model.kind is ModelKind.GGUF:
        parts = [one.name for one in split_names(Path(model.path))]
        return [name for name in parts if name not in names] if len(names.intersection(parts)) else []
    if model.kind is not ModelKind.SAFETENSORS or _SHARD_INDEX not in names:
        return []
    try:
        said = msgspec.json.decode(read_plain(os.path.join(model.path, _SHARD_INDEX), CONFIG_MAX_BYTES * 8))
        wanted = set(said["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return []
    if any(name.endswith(_SAFETENSORS) and "-of-" not in name for name in names):
        # The same weights in one file.
        return []
    return sorted(name for name in wanted if isinstance(name, str) and name not in names)


def _weights(model: FoundModel) -> Sequence[str]:
    """The files whose tensors are counted."""
    if model.kind is ModelKind.PIPELINE:
        return [str(file) for file in pipeline_files(Path(model.path), "auto") if file.suffix == _SAFETENSORS]
    names = [one.name for one in model.files if one.name.endswith(_SAFETENSORS) and "/" not in one.name]
    parts = [name for name in names if "-of-" in name]
    return [os.path.join(model.path, name) for name in parts or names]


# --- repositories of the hub's cache ----------------------------------------------------------------------------------


def _snapshots(folder: SeenFolder, hub_id: str) -> Iterator[tuple[HubSnapshot, SeenFolder]]:
    """Every snapshot that a ref names, else the newest; the main one first."""
    there = folder.folders["snapshots"].folders
    refs = _refs(folder)
    named = {commit: tuple(sorted(ref for ref, to in refs.items() if to == commit)) for commit in refs.values()}
    chosen = [commit for commit in named if commit in there] or _newest(there)
    main = refs[MAIN] if refs.get(MAIN) in chosen else next(iter(_newest({one: there[one] for one in chosen})), None)
    for commit in sorted(chosen, key=lambda one: (one != main, one)):
        inside = there[commit]
        yield HubSnapshot(hub_id, inside.path, commit, named.get(commit, ()), commit == main), inside


def _newest(there: dict[str, SeenFolder]) -> list[str]:
    """The snapshot that was changed last, of those that can be looked into."""
    seen = [(folder.stamp[2], name) for name, folder in there.items() if folder.stamp is not None]
    return [max(seen)[1]] if seen else []


def _refs(folder: SeenFolder) -> dict[str, str]:
    """The commits by the refs that name them. Raises OSError of a failing disk: without a ref, another one counts."""
    found: dict[str, str] = {}
    refs = folder.folders.get("refs")
    if refs is None:
        return found
    for file in itertools.islice(_all_files(refs), REFS_MAX):
        try:
            commit = read_plain(os.path.join(refs.path, file.name), REF_BYTES_MAX).decode("ascii").strip()
        except (OSError, ValueError) as error:
            if may_pass(error):
                raise
            continue
        if _COMMIT.fullmatch(commit):
            found[file.name] = commit
    return found
