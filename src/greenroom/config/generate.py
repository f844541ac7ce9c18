"""Writes the files that are generated from the schema: the example, the JSON schema and the reference in the docs.

`python -m greenroom.config.generate` writes them; with `--check` it only lists those that are out of date. All they
say comes from the schema, but for samples that need more than a line; others are marks of their fields.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from greenroom.config.diff import COMPARED_ELSEWHERE
from greenroom.config.environment import TABLE
from greenroom.config.kinds import is_section
from greenroom.config.marks import descriptions, example_of, reload_of
from greenroom.config.reader import plain
from greenroom.config.schema import (
    ApiKey,
    Company,
    Config,
    Gpu,
    GroupSection,
    MatrixSection,
    Model,
    Profile,
    Quorum,
    Remote,
    Require,
    Section,
    Task,
    TenantLimits,
)
from greenroom.config.sections.model import KEYS_OF_ENGINES
from greenroom.config.sections.remotes import TokenCost

WIDTH = 118
FOR_EXAMPLE = "For example:"
_BARE = re.compile(r"[A-Za-z0-9/.~][A-Za-z0-9/._ ${}=-]*")

HEAD = """\
# Every option of Greenroom with its default and a sentence. Copy what you need: all of it may be left out but models.
# Written by `python -m greenroom.config.generate` from the schema; the words around it are in docs/configuration.md.
# yaml-language-server: $schema=docs/config.schema.json
"""

_RULE = {"operations": ["model-delete"], "models": ["prod-*"], "group": "operators", "signers_min": 2}
ITEMS: Mapping[str, tuple[type[Section], tuple[Mapping[str, Any], ...]]] = {
    "api_keys": (
        ApiKey,
        (
            {"name": "laptop", "key": "${env.GREENROOM_KEY}", "priority_max": "high", "admin": True},
            {"name": "trainer", "sha256": "0123456789abcdef" * 4, "tenant": "research", "leases": True}
            | {"limits": {"requests_per_minute": 60}},
            {
                "name": "team",
                "sha256": "fedcba9876543210" * 4,
                "expires": "2099-12-31",
                "models": ["llama-*"],
                "routes": ["/v1/**"],
                "verbs": ["load"],
            },
        ),
    ),
    "gpus": (Gpu, ({"memory_mib": 24576, "margin_mib": 512}, {"memory_mib": 8192})),
    "rules": (Quorum, (_RULE,)),
}
MACROS = {"models_dir": "/srv/models", "serve": "my-server --host 127.0.0.1 --port ${PORT}"}
# The two forms of `company`: the section, the keys above it, and sample values.
COMPANIES: tuple[tuple[type[Section], tuple[str, ...], Mapping[str, Any]], ...] = (
    (
        GroupSection,
        ("groups", "voice"),
        {"members": ["whisper"], "swap": False, "exclusive": False, "persistent": True},
    ),
    (MatrixSection, ("matrix",), {"vars": {"w": "whisper"}, "evict_costs": {"w": 5}, "sets": {"both": "chat & w"}}),
)
REMOTE = ("claude", {"provider": "anthropic", "api_key_env": "ANTHROPIC_API_KEY"})
LLAMACPP_MODEL = ("chat", {"engine": "llamacpp", "path": "models/chat.gguf"})
# Models of other engines: a sample, and what is said of it.
OTHER_MODELS: tuple[tuple[tuple[str, dict[str, Any]], str], ...] = (
    (
        ("writer", {"engine": "transformers", "path": "models/writer"}),
        "A model that sleeps in host memory and wakes in a moment: it may have the keys above but those marked "
        "llamacpp alone, and these.",
    ),
    (
        ("painter", {"engine": "diffusers", "path": "models/painter"}),
        "A pipeline that makes pictures and sleeps as the one before does: it may have the keys above that are marked "
        "diffusers, or with no engine, and these.",
    ),
    (
        ("large", {"engine": "vllm", "path": "models/large"}),
        "A model run by vLLM or SGLang, over several GPUs if need be: it may have the keys above that are marked vllm "
        "or sglang, or with no engine, and these.",
    ),
    (
        (
            "studio",
            {
                "engine": "comfyui",
                "path": "/opt/comfyui",
                "workflow": "sdxl.json",
                "inputs": {"prompt": "6.text", "seed": "3.seed"},
            },
        ),
        "A workflow of your own ComfyUI, asked for pictures: it may have the keys above that are marked comfyui, or "
        "with no engine, and these.",
    ),
    (
        ("dictation", {"engine": "whisper", "path": "large"}),
        "A model that turns speech into text: it may have the keys above that are marked whisper, or with no engine, "
        "and these.",
    ),
    (
        ("whisper", {"engine": "command", "cmd": "whisper-server --port ${PORT} --model models/whisper.bin"}),
        "A model run by any other program: it may have the keys above that are marked with no engine, and these.",
    ),
    (
        ("cloud", {"engine": "remote", "remote": "claude", "use_model_name": "claude-sonnet-4-5"}),
        "A model of a provider in `remotes`, which takes no memory: it may have the keys above that are marked with no "
        "engine and that say nothing of memory, devices or processes.",
    ),
)


def example() -> str:
    """The whole file. It loads without changes."""
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        above = _comment(descriptions(Config).get(name))
        if is_section(field.annotation):
            lines = [*_comment(field.annotation.__doc__), f"{name}:", *_indented(_options(field.annotation))]
        elif name == "models":
            lines = [*above, "models:", *_indented(_models())]
        elif name == "remotes":
            lines = [*above, "remotes:", *_indented(_named(Remote, *REMOTE, Remote.model_fields))]
        else:
            lines = list(_option(Config, name, {}))
        parts.append("\n".join(lines))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def said(value: object) -> str:
    """A value on one line of YAML."""
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, str) and _BARE.fullmatch(value) and plain(value) == value and ": " not in value:
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _named(section: type[Section], name: str, given: Mapping[str, Any], keys: Iterable[str]) -> Iterator[str]:
    yield f"{name}:"
    for key in keys:
        yield from _indented(_option(section, key, given))


def _options(section: type[Section]) -> Iterator[str]:
    for name in section.model_fields:
        yield from _option(section, name, {})


def _option(section: type[Section], name: str, given: Mapping[str, Any]) -> Iterator[str]:
    field = section.model_fields[name]
    value, sample = given.get(name, field.default), example_of(field)
    yield from _comment(descriptions(section).get(name))
    # A default that says nothing is shown with a sample.
    if sample is not None and not isinstance(value, bool | int | float | str):
        yield from _comment(f"{FOR_EXAMPLE} {said(sample)}")
    if name in ITEMS:
        yield from _as_comment([FOR_EXAMPLE, f"{name}:", *_items(name)])
    if name == "macros":
        yield from _as_comment([FOR_EXAMPLE, "macros:", *(f"  {key}: {said(text)}" for key, text in MACROS.items())])
    if name == "company":
        yield from _companies()
    yield f"{name}: {said(value)}"


def _companies() -> Iterator[str]:
    for section, (way, *below), sample in COMPANIES:
        lines = [line for key, value in sample.items() for line in _told(section, key, value)]
        for name in reversed(below):
            lines = [f"{name}:", *_indented(iter(lines))]
        lines = [*_comment(descriptions(Company)[way]), f"{way}:", *_indented(iter(lines))]
        yield from _as_comment([FOR_EXAMPLE, "company:", *_indented(iter(lines))])
        # An empty line keeps the two apart.
        yield ""


def _told(section: type[Section], key: str, value: object) -> list[str]:
    return [*_comment(descriptions(section).get(key)), f"{key}: {said(value)}"]


def _items(name: str) -> Iterator[str]:
    section, items = ITEMS[name]
    told: set[str] = set()
    for item in items:
        start = "  - "
        for key, value in item.items():
            if key not in told:
                yield from (f"    {line}" for line in _comment(descriptions(section).get(key)))
            told.add(key)
            yield f"{start}{key}: {said(value)}"
            start = "    "


def _models() -> Iterator[str]:
    """A model with the keys of all engines and those of llama.cpp, then one for each engine with keys of its own."""
    told = set(KEYS_OF_ENGINES["llamacpp"])
    others = frozenset().union(*KEYS_OF_ENGINES.values()) - told
    yield from _named(Model, *LLAMACPP_MODEL, [key for key in Model.model_fields if key not in others])
    for model, sentence in OTHER_MODELS:
        keys = KEYS_OF_ENGINES[model[1]["engine"]]
        yield ""
        yield from _comment(sentence)
        own = [key for key in Model.model_fields if key in keys - told]
        yield from _named(Model, *model, dict.fromkeys([*model[1], *own]))
        told |= keys


def _comment(sentence: str | None) -> list[str]:
    text = " ".join((sentence or "").split())
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)]


def _as_comment(lines: list[str]) -> list[str]:
    return [f"# {line}" for line in lines]


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" if line else "" for line in lines)


ROOT = Path(__file__).resolve().parents[3]
GUIDE = "docs/configuration.md"
BEGIN = "<!-- begin of the reference, written by python -m greenroom.config.generate -->"
END = "<!-- end of the reference -->"

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_ID = "urn:greenroom:config.schema.json"

# Nested sections, by the section they follow: their title, and their class.
_INSIDE: Mapping[str, tuple[tuple[str, type[Section]], ...]] = {
    "server": (("`server.api_keys[]`", ApiKey),),
    "governance": (("`governance.rules[]`", Quorum),),
    "scheduler": (
        ("`scheduler.company`", Company),
        ("`scheduler.company.groups.<name>`", GroupSection),
        ("`scheduler.company.matrix`", MatrixSection),
    ),
}
# Sections that stand in lists and mappings.
_OTHERS: tuple[tuple[str, type[Section]], ...] = (
    ("`tenants.<name>`, `limits` of a key or a model (without the last)", TenantLimits),
    ("`profiles.<name>`, its `clients.<pattern>` (without the last three)", Profile),
    ("`tasks.<name>`", Task),
    ("`tasks.<name>.require`", Require),
    ("`gpus[]`", Gpu),
    ("`remotes.<name>`", Remote),
    ("`cost` of a provider", TokenCost),
    ("`models.<id>`", Model),
)
_WORDS = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}


def generated(root: Path) -> dict[str, str]:
    """The text each file should have, by its path below the root of the repository."""
    return {
        "config.example.yaml": example(),
        "docs/config.schema.json": _with_a_line_for_each_key(json_schema()),
        GUIDE: with_reference((root / GUIDE).read_text(encoding="utf-8")),
    }


def with_reference(guide: str) -> str:
    """The guide with a fresh reference between the markers. Raises ValueError if a marker is missing."""
    before, _, rest = guide.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{GUIDE} needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def outdated(root: Path) -> dict[str, str]:
    """The files that are missing or out of date, with the text each should have."""
    return {
        name: text
        for name, text in generated(root).items()
        if not (root / name).is_file() or (root / name).read_text("utf-8") != text
    }


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m greenroom.config.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check_only = parser.parse_args(argv).check
    stale = outdated(root)
    for name, text in stale.items():
        if not check_only:
            (root / name).write_text(text, encoding="utf-8")
    did = "is out of date; run python -m greenroom.config.generate" if check_only else "written"
    sys.stdout.writelines(f"{name} {did}\n" for name in stale)
    return 1 if stale and check_only else 0


def json_schema() -> dict[str, Any]:
    made = Config.model_json_schema()
    return {"$schema": SCHEMA_DIALECT, "$id": SCHEMA_ID, **made, "title": "Greenroom configuration"}


def _with_a_line_for_each_key(schema: Mapping[str, Any]) -> str:
    """As text whose lines name what changed."""
    text = json.dumps(schema, indent=1, separators=(",", ":"), ensure_ascii=False) + "\n"
    return re.sub(r"\n(?: {5,}| {4}(?=[}\]]))", "", text)


def tables() -> str:
    """One table for each section, in the order of the file."""
    tops = {name: field for name, field in Config.model_fields.items() if not is_section(field.annotation)}
    parts = [_table("Top level", Config, tops)]
    for name, field in Config.model_fields.items():
        if is_section(field.annotation):
            parts.append(_table(f"`{name}`", field.annotation, above=(field,)))
            parts += [_table(*inside) for inside in _INSIDE.get(name, ())]
    gpus = Config.model_fields["gpus"]
    parts += [_table(title, section, above=(gpus,) if section is Gpu else ()) for title, section in _OTHERS]
    parts.append(_environment())
    return "\n\n".join(parts)


def _environment() -> str:
    head = ["### Environment", "", "Variables that set a key: they win over the file, and the command line over them."]
    rows = (f"| `{row.name}` | {f'`{row.key}`' if row.key else ''} | {row.sentence} |" for row in TABLE)
    return "\n".join([*head, "", "| variable | key | meaning |", "|---|---|---|", *rows])


def _table(
    title: str, section: type[Section], keys: Iterable[str] | None = None, above: tuple[FieldInfo, ...] = ()
) -> str:
    head = [f"### {title}", "", section.__doc__ or "", "", "| key | value | default | on reload | meaning |"]
    return "\n".join([*head, "|---|---|---|---|---|", *_rows(section, keys or section.model_fields, above)])


def _rows(section: type[Section], keys: Iterable[str], above: tuple[FieldInfo, ...]) -> Iterator[str]:
    schema = section.model_json_schema()
    for key in keys:
        field = section.model_fields[key]
        default = "needed" if field.is_required() else "" if field.default is None else f"`{said(field.default)}`"
        kind = _kind(schema["properties"][key], schema.get("$defs", {}))
        is_apart = section is Config and key in COMPARED_ELSEWHERE
        on_reload = "as a diff" if is_apart else reload_of(field, *above).value
        cells = (f"`{key}`", kind, default, on_reload, " ".join(descriptions(section).get(key, "").split()))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kind(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _kind(defs[schema["$ref"].rsplit("/", 1)[-1]], defs)
    if "anyOf" in schema:
        return " or ".join(_kind(each, defs) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'], defs)}"
    if schema.get("type") == "object":
        return "mapping"
    return _WORDS.get(schema.get("type", ""), "any value") + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    if "exclusiveMinimum" in schema:
        return f" > {schema['exclusiveMinimum']}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None and high <= 65535:
        return f" {low}…{high}"
    return f" ≥ {low}" if low is not None else ""


if __name__ == "__main__":
    sys.exit(main())
