"""What a waiting client hears."""

from __future__ import annotations

import json

from greenroom.dialects.heartbeat import CHAT, TEXT, TRANSCRIPT, HeartbeatKind, comment, heartbeat

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
