"""The memory that a model needs: declared, else measured, else estimated by its engine, else guessed from its name.

Owns the order of these sources, the operator's budget that caps them all, and the keys under which figures are stored.
Never measures: `measured` and `no_memory` take in what was seen. Reads headers of files, which blocks for milliseconds,
so it is called only when a configuration is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Final, Protocol

from greenroom.base.detached import run_detached
from greenroom.base.repeated import AGAIN_S, Repeated
from greenroom.config.kinds import words
from greenroom.config.part import Part
from greenroom.config.schema import Model
from greenroom.core.model import Claim, DeviceId, ModelId, Need
from greenroom.engines.base import Engine, EngineFacts, equal_counts
from greenroom.engines.estimates.estimate import NAME, Estimate, EstimatePart, mib
from greenroom.engines.identity import arguments_identity
from greenroom.runtime.memory.book import BookKey, Measured, MemoryNeedsStore
from greenroom.telemetry.logs import get_logger

_log = get_logger("needs")

# Where a figure comes from, besides the sources of an estimate (`engines/estimates/estimate.py`).
DECLARED: Final = "declared"
MEASURED: Final = "measured"
RAISED: Final = "raised"
BUDGET: Final = "budget"
UNKNOWN: Final = "unknown"
# No model is split over more GPUs than this.
SPLIT_MAX: Final = 16
# Looks kept, including those at models that are no longer configured.
LOOKS_MAX: Final = 10_000


class MeasuredModel(Protocol):
    """What must be known of a model to tell its need: an `Entry` of the catalogue, or a `Subject`."""

    @property
    def id(self) -> ModelId: ...

    @property
    def config(self) -> Model: ...

    @property
    def engine(self) -> Engine: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is not in a catalogue yet."""

    id: ModelId
    config: Model
    engine: Engine


@dataclass(frozen=True, slots=True)
class FileLook:
    """The result of reading a model's files. `key` is without the kind of GPU."""

    config: Model
    key: BookKey
    estimate: Estimate | None
    asleep: Need | None = None  # None: its engine cannot sleep.
    fills_claim: bool = False
    loads_later: bool = False
    # On how many GPUs it is planned.
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Account:
    """All that is known of a need: the figure that counts, its source, and the figures to compare it with."""

    need: Need
    source: str
    estimate: Estimate | None
    measured: Measured | None

    @property
    def estimate_error(self) -> float | None:
        """The relative error of the estimate where the model ran; 0.05: 5 % too much."""
        if self.estimate is None or self.measured is None or not self.measured.is_seen:
            return None
        guess = self.estimate.need
        if self.measured.gpu_mib:
            return guess.gpu_mib / self.measured.gpu_mib - 1
        return (guess.gpu_mib + guess.host_mib) / (self.measured.host_mib or 1) - 1


