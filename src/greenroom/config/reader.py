"""Reads YAML into a plain tree with the line of every value, and reports problems by file, line and key.

Owns the dialect: text, whole numbers, numbers, true and false, lists and mappings. Keys are always text, a repeated
key is refused, and only `true`, `false` and `null` are special words, so that `flash_attn: on` stays text; as keys
these are refused unless they are quoted. Gives no meaning to keys: the schema does. Size, depth and number of values
are bounded. `Problem` and `refusal` are used by everything that checks a file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic_core import PydanticCustomError

from greenroom.base.plain_file import FileTooLarge, NotPlainFile, read_plain, why
from greenroom.errors import ConfigError

# The path from the top of the file to a value: keys and positions in lists.
Where = tuple[str | int, ...]
Lines = Mapping[Where, int]

# More than this is one mistake repeated, and would scroll the first one away.
PROBLEMS_MAX = 20
SHOWN_MAX = 40
# Of what an environment variable says.
_NO_LINE = 0
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_/:@+-]+")


@dataclass(frozen=True, slots=True)
class Problem:
    where: Where
    message: str
    # Set only if it is not the line of the key itself, as for the second of two equal keys.
    line: int | None = None
    # The environment variable that it is about, if it is about one.
    variable: str | None = None


class FileRefused(ConfigError):
    """A file with problems. The message has a line for each.

    `of_variables` are the sentences about environment variables; `problems` are all others.
    """

    def __init__(self, message: str, problems: tuple[Problem, ...], of_variables: tuple[str, ...]) -> None:
        super().__init__(message)
        self.problems = problems
        self.of_variables = of_variables


def refusal(file: str, problems: Iterable[Problem], lines: Lines) -> FileRefused:
    """One error for all problems of a file, ordered by line; first those of an environment variable, by its name."""
    found = list(problems)
    numbered = {_told(problem, file, lines): None for problem in found}
    ordered = sorted(numbered, key=lambda entry: entry[0])
    told = [sentence for _, sentence in ordered[:PROBLEMS_MAX]]
    if len(ordered) > PROBLEMS_MAX:
        told.append(f"{file}: and {len(ordered) - PROBLEMS_MAX} more")
    of_file = tuple(problem for problem in found if problem.variable is None)
    return FileRefused("\n".join(told), of_file, tuple(sentence for line, sentence in ordered if line == _NO_LINE))


def _told(problem: Problem, file: str, lines: Lines) -> tuple[int, str]:
    if problem.variable is not None:
        where = dotted(problem.where)
        return _NO_LINE, f"the environment variable {problem.variable} ({where}): {problem.message}"
    line = problem.line or line_of(problem.where, lines)
    return line, f"{file}:{line}: {_sentence(problem)}"


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


FILE_BYTES_MAX = 4 * 1024 * 1024
# A configuration is five deep; recursive parsers fail at some hundreds.
DEPTH_MAX = 32
# Aliases can expand a small file into a huge tree.
VALUES_MAX = 200_000

Scalar = str | int | float | bool | None
Value = Scalar | list["Value"] | dict[str, "Value"]

Parser = type[yaml.SafeLoader | yaml.CSafeLoader]
FASTEST: Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]{1,16}")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
# Longer digits are not a number: a hash in hex may look like one.
_NUMBER_CHARS_MAX = 30
_WORDS: dict[str, Scalar] = {"": None, "~": None, "null": None, "true": True, "false": False}
_MERGE = "<<"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as read: its tree, the line of every value, and the problems that did not stop the reading."""

    tree: dict[str, Value]
    lines: dict[Where, int]
    problems: tuple[Problem, ...]


