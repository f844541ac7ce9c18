"""Arguments of engines as their parsers read them: `--x y`, `--x=y`, `--x.part y`, `--x_y`, and beginnings of names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeVar

Known = TypeVar("Known")

WORDS_MAX: Final = 1_024
# These are Python programs, whose parsers take the beginning of a name for the whole.
_ABBREVIATING: Final = frozenset({"vllm", "sglang"})


def written(engine: str, args: Sequence[str], known: Mapping[str, Known]) -> Iterator[tuple[int, str, str, Known]]:
    """Those of the `known` arguments that are there: the position, the name as it stands, its value, what is known."""
    for position, word in enumerate(args[:WORDS_MAX]):
        said, is_joined, value = word.partition("=")
        whole = _whole(engine, argument_name(said), known)
        if whole is None:
            continue
        if not is_joined:
            value = args[position + 1] if position + 1 < len(args) else ""
        yield position, said, value, known[whole]


def is_abbreviating(engine: str) -> bool:
    return engine in _ABBREVIATING


def argument_name(said: str) -> str:
    name = said.partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _whole(engine: str, name: str, known: Mapping[str, Known]) -> str | None:
    if name in known:
        return name
    if not is_abbreviating(engine) or not name.startswith("-") or name in ("-", "--"):
        return None
    return next((whole for whole in known if whole.startswith(name)), None)
