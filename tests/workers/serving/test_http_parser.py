from __future__ import annotations

import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.serving.request_reader import BODY_BYTES_MAX, HEAD_BYTES_MAX, HEADERS_MAX, Request, RequestReader

SIZED = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED += b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: t\r\n\r\n"


def parsed(*pieces: bytes) -> list[Request]:
    reader, found = RequestReader(), []
    for piece in pieces:
        reader.feed(piece)
        while (request := reader.next_request()) is not None:
            found.append(request)
    return found


@pytest.mark.parametrize("raw", [SIZED, CHUNKED], ids=["sized", "chunked"])
def test_a_request_is_the_same_wherever_its_bytes_are_cut(raw: bytes) -> None:
    for cut in range(len(raw) + 1):
        (request,) = parsed(raw[:cut], raw[cut:])
        assert (request.method, request.path, request.body) == ("POST", "/a", b"hello"), cut
        assert request.query == ("b=c" if raw is SIZED else "")
        assert request.keeps_alive
    assert parsed(*(raw[at : at + 1] for at in range(len(raw))))[0].body == b"hello"


def test_requests_sent_ahead_come_out_one_by_one() -> None:
    assert [request.body for request in parsed(SIZED + CHUNKED + b"\r\n" + SIZED)] == [b"hello"] * 3


def test_an_unfinished_request_is_known_as_one() -> None:
    reader = RequestReader()
    assert not reader.is_in_request
    reader.feed(SIZED[:-1])
    assert reader.next_request() is None
    assert reader.is_in_request


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        # h11 keeps no connection of an older client.
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", False),
    ],
)
def test_a_connection_is_kept_as_its_client_says(head: bytes, keeps: bool) -> None:
    assert parsed(head)[0].keeps_alive is keeps


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"\x00\xff\x16\x03\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: x\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: b\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: \x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: \x00\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000 + b"\r\n",
    ],
)
def test_what_is_not_one_clear_request_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(raw)
    assert refused.value.status == 400


def test_sizes_are_bounded() -> None:
    too_big = BODY_BYTES_MAX + 1
    cases = [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % too_big, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % too_big + b" " * too_big, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2 * HEAD_BYTES_MAX, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"x" * HEAD_BYTES_MAX, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * (HEADERS_MAX + 1) + b"\r\n", 431),
    ]
    for raw, status in cases:
        with pytest.raises(ApiError) as refused:
            parsed(raw)
        assert refused.value.status == status


def test_a_body_of_nothing_but_chunk_extensions_is_refused() -> None:
    chunk = b"1;" + b"x" * 4000 + b"\r\na\r\n"
    with pytest.raises(ApiError, match="mostly"):
        parsed(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", chunk * 100)


def test_a_client_that_waits_to_be_told_is_told_once() -> None:
    reader = RequestReader()
    reader.feed(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert reader.next_request() is None
    assert [reader.take_continue(), reader.take_continue()] == [True, False]
