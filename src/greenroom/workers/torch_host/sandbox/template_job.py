"""Renders chat templates, in a sandbox process.

Owns the world a template sees, which is the one Transformers 5 gives it. Never imports torch, Transformers or anything
of ours: `program.py` loads this module by its path, and the bounds of the process are set there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Compiled templates that are kept. A worker seldom hosts more models that chat, and one more costs milliseconds.
COMPILED_MAX: Final = 16
# A template's own error message is passed on, but not a whole conversation.
COMPLAINT_CHARS_MAX: Final = 500

Order = Mapping[str, Any]


def answer(raw: bytes) -> tuple[bytes, bytes]:
    """The prompt of an order, whatever its template does. Raises MemoryError. The words: `text` and the prompt, `fail`
    and what the template complained about, `long` and how many characters the prompt would have had."""
    try:
        order = json.loads(raw)
        text = render(order)
        if len(text) > order["chars_max"]:
            return b"long", str(len(text)).encode()
        return b"text", text.encode()
    except MemoryError:
        raise
    except Exception as error:
        return b"fail", str(error)[:COMPLAINT_CHARS_MAX].encode(errors="replace")


def render(order: Order) -> str:
    """The prompt of this order. Raises whatever its template does."""
    given = {
        **order["names"],
        "messages": [thoughtful(message) for message in order["messages"]],
        "tools": order["tools"],
        "documents": None,
        "add_generation_prompt": True,
    }
    return str(compiled(order["template"]).render(given))


def thoughtful(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reasoning has three names in the wild. Whichever a message uses, templates find it by the two that they read."""
    names = ("reasoning_content", "thinking", "reasoning")
    thought = next((message[name] for name in names if message.get(name) is not None), None)
    if thought is None:
        return message
    # The order of the keys matters to templates that write a message as JSON.
    return {"thinking": thought, **message, "reasoning_content": thought}


@functools.lru_cache(COMPILED_MAX)
def compiled(source: str) -> Any:
    """Each template has its own environment, so that none leaves anything behind for another."""
    world = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    world.filters["tojson"] = to_json
    world.globals.update(raise_exception=complain, strftime_now=now_as, dict=DictMaker(), namespace=PlainNamespace)
    return world.from_string(source)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, does not escape HTML: models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def complain(message: Any) -> None:
    raise TemplateError(message)


def now_as(format: str) -> str:
    return datetime.now().strftime(format)


class GenerationBlock(Extension):  # type: ignore[misc, unused-ignore]
    """`{% generation %}…{% endgeneration %}` marks a model's text for training. Here it is rendered like the rest."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, because variables set within it must not be visible after it.
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller: Callable[[], str]) -> str:
        return caller()


class DictMaker:
    """`dict` for templates: creates dictionaries, and exposes nothing else of the type."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class PlainNamespace(Namespace):  # type: ignore[misc, unused-ignore]
    """Keeps what a template sets, but refuses names that Python itself looks for."""

    def __init__(*args: Any, **fields: Any) -> None:
        # There is no parameter `self`, so that a field may have that name.
        own, *given = args
        kept = dict(*given, **fields)
        for name in kept:
            check_plain(name)
        Namespace.__init__(own, kept)

    def __setitem__(self, name: str, value: Any) -> None:
        check_plain(name)
        Namespace.__setitem__(self, name, value)


def check_plain(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A namespace cannot keep {name[:40]!r}: names in it must not begin with an underscore.")
