"""What engines tell of an answer beside its text, in each dialect; and streams that are out of order or cut off."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from greenroom.dialects.anthropic.answers import messages_translation
from greenroom.dialects.heartbeat import CHAT, TEXT, TRANSCRIPT, HeartbeatKind, comment, heartbeat
from greenroom.dialects.neutral import AnswerContext
from greenroom.dialects.ollama.answers import chat_translation
from greenroom.dialects.responses.answers import response_translation
from greenroom.errors import BadRequest
from tests.later import Later

responses = Later("openai.types.responses")

CONTEXT = AnswerContext("m", "abc", 1_700_000_000.0)
DIALECTS = [messages_translation, response_translation, chat_translation]


def whole(translate: Any, choice: dict[str, Any], **more: Any) -> Any:
    answer = {"choices": [{"message": {"content": "hi"}, **choice}], **more}
    return json.loads(translate(CONTEXT, False).whole(200, json.dumps(answer).encode()))


def event(delta: dict[str, Any], **choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta, **choice}]}).encode() + b"\n\n"


def streamed(translate: Any, *events: bytes) -> list[Any]:
    """The events of a stream, or its lines."""
    translator = translate(CONTEXT, True).stream()
    out: bytes = b"".join([*map(translator.feed, events), translator.flush()])
    lines = out.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: ", "{"))]


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("engines_field", ["stop_reason", "matched_stop"])
def test_a_stop_sequence_is_told(engines_field: str) -> None:
    ended = {"finish_reason": "stop", engines_field: "END"}
    message = whole(messages_translation, ended)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    events = streamed(messages_translation, event({"content": "hi"}), event({}, **ended), DONE)
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


@pytest.mark.parametrize("told", [None, 128_009, ["odd"]])
def test_a_token_that_ends_an_answer_is_no_stop_sequence(told: Any) -> None:
    message = whole(messages_translation, {"finish_reason": "stop", "stop_reason": told})
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize(
    ("reason", "told"), [("length", "max_output_tokens"), ("content_filter", "content_filter"), ("stop", None)]
)
def test_a_response_that_was_cut_says_why(reason: str, told: str | None) -> None:
    details, status = (None, "completed") if told is None else ({"reason": told}, "incomplete")
    response = whole(response_translation, {"finish_reason": reason})
    assert (response["status"], response["incomplete_details"]) == (status, details)
    last = streamed(response_translation, event({"content": "hi"}), event({}, finish_reason=reason), DONE)[-1]
    assert last["type"] == f"response.{status}"
    assert (last["response"]["status"], last["response"]["incomplete_details"]) == (status, details)


@pytest.mark.parametrize("translate", DIALECTS)
def test_figures_that_an_engine_does_not_know_are_zero(translate: Any) -> None:
    usage = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": {"cached_tokens": None}}
    timings = {"cache_n": None, "prompt_ms": None, "predicted_ms": None}
    answer = json.dumps(whole(translate, {"finish_reason": "stop"}, usage=usage, timings=timings))
    assert '"hi"' in answer


def test_an_option_that_is_not_whole_is_refused() -> None:
    for wrong in (40.5, 1e308, -1e300):
        fields = {"model": msgspec.Raw(b'"m"'), "messages": msgspec.Raw(b'[{"role": "user", "content": "x"}]')}
        fields["options"] = msgspec.Raw(json.dumps({"top_k": wrong}).encode())
        with pytest.raises(BadRequest, match="top_k is a whole number"):
            chat_translation(CONTEXT, False).request(fields)


def is_error(told: Any) -> bool:
    return told.get("type") == "error" or "error" in told


@pytest.mark.parametrize("translate", DIALECTS)
def test_a_stream_that_ends_early_ends_with_an_error(translate: Any) -> None:
    told = streamed(translate, event({"content": "half an ans"}))
    assert "half an ans" in json.dumps(told)
    assert [is_error(one) for one in told] == [False] * (len(told) - 1) + [True]
    assert "before its answer was whole" in json.dumps(told[-1])
    translator = translate(CONTEXT, True).stream()
    translator.feed(event({"content": "half an ans"}))
    assert translator.failure is None and translator.flush() and translator.failure is not None
    assert translator.flush() == b""


@pytest.mark.parametrize("translate", DIALECTS)
@pytest.mark.parametrize("last", [DONE, event({}, finish_reason="stop"), b"data: [DONE]"])
def test_a_reason_or_the_last_word_ends_a_stream(translate: Any, last: bytes) -> None:
    told = streamed(translate, event({"content": "hi"}), last)
    assert not any(is_error(one) and one.get("error") for one in told) and "hi" in json.dumps(told)


@pytest.mark.parametrize("translate", DIALECTS)
def test_a_last_event_without_its_line_break_is_read(translate: Any) -> None:
    told = streamed(translate, event({"content": "one"}), event({"content": "two"}, finish_reason="length")[:-2])
    assert "two" in json.dumps(told) and not any(is_error(one) and one.get("error") for one in told)
    assert "max" in json.dumps(told[-2:]) or told[-1].get("done_reason") == "length"
    told = streamed(translate, event({"content": "one"}), b'data: {"error": {"message": "no memory"}}')
    assert is_error(told[-1]) and "no memory" in json.dumps(told[-1])


def test_an_error_of_a_response_has_the_published_fields() -> None:
    failed = b'data: {"error": {"message": "no memory"}}\n\n'
    told = streamed(response_translation, event({"content": "one"}), failed)
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    last = told[-1]
    assert responses.ResponseErrorEvent.model_validate(last).message == "no memory"
    assert (last["type"], last["code"], last["param"]) == ("error", "engine_error", None)
    assert last["error"]["message"] == "no memory"


def call(place: int, arguments: str, name: str | None = None) -> bytes:
    more = {} if name is None else {"id": f"c{place}"}
    function = {"arguments": arguments, **({} if name is None else {"name": name})}
    return event({"tool_calls": [{"index": place, "function": function, **more}]})


ENDED = event({}, finish_reason="tool_calls") + DONE
# Calls whose pieces are mixed with a text and with each other, and calls in order with a text after the first.
MIXED = (call(0, '{"a":', "f"), event({"content": "so"}), call(1, '{"b"', "g"), call(0, " 1}"), call(1, ":2}"), ENDED)
IN_ORDER = (call(0, '{"a":', "f"), call(0, " 1}"), event({"content": "so"}), call(1, '{"b":2}', "g"), ENDED)


@pytest.mark.parametrize("events", [MIXED, IN_ORDER])
def test_blocks_of_a_message_never_mix(events: tuple[bytes, ...]) -> None:
    blocks: list[dict[str, Any]] = []
    is_open = False
    for one in streamed(messages_translation, *events):
        if one["type"] == "content_block_start":
            assert not is_open and one["index"] == len(blocks)
            blocks.append({**one["content_block"], "said": ""})
            is_open = True
        elif one["type"] == "content_block_delta":
            assert is_open and one["index"] == len(blocks) - 1
            blocks[-1]["said"] += one["delta"].get("partial_json") or one["delta"].get("text")
        elif one["type"] == "content_block_stop":
            is_open = False
        elif one["type"] == "message_delta":
            assert not is_open and one["delta"]["stop_reason"] == "tool_use"
    told = [(block["type"], block.get("id"), block.get("name"), block["said"]) for block in blocks]
    assert told == [("tool_use", "c0", "f", '{"a": 1}'), ("text", None, None, "so"), ("tool_use", "c1", "g", '{"b":2}')]


def test_calls_in_order_are_not_held_back() -> None:
    translator = messages_translation(CONTEXT, True).stream()
    assert translator is not None
    first = b"".join(map(translator.feed, IN_ORDER[:3]))
    assert first.count(b"content_block_stop\n") == 1 and b'"so"' in first
    assert b'"g"' in translator.feed(IN_ORDER[3])


@pytest.mark.parametrize("events", [MIXED, IN_ORDER])
def test_items_of_a_response_get_their_own_pieces(events: tuple[bytes, ...]) -> None:
    told = streamed(response_translation, *events)
    output = told[-1]["response"]["output"]
    said = [item.get("arguments") or item["content"][0]["text"] for item in output]
    assert said == ['{"a": 1}', "so", '{"b":2}']
    assert [item.get("call_id") for item in output] == ["c0", None, "c1"] and len({item["id"] for item in output}) == 3
    for place, item in enumerate(output):
        mine = [one for one in told if one.get("output_index") == place]
        assert (mine[0]["type"], mine[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert {one["item_id"] for one in mine if "item_id" in one} == {item["id"]} and mine[-1]["item"] == item
        assert "".join(one["delta"] for one in mine if one["type"].endswith(".delta")) == said[place]


@pytest.mark.parametrize("events", [MIXED, IN_ORDER])
def test_calls_of_ollama_get_their_own_arguments(events: tuple[bytes, ...]) -> None:
    calls = [call for line in streamed(chat_translation, *events) for call in line["message"].get("tool_calls", ())]
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    assert told == [("f", {"a": 1}), ("g", {"b": 2})]


# --- what a waiting client hears --------------------------------------------------------------------------------------


HOSTILE = 'a\n\ndata: {"choices":[]}\r\n: é '


def test_comment_says_what_is_known() -> None:
    assert comment("qwen", 2, 3.6) == b": waiting model=qwen position=2 eta_s=4\n\n"
    assert comment("qwen", None, None) == b": waiting model=qwen\n\n"
    assert comment("qwen", 0, -5.0) == b": waiting model=qwen position=0 eta_s=0\n\n"


def test_comment_stays_one_comment_whatever_the_name() -> None:
    line = comment(HOSTILE * 100, 1, 1.0)
    assert line.startswith(b": waiting model=a_data:_")
    assert line.count(b"\n") == 2 and line.endswith(b"\n\n") and b"\r" not in line
    assert len(line) < 300


def test_chunk_is_an_empty_piece_of_the_answer() -> None:
    chat = CHAT.empty_event(HOSTILE, "id-1", 7)
    assert chat.count(b"\n") == 2 and chat.endswith(b"\n\n") and b"\r" not in chat
    value = json.loads(chat.removeprefix(b"data: "))
    assert (value["object"], value["model"], value["id"], value["created"]) == (
        "chat.completion.chunk",
        HOSTILE,
        "id-1",
        7,
    )
    assert value["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
    text = json.loads(TEXT.empty_event("m", "id-1", 7).removeprefix(b"data: "))
    assert text["choices"] == [{"index": 0, "text": "", "finish_reason": None}]
    assert text["object"] == "text_completion"
    heard = json.loads(TRANSCRIPT.empty_event("m", "id-1", 7).removeprefix(b"data: "))
    assert heard == {"type": "transcript.text.delta", "delta": ""}


def test_kind_chooses_the_bytes() -> None:
    def one(kind: HeartbeatKind) -> bytes:
        return heartbeat(kind, model="m", position=1, eta_s=2.0, shape=CHAT, stream_id="i", created=0)

    assert one(HeartbeatKind.COMMENT) == comment("m", 1, 2.0)
    assert one(HeartbeatKind.CHUNK) == CHAT.empty_event("m", "i", 0)
    assert one(HeartbeatKind.OFF) == b""
