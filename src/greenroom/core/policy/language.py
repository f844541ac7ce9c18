"""The language of sets of models: its grammar and its syntax tree.

    any  :=  all ( "|" all )*           one of these
    all  :=  atom ( "&" atom )*         these together
    atom :=  name  |  "+" name  |  "(" any ")"

A name is a model or a short name for one, `+name` is another set. Names consist of letters, digits and `_ - . / : @`.
Owns the grammar, its errors, and the order in which sets refer to each other. Does not know which models there are, nor
what a set means: `matrix.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

# Deeper than people nest by hand; it keeps every walk over a tree within the stack.
DEPTH_MAX: Final = 32
# Room for thousands of models; it limits the cost of one set.
EXPRESSION_CHARS_MAX: Final = 65_536

_SIGNS: Final = "|&+()"
_IN_NAMES: Final = "_-./:@"
_AN_ATOM: Final = "a model, +set or ("


class Mistake(ValueError):
    """What is wrong with a set, and at which character, counted from 1."""

    def __init__(self, set_name: str, at: int, message: str) -> None:
        super().__init__(f"set {set_name}, character {at}: {message}")
        self.set_name = set_name
        self.at = at
        self.message = message


@dataclass(frozen=True, slots=True)
class Name:
    """A model."""

    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Reference:
    """Another set."""

    text: str
    at: int


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of the parts; there are at least two."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class AllOf:
    """All parts together; there are at least two."""

    parts: tuple[Expression, ...]


Expression = Name | Reference | AnyOf | AllOf


def parse(set_name: str, text: str) -> Expression:
    """The tree of a text. Raises Mistake at the first error."""
    if len(text) > EXPRESSION_CHARS_MAX:
        raise Mistake(set_name, EXPRESSION_CHARS_MAX + 1, f"has more than {EXPRESSION_CHARS_MAX:,} characters")
    reader = _Reader(set_name, list(_tokens(set_name, text)))
    expression = reader.any_of()
    reader.take("", wanted="| or &")
    return expression


def is_name(text: str) -> bool:
    """True if this text is a valid name in a set."""
    return bool(text) and all(_is_in_names(char) for char in text)


def leaves(expression: Expression) -> Iterator[Name | Reference]:
    """Models and sets named in an expression, in the order written."""
    if isinstance(expression, Name | Reference):
        yield expression
    else:
        for part in expression.parts:
            yield from leaves(part)


def in_order(definitions: Mapping[str, Expression]) -> tuple[str, ...]:
    """The names of all sets, each after those it refers to. Raises Mistake if there is no such order."""
    finished: dict[str, None] = {}
    for start in definitions:
        # The sets on the path from the start to here, each with the references that are still to be followed.
        way = {} if start in finished else {start: _references(definitions[start])}
        while way:
            here = next(reversed(way))
            reference = next((each for each in way[here] if each.text not in finished), None)
            if reference is None:
                del way[here]
                finished[here] = None
            else:
                _check(reference, here, list(way), definitions)
                way[reference.text] = _references(definitions[reference.text])
    return tuple(finished)


def _references(expression: Expression) -> Iterator[Reference]:
    return (leaf for leaf in leaves(expression) if isinstance(leaf, Reference))


def _check(reference: Reference, here: str, way: list[str], definitions: Mapping[str, Expression]) -> None:
    if reference.text not in definitions:
        raise Mistake(here, reference.at, f"there is no set {reference.text}")
    if reference.text in way:
        circle = [*way[way.index(reference.text) :], reference.text]
        raise Mistake(here, reference.at, f"sets may not go round in a circle: {' → '.join(circle)}")


@dataclass(frozen=True, slots=True)
class _Token:
    text: str  # Empty at the end.
    at: int


def _is_in_names(char: str) -> bool:
    return char.isalnum() or char in _IN_NAMES


def _tokens(set_name: str, text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        end = at + 1
        if _is_in_names(text[at]):
            while end < len(text) and _is_in_names(text[end]):
                end += 1
        elif text[at] not in _SIGNS and not text[at].isspace():
            names = " ".join(_IN_NAMES)
            raise Mistake(set_name, at + 1, f'"{text[at]}" has no meaning; names have letters, digits and {names}')
        if not text[at].isspace():
            yield _Token(text[at:end], at + 1)
        at = end
    yield _Token("", len(text) + 1)


@dataclass(slots=True)
class _Reader:
    set_name: str
    tokens: list[_Token]
    position: int = 0
    depth: int = 0

    def any_of(self) -> Expression:
        parts = [self._all_of()]
        while self._is_next("|"):
            parts.append(self._all_of())
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def take(self, sign: str, wanted: str) -> _Token:
        """Take the next token, which must be this sign. Raises Mistake with what was expected."""
        token = self.tokens[self.position]
        if token.text != sign:
            raise self._unexpected(token, wanted)
        self.position += 1
        return token

    def _all_of(self) -> Expression:
        parts = [self._atom()]
        while self._is_next("&"):
            parts.append(self._atom())
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _atom(self) -> Expression:
        if self._is_next("("):
            return self._inside()
        if self._is_next("+"):
            token = self._name("the name of a set")
            return Reference(token.text, token.at)
        token = self._name(_AN_ATOM)
        return Name(token.text, token.at)

    def _inside(self) -> Expression:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise Mistake(self.set_name, self.tokens[self.position - 1].at, f"is nested more than {DEPTH_MAX} deep")
        expression = self.any_of()
        self.take(")", wanted="|, & or )")
        self.depth -= 1
        return expression

    def _name(self, wanted: str) -> _Token:
        token = self.tokens[self.position]
        if not is_name(token.text):
            raise self._unexpected(token, wanted)
        self.position += 1
        return token

    def _is_next(self, sign: str) -> bool:
        """True if this sign comes next; if so it is taken."""
        found = self.tokens[self.position].text == sign
        self.position += found
        return found

    def _unexpected(self, token: _Token, wanted: str) -> Mistake:
        found = f'"{token.text}"' if token.text else "the end"
        return Mistake(self.set_name, token.at, f"{found} is where {wanted} should be")
