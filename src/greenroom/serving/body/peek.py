"""The top level of a JSON body, and no more.

Owns what we read of a request's body and how it is put together again for the engine. Values stay the bytes they were
sent as: never decoded, never rounded, never reordered inside. A key that is sent twice counts once, with its last
value, for us and for the engine, so that the model that was routed is the model that serves.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Raw

from greenroom.access.keys import bad_priority
from greenroom.config.kinds import SECONDS_MAX
from greenroom.errors import BadRequest
from greenroom.serving.body.bounded_json import TooManyKeys, decode_counting
from greenroom.serving.body.long_body import LongBody
from greenroom.serving.body.outline import Outline

# Top-level fields. The largest API has about forty; each costs some two hundred bytes here.
FIELDS_MAX: Final = 1_000
# Bodies up to this size cannot hold enough fields to hurt before they are counted.
_SMALL_BYTES: Final = 64 * 1024
_UTF8_STEP_BYTES: Final = 256 * 1024
CLIENT_ID_CHARS_MAX: Final = 128
# The longest path that Linux takes.
NAME_CHARS_MAX: Final = 4_096
# Such a path with each character escaped.
_COMPARED_BYTES_MAX: Final = 6 * NAME_CHARS_MAX
# Of all fields that an answer tells back: instructions and tools.
_TOLD_BYTES_MAX: Final = 256 * 1024
# Keys with this prefix are for the gateway. Engines never see them.
OURS: Final = "x_"
PRIORITY: Final = "x_priority"
CLIENT_ID: Final = "x_client_id"
BUDGET_S: Final = "x_budget_s"

# How long an answer may be at most, by the names of the two OpenAI routes and of llama.cpp.
TOKENS_MAX: Final = ("max_completion_tokens", "max_tokens", "n_predict")
TOKENS_ASKED_MAX: Final = 1_000_000_000

# What an answer must look like, in the words of OpenAI's two routes and of Anthropic's.
_FORMATS: Final = ("response_format", "text", "output_config")

# The two names of the field. The second one wins where both are sent.
KEEP_ALIVE: Final = "keep_alive"
KEEP_ALIVE_S: Final = "x_keep_alive_s"
FOR_EVER: Final = -1.0

# Far more than a time needs.
_TIME_CHARS_MAX: Final = 64
_NUMBER: Final = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(rf"({_NUMBER})(ns|us|µs|μs|ms|s|m|h)")
_PLAIN_SECONDS: Final = re.compile(_NUMBER)
_TIME: Final = re.compile(rf"(?:{_PART.pattern})+")


Fields = dict[str, Raw]

# Fields of requests for text and vectors that may hold content parts.
MESSAGES: Final = "messages"
CONTENT: Final = frozenset((MESSAGES, "input", "documents", "texts", "query", "prompt"))


class BodyFields:
    """`fields` has everything that was sent, of a `long` body its outline; the other attributes are read from it."""

    __slots__ = ("budget_s", "client_id", "fields", "keep_alive_s", "long", "model", "priority", "stream")

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.long: LongBody | None = None
        self.model = ""
        self.stream = False
        self.priority: int | str | None = None
        self.client_id: str | None = None
        self.budget_s: float | None = None
        self.keep_alive_s: float | None = None

    def name_model(self, name: str) -> None:
        """Name the model of a body that names none."""
        self.model, self.fields["model"] = name, Raw(_encoder.encode(name))


def copied(peeked: BodyFields) -> BodyFields:
    """The same, whose fields can be replaced."""
    copy = BodyFields(peeked.fields)
    copy.model, copy.stream, copy.priority, copy.client_id = (
        peeked.model,
        peeked.stream,
        peeked.priority,
        peeked.client_id,
    )
    copy.budget_s, copy.keep_alive_s, copy.long = peeked.budget_s, peeked.keep_alive_s, peeked.long
    return copy


_fields: Final = msgspec.json.Decoder(Fields)
_text: Final = msgspec.json.Decoder(str)
_flag: Final = msgspec.json.Decoder(bool | None)
_number_or_text: Final = msgspec.json.Decoder(int | str | None)
_SECONDS: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?", re.ASCII)
_number: Final = msgspec.json.Decoder(float | None)
_text_or_null: Final = msgspec.json.Decoder(str | None)
_time_or_null: Final = msgspec.json.Decoder(float | str | None)
_whole_or_null: Final = msgspec.json.Decoder(int | None)
_encoder: Final = msgspec.json.Encoder()
_NULL: Final = b"null"
_INCLUDE_USAGE: Final = b'{"include_usage":true}'


def peek(body: bytes) -> BodyFields:
    """Read the top level; the model is empty if it names none.

    Raises BadRequest, which names the field or the position that is wrong.
    """
    return _read_top_level(fields_of(body))


def peek_long(long: LongBody) -> BodyFields:
    """The same of a long body. Also raises Pending."""
    outline = long.outline
    fields = long.done("fields", lambda: fields_of(outline.text))
    peeked = _read_top_level(_with_whole_values(outline, fields))
    peeked.long = long
    return peeked


def fields_of(body: bytes) -> Fields:
    """The fields of the top level. Raises BadRequest."""
    fields = _read_fields(body)
    # Checks also the strings inside of values, so that engines get valid UTF-8.
    if not body.isascii():
        _expect_utf8(body)
    return fields


def _read_top_level(fields: Fields) -> BodyFields:
    """What they say to the gateway. Raises BadRequest."""
    peeked = BodyFields(fields)
    if PRIORITY in fields or CLIENT_ID in fields or BUDGET_S in fields:
        _read_ours(peeked)
    model = fields.get("model")
    if model is not None:
        peeked.model = check_model(_value(_text, model, "model", "a string"))
    stream = fields.get("stream")
    if stream is not None:
        peeked.stream = _value(_flag, stream, "stream", "true or false") is True
    if KEEP_ALIVE in fields or KEEP_ALIVE_S in fields:
        peeked.keep_alive_s = _read_keep_alive(fields)
    return peeked


def _with_whole_values(outline: Outline, fields: Fields) -> Fields:
    """What the gateway may compare or tell back, such as a model's path or tools, is not cut. Contents are longer."""
    whole, left = dict(fields), _TOLD_BYTES_MAX
    for name, raw in fields.items():
        value = outline.put_back(bytes(raw)) if len(raw) <= _TOLD_BYTES_MAX else b""
        if isinstance(value, bytes):
            continue
        size = len(value)
        if size <= _COMPARED_BYTES_MAX or (name not in CONTENT and size <= left):
            whole[name] = Raw(value.read())
            left -= size
    return whole


