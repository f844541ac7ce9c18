from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from greenroom.cli.main import main
from greenroom.engines.estimates.gguf import CONTEXT_MIB
from greenroom.runtime.record.recording import ACTIVITY_COLUMNS
from tests.cli.commands.models.test_engines import program, python_with
from tests.models import tiny
from tests.samples.hf_folder import write_safetensors
from tests.standins import fake_gpu

GOOD = """
gpus: [{memory_mib: 8192}]
models:
  chat: {path: chat.gguf, pinned: true}
  speech: {cmd: "sh --port ${PORT}", memory_mib: 2048, preload: true}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    (tmp_path / "chat.gguf").symlink_to(tiny("chat"))
    file = tmp_path / "greenroom.yaml"
    file.write_text(GOOD)
    return file


def test_a_right_file_is_summed_up(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["MODEL", "ENGINE", "MEMORY_MIB", "NOTE"]
    chat = lines[1].split(maxsplit=3)
    assert (chat[0], chat[1], chat[3]) == ("chat", "llamacpp", "estimated from its file, pinned")
    assert int(chat[2]) >= CONTEXT_MIB
    assert lines[2].split(maxsplit=3) == ["speech", "command", "2048", "preload"]
    assert lines[3].startswith("budget: gpu0 8,192 MiB")
    assert lines[-1] == f"{good} is right"


@pytest.mark.parametrize(
    ("content", "why"), [(b"", "it ends at byte 0"), (b"PK\x03\x04" * 99, "it does not begin with GGUF")]
)
def test_a_file_that_is_no_gguf_is_told(
    good: Path, content: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (good.parent / "chat.gguf").unlink()
    (good.parent / "chat.gguf").write_bytes(content)
    assert main(["check", str(good)]) == 0
    out = capsys.readouterr().out
    assert f"warning: models.chat: path: {good.parent}/chat.gguf is not a usable GGUF file: {why}" in out
    assert out.splitlines()[-1].endswith("but see above")


def test_a_file_that_is_missing_is_told_once(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (good.parent / "chat.gguf").unlink()
    assert main(["check", str(good)]) == 0
    assert capsys.readouterr().out.count("warning: models.chat") == 1


def test_it_is_told_how_tenants_are_kept_apart(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "  own: {cmd: 'sh --port ${PORT}', memory_mib: 1, isolate_tenants: process}\n"
    more += "  open: {cmd: 'sh --port ${PORT}', memory_mib: 1, isolate_tenants: off}\n"
    keys = "{name: app, key: a}, {name: ops, key: c, admin: true}"
    good.write_text(GOOD + more + f"server: {{api_keys: [{keys}]}}\n")
    assert main(["check", str(good), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {one["id"]: one["isolation"] for one in said["models"]} == {
        "chat": "slots",
        "speech": "shared",
        "own": "process",
        "open": "off",
    }
    warned = [text for text in said["warnings"] if "cannot keep tenants apart" in text]
    assert len(warned) == 1 and warned[0].startswith("models.speech: ") and "isolate_tenants" in warned[0]
    assert main(["check", str(good)]) == 0
    out = capsys.readouterr().out
    assert "a process for each tenant" in out and "tenants share its cache" in out


def test_keys_are_told_with_what_they_may_do(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = "{name: app, key: a}, {name: train, key: b, leases: true}"
    good.write_text(GOOD + f"server: {{api_keys: [{keys}, {{name: ops, key: c, admin: true}}]}}\n")
    assert main(["check", str(good)]) == 0
    lines = [line.split(maxsplit=5) for line in capsys.readouterr().out.splitlines()]
    assert ["KEY", "TENANT", "FROM", "STATE", "EXPIRES", "MAY"] in lines
    assert ["app", "app", "configuration", "valid", "never", "ask models"] in lines
    assert [line[-1] for line in lines if line[0] in ("train", "ops")] == ["leases", "admin"]
    good.write_text(GOOD + f"server: {{api_keys: [{keys}]}}\n")
    assert main(["check", str(good), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(key["name"], key["admin"], key["leases"]) for key in said["keys"]] == [
        ("app", False, False),
        ("train", False, True),
    ]
    assert [text for text in said["warnings"] if "no key has admin: true" in text]


def test_keys_of_the_key_file_are_told_and_what_is_wrong_with_it(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = "{name: app, key: s3cret, models: [a*], limits: {concurrent_max: 2}, expires: 2020-01-01}"
    good.write_text(GOOD + f"server: {{key_file: keys.json, api_keys: [{ours}]}}\n")
    assert main(["check", str(good)]) == 0
    out = capsys.readouterr().out
    assert "keys.json; `greenroom key new` makes it" in out and "cannot keep tenants apart" not in out
    new = ["key", "new", "--config", str(good), "--json"]
    assert main([*new, "ops", "--admin", "--expires", "30d"]) == 0
    assert main([*new, "team", "--tenant", "lab", "--verb", "read", "--route", "/v1/**"]) == 0
    assert main(["key", "revoke", "team", "--config", str(good)]) == 0
    capsys.readouterr()
    assert main(["check", str(good)]) == 0
    out = capsys.readouterr().out
    lines = [line.split(maxsplit=5) for line in out.splitlines()]
    assert ["app", "app", "configuration", "expired", "2020-01-01T00:00:00Z", "models a*; concurrent_max 2"] in lines
    assert ["team", "lab", "file", "revoked", "never", "routes /v1/**; verbs read"] in lines
    assert "s3cret" not in out and "sha256" not in out and "no valid key" not in out
    # Tenants of the file are tenants.
    assert "cannot keep tenants apart" in out
    assert main(["key", "revoke", "ops", "--config", str(good)]) == 0
    (good.parent / "keys.json").chmod(0o644)
    capsys.readouterr()
    assert main(["check", str(good), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [key["name"] for key in said["keys"]] == ["app"]
    told = [text for text in said["warnings"] if text.startswith("server.key_file: ")]
    assert "chmod 600" in told[0] and "no valid key" in told[1]


def test_the_file_is_found_like_serve_finds_it(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", str(good)]) == 0
    monkeypatch.setenv("GREENROOM_CONFIG", str(good))
    assert main(["check"]) == 0
    monkeypatch.delenv("GREENROOM_CONFIG")
    monkeypatch.chdir(good.parent)
    assert main(["check"]) == 0
    assert capsys.readouterr().out.count("is right") == 3


def test_no_file_at_all_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check"]) == 1
    assert "--config" in capsys.readouterr().err


def test_problems_are_told_with_their_lines(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good.write_text(GOOD.replace("pinned", "pined"))
    assert main(["check", str(good)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"greenroom: {good}:4: models.chat.pined: unknown key, did you mean pinned?\n"


def test_warnings_do_not_fail(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (good.parent / "chat.gguf").unlink()
    assert main(["check", str(good)]) == 0
    assert "warning: models.chat: path: there is no file" in capsys.readouterr().out


def test_a_file_too_large_for_the_budget_is_told(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good.write_text(GOOD.replace("8192", "522"))
    assert main(["check", str(good)]) == 0
    told = capsys.readouterr().out
    said = r"warning: models.chat: its file says about \d+ MiB, which can never fit into the budget of 10 MiB"
    assert re.search(said, told)


def test_json_holds_the_same(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["warnings"]) == (True, [])
    assert [model["id"] for model in result["models"]] == ["chat", "speech"]
    assert result["devices"][0] == {"id": "gpu0", "capacity_mib": 8192, "margin_mib": 512}


def test_json_of_a_wrong_file_lists_its_problems(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good.write_text("modles: {}\nsrever: {}\n")
    assert main(["check", str(good), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False and len(result["problems"]) == 2


@pytest.mark.parametrize(
    ("key", "known"),
    [("implementation", "default, plain"), ("policy", "default, fifo"), ("swapper", "coordinator, memory")],
)
def test_a_scheduler_policy_or_swapper_that_is_not_there_is_told(
    good: Path, key: str, known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good.write_text(f"{GOOD}\nscheduler: {{{key}: coin}}\n")
    line = GOOD.count("\n") + 2
    told = f"{good}:{line}: scheduler.{key}: there is no {key} 'coin'; there are {known}"
    assert main(["check", str(good)]) == 1
    assert told in capsys.readouterr().err
    assert main(["check", str(good), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False, "problems": [told]}


def test_commands_that_only_look_need_no_policy(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good.write_text(f"{GOOD}\nscheduler: {{policy: of_another_package}}\n")
    assert main(["engines", "--config", str(good)]) == 0
    assert "chat" in capsys.readouterr().out


def test_the_schema_is_printed_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--schema"]) == 0
    assert "models" in json.loads(capsys.readouterr().out)["properties"]


def test_gpus_that_are_seen_are_the_budget(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_gpu.describe(good.parent / "gpus.json", fake_gpu.gpu("GPU-a", 24_000))
    good.write_text("memory: {probe: file, file: gpus.json}\n")
    assert main(["check", str(good)]) == 0
    assert "budget: GPU-a 24,000 MiB, host" in capsys.readouterr().out


def test_a_probe_that_does_not_work_here_is_warned_of(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good.write_text("memory: {probe: file, file: none.json}\n")
    assert main(["check", str(good)]) == 0
    assert "warning: memory.probe: file does not work here" in capsys.readouterr().out


def test_a_store_without_its_client_is_warned_of_with_what_to_type(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good.write_text(GOOD + "leases: {store: 'redis://127.0.0.1:6379'}\n")
    assert main(["check", str(good)]) == 0
    assert "leases.store" not in capsys.readouterr().out
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "redis" else find(name))
    assert main(["check", str(good)]) == 0
    assert "warning: leases.store: the Python client of Redis is not installed" in (out := capsys.readouterr().out)
    assert "-m pip install 'greenroom[redis]'" in out
    good.write_text(GOOD)
    assert main(["check", str(good)]) == 0
    assert "leases.store" not in capsys.readouterr().out


def test_a_python_without_what_hosted_models_need_is_warned_of_once(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = python_with(tmp_path / "whole", torch="2.13.0", transformers="5.22.2", h11="0.16.0", jinja2="3.1.6")
    old = python_with(tmp_path / "old", torch="2.9.1", transformers="5.22.2", h11="0.16.0", jinja2="3.1.6")
    mute = program(tmp_path / "mute", "hello")
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        write_safetensors(tmp_path / name / "model.safetensors", {"w": np.zeros(4, np.float32)})
    good.write_text(
        f"models:\n  a: {{path: a, python: {whole}, memory_mib: 1}}\n"
        f"  b: {{path: b, python: {old}, memory_mib: 1}}\n  c: {{path: c, python: {old}, memory_mib: 1}}\n"
        f"  d: {{path: d, python: {mute}, memory_mib: 1}}\n"
    )
    assert main(["check", str(good), "--json"]) == 0
    warned = json.loads(capsys.readouterr().out)["warnings"]
    assert warned == [
        f"models.b, c: {old} lacks torch or has too old a version; type: {old} -m pip install 'torch>=2.11' "
        "'llguidance>=1.0'",
        f"models.d: python: {mute} does not answer like a Python",
    ]


def test_no_python_is_asked_for_packages_of_engines_that_no_model_uses(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    ours = tmp_path / "ours"
    ours.write_text(f'#!/bin/sh\necho asked >> {tmp_path}/asked\nexec {sys.executable} "$@"\n')
    ours.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ours))
    good.write_text("models:\n  a: {engine: transformers, path: m, memory_mib: 1}\n")
    assert main(["check", str(good)]) == 0
    assert (tmp_path / "asked").read_text().split() == ["asked"]


OLDER_ACTIVITY = "t,model,prompt_len,output_len,tenant,priority\n1,a,1,1,,1\n"


@pytest.mark.parametrize(
    ("content", "kept", "told"),
    [
        (None, None, None),
        ("", "anything", None),
        (f"{','.join(ACTIVITY_COLUMNS)}\n", "anything", None),
        (OLDER_ACTIVITY, None, "{path} is of an earlier version; the start renames it to {path}.1"),
        (
            OLDER_ACTIVITY,
            OLDER_ACTIVITY,
            "{path} is of an earlier version; the start renames it to {path}.1, which replaces the one there",
        ),
        (OLDER_ACTIVITY, "my notes", "{path}.1: holds something else; move it away or record to another file; "),
        ("my notes", None, "{path}: holds something else; move it away or record to another file; "),
    ],
)
def test_what_the_start_would_do_with_an_earlier_recording_is_told(
    content: str | None, kept: str | None, told: str | None, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = good.parent / "activity.csv"
    there = {Path(f"{path}{end}"): text for end, text in (("", content), (".1", kept)) if text is not None}
    for file, text in there.items():
        file.write_text(text)
    good.write_text(f"{GOOD}server: {{record_activity: activity.csv}}\n")
    assert main(["check", str(good), "--json"]) == 0
    warnings = [text for text in json.loads(capsys.readouterr().out)["warnings"] if "record_activity" in text]
    if told is None:
        assert warnings == []
    else:
        assert [text.startswith(f"server.record_activity: {told.format(path=path)}") for text in warnings] == [True]
    assert {file: file.read_text() for file in good.parent.glob("activity*")} == there, "nothing is changed"


# --- models that the load would refuse ------------------------------------------------------------------------------


def warned(folder: Path, models: str, capsys: pytest.CaptureFixture[str], more: str = "") -> list[str]:
    """What `check` says of models, without what their engines lack here."""
    file = folder / "greenroom.yaml"
    file.write_text(f"{more}models:\n{models}")
    assert main(["check", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["warnings"]
    return [text for text in said if text.startswith("models.") and "install" not in text]


@pytest.mark.parametrize(
    ("workflow", "told"),
    [
        ("{", "is no workflow in ComfyUI's API format"),
        (
            '{"1": {"class_type": "X", "inputs": {}}}',
            "inputs.prompt: 2.text is not in the workflow; there is no node 2",
        ),
        (
            '{"2": {"class_type": "X", "inputs": {"a": 1}}}',
            "inputs.prompt: 2.text is not in the workflow; node 2 has a",
        ),
        ('{"2": {"class_type": "X", "inputs": {"text": "", "ckpt_name": "no.st"}}}', "there is no checkpoint no.st"),
        ('{"2": {"class_type": "X", "inputs": {"text": ""}}}', None),
    ],
)
def test_workflows_that_cannot_be_used_are_told(
    tmp_path: Path, workflow: str, told: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "main.py").touch()
    (tmp_path / "w.json").write_text(workflow)
    said = warned(tmp_path, "  a: {engine: comfyui, path: comfy, workflow: w.json, inputs: {prompt: 2.text}}\n", capsys)
    assert len(said) == (told is not None) and (told or "") in "".join(said)


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"README": "x"}, "there is no config.json in"),
        ({"config.json": "{", "model.safetensors": b"x"}, "config.json cannot be read"),
        ({"config.json": "{}"}, "has no weights"),
        ({"config.json": "{}", "model.safetensors": b"x" * 99}, "is not a usable safetensors file"),
    ],
)
def test_folders_that_cannot_be_loaded_are_told(
    tmp_path: Path, engine: str, files: dict[str, str | bytes], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    for name, content in files.items():
        (tmp_path / "m" / name).write_bytes(content.encode() if isinstance(content, str) else content)
    said = warned(tmp_path, f"  a: {{engine: {engine}, path: m}}\n", capsys)
    assert len(said) == 1 and said[0].startswith("models.a: path: ") and told in said[0], said


def test_pickles_are_told_unless_they_are_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "pytorch_model.bin").touch()
    (said,) = warned(tmp_path, "  a: {path: m}\n  b: {path: m, allow_pickle: true}\n", capsys)
    assert said.startswith("models.a: path: ") and "allow_pickle" in said


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("model_index.json", "model_index.json cannot be read"),
        ("unet", "there is no component unet in"),
        ("unet/w.safetensors", "unet has no weights"),
        (None, None),
    ],
)
def test_pipelines_that_cannot_be_loaded_are_told(
    tmp_path: Path, spoil: str | None, told: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    (folder / "unet").mkdir(parents=True)
    (folder / "unet" / "config.json").write_text("{}")
    write_safetensors(folder / "unet" / "w.safetensors", {"w": np.zeros(4, np.float32)})
    index = {"_class_name": "SanaPipeline", "unet": ["diffusers", "U"], "none": [None, None]}
    (folder / "model_index.json").write_text("{" if spoil == "model_index.json" else json.dumps(index))
    if spoil == "unet":
        shutil.rmtree(folder / "unet")
    elif spoil == "unet/w.safetensors":
        (folder / spoil).unlink()
    said = warned(tmp_path, "  a: {engine: diffusers, path: m}\n", capsys)
    assert len(said) == (told is not None) and (told or "") in "".join(said)
    if told is None:
        assert "is a pipeline of diffusers" in warned(tmp_path, "  a: {engine: transformers, path: m}\n", capsys)[0]


def test_whisper_without_a_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "README").touch()
    (said,) = warned(tmp_path, "  a: {engine: whisper, path: m}\n", capsys)
    assert said.startswith("models.a: path: there is no model.bin in ")


def test_pythons_that_cannot_be_run_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").symlink_to(tiny("chat"))
    said = warned(tmp_path, f"  a: {{path: m.gguf, python: {tmp_path}}}\n  b: {{path: m.gguf, python: ''}}\n", capsys)
    assert said == [
        f"models.a: python: there is no program {tmp_path}",
        "models.b: python: is empty; name a program or leave the key out",
    ]


def test_models_larger_than_the_machine_are_told_without_any_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").symlink_to(tiny("chat"))
    models = "  giant-1999b: {cmd: 'sh ${PORT}'}\n  said: {cmd: 'sh ${PORT}', memory_mib: 999999999}\n"
    said = warned(tmp_path, f"{models}  small: {{path: m.gguf}}\n", capsys, "memory: {probe: none}\n")
    assert len(said) == 2, said
    assert re.search(
        r"models.said: memory_mib: 999,999,999 MiB can never fit into the [0-9,]+ MiB of this host", said[1]
    )


def test_what_lies_on_the_host_is_not_counted_on_the_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that sleeps has a copy of its weights on the host."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    write_safetensors(folder / "model.safetensors", {"w": np.zeros(75 * 2**20, np.float32)})
    assert warned(tmp_path, "  a: {path: m}\n", capsys, "gpus: [{memory_mib: 2048, margin_mib: 0}]\n") == []


def test_environment_is_shown_with_what_it_sets(
    good: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_QUEUE_DEPTH", "16")
    monkeypatch.delenv("PORT", raising=False)
    assert main(["check", "--env", str(good)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["VARIABLE", "KEY", "FROM", "VALUE"]
    assert ["MAX_QUEUE_DEPTH", "scheduler.queue_depth_max", "environment", "16"] in rows
    assert ["PORT", "server.port", "default", "8210"] in rows
    assert main(["check", "--env", "--json", str(good)]) == 0
    shown = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert shown["MAX_QUEUE_DEPTH"]["value"] == 16 and shown["MAX_QUEUE_DEPTH"]["sentence"]


def test_wrong_variable_is_an_error(
    good: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_QUEUE_DEPTH", "many")
    assert main(["check", str(good)]) == 1
    assert "the environment variable MAX_QUEUE_DEPTH (scheduler.queue_depth_max)" in capsys.readouterr().err


def test_folders_of_models_that_cannot_be_used_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "roots.yaml"
    config.write_text(f"library:\n  roots: [{tmp_path}/missing, /]\n")
    assert main(["check", str(config)]) == 0
    out = capsys.readouterr().out
    assert f"there is no folder {tmp_path}/missing" in out and "/ is a folder of models" in out
    for key, root, said in (("library", str(config), "is a file"), ("library", "''", "no folder")):
        config.write_text(f"{key}:\n  roots: [{root}]\n")
        assert main(["check", str(config)]) == 1
        assert said in capsys.readouterr().err
    config.write_text("model_roots: ['']\n")
    assert main(["check", str(config)]) == 1 and "no folder" in capsys.readouterr().err


def test_a_file_in_model_base_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "empty.yaml"
    config.write_text("models: {}\n")
    monkeypatch.setenv("MODEL_BASE_PATH", str(config))
    assert main(["check", str(config)]) == 1 and "is a file" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["https://pictures.example.org", "*.example.org", "a:80", ""])
def test_a_host_that_is_none_is_refused_in_words(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "hosts.yaml"
    config.write_text(f"models:\n  m:\n    path: m.gguf\n    media_hosts: ['{host}']\n")
    assert main(["check", str(config)]) == 1
    said = capsys.readouterr().err
    assert "a host is named alone" in said and "^[" not in said
