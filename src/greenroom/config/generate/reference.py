"""Writes the files that are generated from the schema: the example, the JSON schema and the reference in the docs.

`python -m greenroom.config.generate` writes them; with `--check` it only lists those that are out of date. Owns the
tables of the reference; `example.py` has the example. Everything they say comes from the schema.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from greenroom.config.described import descriptions
from greenroom.config.diff import COMPARED_ELSEWHERE
from greenroom.config.environment import TABLE
from greenroom.config.generate.example import example, said
from greenroom.config.kinds import is_section
from greenroom.config.marks import reload_of
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
