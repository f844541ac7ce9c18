"""Generation requests and their results: the seam between the API and the engine. Owns the records and protocols that
both sides use. Never imports torch: the API side of the worker is tested without it. Read `InferenceEngine` first."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .model_shape import TokenLimits

if TYPE_CHECKING:
    import torch

EndReason = Literal["stop", "length", "cancelled", "error"]


class PromptTooLong(ValueError):
    """A prompt that can never fit. The message says what, which and what to do."""


class UnknownToken(ValueError):
    """A token id that the loaded weights have no row for. The message says which, and which exist."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is sampled. Temperature zero takes the likeliest token; `top_k` zero means all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """None: not wanted. n: log probabilities of the sampled token and of the n likeliest."""


class Constraint(Protocol):
    """Which tokens may come next in one sequence. Has state; used by the model's thread only."""

    def fill(self, row: torch.Tensor) -> None:
        """Write one bit per token, set if it may come next: bit `i % 32` of word `i // 32` is token `i`. `row` is
        one-dimensional int32 in CPU memory, contiguous, ceil(vocabulary / 32) long. All of it is written."""

    def accept(self, token: int) -> None:
        """This token was sampled. Call once for each token, stop tokens included."""

    @property
    def is_done(self) -> bool:
        """No more tokens may come: the sequence ends with "stop"."""


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class End:
    reason: EndReason
    """"stop": a stop token (which is not handed to the listener) or the constraint is done."""
    error: str | None = None
    compute_s: float = 0.0
    is_memory: bool = False
    """True if the device has too little memory for this sequence even alone."""


class Listener(Protocol):
    """Called from the model's thread. Each call must return at once."""

    def on_token(self, token: Token) -> None: ...

    def on_end(self, end: End) -> None:
        """Exactly once, after the last token."""


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """One prompt to be continued."""

    id: str
    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    listener: Listener
    tenant: str = ""
    tag: str = ""
    uses_cache: bool = True
    constraint: Constraint | None = None
    cancelled: bool = False
    """Set by the API from any thread; the engine ends the sequence within one step."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were found in the prefix cache. Set by the engine, once, before the first token."""


Vectors = list[list[float]]


class InferenceEngine(Protocol):
    """A loaded model, as the API sees it. Every method may be called from any thread and returns at once."""

    context: int
    """Tokens of the longest prompt and answer together."""
    limits: TokenLimits
    """Which token ids and positions the model has."""

    def submit(self, *requests: GenerationRequest) -> None:
        """Queue these requests. As many as fit join the batch before any of them generates; the rest wait in order.
        Raises PromptTooLong if one can never fit, and UnknownToken; then none is queued."""

    def embed(self, inputs: Sequence[Sequence[int]], skipped: Sequence[int]) -> Future[Vectors]:
        """One vector per input. `skipped`: how many tokens at the beginning of each are computed but not pooled. Raises
        PromptTooLong for an input that can never fit, and UnknownToken."""

    def flush(self, tenant: str | None, tag: str | None) -> tuple[int, int]:
        """Drop cached prefixes of this tenant and tag; None means any. Returns tokens removed and bytes freed."""

    @property
    def in_flight(self) -> int: ...


_log = logging.getLogger(__name__)


class CallbackQueue:
    """Calls back on an event loop from other threads. Many calls posted together cost one wake-up of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_scheduled = False

    def post(self, callback: Callable[[Any], None], value: object) -> None:
        """From any thread: have the loop call `callback(value)`. Calls keep the order of posting."""
        self._calls.append((callback, value))
        if not self._is_scheduled:
            self._is_scheduled = True
            self._schedule()

    def _schedule(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: there is nothing left to call.
            self._calls.clear()

    def _deliver(self) -> None:
        # Cleared before the first call is taken: a call posted from here on schedules again, so none is left behind.
        self._is_scheduled = False
        while self._calls:
            callback, value = self._calls.popleft()
            try:
                callback(value)
            except Exception:
                # A failing callback must not keep the others from being called.
                _log.exception("a letter could not be received")
