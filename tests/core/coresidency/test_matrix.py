"""The matrix: the cheapest evictions that let a newcomer load, found as if every set were written out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.model import ModelId
from greenroom.core.policy import matrix as matrix_module
from greenroom.core.policy.coresidency import coresidency_under
from greenroom.core.policy.language import Mistake
from greenroom.core.policy.matrix import ByMatrix, Matrix

from .expansion import Expansion


def ids(names: str | Sequence[str]) -> tuple[ModelId, ...]:
    return tuple(ModelId(name) for name in (names.split() if isinstance(names, str) else names))


def by(sets: dict[str, str], costs: dict[str, int] | None = None, **short: str) -> ByMatrix:
    return ByMatrix(Matrix(tuple(sets.items()), costs or {}, {name: ModelId(model) for name, model in short.items()}))


def leavers(company: ByMatrix, newcomer: str, present: str, staying: str = "") -> set[str] | None:
    answer = company.leavers(ModelId(newcomer), ids(present), frozenset(ids(staying)))
    return None if answer is None else set(answer)


PAIR, FULL = {"pair": "a & b"}, {"full": "+llms & +voice", "llms": "l1 | l2", "voice": "tts | stt"}
CHOICE, TWO = {"pair": "(a | b) & (c | d)"}, {"first": "n & a", "second": "n & b & c"}
TWICE = {"s": "n & (a | b) & (a | c)"}
STAY = ({"cheap": "n & a & b", "dear": "n & c"}, {"a": 50, "b": 50})
# The sets and costs; and newcomer, models present, those that leave (None: it cannot come), those that must stay.
SENTENCES: dict[str, list[tuple[dict[str, str], dict[str, int], str, str, str | None, str]]] = {
    "models joined by & may be together, and so may some of them": [
        ({"all": "a & b & c"}, {}, "a", "b c", "", ""),
        ({"all": "a & b & c"}, {}, "a", "c", "", ""),
    ],
    "models joined by | take turns": [({"one": "a | b | c"}, {}, "a", "b", "b", "")],
    "only the alternative leaves": [(CHOICE, {}, "a", "b d", "b", ""), (CHOICE, {}, "a", "b", "b", "")],
    "a model in no set comes alone": [
        (PAIR, {}, "free", "a b other", "a b other", ""),
        (PAIR, {}, "free", "", "", ""),
        (PAIR, {}, "free", "a", None, "a"),
    ],
    "a model in no set leaves for a model of a set": [
        (PAIR, {}, "a", "b free", "free", ""),
        (PAIR, {}, "a", "b free", None, "free"),
    ],
    "the set that sends away the least cost is chosen": [
        (TWO, {}, "n", "a b c", "a", ""),
        (TWO, {"a": 3}, "n", "a b c", "b c", ""),
    ],
    "the first definition wins ties": [
        ({"first": "n & b", "second": "n & a"}, {}, "n", "a b", "a", ""),
        ({"second": "n & a", "first": "n & b"}, {}, "n", "a b", "b", ""),
        # Also when models of the second have been written earlier elsewhere.
        ({"other": "a", "first": "n & b", "second": "n & a"}, {}, "n", "a b", "a", ""),
    ],
    "within a set the models written first stay": [
        ({"s": "n & (b | a)"}, {}, "n", "a b", "a", ""),
        ({"s": "n & (a | b)"}, {}, "n", "a b", "b", ""),
    ],
    "references stand for their sets": [(FULL, {}, "l1", "l2 tts", "l2", ""), (FULL, {}, "stt", "l2 tts", "tts", "")],
    "a newcomer that is there already does not leave": [
        ({"one": "a | b"}, {}, "a", "a b", "b", ""),
        ({}, {}, "a", "a b", "b", "a"),
    ],
    "models that must stay decide the set, whatever it costs": [
        (*STAY, "n", "a b c", "c", ""),
        (*STAY, "n", "a b c", "a b", "c"),
    ],
    "a newcomer cannot load when no set has it and the models that must stay": [
        ({"one": "n & a", "two": "n & b", "three": "n & (a | b)"}, {}, "n", "a b", None, "a b")
    ],
    # Keeping a twice would seem to be worth 6, more than b and c.
    "a model on both sides of an & counts once": [
        (TWICE, {"a": 3, "b": 2, "c": 2}, "n", "a b c", "c", ""),
        (TWICE, {"a": 3, "b": 4, "c": 4}, "n", "a b c", "a", ""),
    ],
    # Inside alone a is worth more than b, but a can also come in from outside.
    "a choice inside is made with those further out in mind": [
        ({"s": "n & (x & (a | b)) & (a | c)"}, {"a": 3, "b": 2}, "n", "a b c", "c", "")
    ],
    "a set joined to itself holds any two": [
        ({"any": "a | b | c | d", "two": "+any & +any"}, {"a": 5}, "d", "a b c", "b c", "")
    ],
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_those_leave_that_the_sets_send_away(sentence: str) -> None:
    for sets, costs, newcomer, present, leave, staying in SENTENCES[sentence]:
        expected = None if leave is None else set(leave.split())
        assert leavers(by(sets, costs), newcomer, present, staying) == expected


def test_short_names_stand_for_models_and_win_over_models_of_that_name() -> None:
    company = by({"s": "q & w"}, {"q": 5}, q="org/qwen 7b", w="whisper")
    assert leavers(company, "whisper", "q") == {"q"}
    assert company.leavers(ModelId("whisper"), [ModelId("org/qwen 7b")], frozenset()) == frozenset()


def test_cost_may_be_given_by_short_name_or_by_model() -> None:
    for name in ("s", "small"):
        company = by({"one": "n & s", "two": "n & b"}, {name: 1, "b": 2}, s="small")
        assert leavers(company, "n", "small b") == {"small"}


def test_coresidency_under_a_matrix_applies_it() -> None:
    company = coresidency_under(Matrix((("s", "a | b"),)))
    assert company.leavers(ModelId("a"), ids("b"), frozenset()) == {"b"}


def test_set_defined_twice_is_a_mistake() -> None:
    with pytest.raises(Mistake, match="set s, character 1: is defined twice"):
        ByMatrix(Matrix((("s", "a"), ("s", "b"))))


@pytest.mark.pure
def test_sets_that_are_too_much_together_are_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_module, "NODES_MAX", 6)
    assert by({"s0": "a", "s1": "+s0", "s2": "+s1"})
    with pytest.raises(Mistake, match="set s3, character 1: the sets have more than 6 parts together"):
        by({"s0": "a", "s1": "+s0", "s2": "+s1", "s3": "+s2"})


@pytest.mark.pure
def test_answers_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_module, "REMEMBERED_MAX", 2)
    company = by({"s": "a | b | c | d"})
    for _ in range(2):
        assert [leavers(company, "a", other) for other in "bbcdd"] == [{"b"}, {"b"}, {"c"}, {"d"}, {"d"}]
    assert len(company._remembered) <= 2


MODELS = "abcdef"
names = st.sampled_from(MODELS[:-1])


def expressions(references: Sequence[str]) -> st.SearchStrategy[str]:
    leaf = st.one_of(names, st.sampled_from([f"+{name}" for name in references])) if references else names
    return st.recursive(
        leaf,
        lambda inner: st.builds(
            lambda sign, parts: f"({sign.join(parts)})",
            st.sampled_from([" | ", " & "]),
            st.lists(inner, min_size=2, max_size=4),
        ),
        max_leaves=10,
    )


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    defined: list[tuple[str, str]] = []
    for number in range(draw(st.integers(1, 3))):
        defined.append((f"s{number}", draw(expressions([name for name, _ in defined]))))
    costs = draw(st.dictionaries(names, st.integers(1, 4)))
    return Matrix(tuple(draw(st.permutations(defined))), costs)


present_models = st.lists(st.sampled_from(ids(list(MODELS))), unique=True)
some_models = st.frozensets(st.sampled_from(ids(list(MODELS))), max_size=2)
one_model = st.sampled_from(ids(list(MODELS)))


# No deadline: a loaded machine is not a wrong answer. Each is tried with a few, and with many where there is time.
FEW, MANY = settings(deadline=None, max_examples=25), settings(deadline=None, max_examples=250)


@FEW
@given(matrices(), one_model, present_models, some_models)
def test_answer_is_the_one_of_sets_written_out(
    spec: Matrix, newcomer: ModelId, present: list[ModelId], staying: frozenset[ModelId]
) -> None:
    assert ByMatrix(spec).leavers(newcomer, present, staying) == Expansion(spec).leavers(newcomer, present, staying)


@FEW
@given(matrices(), one_model, present_models, st.randoms())
def test_order_of_those_present_does_not_matter(
    spec: Matrix, newcomer: ModelId, present: list[ModelId], random: Random
) -> None:
    shuffled = list(present)
    random.shuffle(shuffled)
    assert ByMatrix(spec).leavers(newcomer, present, frozenset()) == ByMatrix(spec).leavers(
        newcomer, shuffled, frozenset()
    )


@FEW
@given(matrices(), one_model, present_models, some_models, st.integers(1, 3))
def test_answer_found_with_few_companies_kept_is_still_allowed(
    spec: Matrix, newcomer: ModelId, present: list[ModelId], staying: frozenset[ModelId], combinations_max: int
) -> None:
    answer = ByMatrix(spec, combinations_max).leavers(newcomer, present, staying)
    if answer is None:
        # Only a model that must stay can keep a newcomer out.
        assert staying & (set(present) - {newcomer})
    else:
        assert not answer & staying
        assert Expansion(spec).is_allowed(frozenset({newcomer, *present}) - answer)


@pytest.mark.slow
@MANY
@given(matrices(), one_model, present_models, some_models, st.integers(1, 3), st.randoms())
def test_all_of_this_holds_for_many_matrices(
    spec: Matrix,
    newcomer: ModelId,
    present: list[ModelId],
    staying: frozenset[ModelId],
    combinations_max: int,
    random: Random,
) -> None:
    test_answer_is_the_one_of_sets_written_out.hypothesis.inner_test(spec, newcomer, present, staying)
    test_order_of_those_present_does_not_matter.hypothesis.inner_test(spec, newcomer, present, random)
    few = test_answer_found_with_few_companies_kept_is_still_allowed
    few.hypothesis.inner_test(spec, newcomer, present, staying, combinations_max)


def choices(sign: str, groups: int, of: int) -> str:
    return sign.join("(" + " | ".join(f"m{group}.{choice}" for choice in range(of)) + ")" for group in range(groups))


def test_ten_choices_of_six_are_solved_without_writing_out_sixty_million_sets() -> None:
    company = ByMatrix(Matrix((("all", choices(" & ", 10, 6)),)))
    # Two of each choice are there, one too many.
    present = ids([f"m{group}.{choice}" for group in range(10) for choice in (1, 4)])
    began = time.monotonic()
    assert company.leavers(ModelId("m3.5"), present, frozenset()) == {
        "m3.1",
        *(f"m{group}.4" for group in range(10)),
    }
    assert time.monotonic() - began < 5


def test_wide_overlap_is_answered_in_bounded_time() -> None:
    """Any ten of forty, all of them there: far too many companies to keep, and still an answer."""
    any_model = " | ".join(f"m{number}" for number in range(40))
    company = by({"any": any_model, "ten": " & ".join(["+any"] * 10)}, {"m30": 9, "m31": 9})
    present = [f"m{number}" for number in range(39)]
    answer = leavers(company, "m39", " ".join(present))
    assert answer is not None
    assert len(set(present) - answer) == 9
    assert {"m30", "m31"} <= set(present) - answer
