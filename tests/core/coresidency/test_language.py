"""The language of sets: what it reads, and what it says of what it cannot read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.policy.language import (
    DEPTH_MAX,
    EXPRESSION_CHARS_MAX,
    AnyOf,
    Expression,
    Mistake,
    Name,
    Reference,
    in_order,
    is_name,
    leaves,
    parse,
)


def read(text: str) -> Expression:
    return parse("s", text)


def shape(expression: Expression) -> object:
    """The tree without positions."""
    if isinstance(expression, Name):
        return expression.text
    if isinstance(expression, Reference):
        return f"+{expression.text}"
    return ("any" if isinstance(expression, AnyOf) else "all", *map(shape, expression.parts))


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a", "a"),
        ("+a", "+a"),
        (" ( ( a ) ) ", "a"),
        ("a|b|c", ("any", "a", "b", "c")),
        ("a & b & c", ("all", "a", "b", "c")),
        ("a | b & c", ("any", "a", ("all", "b", "c"))),
        ("a & b | c", ("any", ("all", "a", "b"), "c")),
        ("(a | b) & c", ("all", ("any", "a", "b"), "c")),
        ("(a & b) & c", ("all", ("all", "a", "b"), "c")),
        ("+llms & (v|+tts)\n| x", ("any", ("all", "+llms", ("any", "v", "+tts")), "x")),
        ("qwen/qwen2.5-7b_q4:x@1 & é", ("all", "qwen/qwen2.5-7b_q4:x@1", "é")),
    ],
)
def test_text_becomes_a_tree_in_which_and_binds_closer_than_or(text: str, tree: object) -> None:
    assert shape(read(text)) == tree


def test_names_know_where_they_stand() -> None:
    assert list(leaves(read("ab & (+cd | e)"))) == [Name("ab", 1), Reference("cd", 8), Name("e", 13)]


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("", 1, "the end is where a model, +set or ( should be"),
        ("a |", 4, "the end is where a model, +set or ( should be"),
        ("& a", 1, '"&" is where a model, +set or ( should be'),
        ("a b", 3, '"b" is where | or & should be'),
        ("a)", 2, '")" is where | or & should be'),
        ("a +b", 3, '"+" is where | or & should be'),
        ("(a", 3, "the end is where |, & or ) should be"),
        ("(a b)", 4, '"b" is where |, & or ) should be'),
        ("()", 2, '")" is where a model, +set or ( should be'),
        ("a & +", 6, "the end is where the name of a set should be"),
        ("+(a)", 2, '"(" is where the name of a set should be'),
        ("a & $b", 5, '"$" has no meaning; names have letters, digits and _ - . / : @'),
    ],
)
def test_mistake_says_where_it_is_and_what_should_be_there(text: str, at: int, message: str) -> None:
    with pytest.raises(Mistake) as caught:
        parse("mine", text)
    assert (caught.value.set_name, caught.value.at, caught.value.message) == ("mine", at, message)
    assert str(caught.value) == f"set mine, character {at}: {message}"


def test_nesting_is_bounded() -> None:
    assert shape(read("(" * DEPTH_MAX + "a" + ")" * DEPTH_MAX)) == "a"
    deep = DEPTH_MAX + 1
    with pytest.raises(Mistake, match=f"character {deep}: is nested more than {DEPTH_MAX} deep"):
        read("(" * deep + "a" + ")" * deep)
    # Beside each other is not within each other.
    assert len(list(leaves(read(" | ".join(["(a)"] * deep))))) == deep


def test_length_is_bounded() -> None:
    assert shape(read("a" * EXPRESSION_CHARS_MAX)) == "a" * EXPRESSION_CHARS_MAX
    with pytest.raises(Mistake, match="has more than 65,536 characters"):
        read("a" * (EXPRESSION_CHARS_MAX + 1))


@pytest.mark.parametrize(("text", "answer"), [("a-b.c", True), ("7", True), ("", False), ("a b", False), ("+a", False)])
def test_text_is_a_name_if_it_can_stand_in_a_set(text: str, answer: bool) -> None:
    assert is_name(text) is answer


def order(**sets: str) -> tuple[str, ...]:
    return in_order({name: parse(name, text) for name, text in sets.items()})


def test_sets_come_after_those_they_refer_to() -> None:
    assert order(a="+c & +b", b="+d | x", c="+d", d="y") == ("d", "c", "b", "a")
    assert order(a="x", b="+a & +a") == ("a", "b")


def test_reference_to_a_set_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(Mistake, match="set b, character 7: there is no set c"):
        order(a="x", b="+a & +c")


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ({"a": "+a"}, "set a, character 2: sets may not go round in a circle: a → a"),
        (
            {"a": "x & +b", "b": "+c", "c": "y | +b"},
            "set c, character 6: sets may not go round in a circle: b → c → b",
        ),
    ],
)
def test_sets_may_not_go_round_in_a_circle(sets: dict[str, str], told: str) -> None:
    with pytest.raises(Mistake) as caught:
        order(**sets)
    assert str(caught.value) == told


@pytest.mark.untraced
def test_long_chains_of_sets_are_followed() -> None:
    sets = {f"s{number}": f"+s{number + 1}" for number in range(5_000)} | {"s5000": "x"}
    assert order(**sets)[0] == "s5000"


@settings(deadline=None)
@given(st.text(alphabet="ab+|&() $\n", max_size=20))
def test_every_text_is_read_or_is_a_mistake_within_it(text: str) -> None:
    try:
        names = [leaf.text for leaf in leaves(read(text))]
    except Mistake as mistake:
        assert 1 <= mistake.at <= len(text) + 1
    else:
        assert names == "".join(char if char in "ab" else " " for char in text).split()
