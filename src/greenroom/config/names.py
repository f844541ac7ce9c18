"""Which ids a model may have.

An id is part of addresses (`/models/{id}/load`), of log lines and of headers, so some texts cannot be one. Aliases obey
the same rules. Never looks at more than one id at a time, except for clashes between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from greenroom.config.report import Problem, Where

ID_CHARS_MAX = 256

# These words follow /models/ in the management API, so a model may not be called by them.
RESERVED_IDS = frozenset({"load", "unload", "loaded", "stats", "inventory", "download"})

# These words follow /models/{id}/ there: an id that ends in one could be read as a shorter id and an order.
RESERVED_ENDINGS = frozenset({"load", "unload", "logs", "sleep", "prepare"})


def id_problem(name: str) -> str | None:
    """Why this text cannot be an id; None if it can."""
    segments = name.split("/")
    if not name:
        return "an id may not be empty"
    if len(name) > ID_CHARS_MAX:
        return f"an id has at most {ID_CHARS_MAX} characters, this one has {len(name):,}"
    if not name.isprintable():
        return "an id may not contain control or invisible characters"
    if name != name.strip():
        return "an id may not begin or end with a space"
    if name in RESERVED_IDS:
        return f"{name} is a word of the management API and cannot be an id"
    if not all(segments):
        return "an id may not begin or end with / nor contain //"
    if "." in segments or ".." in segments:
        return "an id may not contain the path segments . or .."
    if segments[-1] in RESERVED_ENDINGS or segments[-2:] == ["logs", "stream"]:
        return f"an id may not end in /{segments[-1]}: that is an order of the management API"
    return None


def clashes(models: Iterable[tuple[str, Sequence[str]]]) -> Iterator[Problem]:
    """Aliases that are also an id, or are given twice. Takes ids with their aliases."""
    named = list(models)
    taken: dict[str, str] = {name: "is already a model's id" for name, _ in named}
    for name, aliases in named:
        for position, alias in enumerate(aliases):
            where: Where = ("models", name, "aliases", position)
            if alias in taken:
                yield Problem(where, f"{alias} {taken[alias]}")
            else:
                taken[alias] = f"is already an alias of {name}"
