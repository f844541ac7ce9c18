"""The example file: every option with its default and a sentence, from the schema.

Owns the layout, and samples that need more than a line; others are marks of their fields.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from greenroom.config.described import descriptions
from greenroom.config.kinds import is_section
from greenroom.config.marks import example_of
from greenroom.config.reader import plain
from greenroom.config.schema import (
    ApiKey,
    Company,
    Config,
    Gpu,
    GroupSection,
    MatrixSection,
    Model,
    Quorum,
    Remote,
    Section,
)
from greenroom.config.sections.model import KEYS_OF_ENGINES

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
