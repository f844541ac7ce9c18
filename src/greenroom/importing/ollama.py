"""The models that Ollama has on disk as models of ours: llama.cpp reads their files where they lie.

Owns the layout of Ollama's folder: a manifest for each name and tag, which lists layers by their SHA-256, and a file
for each layer. Nothing in a manifest is trusted: a layer is a plain file in the folder of layers, or it is not used.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from greenroom.base.plain_file import open_plain, read_plain
from greenroom.config.kinds import id_problem
from greenroom.config.reader import Value, Where, shown
from greenroom.errors import ConfigError
from greenroom.importing.result import Imported, Notes, Unimportable, nothing_found

PORT: Final = 11_434
FOLDERS: Final = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
MANIFESTS: Final = "manifests"
MODELS_MAX: Final = 5_000
TEXT_BYTES_MAX: Final = 1024 * 1024
# What is left out of the name of a model that is Ollama's own.
HOSTS: Final = ("registry.ollama.ai", "ollama.com")
LIBRARY: Final = "library"
LATEST: Final = "latest"
_DIGEST: Final = re.compile(r"sha256[:-]([0-9a-f]{64})")
_LAYER: Final = "application/vnd.ollama.image."
_GGUF: Final = b"GGUF"

# Parameters that are llama.cpp's own defaults for requests that do not say them.
_ARGUMENTS: Final = {
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "typical_p": "--typical",
    "repeat_penalty": "--repeat-penalty",
    "repeat_last_n": "--repeat-last-n",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "seed": "--seed",
    "num_predict": "--n-predict",
    "num_batch": "--batch-size",
}
_KEYS: Final = {"num_ctx": "ctx_size", "num_thread": "threads", "num_gpu": "n_gpu_layers"}
_UNUSED_LAYERS: Final = {
    "template": "it is in Ollama's own language; the chat template inside the model's file is used",
    "system": "it is Ollama's system message; send one with each request",
    "messages": "they are Ollama's first messages of a chat; send them with each request",
    "license": "a text for people; it stays in Ollama's folder",
}


def default_folder(environ: Mapping[str, str]) -> Path:
    """Where Ollama keeps models on this machine. Raises ConfigError if there is no such folder."""
    named = environ.get("OLLAMA_MODELS")
    places = [Path(os.path.expanduser(place)) for place in ((named,) if named else FOLDERS)]
    found = next((place for place in places if _has_manifests(place)), None)
    if found is None:
        looked = ", ".join(map(str, places))
        raise ConfigError(f"there is no folder of Ollama's models ({looked}); name it: greenroom import ollama FOLDER")
    return found


def import_folder(folder: Path) -> Imported:
    """Every model with a manifest in this folder. Raises ConfigError if it is none of Ollama's."""
    root = Path(os.path.realpath(folder))
    if not _has_manifests(root):
        raise ConfigError(f"{folder}: has no folder `{MANIFESTS}`, or it may not be read; is it Ollama's?")
    notes = Notes()
    models: dict[str, Value] = {}
    for name, manifest in _manifests(root):
        try:
            models[name] = _OllamaModel(root, name, notes).read(manifest)
        except Unimportable as error:
            notes.unmapped(("models", name), f"the whole model: {error}")
    if not models:
        raise nothing_found(folder, notes.found)
    return Imported({"server": {"port": PORT}, "models": models}, tuple(notes.found), notes.mapped)


def _has_manifests(folder: Path) -> bool:
    return os.access(folder / MANIFESTS, os.R_OK | os.X_OK)


def _manifests(root: Path) -> Iterator[tuple[str, Path]]:
    """Names of models with the files that describe them: HOST/NAMESPACE/MODEL/TAG. Links to elsewhere are left out."""
    paths = sorted(islice((root / MANIFESTS).glob("*/*/*/*"), MODELS_MAX + 1))
    if len(paths) > MODELS_MAX:
        raise ConfigError(f"{root}: has more than {MODELS_MAX:,} models")
    for path in paths:
        if Path(os.path.realpath(path)).is_relative_to(root):
            host, namespace, model, tag = path.parts[-4:]
            parts = [host, namespace, model]
            if host in HOSTS:
                parts = [model] if namespace == LIBRARY else [namespace, model]
            yield f"{'/'.join(parts)}:{tag}", path


