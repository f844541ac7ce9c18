"""From a folder to a model that sleeps: weights are read first, and everything else happens meanwhile.

Owns what runs in parallel. The device's context is created while the module is built; the tokenizer is parsed, kernels
are tried and memory is laid out while the disk is busy, never before. On failure nothing is left. Never reads a file
itself. Read `prepare` first.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ...serving.http import HttpServer
from ..api.routes import ModelServer
from ..engine.engine_loop import EngineLoop, EngineSizes
from ..engine.model_check import ModelCheck, fingerprint
from ..engine.model_shape import kv_bytes, text_config
from ..kernels.attention import IMPLEMENTATION, register
from ..text.tokens import TextCodec
from ..weights.arena import HostArena
from ..weights.building import BuildOptions, foreign_code, gguf_in
from ..weights.device_memory import driver
from ..weights.device_weights import DeviceWeights
from ..weights.loading import TextModel, load
from ..weights.sentence_config import SentenceConfig, read_sentence_config
from .resources import DeviceContext, SlotLoad, WorkerResources
from .slot_options import CACHE_CONTEXTS, Opening, SlotOptions

# The context where neither the configuration nor the model states one.
CONTEXT_UNKNOWN: Final = 2048
# For the device's context, the tokenizer and the engine.
THREADS: Final = 3


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A model of Transformers that sleeps. Implements `PreparedModel`."""

    text: TextCodec
    weights: DeviceWeights
    engine: EngineLoop
    sentence: SentenceConfig | None
    host_bytes: int
    read_bytes: int

    async def serve(self, socket: Path, model: str, resources: WorkerResources) -> HttpServer:
        served = ModelServer(
            self.text,
            self.engine,
            model,
            templates=resources.templates,
            trials=resources.trials,
            sentence=self.sentence,
        )
        await served.open(socket)
        return served

    def close(self) -> None:
        self.engine.close()
        self.weights.close()
        self.text.close()


def prepare(order: SlotOptions, descriptor: int, device_context: DeviceContext, opening: Opening) -> PreparedText:
    """Fill or adopt the arena behind this memfd and build what a wake needs. Raises what its parts raise."""
    register()
    options = _options(order)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="prepare") as threads:
        background = _Background(order, options, device_context, threads, opening)
        try:
            # No reference to the module: its weights view the arena, and a traceback would keep both alive.
            return background.joined(load(TextModel(options), descriptor, order.filled, background).read_bytes)
        except BaseException:
            background.undo()
            raise


class _Background(SlotLoad):
    """The parts of one model that are built in other threads while its weights are read."""

    def __init__(
        self,
        order: SlotOptions,
        options: BuildOptions,
        device_context: DeviceContext,
        threads: ThreadPoolExecutor,
        opening: Opening,
    ) -> None:
        super().__init__(order, device_context, opening)
        self._order, self._options, self._device_context, self._threads = order, options, device_context, threads
        self._module: torch.nn.Module | None = None
        self._arena: HostArena | None = None
        self._text: Future[TextCodec] | None = None
        self._engine: Future[tuple[DeviceWeights, EngineLoop]] | None = None
        self._context: Future[object] | None = None
        if device_context.device.type == "cuda":
            # Takes half a second. Unlike torch's call, this one releases the interpreter lock.
            self._context = threads.submit(driver, device_context.device.index or 0)

    def on_built(self, module: torch.nn.Module, arena: HostArena) -> None:
        self._module, self._arena = module, arena
        if self._text is not None:
            self.on_reading()

    def on_reading(self) -> None:
        """The disk is busy: from now on the interpreter may be."""
        if self._text is None:
            self._text = self._threads.submit(self._load_text)
        if self._module is not None and self._arena is not None:
            self._engine = self._threads.submit(self._build_engine, self._module, self._arena)
            self._module = None

    def joined(self, read_bytes: int) -> PreparedText:
        """The prepared model, now that the arena is filled."""
        if self._text is None or self._engine is None or self._arena is None:
            raise RuntimeError("a model was loaded and no task was told")
        text = self._text.result()
        weights, engine = self._engine.result()
        weights.on_filled()
        return PreparedText(text, weights, engine, self._options.sentence, self._arena.held_bytes, read_bytes)

    def undo(self) -> None:
        """Wait for what has started and release it."""
        if self._text is not None and self._text.exception() is None:
            self._text.result().close()
        if self._engine is not None and self._engine.exception() is None:
            weights, engine = self._engine.result()
            engine.close()
            weights.close()
        if self._arena is not None:
            self._arena.close()
        # A traceback keeps this object alive; references from here to an error would make a cycle.
        self._text = self._engine = self._context = self._arena = self._module = None

    def _load_text(self) -> TextCodec:
        options = self._options
        with foreign_code(options.folder):
            text = TextCodec.load(options.folder, options.trust_remote_code, options.gguf_file)
        if self._order.chat_template is not None:
            text.use_template(self._order.chat_template)
        if options.sentence is not None:
            text.prepare_to_embed(options.sentence.lowers_case)
        return text

    def _build_engine(self, module: torch.nn.Module, arena: HostArena) -> tuple[DeviceWeights, EngineLoop]:
        if self._context is not None:
            self._context.result()
        return _weights_and_engine(self._order, self._options.sentence, module, arena, self._device_context)


def _options(order: SlotOptions) -> BuildOptions:
    return BuildOptions(
        folder=order.folder,
        # Embeddings use the attention and the masks of the model's own code.
        attention=None if order.embedding else IMPLEMENTATION,
        dtype=order.dtype,
        sentence=read_sentence_config(order.folder) if order.embedding else None,
        trust_remote_code=order.trust_remote_code,
        allow_pickle=order.allow_pickle,
        gguf_file=gguf_in(order.folder),
    )


def _weights_and_engine(
    order: SlotOptions,
    sentence: SentenceConfig | None,
    module: torch.nn.Module,
    arena: HostArena,
    device_context: DeviceContext,
) -> tuple[DeviceWeights, EngineLoop]:
    config: Any = module.config
    context = _context(order, config)
    if sentence is not None and sentence.tokens_max is not None:
        context = min(context, sentence.tokens_max)
    cache_tokens = 0 if order.embedding else order.cache_tokens or CACHE_CONTEXTS * context
    if order.threads is not None and device_context.device.type == "cpu":
        torch.set_num_threads(order.threads)
    room = 0 if order.embedding else kv_bytes(config, next(module.parameters()).dtype.itemsize, cache_tokens)
    weights = DeviceWeights(module, arena, device_context.device, room, device_context.copy_rate)
    try:
        return weights, EngineLoop(
            weights,
            EngineSizes(cache_tokens, order.batch_max, context),
            on_fatal=device_context.on_fatal,
            sentence=sentence,
            name=order.model,
            check=_check(order, arena, device_context.device, context),
        )
    except BaseException:
        weights.close()
        raise


def _check(order: SlotOptions, arena: HostArena, device: torch.device, context: int) -> ModelCheck | None:
    """The comparison with plain Transformers, if due: once per set of files, device, version and context."""
    if order.embedding or order.skip_check:
        return None
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    passed = order.checked and order.checked / fingerprint(arena.identity, kind, torch.__version__, str(context))
    check = ModelCheck(passed)
    return check if check.is_due else None


def _context(order: SlotOptions, config: Any) -> int:
    """The context that was asked for, at most the model's number of positions."""
    limit = getattr(text_config(config), "max_position_embeddings", None)
    known = limit if isinstance(limit, int) and limit > 0 else None
    return min(order.context or known or CONTEXT_UNKNOWN, known or order.context or CONTEXT_UNKNOWN)
