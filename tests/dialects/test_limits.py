"""Bodies that are dear to read: how much one may hold, and that twice as much takes about twice as long."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from greenroom.dialects.anthropic_answer import messages_translation
from greenroom.dialects.neutral import OBJECTS_MAX, Frame, read
from greenroom.dialects.ollama_answer import chat_translation, generate_translation
from greenroom.errors import BadRequest

FRAME = Frame("m", "abc", 1_700_000_000.0)


def asked(translate: Any, **body: Any) -> dict[str, Any]:
    fields = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in {"model": "m", **body}.items()}
    return {name: json.loads(bytes(raw)) for name, raw in translate(FRAME, False).request(fields).items()}


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
