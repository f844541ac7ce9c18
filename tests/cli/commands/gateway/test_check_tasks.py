"""`greenroom check` lists tasks: their candidates, which are remote, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.main import main
from tests.models import tiny

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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "chat.gguf").symlink_to(tiny("chat"))
    file = tmp_path / "greenroom.yaml"
    file.write_text(TASKS)
    return file


def test_tasks_are_listed_and_what_is_wrong_is_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split() == ["TASK", "CANDIDATES", "NOTE"])
    rows = [" ".join(line.split()) for line in lines[at + 1 : at + 4]]
    assert rows == [
        "coding best, gone (see below), opus (remote, see below), plain (see below) pin_primary, budget_s 30",
        "long large (see below) -",
        "any large -",
    ]
    assert "warning: tasks.coding: plain can never serve it: it does not do chat" in lines
    (none,) = [line for line in lines if line.startswith("warning: tasks.long: ")]
    assert "no candidate can ever serve it" in none and "large: its context holds 4,096 tokens" in none
    assert lines[-1].endswith("but see above")


def test_json_has_each_candidate_with_its_problems(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", str(file)]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    coding, long, simple = told["tasks"]
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


def test_without_tasks_no_table_is_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(TASKS.partition("tasks:")[0])
    assert main(["check", str(file)]) == 0
    assert "CANDIDATES" not in capsys.readouterr().out
