"""`/tokenize`, which llama.cpp and vLLM both have, with other fields: `content` is llama.cpp's, `prompt` is vLLM's.

Owns the translation where the caller uses one form and the engine the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from greenroom.dialects.chat import TEXT_BYTES_MAX, error_message
from greenroom.dialects.neutral import Fields, read, refuse_fields
from greenroom.dialects.shapes import Dialect, engine_error
from greenroom.dialects.translation import nothing
from greenroom.errors import BadRequest, EngineFault

TOKENIZE_PATH: Final = b"/tokenize"
LLAMACPP_FIELD: Final = "content"
VLLM_FIELD: Final = "prompt"


class _Tokens(msgspec.Struct):
    """The numbers stay the bytes that the engine sent: to decode a million of them holds up all callers."""

    tokens: Raw


_tokens: Final = msgspec.json.Decoder(_Tokens)
_text: Final = msgspec.json.Decoder(str)
_flag: Final = msgspec.json.Decoder(bool | None)
_NUMBERS: Final = b"0123456789, \t\r\n"
_encode: Final = msgspec.json.Encoder().encode


def tokenize_translation(fields: Fields, *, engine_is_vllm: bool) -> TokenizeTranslation | None:
    """None if the engine has the caller's fields. Raises BadRequest for what the other one cannot do."""
    if engine_is_vllm and LLAMACPP_FIELD in fields:
        return TokenizeTranslation(_to_vllm, lambda tokens: {"tokens": tokens})
    if not engine_is_vllm and LLAMACPP_FIELD not in fields:
        refuse_fields(fields, ("messages",), "cannot be counted by llama.cpp here; ask /v1/messages/count_tokens.")
        return TokenizeTranslation(_to_llamacpp, lambda tokens: {"count": _count(bytes(tokens)), "tokens": tokens})
    return None


def _to_vllm(fields: Fields) -> Fields:
    refuse_fields(fields, ("with_pieces",), "is llama.cpp's, and this model's engine has no pieces.")
    read(fields, LLAMACPP_FIELD, _text)
    special = read(fields, "add_special", _flag) is True
    return {"model": fields["model"], "prompt": fields[LLAMACPP_FIELD], "add_special_tokens": Raw(_encode(special))}


def _to_llamacpp(fields: Fields) -> Fields:
    if read(fields, VLLM_FIELD, _text) is None:
        raise BadRequest("content is missing: it says which text to tokenize.", param="content")
    special = read(fields, "add_special_tokens", _flag) is not False
    return {"model": fields["model"], "content": fields[VLLM_FIELD], "add_special": Raw(_encode(special))}


@dataclass(frozen=True, slots=True)
class TokenizeTranslation:
    request: Callable[[Fields], Fields]
    write: Callable[[Raw], dict[str, Any]]
    stream_type: bytes = b"application/json"
    path: bytes = TOKENIZE_PATH
    bytes_max: int = TEXT_BYTES_MAX
    long: Callable[[], None] = nothing

    def stream(self) -> None:
        return None

    def next_number(self, sent: bytes) -> int:
        return 0

    def whole(self, status: int, body: bytes) -> bytes:
        """Raises EngineFault if a good answer cannot be read."""
        if status != 200:
            return engine_error(Dialect.LLAMACPP, status, error_message(body))
        try:
            tokens = _tokens.decode(body).tokens
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineFault("The engine answered no list of tokens.", details=str(error)) from None
        if bytes(tokens).translate(None, _NUMBERS) != b"[]":
            raise EngineFault("The engine answered no list of tokens.")
        return _encode(self.write(tokens))


def _count(tokens: bytes) -> int:
    return tokens.count(b",") + 1 if tokens[1:-1].strip() else 0
