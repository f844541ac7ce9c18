"""A long JSON body without its long texts and lists of numbers, which stay where the body lies, in memory or on disk.

Owns the scan that takes them out, the count of values, and how they are put back into what an engine is sent. In their
place the outline has marks: `<mark.7\\/>` at the end of a text, a number in a list. All that is decoded, translated and
joined again is the outline, whose size the count bounds. A mark is drawn for each body. Only outlines are held here,
never texts that were taken out; whether those are JSON and UTF-8 is checked by the scan, which knows no other rule.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import secrets
from array import array
from collections.abc import Iterator
from heapq import merge
from typing import Final

from greenroom.errors import BadRequest
from greenroom.http.body import Body, Spliced

# Scanned before other requests get their turn. The densest JSON takes two milliseconds.
STEP_BYTES: Final = 32 * 1024
# Texts and lists of numbers above this are taken out, and once the outline is long, those above the second bound.
LONG_BYTES: Final = 4_096
DENSE_BYTES: Final = 128
DENSE_FROM_BYTES: Final = 1024 * 1024
# A URL stays up to this, so that its host can be read.
URL_BYTES_MAX: Final = 8_192
# What one value may have in an outline, on average: a text that stays. Some steps take the whole outline at once.
_VALUE_BYTES: Final = 136
# Numbers of marks in lists have six digits.
_NUMBERED_MAX: Final = 1_000_000

# A text, or one that goes on behind the end of what is searched. Possessive: each byte is looked at once.
_STRING: Final = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\\Z)?+)', re.DOTALL)
_CLOSED: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# The inside of a text, as far as it is whole.
_TEXT: Final = re.compile(rb'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+')
# A text that is a URL, or may become one.
_URL: Final = re.compile(rb'"https?:(?:[!#-\[\]-~]|\\/)*+"?+')
_ESCAPE_BYTES: Final = 6
# Its beginning, never cut within an escape or a pair of them; of more bytes than one a character may be cut.
_UNIT: Final = rb'(?:[^"\\]|\\u[dD][89abAB]..\\u....|\\u....|\\[^u])'
_UNIT_BYTES_MAX: Final = 12
_HEADS: Final = {
    long_bytes: re.compile(_UNIT + rb"{0,%d}+" % (long_bytes // _UNIT_BYTES_MAX), re.DOTALL)
    for long_bytes in (LONG_BYTES, DENSE_BYTES)
}
_SPACES: Final = re.compile(rb"[ \t\r\n]{2,}")
# A number that is written longer: to read one of megabytes takes long, in a step that nothing interrupts.
_LONG_NUMBER: Final = re.compile(rb"[-+.0-9eE]{%d}" % (LONG_BYTES + 1))
_NUMBERS: Final = re.compile(rb"[-+.0-9eE, \t\r\n]{%d,}" % DENSE_BYTES)


class Outline:
    """`text` is the outline. The numbers of its marks count the places of the body that were taken out."""

    __slots__ = ("_begins", "_body", "_ends", "_grown", "_mark", "_starts", "text")

    def __init__(self, body: Body, text: bytes, scan: _Scan) -> None:
        self._body = body
        self.text = text
        self._begins, self._ends, self._grown = scan.begins, scan.ends, scan.grown
        self._starts = b"<%b." % scan.mark, scan.digits
        self._mark = re.compile(rb"<%b\.([0-9a-f]+)(\\*)/>|%b([0-9]{6})" % (scan.mark, scan.digits))

    def put_back(self, text: bytes) -> bytes | Spliced:
        """JSON with marks as what it stands for. The text of a text has its escapes escaped."""
        spliced, end = Spliced(self._body, text), 0
        # A search for the pattern takes twenty times as long, and no other thread runs meanwhile.
        for at in merge(*(_places(text, start) for start in self._starts)):
            if (found := self._mark.match(text, at)) is None:
                continue
            number = int(found[3]) if found[3] else int(found[1], 16)
            # A name of the caller's may have been copied with its mark, but no other number is there.
            if number >= len(self._begins):
                continue
            # As it was sent: `\/`. Decoded and encoded: `/`. Within a text that is JSON itself: `\\/`.
            is_nested = len(found[2] or b"") > 1
            end = found.end()
            grown = self._grown[number] if is_nested else 0
            spliced.put(found.start(), end, self._begins[number], self._ends[number], grown)
        return spliced if end else text


async def outline_of(body: Body, values_max: int, turn: asyncio.Lock) -> Outline:
    """Scan a body step by step, each when it has the turn.

    It is counted with the body until that is closed. Raises BodiesFull if there is no room for it, and BadRequest for
    what is no JSON, as far as is seen, and for too many values.
    """
    scan, held = _Scan(values_max), 0
    for chunk in body.chunks():
        for begin in range(0, len(chunk), STEP_BYTES):
            async with turn:
                scan.feed(chunk[begin : begin + STEP_BYTES])
            body.hold(scan.bytes - held)
            held = scan.bytes
            await asyncio.sleep(0)
    text = scan.text()
    # Both take some ten milliseconds for the longest outline.
    await asyncio.sleep(0)
    scan.expect_names(text)
    return Outline(body, text, scan)


async def count_values(body: Body, values_max: int) -> None:
    """Raises BadRequest if it has more values. Numbers count, and what is no JSON is counted alike."""
    values, rest = 0, b""
    for chunk in body.chunks():
        parts, rest = _split(rest + chunk)
        values += _values(b"".join(parts[::2]))
        if values > values_max:
            raise BadRequest(f"The body has more than {values_max:,} JSON values, which is the limit.")
        await asyncio.sleep(0)


def _places(text: bytes, part: bytes) -> Iterator[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + len(part))


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """What is between texts, a text, what is between texts …; and a text that does not end here."""
    parts = _STRING.split(data)
    if len(parts) > 1 and not parts[-1] and _CLOSED.fullmatch(parts[-2]) is None:
        return parts[:-2], parts[-2]
    return parts, b""


def _values(between: bytes) -> int:
    return between.count(b",") + between.count(b"[") + between.count(b"{")


class _Scan:
    """Is fed the body in any pieces. `begins` and `ends` are what was taken out; `grown`: by how many bytes that grows
    when it is escaped once more."""

    def __init__(self, values_max: int) -> None:
        self._values_max = values_max
        self.mark = secrets.token_hex(8).encode()
        # Of ten digits: with six more still a number of 64 bits.
        self.digits = b"%d" % (10**9 + secrets.randbelow(8 * 10**9))
        self.begins, self.ends, self.grown = array("Q"), array("Q"), array("Q")
        self._parts: list[bytes] = []
        self.bytes = self._values = self._texts = 0
        # What is not scanned yet, and where it begins in the body.
        self._held = b""
        self._at = 0
        # Within a text that is taken out, which has its entry already.
        self._in_text = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_ascii = True

    def feed(self, data: bytes) -> None:
        self._expect_utf8(data)
        data, self._held = self._held + data, b""
        if self._in_text:
            data = self._take_text(data)
        if not self._in_text:
            self._take_values(data)
        if self._values > self._values_max or self._texts > 2 * self._values_max:
            raise BadRequest(
                f"The body has more than {self._values_max:,} JSON values, which is the limit (server.json_values_max)."
            )
        if self.bytes > DENSE_FROM_BYTES + _VALUE_BYTES * self._values_max:
            raise BadRequest(
                f"The body has more than {self.bytes:,} bytes beside long texts and lists of numbers, too many for "
                f"{self._values_max:,} JSON values, which is the limit (server.json_values_max)."
            )

    def text(self) -> bytes:
        """The outline of all that was fed. What is held is the rest of a body that was cut off."""
        if self._in_text:
            raise BadRequest("The body is not valid JSON: it ends within a text.")
        self._expect_utf8(b"", is_last=True)
        return b"".join((*self._parts, self._held))

    def expect_names(self, text: bytes) -> None:
        """Raises BadRequest if the name of a field was taken out."""
        if re.search(rb'<%b\.[0-9a-f]+\\/>"\s*:' % self.mark, text) is not None:
            raise BadRequest(
                f"The name of a field of the body is too long: it may have {LONG_BYTES - 2:,} bytes, or "
                f"{DENSE_BYTES - 2} behind the first {DENSE_FROM_BYTES:,} bytes that are no long texts."
            )

    def _expect_utf8(self, data: bytes, *, is_last: bool = False) -> None:
        # A character may be parted.
        if self._is_ascii and data.isascii():
            return
        self._is_ascii = False
        try:
            self._decoder.decode(data, final=is_last)
        except UnicodeDecodeError as error:
            raise BadRequest(f"The body is not valid UTF-8: {error.reason}.") from None
        self._is_ascii = not self._decoder.getstate()[0]

    def _take_values(self, data: bytes) -> None:
        """All that is whole in these bytes."""
        parts, rest = _split(data)
        long_bytes = DENSE_BYTES if self.bytes > DENSE_FROM_BYTES else LONG_BYTES
        if len(data) > long_bytes:
            at = self._at
            for index, part in enumerate(parts):
                if len(part) > long_bytes:
                    parts[index] = self._short_text(part, at, long_bytes) if index % 2 else self._few_numbers(part, at)
                at += len(part)
        self._values += _values(b"".join(parts[::2]))
        self._texts += len(parts) // 2
        self._keep(b"".join(parts))
        self._at += len(data) - len(rest)
        if len(rest) > long_bytes and not _is_url(rest):
            self._begin_text(rest, long_bytes)
        else:
            self._held = rest

    def _keep(self, part: bytes) -> None:
        self._parts.append(part)
        self.bytes += len(part)

    def _short_text(self, text: bytes, at: int, long_bytes: int) -> bytes:
        if _is_url(text):
            return text
        end = _head_end(text, long_bytes)
        if _TEXT.fullmatch(text, end, len(text) - 1) is None:
            raise _no_text()
        return text[:end] + self._taken_out(at + end, at + len(text) - 1, _growth(text, end, len(text) - 1)) + b'"'

    def _taken_out(self, begin: int, end: int, grown: int) -> bytes:
        self.begins.append(begin)
        self.ends.append(end)
        self.grown.append(grown)
        return b"<%b.%x\\/>" % (self.mark, len(self.begins) - 1)

    def _begin_text(self, text: bytes, long_bytes: int) -> None:
        end = _head_end(text, long_bytes)
        self._at += end
        self._keep(text[:end] + self._taken_out(self._at, self._at, 0))
        self._in_text = True
        # It does not end here.
        self._take_text(text[end:])

    def _take_text(self, data: bytes) -> bytes:
        """Go on in a text that is taken out. Gives back what follows it."""
        found = _TEXT.match(data)
        end = 0 if found is None else found.end()
        self._at += end
        self.ends[-1] = self._at
        self.grown[-1] += _growth(data, 0, end)
        if data[end : end + 1] == b'"':
            self._in_text = False
            self._at += 1
            self._keep(b'"')
            return data[end + 1 :]
        self._held = data[end:]
        if self._held and (self._held[:1] != b"\\" or len(self._held) >= _ESCAPE_BYTES):
            raise _no_text()
        return b""

    def _few_numbers(self, between: bytes, at: int) -> bytes:
        """Without long lists of numbers, but for their first and last one, and without much white space."""
        kept, done = [], 0
        for found in _NUMBERS.finditer(between):
            begin = between.find(b",", found.start(), found.end()) + 1
            end = between.rfind(b",", found.start(), found.end())
            if 0 < begin < end and len(self.begins) < _NUMBERED_MAX:
                self._taken_out(at + begin, at + end, 0)
                kept += [_SPACES.sub(b" ", between[done:begin]), b"%b%06d" % (self.digits, len(self.begins) - 1)]
                done = end
        few = b"".join((*kept, _SPACES.sub(b" ", between[done:])))
        if len(few) > LONG_BYTES and _LONG_NUMBER.search(few) is not None:
            raise BadRequest(f"A number in the body has more than {LONG_BYTES:,} digits.")
        return few


def _is_url(text: bytes) -> bool:
    return len(text) <= URL_BYTES_MAX and _URL.fullmatch(text) is not None


def _head_end(text: bytes, long_bytes: int) -> int:
    """Where a text that has an opening quote may be cut."""
    head = _HEADS[long_bytes].match(text, 1)
    end = 1 if head is None else head.end()
    # Not within a character.
    while end > 1 and text[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _growth(text: bytes, begin: int, end: int) -> int:
    return text.count(b"\\", begin, end) + text.count(b'"', begin, end)


def _no_text() -> BadRequest:
    return BadRequest("The body is not valid JSON: a text in it has a wrong escape or a control character.")
