"""The guides are true: their configurations load, their commands exist, their links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from greenroom.cli.parser import parser
from greenroom.config import loader

ROOT = Path(__file__).parents[2]
GUIDES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/quickstart.md",
    "docs/operating.md",
    "docs/audio.md",
    "docs/deploying.md",
    "docs/dialects.md",
    "docs/images.md",
    "docs/installing.md",
    "docs/jobs.md",
    "docs/library.md",
    "docs/remote.md",
    "docs/routing.md",
    "docs/switching.md",
    "docs/profiles.md",
    "docs/transformers.md",
    "docs/versions.md",
    "docs/vllm.md",
)


def blocks(guide: str, language: str) -> list[str]:
    text = (ROOT / guide).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


YAML = [(guide, block) for guide in GUIDES for block in blocks(guide, "yaml")]
COMMANDS = [
    (guide, line[line.index("greenroom ") :])
    for guide in GUIDES
    for block in blocks(guide, "bash")
    for line in block.splitlines()
    if re.match(r"(\S*/)?greenroom ", line) and "--version" not in line
]


@pytest.mark.parametrize(("guide", "block"), YAML)
def test_a_configuration_in_a_guide_is_a_right_one(guide: str, block: str, tmp_path: Path) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(block, encoding="utf-8")
    loaded = loader.load(file, {"OPS_KEY": "o", "WRITERS_KEY": "w"})
    # Nobody who copies it has these model files.
    assert [text for text in loaded.warnings if "there is no" not in text] == []


@pytest.mark.parametrize(("guide", "line"), COMMANDS)
def test_a_command_in_a_guide_is_understood(guide: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    assert parser().parse_args(words[1:]).run is not None


@pytest.mark.parametrize("guide", GUIDES)
def test_a_link_in_a_guide_leads_to_a_file(guide: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / guide).read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / guide).parent.joinpath(link).exists()] == []


# Reasons of the core for other things than the departure of a model.
OF_NO_DEPARTURE = {
    *("ready", "there", "asked_for", "switch", "fired_early", "patience", "budget", "over", "grace_over", "back_off"),
    *("left", "was_not_there", "unknown", "cannot_sleep"),
}


def test_operating_explains_each_reason_for_which_a_model_leaves() -> None:
    calls = [
        node
        for file in (ROOT / "src/greenroom/core").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "because"
    ]
    words = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    guide = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    section = guide.partition("## Why a model left")[2].partition("\n## ")[0]
    reasons = section.partition("| `why` |")[2]
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", reasons, re.MULTILINE))))
    assert explained == words - OF_NO_DEPARTURE