def read(path: Path, parser: Parser = FASTEST) -> SourceFile:
    """Read a file. Raises ConfigError if it cannot be read as one mapping."""
    text = _text(path)
    try:
        _check_size(path, text, parser)
        node = parser(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _bad_yaml(path, text, error) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if node is None:
        raise ConfigError(f"{path}: is empty; give models, or at least one other key")
    tree = _Tree(path)
    root = tree.value(node, (), 0)
    if not isinstance(root, dict):
        raise _refused(path, node.start_mark.line + 1, "must be a mapping with keys such as server and models")
    if not root:
        raise ConfigError(f"{path}: says nothing; give models, or at least one other key")
    return SourceFile(root, tree.lines, tuple(tree.problems))


def _text(path: Path) -> str:
    data = _bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(path, data.count(b"\n", 0, error.start) + 1, "is not UTF-8 text") from None
    if control := _CONTROL.search(text):
        line = text.count("\n", 0, control.start()) + 1
        raise _refused(path, line, f"holds the control character U+{ord(control.group()):04X}")
    return text


def _bytes(path: Path) -> bytes:
    try:
        return read_plain(path, FILE_BYTES_MAX)
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; name the file in it") from None
    except NotPlainFile:
        raise ConfigError(f"{path}: is not a plain file") from None
    except FileTooLarge:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX // 1024 // 1024} MiB") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {why(error)}") from None


def _check_size(path: Path, text: str, parser: Parser) -> None:
    """Check bounds on the events, which takes no recursion, before anything that recurses."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=parser)):
        line = 1 + (event.start_mark.line if event.start_mark else 0)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEPTH_MAX:
            raise _refused(path, line, f"is nested more than {DEPTH_MAX} deep")
        if count > VALUES_MAX:
            raise _refused(path, line, f"holds more than {VALUES_MAX:,} values")
        if (tag := getattr(event, "tag", None)) is not None:
            raise _refused(path, line, f"has the tag {tag}; tags have no use here, put text into quotes")


@dataclass(slots=True)
class _Tree:
    path: Path
    lines: dict[Where, int] = field(default_factory=lambda: {(): 1})
    problems: list[Problem] = field(default_factory=list)
    left: int = VALUES_MAX

    def value(self, node: yaml.Node, where: Where, depth: int) -> Value:
        self.left -= 1
        if self.left < 0 or depth > DEPTH_MAX:
            raise _refused(self.path, node.start_mark.line + 1, "repeats itself through aliases beyond all bounds")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, (*where, at), depth) for at, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, where)

    def _item(self, node: yaml.Node, where: Where, depth: int) -> Value:
        self.lines[where] = node.start_mark.line + 1
        return self.value(node, where, depth + 1)

    def _mapping(self, node: yaml.MappingNode, where: Where, depth: int) -> dict[str, Value]:
        """Own keys win over keys merged by <<; among merged mappings the first wins."""
        own: dict[str, Value] = {}
        merged: dict[str, Value] = {}
        lines_of_merged: dict[Where, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(where, "a key must be text, not a list or a mapping", line))
            elif key_node.value == _MERGE and not key_node.style:
                merged, lines_of_merged = self._merged(value_node, where, depth)
            elif not key_node.style and key_node.value.lower() in _WORDS:
                word = key_node.value or "nothing"
                self.problems.append(
                    Problem(where, f"{word} stands for a key; put it in quotes if that is its name", line)
                )
            elif key_node.value in own:
                here = (*where, key_node.value)
                self.problems.append(Problem(here, f"is given twice, first on line {self.lines[here]}", line))
            else:
                here = (*where, key_node.value)
                self.lines[here] = line
                own[key_node.value] = self.value(value_node, here, depth + 1)
        return self._joined(own, merged, lines_of_merged, where)

    def _joined(
        self, own: dict[str, Value], merged: dict[str, Value], lines: dict[Where, int], where: Where
    ) -> dict[str, Value]:
        added = {key: value for key, value in merged.items() if key not in own}
        size = len(where)
        self.lines.update({at: line for at, line in lines.items() if len(at) > size and at[size] in added})
        return {**own, **added}

    def _merged(self, node: yaml.Node, where: Where, depth: int) -> tuple[dict[str, Value], dict[Where, int]]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        into: dict[str, Value] = {}
        # Lines of merged keys are kept apart until it is known which of them win.
        apart = _Tree(self.path, left=self.left)
        for source in sources:
            value = apart.value(source, where, depth + 1)
            if isinstance(value, dict):
                into = {**value, **into}
            else:
                line = node.start_mark.line + 1
                self.problems.append(Problem((*where, _MERGE), "must name a mapping, such as <<: *defaults", line))
        self.left = apart.left
        self.problems += apart.problems
        return into, apart.lines

    def _scalar(self, node: yaml.ScalarNode, where: Where) -> Scalar:
        text: str = node.value
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            self.problems.append(Problem(where, "holds half of a surrogate pair, which is no character"))
        if "\0" in text:
            self.problems.append(Problem(where, "may not contain a NUL character"))
        # The style is the kind of quotes; the two parsers use different values for none.
        return text if node.style else plain(text)


def plain(text: str) -> Scalar:
    """The value of an unquoted text. Numbers too large for 64 bits stay text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > _NUMBER_CHARS_MAX:
        return text
    if _INT.fullmatch(text):
        number = int(text, 16) if text.startswith("0x") else int(text.replace("_", ""))
        return number if abs(number) < 2**63 else text
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def _bad_yaml(path: Path, text: str, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    if mark and "\t" in _indentation(text, mark.line):
        return _refused(path, mark.line + 1, "is not YAML: the line begins with a tab; indent it with spaces")
    begun = f" ({error.context}, begun on line {error.context_mark.line + 1})" if error.context_mark else ""
    return _refused(path, mark.line + 1 if mark else 1, f"is not YAML: {error.problem}{begun}")


def _indentation(text: str, line: int) -> str:
    # The end of the file may be past the last line.
    found = text.split("\n")[line : line + 1]
    return found[0][: len(found[0]) - len(found[0].lstrip())] if found else ""


def _refused(path: Path, line: int, message: str) -> ConfigError:
    return refusal(str(path), [Problem((), message, line)], {})
