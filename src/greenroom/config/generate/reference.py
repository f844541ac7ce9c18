"""Writes the files that are generated from the schema: the example, the JSON schema and the reference in the docs.

`python -m greenroom.config.generate` writes them; with `--check` it only lists those that are out of date. Owns the
tables of the reference; `example.py` has the example. Everything they say comes from the schema.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from greenroom.config.described import descriptions
from greenroom.config.diff import AT_ONCE_KEYS, NEW_SLOT_KEYS, RESTART_KEYS
from greenroom.config.environment import TABLE
from greenroom.config.generate.example import example, said
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
from greenroom.config.sections.remotes import TokenCost

ROOT = Path(__file__).resolve().parents[4]
GUIDE = "docs/configuration.md"
BEGIN = "<!-- begin of the reference, written by python -m greenroom.config.generate -->"
END = "<!-- end of the reference -->"

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_ID = "urn:greenroom:config.schema.json"

# Nested sections: the section they follow, their title, and the key that a reload compares.
_INSIDE: Mapping[str, tuple[tuple[str, type[Section], str], ...]] = {
    "server": (("`server.api_keys[]`", ApiKey, "server.api_keys"),),
    "governance": (("`governance.rules[]`", Quorum, "governance.rules"),),
    "scheduler": (
        ("`scheduler.company`", Company, "scheduler.company"),
        ("`scheduler.company.groups.<name>`", GroupSection, "scheduler.company"),
        ("`scheduler.company.matrix`", MatrixSection, "scheduler.company"),
    ),
}
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
    parts = [_table("Top level", Config, "", [name for name in Config.model_fields if not _is_section(name)])]
    for name in filter(_is_section, Config.model_fields):
        section = Config.model_fields[name].annotation
        assert isinstance(section, type) and issubclass(section, Section)
        parts.append(_table(f"`{name}`", section, f"{name}."))
        parts += [_table(*inside) for inside in _INSIDE.get(name, ())]
    parts.append(_table("`tenants.<name>`, `limits` of a key or a model (without the last)", TenantLimits, "tenants"))
    parts.append(_table("`profiles.<name>`, its `clients.<pattern>` (without the last three)", Profile, "profiles"))
    parts.append(_table("`tasks.<name>`", Task, "tasks"))
    parts.append(_table("`tasks.<name>.require`", Require, "tasks"))
    parts.append(_table("`gpus[]`", Gpu, "gpus"))
    parts.append(_table("`remotes.<name>`", Remote, "remotes"))
    parts.append(_table("`cost` of a provider", TokenCost, "remotes"))
    parts.append(_table("`models.<id>`", Model, "models."))
    parts.append(_environment())
    return "\n\n".join(parts)


def _environment() -> str:
    head = ["### Environment", "", "Variables that set a key: they win over the file, and the command line over them."]
    rows = (f"| `{row.name}` | {f'`{row.key}`' if row.key else ''} | {row.sentence} |" for row in TABLE)
    return "\n".join([*head, "", "| variable | key | meaning |", "|---|---|---|", *rows])


def _is_section(name: str) -> bool:
    kind = Config.model_fields[name].annotation
    return isinstance(kind, type) and issubclass(kind, Section)


def _table(title: str, section: type[Section], prefix: str, keys: list[str] | None = None) -> str:
    head = [f"### {title}", "", section.__doc__ or "", "", "| key | value | default | on reload | meaning |"]
    return "\n".join([*head, "|---|---|---|---|---|", *_rows(section, prefix, keys or list(section.model_fields))])


def _rows(section: type[Section], prefix: str, keys: list[str]) -> Iterator[str]:
    schema = section.model_json_schema()
    for key in keys:
        field = section.model_fields[key]
        default = "needed" if field.is_required() else "" if field.default is None else f"`{said(field.default)}`"
        kind = _kind(schema["properties"][key], schema.get("$defs", {}))
        cells = (
            f"`{key}`",
            kind,
            default,
            _on_reload(prefix, key),
            " ".join(descriptions(section).get(key, "").split()),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _on_reload(prefix: str, key: str) -> str:
    if prefix == "models.":
        return "new engine" if key in NEW_SLOT_KEYS else ""
    full = prefix if prefix and not prefix.endswith(".") else prefix + key
    if full in RESTART_KEYS:
        return "restart"
    return "" if full in AT_ONCE_KEYS else "as a diff"


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
