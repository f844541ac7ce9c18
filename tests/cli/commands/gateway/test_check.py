from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.engines.estimates.gguf import CONTEXT_MIB
from greenroom.runtime.record.recording import ACTIVITY_COLUMNS
from tests.cli.command import Cli, Said
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


class Check:
    """`greenroom check` of a file, which is a right one until a test writes another."""

    def __init__(self, folder: Path, cli: Cli) -> None:
        self.file, self._cli = folder / "greenroom.yaml", cli
        (folder / "chat.gguf").symlink_to(tiny("chat"))
        self.file.write_text(GOOD)

    def __call__(self, text: str | None = None, *words: str, status: int = 0) -> Said:
        if text is not None:
            self.file.write_text(text)
        return self._cli("check", *words, self.file, status=status)

    def json(self, text: str | None = None, status: int = 0) -> Any:
        return self(text, "--json", status=status).json

    def of_models(self, models: str, more: str = "") -> list[str]:
        """What is said of models, without what their engines lack here."""
        said = self.json(f"{more}models:\n{models}")["warnings"]
        return [text for text in said if text.startswith("models.") and "install" not in text]


@pytest.fixture
def check(tmp_path: Path, cli: Cli) -> Check:
    return Check(tmp_path, cli)


def test_a_right_file_is_summed_up(check: Check) -> None:
    lines = check().lines
    assert lines[0].split() == ["MODEL", "ENGINE", "MEMORY_MIB", "NOTE"]
    chat = lines[1].split(maxsplit=3)
    assert (chat[0], chat[1], chat[3]) == ("chat", "llamacpp", "estimated from its file, pinned")
    assert int(chat[2]) >= CONTEXT_MIB
    assert lines[2].split(maxsplit=3) == ["speech", "command", "2048", "preload"]
    assert lines[3].startswith("budget: gpu0 8,192 MiB")
    assert lines[-1] == f"{check.file} is right" and "CANDIDATES" not in "".join(lines)
    result = check.json()
    assert (result["ok"], result["warnings"]) == (True, [])
    assert [model["id"] for model in result["models"]] == ["chat", "speech"]
    assert result["devices"][0] == {"id": "gpu0", "capacity_mib": 8192, "margin_mib": 512}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "{path} is not a usable GGUF file: it ends at byte 0"),
        (b"PK\x03\x04" * 99, "{path} is not a usable GGUF file: it does not begin with GGUF"),
        (None, "there is no file {path}"),
    ],
)
def test_a_file_that_is_no_gguf_is_told_once(check: Check, content: bytes | None, why: str) -> None:
    path = check.file.parent / "chat.gguf"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    out = check().out
    assert f"warning: models.chat: path: {why.format(path=path)}" in out
    assert out.count("warning: models.chat") == 1 and out.splitlines()[-1].endswith("but see above")


def test_it_is_told_how_tenants_are_kept_apart(check: Check) -> None:
    more = "  own: {cmd: 'sh --port ${PORT}', memory_mib: 1, isolate_tenants: process}\n"
    more += "  open: {cmd: 'sh --port ${PORT}', memory_mib: 1, isolate_tenants: off}\n"
    keys = "{name: app, key: a}, {name: ops, key: c, admin: true}"
    said = check.json(GOOD + more + f"server: {{api_keys: [{keys}]}}\n")
    apart = {"chat": "slots", "speech": "shared", "own": "process", "open": "off"}
    assert {one["id"]: one["isolation"] for one in said["models"]} == apart
    warned = [text for text in said["warnings"] if "cannot keep tenants apart" in text]
    assert len(warned) == 1 and warned[0].startswith("models.speech: ") and "isolate_tenants" in warned[0]
    out = check().out
    assert "a process for each tenant" in out and "tenants share its cache" in out


