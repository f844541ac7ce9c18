"""What validation finds wrong with a file, in words: where it is, what is wanted there, and which key was meant. Owns
the words, and which values are never shown because they may be secrets."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from greenroom.config.kinds import HEADER_NAME, HEX_64, NO_CONTROLS, REMOTE_NAME, VARIABLE_NAME, is_section
from greenroom.config.reader import Lines, Problem, Where, shown
from greenroom.config.schema import Company, Config, Model, Section

_MOMENT = "a date and time, such as 2030-01-31T12:00:00Z,"
_WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "number_wanted": "a number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    **dict.fromkeys(("datetime_type", "datetime_parsing", "datetime_from_date_parsing"), _MOMENT),
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
}
# What a text with this pattern must be.
_PATTERNS = {
    HEADER_NAME: "is no name of a header",
    HEX_64: "must be 64 hexadecimal digits in lower case",
    NO_CONTROLS: "may not contain control characters",
    REMOTE_NAME: "has 1 to 32 lower-case letters, digits, - and _, and begins with a letter or digit",
    VARIABLE_NAME: "must be the name of an environment variable, not the key itself",
}
# Values below these keys may be secrets and are never shown.
SECRET_KEYS = frozenset({"key", "sha256", "env", "api_key_env"})
# Commands, their arguments and what is put into them may hold keys for what they start; numbers among them are none.
COMMAND_KEYS = frozenset({"cmd", "cmd_stop", "args", "macros"})


def problems_of(error: ValidationError, lines: Lines) -> Iterator[Problem]:
    """One problem for each place. A value with several allowed shapes fails once for each; these are joined."""
    by_place: dict[Where, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_place.setdefault(_place(detail, lines), []).append(detail)
    for where, details in by_place.items():
        deeper = any(len(other) > len(where) and other[: len(where)] == where for other in by_place)
        # An item of a list is wrong; do not also report that the list is not a text, or too short without the item.
        if deeper and all(detail["type"] in _WANTED or detail["type"] == "too_short" for detail in details):
            continue
        yield from told(where, details)


def _place(detail: ErrorDetails, lines: Lines) -> Where:
    """The path of the value in the file, without the schema's own names for alternatives."""
    where: Where = ()
    for step in detail["loc"]:
        if (*where, step) in lines:
            where = (*where, step)
    if detail["type"] == "missing":
        where = (*where, detail["loc"][-1])
    return where


def told(where: Where, details: list[ErrorDetails]) -> Iterator[Problem]:
    """What is wrong at one place of the configuration. Shows no value that may be a secret."""
    wanted = dict.fromkeys(want for detail in details if (want := _wanted(detail)))
    if wanted:
        yield Problem(where, _not_wanted(" or ".join(wanted), where, details[0]["input"]))
        return
    for detail in details:
        if detail["type"] == "rules":
            for problem in detail["ctx"]["problems"]:
                yield Problem((*where, *problem.where), problem.message)
        else:
            yield Problem(where, _message(where, detail))


def _wanted(detail: ErrorDetails) -> str | None:
    if detail["type"] in ("literal_error", "enum"):
        return "one of " + str(detail["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
    return _WANTED.get(detail["type"])


def _not_wanted(wanted: str, where: Where, value: object) -> str:
    if value is None:
        return f"{wanted} is wanted, but nothing is given"
    quotes = "; put it in quotes" if wanted == "text" and isinstance(value, int | float) else ""
    return f"{wanted} is wanted{_not_this(where, value)}{quotes}"


def _message(where: Where, detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(where)
    if kind == "missing":
        return "is needed"
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"must be {word} {context[key]:,.12g}{_not_this(where, detail['input'])}"
    if kind in ("string_too_short", "too_short"):
        return "may not be empty"
    if kind == "string_too_long":
        return f"may have at most {context['max_length']} characters"
    if kind == "too_long":
        return f"may have at most {context['max_length']} entries"
    if kind == "string_pattern_mismatch":
        hint = ", as `greenroom key new` prints them" if where[-1] == "sha256" else ""
        return _PATTERNS[context["pattern"]] + hint
    return str(context["error"]) if kind == "value_error" else detail["msg"]


def _not_this(where: Where, value: object) -> str:
    is_hidden = SECRET_KEYS.intersection(where) or (
        (COMMAND_KEYS | {"api_keys"}).intersection(where) and not isinstance(value, int | float)
    )
    return "" if is_hidden else f", not {shown(value)}"


def _unknown_key(where: Where) -> str:
    """Name the section where the key belongs; otherwise suggest the nearest key of this section."""
    key = str(where[-1])
    if home := _home_of(key):
        return f"unknown key here; {key} belongs {home}"
    return nearest_key(where, Config)


def nearest_key(where: Where, document: type[Section]) -> str:
    """What to say of a key that its section of this document does not have."""
    # Other tools write ctxSize or ctx-size: compare without case and separators.
    spellings = {_spelling(name): name for name in _section_at(where[:-1], document).model_fields}
    near = difflib.get_close_matches(_spelling(str(where[-1])), spellings, n=1)
    return f"unknown key, did you mean {spellings[near[0]]}?" if near else "unknown key"


def _spelling(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()


def _section_at(where: Where, document: type[Section]) -> type[Section]:
    kind: Any = document
    for step in where:
        if is_section(kind):
            kind = kind.model_fields[str(step)].annotation
        else:
            kind = get_args(kind)[1 if get_origin(kind) is dict else 0]
        kind = _unless_none(kind)
    section: type[Section] = kind
    return section


def _unless_none(kind: Any) -> Any:
    """The type inside an optional one."""
    return get_args(kind)[0] if type(None) in get_args(kind) else kind


def _home_of(key: str) -> str | None:
    if key in Config.model_fields:
        return "to the top level"
    if key in Model.model_fields:
        return "to a model, under models"
    for name, field in Config.model_fields.items():
        if is_section(field.annotation) and key in field.annotation.model_fields:
            return f"under {name}"
    return "under scheduler.company" if key in Company.model_fields else None
