"""`/v1/embeddings`: texts in, vectors out, as numbers or as base64 of little-endian floats. Owns this endpoint, and
which prompt goes before a text. Pooling and normalising are done by the engine."""

from __future__ import annotations

import array
import asyncio
import base64
import math
import sys
from collections.abc import Sequence
from typing import Any

from ...serving.errors import ApiError, encoded, too_long, unavailable, unsupported
from ...serving.fields import Body, boolean, integer, refuse
from ...serving.http import AnswerWriter
from ..engine.requests import PromptTooLong, UnknownToken, Vectors
from ..failures import Failure
from ..weights.sentence_config import SentenceConfig
from .model_context import ModelContext, inputs_of, read_inputs

INPUTS_MAX = 2_048
DIMENSIONS_MAX = 1_048_576


async def embed(model: ModelContext, sentence: SentenceConfig, body: Body, answer: AnswerWriter) -> None:
    """Answer with one vector for each input. Raises ApiError."""
    dimensions = _dimensions(model, body)
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise ApiError("encoding_format must be float or base64.", param="encoding_format")
    said = inputs_of(body, "input", INPUTS_MAX)
    prompt = _prompt(model, sentence, body, said)
    inputs = await read_inputs(model, said, "input", before=prompt, truncates=boolean(body, "truncate"))
    skipped = 0 if sentence.includes_prompt else await _prompt_tokens(model, prompt)
    vectors = await _embedded(model, inputs, [skipped if isinstance(one, str) else 0 for one in said])
    if dimensions is not None:
        vectors = [_cut(vector, dimensions, sentence.normalizes) for vector in vectors]
    tokens = sum(map(len, inputs))
    # A thousand long vectors are many megabytes of JSON, which a thread writes.
    answer.whole(200, await asyncio.to_thread(_written, model.name, vectors, form == "base64", tokens))


def _prompt(model: ModelContext, sentence: SentenceConfig, body: Body, inputs: Sequence[Any]) -> str:
    """The text before every input: the prompt that `prompt_name` names, else the model's default."""
    name = body.get("prompt_name")
    if name is None:
        return sentence.default_prompt
    if not isinstance(name, str):
        refuse("prompt_name", "a string", name)
    if name not in sentence.prompts:
        known = ", ".join(sentence.prompts) or "none"
        raise ApiError(f"{model.name} has no prompt {name[:80]!r}. It has: {known}.", param="prompt_name")
    if not all(isinstance(one, str) for one in inputs):
        raise ApiError("A prompt stands before a text, and input holds tokens.", param="prompt_name")
    return sentence.prompts[name]


async def _prompt_tokens(model: ModelContext, prompt: str) -> int:
    """How many tokens of a text belong to the prompt, special tokens before it included."""
    if not prompt:
        return 0
    tokens = await model.text.encode(prompt, True, model.engine.context, "prompt_name")
    return len(tokens) - (bool(tokens) and tokens[-1] in model.text.tokenizer.all_special_ids)


async def _embedded(model: ModelContext, inputs: Sequence[Sequence[int]], skipped: Sequence[int]) -> Vectors:
    try:
        return await asyncio.wrap_future(model.engine.embed(inputs, skipped))
    except PromptTooLong as error:
        raise too_long(str(error)) from None
    except UnknownToken as error:
        raise ApiError(str(error), param="input", code="unknown_token") from None
    except Failure as error:
        raise unavailable(str(error)) from None


def _dimensions(model: ModelContext, body: Body) -> int | None:
    wanted = integer(body, "dimensions", 1, DIMENSIONS_MAX)
    if wanted is None or wanted in model.dimensions:
        return wanted
    can = f"It can do {', '.join(map(str, sorted(model.dimensions)))}." if model.dimensions else "Leave it out."
    raise unsupported(f"{model.name} cannot shorten its vectors to {wanted} dimensions. {can}", "dimensions")


def _cut(vector: list[float], dimensions: int, normalizes: bool) -> list[float]:
    """The first numbers, normalised again if the whole vector is."""
    cut = vector[:dimensions]
    if not normalizes or len(cut) == len(vector):
        return cut
    length = math.sqrt(sum(number * number for number in cut)) or 1.0
    return [number / length for number in cut]


def _written(model: str, vectors: Sequence[Sequence[float]], in_base64: bool, tokens: int) -> bytes:
    write: Any = _base64 if in_base64 else list
    data = [{"object": "embedding", "index": index, "embedding": write(vector)} for index, vector in enumerate(vectors)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return encoded({"object": "list", "data": data, "model": model, "usage": usage})


def _base64(vector: Sequence[float]) -> str:
    floats = array.array("f", vector)
    if sys.byteorder == "big":
        floats.byteswap()
    return base64.b64encode(floats.tobytes()).decode()
