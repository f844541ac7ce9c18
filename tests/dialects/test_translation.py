"""A stream and a whole answer say the same, however they are split; bodies that are dear to read are bounded."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.dialects.anthropic import ANTHROPIC
from greenroom.dialects.anthropic.answers import messages_translation
from greenroom.dialects.chat import ChatEvents, error_message
from greenroom.dialects.llama_server.tokenize import tokenize_translation
from greenroom.dialects.neutral import OBJECTS_MAX, AnswerContext, read
from greenroom.dialects.ollama.answers import chat_translation, embed_translation, generate_translation
from greenroom.dialects.responses import RESPONSES
from greenroom.dialects.responses.answers import response_translation
from greenroom.dialects.translation import pass_through
from greenroom.errors import BadRequest, EngineFault
from tests.later import Later

anthropic, ollama = Later("anthropic.types"), Later("ollama")
CONTEXT = AnswerContext("m", "abc", 1_700_000_000.0)


def event(delta: dict[str, Any], reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": reason}]}).encode() + b"\n\n"


def call(place: int, **function: str) -> dict[str, Any]:
    more = {"id": f"c{place}"} if "name" in function else {}
    return {"tool_calls": [{"index": place, "function": function, **more}]}


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
STREAM = b"".join(
    (
        event({"role": "assistant", "content": None}),
        event({"reasoning_content": "so"}),
        event({"reasoning_content": " so"}),
        event({"content": "hé"}),
        b": waiting\n\n",
        event({"content": "llo"}),
        event(call(0, name="f", arguments='{"a":')),
        event(call(0, arguments=" 1}")),
        event(call(1, name="g", arguments="{}")),
        event({}, "tool_calls"),
        b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n",
        b"data: [DONE]\n\n",
    )
)
WHOLE = {
    "choices": [
        {
            "message": {
                "content": "héllo",
                "reasoning_content": "so so",
                "tool_calls": [
                    {"id": "c0", "function": {"name": "f", "arguments": '{"a": 1}'}},
                    {"id": "c1", "function": {"name": "g", "arguments": {}}},
                ],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": USAGE,
}


def streamed(cuts: list[int], translate: Any = messages_translation) -> bytes:
    translator, out, begin = translate(CONTEXT, True).stream(), b"", 0
    for cut in [*sorted(cut % (len(STREAM) + 1) for cut in cuts), len(STREAM)]:
        out += translator.feed(STREAM[begin:cut])
        begin = cut
    return out + translator.flush()


def read_events(stream: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in stream.decode().split("\n") if line.startswith("data: ")]


@given(st.lists(st.integers(0, 2_000), max_size=12))
def test_a_message_is_the_same_as_events_and_as_a_whole(cuts: list[int]) -> None:
    whole = json.loads(messages_translation(CONTEXT, False).whole(200, json.dumps(WHOLE).encode()))
    anthropic.Message.model_validate(whole)
    events = read_events(streamed(cuts))
    blocks: list[dict[str, Any]] = []
    for one in events:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks.append(dict(one["content_block"]))
        elif one["type"] == "content_block_delta":
            [(name, text)] = [pair for pair in one["delta"].items() if pair[0] != "type"]
            last = blocks[one["index"]]
            last[name] = last.get(name, "") + text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json", "") or "{}")
    assert blocks == whole["content"]
    assert [one["type"] for one in events][-2:] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["input_tokens"] == 4 and whole["usage"]["cache_read_input_tokens"] == 3


@pytest.mark.parametrize(
    "said",
    [b'data: {"error": {"message": "no memory"}}\n\n', b"data: {broken\n\n", b'data: {"choices": [{"delta": 7}]}\n\n'],
)
def test_an_engines_error_in_a_stream_is_its_last_event(said: bytes) -> None:
    translator = messages_translation(CONTEXT, True).stream()
    assert translator is not None
    out = translator.feed(event({"content": "a"}) + said + event({"content": "b"})) + translator.feed(STREAM)
    out += translator.flush()
    assert read_events(out)[-1]["type"] == "error" and b"text_delta" in out and b'"b"' not in out
    assert translator.failure


def test_a_whole_answer_that_is_none_is_the_engines_fault() -> None:
    for body in (b"", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": 7}}]}'):
        with pytest.raises(EngineFault):
            messages_translation(CONTEXT, False).whole(200, body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"code": 400, "message": "too long"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"message": "too long"}', "too long"),
        (b"plain", "plain"),
        (b"", "The engine gave no reason."),
    ],
)
def test_an_engines_words_are_found_in_every_shape(body: bytes, said: str) -> None:
    assert error_message(body) == said


def test_an_event_without_end_is_not_held_for_ever() -> None:
    events = ChatEvents()
    assert events.feed(b"data: " + b"x" * 17_000_000)[0].error is not None


@pytest.mark.parametrize("sent", [{}, {"input": None}, {"input": []}, {"input": 7}])
def test_nothing_to_embed_is_refused_before_an_engine_is_asked(sent: dict[str, Any]) -> None:
    fields = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in {"model": "m", **sent}.items()}
    with pytest.raises(BadRequest) as refused:
        embed_translation(CONTEXT, False).request(fields)
    assert refused.value.param == "input"


@given(st.lists(st.integers(0, 2_000), max_size=12))
def test_lines_of_ollama_say_what_the_whole_says(cuts: list[int]) -> None:
    whole = json.loads(chat_translation(CONTEXT, False).whole(200, json.dumps(WHOLE).encode()))
    ollama.ChatResponse.model_validate(whole)
    lines = [json.loads(line) for line in streamed(cuts, chat_translation).splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"] == "héllo"
    assert "".join(line["message"].get("thinking", "") for line in lines) == whole["message"]["thinking"] == "so so"
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == whole["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1}, {}]
    assert {**lines[-1], "message": None} == {**whole, "message": None}
    assert [line["done"] for line in lines].count(True) == 1


def test_results_of_tools_without_ids_go_to_the_calls_in_their_order() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    other = {"function": {"name": "g", "arguments": {}}}
    said = [
        {"role": "assistant", "tool_calls": [call, other, call]},
        {"role": "tool", "tool_name": "g", "content": "1"},
        {"role": "tool", "tool_name": "f", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "one too many"},
    ]
    raw = msgspec.Raw(json.dumps(said).encode())
    fields = chat_translation(CONTEXT, False).request({"model": msgspec.Raw(b'"m"'), "messages": raw})
    messages = json.loads(bytes(fields["messages"]))
    ids = [one["id"] for one in messages[0]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [message["tool_call_id"] for message in messages[1:4]] == [ids[1], ids[0], ids[2]]


@given(st.lists(st.integers(0, 2_000), max_size=12))
def test_a_response_is_the_same_as_events_and_as_a_whole(cuts: list[int]) -> None:
    whole = json.loads(response_translation(CONTEXT, False).whole(200, json.dumps(WHOLE).encode()))
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    events = read_events(streamed(cuts, response_translation))
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed" and events[-1]["response"] == whole
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == whole["output"]
    for place, item in enumerate(done):
        mine = [one for one in events if one.get("output_index") == place]
        deltas = "".join(one["delta"] for one in mine if one["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_the_fields_of_tokenize_are_told_apart() -> None:
    def asked(engine_is_vllm: bool, **body: Any) -> Any:
        fields = {
            "model": msgspec.Raw(b'"m"'),
            **{name: msgspec.Raw(json.dumps(one).encode()) for name, one in body.items()},
        }
        translation = tokenize_translation(fields, engine_is_vllm=engine_is_vllm)
        if translation is None:
            return None
        sent = {name: json.loads(bytes(raw)) for name, raw in translation.request(fields).items()}
        return sent, json.loads(translation.whole(200, b'{"tokens": [5, 6], "count": 2}'))

    assert asked(False, content="x") is None and asked(True, prompt="x") is None and asked(True, messages=[]) is None
    sent, answer = asked(True, content="x")
    assert sent == {"model": "m", "prompt": "x", "add_special_tokens": False} and answer == {"tokens": [5, 6]}
    sent, answer = asked(False, prompt="x")
    assert sent == {"model": "m", "content": "x", "add_special": True} and answer == {"count": 2, "tokens": [5, 6]}
    for wrong in ({"messages": [{}]}, {"prompt": 7}, {}):
        with pytest.raises(BadRequest):
            asked(False, **wrong)


def test_tokens_are_counted_and_stay_as_they_were_sent() -> None:
    asked = tokenize_translation({"prompt": msgspec.Raw(b'"x"')}, engine_is_vllm=False)
    assert asked is not None and asked.whole(200, b'{"tokens": [ 5,6 , 7]}') == b'{"count":3,"tokens":[ 5,6 , 7]}'
    assert asked.whole(200, b'{"tokens": [ ]}') == b'{"count":0,"tokens":[ ]}'
    for wrong in (
        b'{"tokens": [[5], [6]]}',
        b'{"tokens": [{"id": 5, "piece": "a"}]}',
        b'{"tokens": "5"}',
        b"{}",
        b"[]",
    ):
        with pytest.raises(EngineFault):
            asked.whole(200, wrong)


@pytest.mark.parametrize("translate", [messages_translation, response_translation, chat_translation])
@pytest.mark.parametrize(
    "odd",
    [
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "x", "name": 5, "description": ["a"], "strict": "a", "function": 5, "input_schema": 5},
        {"type": "x", "tools": ["a"]},
        {"type": "x", "tools": None},
    ],
)
def test_tools_of_unknown_types_may_hold_anything(translate: Any, odd: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "hi"}]
    own = {"name": "f", "parameters": {}, "input_schema": {}, "function": {"name": "f"}}
    own["type"] = "custom" if translate is messages_translation else "function"
    said = {"model": "m", "max_tokens": 5, "messages": turns, "input": turns, "tools": [odd, own]}
    fields = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in said.items()}
    tools = msgspec.json.decode(translate(AnswerContext("m", "x", 0), False).request(fields)["tools"])
    assert [tool["function"]["name"] for tool in tools] == ["f"]


@pytest.mark.parametrize(
    ("sent", "number"),
    [
        (b"", 0),
        (b'data: {"sequence_number":7,"delta":"a"}\n\n', 8),
        (b'data: {"sequence_number": 7}\n\ndata: {"delta":"\\"sequence_number\\":99,","sequence_number":8}\n\n', 9),
        (b'data: {"sequence_number":7}\n\ndata: {"sequence_number":8', 8),
    ],
)
def test_the_next_number_of_a_stream_that_passes_as_it_is(sent: bytes, number: int) -> None:
    assert pass_through(RESPONSES.errors, b"/v1/responses").next_number(sent) == number
    assert pass_through(ANTHROPIC.errors, b"/v1/messages").next_number(sent) == 0


def asked(translate: Any, **body: Any) -> dict[str, Any]:
    fields = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in {"model": "m", **body}.items()}
    return {name: json.loads(bytes(raw)) for name, raw in translate(CONTEXT, False).request(fields).items()}


@pytest.mark.parametrize("one", [b"{}", b'{"a":1}', b'{ \n"a":1}'])
def test_a_field_cannot_have_more_objects_than_the_limit(one: bytes) -> None:
    decoder = msgspec.json.Decoder(list[dict[str, int]])
    fits = msgspec.Raw(b"[" + b",".join([one] * OBJECTS_MAX) + b"]")
    assert len(read({"messages": fits}, "messages", decoder)) == OBJECTS_MAX
    too_many = msgspec.Raw(b"[" + b",".join([one] * (OBJECTS_MAX + 1)) + b"]")
    with pytest.raises(BadRequest, match="messages has more than 20,000 objects"):
        read({"messages": too_many}, "messages", decoder)


def test_a_long_conversation_about_json_is_read() -> None:
    file = json.dumps([{"id": number, "tags": {"of": {"a": 1}}} for number in range(100)], indent=1)
    turn = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": {"b": 1}}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": file}]},
    ]
    made = asked(messages_translation, max_tokens=5, messages=turn * 500)
    assert len(made["messages"]) == 1_000 and made["messages"][-1]["content"] == file


@pytest.mark.parametrize(
    ("translate", "body"),
    [
        (chat_translation, {"messages": [{"role": "user", "images": ["a"] * 10_001}] * 2}),
        (generate_translation, {"images": ["a"] * 20_001}),
    ],
)
def test_a_request_cannot_have_more_pictures_than_the_limit(translate: Any, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="more than 20,000 pictures"):
        asked(translate, **body)


def test_results_of_many_tools_are_matched_in_linear_time() -> None:
    def seconds(count: int) -> float:
        calls = [{"function": {"name": "f"}}] * count
        said = [{"role": "assistant", "tool_calls": calls}, *[{"role": "tool", "tool_name": "g"}] * count]
        began = time.process_time()
        made = asked(chat_translation, messages=said)
        taken = time.process_time() - began
        assert [one["tool_call_id"] for one in made["messages"][1:]] == [f"call_0_{place}" for place in range(count)]
        return taken

    # Eight times the calls took sixty-four times as long.
    assert min(seconds(6_400) for _ in range(3)) < 30 * max(seconds(800), 0.01)
