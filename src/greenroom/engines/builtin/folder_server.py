"""What vLLM and SGLang have in common: servers with a process for each model, which read a folder of Transformers.

Owns what their folder tells (abilities, memory, files), how their program is found, and how a wake is proved. Each
engine adds its own command line and its own calls for sleep. Imports nothing of either.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import msgspec

from greenroom.config.schema import Ability, Model
from greenroom.config.sections.model import TEMPLATE_ENDING
from greenroom.engines.base import (
    SPLIT_COUNTS,
    CacheFigures,
    CallEngine,
    EngineFacts,
    LaunchPlace,
    ProcessEngine,
    Split,
    asked,
)
from greenroom.engines.builtin.transformers import embeds, template_has_tools
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.estimates.gguf_header import BadModelFile
from greenroom.engines.estimates.hf_folder import FolderOptions, folder_config, folder_fault, weight_files
from greenroom.engines.estimates.paged import attention_heads, estimate_paged, estimate_paged_asleep
from greenroom.engines.identity import file_identity, packages_identity, packages_missing, program_identity
from greenroom.engines.usage import Usage
from greenroom.errors import LoadFailed, UnusableModel

# Without this argument neither server finds tool calls in what a model says.
TOOLS_ARGUMENT: Final = "--tool-call-parser"
# A probe of what a model says: the first token after these words.
PROBE_PROMPT: Final = "The capital of France is"
# How far the log-probability of that token may be from what it was before the sleep. Rounding moves it by hundredths;
# weights that were lost make all tokens equally likely.
PROBE_TOLERANCE: Final = 0.5
# The same for the first number of a vector, as a share of it. In vectors of length 1 that is a few hundredths.
VECTOR_TOLERANCE: Final = 0.1
VECTOR_LEAST: Final = 0.01
_PROBE: Final = "first token"
# Series of one metric, and the largest figure that is believed.
SERIES_MAX: Final = 1_000
FIGURE_MAX: Final = 2.0**53
# What both servers answer that changes nothing.
ANSWERING_PATHS: Final = (
    *("/health", "/metrics", "/version", "/load", "/tokenize", "/detokenize", "/classify", "/score", "/rerank"),
    *("/v1/models/**", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/score", "/v1/rerank", "/v1/responses", "/v1/responses/**"),
    *("/v1/audio/transcriptions", "/v1/audio/translations"),
)

_Said = TypeVar("_Said")


class FolderServer(ProcessEngine):
    checks_model_name = True
    keeps_json = True
    takes_functions_only = True
    salt_field = "cache_salt"
    fetches_media = True
    metrics_path = "/metrics"
    # The package, the module that `python -m` runs, and what follows it.
    package: ClassVar[str]
    module: ClassVar[str]
    # Its metrics: the share of the KV cache in use, tokens looked up there, and tokens found.
    figure_names: ClassVar[tuple[str, str, str]]
    # It keeps a copy of its weights on the host while it is ready.
    host_copy: ClassVar[bool] = False

    def facts(self, model: Model) -> EngineFacts:
        counts, awake = _split_counts(folder_of(model)), self.kept_awake_by(model)
        return EngineFacts(
            _abilities(model),
            can_sleep=not model.is_host_only and awake is None,
            sleeps_off_gpu_only=True,
            kept_awake_by=awake,
            keeps_prefixes=model.prefix_caching and not embeds(model),
            sizes_itself=True,
            fills_claim=True,
            can_split=Split.EQUAL if counts else None,
            split_counts=counts,
        )

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        return estimate_paged(folder_of(model), self.sizes(model), gpus)

    def estimate_asleep(self, model: Model, gpus: int) -> Estimate | None:
        return estimate_paged_asleep(folder_of(model), self.sizes(model), gpus)

    def kept_awake_by(self, model: Model) -> str | None:
        """The argument or variable with which it does not survive sleep; None if there is none."""
        return None

    def sizes(self, model: Model) -> FolderOptions:
        return FolderOptions(
            model.ctx_size or None, self.concurrency(model), model.dtype, model.cache_tokens, self.host_copy
        )

    def files(self, model: Model) -> list[Path]:
        folder = folder_of(model)
        return [folder / "config.json", *weight_files(folder)]

    def identity(self, model: Model) -> tuple[str, str]:
        program = self._program(model)
        is_python = program is not None and len(program) > 1
        own = packages_identity(model.python, (self.package,)) if is_python else program_identity(program or ())
        return file_identity([folder_of(model)]), own

    def unusable(self, model: Model) -> str | None:
        return folder_fault(folder_of(model), takes_pickles=True)

    def missing(self, model: Model) -> str | None:
        if model.program is None and model.python is not None:
            return packages_missing(model, (self.package,), self.package)
        if self._program(model) is not None:
            return None
        if model.program is not None:
            return f"there is no program {model.program}; correct `program`"
        # It pins its own torch, so it gets an environment of its own.
        return (
            f"{self.package} is not installed; type: python3 -m venv {self.package} && "
            f"{self.package}/bin/pip install {self.package}, and set `python` to {self.package}/bin/python"
        )

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        """It is started so that it tells what was cached, and leaves that out where nothing was."""
        said = super().usage(tail, stream=stream)
        if said is not None and said.cached is None:
            said.cached = 0
        return said

    def cache_figures(self, metrics: bytes, model: Model) -> CacheFigures | None:
        used, queries, hits = (metric_sum(metrics, name) for name in self.figure_names)
        if used is None or not 0 <= used <= 1:
            return None
        return CacheFigures(used, int(queries or 0), int(hits or 0), self.kv_tokens(metrics))

    def kv_tokens(self, metrics: bytes) -> int | None:
        """How many tokens its KV cache holds, by its metrics; None if they do not tell."""
        return None

    def _program(self, model: Model) -> tuple[str, ...] | None:
        """The operator's program or Python, else the program on PATH, else our own Python; None if there is none."""
        path = model.env.get("PATH")
        if model.program is not None:
            found = shutil.which(model.program, path=path)
            return None if found is None else (found,)
        if model.python is not None:
            found = shutil.which(model.python, path=path)
            return None if found is None else (found, "-m", self.module)
        if (found := shutil.which(self.package, path=path)) is not None:
            return (found,)
        return (sys.executable, "-m", self.module) if importlib.util.find_spec(self.package) is not None else None

    def program_for(self, model_id: str, model: Model) -> tuple[str, ...]:
        """The words that start its server. Raises LoadFailed, also where the folder is missing."""
        if not os.path.isdir(model.path or ""):
            raise UnusableModel(f"{model_id}: there is no folder {model.path}. Correct `path` in the configuration.")
        program = self._program(model)
        if program is None:
            raise LoadFailed(f"{model_id}: {self.missing(model)}.")
        return program

    # --- the proof of a wake ----------------------------------------------------------------------------------------

    async def note_answer(self, model: Model, call: CallEngine) -> None:
        """Remember what it says before it falls asleep. Raises LoadFailed."""
        call.notes[_PROBE] = await self._answer(model, call)

    async def check_answer(self, model: Model, call: CallEngine) -> None:
        """Raises LoadFailed unless it says the same as before it slept: weights may come back as garbage."""
        before, now = call.notes.get(_PROBE), await self._answer(model, call)
        if before is None:
            return
        allowed = VECTOR_TOLERANCE * max(abs(before), VECTOR_LEAST) if embeds(model) else PROBE_TOLERANCE
        if abs(now - before) > allowed:
            raise LoadFailed("it woke with other weights than it had: it does not say what it said before")

    async def _answer(self, model: Model, call: CallEngine) -> float:
        """The log-probability of one token; of a model that embeds, the first number. Raises LoadFailed."""
        models = decoded(await asked(call, "GET", "/v1/models"), _ServedModels)
        if not models.data:
            raise LoadFailed("it names no model in /v1/models")
        name = models.data[0].id
        number: float | None
        if embeds(model):
            body = msgspec.json.encode({"model": name, "input": PROBE_PROMPT})
            vectors = decoded(await asked(call, "POST", "/v1/embeddings", body), _CheckedVectors)
            number = next((one.embedding[0] for one in vectors.data if one.embedding), math.nan)
        else:
            probe = {"model": name, "prompt": PROBE_PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 1}
            said = decoded(await asked(call, "POST", "/v1/completions", msgspec.json.encode(probe)), _Completion)
            number = next((one.logprobs.token_logprobs[0] for one in said.choices if one.logprobs.token_logprobs), None)
        if number is None or not math.isfinite(number):
            raise LoadFailed("it answered a probe without a token")
        return number


