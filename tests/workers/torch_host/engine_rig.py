"""A tiny model in an engine, without files, arenas or a server, and requests with collected answers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from greenroom.workers.torch_host.engine.batch_scheduler import PREFILL, PrefillLimits
from greenroom.workers.torch_host.engine.engine_loop import EngineLoop, EngineSizes
from greenroom.workers.torch_host.engine.model_shape import kv_bytes
from greenroom.workers.torch_host.engine.requests import Constraint, End, GenerationRequest, Sampling, Token
from greenroom.workers.torch_host.failures import OnFatal
from greenroom.workers.torch_host.kernels.attention import IMPLEMENTATION, register
from greenroom.workers.torch_host.weights.building import attach_head
from greenroom.workers.torch_host.weights.sentence_config import SentenceConfig
from tests.workers.torch_host.samples.tiny import CONTEXT, ENCODERS, KINDS, SHARED, VOCABULARY

WAIT_S = 90.0
GREEDY = Sampling(temperature=0.0)
_numbers = itertools.count(1)

# Models this small are computed fastest by one thread; several that wait for each other on a busy machine take minutes.
torch.set_num_threads(1)


@dataclass
class Flat:
    tensor: torch.Tensor


@dataclass
class FakeDeviceModel:
    """What a runner needs of a model on a device: on the CPU, always awake."""

    module: torch.nn.Module
    config: Any
    kv: Flat
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    def wait_for_weights(self) -> None:
        """Nothing to wait for: the weights were made here."""


def random_model(kind: str, seed: int = 1, **changes: Any) -> Any:
    """A model with weights spread wide enough that rounding never changes the likeliest token."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**SHARED, **KINDS[kind], **changes})
    maker = AutoModel if kind in ENCODERS else AutoModelForCausalLM
    model = maker.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model


def device_model_of(
    model: Any, cache_tokens: int, sentence: SentenceConfig | None = None, kv: Flat | None = None
) -> FakeDeviceModel:
    if sentence is None:
        register()
        model.set_attn_implementation(IMPLEMENTATION)
    else:
        attach_head(model, sentence, torch.float32, "cpu")
    kv = kv or kv_of(model, cache_tokens)
    return FakeDeviceModel(model, model.config, kv)


def kv_of(model: Any, cache_tokens: int) -> Flat:
    return Flat(torch.zeros(kv_bytes(model.config, 4, cache_tokens) if cache_tokens else 0, dtype=torch.uint8))


@contextmanager
def before_forwards(model: Any, look: Callable[[int], None]) -> Iterator[None]:
    """Call this with the number of tokens of each forward pass, before it is computed. It may raise."""
    hook = model.register_forward_pre_hook(
        lambda _module, _args, named: look(named["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def running(
    model: Any,
    *,
    cache_tokens: int = 4096,
    batch_max: int = 8,
    context: int = CONTEXT,
    prefill: PrefillLimits = PREFILL,
    on_fatal: OnFatal | None = None,
    sentence: SentenceConfig | None = None,
    kv: Flat | None = None,
    **options: Any,
) -> Iterator[EngineLoop]:
    """An engine that is awake, until the end of the block."""
    engine = EngineLoop(
        device_model_of(model, cache_tokens, sentence, kv),
        EngineSizes(cache_tokens, batch_max, context, prefill),
        on_fatal=on_fatal or (lambda error, say: say()),
        sentence=sentence,
        **options,
    )
    try:
        engine.on_wake()
        yield engine
    finally:
        engine.close()


class Answer:
    """The listener of one request. Counts ends, so that a second one is noticed."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.ends: list[End] = []
        self.ask: GenerationRequest
        self.on_each: Callable[[Token], None] = lambda token: None
        self._first, self._over = threading.Event(), threading.Event()

    def on_token(self, token: Token) -> None:
        assert not self.ends, "a token came after the end"
        self.tokens.append(token)
        self.on_each(token)
        self._first.set()

    def on_end(self, end: End) -> None:
        self.ends.append(end)
        self._over.set()

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def end(self) -> End:
        assert self._over.wait(WAIT_S), "the answer never ended"
        assert len(self.ends) == 1, "an answer ends once"
        return self.ends[0]

    @property
    def cached_tokens(self) -> int | None:
        """How many of its prompt were found in the cache, once it is over."""
        assert self.end
        return self.ask.cached_tokens

    def begun(self) -> None:
        assert self._first.wait(WAIT_S), "the answer never began"


def ask(
    tokens: Sequence[int],
    max_tokens: int = 12,
    sampling: Sampling = GREEDY,
    *,
    stop: Sequence[int] = (),
    tenant: str = "",
    tag: str = "",
    uses_cache: bool = True,
    constraint: Constraint | None = None,
) -> tuple[GenerationRequest, Answer]:
    answer = Answer()
    made = answer.ask = GenerationRequest(
        id=f"ask-{next(_numbers)}",
        tokens=list(tokens),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_tokens=frozenset(stop),
        listener=answer,
        tenant=tenant,
        tag=tag,
        uses_cache=uses_cache,
        constraint=constraint,
    )
    return made, answer


def said(
    engine: EngineLoop, tokens: Sequence[int], max_tokens: int = 12, sampling: Sampling = GREEDY, **more: Any
) -> Answer:
    """Submit, and wait for the end."""
    made, answer = ask(tokens, max_tokens, sampling, **more)
    engine.submit(made)
    assert answer.end.reason != "error", answer.end.error
    return answer


def together(
    engine: EngineLoop, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling = GREEDY, **more: Any
) -> list[Answer]:
    """Submit all at once, and wait for their ends."""
    asked = [ask(one, max_tokens, sampling, **more) for one in prompts]
    engine.submit(*(one for one, _ in asked))
    answers = [answer for _, answer in asked]
    assert all(answer.end for answer in answers)
    return answers


def prompt(tokens: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(1000 * seed + tokens)
    return [int(one) for one in torch.randint(3, VOCABULARY, (tokens,), generator=random)]


def generated(model: Any, tokens: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens Transformers generates, with its own attention and cache."""
    out = model.generate(
        torch.tensor([list(tokens)]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    return [int(one) for one in out[0, len(tokens) :]]
