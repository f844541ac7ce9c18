"""The sampling parameters of a request: how tokens are chosen, where to stop, how many answers there are. Owns the
ranges of these fields, for chat and completions alike. Unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...serving.errors import ApiError, too_long
from ...serving.fields import Body, boolean, integer, mapping, number, refuse
from ..engine.requests import Sampling

STOPS_MAX = 16
STOP_CHARS_MAX = 256
# Sequences of one request, all prompts and choices together; a large batch holds as many.
SEQUENCES_MAX = 128
LOGPROBS_MAX = 20
BIASES_MAX = 1_024
TEMPERATURE_MAX = 100.0
TOKENS_MAX = 2**31
# A smaller share of the probability would leave no token to choose from.
TOP_P_MIN = 1e-6
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    sampling: Sampling
    stops: tuple[str, ...]
    choices: int
    max_tokens: int | None
    streams: bool
    tells_usage: bool
    """The stream ends with a usage event."""
    ignores_end: bool
    """Go on after the model's end token, up to max_tokens: for measuring."""

    def room(self, prompt_tokens: int, context: int) -> int:
        """How many tokens the answer may have. Raises ApiError if the prompt leaves none."""
        left = context - prompt_tokens
        if left < 1:
            raise too_long(
                f"The prompt has {prompt_tokens:,} tokens; prompt and answer together may have {context:,}. "
                "Shorten it or raise the model's ctx_size."
            )
        return left if self.max_tokens is None else min(self.max_tokens, left)

    def sampling_of(self, choice: int) -> Sampling:
        """Each choice gets its own seed: the same seed would give the same answer."""
        seed = self.sampling.seed
        if seed is None or choice == 0:
            return self.sampling
        return replace(self.sampling, seed=(seed + choice) & _SEED_MASK)


def read_sampling_params(body: Body, logprobs: int | None, vocabulary: int) -> SamplingParams:
    """The parameters of a body. The endpoint reads `logprobs`, which has two shapes. Raises ApiError."""
    streams = boolean(body, "stream")
    return SamplingParams(
        sampling=_sampling(body, logprobs, vocabulary),
        stops=_stops(body),
        choices=integer(body, "n", 1, SEQUENCES_MAX) or 1,
        max_tokens=_max_tokens(body),
        streams=streams,
        tells_usage=streams and boolean(mapping(body, "stream_options") or {}, "include_usage"),
        ignores_end=boolean(body, "ignore_eos"),
    )


def _sampling(body: Body, logprobs: int | None, vocabulary: int) -> Sampling:
    seed = integer(body, "seed", -(2**63), 2**64 - 1)
    return Sampling(
        temperature=number(body, "temperature", 1.0, 0.0, TEMPERATURE_MAX),
        top_p=max(number(body, "top_p", 1.0, 0.0, 1.0), TOP_P_MIN),
        # Some clients send -1 for "all".
        top_k=max(integer(body, "top_k", -1, 2**31) or 0, 0),
        min_p=number(body, "min_p", 0.0, 0.0, 1.0),
        presence_penalty=number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=number(body, "repetition_penalty", 1.0, 0.01, 10.0),
        seed=None if seed is None else seed & _SEED_MASK,
        logit_bias=_biases(body, vocabulary),
        logprobs=logprobs,
    )


def _max_tokens(body: Body) -> int | None:
    """If both names are given, the newer one counts."""
    newer = integer(body, "max_completion_tokens", 1, TOKENS_MAX)
    older = integer(body, "max_tokens", 1, TOKENS_MAX)
    return older if newer is None else newer


def _stops(body: Body) -> tuple[str, ...]:
    said = body.get("stop")
    if said is None:
        return ()
    stops = [said] if isinstance(said, str) else said
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        refuse("stop", "a string or a list of strings", said)
    if len(stops) > STOPS_MAX or any(not 0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
        raise ApiError(f"stop must be at most {STOPS_MAX} sequences of 1 to {STOP_CHARS_MAX} characters.", param="stop")
    return tuple(stops)


def _biases(body: Body, vocabulary: int) -> Mapping[int, float]:
    said = mapping(body, "logit_bias") or {}
    if len(said) > BIASES_MAX:
        raise ApiError(f"logit_bias may name at most {BIASES_MAX} tokens.", param="logit_bias")
    biases = {}
    for token in said:
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
            raise ApiError(
                f"logit_bias: {token[:40]!r} is no token of this model, which has 0 to {vocabulary - 1}.",
                param="logit_bias",
            )
        try:
            biases[int(token)] = number(said, token, 0.0, -100.0, 100.0)
        except ApiError as error:
            raise ApiError(f"logit_bias: {error.message}", param="logit_bias") from None
    return biases
