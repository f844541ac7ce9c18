"""What Ollama has on disk becomes models, from the files where they lie; nothing in a manifest is trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import loader
from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.importing.ollama import default_folder, import_folder
from greenroom.importing.result import Imported, as_yaml
from tests.importing.ollama_folder import OllamaFolder

GGUF = b"GGUF and the rest of a model"


@pytest.fixture
def folder(tmp_path: Path) -> OllamaFolder:
    return OllamaFolder(tmp_path / "models")


def served(folder: OllamaFolder, made: Imported) -> Config:
    path = folder.root.parent / "greenroom.yaml"
    path.write_text(as_yaml(made.tree, [], made.notes))
    return loader.load(path, {}).config


def test_names_are_those_by_which_ollama_serves_them(folder: OllamaFolder) -> None:
    folder.manifest("library/llama3.2/3b", [("model", GGUF)])
    folder.manifest("library/llama3.2/latest", [("model", GGUF)])
    folder.manifest("someone/tuned/v1", [("model", GGUF)])
    folder.manifest("org/repo/Q4_K_M", [("model", GGUF)], host="hf.co")
    config = served(folder, import_folder(folder.root))
    named = {name: model.aliases for name, model in config.models.items()}
    assert named == {
        "llama3.2:3b": (),
        "llama3.2:latest": ("llama3.2",),
        "someone/tuned:v1": (),
        "hf.co/org/repo:Q4_K_M": (),
    }
    assert config.server.port == 11434


def test_files_are_used_where_they_lie(folder: OllamaFolder) -> None:
    weights, eye, taught = folder.blob(GGUF), folder.blob(GGUF + b"2"), folder.blob(GGUF + b"3")
    folder.manifest("library/m/1", [("model", weights), ("projector", eye), ("adapter", taught)])
    model = served(folder, import_folder(folder.root)).models["m:1"]
    assert model.engine == "llamacpp" and model.path == str(folder.path_of(weights))
    assert model.mmproj == str(folder.path_of(eye)) and model.lora == {str(folder.path_of(taught)): 1}


def test_parameters_become_keys_or_defaults_of_llama_server_and_the_rest_is_named(folder: OllamaFolder) -> None:
    said = {
        "num_ctx": 8192,
        "num_gpu": 10,
        "num_thread": 3,
        "temperature": 0.6,
        "top_k": 20,
        "stop": ["<|im_end|>"],
        "mirostat": 1,
        "seed": "x",
        "num_thread_batch": 2,
    }
    texts = [("template", b"{{ .Prompt }}"), ("system", b"Be kind."), ("messages", b"[]"), ("license", b"MIT")]
    params = json.dumps(said).encode()
    folder.manifest("library/m/1", [("model", GGUF), ("params", params), *texts, ("tensor", b"t")])
    made = import_folder(folder.root)
    model = served(folder, made).models["m:1"]
    assert (model.ctx_size, model.n_gpu_layers, model.threads) == (8192, 10, 3)
    assert model.args == ("--temp", "0.6", "--top-k", "20")
    told = {note.line.partition(": not mapped")[0] for note in made.notes}
    keys = ("params.stop", "params.mirostat", "params.seed", "params.num_thread_batch")
    layers = ("template", "system", "messages", "license", "tensor")
    assert told == {f"models.m:1.{key}" for key in (*keys, *layers)}


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ([("model", "sha256:../../../../etc/passwd")], "no SHA-256"),
        ([("model", "../secret")], "no SHA-256"),
        ([("model", "sha256:" + "a" * 64)], "ollama pull"),
        ([("model", b"PK not a model")], "no GGUF"),
        ([("model", GGUF), ("model", GGUF + b"2")], "several layers"),
        ([("template", b"x")], "runs elsewhere"),
        ([("model", GGUF), ("projector", b"no")], "no GGUF"),
        ([("model", GGUF), ("params", b"{")], "JSON"),
        ([("model", GGUF), ("params", b"[" * 100_000)], "JSON"),
        ({"layers": {"a": 1}}, "no list of layers"),
        ({"layers": [1]}, "no list of layers"),
        ("no JSON", "JSON"),
        ("[]", "no list of layers"),
        ("x" * (2 * 1024 * 1024), "JSON"),
    ],
)
def test_a_model_that_cannot_be_served_is_named(layers: Any, why: str, folder: OllamaFolder) -> None:
    folder.manifest("library/good/1", [("model", GGUF)])
    folder.manifest("library/bad/1", layers)
    made = import_folder(folder.root)
    [line] = [note.line for note in made.notes]
    assert line.startswith("models.bad:1: not mapped: the whole model: ") and why in line
    assert list(served(folder, made).models) == ["good:1"]


def test_links_that_lead_out_are_not_followed(folder: OllamaFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(GGUF)
    digest = "sha256:" + "b" * 64
    folder.path_of(digest).symlink_to(outside)
    folder.manifest("library/bad/1", [("model", digest)])
    good = folder.manifest("library/good/1", [("model", GGUF)])
    elsewhere = tmp_path / "manifest"
    good.rename(elsewhere)
    good.symlink_to(elsewhere)
    folder.manifest("library/good/2", [("model", GGUF)])
    made = import_folder(folder.root)
    assert list(served(folder, made).models) == ["good:2"]
    assert "link that leads out" in made.notes[0].line


def test_names_that_are_none_here_are_named(folder: OllamaFolder) -> None:
    folder.manifest("library/good/1", [("model", GGUF)])
    folder.manifest("library/a\nb/1", [("model", GGUF)])
    folder.manifest("load/b/1", [("model", GGUF)])
    made = import_folder(folder.root)
    assert len(made.notes) == 2 and list(served(folder, made).models) == ["good:1"]


def test_pipes_and_devices_block_nothing(folder: OllamaFolder) -> None:
    folder.manifest("library/good/1", [("model", GGUF)])
    os.mkfifo(folder.root / "manifests/registry.ollama.ai/library/good/2")
    os.mkfifo(folder.path_of("sha256:" + "c" * 64))
    folder.manifest("library/bad/1", [("model", "sha256:" + "c" * 64)])
    assert len(import_folder(folder.root).notes) == 2


def test_the_folder_is_where_ollama_says(folder: OllamaFolder, tmp_path: Path) -> None:
    assert default_folder({"OLLAMA_MODELS": str(folder.root)}) == folder.root
    with pytest.raises(ConfigError, match="greenroom import ollama FOLDER"):
        default_folder({"OLLAMA_MODELS": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="is it Ollama's"):
        import_folder(tmp_path)
    with pytest.raises(ConfigError, match="holds no model"):
        import_folder(folder.root)
