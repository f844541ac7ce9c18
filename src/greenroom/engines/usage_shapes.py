"""The objects in which engines tell what an answer cost. All other fields of an answer are skipped. Apart from
`usage.py`, which is compiled; classes of msgspec cannot be."""

from __future__ import annotations

import msgspec


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class OpenAiUsage(msgspec.Struct):
    """Under OpenAI's older names or, as of Responses and pictures, under its newer ones."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    total_tokens: int | None = None
    # Sent by our own workers.
    gpu_time_ms: float | None = None


class LlamacppTimings(msgspec.Struct):
    prompt_n: int
    predicted_n: int
    # Older versions do not tell it.
    cache_n: int | None = None
    prompt_ms: float | None = None
    predicted_ms: float | None = None


class WholeAnswer(msgspec.Struct):
    """A whole answer; all other fields are skipped."""

    usage: OpenAiUsage | None = None
    timings: LlamacppTimings | None = None
