"""A model of llama.cpp by its keys and files: the file in a folder, what it can do, and the files beside it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gguf
import pytest

from greenroom.config import loader
from greenroom.config.schema import Ability, Model
from greenroom.engines.base import CacheFigures, LaunchPlace
from greenroom.engines.builtin.llamacpp import LlamaCppEngine, abilities_of, files_in, of_model
from greenroom.engines.estimates.gguf_header import TEMPLATE_MAX_BYTES, read_header
from greenroom.errors import LoadFailed
from tests.models import tiny, tiny_embedding, tiny_lora, tiny_projector, tiny_reranker
from tests.samples import tiny_llm

TEXT = {Ability.CHAT, Ability.COMPLETIONS}
ENGINE = LlamaCppEngine()
PLACE = LaunchPlace({}, socket="/run/x.sock")


def argv(model: Model) -> list[str]:
    return list(ENGINE.launch("m", model, PLACE).command.argv)


def with_files(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).touch()
    return str(folder)


# --- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "model", "projector"),
    [
        (["qwen.gguf", "README.md"], "qwen.gguf", None),
        (["qwen.gguf", "mmproj-F16.gguf"], "qwen.gguf", "mmproj-F16.gguf"),
        (["q-00001-of-00002.gguf", "q-00002-of-00002.gguf"], "q-00001-of-00002.gguf", None),
        (["qwen.gguf", "mmproj-a.gguf", "mmproj-b.gguf"], "qwen.gguf", None),
    ],
)
def test_a_folder_with_one_model_is_that_model(
    tmp_path: Path, names: list[str], model: str, projector: str | None
) -> None:
    folder = with_files(tmp_path, *names)
    assert files_in(folder) == (f"{folder}/{model}", None if projector is None else f"{folder}/{projector}")


@pytest.mark.parametrize(
    "names",
    [[], ["README.md"], ["a.gguf", "b.gguf"], ["mmproj.gguf"], ["q-00001-of-00002.gguf", "other-00002-of-00002.gguf"]],
)
def test_a_folder_that_leaves_a_choice_is_refused_at_the_load(tmp_path: Path, names: list[str]) -> None:
    folder = with_files(tmp_path, *names)
    with pytest.raises(LoadFailed, match=r"m: .* does not hold one GGUF model. Name the file in `path`"):
        argv(Model(path=folder, engine="llamacpp"))


def test_a_folder_of_gguf_files_needs_no_engine(tmp_path: Path) -> None:
    for name in ("gguf", "both", "safetensors"):
        (tmp_path / name).mkdir()
    (tmp_path / "gguf" / "a.gguf").symlink_to(tiny("alpha"))
    (tmp_path / "both" / "a.gguf").touch()
    (tmp_path / "both" / "config.json").touch()
    (tmp_path / "safetensors" / "model.safetensors").touch()
    file = tmp_path / "greenroom.yaml"
    file.write_text("models: {a: {path: gguf}, b: {path: both}, c: {path: safetensors}, d: {path: nowhere}}\n")
    models = loader.load(file).config.models
    assert [model.engine for model in models.values()] == ["llamacpp", "transformers", "transformers", "transformers"]
    assert argv(models["a"])[argv(models["a"]).index("--model") + 1] == str(tmp_path / "gguf" / "a.gguf")
    assert ENGINE.estimate(models["a"], 1) == ENGINE.estimate(Model(path=str(tiny("alpha"))), 1)


# --- abilities ------------------------------------------------------------------------------------------------------


def test_the_file_says_what_a_model_can_do_unless_the_operator_does() -> None:
    assert abilities_of(Model(path=str(tiny("alpha")))) == TEXT
    assert abilities_of(Model(path=str(tiny_embedding()))) == {Ability.EMBEDDINGS}
    assert abilities_of(Model(path=str(tiny_reranker()))) == {Ability.RERANK}
    assert abilities_of(Model(path=str(tiny_embedding()), embedding=False)) == TEXT
    assert abilities_of(Model(path=str(tiny("alpha")), embedding=True)) == {Ability.EMBEDDINGS}
    assert abilities_of(Model(path="/nowhere.gguf")) == TEXT
    assert abilities_of(Model(path="/nowhere.gguf", reranking=True)) == {Ability.RERANK}


def test_a_model_is_started_for_what_its_file_says() -> None:
    assert "--embedding" in argv(Model(path=str(tiny_embedding())))
    assert "--reranking" in argv(Model(path=str(tiny_reranker())))
    assert not {"--embedding", "--reranking"} & set(argv(Model(path=str(tiny_reranker()), embedding=False)))


def projector(path: Path, **has: bool) -> str:
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in has.items():
        writer.add_bool(f"clip.has_{key}_encoder", value)
    tiny_llm.write_gguf(writer, {})
    return str(path)


def test_a_projector_says_whether_a_model_sees_or_hears(tmp_path: Path) -> None:
    path = str(tiny("alpha"))
    assert abilities_of(Model(path=path, mmproj=str(tiny_projector()))) == {*TEXT, Ability.VISION}
    hears = projector(tmp_path / "hears.gguf", vision=False, audio=True)
    assert abilities_of(Model(path=path, mmproj=hears)) == {*TEXT, Ability.AUDIO}
    both = projector(tmp_path / "both.gguf", vision=True, audio=True)
    assert abilities_of(Model(path=path, mmproj=both)) == {*TEXT, Ability.VISION, Ability.AUDIO}
    assert abilities_of(Model(path=path, args=("--mmproj", both))) == {*TEXT, Ability.VISION, Ability.AUDIO}


@pytest.mark.parametrize(
    ("template", "has_tools"),
    [
        ("{{ messages }}", False),
        ("{% if tools %}{{ tools }}{% endif %}" + "x" * 5_000, True),
        ("x" * (TEMPLATE_MAX_BYTES + 1) + "tools", False),
    ],
)
def test_a_chat_template_says_whether_a_model_calls_tools(tmp_path: Path, template: str, has_tools: bool) -> None:
    writer = tiny_llm.gguf_writer(tmp_path / "a.gguf", "llama", "a", hidden=8, layers=1, heads=1)
    writer.add_chat_template(template)
    tiny_llm.write_gguf(writer, {})
    assert read_header(tmp_path / "a.gguf").has_tools is has_tools
    assert (Ability.TOOLS in abilities_of(Model(path=str(tmp_path / "a.gguf")))) is has_tools


def test_a_template_of_the_operator_counts_instead(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ tools }}")
    path = str(tiny("alpha"))
    assert Ability.TOOLS in abilities_of(Model(path=path, chat_template=str(file)))
    assert abilities_of(Model(path=path, chat_template="chatml")) == TEXT
    assert abilities_of(Model(path=path, chat_template=str(tmp_path / "gone.jinja"))) == TEXT


# --- files beside the model -----------------------------------------------------------------------------------------


def whole() -> Model:
    return Model(
        path=str(tiny("alpha", layers=4)),
        mmproj=str(tiny_projector()),
        lora={str(tiny_lora("alpha")): 0.5},
        draft_model=str(tiny("alpha")),
        chat_template="chatml",
        reasoning="off",
        reasoning_format="none",
        reasoning_budget=7,
    )


def test_keys_become_arguments() -> None:
    said = dict(itertools.pairwise(argv(whole())))
    assert said["--mmproj"] == str(tiny_projector())
    assert said["--lora-scaled"] == f"{tiny_lora('alpha')}:0.5"
    assert (said["--model-draft"], said["--spec-type"]) == (str(tiny("alpha")), "draft-simple")
    assert (said["--chat-template"], said["--reasoning"]) == ("chatml", "off")
    assert (said["--reasoning-format"], said["--reasoning-budget"]) == ("none", "7")
    plain = argv(Model(path=str(tiny("alpha"))))
    assert not [word for word in plain if word.startswith(("--mm", "--lora", "--spec", "--chat", "--reasoning"))]


def test_on_the_host_nothing_beside_the_model_goes_to_a_gpu() -> None:
    on_host = argv(whole().model_copy(update={"device": "cpu"}))
    assert "--no-mmproj-offload" in on_host and on_host[on_host.index("--n-gpu-layers-draft") + 1] == "0"


def test_an_estimate_counts_projector_adapters_and_draft_model() -> None:
    estimate, alone = ENGINE.estimate(whole(), 1), ENGINE.estimate(Model(path=str(tiny("alpha", layers=4))), 1)
    assert estimate is not None and alone is not None
    more = {part.what: part.gpu_mib for part in estimate.parts if part not in alone.parts}
    assert set(more) >= {"projector", "adapters", "draft weights", "draft KV cache"}
    assert all(more.values())


def test_files_of_a_load_are_all_of_them() -> None:
    model = whole()
    assert [str(file) for file in ENGINE.files(model)] == [model.path, model.mmproj, *model.lora, model.draft_model]
    assert of_model(model).draft == model.draft_model


@pytest.mark.parametrize("key", ["mmproj", "draft_model", "lora"])
def test_a_missing_file_is_named_with_its_key(key: str) -> None:
    keys = {key: {"/nowhere.gguf": 1.0} if key == "lora" else "/nowhere.gguf"}
    with pytest.raises(LoadFailed, match=rf"there is no file /nowhere.gguf. Correct `{key}`"):
        argv(Model(path=str(tiny("alpha")), **keys))


def test_paths_start_at_the_folder_of_the_configuration_and_missing_ones_are_told(tmp_path: Path) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(
        "models: {a: {path: a.gguf, mmproj: m.gguf, draft_model: d.gguf, lora: {l.gguf: 1}, chat_template: t.jinja}}\n"
    )
    loaded = loader.load(file)
    model = loaded.config.models["a"]
    paths = [model.mmproj, model.draft_model, *model.lora, model.chat_template]
    assert paths == [str(tmp_path / name) for name in ("m.gguf", "d.gguf", "l.gguf", "t.jinja")]
    told = [warning for warning in loaded.warnings if warning.startswith("models.a: ")]
    assert len([line for line in told if "there is no file" in line]) == 5


@pytest.mark.parametrize(
    ("keys", "at_once"),
    [
        ({}, 4),
        ({"parallel": 2}, 2),
        ({"concurrency": 3}, 3),
        ({"concurrency": 64}, 4),
        ({"concurrency": 64, "args": ["--parallel", "8"]}, 8),
        ({"args": ["-np", "6"]}, 6),
        ({"concurrency": 64, "embedding": True}, 64),
    ],
)
def test_no_more_requests_at_once_than_slots(tmp_path: Path, keys: dict[str, Any], at_once: int) -> None:
    model = Model.model_validate({"path": str(tmp_path / "alpha.gguf"), **keys})
    assert ENGINE.concurrency(model) == at_once


def test_slots_tell_how_full_the_cache_is(tmp_path: Path) -> None:
    model = Model.model_validate({"path": str(tmp_path / "alpha.gguf")})
    apart = Model.model_validate({"path": str(tmp_path / "alpha.gguf"), "args": ["--no-kv-unified"]})
    slot, unused = b'{"n_ctx": 100, "id_task": 7, "n_prompt_tokens": %d}', b'{"id": 3, "n_ctx": 100}'
    told = b"[%b, %b, %b]" % (slot % 30, slot % 20, unused)
    assert ENGINE.cache_figures(told, model) == CacheFigures(0.5, kv_tokens=100)
    assert ENGINE.cache_figures(b"[%b, %b]" % (slot % 50, unused), apart) == CacheFigures(0.25, kv_tokens=200)
    twice = b"[%b, %b]" % (slot % 90, slot % 90)
    assert ENGINE.cache_figures(twice, model) == CacheFigures(1.0, kv_tokens=100), "answers may share a prompt"
    old = b'[{"n_ctx": 100, "id_task": 7}]'
    for bad in (old, b"", b"[]", b"{}", b"\xff", b'[{"n_ctx": 0}]', b"[" * 9_999):
        assert ENGINE.cache_figures(bad, model) is None
