"""Turns tokens into text as they come, without ever sending half a character.

Owns what has been decoded and not yet said. A token is decoded beside those before it, because spaces and characters
of several bytes only come out right in company; so it serves byte-level and sentencepiece tokenizers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

# A character has at most four bytes; tokens of noise that never becomes one are let go after this many.
HELD_TOKENS_MAX = 16
# Tokens before the first that are decoded with it, so that a continuation begins with its space.
BEFORE_TOKENS = 6
_BROKEN = "\ufffd"


class Detokeniser:
    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        unspoken: Collection[int],
        before: Sequence[int] = (),
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """`unspoken` tokens have no text, `marks` the one given. `before` ends the text that is being continued."""
        self._decode = decode
        self._marks = marks or {}
        self._unspoken = unspoken
        self._said = [token for token in before[-BEFORE_TOKENS:] if token not in unspoken]
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        if token in self._marks:
            text = self.end() + self._marks[token]
            self._said = []
            return text
        if token in self._unspoken:
            return ""
        self._held.append(token)
        text = self._new_text()
        if text.endswith(_BROKEN) and len(self._held) < HELD_TOKENS_MAX:
            return ""
        return self._say(text)

    def end(self) -> str:
        """What was held back, with a replacement for a character that never became whole."""
        return self._say(self._new_text()) if self._held else ""

    def _new_text(self) -> str:
        before = self._decode(self._said) if self._said else ""
        return self._decode(self._said + self._held)[len(before) :]

    def _say(self, text: str) -> str:
        # The last tokens are company enough for the next. A token without text is no company: it keeps the old.
        if text:
            self._said, self._held = self._held[-BEFORE_TOKENS:], []
        else:
            self._said, self._held = (self._said + self._held)[-BEFORE_TOKENS:], []
        return text
