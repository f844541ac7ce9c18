"""Forms with files (audio, images): their fields are read, and the rest is passed on without being loaded.

Owns the scan of a multipart/form-data body (RFC 7578) in bounded memory, and its rewriting for the engine. Strict on
purpose: where two parsers could read a body differently it is refused, and what an engine gets are part headers written
here, not the caller's. File contents are only ever byte ranges; a file's name is passed on and never used.

    scan(body, content_type) → MultipartForm        what was asked, and where each part lies
    MultipartForm.rewrite(model)      → Rewritten   the body for the engine, read from the same spool while it is sent
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from greenroom.errors import BadRequest, GatewayBug
from greenroom.serving.body.part_head import HEAD_BYTES_MAX, PartHead, quoted, read_boundary, read_part_head
from greenroom.serving.body.peek import (
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    OURS,
    check_client_id,
    check_model,
    keep_alive_s,
    read_budget_s,
)

PARTS_MAX = 100
# Text fields are kept up to this size; larger ones are passed on unread, unless they are ours to read.
FIELD_BYTES_MAX = 64 * 1024
# This much is scanned before other requests get their turn: about a millisecond.
_TURN_BYTES = 1024 * 1024
_FEED_BYTES_MIN = 16 * 1024

# `n` is how many answers a provider may be paid for.
_READ_BY_US = frozenset(("model", "stream", "n", KEEP_ALIVE))


class BodySource(Protocol):
    """A body as the edge holds it: in memory or spooled. Its chunks may be asked for again."""

    def __len__(self) -> int: ...
    def chunks(self) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field or file: its head, and where in the body its content lies."""

    head: PartHead
    begin: int
    end: int


@dataclass(slots=True)
class MultipartForm:
    """`fields` are the small text fields by name; the last one counts where a name is sent more than once."""

    source: BodySource
    boundary: bytes
    parts: list[FormPart] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        return self.fields["model"]

    @property
    def stream(self) -> bool:
        return self.fields.get("stream", "").strip().lower() in ("true", "1")

    @property
    def priority(self) -> str | None:
        return self.fields.get("x_priority")

    @property
    def client_id(self) -> str | None:
        return self.fields.get("x_client_id")

    @property
    def budget_s(self) -> float | None:
        said = self.fields.get("x_budget_s")
        return None if said is None else read_budget_s(said)

    @property
    def keep_alive_s(self) -> float | None:
        """An empty field counts as missing: that is how forms leave one out."""
        name = KEEP_ALIVE_S if self.fields.get(KEEP_ALIVE_S) else KEEP_ALIVE
        said = self.fields.get(name)
        return keep_alive_s(said, param=name) if said else None

    def expect(self, names: Iterable[str]) -> None:
        """Raises BadRequest unless it has all of these; several files of one name may be sent as `name[]`."""
        sent = {part.head.name.removesuffix("[]") for part in self.parts}
        for name in names:
            if name not in sent:
                raise BadRequest(f"The form has no field {name}, which this route needs.", param=name)

    def rewrite(
        self, model_name: str | None = None, *, drop: frozenset[str] = frozenset(), put: Mapping[str, str] | None = None
    ) -> Rewritten:
        """The body for the engine: without our own fields and those in `drop`, with those in `put`.

        `model_name` replaces the model that was asked for; None leaves it. Raises BadRequest if the caller's boundary
        occurs in a value that is put in.
        """
        puts = dict(put or {})
        if model_name is not None:
            puts["model"] = model_name
        kept = [part for part in self.parts if not self._is_dropped(part.head.name, drop, puts)]
        # New fields come first: an engine that reads as it receives has them before the file.
        return Rewritten(self.source, self.boundary, puts, kept)

    def _is_dropped(self, name: str, drop: frozenset[str], puts: Mapping[str, str]) -> bool:
        return name.startswith(OURS) or name == KEEP_ALIVE or name in drop or name in puts


