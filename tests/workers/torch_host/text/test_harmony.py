"""What is read out of answers: channels of the Harmony format, calls of tools, stop sequences."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from greenroom.workers.torch_host.engine.requests import GenerationRequest
from greenroom.workers.torch_host.text.output_stream import StopFinder
from greenroom.workers.torch_host.text.tokens import TextCodec
from greenroom.workers.torch_host.text.tool_calls import CallReader, ToolCall, parse_calls, read_tools
from tests.workers.torch_host.api.test_chat import HI, TIME, WEATHER, ask, streamed
from tests.workers.torch_host.conftest import Opener, Rig
from tests.workers.torch_host.engine_rig import generated, prompt, random_model, running, said
from tests.workers.torch_host.samples import tokenizer_folders

SPECIAL = ("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|message|>", "<|call|>")

# In the manner of gpt-oss: reasoning is called thinking, and may not stand beside content before a call.
TEMPLATE = """
{%- if tools %}<|start|>developer<|message|>namespace functions {
{%- for tool in tools %} {{ tool.function.name }}{% endfor %} }<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}
{%- raw %}<|channel|>commentary json<|message|>{% endraw %}{{ call.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
THINKS = "<|channel|>analysis<|message|>They want a greeting."
CALLS = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}'
PARIS = {"city": "Paris", "days": 3}


def harmony_text(folder: Path, template: str = TEMPLATE) -> TextCodec:
    tokenizer_folders.byte_level(folder, template, SPECIAL)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|return|>"}))
    return TextCodec.load(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return harmony_text(tmp_path_factory.mktemp("harmony") / "tiny-oss")


def saying(text: TextCodec, *parts: str) -> Callable[[GenerationRequest], Sequence[int]]:
    """Parts are encoded one by one: a mark that is cut in two is no mark."""
    tokens = [token for part in parts for token in text.tokens_of(part, False)]
    return lambda _: tokens


async def both(rig: Rig, **body: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    """Content, reasoning, calls and reason: the same in a stream and in a whole answer."""
    whole = (await ask(rig, **body)).choices[0]
    message = whole.message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    found = message.content or "", getattr(message, "reasoning_content", ""), calls, whole.finish_reason
    deltas = [chunk.choices[0] for chunk in await streamed(rig, **body)]
    told = [call for one in deltas for call in one.delta.tool_calls or []]
    assert found == (
        "".join(one.delta.content or "" for one in deltas),
        "".join(getattr(one.delta, "reasoning_content", None) or "" for one in deltas),
        [(call.function.name, json.loads(call.function.arguments)) for call in told],
        deltas[-1].finish_reason,
    )
    return found


async def test_reasoning_and_answer_are_told_apart(open_api: Opener, text: TextCodec) -> None:
    said = saying(text, THINKS + "<|end|><|start|>assistant<|channel|>final<|message|>Hello, Wörld 🙂<|return|>never")
    async with open_api(said, text) as rig:
        assert await both(rig) == ("Hello, Wörld 🙂", "They want a greeting.", [], "stop")
        raw = (await rig.http.post("/v1/chat/completions", json={"messages": HI})).json()["choices"][0]["message"]
    assert raw == {"role": "assistant", "content": "Hello, Wörld 🙂", "reasoning_content": "They want a greeting."}


async def test_reasoning_is_streamed_as_it_comes(open_api: Opener, text: TextCodec) -> None:
    async with open_api(saying(text, THINKS + "<|end|>"), text) as rig:
        chunks = await streamed(rig)
    pieces = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert len([piece for piece in pieces if piece]) > 3


@pytest.mark.parametrize(
    "call",
    [
        CALLS + "<|call|>",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 3}<|call|>',
        '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris", "days": 3}<|call|>',
        '<|channel|>commentary to=get_weather <|constrain|>json<|message|> {"city": "Paris", "days": 3} <|call|>',
        '<|channel|>analysis to=functions.get_weather code<|message|>{"city": "Paris", "days": 3}<|end|>',
        # The end of the answer ends the call, whatever token that was.
        CALLS,
    ],
)
@pytest.mark.parametrize("thinks", [True, False])
async def test_a_call_is_found_by_its_recipient(open_api: Opener, text: TextCodec, call: str, thinks: bool) -> None:
    said = saying(text, f"{THINKS}<|end|><|start|>assistant{call}" if thinks else call)
    async with open_api(said, text) as rig:
        reasoning = "They want a greeting." if thinks else ""
        assert await both(rig, tools=[WEATHER]) == ("", reasoning, [("get_weather", PARIS)], "tool_calls")


AGAIN = "<|end|><|start|>assistant<|channel|>analysis<|message|>Once more."


@pytest.mark.parametrize(
    ("parts", "tools", "found"),
    [
        pytest.param(
            ["<|channel|>commentary<|message|>I look.<|end|><|start|>assistant", CALLS, "<|call|>"],
            [WEATHER],
            ("I look.", "", [("get_weather", PARIS)], "tool_calls"),
            id="a preamble before its call",
        ),
        pytest.param(
            ["<|channel|>commentary to=functions.get_time <|constrain|>json<|message|><|call|>"],
            [TIME],
            ("", "", [("get_time", {})], "tool_calls"),
            id="a call without arguments",
        ),
        pytest.param([CALLS, "<|call|>"], [], (json.dumps(PARIS), "", [], "stop"), id="a call where none is offered"),
        pytest.param([CALLS[:-6]], [WEATHER], (json.dumps(PARIS)[:-6], "", [], "stop"), id="a call that was cut off"),
        # The end of the second is missing: the next one begins all the same.
        pytest.param(
            [THINKS, AGAIN, "<|start|>assistant<|channel|>final<|message|>Yes."],
            [],
            ("Yes.", "They want a greeting.\n\nOnce more.", [], "stop"),
            id="messages of one kind",
        ),
        pytest.param(
            ["<|channel|>final<|message|>Write ", "<", "|channel|>final", "<", "|message|>", " first.<|return|>"],
            [],
            ("Write <|channel|>final<|message|> first.", "", [], "stop"),
            id="marks in letters",
        ),
        pytest.param(
            [THINKS, "<|end|><|start|>assistant<|channel|>fin"],
            [],
            ("", "They want a greeting.", [], "stop"),
            id="an end within a header",
        ),
        *(pytest.param([plain], [], (plain, "", [], "stop")) for plain in ("Hello.", "to be or not", "to=", " to")),
    ],
)
async def test_what_is_said_is_read(open_api: Opener, text: TextCodec, parts: Any, tools: Any, found: Any) -> None:
    async with open_api(saying(text, *parts), text) as rig:
        assert await both(rig, **{"tools": tools} if tools else {}) == found


async def test_a_header_without_an_end_is_text(open_api: Opener, text: TextCodec) -> None:
    endless = "<|channel|>" + "final words " * 200
    async with open_api(saying(text, endless), text) as rig:
        chunks = await streamed(rig)
        assert (await both(rig))[:2] == (endless.removeprefix("<|channel|>"), "")
    assert len(chunks) > 100


async def test_stop_sequences_are_found_in_either(open_api: Opener, text: TextCodec) -> None:
    said = saying(text, THINKS + "<|end|><|start|>assistant<|channel|>final<|message|>one two three<|return|>")
    async with open_api(said, text) as rig:
        assert await both(rig, stop=" three") == ("one two", "They want a greeting.", [], "stop")
        assert await both(rig, stop="greet") == ("", "They want a ", [], "stop")


async def test_log_probabilities_cover_every_token(open_api: Opener, text: TextCodec) -> None:
    said = saying(text, THINKS + "<|end|><|start|>assistant<|channel|>final<|message|>one two<|return|>")
    async with open_api(said, text) as rig:
        answer = await ask(rig, logprobs=True)
        chunks = await streamed(rig, logprobs=True)
    listed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert len(answer.choices[0].logprobs.content) == len(listed) == answer.usage.completion_tokens
    assert answer.choices[0].message.content == "one two"


async def test_the_model_stops_at_its_call_even_if_its_files_do_not_say_so(open_api: Opener, text: TextCodec) -> None:
    async with open_api(saying(text, CALLS + "<|call|>and more"), text) as rig:
        await ask(rig, tools=[WEATHER])
        stops = rig.engine.asks[0].stop_tokens
    assert {text.speller.spell(token)[0] for token in stops} == {"<|return|>", "<|call|>"}


async def test_an_answer_held_to_a_schema_is_final_at_once(open_api: Opener, text: TextCodec) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    async with open_api("", text) as rig:
        content, reasoning, _, _ = await both(rig, response_format=wanted)
        assert (json.loads(content), reasoning) == ({"a": 1}, "")
        assert text.decode(rig.engine.asks[0].tokens).endswith("<|start|>assistant<|channel|>final<|message|>")


async def test_a_tool_that_must_be_called_is(open_api: Opener, text: TextCodec) -> None:
    async with open_api("", text) as rig:
        body = {"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
        ((name, arguments),) = (await both(rig, seed=1, **body))[2]
    assert name == "get_weather"
    assert set(arguments) == {"city", "days"}


async def test_reasoning_comes_back_to_the_template(open_api: Opener, text: TextCodec) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "get_weather", "arguments": json.dumps(PARIS)}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Need weather.", "tool_calls": [call]}
    messages: Any = [*HI, said, {"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    async with open_api(saying(text, "<|channel|>final<|message|>ok"), text) as rig:
        assert (await ask(rig, messages=messages)).choices[0].message.content == "ok"
        prompt = text.decode(rig.engine.asks[0].tokens)
    assert "<|channel|>analysis<|message|>Need weather.\n\nI look.<|end|><|start|>assistant to=functions" in prompt


def test_gpt_oss_says_what_transformers_itself_would_say() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    sizes = {"model_type": "gpt_oss", "head_dim": 32, "sliding_window": 24, "layer_types": kinds, **experts}
    model = random_model("llama", **sizes, rope_parameters=rope)
    prompts = [prompt(length) for length in (1, 16, 50)]
    wanted = [generated(model, one, 12) for one in prompts]
    with running(model) as engine:
        assert [said(engine, one).ids for one in prompts] == wanted


async def test_a_template_without_the_marks_is_read_as_before(open_api: Opener, tmp_path: Path) -> None:
    plain = harmony_text(tmp_path / "plain", tokenizer_folders.TEMPLATE)
    async with open_api(saying(plain, "<|channel|>final<|message|>hello"), plain) as rig:
        answer = await ask(rig)
    assert answer.choices[0].message.content == "finalhello"


async def test_a_tokenizer_without_the_marks_is_read_as_before(open_api: Opener, tmp_path: Path) -> None:
    plain = TextCodec.load(tokenizer_folders.byte_level(tmp_path / "plain", TEMPLATE))
    async with open_api(saying(plain, "<|channel|>final"), plain) as rig:
        answer = await ask(rig)
    assert answer.choices[0].message.content == "<|channel|>final"


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
