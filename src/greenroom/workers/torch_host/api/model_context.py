"""What one model's endpoints share: its tokenizer, its chat template, its engine, and where a request comes from.

Owns how prompts and sampling parameters become sequences for the engine, and the four shapes of an input: a text,
tokens, or a list of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...serving.errors import ApiError, new_id, too_long
from ...serving.fields import Body, refuse
from ..engine.requests import CallbackQueue, GenerationRequest, InferenceEngine
from ..sandbox.grammar import Grammars, JsonConstraint
from ..text.harmony import Harmony, HarmonyReader
from ..text.output_stream import OutputStream, StopFinder
from ..text.templates import ChatTemplate
from ..text.tokens import TextCodec
from ..text.tool_calls import CallReader
from ..weights.sentence_config import SentenceConfig
from .answering import Generation
from .sampling_params import SEQUENCES_MAX, SamplingParams

CACHE_MODES = ("prefix", "none", "auto")
# An unknown token is repeated in the error up to this length.
TOKEN_DIGITS_MAX = 24


@dataclass(frozen=True, slots=True)
class Origin:
    """Tenant and cache tag of a request, from the gateway's headers. Cached prefixes are shared within both only."""

    tenant: str
    tag: str
    uses_cache: bool

    @staticmethod
    def of(headers: Mapping[str, str]) -> Origin:
        mode = headers.get("x-cache-mode", "auto").lower()
        if mode not in CACHE_MODES:
            raise ApiError(f"X-Cache-Mode must be one of {', '.join(CACHE_MODES)}.", param="X-Cache-Mode")
        return Origin(headers.get("x-tenant-id", ""), headers.get("x-cache-tag", ""), mode != "none")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the tokens of an answer become text, calls and reasoning."""

    reader: type[CallReader | HarmonyReader] | None = None
    """Parses one choice."""
    names: Collection[str] = ()
    """The tools that may be called."""
    spoken: Collection[int] = ()
    """Special tokens that appear in the text."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that the parser needs, and the text that stands for each."""
    stops: Collection[int] = ()
    """Tokens that end the answer, besides those that the model's files name."""


@dataclass(frozen=True, slots=True)
class ModelContext:
    name: str
    engine: InferenceEngine
    text: TextCodec
    template: ChatTemplate
    grammars: Grammars
    callbacks: CallbackQueue
    harmony: Harmony | None
    """Set if its answers are in the Harmony format."""
    sentence: SentenceConfig | None
    """How its embeddings are made. None: it generates text."""
    dimensions: Collection[int]
    """Lengths that its vectors may be cut to, if it was trained for that."""

    def check(self, tokens: Sequence[int], param: str) -> None:
        """Raises ApiError for a token that the loaded weights do not have: many tokenizers name more than there are."""
        unknown = self.engine.limits.unknown(tokens)
        if unknown is None:
            return
        text = f" ({self.text.speller.spell(unknown)[0]})" if unknown < self.text.size else ""
        raise ApiError(
            f"{param} holds token {str(unknown)[:TOKEN_DIGITS_MAX]}{text}, which the weights of {self.name} do not "
            f"have: theirs are 0 to {self.engine.limits.tokens - 1}. Leave it out.",
            param=param,
            code="unknown_token",
        )

    def generation(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        origin: Origin,
        constraint: JsonConstraint | None = None,
        *,
        reading: OutputFormat | None = None,
        continues: bool = False,
    ) -> Generation:
        """Sequences for every choice of every prompt. `continues`: the answer continues the prompt's own text."""
        if len(prompts) * params.choices > SEQUENCES_MAX:
            raise ApiError(f"At most {SEQUENCES_MAX} answers may be asked for at once.", param="n")
        rooms = [params.room(len(prompt), self.engine.context) for prompt in prompts]
        reading = reading or OutputFormat()
        stop_tokens = frozenset() if params.ignores_end else self.text.stop_tokens.union(reading.stops)
        outputs: list[OutputStream] = []
        for prompt, room in zip(prompts, rooms, strict=True):
            for choice in range(params.choices):
                detokeniser = self.text.detokeniser(prompt if continues else (), reading.spoken, reading.marks)
                reader = None if reading.reader is None else reading.reader(reading.names)
                stops = StopFinder(params.stops)
                output = OutputStream(len(outputs), self.callbacks, detokeniser, stops, reader)
                output.request = GenerationRequest(
                    id=new_id("ask"),
                    tokens=prompt,
                    max_tokens=room,
                    sampling=params.sampling_of(choice),
                    stop_tokens=stop_tokens,
                    listener=output,
                    tenant=origin.tenant,
                    tag=origin.tag,
                    uses_cache=origin.uses_cache,
                    constraint=constraint and (constraint.again() if outputs else constraint),
                )
                outputs.append(output)
        return Generation(outputs, [len(prompt) for prompt in prompts])


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
    """The tokens of each input, in order; `before` is put in front of texts. Raises ApiError. With `truncates`, inputs
    that are too long are cut."""
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