def test_keys_are_told_with_what_they_may_do(check: Check) -> None:
    keys = "{name: app, key: a}, {name: train, key: b, leases: true}"
    said = check(GOOD + f"server: {{api_keys: [{keys}, {{name: ops, key: c, admin: true}}]}}\n")
    lines = [line.split(maxsplit=5) for line in said.lines]
    assert ["KEY", "TENANT", "FROM", "STATE", "EXPIRES", "MAY"] in lines
    assert ["app", "app", "configuration", "valid", "never", "ask models"] in lines
    assert [line[-1] for line in lines if line[0] in ("train", "ops")] == ["leases", "admin"]
    told = check.json(GOOD + f"server: {{api_keys: [{keys}]}}\n")
    shown = [(key["name"], key["admin"], key["leases"]) for key in told["keys"]]
    assert shown == [("app", False, False), ("train", False, True)]
    assert [text for text in told["warnings"] if "no key has admin: true" in text]


def test_keys_of_the_key_file_are_told_and_what_is_wrong_with_it(check: Check, cli: Cli) -> None:
    ours = "{name: app, key: s3cret, models: [a*], limits: {concurrent_max: 2}, expires: 2020-01-01}"
    out = check(GOOD + f"server: {{key_file: keys.json, api_keys: [{ours}]}}\n").out
    assert "keys.json; `greenroom key new` makes it" in out and "cannot keep tenants apart" not in out
    new = ["key", "new", "--config", check.file, "--json"]
    cli(*new, "ops", "--admin", "--expires", "30d")
    cli(*new, "team", "--tenant", "lab", "--verb", "read", "--route", "/v1/**")
    cli("key", "revoke", "team", "--config", check.file)
    out = check().out
    lines = [line.split(maxsplit=5) for line in out.splitlines()]
    assert ["app", "app", "configuration", "expired", "2020-01-01T00:00:00Z", "models a*; concurrent_max 2"] in lines
    assert ["team", "lab", "file", "revoked", "never", "routes /v1/**; verbs read"] in lines
    assert "s3cret" not in out and "sha256" not in out and "no valid key" not in out
    # Tenants of the file are tenants.
    assert "cannot keep tenants apart" in out
    cli("key", "revoke", "ops", "--config", check.file)
    (check.file.parent / "keys.json").chmod(0o644)
    said = check.json()
    assert [key["name"] for key in said["keys"]] == ["app"]
    told = [text for text in said["warnings"] if text.startswith("server.key_file: ")]
    assert "chmod 600" in told[0] and "no valid key" in told[1]


def test_the_file_is_found_like_serve_finds_it(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "--config" in cli("check", status=1).err
    assert "is right" in cli("check", "--config", check.file).out
    monkeypatch.setenv("GREENROOM_CONFIG", str(check.file))
    assert "is right" in cli("check").out
    monkeypatch.delenv("GREENROOM_CONFIG")
    monkeypatch.chdir(tmp_path)
    assert "is right" in cli("check").out


def test_a_file_too_large_for_the_budget_is_told(check: Check) -> None:
    said = r"warning: models.chat: its file says about \d+ MiB, which can never fit into the budget of 10 MiB"
    assert re.search(said, check(GOOD.replace("8192", "522")).out)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (GOOD.replace("pinned", "pined"), ["{file}:4: models.chat.pined: unknown key, did you mean pinned?"]),
        (
            "modles: {}\nsrever: {}\n",
            [
                "{file}:1: modles: unknown key, did you mean models?",
                "{file}:2: srever: unknown key, did you mean server?",
            ],
        ),
        *(
            (
                f"{GOOD}\nscheduler: {{{key}: coin}}\n",
                [f"{{file}}:{GOOD.count(chr(10)) + 2}: scheduler.{key}: there is no {key} 'coin'; there are {known}"],
            )
            for key, known in (
                ("implementation", "default, plain"),
                ("policy", "default, fifo"),
                ("swapper", "coordinator, memory"),
            )
        ),
    ],
)
def test_problems_are_told_with_their_lines(check: Check, text: str, problems: list[str]) -> None:
    told = [problem.format(file=check.file) for problem in problems]
    out, err = check(text, status=1)
    assert out == "" and all(problem in err for problem in told)
    assert check.json(status=1) == {"ok": False, "problems": told}


def test_commands_that_only_look_need_no_policy(check: Check, cli: Cli) -> None:
    check.file.write_text(f"{GOOD}\nscheduler: {{policy: of_another_package}}\n")
    assert "chat" in cli("engines", "--config", check.file).out


