"""Reads multipart forms: bodies that carry files, such as sound or pictures, beside their fields.

Owns the format (RFC 7578) and its bounds. A body is whole when it arrives here, and its files are views of it: nothing
is copied. The name of a file and the type that a client claims for it are attacker input, and neither is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.errors import MessageError
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any

from .errors import ApiError

PARTS_MAX = 64
PART_HEAD_BYTES_MAX = 8 * 1024
TEXT_BYTES_MAX = 256 * 1024
_FORM = "multipart/form-data"
_LINE_END = b"\r\n"


@dataclass(frozen=True, slots=True)
class Form:
    fields: Mapping[str, str]
    """Texts; of a repeated name the last counts, unless it ends in [], which collects them: see `lists`."""
    lists: Mapping[str, Sequence[str]]
    """Texts of names that end in [], without the brackets."""
    files: Mapping[str, Sequence[memoryview]]
    """Files by name, without brackets."""

    def file(self, name: str, *, needed: bool = False) -> memoryview | None:
        """The one file of this name. Raises ApiError if there are several, or none though it is needed."""
        found = self.files.get(name, ())
        if len(found) > 1:
            raise ApiError(f"{name} was sent {len(found)} times; send one file.", param=name)
        if not found and needed:
            raise ApiError(f"{name} is missing: send it as a file of the form.", param=name)
        return found[0] if found else None


def read_form(content_type: str, body: bytes) -> Form:
    """The fields and files of a form. Raises ApiError."""
    fields: dict[str, str] = {}
    lists: dict[str, list[str]] = {}
    files: dict[str, list[memoryview]] = {}
    for head, content in _parts(_boundary(content_type), body):
        name = head.get_param("name", header="content-disposition")
        if not isinstance(name, str) or not name:
            raise _broken("a part has no name")
        if head.get_param("filename", header="content-disposition") is not None:
            files.setdefault(name.removesuffix("[]"), []).append(content)
        elif name.endswith("[]"):
            lists.setdefault(name.removesuffix("[]"), []).append(_text(name, content))
        else:
            fields[name] = _text(name, content)
    return Form(fields, lists, files)


def _boundary(content_type: str) -> bytes:
    said = Message()
    said["content-type"] = content_type
    boundary = said.get_boundary()
    if said.get_content_type() != _FORM or not boundary:
        raise ApiError(f"Send this as a form: Content-Type {_FORM} with a boundary.", status=415, code="not_a_form")
    return boundary.encode("latin-1", "replace")


def _parts(boundary: bytes, body: bytes) -> list[tuple[Any, memoryview]]:
    found: list[tuple[Any, memoryview]] = []
    delimiter, view = _LINE_END + b"--" + boundary, memoryview(body)
    # The first delimiter may be at the very start, where no line ends before it.
    at = 0 if body.startswith(delimiter[2:]) else body.find(delimiter) + 2
    while at >= 2 or not found:
        start = at + len(delimiter) - 2
        if at == 1 or body[start : start + 2] not in (_LINE_END, b"--"):
            raise _broken("its boundary is not in the body")
        if body[start : start + 2] == b"--":
            return found
        # A part without headers has no name, so an empty head is found and refused as such.
        head_end, end = body.find(_LINE_END * 2, start), body.find(delimiter, start)
        if end < 0 or not start <= head_end <= end or head_end - start > PART_HEAD_BYTES_MAX:
            raise _broken("a part has no end, or no head")
        if len(found) == PARTS_MAX:
            raise ApiError(f"The form has more than {PARTS_MAX} parts.", status=413, code="form_too_large")
        found.append((_head(body[start + 2 : head_end]), view[min(head_end + 4, end) : end]))
        at = end + 2
    return found


def _head(raw: bytes) -> Any:
    try:
        return BytesHeaderParser().parsebytes(raw)
    except (MessageError, ValueError) as error:
        raise _broken("the head of a part cannot be read") from error


def _text(name: str, content: memoryview) -> str:
    if len(content) > TEXT_BYTES_MAX:
        raise ApiError(
            f"{name[:64]} has {len(content):,} bytes; a text may have {TEXT_BYTES_MAX:,}.", param=name, status=413
        )
    try:
        return bytes(content).decode()
    except UnicodeDecodeError:
        raise ApiError(f"{name[:64]} is not text in UTF-8. Is it a file without a file name?", param=name) from None


def _broken(why: str) -> ApiError:
    return ApiError(f"The form is broken: {why}.", code="broken_form")
