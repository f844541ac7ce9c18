"""The pages are true: configurations load, commands exist, links lead somewhere, fields become what is said."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenroom.cli.parser import parser
from greenroom.config import loader
from greenroom.dialects.anthropic.answers import messages_translation
from greenroom.dialects.neutral import AnswerContext, Fields
from greenroom.dialects.ollama.answers import chat_translation
from greenroom.dialects.responses.answers import response_translation
from greenroom.dialects.translation import Translate
from greenroom.errors import BadRequest
from greenroom.serving.routes import MODEL_ROUTES
from tests.docs.pages import ROOT, blocks, section, text_of
from tests.syntax import tree_of

WHERE = ("*.md", "docs/**/*.md", "deploy/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
PAGES = sorted(str(file.relative_to(ROOT)) for pattern in WHERE for file in ROOT.glob(pattern))
# Other tests load these, beside the packages that the pages build.
NEED_PACKAGES = {f"docs/design/writing-{name}.md" for name in ("a-policy", "a-scheduler", "an-engine")}
YAML = [(page, block) for page in PAGES if page not in NEED_PACKAGES for block in blocks(page, "yaml")]
COMMANDS = [
    (page, line[line.index("greenroom ") :].partition(" > ")[0])
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if re.match(r"(\S*/)?greenroom ", line) and "--version" not in line
]
ENVIRON = {name: name for name in ("GREENROOM_KEY", "OPS_KEY", "WRITERS_KEY", "SPEECH_TOKEN", "REDIS_PASSWORD")}


@pytest.mark.parametrize(("page", "block"), YAML)
def test_a_configuration_on_a_page_is_a_right_one(page: str, block: str, tmp_path: Path) -> None:
    numbers = itertools.count()
    file = tmp_path / "greenroom.yaml"
    file.write_text(re.sub("sha256: …", lambda _: f"sha256: '{next(numbers):064x}'", block), encoding="utf-8")
    warnings = loader.load(file, ENVIRON).warnings
    # Nobody who copies it has these model files, and the operator's key is on another page.
    assert [text for text in warnings if not re.search("there is no|no key has admin", text)] == []


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_on_a_page_is_understood(page: str, line: str) -> None:
    assert parser().parse_args(shlex.split(line, comments=True)[1:]).run is not None


def anchors(page: str) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", prose, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_a_link_on_a_page_leads_to_a_file_and_a_heading_of_it(page: str) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text_of(page)):
        if "://" not in link:
            target = ((ROOT / page).parent / link if link else ROOT / page).resolve()
            assert target.exists(), link
            assert not anchor or anchor in anchors(str(target.relative_to(ROOT))), f"{link}#{anchor}"


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\(([^)#]+)", text_of("docs/index.md")))
    assert {page.removeprefix("docs/") for page in PAGES if re.match(r"docs/(design/)?[^/]*$", page)} - {
        "index.md"
    } <= named


def test_files_that_pages_name_are_there() -> None:
    folders = ("src", "tests", "benchmarks", "examples", "scripts", "ui/src")
    files = [str(file) for folder in folders for file in (ROOT / folder).rglob("*.*")]
    pages = [page for page in PAGES if page == "CONTRIBUTING.md" or page.startswith("docs/")]
    named = {name for page in pages for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|ts))`", text_of(page))}
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_pages_that_sources_name_are_there() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "ui/src").rglob("*.ts*"), *(ROOT / "deploy").rglob("*.yaml")]
    files += [
        ROOT / "Dockerfile",
        ROOT / "Makefile",
        ROOT / "config.example.yaml",
        ROOT / "deploy/systemd/greenroom.service",
    ]
    named = {page for file in files for page in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))}
    assert [page for page in named if not (ROOT / page).exists()] == []


# Reasons of the core for other things than the departure of a model.
OF_NO_DEPARTURE = {
    *("ready", "there", "asked_for", "switch", "fired_early", "patience", "budget", "over", "grace_over", "back_off"),
    *("left", "was_not_there", "unknown", "cannot_sleep"),
}


def test_operating_explains_each_reason_for_which_a_model_leaves() -> None:
    calls = [
        node
        for file in (ROOT / "src/greenroom/core").rglob("*.py")
        for node in ast.walk(tree_of(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "because"
    ]
    words = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    reasons = section("docs/operating.md", "Why a model left").partition("| `why` |")[2]
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", reasons, re.MULTILINE))))
    assert explained == words - OF_NO_DEPARTURE


PAGE = "docs/dialects.md"
HELLO = [{"role": "user", "content": "hi"}]
CONTEXT = AnswerContext("m", "1", 0.0)
# How the fields below a heading are read, and a body to which they are added.
SECTIONS: dict[str, tuple[Translate, dict[str, Any]]] = {
    "Anthropic": (messages_translation, {"max_tokens": 9, "messages": HELLO}),
    "OpenAI Responses": (response_translation, {"input": "hi"}),
    "Ollama": (chat_translation, {"messages": HELLO}),
}


LINES = [
    (name, *match)
    for name in SECTIONS
    for match in re.findall(r"^\| `(\{.*?\})` \| (?:`(\{.*\})`|(refused)) \|$", section(PAGE, name), re.MULTILINE)
]


def fields_of(body: dict[str, Any]) -> Fields:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}


@pytest.mark.parametrize(("name", "sent", "gets", "refused"), LINES)
def test_a_field_becomes_what_the_page_says(name: str, sent: str, gets: str, refused: str) -> None:
    translate, body = SECTIONS[name]
    fields = fields_of({"model": "m", **body, **json.loads(sent)})
    if refused:
        with pytest.raises(BadRequest) as caught:
            translate(CONTEXT, False).request(fields)
        assert caught.value.param in json.loads(sent)
        return
    made = {key: json.loads(bytes(raw)) for key, raw in translate(CONTEXT, False).request(fields).items()}
    wanted = json.loads(gets)
    assert {key: made.get(key) for key in wanted} == wanted
    plain = set(translate(CONTEXT, False).request(fields_of({"model": "m", **body})))
    beside = {"tools", "tool_choice"} if "tools" in json.loads(sent) else set()
    assert set(made) - plain - beside - set(wanted) == set(), "nothing else is sent"


def test_the_page_has_a_table_for_each_dialect() -> None:
    assert all(sum(line[0] == name for line in LINES) >= 10 for name in SECTIONS)


def test_every_path_of_the_page_is_served_and_every_path_is_on_it() -> None:
    named = set(re.findall(r"^\| `POST (/\S+)` \|", text_of(PAGE), re.MULTILINE))
    served = {path.decode() for path, route in MODEL_ROUTES.items() if route.translate is not None or route.is_native}
    assert served <= named <= served | {"/api/show", "/api/pull", "/models/load", "/models/unload"}
