"""Everything one model's endpoints share: its tokenizer, its template, its performer, and where a request comes from.

Owns how prompts and wishes become sequences for the performer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..engine.requests import CallbackQueue, GenerationRequest, InferenceEngine
from ..sandbox.grammar import Grammars, JsonConstraint
from ..text.harmony import Harmony
from ..text.output_stream import StopFinder, Voice
from ..text.templates import Template
from ..text.tokens import Text
from ..text.tool_calls import Reader
from ..weights.sentence_config import SentenceConfig
from .answering import Score
from .refusals import Refused, new_id
from .sampling_params import SEQUENCES_MAX, Wishes

CACHE_MODES = ("prefix", "none", "auto")
# Of a token that does not exist so much is repeated.
TOKEN_DIGITS_MAX = 24


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose request it is, as the gateway says in headers: cached prefixes are shared within these only."""

    tenant: str
    tag: str
    uses_cache: bool

    @staticmethod
    def of(headers: Mapping[str, str]) -> Origin:
        mode = headers.get("x-cache-mode", "auto").lower()
        if mode not in CACHE_MODES:
            raise Refused(f"X-Cache-Mode must be one of {', '.join(CACHE_MODES)}.", param="X-Cache-Mode")
        return Origin(headers.get("x-tenant-id", ""), headers.get("x-cache-tag", ""), mode != "none")


@dataclass(frozen=True, slots=True)
class Reading:
    """How the text of an answer is read."""

    reader: Callable[[], Reader | None] = lambda: None
    """Makes what tells its parts apart, for each choice anew."""
    spoken: Collection[int] = ()
    """Special tokens that are part of the text."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that the reader must see, as it sees them."""
    stops: Collection[int] = ()
    """Tokens that end the answer besides those that the model's files name."""


@dataclass(frozen=True, slots=True)
class House:
    model: str
    performer: InferenceEngine
    text: Text
    template: Template
    grammars: Grammars
    mailbox: CallbackQueue
    harmony: Harmony | None
    """The format of its answers, if it is this one."""
    sentence: SentenceConfig | None
    """How its embeddings are made; None: it writes text."""
    dimensions: Collection[int]
    """Lengths its vectors may be cut to, for models that were trained for it."""

    def check(self, tokens: Sequence[int], param: str) -> None:
        """Raises Refused for a token that the loaded weights do not have: many tokenizers name more than there are."""
        unknown = self.performer.limits.unknown(tokens)
        if unknown is None:
            return
        text = f" ({self.text.speller.spell(unknown)[0]})" if unknown < self.text.size else ""
        raise Refused(
            f"{param} holds token {str(unknown)[:TOKEN_DIGITS_MAX]}{text}, which the weights of {self.model} do not "
            f"have: theirs are 0 to {self.performer.limits.tokens - 1}. Leave it out.",
            param=param,
            code="unknown_token",
        )

    def score(
        self,
        prompts: Sequence[list[int]],
        wishes: Wishes,
        origin: Origin,
        constraint: JsonConstraint | None = None,
        *,
        reading: Reading | None = None,
        continues: bool = False,
    ) -> Score:
        """Sequences for every choice of every prompt. `continues`: the answer goes on in the middle of the text."""
        if len(prompts) * wishes.choices > SEQUENCES_MAX:
            raise Refused(f"At most {SEQUENCES_MAX} answers may be asked for at once.", param="n")
        rooms = [wishes.room(len(prompt), self.performer.context) for prompt in prompts]
        read = reading or Reading()
        make = partial(self._voice, wishes=wishes, origin=origin, reading=read, continues=continues)
        voices: list[Voice] = []
        for prompt, room in zip(prompts, rooms, strict=True):
            for choice in range(wishes.choices):
                own = constraint and (constraint.again() if voices else constraint)
                voices.append(make(len(voices), prompt, room, choice, own))
        return Score(voices, [len(prompt) for prompt in prompts])

    def _voice(
        self,
        index: int,
        prompt: list[int],
        room: int,
        choice: int,
        constraint: JsonConstraint | None,
        *,
        wishes: Wishes,
        origin: Origin,
        reading: Reading,
        continues: bool,
    ) -> Voice:
        detokeniser = self.text.detokeniser(prompt if continues else (), reading.spoken, reading.marks)
        voice = Voice(index, self.mailbox, detokeniser, StopFinder(wishes.stops), reading.reader())
        voice.ask = GenerationRequest(
            id=new_id("ask"),
            tokens=prompt,
            max_tokens=room,
            sampling=wishes.sampling_of(choice),
            stop_tokens=frozenset() if wishes.ignores_end else self.text.stop_tokens.union(reading.stops),
            listener=voice,
            tenant=origin.tenant,
            tag=origin.tag,
            uses_cache=origin.uses_cache,
            constraint=constraint,
        )
        return voice
