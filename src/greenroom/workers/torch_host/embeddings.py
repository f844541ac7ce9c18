"""`/v1/embeddings`: texts in, vectors out, as numbers or as base64 of little-endian floats.

Owns this endpoint. Pooling and normalising are the model's side.
"""

from __future__ import annotations

import array
import asyncio
import base64
import math
import sys
from collections.abc import Sequence
from typing import Any

from .asks import TooLong, UnknownToken, Vectors
from .failures import Failure
from .fields import Body, integer
from .house import House
from .http import Answer
from .prompts import read_inputs
from .refusals import Refused, too_long, unavailable, unsupported
from .written import encoded

INPUTS_MAX = 2_048
DIMENSIONS_MAX = 1_048_576


async def embed(house: House, body: Body, answer: Answer) -> None:
    """Answer with one vector for each input. Raises Refused."""
    dimensions = _dimensions(house, body)
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise Refused("encoding_format must be float or base64.", param="encoding_format")
    inputs = await read_inputs(house, body, "input", INPUTS_MAX)
    vectors = [_cut(vector, dimensions) for vector in await _embedded(house, inputs)]
    tokens = sum(map(len, inputs))
    # A thousand long vectors are many megabytes of text: not written on the loop.
    answer.whole(200, await asyncio.to_thread(_written, house.model, vectors, form == "base64", tokens))


async def _embedded(house: House, inputs: Sequence[Sequence[int]]) -> Vectors:
    future: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()

    def settle(result: Vectors | Exception) -> None:
        # A caller that left has cancelled it already.
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    try:
        house.performer.embed(inputs, lambda result: house.mailbox.post(settle, result))
        return await future
    except TooLong as error:
        raise too_long(str(error)) from None
    except UnknownToken as error:
        raise Refused(str(error), param="input", code="unknown_token") from None
    except Failure as error:
        raise unavailable(str(error)) from None


def _dimensions(house: House, body: Body) -> int | None:
    wanted = integer(body, "dimensions", 1, DIMENSIONS_MAX)
    if wanted is None or wanted in house.dimensions:
        return wanted
    can = f"It can do {', '.join(map(str, sorted(house.dimensions)))}." if house.dimensions else "Leave it out."
    raise unsupported(f"{house.model} cannot shorten its vectors to {wanted} dimensions. {can}", "dimensions")


def _cut(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """The first numbers, of length one again."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    cut = vector[:dimensions]
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
