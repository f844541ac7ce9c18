"""What is taken out of a text as it comes: calls of tools, and stop sequences."""

from __future__ import annotations

import itertools
import json

import pytest

from greenroom.workers.torch_host.text.output_stream import StopFinder
from greenroom.workers.torch_host.text.tool_calls import CallReader, ToolCall, parse_calls, read_tools

A = '{"name": "look", "arguments": {"at": "x"}}'
LLAMA = '{"name": "look", "parameters": {"at": "x"}}'
LOOK = ("look", {"at": "x"})


def read(pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    reader = CallReader({"look"})
    found = [reader.add(piece) for piece in pieces] + [reader.end()]
    calls = [call for one in found for call in one.calls]
    return "".join(one.text for one in found), [(call.name, json.loads(call.arguments)) for call in calls]


CASES = [
    ("plain text", "plain text", []),
    ("", "", []),
    ("  \n", "  \n", []),
    (f"<tool_call>\n{A}\n</tool_call>", "", [LOOK]),
    (f"I look.\n<tool_call>{A}</tool_call>\n<tool_call>{A}</tool_call>\n", "I look.\n", [LOOK, LOOK]),
    (f"<tool_call>{A}</tool_call> done", "done", [LOOK]),
    (f"<tool_call>{A}", "", [LOOK]),
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ("<tool_call>{", "<tool_call>{", []),
    ("a < b <tool", "a < b <tool", []),
    (f"[TOOL_CALLS][{A}, {A}]", "", [LOOK, LOOK]),
    ('[TOOL_CALLS]look[ARGS]{"at": "x"}[TOOL_CALLS]look{"at": "x"}', "", [LOOK, LOOK]),
    ("[TOOL_CALLS]oh no", "[TOOL_CALLS]oh no", []),
    (LLAMA, "", [LOOK]),
    (f"  {LLAMA}; {LLAMA}", "", [LOOK, LOOK]),
    (f"<|python_tag|>{LLAMA}", "", [LOOK]),
    ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ('{"type": "function", "function": {"name": "look", "arguments": "{}"}}', "", [("look", {})]),
    ('{"answer": 42, "name": "look"}', '{"answer": 42, "name": "look"}', []),
    ('{"name": "look", "arguments": {}} and more', '{"name": "look", "arguments": {}} and more', []),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=[case[0][:30] for case in CASES])
def test_calls_are_found_wherever_the_pieces_end(text: str, content: str, calls: list[tuple[str, object]]) -> None:
    assert read(list(text)) == (content, calls)
    for count in (0, 1, 2):
        for cuts in itertools.combinations(range(1, len(text)), count):
            pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
            assert read(pieces) == (content, calls), pieces


def test_text_before_a_call_does_not_wait_for_it() -> None:
    reader = CallReader({"look"})
    assert reader.add("I look. <tool").text == "I look. "
    found = reader.add(f"_call>{A}</tool_call>")
    assert (found.text, [call.name for call in found.calls]) == ("", ["look"])


def test_an_answer_in_json_does_not_wait_for_its_end() -> None:
    reader = CallReader({"look"})
    assert reader.add('{"answ').text == ""
    assert reader.add('er": 1').text == '{"answer": 1'


@pytest.mark.parametrize("text", ["[1]", '{"name": 1}', '{"name": "a", "arguments": 5}', "[" * 100_000, "{} x"])
def test_what_is_no_call_is_none(text: str) -> None:
    assert parse_calls(text) == []


def test_arguments_are_json_as_they_were() -> None:
    assert parse_calls('{"name": "a", "arguments": {"city": "Köln"}}') == [ToolCall("a", '{"city": "Köln"}')]


def test_tools_of_other_types_are_left_out() -> None:
    look = {"type": "function", "function": {"name": "look"}}
    assert read_tools({"tools": [{"type": "web_search"}, look, {"type": "custom", "name": "patch"}]}).names == {"look"}
    assert not read_tools({"tools": [{"type": "web_search"}]}).may_be_called


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
