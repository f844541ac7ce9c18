"""The headers of multipart bodies: the boundary, and the head of each part.

Owns how these lines are read and how they are written for an engine. Never sees contents. What has more than one
reading is refused: parsers disagree about backslashes, repeated parameters, folded lines and encodings, and a field
that we take for a file's name must not be the model's to an engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from greenroom.errors import BadRequest

HEAD_BYTES_MAX = 16 * 1024
NAME_BYTES_MAX = 256
FILENAME_BYTES_MAX = 1_024
CONTENT_TYPE_BYTES_MAX = 256
BOUNDARY_BYTES_MAX = 70

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rb"[ \t]*;[ \t]*(?:(" + _TOKEN + rb')[ \t]*=[ \t]*("(?:[^"\\\r\n]|\\.)*"|[^\s;"]+))?')
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADER = re.compile(rb"(" + _TOKEN + rb"):([^\x00-\x08\x0a-\x1f\x7f]*)")
_PLAIN_ENCODINGS = frozenset((b"7bit", b"8bit", b"binary"))
# Browsers write them like this, and every parser reads them the same way.
_IN_QUOTES = str.maketrans({'"': "%22", "\\": "%5C", "\r": "%0D", "\n": "%0A", "\0": "%00"})


@dataclass(frozen=True, slots=True)
class PartHead:
    """What a part is called. A part with a file name is a file."""

    name: str
    filename: str | None
    content_type: bytes | None

    def rendered(self) -> bytes:
        """These headers as every parser reads them, with the blank line after them."""
        disposition = f'Content-Disposition: form-data; name="{self.name.translate(_IN_QUOTES)}"'
        if self.filename is not None:
            disposition += f'; filename="{self.filename.translate(_IN_QUOTES)}"'
        kind = b"" if self.content_type is None else b"Content-Type: " + self.content_type + b"\r\n"
        return disposition.encode("utf-8") + b"\r\n" + kind + b"\r\n"


def read_boundary(content_type: bytes | None) -> bytes:
    """The boundary that a Content-Type names. Raises BadRequest unless it is a form with exactly one."""
    kind, parameters = _split(content_type or b"", "Content-Type")
    if kind.lower() != b"multipart/form-data":
        raise BadRequest("This route takes a form: Content-Type must be multipart/form-data with a boundary.")
    boundary = parameters.get(b"boundary", b"")
    if _BOUNDARY.fullmatch(boundary) is None:
        raise BadRequest(f"The form's boundary is missing, or not 1 to {BOUNDARY_BYTES_MAX} characters of RFC 2046.")
    return boundary


def quoted(boundary: bytes) -> bytes:
    """A boundary as it stands in a Content-Type."""
    return boundary if re.fullmatch(_TOKEN, boundary) else b'"' + boundary + b'"'


def read_part_head(raw: bytes) -> PartHead:
    """The head of one part, without the blank line after it. Raises BadRequest for what has no single reading."""
    headers = _read_lines(raw)
    if headers.get(b"content-transfer-encoding", b"binary").lower() not in _PLAIN_ENCODINGS:
        raise BadRequest("A part of the form has a Content-Transfer-Encoding; send its bytes as they are.")
    content_type = headers.get(b"content-type") or None
    if content_type is not None and len(content_type) > CONTENT_TYPE_BYTES_MAX:
        raise BadRequest(f"The Content-Type of a part has more than {CONTENT_TYPE_BYTES_MAX} bytes.")
    kind, parameters = _split(headers.get(b"content-disposition", b""), "Content-Disposition")
    if kind.lower() != b"form-data":
        raise BadRequest("A part of the form has no Content-Disposition: form-data.")
    return PartHead(_name_in(parameters), _filename_in(parameters), content_type)


def _read_lines(raw: bytes) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for line in raw.split(b"\r\n"):
        # A line break that is not CRLF, a folded line and a space before the colon do not match.
        found = _HEADER.fullmatch(line)
        if found is None:
            raise BadRequest("A part of the form has a malformed header.")
        name = found[1].lower()
        if name in headers:
            raise BadRequest("A part of the form has a header twice.")
        headers[name] = found[2].strip(b" \t")
    return headers


def _split(value: bytes, header: str) -> tuple[bytes, dict[bytes, bytes]]:
    """`kind; name=value; name="value"` as kind and parameters, with quotes and escapes removed."""
    end = value.find(b";") if b";" in value else len(value)
    kind, position = value[:end].strip(), end
    parameters: dict[bytes, bytes] = {}
    while position < len(value):
        found = _PARAMETER.match(value, position)
        if found is None or found.end() == position:
            raise BadRequest(f"The {header} of the form is malformed.")
        position = found.end()
        if found[1] is not None:
            name = found[1].lower()
            if name in parameters:
                raise BadRequest(f"The {header} of the form has a parameter twice.")
            parameters[name] = found[2]
    return kind, {name: _unquoted(said, name) for name, said in parameters.items()}


def _unquoted(said: bytes, name: bytes) -> bytes:
    if not said.startswith(b'"'):
        return said
    inner = said[1:-1]
    # In a file's name a backslash does no harm, because we write the name anew. Elsewhere parsers disagree.
    if b"\\" in inner and name != b"filename":
        raise BadRequest("A quoted parameter of the form has a backslash.")
    return re.sub(rb'\\(["\\])', rb"\1", inner)


def _name_in(parameters: dict[bytes, bytes]) -> str:
    raw = parameters.get(b"name", b"")
    if not raw or len(raw) > NAME_BYTES_MAX or b"name*" in parameters:
        raise BadRequest(f"A part of the form has no name, or one that is not 1 to {NAME_BYTES_MAX} plain bytes.")
    return _text(raw)


def _filename_in(parameters: dict[bytes, bytes]) -> str | None:
    raw = parameters.get(b"filename")
    if b"filename*" in parameters:
        charset, _, rest = parameters[b"filename*"].partition(b"'")
        encoded = rest.partition(b"'")[2]
        if charset.lower() != b"utf-8":
            raise BadRequest("A file's name in the form is not UTF-8.")
        raw = unquote_to_bytes(encoded)
    if raw is None:
        return None
    if len(raw) > FILENAME_BYTES_MAX:
        raise BadRequest(f"A file's name in the form has more than {FILENAME_BYTES_MAX:,} bytes.")
    return _text(raw)


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest("A name in the form is not valid UTF-8.") from None
