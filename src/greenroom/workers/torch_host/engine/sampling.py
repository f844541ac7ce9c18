"""Samples the next token of every row of a batch, on the device.

Owns the order in which sampling parameters apply: bias, penalties and constraint, then temperature, then top-k, top-p
and min-p, then the random draw. Never waits for the device: `PendingTokens` reads the result later. The same seed gives
the same token whatever else is in the batch. Read `BatchSampler.choose` first.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .requests import Constraint, Sampling, Token

# Below this temperature rounding leaves only the likeliest token.
TEMPERATURE_MIN = 1e-4
SEED_BITS = 62
WORD_BITS = 32
# The constants of splitmix64 as signed numbers, which torch has; products wrap around.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
# One bit less than a double holds, so no product with a total rounds up to the total.
_BITS = 52


class SequenceSampler:
    """The sampling parameters and state of one sequence. Outlives the batches it is part of."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], constraint: Constraint | None) -> None:
        self.sampling = sampling
        self.constraint = constraint
        self.seed = secrets.randbits(SEED_BITS) if sampling.seed is None else _signed(sampling.seed)
        self.is_greedy = sampling.temperature < TEMPERATURE_MIN
        self.filters = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self._prompt = prompt
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._one: torch.Tensor | None = None
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """True if nothing changes the scores before the temperature."""
        return not (self.penalises or self.sampling.logit_bias or self.constraint is not None)

    @property
    def penalises(self) -> bool:
        sampling = self.sampling
        return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)

    def adjust(self, scores: torch.Tensor) -> None:
        """Apply penalties and bias in place to this sequence's row."""
        if self.penalises:
            self._penalise(scores)
        if self.sampling.logit_bias:
            scores.index_add_(0, *self._bias_on(scores))

    def record(self, token: torch.Tensor) -> None:
        """Count this sampled token, which is still on the device."""
        if self._counts is not None and self._one is not None:
            # Allocates nothing: a failure after some rows of a batch would count those rows twice.
            self._counts.index_add_(0, token.view(1), self._one)

    def _bias_on(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._bias is None:
            bias = self.sampling.logit_bias
            values = torch.tensor(list(bias.values()), device=scores.device, dtype=scores.dtype)
            self._bias = torch.tensor(list(bias), device=scores.device), values
        return self._bias

    def _penalise(self, scores: torch.Tensor) -> None:
        sampling = self.sampling
        if self._counts is None or self._seen is None:
            # The head may have fewer rows than the embedding: tokens without a score need no penalty.
            prompt = [token for token in self._prompt if token < scores.shape[-1]]
            seen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
            seen[torch.tensor(prompt, dtype=torch.long, device=scores.device)] = True
            counts = torch.zeros(scores.shape, dtype=torch.int32, device=scores.device)
            # Assigned together at the end: if an allocation above fails, all of it is done again.
            self._seen, self._counts, self._one = seen, counts, torch.ones_like(counts[:1])
        generated = self._counts > 0
        if sampling.repetition_penalty != 1.0:
            penalised = torch.where(
                scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty
            )
            scores.copy_(torch.where(generated | self._seen, penalised, scores))
        scores.sub_(self._counts * sampling.frequency_penalty + generated * sampling.presence_penalty)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row, with log probabilities where wanted. On the device."""

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        return (self.tokens, self.logprobs, self.top_ids, self.top_logprobs)


class BatchSampler:
    """The samplers of a batch, row by row. Built again when the batch changes."""

    def __init__(self, samplers: Sequence[SequenceSampler], device: torch.device) -> None:
        self._samplers = samplers
        self._device = device
        self._is_simple = all(one.is_greedy and one.is_plain and one.sampling.logprobs is None for one in samplers)
        self._adjusted = [row for row, one in enumerate(samplers) if not one.is_plain]
        self._top = max((one.sampling.logprobs for one in samplers if one.sampling.logprobs is not None), default=None)
        self._unfiltered = [row for row, one in enumerate(samplers) if not one.is_greedy and not one.filters]
        self._filtered = [row for row, one in enumerate(samplers) if not one.is_greedy and one.filters]
        self._params: dict[str, torch.Tensor] = {}
        self._rows: dict[str, torch.Tensor] = {}
        if not self._is_simple:
            self._upload_params()

    @property
    def needs_host(self) -> bool:
        """True if the tokens so far must be on the host before the next can be sampled."""
        return any(one.constraint is not None for one in self._samplers)

    def choose(self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor | None = None) -> SamplerOutput:
        """Sample the next token of each row. Gives the same result again until `record` is called. `places`: the
        position of the token; `masks`: one bitmask of allowed tokens per row."""
        if self._is_simple:
            return SamplerOutput(logits.argmax(dim=-1))
        scores = logits.float()
        if scores.data_ptr() == logits.data_ptr():
            scores = logits.clone()
        known = None if self._top is None else scores.log_softmax(dim=-1)
        for row in self._adjusted:
            self._samplers[row].adjust(scores[row])
        if masks is not None:
            scores.masked_fill_(~allowed_by(masks, scores.shape[-1]), float("-inf"))
        return self._with_logprobs(self._pick(scores, places), known)

    def record(self, tokens: torch.Tensor) -> None:
        """Count these tokens, one per row. Call once per step, when nothing in the step can fail any more."""
        for row in self._adjusted:
            self._samplers[row].record(tokens[row])

    def _pick(self, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        tokens = scores.argmax(dim=-1)
        for name, among in (("unfiltered", _sample_all), ("filtered", self._sample_filtered)):
            rows = self._rows.get(name)
            if rows is not None:
                params = {key: value[rows] for key, value in self._params.items()}
                tempered = scores[rows] / params["temperature"][:, None].float()
                uniform = random_uniform(params["seed"].long(), places[rows])
                tokens[rows] = among(tempered, uniform, params)
        return tokens

    @staticmethod
    def _sample_filtered(scores: torch.Tensor, uniform: torch.Tensor, params: dict[str, torch.Tensor]) -> torch.Tensor:
        """Draw among the tokens that top-k, top-p and min-p leave."""
        ordered, ids = scores.sort(dim=-1, descending=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)[None, :]
        ordered = ordered.masked_fill(rank >= params["top_k"][:, None], float("-inf"))
        shares = ordered.double().softmax(dim=-1)
        # A token stays while the tokens before it have less than `top_p` together: the first always stays.
        before = shares.cumsum(dim=-1) - shares
        stays = (before < params["top_p"][:, None]) & (shares >= params["min_p"][:, None] * shares[:, :1])
        place = _draw(shares * (stays | (rank == 0)), uniform)
        return ids.gather(1, place[:, None])[:, 0]

    def _with_logprobs(self, tokens: torch.Tensor, known: torch.Tensor | None) -> SamplerOutput:
        if known is None or self._top is None:
            return SamplerOutput(tokens)
        own = known.gather(1, tokens[:, None])[:, 0]
        # At least one, to have a shape; each row later takes as many as it asked for.
        best = known.topk(max(1, min(self._top, known.shape[-1])), dim=-1)
        return SamplerOutput(tokens, own, best.indices, best.values)

    def _upload_params(self) -> None:
        params = [one.sampling for one in self._samplers]
        unlimited = 1 << 31
        numbers: dict[str, list[float] | list[int]] = {
            "temperature": [max(sampling.temperature, TEMPERATURE_MIN) for sampling in params],
            "top_p": [sampling.top_p for sampling in params],
            "min_p": [sampling.min_p for sampling in params],
            "top_k": [sampling.top_k or unlimited for sampling in params],
            "seed": [one.seed for one in self._samplers],
        }
        for name, values in numbers.items():
            dtype = torch.long if name in ("top_k", "seed") else torch.double
            self._params[name] = torch.tensor(values, dtype=dtype, device=self._device)
        for name, rows in (("unfiltered", self._unfiltered), ("filtered", self._filtered)):
            if rows:
                self._rows[name] = torch.tensor(rows, device=self._device)


class PendingTokens:
    def __init__(self, chosen: SamplerOutput) -> None:
        self._parts = [_to_host(part) for part in chosen.parts]
        self._event: Any = None
        if chosen.tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def tokens(self, logprobs: Sequence[int | None]) -> list[Token]:
        """Wait for the copy and return one token per row. `logprobs`: per row, as in `Sampling.logprobs`."""
        if self._event is not None:
            self._event.synchronize()
        lists: list[Any] = [part if part is None else part.tolist() for part in self._parts]
        ids, own, top_ids, top = lists
        tokens_out = []
        for row, token in enumerate(ids):
            wanted = logprobs[row]
            if wanted is None or own is None:
                tokens_out.append(Token(token))
            else:
                best = tuple(zip(top_ids[row][:wanted], top[row][:wanted], strict=True))
                tokens_out.append(Token(token, own[row], best))
        return tokens_out


def _to_host(part: torch.Tensor | None) -> torch.Tensor | None:
    if part is None or not part.is_cuda:
        return part
    # Without pinned memory the copy would block.
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)


def _sample_all(scores: torch.Tensor, uniform: torch.Tensor, params: dict[str, torch.Tensor]) -> torch.Tensor:
    return _draw(scores.double().softmax(dim=-1), uniform)


def _draw(shares: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative share exceeds this part of the total. A share of zero is never drawn."""
    summed = shares.cumsum(dim=-1)
    wanted = uniform[:, None] * summed[:, -1:]
    return torch.searchsorted(summed, wanted, right=True)[:, 0].clamp_(max=shares.shape[-1] - 1)


def allowed_by(masks: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The bits as booleans: bit `i % 32` of word `i // 32` is token `i`."""
    bits = torch.arange(WORD_BITS, device=masks.device, dtype=torch.int32)
    return ((masks[:, :, None] >> bits) & 1).bool().view(masks.shape[0], -1)[:, :vocabulary]


def open_masks(rows: int, vocabulary: int, is_pinned: bool = False) -> torch.Tensor:
    """One bitmask per row, on the host, which allows every token."""
    return torch.full((rows, -(-vocabulary // WORD_BITS)), -1, dtype=torch.int32, pin_memory=is_pinned)


def _signed(seed: int) -> int:
    """Any integer as a signed 64-bit number."""
    return ((seed + (1 << 63)) % (1 << 64)) - (1 << 63)


def random_uniform(seeds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """A double in [0, 1) for each pair of 64-bit integers."""
    mixed = _mixed(_mixed(seeds) + places * _STRIDE)
    return _shifted(mixed, 64 - _BITS).double() * 2.0**-_BITS


def _mixed(number: torch.Tensor) -> torch.Tensor:
    number = (number ^ _shifted(number, 30)) * _FIRST
    number = (number ^ _shifted(number, 27)) * _SECOND
    return number ^ _shifted(number, 31)


def _shifted(number: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (number >> by) & ((1 << (64 - by)) - 1)
