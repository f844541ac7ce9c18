"""Inputs of completions and embeddings: a text, tokens, or a list of either. They become lists of tokens.

Owns these four shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from .errors import ApiError, too_long
from .fields import Body, refuse
from .model_context import ModelContext


def inputs_of(body: Body, name: str, inputs_max: int) -> list[Any]:
    """The inputs of this field, in order. Raises ApiError."""
    said = body.get(name)
    if said is None:
        raise ApiError(f"{name} is missing.", param=name)
    inputs = _inputs(said, name)
    if not 1 <= len(inputs) <= inputs_max:
        raise ApiError(f"{name} may hold 1 to {inputs_max} inputs.", param=name)
    return inputs


async def read_inputs(
    model: ModelContext, inputs: Sequence[Any], name: str, *, before: str = "", truncates: bool = False
) -> list[list[int]]:
    """The tokens of each input, in order; `before` is put in front of texts. Raises ApiError.

    With `truncates`, inputs that are too long are cut.
    """
    found = []
    for one in inputs:
        found.append(await _tokens(model, one, name, before, truncates))
        # Each takes a millisecond at most, and there may be thousands: other streams go on in between.
        await asyncio.sleep(0)
    return found


def _inputs(said: Any, name: str) -> list[Any]:
    if isinstance(said, str) or (isinstance(said, list) and said and _is_token(said[0])):
        return [said]
    if not isinstance(said, list):
        refuse(name, "a string, a list of tokens, or a list of either", said)
    return said


async def _tokens(model: ModelContext, said: Any, name: str, before: str, truncates: bool) -> list[int]:
    context = model.engine.context
    if isinstance(said, str):
        tokens = await model.text.encode(before + said, True, context, name, truncates=truncates)
    elif isinstance(said, list):
        tokens = said[:context] if truncates else said
    else:
        raise _shapeless(name)
    if not tokens:
        raise ApiError(f"{name} must not be empty.", param=name)
    if len(tokens) > context:
        raise too_long(f"{name} has {len(tokens):,} tokens; at most {context:,} fit. Send less or raise ctx_size.")
    if not all(map(_is_token, tokens)):
        raise _shapeless(name)
    model.check(tokens, name)
    return tokens


def _shapeless(name: str) -> ApiError:
    return ApiError(f"{name} must be a string, a list of tokens, or a list of either.", param=name)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