class Needs(Part):
    """`gpus` are all GPUs with the kind of each; without any, models run on the host."""

    writes = True

    def __init__(self, book: MemoryNeedsStore | None = None, gpus: Mapping[DeviceId, str] | None = None) -> None:
        self.book = book if book is not None else MemoryNeedsStore(None, warn)
        self.gpus: Mapping[DeviceId, str] = gpus or {}
        # MiB on each GPU that a model may use; empty if that is not known.
        self.usable_mib: Mapping[DeviceId, int] = {}
        self._looked_at: dict[ModelId, FileLook] = {}
        self._is_stale = False
        self._writing = Repeated(self._write, "writing needs", lambda: AGAIN_S if self._is_stale else None, _log.failed)

    def need_of(self, entry: MeasuredModel) -> tuple[Need, str]:
        """Its need and the source of that figure. Reads its files again, which blocks."""
        self._looked_at.pop(entry.id, None)
        self._looked_at[entry.id] = self._look(entry)
        for oldest in list(self._looked_at)[: max(0, len(self._looked_at) - LOOKS_MAX)]:
            del self._looked_at[oldest]
        account = self.account_of(entry)
        return account.need, account.source

    def account_of(self, entry: MeasuredModel) -> Account:
        """All that is known now. Reads nothing after `need_of` for this entry."""
        look = self._look_of(entry)
        model = self._declared(entry.config, look.gpus)
        known = self._known(look)
        need, source = _chosen(model, None if look.fills_claim else known, look.estimate)
        if look.loads_later and source == MEASURED and look.estimate is not None:
            need = need.or_more(look.estimate.need)
        if look.asleep is not None and entry.engine.hosted:
            # A measurement does not include what the worker needs to compute, so the estimate can only raise it.
            guess = look.estimate.need if look.estimate is not None and source == MEASURED else Need()
            need = self._hosted(need.or_more(guess), look.asleep)
        raised = self._raised(look) if look.fills_claim else known.raised if known is not None else Need()
        if (least := need.or_more(raised)) != need:
            need, source = least, RAISED
        if model.gpu_memory_budget_mib is not None and need.gpu_mib > model.gpu_memory_budget_mib:
            need, source = Need(model.gpu_memory_budget_mib, need.host_mib), BUDGET
        return Account(need, source, look.estimate, known)

    def asleep_of(self, entry: MeasuredModel) -> Need | None:
        """Its need while asleep; None if its engine cannot sleep. Reads nothing after `need_of`."""
        return self._look_of(entry).asleep

    def estimate_of(self, entry: MeasuredModel, gpus: int) -> Estimate | None:
        """The engine's estimate for so many GPUs, else a guess from the name. Reads its files."""
        model = entry.config
        gpus = 0 if model.is_host_only else gpus
        return entry.engine.estimate(model, gpus) or estimate_by_name(entry.id, model, gpus)

    def measured(self, entry: MeasuredModel, peak: Claim) -> bool:
        """A loaded model was seen to take this much. Returns whether that changes its need."""
        on_gpus = {device: mib for device, mib in peak.items() if device in self.gpus and mib}
        host_mib = sum(mib for device, mib in peak.items() if device not in self.gpus) or None
        if not on_gpus and host_mib is None:
            return False
        before = self.account_of(entry).need
        self.book.note(self._key(entry, on_gpus), Measured(sum(on_gpus.values()), host_mib))
        self._write_soon()
        return self.account_of(entry).need != before

    def renamed(self, old: MeasuredModel, new: MeasuredModel) -> None:
        """The same process has another id from now on."""
        if (look := self._looked_at.pop(old.id, None)) is not None:
            self._looked_at[new.id] = replace(look, config=new.config)

    def no_memory(self, entry: MeasuredModel, least: Need, claim: Claim) -> None:
        """A load with this claim ran out of memory; next time plan with at least `least`, also after a restart."""
        self.book.note_no_memory(self._key(entry, claim), least)
        self._write_soon()

    async def close(self) -> None:
        """Write a last time. Raises OSError."""
        await self._writing.stop()
        await self._write()

    # --- looking --------------------------------------------------------------------------------------------------

    def _look_of(self, entry: MeasuredModel) -> FileLook:
        look = self._looked_at.get(entry.id)
        return look if look is not None and look.config is entry.config else self._look(entry)

    def _look(self, entry: MeasuredModel) -> FileLook:
        model, engine = entry.config, entry.engine
        file, program = engine.identity(model)
        key = BookKey(file, f"{engine.name} {program}", arguments_identity(model), "")
        facts = engine.facts(model)
        gpus = self._gpu_count(entry, facts)
        estimate = self.estimate_of(entry, gpus)
        look = FileLook(model, key, estimate, None, facts.fills_claim, facts.loads_later, max(1, gpus))
        if not facts.can_sleep:
            return look
        asleep = engine.estimate_asleep(model, max(1, gpus))
        return replace(look, asleep=Need() if asleep is None else asleep.need)

    def _gpu_count(self, entry: MeasuredModel, facts: EngineFacts) -> int:
        """On how many GPUs it will run, as far as its shares must be equal: each then has a context of its own."""
        model, counts = entry.config, (1, *equal_counts(facts))
        named = len(set(model.devices) - {"host"})
        if named > 1 and not model.is_host_only:
            return max((count for count in counts if count <= min(named, len(self.gpus))), default=0)
        largest = max(self.usable_mib.values(), default=0)
        if len(counts) > 1 and largest:
            for count in (count for count in counts if count <= len(self.gpus)):
                if self._planned_mib(entry, count) <= count * largest:
                    return count
        return min(1, len(self.gpus))

    def _planned_mib(self, entry: MeasuredModel, gpus: int) -> int:
        estimate, model = self.estimate_of(entry, gpus), entry.config
        share = model.gpu_memory_utilization
        if estimate is not None and share is not None and model.memory_mib is None:
            # So many GPUs that what it needs fits into its share of each.
            return int(estimate.need.gpu_mib / share)
        size_mib = model.memory_mib or (0 if estimate is None else estimate.need.gpu_mib)
        return min(size_mib, model.gpu_memory_budget_mib or size_mib)

    def _declared(self, model: Model, gpus: int) -> Model:
        """The same with memory_mib, where the operator declared a share of each GPU instead."""
        share, largest = model.gpu_memory_utilization, max(self.usable_mib.values(), default=0)
        if share is None or model.memory_mib is not None or model.is_host_only or not largest:
            return model
        return model.model_copy(update={"memory_mib": max(1, int(share * largest * gpus))})

    def _hosted(self, need: Need, asleep: Need) -> Need:
        """The need of a hosted model: its host copy stays while it is ready."""
        if need.gpu_mib and not self.gpus:
            # Without GPUs the figure for GPU memory applies to the host.
            need = Need(0, need.gpu_mib + need.host_mib)
        return need.or_more(Need(0, asleep.host_mib))

    def _known(self, look: FileLook) -> Measured | None:
        """The measurement from where it would most likely run: one GPU, else the smallest split that was seen."""
        for kinds in self._kinds(look.config):
            found = [self.book.recall(replace(look.key, gpu=kind)) for kind in kinds]
            if seen := [one for one in found if one is not None]:
                return max(seen, key=lambda one: (one.gpu_mib, one.raised.gpu_mib))
        return None

    def _raised(self, look: FileLook) -> Need:
        """The most that loads ran out of memory with, wherever: what fills its claim cannot be measured."""
        keys = (replace(look.key, gpu=kind) for kinds in self._kinds(look.config) for kind in kinds)
        found = [known.raised for key in keys if (known := self.book.recall(key)) is not None]
        return Need(max((one.gpu_mib for one in found), default=0), max((one.host_mib for one in found), default=0))

    # --- keys -----------------------------------------------------------------------------------------------------

    def _key(self, entry: MeasuredModel, claim: Claim) -> BookKey:
        """The key of a measurement. A split has its own figure: it has a context on each GPU."""
        kinds = sorted(self.gpus[device] for device in claim if device in self.gpus)
        return replace(self._look_of(entry).key, gpu=kind_of(kinds))

    def _kinds(self, model: Model) -> Iterator[list[str]]:
        """Keys to try, best first."""
        kinds = sorted(set(self.gpus.values()))
        if model.is_host_only or not kinds:
            yield [""]
            return
        for count in range(1, min(len(self.gpus), SPLIT_MAX) + 1):
            yield [kind_of([kind] * count) for kind in kinds]
        # All GPUs together, where their kinds differ; then the host alone, for models that use no GPU.
        yield [kind_of(sorted(self.gpus.values()))]
        yield [""]

    # --- the file -------------------------------------------------------------------------------------------------

    def _write_soon(self) -> None:
        self._is_stale = True
        self._writing.start()
        self._writing.wake()

    async def _write(self) -> None:
        writing, self._is_stale = self.book.writing(), False
        try:
            await run_detached(writing, "write needs")
        except BaseException:
            self._is_stale = True
            raise


