"""An engine that generates what a test tells it to, from a thread of its own for each request."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from greenroom.workers.torch_host.engine.model_shape import TokenLimits
from greenroom.workers.torch_host.engine.requests import End, GenerationRequest, PromptTooLong, Token, Vectors
from greenroom.workers.torch_host.failures import Failure

WAIT_S = 30.0


class FakeEngine:
    """`script` gives the tokens of a request. With `holds_after`, each token after the first so many waits for `go`.

    With `places`, only so many requests are admitted at once; the others wait for `go`.
    """

    def __init__(
        self, script: Callable[[GenerationRequest], Sequence[int]], context: int = 2048, vocabulary: int = 512
    ) -> None:
        self.context = context
        self.limits = TokenLimits(vocabulary, vocabulary)
        self.asks: list[GenerationRequest] = []
        self.ends: list[End] = []
        self.embedded: list[Sequence[Sequence[int]]] = []
        self.skipped: list[Sequence[int] | None] = []
        self.vectors: Vectors | Exception | None = None
        self.holds_after: int | None = None
        self.go = threading.Event()
        self.fails_with: str | None = None
        self.lacks_memory = False
        self.is_gone = False
        self.cached_tokens = 0
        self.places: int | None = None
        self._script = script
        self._vocabulary = vocabulary
        self._changed = threading.Condition()

    @property
    def in_flight(self) -> int:
        return len(self.asks) - len(self.ends)

    def submit(self, *asks: GenerationRequest) -> None:
        if self.is_gone:
            raise Failure("This model is not being served any more.")
        if any(len(ask.tokens) + ask.max_tokens > self.context for ask in asks):
            raise PromptTooLong("It can never fit.")
        self.asks += asks
        for ask in asks[: self.places]:
            ask.cached_tokens = self.cached_tokens
        for ask in asks:
            self._start(ask)

    def _start(self, ask: GenerationRequest) -> None:
        threading.Thread(target=self._answer, args=(ask,), name=f"fake {ask.id}", daemon=True).start()

    def embed(self, inputs: Sequence[Sequence[int]], skipped: Sequence[int]) -> Future[Vectors]:
        self.embedded.append(inputs)
        self.skipped.append(skipped)
        answer = self.vectors if self.vectors is not None else [[float(len(one)), 0.0, 1.0, 0.5] for one in inputs]
        done: Future[Vectors] = Future()
        settle = done.set_exception if isinstance(answer, Exception) else done.set_result
        threading.Thread(target=settle, args=(answer,), daemon=True).start()
        return done

    def flush(self, tenant: str | None, tag: str | None) -> tuple[int, int]:
        return 0, 0

    def wait_for_ends(self, count: int) -> list[End]:
        """The ends of so many requests; fails if they do not come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ends) >= count, WAIT_S), f"{len(self.ends)} ended"
        return self.ends

    def _answer(self, ask: GenerationRequest) -> None:
        if ask.cached_tokens is None:
            self._held(ask)
            ask.cached_tokens = self.cached_tokens
        end = self._said(ask)
        ask.listener.on_end(end)
        with self._changed:
            self.ends.append(end)
            self._changed.notify_all()

    def _said(self, ask: GenerationRequest) -> End:
        script = iter(self._script(ask))
        said = 0
        while True:
            if self.holds_after is not None and said >= self.holds_after:
                self._held(ask)
            if ask.cancelled:
                return End("cancelled")
            if self.fails_with is not None:
                return End("error", error=self.fails_with, is_memory=self.lacks_memory)
            token = self._next(ask, script, said)
            if token is None or token in ask.stop_tokens:
                return End("stop", compute_s=0.25)
            ask.listener.on_token(self._token(ask, token))
            said += 1
            if ask.constraint is not None and ask.constraint.is_done:
                return End("stop")
            if said >= ask.max_tokens:
                return End("length")

    def _held(self, ask: GenerationRequest) -> None:
        deadline = threading.Event()
        for _ in range(int(WAIT_S / 0.005)):
            if ask.cancelled or self.go.is_set():
                return
            deadline.wait(0.005)

    def _next(self, ask: GenerationRequest, script: object, said: int) -> int | None:
        if ask.constraint is None:
            return next(script, None)  # type: ignore[call-overload, no-any-return]
        row = torch.zeros((self._vocabulary + 31) // 32, dtype=torch.int32)
        ask.constraint.fill(row)
        allowed = [token for token in range(self._vocabulary) if int(row[token // 32]) >> (token % 32) & 1]
        ends = [token for token in allowed if token in ask.stop_tokens]
        token = ends[0] if ends else random.Random(f"{ask.sampling.seed} {said}").choice(allowed)
        ask.constraint.accept(token)
        return token

    def _token(self, ask: GenerationRequest, token: int) -> Token:
        if ask.sampling.logprobs is None:
            return Token(token)
        top = tuple((token + place, -0.5 - place) for place in range(ask.sampling.logprobs))
        return Token(token, -0.5, top)