def join(fields: Fields, *, drop: frozenset[str], put: dict[str, bytes]) -> bytes:
    """The body for the engine: without our own fields and those in `drop`, with those in `put` (which are JSON)."""
    kept = dict(fields)
    for name in fields:
        if name in drop or name.startswith(OURS) or name == KEEP_ALIVE:
            del kept[name]
    for name, value in put.items():
        kept[name] = Raw(value)
    return _encoder.encode(kept)


def has_parts(fields: Fields, plain: str = "") -> bool:
    """False if all content is text: then it names no media. `plain` is a field that is known to be."""
    for name, raw in fields.items():  # noqa: SIM110 - a generator costs more than all it looks at
        if name in CONTENT and name != plain and holds_parts(name, raw):
            return True
    return False


def holds_parts(name: str, raw: Raw) -> bool:
    """Whether this field of content may be more than text."""
    # A message's content that is no list is text. Brackets cannot be escaped.
    return bytes(raw).find(b"[", 1) > 0 if name == MESSAGES else b"{" in bytes(raw)


def ask_for_usage(fields: Fields) -> tuple[bytes | None, bool]:
    """The stream_options that make the engine send usage (None: unchanged), and whether the client asked for usage.

    Raises BadRequest when stream_options is not an object.
    """
    said = fields.get("stream_options")
    if said is None or bytes(said) == _NULL:
        return _INCLUDE_USAGE, False
    options = _value(_fields, said, "stream_options", "an object")
    wanted = options.get("include_usage")
    if wanted is not None and _value(_flag, wanted, "stream_options.include_usage", "true or false"):
        return None, True
    options["include_usage"] = Raw(b"true")
    return msgspec.json.encode(options), False


