"""Routes of llama.cpp and vLLM, whose bodies and answers pass as they are."""

from __future__ import annotations

from typing import Final

from greenroom.dialects.dialect import Dialect, Route
from greenroom.dialects.llama_server.tokenize import ERRORS, TOKENIZE_PATH

LLAMA_SERVER: Final = Dialect("llama-server", ERRORS)


def _native(name: str, *, is_text: bool = False, is_promptless: bool = False) -> Route:
    return Route(name, LLAMA_SERVER, is_text=is_text, is_native=True, is_promptless=is_promptless)


ROUTES: Final = {
    b"/completion": _native("completion", is_text=True),
    b"/infill": _native("infill", is_text=True),
    TOKENIZE_PATH: _native("tokenize", is_promptless=True),
    b"/detokenize": _native("detokenize", is_promptless=True),
    b"/apply-template": _native("apply_template", is_promptless=True),
    b"/pooling": _native("pooling"),
    b"/score": _native("score"),
}
