from __future__ import annotations

import io

import pytest

from greenroom.cli.client import ServerEvent, server_events
from greenroom.cli.failures import CommandFailed


def read(text: str) -> list[ServerEvent]:
    return list(server_events(io.BytesIO(text.encode())))


def test_comments_names_and_data_are_read() -> None:
    assert read(": hello\n\nevent: swap\nid: 7\ndata: {}\n\ndata: x\n\n") == [
        ServerEvent(comment="hello"),
        ServerEvent("swap", "{}"),
        ServerEvent("message", "x"),
    ]


def test_data_of_several_lines_is_one_text() -> None:
    assert read("data: a\ndata:b\ndata:  c\n\n") == [ServerEvent(data="a\nb\n c")]


def test_line_ends_of_either_kind_are_understood() -> None:
    assert read("data: a\r\n\r\n") == [ServerEvent(data="a")]


def test_an_event_without_its_blank_line_is_dropped() -> None:
    assert read("data: a\n\ndata: half") == [ServerEvent(data="a")]


def test_bytes_that_are_no_text_do_not_end_the_stream() -> None:
    assert list(server_events(io.BytesIO(b"data: \xff\n\n"))) == [ServerEvent(data="\N{REPLACEMENT CHARACTER}")]


@pytest.mark.parametrize("endless", ["data: " + "x" * 200, "data: x\n" * 50])
def test_an_event_without_end_is_an_error(endless: str) -> None:
    with pytest.raises(CommandFailed, match="more than 100 bytes"):
        list(server_events(io.BytesIO(endless.encode()), 100))