class Rewritten:
    """A form's body with other fields. Made again from the source each time it is read, and as long as it says."""

    def __init__(self, source: BodySource, boundary: bytes, puts: Mapping[str, str], parts: list[FormPart]) -> None:
        self._source = source
        self.content_type = b"multipart/form-data; boundary=" + quoted(boundary)
        # Literal bytes and ranges of the source, in the order in which they are sent.
        self._pieces: list[bytes | tuple[int, int]] = []
        between = b"--" + boundary + b"\r\n"
        for name, value in puts.items():
            self._add(between + PartHead(name, None, None).rendered() + _checked_value(value, boundary) + b"\r\n")
        for part in parts:
            self._add(between + part.head.rendered())
            self._pieces.append((part.begin, part.end))
            self._add(b"\r\n")
        self._add(b"--" + boundary + b"--\r\n")
        self._length = sum(len(piece) if isinstance(piece, bytes) else piece[1] - piece[0] for piece in self._pieces)

    @property
    def is_spooled(self) -> bool:
        """It is never in one piece, whatever its source is."""
        return True

    def __len__(self) -> int:
        return self._length

    def read(self) -> bytes:
        """All of it. For a large one prefer `chunks`."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """Piece by piece; may be asked for again."""
        cursor = _Cursor(self._source.chunks())
        for piece in self._pieces:
            if isinstance(piece, bytes):
                yield piece
            else:
                yield from cursor.between(*piece)

    def _add(self, literal: bytes) -> None:
        """Neighbours become one piece, so that many small fields do not become many small writes."""
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytes):
            self._pieces[-1] = last + literal
        else:
            self._pieces.append(literal)


class _Cursor:
    """Reads ascending ranges of a source in one pass."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = b""
        # Where in the source the chunk begins.
        self._begin = 0

    def between(self, begin: int, end: int) -> Iterator[bytes]:
        while begin < end:
            offset = begin - self._begin
            piece = self._chunk[offset : offset + end - begin] if offset < len(self._chunk) else b""
            if piece:
                begin += len(piece)
                yield piece
            else:
                self._next()

    def _next(self) -> None:
        self._begin += len(self._chunk)
        chunk = next(self._chunks, None)
        if chunk is None:
            raise GatewayBug("A body is shorter than it was when it was scanned.")
        self._chunk = chunk


# --- the scan -------------------------------------------------------------------------------------------------------


def scan(source: BodySource, content_type: bytes | None) -> MultipartForm:
    """Read a form's fields. Raises BadRequest for anything but one plain, complete form with a model."""
    scanner = FormScanner(source, read_boundary(content_type))
    for chunk in _gathered(source.chunks()):
        scanner.feed(chunk)
    return scanner.finished()


async def scan_in_turns(source: BodySource, content_type: bytes | None) -> MultipartForm:
    """Like `scan`, for large bodies: yields to the loop after every mebibyte, and after every head of a part."""
    scanner = FormScanner(source, read_boundary(content_type))
    since_turn = heads = 0
    for chunk in _gathered(source.chunks()):
        for begin in range(0, len(chunk), _FEED_BYTES_MIN):
            scanner.feed(chunk[begin : begin + _FEED_BYTES_MIN])
            since_turn += _FEED_BYTES_MIN
            if since_turn >= _TURN_BYTES or scanner.heads > heads:
                since_turn, heads = 0, scanner.heads
                await asyncio.sleep(0)
    return scanner.finished()