def test_the_schema_is_printed_without_a_file(cli: Cli) -> None:
    assert "models" in cli("check", "--schema").json["properties"]


def test_gpus_that_are_seen_are_the_budget(check: Check) -> None:
    fake_gpu.describe(check.file.parent / "gpus.json", fake_gpu.gpu("GPU-a", 24_000))
    assert "budget: GPU-a 24,000 MiB, host" in check("memory: {probe: file, file: gpus.json}\n").out
    out = check("memory: {probe: file, file: none.json}\n", status=1).out
    assert "problem: memory.probe: file does not work here" in out


def test_a_store_without_its_client_is_warned_of_with_what_to_type(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "leases.store" not in check(GOOD + "leases: {store: 'redis://127.0.0.1:6379'}\n").out
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "redis" else find(name))
    out = check(status=1).out
    assert "problem: leases.store: the Python client of Redis is not installed" in out
    assert "-m pip install 'greenroom[redis]'" in out
    assert "leases.store" not in check(GOOD).out


@pytest.mark.parametrize("section", ["leases", "limits"])
def test_a_store_with_an_option_that_stops_the_start_is_warned_of(check: Check, section: str) -> None:
    address = "redis://:hunter2@127.0.0.1:6379/0"
    assert f"{section}.store" not in check(GOOD + f"{section}: {{store: '{address}?health_check_interval=5'}}\n").out
    out = check(GOOD + f"{section}: {{store: '{address}?client_nmae=x'}}\n", status=1).out
    assert f"problem: {section}.store: redis://127.0.0.1:6379/0 has an option behind ?" in out
    assert "does not start" in out and "hunter2" not in out


def test_a_python_without_what_hosted_models_need_is_warned_of_once(check: Check, tmp_path: Path) -> None:
    whole = python_with(tmp_path / "whole", torch="2.13.0", transformers="5.22.2", h11="0.16.0", jinja2="3.1.6")
    old = python_with(tmp_path / "old", torch="2.9.1", transformers="5.22.2", h11="0.16.0", jinja2="3.1.6")
    mute = program(tmp_path / "mute", "hello")
    models = ""
    for name, python in (("a", whole), ("b", old), ("c", old), ("d", mute)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        write_safetensors(tmp_path / name / "model.safetensors", {"w": np.zeros(4, np.float32)})
        models += f"  {name}: {{path: {name}, python: {python}, memory_mib: 1}}\n"
    assert check.json(f"models:\n{models}")["warnings"] == [
        f"models.b, c: {old} lacks torch or has too old a version; type: {old} -m pip install 'torch>=2.11' "
        "'llguidance>=1.0'",
        f"models.d: python: {mute} does not answer like a Python",
    ]


def test_no_python_is_asked_for_packages_of_engines_that_no_model_uses(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    ours = tmp_path / "ours"
    ours.write_text(f'#!/bin/sh\necho asked >> {tmp_path}/asked\nexec {sys.executable} "$@"\n')
    ours.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ours))
    check("models:\n  a: {engine: transformers, path: m, memory_mib: 1}\n")
    assert (tmp_path / "asked").read_text().split() == ["asked"]


IN_THE_WAY = "holds something else; move it away or record to another file; "


@pytest.mark.parametrize(
    ("content", "kept", "told"),
    [
        (None, None, None),
        ("", "anything", None),
        (f"{','.join(ACTIVITY_COLUMNS)}\n", "anything", None),
        ("my notes", None, f"{{path}}: {IN_THE_WAY}"),
    ],
)
def test_a_recording_with_which_the_start_would_fail_is_told(
    content: str | None, kept: str | None, told: str | None, check: Check
) -> None:
    path = check.file.parent / "activity.csv"
    there = {Path(f"{path}{end}"): text for end, text in (("", content), (".1", kept)) if text is not None}
    for file, text in there.items():
        file.write_text(text)
    said = check.json(f"{GOOD}server: {{record_activity: activity.csv}}\n", status=int(told is not None))["problems"]
    assert len(said) == (told is not None)
    assert all(text.startswith(f"server.record_activity: {(told or '').format(path=path)}") for text in said)
    assert {file: file.read_text() for file in path.parent.glob("activity*")} == there, "nothing is changed"