def kind_of(kinds: list[str]) -> str:
    """`NVIDIA H200`, `2×NVIDIA H200`, or all names where they differ."""
    if len(set(kinds)) > 1:
        return " + ".join(kinds)
    return "".join(kinds) if len(kinds) < 2 else f"{len(kinds)}×{kinds[0]}"


def warn(message: str, error: str) -> None:
    _log.warning(message, error=error)


def _chosen(model: Model, known: Measured | None, estimate: Estimate | None) -> tuple[Need, str]:
    # 1. Declared by the operator.
    if model.memory_mib is not None:
        on_host = model.is_host_only
        return Need(0 if on_host else model.memory_mib, model.host_memory_mib + model.memory_mib * on_host), DECLARED
    guess = estimate.need if estimate is not None else Need()
    # 2. Measured; the host's part can be seen on some machines only.
    if known is not None and known.is_seen:
        host_mib = known.host_mib if known.host_mib is not None else guess.host_mib
        return _with_host(model, Need(known.gpu_mib, host_mib)), MEASURED
    # 3. Estimated by the engine or from the name.
    return _with_host(model, guess), UNKNOWN if estimate is None else estimate.source


def _with_host(model: Model, need: Need) -> Need:
    """Declared host memory replaces the estimate; for a model that runs on the host it is added."""
    if need.gpu_mib:
        return Need(need.gpu_mib, model.host_memory_mib or need.host_mib)
    return Need(0, need.host_mib + model.host_memory_mib)


