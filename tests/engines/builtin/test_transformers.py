"""What the gateway says of hosted models: which worker, how it starts, and what it is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.schema import Ability, Model
from greenroom.core.model import DeviceId
from greenroom.engines.base import LAUNCH, EngineFacts, HostKey
from greenroom.engines.builtin.transformers import PROGRAM, TransformersEngine
from greenroom.engines.registry import engine_for
from greenroom.errors import LoadFailed

ENGINE = TransformersEngine()
GPU = (DeviceId("GPU-a"),)


def model(folder: Path, **keys: Any) -> Model:
    return Model(path=str(folder), **keys)


def test_a_folder_is_hosted(tmp_path: Path) -> None:
    engine = engine_for(model(tmp_path))
    assert engine.name == "transformers" and engine.hosted is True


def test_models_share_a_worker_unless_python_gpus_environment_or_isolation_differ(tmp_path: Path) -> None:
    plain = ENGINE.host_key("s1", model(tmp_path), GPU)
    assert plain == ENGINE.host_key("s2", model(tmp_path, dtype="float32", ctx_size=7), GPU)
    assert plain.python == sys.executable and plain.may_take_spare
    others = [
        ENGINE.host_key("s1", model(tmp_path, python="/other/python"), GPU),
        ENGINE.host_key("s1", model(tmp_path), (DeviceId("GPU-b"),)),
        ENGINE.host_key("s1", model(tmp_path, env={"A": "b"}), GPU),
        ENGINE.host_key("s1", model(tmp_path, cwd="/"), GPU),
        ENGINE.host_key("s1", model(tmp_path, isolate=True), GPU),
        ENGINE.host_key("s2", model(tmp_path, isolate=True), GPU),
        ENGINE.host_key("s3", model(tmp_path, versions={}), GPU),
        ENGINE.host_key("s4", model(tmp_path, versions={}), GPU),
        ENGINE.host_key("s1", model(tmp_path, device="cpu"), GPU),
    ]
    assert len({plain, *others}) == len(others) + 1
    assert [key.may_take_spare for key in others] == [True, True, False, False, True, True, True, True, True]


def test_a_worker_is_started_by_path_with_its_gpus_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    key = HostKey("transformers", sys.executable, GPU, env=(("A", "b"),), cwd="/")
    command = ENGINE.launch_worker(key, "/run/w1.sock")
    program = (sys.executable, LAUNCH, PROGRAM, "--program", "transformers")
    assert command.argv == (*program, "--control", "/run/w1.sock") and command.cwd == "/"
    assert Path(LAUNCH).is_file()
    assert command.env["CUDA_VISIBLE_DEVICES"] == "GPU-a" and command.env["A"] == "b" and "SECRET" not in command.env


def test_a_spare_is_told_of_no_gpus_and_the_operator_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spare = HostKey("transformers", sys.executable, None)
    assert "CUDA_VISIBLE_DEVICES" not in ENGINE.launch_worker(spare, "s").env and spare.visible is None
    assert HostKey("w", "p", ()).visible == "" and HostKey("w", "p", (*GPU, DeviceId("GPU-b"))).visible == "GPU-a,GPU-b"
    said = ENGINE.launch_worker(HostKey("transformers", sys.executable, None, env=(("HF_HUB_OFFLINE", "0"),)), "s").env
    assert said["HF_HUB_OFFLINE"] == "0"


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(LoadFailed, match="there is no Python /no/python"):
        ENGINE.launch_worker(HostKey("w", "/no/python", GPU), "s")


def test_keys_of_a_model_become_options(tmp_path: Path) -> None:
    said = ENGINE.options(model(tmp_path, ctx_size=1000, concurrency=5, threads=2, dtype="float16"), GPU, {})
    assert said == {
        "dtype": "float16",
        "context": 1000,
        "cache_tokens": 4000,
        "batch_max": 5,
        "embedding": False,
        "device": "auto",
        "trust_remote_code": False,
        "allow_pickle": False,
        "skip_check": False,
        "chat_template": None,
        "threads": 2,
    }
    open_handed = model(
        tmp_path, ctx_size=0, cache_tokens=77, trust_remote_code=True, allow_pickle=True, skip_check=True
    )
    said = ENGINE.options(open_handed, None, {})
    assert (said["context"], said["cache_tokens"], said["batch_max"]) == (None, 77, 32)
    assert said["trust_remote_code"] is said["allow_pickle"] is said["skip_check"] is True


def test_what_is_on_the_host_is_told_so(tmp_path: Path) -> None:
    assert ENGINE.options(model(tmp_path, device="cpu"), (), {})["device"] == "cpu"
    assert ENGINE.options(model(tmp_path), (), {})["device"] == "cpu"
    assert ENGINE.options(model(tmp_path), None, {})["device"] == "auto"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"there is no folder .*gone"):
        ENGINE.options(model(tmp_path / "gone"), None, {})
    assert ENGINE.files(model(tmp_path / "gone")) == []


def test_a_file_in_place_of_a_folder_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(LoadFailed, match=r"a\.gguf is a file, and transformers serves folders"):
        ENGINE.options(model(tmp_path / "a.gguf", engine="transformers"), None, {})


def test_files_are_those_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("")
    (tmp_path / "a").write_text("")
    (tmp_path / "folder").mkdir()
    assert [file.name for file in ENGINE.files(model(tmp_path))] == ["a", "b"]


def test_a_folder_of_sentence_transformers_embeds_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    assert ENGINE.facts(model(tmp_path)).abilities == {Ability.EMBEDDINGS}
    assert ENGINE.options(model(tmp_path), None, {})["embedding"] is True
    assert tmp_path / "1_Pooling" / "config.json" in ENGINE.files(model(tmp_path))
    assert ENGINE.options(model(tmp_path, embedding=False), None, {})["embedding"] is False


@pytest.mark.parametrize(
    ("architectures", "embeds"),
    [
        ('["BertModel"]', True),
        ('["XLMRobertaForMaskedLM"]', True),
        ('["Qwen3ForCausalLM"]', False),
        ('["GPT2LMHeadModel"]', False),
        ('["ChatGLMModel"], "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLM"}', False),
        ('["LlavaForConditionalGeneration"]', False),
        ("[]", False),
        ('"BertModel"', False),
        ("[7]", False),
    ],
)
def test_a_model_without_a_head_for_text_embeds(tmp_path: Path, architectures: str, embeds: bool) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ' + architectures + "}")
    assert (ENGINE.facts(model(tmp_path)).abilities == {Ability.EMBEDDINGS}) is embeds
    (tmp_path / "config.json").write_text("no JSON")
    assert ENGINE.facts(model(tmp_path)).abilities == {Ability.CHAT, Ability.COMPLETIONS}


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_says_whether_a_model_calls_tools(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{{ messages }}")
    assert Ability.TOOLS not in (ENGINE.facts(model(tmp_path)).abilities or ())
    (tmp_path / name).write_text('{"chat_template": "{% if tools %}"}')
    assert ENGINE.facts(model(tmp_path)).abilities == {Ability.CHAT, Ability.COMPLETIONS, Ability.TOOLS}
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert ENGINE.facts(model(tmp_path)).abilities == {Ability.CHAT, Ability.COMPLETIONS}, "and nothing hangs"


def test_abilities_follow_the_mode(tmp_path: Path) -> None:
    facts = ENGINE.facts(model(tmp_path))
    assert facts == EngineFacts(frozenset({Ability.CHAT, Ability.COMPLETIONS}), can_sleep=True, keeps_prefixes=True)
    assert ENGINE.facts(model(tmp_path, embedding=True)).abilities == {Ability.EMBEDDINGS}
    assert ENGINE.concurrency(model(tmp_path)) == 32
