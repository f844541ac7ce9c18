"""`/tokenize`, which llama.cpp and vLLM both have, with other fields: `content` is llama.cpp's, `prompt` is vLLM's.

Owns the translation where the caller uses one form and the engine the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from greenroom.dialects.errors import ErrorShape
from greenroom.dialects.neutral import Fields, read, refuse_fields
from greenroom.dialects.translation import JSON, Translation
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


class LlamaServerErrors(ErrorShape):
    def body(self, status: int, error: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        return {"error": {**error, "code": status}}


ERRORS: Final = LlamaServerErrors()


def tokenize_translation(fields: Fields, *, engine_is_vllm: bool) -> Translation | None:
    """None if the engine has the caller's fields. Raises BadRequest for what the other one cannot do."""
    if engine_is_vllm and LLAMACPP_FIELD in fields:
        return _translation(_to_vllm, lambda tokens: {"tokens": tokens})
    if not engine_is_vllm and LLAMACPP_FIELD not in fields:
        refuse_fields(fields, ("messages",), "cannot be counted by llama.cpp here; ask /v1/messages/count_tokens.")
        return _translation(_to_llamacpp, lambda tokens: {"count": _count(bytes(tokens)), "tokens": tokens})
    return None


def _translation(request: Callable[[Fields], Fields], write: Callable[[Raw], dict[str, Any]]) -> Translation:
    def answer(body: bytes) -> bytes:
        try:
            tokens = _tokens.decode(body).tokens
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineFault("The engine answered no list of tokens.", details=str(error)) from None
        if bytes(tokens).translate(None, _NUMBERS) != b"[]":
            raise EngineFault("The engine answered no list of tokens.")
        return _encode(write(tokens))

    return Translation(ERRORS, TOKENIZE_PATH, request, answer, stream_type=JSON)


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


def _count(tokens: bytes) -> int:
    return tokens.count(b",") + 1 if tokens[1:-1].strip() else 0
