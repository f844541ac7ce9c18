from __future__ import annotations

import contextlib

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.serving.forms import PARTS_MAX, TEXT_BYTES_MAX, Form, read_form

KIND = "multipart/form-data; boundary=xx"


def as_sent(**parts: object) -> tuple[str, bytes]:
    """A form as a real client sends it."""
    request = httpx2.Request("POST", "http://x", **parts)  # type: ignore[arg-type]
    return request.headers["content-type"], request.read()


def body(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(b"--xx\r\n%b\r\n\r\n%b\r\n" % (head.encode(), data) for head, data in parts) + b"--xx--\r\n"


def field(name: str) -> str:
    return f'Content-Disposition: form-data; name="{name}"'


@given(data=st.binary(max_size=200), text=st.text(max_size=50), cut=st.sampled_from([b"", b"\r\n", b"\r\n--", b"--x"]))
def test_a_form_comes_out_as_a_client_put_it_in(data: bytes, text: str, cut: bytes) -> None:
    content = data + cut
    form = read_form(*as_sent(data={"prompt": text, "kinds[]": ["a", "b"]}, files={"file": ("a.wav", content)}))
    assert form.fields == {"prompt": text} and form.lists == {"kinds": ["a", "b"]}
    assert bytes(form.file("file") or b"") == content


def test_several_files_of_a_name_are_kept_and_asked_for_one_are_refused() -> None:
    form = read_form(*as_sent(data={}, files=[("image[]", ("a", b"1")), ("image[]", ("b", b"2"))]))
    assert [bytes(one) for one in form.files["image"]] == [b"1", b"2"]
    with pytest.raises(ApiError, match="sent 2 times"):
        form.file("image")


def test_what_is_before_the_first_boundary_and_after_the_last_is_no_part() -> None:
    assert read_form(KIND, b"hello\r\n" + body((field("a"), b"1")) + b"bye") == Form({"a": "1"}, {}, {})
    assert read_form(KIND, b"--xx--") == Form({}, {}, {})


def test_a_file_that_is_needed_and_missing_is_named() -> None:
    form = read_form(KIND, body((field("a"), b"1")))
    assert form.file("mask") is None
    with pytest.raises(ApiError, match="file is missing"):
        form.file("file", needed=True)


@pytest.mark.parametrize(
    ("kind", "raw", "says"),
    [
        ("application/json", b"{}", "Send this as a form"),
        ("multipart/form-data", b"--xx--", "Send this as a form"),
        (KIND, b"", "boundary is not in the body"),
        (KIND, b"--yy\r\n", "boundary is not in the body"),
        (KIND, b"--xxx\r\n\r\n\r\n--xx--", "boundary is not in the body"),
        (KIND, b"--xx\r\n" + field("a").encode() + b"\r\n\r\n1", "no end"),
        (KIND, b"--xx\r\n" + field("a").encode() + b"\r\n--xx--", "no head"),
        (KIND, b"--xx\r\n" + b"a" * 10_000 + b"\r\n\r\n\r\n--xx--", "no head"),
        (KIND, body(("Content-Disposition: form-data", b"1")), "has no name"),
        (KIND, body((field(""), b"1")), "has no name"),
        (KIND, body((field("a"), b"\xff\xfe")), "not text in UTF-8"),
        (KIND, body((field("a"), b"a" * (TEXT_BYTES_MAX + 1))), "a text may have"),
        (KIND, body(*[(field("a"), b"1")] * (PARTS_MAX + 1)), "more than 64 parts"),
    ],
)
def test_a_broken_form_is_refused(kind: str, raw: bytes, says: str) -> None:
    with pytest.raises(ApiError, match=says):
        read_form(kind, raw)


@given(raw=st.binary(max_size=80))
def test_no_bytes_are_answered_with_anything_but_a_form_or_an_error(raw: bytes) -> None:
    for body in (raw, b"--xx\r\n" + raw, b"--xx\r\n" + field("a").encode() + b"\r\n\r\n" + raw + b"\r\n--xx--"):
        with contextlib.suppress(ApiError):
            read_form(KIND, body)
