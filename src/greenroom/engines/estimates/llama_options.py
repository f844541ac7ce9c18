"""The options of a llama-server command line that affect memory. All others are ignored.

Owns the spellings. Options come as `--x y` and as `--x=y`; the last one wins, as in llama-server. A value that cannot
be read is ignored: the engine itself will report it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from greenroom.engines.estimates.kv_cache import TYPE_BYTES

# More words than any command line has.
WORDS_MAX: Final = 1_024
# Longer numbers are mistakes.
DIGITS_MAX: Final = 9
ALL: Final = 10**DIGITS_MAX
ALL_LAYERS: Final = -1
_MAY_BE_NEGATIVE: Final = frozenset(("gpu_layers", "draft_gpu_layers", "parallel"))
# llama-server's defaults.
UBATCH: Final = 512
BATCH: Final = 2_048
PARALLEL: Final = 4


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """Defaults are llama-server's."""

    model: str | None = None
    context: int = 0
    gpu_layers: int = ALL_LAYERS
    type_k: str = "f16"
    type_v: str = "f16"
    parallel: int = PARALLEL
    batch: int = BATCH
    ubatch: int = UBATCH
    unified: bool = True
    kv_offload: bool = True
    flash: bool = True
    windows_whole: bool = False
    no_gpu: bool = False
    # Number of layers, from the first, with their experts on the host.
    cpu_experts: int = 0
    projectors: tuple[str, ...] = ()
    projector_offload: bool = True
    adapters: tuple[str, ...] = ()
    draft: str | None = None
    draft_context: int = 0
    draft_gpu_layers: int = ALL_LAYERS
    embedding: bool = False
    reranking: bool = False

    @property
    def sequences(self) -> int:
        """Sequences at once; below one, llama-server's own number."""
        return self.parallel if self.parallel > 0 else PARALLEL


def read(words: Sequence[str], said: LlamaOptions | None = None) -> LlamaOptions:
    """The options in `said`, changed by these words."""
    options = said or LlamaOptions()
    for name, value in _pairs(list(words)[:WORDS_MAX]):
        if (change := _OPTIONS.get(name)) is not None:
            options = replace(options, **change(value, options))
    return options


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Each option with the word after it, which is empty or another option if it takes no value."""
    for number, word in enumerate(words):
        if word.startswith("-"):
            name, is_joined, value = word.partition("=")
            after = words[number + 1] if number + 1 < len(words) else ""
            yield (name, value) if is_joined else (word, after)


Change = Callable[[str, LlamaOptions], Mapping[str, Any]]


def _number(field: str, **words: int) -> Change:
    def change(value: str, options: LlamaOptions) -> Mapping[str, Any]:
        if value in words:
            return {field: words[value]}
        # A negative number lets llama-server choose, in options that allow it.
        text = value.removeprefix("-") if field in _MAY_BE_NEGATIVE else value
        is_number = text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX
        return {field: int(value)} if is_number else {}

    return change


def _type(field: str) -> Change:
    return lambda value, options: {field: value} if value in TYPE_BYTES else {}


def _always(field: str, value: object) -> Change:
    return lambda _, options: {field: value}


def _text(field: str) -> Change:
    return lambda value, options: {field: value} if value else {}


def _more(field: str) -> Change:
    """Files add up, given one by one or with commas between them."""
    return lambda value, options: {field: (*getattr(options, field), *filter(None, value.split(",")))}


def _switch(field: str) -> Change:
    """`-fa` alone, or with on, off or auto after it."""
    return lambda value, options: {field: value not in ("off", "0", "disabled", "false")}


def _without_weight(value: str, options: LlamaOptions) -> Mapping[str, Any]:
    """`--lora-scaled FILE SCALE` or `FILE:SCALE`; the scale is ignored."""
    return {"adapters": (*options.adapters, *(part.rpartition(":")[0] or part for part in value.split(",")))}


_SPELLINGS: Final[Mapping[str, Change]] = {
    "-m --model": _text("model"),
    "-c --ctx-size": _number("context"),
    "-ngl --gpu-layers --n-gpu-layers": _number("gpu_layers", auto=ALL_LAYERS, all=ALL_LAYERS),
    "-ctk --cache-type-k": _type("type_k"),
    "-ctv --cache-type-v": _type("type_v"),
    "-np --parallel": _number("parallel"),
    "-b --batch-size": _number("batch"),
    "-ub --ubatch-size": _number("ubatch"),
    "-kvu --kv-unified": _always("unified", True),
    "-no-kvu --no-kv-unified": _always("unified", False),
    "-kvo --kv-offload": _always("kv_offload", True),
    "-nkvo --no-kv-offload": _always("kv_offload", False),
    "-fa --flash-attn": _switch("flash"),
    "--swa-full": _always("windows_whole", True),
    "-dev --device": lambda value, options: {"no_gpu": value == "none"},
    "-cmoe --cpu-moe": _always("cpu_experts", ALL),
    "-ncmoe --n-cpu-moe": _number("cpu_experts"),
    "-mm --mmproj": _more("projectors"),
    "--no-mmproj": _always("projectors", ()),
    "--no-mmproj-offload": _always("projector_offload", False),
    "--lora": _more("adapters"),
    "--lora-scaled": _without_weight,
    "-md --model-draft --spec-draft-model": _text("draft"),
    "-cd --ctx-size-draft": _number("draft_context"),
    "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl": _number(
        "draft_gpu_layers", auto=ALL_LAYERS, all=ALL_LAYERS
    ),
    "--embedding --embeddings": _always("embedding", True),
    "--reranking --rerank": _always("reranking", True),
}
_OPTIONS: Final = {name: change for names, change in _SPELLINGS.items() for name in names.split()}