# --- tasks ------------------------------------------------------------------------------------------------------------

TASKS = """
gpus: [{memory_mib: 8192}]
remotes: {cloud: {provider: openai, api_key_env: NO_SUCH_KEY}}
models:
  large: {path: chat.gguf, ctx_size: 4096, aliases: [best]}
  gone: {path: gone.gguf, ctx_size: 4096}
  opus: {engine: remote, remote: cloud, use_model_name: o}
  plain: {cmd: "sh --port ${PORT}", abilities: [embeddings]}
tasks:
  coding: {candidates: [best, gone, opus, plain], budget_s: 30, pin_primary: true, require: {abilities: [chat]}}
  long: {candidates: [large], require: {ctx_size: 8192}}
  any: {candidates: [large]}
"""


def test_tasks_are_listed_with_their_candidates_and_what_is_wrong_with_them(check: Check) -> None:
    lines = check(TASKS).lines
    at = next(number for number, line in enumerate(lines) if line.split() == ["TASK", "CANDIDATES", "NOTE"])
    assert [" ".join(line.split()) for line in lines[at + 1 : at + 4]] == [
        "coding best, gone (see below), opus (remote, see below), plain (see below) pin_primary, budget_s 30",
        "long large (see below) -",
        "any large -",
    ]
    assert "warning: tasks.coding: plain can never serve it: it does not do chat" in lines
    (none,) = [line for line in lines if line.startswith("warning: tasks.long: ")]
    assert "no candidate can ever serve it" in none and "large: its context holds 4,096 tokens" in none
    assert lines[-1].endswith("but see above")
    coding, long, simple = check.json()["tasks"]
    assert [(one["name"], one["model"], one["remote"]) for one in coding["candidates"]] == [
        ("best", "large", False),
        ("gone", "gone", False),
        ("opus", "opus", True),
        ("plain", "plain", False),
    ]
    problems = [one["problems"] for one in coding["candidates"]]
    assert problems[0] == [] and problems[3] == ["it can never serve: it does not do chat"]
    assert "there is no file" in problems[1][0] and "NO_SUCH_KEY" in problems[2][0]
    assert (coding["budget_s"], coding["pin_primary"]) == (30, True)
    assert long["candidates"][0]["problems"] and not simple["candidates"][0]["problems"]


# --- models that the load would refuse ------------------------------------------------------------------------------

COMFYUI = "  a: {engine: comfyui, path: comfy, workflow: w.json, inputs: {prompt: 2.text}}\n"


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        (None, "is no workflow in ComfyUI's API format"),
        ({"1": {}}, "inputs.prompt: 2.text is not in the workflow; there is no node 2"),
        ({"2": {"a": 1}}, "inputs.prompt: 2.text is not in the workflow; node 2 has a"),
        ({"2": {"text": "", "ckpt_name": "no.st"}}, "there is no checkpoint no.st"),
        ({"2": {"text": ""}}, None),
    ],
)
def test_workflows_that_cannot_be_used_are_told(
    check: Check, tmp_path: Path, nodes: dict[str, Any] | None, told: str | None
) -> None:
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "main.py").touch()
    workflow = {name: {"class_type": "X", "inputs": inputs} for name, inputs in (nodes or {}).items()}
    (tmp_path / "w.json").write_text("{" if nodes is None else json.dumps(workflow))
    said = check.of_models(COMFYUI)
    assert len(said) == (told is not None) and (told or "") in "".join(said)


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"README": "x"}, "there is no config.json in"),
        ({"config.json": "{", "model.safetensors": "x"}, "config.json cannot be read"),
        ({"config.json": "{}"}, "has no weights"),
        ({"config.json": "{}", "model.safetensors": "x" * 99}, "is not a usable safetensors file"),
    ],
)
def test_folders_that_cannot_be_loaded_are_told(
    check: Check, tmp_path: Path, engine: str, files: dict[str, str], told: str
) -> None:
    (tmp_path / "m").mkdir()
    for name, content in files.items():
        (tmp_path / "m" / name).write_text(content)
    said = check.of_models(f"  a: {{engine: {engine}, path: m}}\n")
    assert len(said) == 1 and said[0].startswith("models.a: path: ") and told in said[0], said