# Longer texts are no names; this also bounds the work of the patterns.
TEXT_MAX: Final = 512
WORDS_MAX: Final = 64
# Weights plus cache and buffers in proportion, as in the estimate of a Transformers folder.
OVERHEAD: Final = 1.2
# More than any model has; a larger number is a date or a version.
BILLIONS_MAX: Final = 2_000.0
BITS_DEFAULT: Final = 16.0
BITS_DEFAULT_GGUF: Final = 4.85

# `7b`, `0.5B`, `270m`, `8x7b`; not the `3b` of `a3b`, which counts active parameters, nor a part of a word.
_PARAMETERS: Final = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([bm])(?![a-z0-9])")
# Experts share the attention between them: Mixtral's 8x7B are 46.7 billion, not 56.
EXPERTS_SHARE: Final = 0.83
# Bits for each weight, scales included, by the name of the quantisation.
_BITS: Final = (
    (re.compile(r"(?<![a-z0-9])(?:f32|fp32|float32)(?![a-z0-9])"), 32.0),
    (re.compile(r"(?<![a-z0-9])(?:bf16|f16|fp16|float16|bfloat16)(?![a-z0-9])"), 16.0),
    (re.compile(r"(?<![a-z0-9])(?:q8|w8|int8|fp8|8bit|8-bit)"), 8.5),
    (re.compile(r"(?<![a-z0-9])(?:i?q6)"), 6.6),
    (re.compile(r"(?<![a-z0-9])(?:i?q5)"), 5.7),
    (re.compile(r"(?<![a-z0-9])(?:i?q4|w4|int4|4bit|4-bit|awq|gptq|mxfp4|nvfp4|nf4)"), 4.85),
    (re.compile(r"(?<![a-z0-9])(?:i?q3)"), 3.9),
    (re.compile(r"(?<![a-z0-9])(?:i?q2)"), 3.0),
    (re.compile(r"(?<![a-z0-9])(?:i?q1)"), 2.0),
)


def estimate_by_name(model_id: str, model: Model, gpus: int) -> Estimate | None:
    """An estimate from its id, else its file's name, else the words of its command; None if none names a size."""
    for text in _texts(model_id, model):
        billions = parameters_billion(text)
        if billions:
            bits = bits_of(text) or bits_of(model_id) or (BITS_DEFAULT_GGUF if "gguf" in text else BITS_DEFAULT)
            size_mib = mib(billions * 1e9 * bits / 8 * OVERHEAD)
            part = EstimatePart("all, by its name", size_mib if gpus else 0, 0 if gpus else size_mib)
            return Estimate((part,), NAME)
    return None


def parameters_billion(text: str) -> float | None:
    """The largest number of parameters in a name, in billions; None if there is none."""
    return max(
        filter(None, map(_billions, _PARAMETERS.finditer(text[:TEXT_MAX].lower().replace("_", "-")))), default=None
    )


def bits_of(text: str) -> float | None:
    """Bits for each weight by the name of its quantisation; None if it names none."""
    found = (bits for pattern, bits in _BITS if pattern.search(text[:TEXT_MAX].lower()))
    return next(found, None)


def _billions(found: re.Match[str]) -> float | None:
    experts, number, unit = found.groups()
    size = float(number) * (1 if unit == "b" else 0.001) * (int(experts) * EXPERTS_SHARE if experts else 1)
    return size if 0 < size <= BILLIONS_MAX else None


def _texts(model_id: str, model: Model) -> list[str]:
    said = [PurePath(model.path).name] if model.path else list(words(model.cmd or ()))[:WORDS_MAX]
    return [model_id, *(PurePath(word).name for word in said if not word.startswith("-"))]