@dataclass(frozen=True, slots=True)
class _OllamaModel:
    root: Path
    name: str
    notes: Notes

    def read(self, manifest: Path) -> dict[str, Value]:
        """Raises Unimportable."""
        if why := id_problem(self.name):
            raise Unimportable(why)
        layers = self._layers(_json(manifest))
        weights = layers.pop("model", [])
        if len(weights) != 1:
            what = "no layer with a model: it runs elsewhere, or is not for llama.cpp"
            raise Unimportable(f"its manifest has {what if not weights else 'several layers with a model'}")
        made: dict[str, Value] = {"engine": "llamacpp", "path": self._gguf(weights[0])}
        if self.name.endswith(f":{LATEST}"):
            made["aliases"] = [self.name.removesuffix(f":{LATEST}")]
        self.notes.mapped += 1
        projectors, adapters = layers.pop("projector", []), layers.pop("adapter", [])
        if projectors:
            made["mmproj"] = self._gguf(projectors[0])
        for _ in projectors[1:]:
            self.notes.unmapped(self._at("projector"), "a model here has one projector; the first is used")
        if adapters:
            made["lora"] = {self._gguf(digest): 1 for digest in adapters}
        self.notes.mapped += len(projectors[:1]) + len(adapters)
        for digest in layers.pop("params", []):
            self._set_params(_json(self._blob(digest)), made)
        for kind in layers:
            self.notes.unmapped(self._at(kind), _UNUSED_LAYERS.get(kind, "no such layer is known here"))
        return made

    def _layers(self, manifest: Any) -> dict[str, list[str]]:
        """The digests of its layers by their kind."""
        said = manifest.get("layers") if isinstance(manifest, dict) else None
        if not isinstance(said, list) or not all(isinstance(layer, dict) for layer in said):
            raise Unimportable("its manifest has no list of layers")
        found: dict[str, list[str]] = {}
        for layer in said:
            # Parameters may follow the kind.
            kind = str(layer.get("mediaType", "")).partition(";")[0].removeprefix(_LAYER)
            found.setdefault(kind, []).append(str(layer.get("digest", "")))
        return found

    def _blob(self, digest: str) -> Path:
        """The file of a layer, which is a plain one among Ollama's own. Raises Unimportable."""
        hexed = _DIGEST.fullmatch(digest)
        if hexed is None:
            raise Unimportable(f"its manifest names a layer by {shown(digest)}, which is no SHA-256")
        folder = Path(os.path.realpath(self.root / "blobs"))
        path = folder / f"sha256-{hexed[1]}"
        if Path(os.path.realpath(path)).parent != folder:
            raise Unimportable(f"{path.name} is a link that leads out of Ollama's folder")
        if not path.is_file():
            raise Unimportable(f"{path.name} is missing; type: ollama pull {self.name}")
        return path

    def _gguf(self, digest: str) -> str:
        path = self._blob(digest)
        try:
            with open_plain(path) as file:
                is_gguf = file.read(len(_GGUF)) == _GGUF
        except (OSError, ValueError):
            raise Unimportable(f"{path.name} may not be read by this user") from None
        if not is_gguf:
            raise Unimportable(f"{path.name} is no GGUF file, and llama.cpp reads no other")
        return str(path)

    def _set_params(self, said: Any, made: dict[str, Value]) -> None:
        """What a Modelfile says by PARAMETER: defaults, which requests may override here too."""
        arguments: list[Value] = []
        for key, value in said.items() if isinstance(said, dict) else ():
            where = (*self._at("params"), key)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if key in _KEYS and isinstance(value, int) and is_number and value >= (1 if key == "num_thread" else 0):
                made[_KEYS[key]] = value
            elif key in _ARGUMENTS and is_number:
                arguments += [_ARGUMENTS[key], f"{value:.12g}"]
            elif key == "stop":
                told = "the model's own end of turn ends an answer; send others with each request"
                self.notes.unmapped(where, told)
                continue
            else:
                self.notes.unmapped(where, "llama-server has no default like it, or this is no value for it")
                continue
            self.notes.mapped += 1
        if arguments:
            made["args"] = arguments

    def _at(self, kind: str) -> Where:
        return ("models", self.name, kind)


def _json(path: Path) -> Any:
    """A small file of JSON. Raises Unimportable."""
    try:
        return json.loads(read_plain(path, TEXT_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        raise Unimportable(f"{path.name} cannot be read as JSON") from None