def test_pickles_are_told_unless_they_are_allowed(check: Check, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "pytorch_model.bin").touch()
    (said,) = check.of_models("  a: {path: m}\n  b: {path: m, allow_pickle: true}\n")
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
    check: Check, tmp_path: Path, spoil: str | None, told: str | None
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
    said = check.of_models("  a: {engine: diffusers, path: m}\n")
    assert len(said) == (told is not None) and (told or "") in "".join(said)
    if told is None:
        assert "is a pipeline of diffusers" in check.of_models("  a: {engine: transformers, path: m}\n")[0]


def test_whisper_without_a_model_is_told(check: Check, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "README").touch()
    (said,) = check.of_models("  a: {engine: whisper, path: m}\n")
    assert said.startswith("models.a: path: there is no model.bin in ")


def test_pythons_that_cannot_be_run_are_told(check: Check, tmp_path: Path) -> None:
    models = f"  a: {{path: chat.gguf, python: {tmp_path}}}\n  b: {{path: chat.gguf, python: ''}}\n"
    assert check.of_models(models) == [
        f"models.a: python: there is no program {tmp_path}",
        "models.b: python: is empty; name a program or leave the key out",
    ]


def test_models_larger_than_the_machine_are_told_without_any_budget(check: Check) -> None:
    models = "  giant-1999b: {cmd: 'sh ${PORT}'}\n  said: {cmd: 'sh ${PORT}', memory_mib: 999999999}\n"
    said = check.of_models(f"{models}  small: {{path: chat.gguf}}\n", "memory: {probe: none}\n")
    assert len(said) == 2, said
    told = r"models.said: memory_mib: 999,999,999 MiB can never fit into the [0-9,]+ MiB of this host"
    assert re.search(told, said[1])


def test_what_lies_on_the_host_is_not_counted_on_the_gpus(check: Check, tmp_path: Path) -> None:
    """A model that sleeps has a copy of its weights on the host."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    write_safetensors(folder / "model.safetensors", {"w": np.zeros(75 * 2**20, np.float32)})
    assert check.of_models("  a: {path: m}\n", "gpus: [{memory_mib: 2048, margin_mib: 0}]\n") == []


# --- the environment, folders, hosts ----------------------------------------------------------------------------------


def test_environment_is_shown_with_what_it_sets(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_QUEUE_DEPTH", "16")
    monkeypatch.delenv("PORT", raising=False)
    rows = [line.split() for line in check(None, "--env").lines]
    assert rows[0] == ["VARIABLE", "KEY", "FROM", "VALUE"]
    assert ["MAX_QUEUE_DEPTH", "scheduler.queue_depth_max", "environment", "16"] in rows
    assert ["PORT", "server.port", "default", "8210"] in rows
    shown = {row["name"]: row for row in check(None, "--env", "--json").json}
    assert shown["MAX_QUEUE_DEPTH"]["value"] == 16 and shown["MAX_QUEUE_DEPTH"]["sentence"]


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("MAX_QUEUE_DEPTH", "many", "the environment variable MAX_QUEUE_DEPTH (scheduler.queue_depth_max)"),
        ("MODEL_BASE_PATH", __file__, "is a file"),
    ],
)
def test_wrong_variable_is_an_error(
    check: Check, variable: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert told in check(status=1).err


def test_folders_of_models_that_cannot_be_used_are_said(check: Check, tmp_path: Path) -> None:
    out = check(f"library:\n  roots: [{tmp_path}/missing, /]\n").out
    assert f"there is no folder {tmp_path}/missing" in out and "/ is a folder of models" in out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"library:\n  roots: [{__file__}]\n", "is a file"),
        ("library:\n  roots: ['']\n", "no folder"),
        ("model_roots: ['']\n", "no folder"),
        *(
            (f"models:\n  m:\n    path: m.gguf\n    media_hosts: ['{host}']\n", "a host is named alone")
            for host in ("https://pictures.example.org", "*.example.org", "a:80", "")
        ),
    ],
)
def test_a_folder_or_host_that_is_none_is_refused_in_words(check: Check, text: str, told: str) -> None:
    said = check(text, status=1).err
    assert told in said and "^[" not in said
