"""Writes the files that are generated from the schema: the example, the JSON schema and the reference in the docs.

`python -m greenroom.config.generate` writes them; with `--check` it only lists those that are out of date. Owns the
layout, and the samples for options that have no default worth showing. Everything else comes from the schema.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from greenroom.config.diff import AT_ONCE_KEYS, NEW_SLOT_KEYS, RESTART_KEYS
from greenroom.config.environment import TABLE
from greenroom.config.reader import plain
from greenroom.config.schema import (
    ApiKey,
    ClientProfile,
    Company,
    Config,
    Gpu,
    Group,
    Matrix,
    Model,
    Profile,
    Quorum,
    RateLimits,
    Section,
    TenantLimits,
)
from greenroom.config.sections.engine_keys import (
    COMFYUI_KEYS,
    COMMAND_KEYS,
    DIFFUSERS_KEYS,
    KEYS_OF_ENGINES,
    LLAMACPP_KEYS,
    SERVER_KEYS,
    TRANSFORMERS_KEYS,
    WHISPER_KEYS,
)

WIDTH = 118
FOR_EXAMPLE = "For example:"
_BARE = re.compile(r"[A-Za-z0-9/.~][A-Za-z0-9/._ ${}=-]*")

HEAD = """\
# Every option of Greenroom with its default and a sentence. Copy what you need: all of it may be left out but models.
# Written by `python -m greenroom.config.generate` from the schema; the words around it are in docs/configuration.md.
# yaml-language-server: $schema=docs/config.schema.json
"""

# Sample values for options whose default is None or empty.
SAMPLES: Mapping[str, Any] = {
    "signers": {"alice": "0123456789abcdef" * 4, "bob": "fedcba9876543210" * 4},
    "signer_groups": {"operators": ["alice", "bob"]},
    "key_path": "/etc/safebox/model-api.key",
    "audit_path": "/var/log/greenroom/audit.jsonl",
    "allowed_hosts": ["models.example.org"],
    "allowed_origins": ["https://chat.example.org"],
    "forward_headers": ["x-trace-id"],
    "memory_mib": 6144,
    "cmd_stop": "docker stop whisper",
    "env": {"OMP_NUM_THREADS": "4"},
    "cwd": "/srv/models",
    "program": "/opt/llama.cpp/bin/llama-server",
    "python": "/opt/llama/bin/python",
    "threads": 8,
    "mmproj": "models/mmproj.gguf",
    "lora": {"models/lora.gguf": 0.5},
    "draft_model": "models/draft.gguf",
    "chat_template": "chatml",
    "args": ["--cache-ram", "0"],
    "aliases": ["gpt-4o-mini", "default"],
    "versions": {"repo_id": "org/name", "keep": 2},
    "name": "Qwen 7B",
    "description": "Good at code.",
    "metadata": {"licence": "apache-2.0"},
    "use_model_name": "Qwen/Qwen2.5-7B-Instruct",
    "strip_params": ["logit_bias"],
    "set_params": {"temperature": 0.7},
    "routes": ["/tokenize", "/v1/images/*"],
    "media_hosts": ["pictures.example.org"],
    "devices": ["gpu0"],
    "abilities": ["chat", "vision"],
    "concurrency": 4,
    "cache_tokens": 32768,
    "quantization": "fp8",
    "checkpoints": "/opt/comfyui/models/checkpoints",
    "model_roots": ["/srv/models"],
    "roots": ["/srv/more-models"],
    "hosts": ["files.example.org"],
    "bandwidth_mib_s": 50,
    "limits": {"requests_per_minute": 600, "concurrent_max": 8},
    "errors_max": 50,
    "profiles": {"editors": {"keys": ["team-*"], "default_model": "chat", "clients": {"bot-*": {"priority": "low"}}}},
    "tenants": {"default": {"requests_per_minute": 50}, "lab": {"requests_per_minute": 500, "queue_depth_max": 100}},
}
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
    (Group, ("groups", "voice"), {"members": ["whisper"], "swap": False, "exclusive": False, "persistent": True}),
    (Matrix, ("matrix",), {"vars": {"w": "whisper"}, "evict_costs": {"w": 5}, "sets": {"both": "chat & w"}}),
)
LLAMACPP_MODEL = ("chat", {"engine": "llamacpp", "path": "models/chat.gguf"})
# Models of other engines: a sample, the keys it is shown with, and what is said of it.
OTHER_MODELS: tuple[tuple[tuple[str, dict[str, Any]], frozenset[str], str], ...] = (
    (
        ("writer", {"engine": "transformers", "path": "models/writer"}),
        TRANSFORMERS_KEYS,
        "A model that sleeps in host memory and wakes in a moment: it may have the keys above but those marked "
        "llamacpp alone, and these.",
    ),
    (
        ("painter", {"engine": "diffusers", "path": "models/painter"}),
        DIFFUSERS_KEYS,
        "A pipeline that makes pictures and sleeps as the one before does: it may have the keys above that are marked "
        "diffusers, or with no engine, and these.",
    ),
    (
        ("large", {"engine": "vllm", "path": "models/large"}),
        SERVER_KEYS,
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
        COMFYUI_KEYS,
        "A workflow of your own ComfyUI, asked for pictures: it may have the keys above that are marked comfyui, or "
        "with no engine, and these.",
    ),
    (
        ("dictation", {"engine": "whisper", "path": "large"}),
        WHISPER_KEYS,
        "A model that turns speech into text: it may have the keys above that are marked whisper, or with no engine, "
        "and these.",
    ),
    (
        ("whisper", {"engine": "command", "cmd": "whisper-server --port ${PORT} --model models/whisper.bin"}),
        COMMAND_KEYS,
        "A model run by any other program: it may have the keys above that are marked with no engine, and these.",
    ),
)


def example() -> str:
    """The whole file. It loads without changes."""
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            parts.append("\n".join([*_comment(kind.__doc__), f"{name}:", *_indented(_options(kind))]))
        elif name == "models":
            parts.append("\n".join([*_comment(field.description), "models:", *_indented(_models())]))
        else:
            parts.append("\n".join(_option(name, field.description, field.default)))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def said(value: object) -> str:
    """A value on one line of YAML."""
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, str) and _BARE.fullmatch(value) and plain(value) == value and ": " not in value:
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _options(section: type[Section]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield from _option(name, field.description, field.default)


def _option(name: str, sentence: str | None, value: object) -> Iterator[str]:
    yield from _comment(sentence)
    # A default that says nothing is shown with a sample.
    if name in SAMPLES and not isinstance(value, bool | int | float | str):
        yield from _comment(f"{FOR_EXAMPLE} {said(SAMPLES[name])}")
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
        lines = [*_comment(Company.model_fields[way].description), f"{way}:", *_indented(iter(lines))]
        yield from _as_comment([FOR_EXAMPLE, "company:", *_indented(iter(lines))])
        # An empty line keeps the two apart.
        yield ""


def _told(section: type[Section], key: str, value: object) -> list[str]:
    return [*_comment(section.model_fields[key].description), f"{key}: {said(value)}"]


def _items(name: str) -> Iterator[str]:
    section, items = ITEMS[name]
    told: set[str] = set()
    for item in items:
        start = "  - "
        for key, value in item.items():
            if key not in told:
                yield from (f"    {line}" for line in _comment(section.model_fields[key].description))
            told.add(key)
            yield f"{start}{key}: {said(value)}"
            start = "    "


def _models() -> Iterator[str]:
    """A model with the keys of all engines and those of llama.cpp, then one for each engine with keys of its own."""
    others = frozenset().union(*KEYS_OF_ENGINES.values()) - LLAMACPP_KEYS
    yield from _model(*LLAMACPP_MODEL, [key for key in Model.model_fields if key not in others])
    told = set(LLAMACPP_KEYS)
    for model, keys, sentence in OTHER_MODELS:
        yield ""
        yield from _comment(sentence)
        own = [key for key in Model.model_fields if key in keys - told]
        yield from _model(*model, list(dict.fromkeys([*model[1], *own])))
        told |= keys


def _model(name: str, given: Mapping[str, str], keys: list[str]) -> Iterator[str]:
    yield f"{name}:"
    for key in keys:
        field = Model.model_fields[key]
        yield from _indented(_option(key, field.description, given.get(key, field.default)))


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

# Nested sections: the section they follow, their title, and the key that a reload compares.
_INSIDE: Mapping[str, tuple[tuple[str, type[Section], str], ...]] = {
    "server": (("`server.api_keys[]`", ApiKey, "server.api_keys"),),
    "governance": (("`governance.rules[]`", Quorum, "governance.rules"),),
    "scheduler": (
        ("`scheduler.company`", Company, "scheduler.company"),
        ("`scheduler.company.groups.<name>`", Group, "scheduler.company"),
        ("`scheduler.company.matrix`", Matrix, "scheduler.company"),
    ),
}
_WORDS = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}


def generated(root: Path) -> dict[str, str]:
    """The text each file should have, by its path below the root of the repository."""
    return {
        "config.example.yaml": example(),
        "docs/config.schema.json": json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
        GUIDE: with_reference((root / GUIDE).read_text(encoding="utf-8")),
    }


def with_reference(guide: str) -> str:
    """The guide with a fresh reference between the markers. Raises ValueError if a marker is missing."""
    before, _, rest = guide.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{GUIDE} needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def outdated(root: Path) -> list[str]:
    wanted = generated(root)
    return [name for name in wanted if not (root / name).is_file() or (root / name).read_text("utf-8") != wanted[name]]


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m greenroom.config.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check_only = parser.parse_args(argv).check
    stale = outdated(root)
    for name, text in generated(root).items():
        if name in stale and not check_only:
            (root / name).write_text(text, encoding="utf-8")
    did = "is out of date; run python -m greenroom.config.generate" if check_only else "written"
    sys.stdout.writelines(f"{name} {did}\n" for name in stale)
    return 1 if stale and check_only else 0


def json_schema() -> dict[str, Any]:
    made = Config.model_json_schema()
    return {"$schema": SCHEMA_DIALECT, "$id": SCHEMA_ID, **made, "title": "Greenroom configuration"}


def tables() -> str:
    """One table for each section, in the order of the file."""
    parts = [_table("Top level", Config, "", [name for name in Config.model_fields if not _is_section(name)])]
    for name in filter(_is_section, Config.model_fields):
        section = Config.model_fields[name].annotation
        assert isinstance(section, type) and issubclass(section, Section)
        parts.append(_table(f"`{name}`", section, f"{name}."))
        parts += [_table(*inside) for inside in _INSIDE.get(name, ())]
    parts.append(_table("`limits` of a key or a model", RateLimits, "tenants"))
    parts.append(_table("`tenants.<name>`", TenantLimits, "tenants"))
    parts.append(_table("`profiles.<name>`", Profile, "profiles"))
    parts.append(_table("`profiles.<name>.clients.<pattern>`", ClientProfile, "profiles"))
    parts.append(_table("`gpus[]`", Gpu, "gpus"))
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
        cells = (f"`{key}`", kind, default, _on_reload(prefix, key), " ".join((field.description or "").split()))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _on_reload(prefix: str, key: str) -> str:
    if prefix == "models.":
        return "new engine" if key in NEW_SLOT_KEYS else "at once"
    full = prefix if prefix and not prefix.endswith(".") else prefix + key
    if full in RESTART_KEYS:
        return "restart"
    return "at once" if full in AT_ONCE_KEYS else "as a diff"


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