def text(fields: Fields, name: str) -> str | None:
    """A field's text; None if it is missing or something else, which is the engine's to refuse."""
    raw = fields.get(name)
    try:
        return None if raw is None else _text.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def tokens_asked(fields: Fields) -> int:
    """How many tokens its answers may have together, as it says itself; 0 if it does not, or says it wrongly."""
    most = 0
    for name in TOKENS_MAX:
        if (raw := fields.get(name)) is not None:
            most = max(most, _count(raw))
    answers = fields.get("n")
    return most if answers is None else most * max(1, _count(answers))


def wants_json(fields: Fields) -> bool:
    """True if the answer must be JSON, by the field with which any of the dialects says so."""
    if (said := fields.get("format")) is not None and bytes(said) not in (_NULL, b'""'):
        return True
    texts = (bytes(fields[name]) for name in _FORMATS if name in fields)
    return any(text.startswith(b"{") and b'"json' in text for text in texts)


def _count(raw: Raw) -> int:
    try:
        return max(0, min(TOKENS_ASKED_MAX, _whole_or_null.decode(raw) or 0))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0


# --- values that forms have too -------------------------------------------------------------------------------------


def check_model(name: str) -> str:
    """Raises BadRequest for a name that no model can have."""
    if not name:
        raise BadRequest("model is empty; it says which model to ask.", param="model")
    if len(name) > NAME_CHARS_MAX:
        raise BadRequest(f"model has more than {NAME_CHARS_MAX:,} characters; no id or path does.", param="model")
    return name


def check_client_id(name: str) -> str:
    """Raises BadRequest for a name that cannot stand in logs."""
    if len(name) > CLIENT_ID_CHARS_MAX or not name.isprintable():
        limit = CLIENT_ID_CHARS_MAX
        raise BadRequest(f"x_client_id has at most {limit} characters, all of them printable.", param=CLIENT_ID)
    return name


def check_budget_s(seconds: float, *, param: str = BUDGET_S) -> float:
    """Raises BadRequest unless it is a positive number of seconds."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise BadRequest(f"{param} is a number of seconds above 0.", param=param)
    return seconds


def read_budget_s(said: str, *, param: str = BUDGET_S) -> float:
    """A budget that was sent as text. Raises BadRequest."""
    # float() accepts too much: 1_0, nan, digits of other scripts.
    seconds = float(said) if _SECONDS.fullmatch(said.strip()) else math.nan
    return check_budget_s(seconds, param=param)


def _read_ours(peeked: BodyFields) -> None:
    fields = peeked.fields
    peeked.priority = _value(_number_or_text, fields.get(PRIORITY), PRIORITY, bad_priority)
    client_id = _value(_text_or_null, fields.get(CLIENT_ID), CLIENT_ID, "a string")
    peeked.client_id = None if client_id is None else check_client_id(client_id)
    budget_s = _value(_number, fields.get(BUDGET_S), BUDGET_S, "a number of seconds")
    peeked.budget_s = None if budget_s is None else check_budget_s(budget_s)


def _read_keep_alive(fields: Fields) -> float | None:
    """Both names are read, so that a mistake in either is reported; `x_keep_alive_s` wins."""
    seconds: float | None = None
    for name in (KEEP_ALIVE, KEEP_ALIVE_S):
        said = _value(_time_or_null, fields.get(name), name, wrong_keep_alive)
        if said is not None:
            seconds = keep_alive_s(said, param=name)
    return seconds


# --- how long a model stays ---


def keep_alive_s(said: float | str, *, param: str) -> float:
    """Seconds, or FOR_EVER. Raises BadRequest, which names the field."""
    seconds = _seconds_of_text(said) if isinstance(said, str) else float(said)
    if not math.isfinite(seconds):
        raise wrong_keep_alive(param)
    return FOR_EVER if seconds < 0 else min(seconds, SECONDS_MAX)


def wrong_keep_alive(param: str) -> BadRequest:
    """The error for every kind of mistake in it."""
    return BadRequest(
        f'{param} is a number of seconds or a time such as "5m" or "1h30m"; 0 leaves when idle, -1 stays.', param=param
    )


def capped(seconds: float | None, most_s: float | None) -> float | None:
    """The time within the operator's bound."""
    if seconds is None or most_s is None:
        return seconds
    return most_s if seconds == FOR_EVER else min(seconds, most_s)


