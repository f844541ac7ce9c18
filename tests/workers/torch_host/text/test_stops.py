from __future__ import annotations

import itertools

import pytest

from greenroom.workers.torch_host.text.output_stream import StopFinder


def let_out(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    text = "".join(finder.add(piece) for piece in pieces) + finder.end()
    return text, finder.is_found


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        ([], "anything", "anything"),
        (["STOP"], "one STOP two", "one "),
        (["STOP"], "one STO", "one STO"),
        (["aab"], "aaab", "a"),
        (["\n\n", "END"], "a\nb\n\nc", "a\nb"),
        (["b", "abc"], "xxabc", "xxa"),
        (["x"], "x", ""),
    ],
)
def test_text_is_cut_the_same_wherever_the_pieces_end(stops: list[str], text: str, expected: str) -> None:
    places = range(1, len(text))
    for count in range(min(len(text), 4)):
        for cuts in itertools.combinations(places, count):
            edges = [0, *cuts, len(text)]
            pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
            assert let_out(stops, pieces) == (expected, expected != text), pieces


def test_text_that_cannot_be_a_stop_sequence_is_let_out_at_once() -> None:
    finder = StopFinder(["###"])
    assert [finder.add("abc"), finder.add("d#"), finder.add("e")] == ["abc", "d", "#e"]


def test_nothing_comes_after_a_stop_sequence() -> None:
    finder = StopFinder(["."])
    assert [finder.add("a.b"), finder.add("c"), finder.end()] == ["a", "", ""]