def metric_sum(metrics: bytes, name: str) -> float | None:
    """The sum of a metric over its labels, in Prometheus's text; None if it is not there or is no number."""
    found = re.findall(rb"^%b(?:\{[^\n]*\})? ([0-9.eE+-]{1,32})(?: [0-9]+)?$" % re.escape(name.encode()), metrics, re.M)
    try:
        total = math.fsum(float(value) for value in found[:SERIES_MAX])
    except (ValueError, OverflowError):
        return None
    return total if found and 0 <= total < FIGURE_MAX else None


class _ServedModel(msgspec.Struct):
    id: str


class _ServedModels(msgspec.Struct):
    data: list[_ServedModel]


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _CheckedChoice(msgspec.Struct):
    logprobs: _Logprobs


class _Completion(msgspec.Struct):
    choices: list[_CheckedChoice]


class _CheckedVector(msgspec.Struct):
    embedding: list[float]


class _CheckedVectors(msgspec.Struct):
    data: list[_CheckedVector]


def decoded(answer: bytes, kind: type[_Said]) -> _Said:
    """The answer as this type. Raises LoadFailed for garbage."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise LoadFailed("it answered with something that cannot be understood") from None


def folder_of(model: Model) -> Path:
    return Path(model.path or "")


def on_gpus(model: Model, place: LaunchPlace) -> int:
    """How many GPUs it runs on; 0 for the host."""
    return 0 if model.device == "cpu" else len(place.gpus or ())


def chat_template(model: Model) -> list[str]:
    return [] if model.chat_template is None else ["--chat-template", model.chat_template]


def has_tools(model: Model) -> bool:
    """True if it is started so that it calls tools, and its template has a place for them."""
    is_told = any(word.partition("=")[0] == TOOLS_ARGUMENT for word in model.args)
    given = model.chat_template is not None and model.chat_template.endswith(TEMPLATE_ENDING)
    return is_told and (given or template_has_tools(model))


def _abilities(model: Model) -> frozenset[Ability]:
    if embeds(model):
        return frozenset({Ability.EMBEDDINGS})
    tools = {Ability.TOOLS} if has_tools(model) else set()
    sees = {Ability.VISION} if _sees(folder_of(model)) else set()
    return frozenset({Ability.CHAT, Ability.COMPLETIONS, *tools, *sees})


def _split_counts(folder: Path) -> tuple[int, ...]:
    """The numbers of GPUs that divide its attention heads."""
    heads = attention_heads(folder)
    return SPLIT_COUNTS if heads is None else tuple(count for count in SPLIT_COUNTS if heads % count == 0)


def _sees(folder: Path) -> bool:
    try:
        return isinstance(folder_config(folder).get("vision_config"), dict)
    except BadModelFile:
        return False
