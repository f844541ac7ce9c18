"""The output of one sequence: tokens become text, text is cut at stop sequences, calls and reasoning are split off.

Owns the state of this on the event loop; the model's thread only posts callbacks. Never writes JSON and does the same
whether the caller streams or not: it passes on pieces, in order, and then the end.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from ...serving.errors import ApiError, failed, unavailable
from ..engine.requests import CallbackQueue, End, GenerationRequest, Token
from ..sandbox.grammar import JsonConstraint
from ..sandbox.schema_trials import too_complex
from .harmony import HarmonyReader
from .tokens import Detokeniser
from .tool_calls import CallReader, OutputPiece, ScoredToken, hopeful

_log = logging.getLogger(__name__)


class OutputListener(ABC):
    """Hears on the loop what becomes of sequences."""

    @abstractmethod
    def say(self, output: OutputStream, piece: OutputPiece) -> None: ...

    @abstractmethod
    def over(self, output: OutputStream) -> None:
        """Exactly once for each, and last."""


class OutputStream:
    """Reads one sequence for its listener, which is set before the sequence begins."""

    def __init__(
        self,
        index: int,
        callbacks: CallbackQueue,
        detokeniser: Detokeniser,
        stops: StopFinder,
        reader: CallReader | HarmonyReader | None,
    ) -> None:
        self.index = index
        self.tokens = 0
        """How many there are so far."""
        self.finish = ""
        """stop, length or tool_calls, once it is over."""
        self.end: End | None = None
        self.error: ApiError | None = None
        self.listener: OutputListener
        self.request: GenerationRequest
        self._callbacks = callbacks
        self._detokeniser = detokeniser
        self._stops = stops
        self._reader = reader
        self._has_called = False
        self._is_silent = False
        # Tokens with text that is still held back, each with the end of its text.
        self._waiting: deque[tuple[ScoredToken, int]] = deque()
        self._heard_chars = 0
        self._let_out_chars = 0

    # --- called by the model's thread ---

    def on_token(self, token: Token) -> None:
        self._callbacks.post(self._take, token)

    def on_end(self, end: End) -> None:
        self._callbacks.post(self._close, end)

    # --- on the event loop ---

    def silence(self) -> None:
        """Drop everything from now on: the caller has left or has its error."""
        self._is_silent = True

    def _take(self, token: Token) -> None:
        if self._stops.is_found or self._is_silent or self.error is not None:
            return
        try:
            self.tokens += 1
            text = self._detokeniser.add(token.id)
            self._remember(token, text)
            self._say(self._stops.add(text))
        except Exception:
            self._break()
        if self._stops.is_found:
            self.request.cancelled = True

    def _close(self, end: End) -> None:
        if self._is_silent:
            return
        self.end = end
        try:
            if self.error is None and not self._stops.is_found:
                self.error = self._error_of(end)
            if self.error is None:
                rest = self._stops.add(self._detokeniser.end())
                self._say(rest + self._stops.end(), is_last=True)
        except Exception:
            self._break()
        self.finish = "tool_calls" if self._has_called else "stop" if self._stops.is_found else end.reason
        self.listener.over(self)

    def _say(self, text: str, is_last: bool = False) -> None:
        piece = OutputPiece(text) if self._reader is None else self._reader.add(text)
        if self._reader is not None and is_last:
            piece.add(self._reader.end())
        piece.chosen = self._let_out(len(text), is_last)
        self._has_called = self._has_called or bool(piece.calls)
        if piece:
            self.listener.say(self, piece)

    def _remember(self, token: Token, text: str) -> None:
        if token.logprob is not None:
            chosen = ScoredToken(token.id, token.logprob, token.top, self._heard_chars)
            self._waiting.append((chosen, self._heard_chars + len(text)))
        self._heard_chars += len(text)

    def _let_out(self, chars: int, is_last: bool) -> list[ScoredToken]:
        """Tokens with text that is out by now, at least in part. Tokens after a stop sequence never are."""
        self._let_out_chars += chars
        out = []
        while self._waiting:
            chosen, end = self._waiting[0]
            is_out = chosen.offset < self._let_out_chars or end <= self._let_out_chars
            if not (is_out or (is_last and not self._stops.is_found)):
                break
            out.append(self._waiting.popleft()[0])
        return out

    def _error_of(self, end: End) -> ApiError | None:
        constraint = self.request.constraint
        if isinstance(constraint, JsonConstraint) and constraint.problem is not None:
            return too_complex(constraint.param, f"the answer could not be held to it ({constraint.problem})")
        if end.is_memory:
            return ApiError(
                f"The device has too little memory for this request, even alone: {end.error}. Send less, or try again.",
                status=503,
                code="out_of_memory",
            )
        if end.reason == "error":
            return failed(end.error or "The model failed at this request.")
        if end.reason == "cancelled":
            return unavailable("The model was put to sleep before it had answered.")
        return None

    def _break(self) -> None:
        """A bug of ours ends this sequence and no other."""
        _log.exception("an answer could not be read")
        self.error = failed("Something went wrong inside the worker.")
        self.request.cancelled = True


class StopFinder:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def add(self, text: str) -> str:
        """The text that is certain to come before any stop sequence."""
        if not self._stops:
            return text
        if self.is_found:
            return ""
        self._held += text
        # The stop that is complete first counts, and the longest of several: so it does not matter where pieces end.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_found = True
            return self._release(min(found)[1])
        return self._release(len(self._held) - hopeful(self._held, self._stops))

    def end(self) -> str:
        """The text that was held back, which was not a stop sequence."""
        return "" if self.is_found else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], "" if self.is_found else self._held[length:]
        return released