def _gathered(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in fewer pieces: a body that was sent byte by byte must not cost a step for each."""
    held: list[bytes] = []
    held_bytes = 0
    for chunk in chunks:
        held.append(chunk)
        held_bytes += len(chunk)
        if held_bytes >= _FEED_BYTES_MIN:
            yield b"".join(held)
            held, held_bytes = [], 0
    yield b"".join(held)


class FormScanner:
    """A machine that is fed the body in any pieces:

    opening → after_boundary → head → content → after_boundary → … → closing
    """

    def __init__(self, source: BodySource, boundary: bytes) -> None:
        self._form = MultipartForm(source, boundary)
        self._opening = b"--" + boundary
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray()
        # Where in the body the buffer begins, and how much of it was searched without success.
        self._base = 0
        self._searched = 0
        self._head: PartHead | None = None
        self._content_begin = 0
        # The content of a text field as far as it was seen; None for files and for fields that are too large.
        self._text: bytearray | None = None
        # One step: True when it made progress, False when it needs more bytes.
        self._step: Callable[[], bool] = self._at_opening

    @property
    def heads(self) -> int:
        """How many heads of parts were read, each of which can take as long as much content."""
        return len(self._form.parts) + (self._head is not None)

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._step():
            pass

    def finished(self) -> MultipartForm:
        if self._step != self._at_closing or bytes(self._buffer) not in (b"", b"\r\n"):
            raise BadRequest("The form ends before its closing boundary, or goes on after it.")
        if "model" not in self._form.fields:
            raise BadRequest("The form has no field model, which says which model to ask.", param="model")
        return self._form

    def _consume(self, count: int) -> None:
        del self._buffer[:count]
        self._base += count
        self._searched = 0

    def _at_opening(self) -> bool:
        length = len(self._opening)
        if len(self._buffer) < length:
            return False
        if not self._buffer.startswith(self._opening):
            raise BadRequest("The form does not begin with the boundary its Content-Type names.")
        self._consume(length)
        self._step = self._after_boundary
        return True

    def _after_boundary(self) -> bool:
        if len(self._buffer) < 2:
            return False
        ending = bytes(self._buffer[:2])
        if ending not in (b"\r\n", b"--"):
            raise BadRequest("A boundary in the form is followed by something else than a line break.")
        self._consume(2)
        self._step = self._at_head if ending == b"\r\n" else self._at_closing
        return True

    def _at_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", self._searched)
        if end > HEAD_BYTES_MAX or (end < 0 and len(self._buffer) > HEAD_BYTES_MAX):
            raise BadRequest(f"The headers of a part have more than {HEAD_BYTES_MAX:,} bytes.")
        if end < 0:
            self._searched = max(0, len(self._buffer) - 3)
            return False
        self._head = read_part_head(bytes(self._buffer[:end]))
        self._consume(end + 4)
        self._content_begin = self._base
        self._text = bytearray() if self._head.filename is None else None
        if len(self._form.parts) >= PARTS_MAX:
            raise BadRequest(f"The form has more than {PARTS_MAX} parts.")
        self._step = self._in_content
        return True

    def _in_content(self) -> bool:
        at = self._buffer.find(self._delimiter, self._searched)
        # What cannot be the beginning of the delimiter is content.
        content = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        self._keep_text(content)
        self._consume(content)
        if at < 0:
            return False
        self._end_part()
        self._consume(len(self._delimiter))
        self._step = self._after_boundary
        return True

    def _at_closing(self) -> bool:
        if len(self._buffer) > 2:
            raise BadRequest("The form goes on after its closing boundary.")
        return False

    def _keep_text(self, count: int) -> None:
        if self._text is None:
            return
        if len(self._text) + count > FIELD_BYTES_MAX:
            self._text = None
        else:
            self._text += self._buffer[:count]

    def _end_part(self) -> None:
        head = self._head
        assert head is not None
        self._form.parts.append(FormPart(head, self._content_begin, self._base))
        if head.name in _READ_BY_US or head.name.startswith(OURS):
            self._form.fields[head.name] = self._read(head)
        elif self._text is not None:
            self._form.fields[head.name] = self._text.decode("utf-8", "replace")

    def _read(self, head: PartHead) -> str:
        """A field that the gateway acts on: it must be there once, as valid text."""
        name = head.name
        if name in self._form.fields:
            raise BadRequest(f"The form has more than one field {name}.", param=name)
        if self._text is None:
            raise BadRequest(f"{name} is a file or has more than {FIELD_BYTES_MAX:,} bytes.", param=name)
        try:
            value = self._text.decode("utf-8")
        except UnicodeDecodeError:
            raise BadRequest(f"{name} is not valid UTF-8.", param=name) from None
        _CHECKS.get(name, str)(value)
        return value


def _checked_value(value: str, boundary: bytes) -> bytes:
    encoded = value.encode("utf-8")
    if b"--" + boundary in encoded:
        raise BadRequest("The form's boundary occurs in a value that is set for this model. Choose another boundary.")
    return encoded


_CHECKS: dict[str, Callable[[str], object]] = {
    "model": check_model,
    "x_client_id": check_client_id,
    "x_budget_s": read_budget_s,
}
