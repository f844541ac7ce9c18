"""Problems of a file and how they are reported: one line for each, with file, line and key.

Owns the record of a problem and the text of the refusal. Finds no problems: reader, macros and schema do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic_core import PydanticCustomError

from greenroom.errors import ConfigError

# The path from the top of the file to a value: keys and positions in lists.
Where = tuple[str | int, ...]
Lines = Mapping[Where, int]

# More than this is one mistake repeated, and would scroll the first one away.
PROBLEMS_MAX = 20
SHOWN_MAX = 40
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_/:@+-]+")


@dataclass(frozen=True, slots=True)
class Problem:
    where: Where
    message: str
    # Set only if it is not the line of the key itself, as for the second of two equal keys.
    line: int | None = None


def refusal(file: str, problems: Iterable[Problem], lines: Lines) -> ConfigError:
    """One error for all problems of a file, ordered by line."""
    numbered = {(problem.line or line_of(problem.where, lines), _sentence(problem)): None for problem in problems}
    ordered = sorted(numbered, key=lambda entry: entry[0])
    told = [f"{file}:{line}: {sentence}" for line, sentence in ordered[:PROBLEMS_MAX]]
    if len(ordered) > PROBLEMS_MAX:
        told.append(f"{file}: and {len(ordered) - PROBLEMS_MAX} more")
    return ConfigError("\n".join(told))


def line_of(where: Where, lines: Lines) -> int:
    """The line of a value, or of the nearest enclosing one in the file."""
    while where and where not in lines:
        where = where[:-1]
    return lines.get(where, 1)


def dotted(where: Where) -> str:
    """`models.qwen.aliases[0]`. Quotes ambiguous keys and escapes control characters."""
    text = ""
    for step in where:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            key = step if _PLAIN_KEY.fullmatch(step) else json.dumps(step, ensure_ascii=not step.isprintable())
            text += f".{key}" if text else key
    return text


def shown(value: object) -> str:
    """A value on one line, shortened for messages."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…"


def break_on(problems: Iterable[Problem]) -> None:
    """Inside a validator: refuse the value if there are problems. Each keeps its own place."""
    found = tuple(problems)
    if found:
        text = "; ".join(_sentence(problem) for problem in found)
        raise PydanticCustomError("rules", "{text}", {"text": text, "problems": found})


def _sentence(problem: Problem) -> str:
    key = dotted(problem.where)
    return f"{key}: {problem.message}" if key else problem.message
