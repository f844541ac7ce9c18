"""Reads answers in the Harmony format (gpt-oss): messages with a header, each on a channel, some of them to a tool.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

`analysis` is reasoning and `final` the answer. `commentary` is part of the answer too, unless it is a call: a message
with `to=functions.NAME` in either part of its header. The marks are special tokens. Here they are characters that no
text has, so that an answer may mention the format. Owns the header and the arguments held back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Final, Literal

from .tokens import TextCodec
from .tool_calls import OutputPiece, ToolCall

# Unicode reserves these for use within a program.
_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
_ALL: Final = f"{_START}{_CHANNEL}{_CONSTRAIN}{_MESSAGE}{_END}"
_MARKS: Final[Mapping[str, str]] = {
    "<|start|>": _START,
    "<|channel|>": _CHANNEL,
    "<|constrain|>": _CONSTRAIN,
    "<|message|>": _MESSAGE,
    "<|end|>": _END,
    # The model's last token. It only ends a message if generation goes on.
    "<|return|>": _END,
    "<|call|>": _END,
}
_LAST: Final = ("<|return|>", "<|call|>")
# Ends the prompt of an answer that must follow a schema, which allows no marks.
ANSWER_HEADER: Final = "<|channel|>final<|message|>"
_SPLIT = re.compile(f"([{_ALL}])")
_RECIPIENT = re.compile(rf"(?:^|[\s{_ALL}])to=([^\s{_ALL}]+)")
_NAMESPACE: Final = "functions."
# Between messages of one kind: the API's answer joins them.
_BETWEEN: Final = "\n\n"
# Longer than the longest name of a tool. A longer text is not a header.
HEADER_CHARS_MAX: Final = 1_024

Kind = Literal["text", "reasoning", "call"]


class Harmony:
    """The format's tokens in one model."""

    def __init__(self, text: TextCodec) -> None:
        self.marks = {token: _MARKS[text.speller.spell(token)[0]] for token in text.specials_spelled(_MARKS)}
        """Special tokens, and the character that stands for each."""
        self.stops = text.specials_spelled(_LAST)

    @staticmethod
    def of(text: TextCodec, template: str) -> Harmony | None:
        """None if the template or the tokenizer does not have the marks."""
        if any(mark not in template for mark in ("<|start|>", "<|channel|>", "<|message|>")):
            return None
        found = Harmony(text)
        return found if set(found.marks.values()) >= {_START, _CHANNEL, _MESSAGE, _END} else None


class HarmonyReader:
    """Parses one answer. It begins in the middle of a header: the prompt ends with the role."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the tools offered. Without any, nothing is a call."""
        self._names = names
        self._header: str | None = ""
        """The header so far. None: its message is being read."""
        self._is_bare = True
        """No mark has begun this header, so it may turn out to be plain text."""
        self._kind: Kind = "text"
        self._tool = ""
        self._arguments = ""
        self._is_new = True
        self._said: set[Kind] = set()

    def add(self, text: str) -> OutputPiece:
        """The text, reasoning and calls that are certain now."""
        found = OutputPiece()
        for part in _SPLIT.split(text):
            if part and part in _ALL:
                self._mark(part, found)
            elif self._header is None:
                self._say(part, found)
            else:
                self._head(self._header + part, found)
        return found

    def end(self) -> OutputPiece:
        """The answer is over: arguments are a call if they are complete, else text."""
        found = OutputPiece()
        self._close(found)
        return found

    def _mark(self, mark: str, found: OutputPiece) -> None:
        if self._header is None or mark in (_START, _END):
            # The message before has ended, even without an end mark.
            self._close(found)
            self._header = ""
        self._is_bare = mark == _END
        if mark == _MESSAGE:
            self._open(self._header)
        elif mark in (_CHANNEL, _CONSTRAIN):
            self._header += mark

    def _head(self, header: str, found: OutputPiece) -> None:
        self._header = header
        begun = header[:HEADER_CHARS_MAX].strip()
        is_plain = self._is_bare and begun and not (begun.startswith("to=") or "to=".startswith(begun))
        if is_plain or len(header) > HEADER_CHARS_MAX:
            self._open("")
            self._say(_SPLIT.sub("", header), found)

    def _open(self, header: str) -> None:
        """A message begins; its header says of which kind."""
        self._header, self._is_new, self._arguments = None, True, ""
        channel = header.partition(_CHANNEL)[2].split(_CONSTRAIN)[0].split()
        recipient = _RECIPIENT.search(header)
        to = recipient[1] if recipient else ""
        self._kind = "reasoning" if channel[:1] == ["analysis"] else "text"
        if self._names and (to.startswith(_NAMESPACE) or to in self._names):
            self._kind, self._tool = "call", to.removeprefix(_NAMESPACE)

    def _say(self, text: str, found: OutputPiece) -> None:
        if self._kind == "call":
            self._arguments += text
        elif text:
            text = _BETWEEN + text if self._is_new and self._kind in self._said else text
            self._is_new = False
            self._said.add(self._kind)
            if self._kind == "reasoning":
                found.reasoning += text
            else:
                found.text += text

    def _close(self, found: OutputPiece) -> None:
        """A message has ended, or text that might have become a header."""
        if self._header is None and self._kind == "call":
            arguments = self._arguments.strip() or "{}"
            if _is_object(arguments):
                found.calls.append(ToolCall(self._tool, arguments))
            else:
                self._kind = "text"
                self._say(arguments, found)
        elif self._header and self._is_bare:
            header = self._header
            self._open("")
            self._say(header, found)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
