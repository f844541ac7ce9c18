"""One line for each thing that happened, on standard error.

Owns how lines look (text for people, JSON for machines) and where they go. Never raises and never keeps anything: a
line that cannot be written is lost, and the request goes on. Values are escaped, so that no caller can forge a line by
sending a line break.

    12:03:01.123 info  wake done model=qwen-72b slot=s-7 move=m-19 outcome=done took_s=0.41
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

from greenroom.base.names import public_name

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
_LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "warn": WARNING, "error": ERROR}
_NAMES = {DEBUG: "debug", INFO: "info", WARNING: "warning", ERROR: "error"}
# Four or five letters, so that what follows starts in the same column.
_SHORT_NAMES = {DEBUG: "debug", INFO: "info ", WARNING: "warn ", ERROR: "error"}
# Long enough for an engine's last lines; a body logged by mistake does not fill the disk.
VALUE_CHARS_MAX = 4_096

_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")
# What json does not escape although terminals act on it: DEL, C1 controls, line separators, text direction marks.
_INVISIBLE = re.compile(r"[\x7f-\xa0\xad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ud800-\udfff\ufff0-\uffff]")

Format = Callable[[int, str, str, Mapping[str, Any]], str]


class Logger:
    """Logs what happens in one area of the program. A field that is None is left out."""

    __slots__ = ("_area",)

    def __init__(self, area: str) -> None:
        self._area = area

    def debug(self, event: str, /, **fields: Any) -> None:
        if _sink.level <= DEBUG:
            _sink.write(DEBUG, self._area, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        if _sink.level <= INFO:
            _sink.write(INFO, self._area, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        if _sink.level <= WARNING:
            _sink.write(WARNING, self._area, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        _sink.write(ERROR, self._area, event, fields)

    def failed(self, event: str, error: Exception, /, **fields: Any) -> None:
        """What the system refused is a warning in its words; any other error is a bug."""
        if isinstance(error, OSError):
            self.warning(event, **{"file": error.filename, **fields}, error=error.strerror or error)
        else:
            self.bug(event, error, **fields)

    def bug(self, event: str, error: BaseException, /, **fields: Any) -> None:
        """An unexpected error, with its traceback in the same line."""
        _sink.write(ERROR, self._area, event, {**fields, "error": error, "traceback": _traceback(error)})


def get_logger(area: str) -> Logger:
    """A logger for this area. May be called before `setup`, which applies to all loggers."""
    return Logger(area)


def setup(level: str, format: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Set how to log from now on. No stream: standard error."""
    _sink.level = _LEVELS.get(level.lower(), INFO)
    _sink.format = _FORMATS.get(format.lower(), _text_line)
    _sink.stream = stream
    _adopt_library_logs()


def lost_lines() -> int:
    """Lines that could not be written since this process began."""
    return _sink.lost


class _Sink:
    """Where all loggers write. `lost` counts lines that could not be written."""

    __slots__ = ("format", "level", "lost", "stream")

    def __init__(self) -> None:
        self.level = INFO
        self.format: Format = _text_line
        self.stream: TextIO | None = None
        self.lost = 0

    def write(self, level: int, area: str, event: str, fields: Mapping[str, Any]) -> None:
        try:
            line = self.format(level, area, event, fields)
            # Looked up at each line, because sys.stderr may be replaced.
            stream = self.stream or sys.stderr
            stream.write(_encodable(line, stream) + "\n")
            stream.flush()
        except Exception:
            # A closed stream, a full disk, a value whose str() fails: there is nowhere left to report it.
            self.lost += 1


# --- how a line looks -----------------------------------------------------------------------------------------------


def _text_line(level: int, area: str, event: str, fields: Mapping[str, Any]) -> str:
    now = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    # The event is not quoted, but escaped: libraries put anything into it.
    parts = [f"{clock}.{int(now % 1 * 1000):03d} {_SHORT_NAMES[level]} {_escaped(_cut(event))[1:-1]}"]
    parts += [f"{name}={_text_value(value)}" for name, value in fields.items() if value is not None]
    return " ".join(parts)


def _text_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _cut(_said(value))
    return text if _PLAIN.fullmatch(text) else _escaped(text)


def _escaped(text: str) -> str:
    """Quoted, on one line, without anything a terminal acts on. Letters of all languages stay as they are."""
    return _visible(json.dumps(text, ensure_ascii=False))


def _visible(line: str) -> str:
    return line if line.isascii() and "\x7f" not in line else _INVISIBLE.sub(_as_escape, line)


def _as_escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _json_line(level: int, area: str, event: str, fields: Mapping[str, Any]) -> str:
    line: dict[str, Any] = {
        "ts": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": _NAMES[level],
        "area": area,
        "event": _cut(event),
    }
    for name, value in fields.items():
        if value is not None:
            # A field never replaces one of the four above.
            line[f"{name}_" if name in line else name] = _json_value(value)
    try:
        # These characters occur only inside strings, where JSON has the same escapes.
        return _visible(msgspec.json.encode(line, enc_hook=_said).decode())
    except (TypeError, ValueError, RecursionError):
        # Half a surrogate pair, keys that are no strings, a value that contains itself.
        return json.dumps({name: _said(value) for name, value in line.items()})


def _json_value(value: Any) -> Any:
    if isinstance(value, str | bytes | BaseException):
        return _cut(_said(value))
    return value


def _said(value: Any) -> str:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else public_name(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "…"


def _encodable(line: str, stream: TextIO) -> str:
    """The line in characters that this stream can encode: a terminal may be ASCII-only."""
    if line.isascii():
        return line
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)


def _traceback(error: BaseException) -> str:
    # The end says where it happened, so the cut keeps the end.
    return "".join(traceback.format_exception(error))[-VALUE_CHARS_MAX:]


# --- logs of libraries ----------------------------------------------------------------------------------------------


class _FromLibraries(logging.Handler):
    """Turns what asyncio and other libraries log into our lines, so that a JSON log is all JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        level = max((known for known in _NAMES if known <= record.levelno), default=DEBUG)
        # Libraries log a lot; only their warnings matter to an operator.
        if level < WARNING or _sink.level > level:
            return
        try:
            event = record.getMessage()
        except Exception:
            event = str(record.msg)
        error = record.exc_info[1] if record.exc_info else None
        fields = {} if error is None else {"error": error, "traceback": _traceback(error)}
        _sink.write(level, record.name, event, fields)


def _adopt_library_logs() -> None:
    root = logging.getLogger()
    if not any(isinstance(handler, _FromLibraries) for handler in root.handlers):
        root.addHandler(_FromLibraries())


_FORMATS: dict[str, Format] = {"text": _text_line, "json": _json_line}
_sink = _Sink()
