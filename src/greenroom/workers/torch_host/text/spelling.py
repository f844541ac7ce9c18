"""How a single token is spelled, in characters and in bytes: what log probabilities are listed by.

Owns the tables of the two common alphabets. A token may be half a character: its bytes are then exact and its text is
not. Never used for the answer itself, whose tokens are decoded in company.
"""

from __future__ import annotations

import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Speller:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        self._added = set(getattr(tokenizer, "added_tokens_decoder", {}))
        decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._is_byte_level = "ByteLevel" in decoder
        # One entry for each token ever asked for: bounded by the vocabulary.
        self._known: dict[int, tuple[str, bytes]] = {}

    def spell(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of this token; both empty for one that the tokenizer does not have."""
        known = self._known.get(token)
        if known is None:
            raw = self._bytes(token)
            known = self._known[token] = raw.decode(errors="replace"), raw
        return known

    def _bytes(self, token: int) -> bytes:
        # A head may be wider than its tokenizer.
        piece = self._tokenizer.convert_ids_to_tokens(token) if token < self._size else None
        if not isinstance(piece, str):
            return b""
        if token in self._added:
            return piece.encode()
        if self._is_byte_level:
            return b"".join(_BYTES.get(letter, letter.encode()) for letter in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace(_SPACE, " ").encode()


def _byte_letters() -> dict[str, bytes]:
    """Byte-level tokenizers write each byte as a letter: itself where it can be seen, else one from 256 onwards."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): bytes([byte]) for byte in seen}
    hidden = [byte for byte in range(256) if byte not in seen]
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(hidden)}


_BYTES = _byte_letters()