def _seconds_of_text(said: str) -> float:
    text = said.strip()
    if len(text) > _TIME_CHARS_MAX:
        return math.nan
    size = text[1:] if text[:1] in ("+", "-") else text
    sign = -1.0 if text[:1] == "-" else 1.0
    if _PLAIN_SECONDS.fullmatch(size):
        return sign * float(size)
    if not _TIME.fullmatch(size):
        return math.nan
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(size))


# --- decoding -------------------------------------------------------------------------------------------------------


def _read_fields(body: bytes) -> Fields:
    try:
        fields = _fields.decode(body) if len(body) <= _SMALL_BYTES else decode_counting(body, FIELDS_MAX)
    except msgspec.ValidationError as error:
        raise BadRequest(f"The body is not a JSON object: {_lower(error)}.") from None
    except UnicodeDecodeError:
        raise BadRequest("The body is not valid UTF-8: a key is not.") from None
    except msgspec.DecodeError as error:
        _refuse_json(body, error)
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    except TooManyKeys:
        raise _too_many_fields() from None
    if len(fields) > FIELDS_MAX:
        raise _too_many_fields()
    return fields


def _too_many_fields() -> BadRequest:
    return BadRequest(f"The body has more than {FIELDS_MAX:,} top-level fields.")


def _refuse_json(body: bytes, error: msgspec.DecodeError) -> NoReturn:
    if not body.strip():
        raise BadRequest("The body is empty; send a JSON object that names a model.") from None
    said = _lower(error)
    # The decoder says "truncated", without a position, also for half a surrogate pair at the end of a string.
    where = "" if "(byte " in said else f", or ends in half of a \\u pair (of {len(body):,} bytes)"
    raise BadRequest(f"The body is not valid JSON: {said}{where}.") from None


def _lower(error: Exception) -> str:
    """The decoder's message, to continue a sentence with."""
    said = str(error).removeprefix("JSON is malformed: ")
    return said[:1].lower() + said[1:]


def _expect_utf8(body: bytes) -> None:
    """Check step by step, so that a large body is never held as text."""
    try:
        if len(body) <= _SMALL_BYTES:
            body.decode()
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        for begin in range(0, len(body), _UTF8_STEP_BYTES):
            decoder.decode(body[begin : begin + _UTF8_STEP_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not valid UTF-8: {error.reason}.") from None


def _value(
    decoder: msgspec.json.Decoder[Any], raw: Raw | None, param: str, wanted: str | Callable[[str], BadRequest]
) -> Any:
    """The value of one field; None when it was not sent. `wanted` is what it should be, or the error that says so.

    A long one is refused: all callers wait while it is read.
    """
    if raw is None:
        return None
    if len(raw) > _SMALL_BYTES:
        raise BadRequest(f"{param} has more than {_SMALL_BYTES:,} bytes.", param=param)
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = BadRequest(f"{param} is not {wanted}.", param=param) if isinstance(wanted, str) else wanted(param)
        raise error from None
