from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from greenroom.cli.main import main
from greenroom.engines.estimates.gguf import CONTEXT_MIB
from greenroom.runtime.record.recording import ACTIVITY_COLUMNS
from tests import fake_gpu
from tests.cli.test_engines import program, python_with
from tests.models import tiny

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


def test_keys_are_told_with_what_they_may_do(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = "{name: app, key: a}, {name: train, key: b, leases: true}"
    good.write_text(GOOD + f"server: {{api_keys: [{keys}, {{name: ops, key: c, admin: true}}]}}\n")
    assert main(["check", str(good)]) == 0
    assert "keys: app, train (leases), ops (admin)" in capsys.readouterr().out.splitlines()
    good.write_text(GOOD + f"server: {{api_keys: [{keys}]}}\n")
    assert main(["check", str(good), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(key["name"], key["admin"], key["leases"]) for key in said["keys"]] == [
        ("app", False, False),
        ("train", False, True),
    ]
    assert [text for text in said["warnings"] if "no key has admin: true" in text]


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


@pytest.mark.parametrize(("key", "known"), [("policy", "default, fifo"), ("swapper", "coordinator, memory")])
def test_a_policy_or_swapper_that_is_not_there_is_told(
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
