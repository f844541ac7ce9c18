"""Any program that listens on a port. `cmd` says how it starts; its memory is declared, measured, or guessed.

Owns the words of a command line that tell of memory: a GGUF file or a model folder, the context length, servers that
take all free memory. The guess counts for the first load; later loads use the measured figure.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from greenroom.config.kinds import can_be_run, words
from greenroom.config.macros import GPU_HOLES
from greenroom.config.schema import Model
from greenroom.engines.base import (
    LLAMACPP_PATHS,
    VLLM_PATHS,
    EngineFacts,
    Launch,
    LaunchPlace,
    ProcessEngine,
    Split,
    environment,
)
from greenroom.engines.estimates import llama_options
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.estimates.gguf import estimate_gguf, files_of
from greenroom.engines.estimates.hf_folder import DTYPE_BYTES, FolderOptions, estimate_folder, is_folder, weight_files
from greenroom.engines.identity import file_identity, program_identity
from greenroom.process.spawn import Command

# Servers that size their KV cache by the free GPU memory, in the forms they are started: `vllm serve`, a program of its
# own, `python -m vllm.entrypoints…`, or an image.
_WITH_SERVE = frozenset(("vllm", "sglang", "lmdeploy"))
_ALONE = frozenset(("trtllm-serve", "text-generation-launcher"))
_MODULES = frozenset(("vllm", "sglang", "lmdeploy", "tensorrt_llm"))
_IMAGES = ("vllm/vllm-openai", "lmsysorg/sglang", "openmmlab/lmdeploy", "huggingface/text-generation-inference")


class CommandEngine(ProcessEngine):
    name = "command"
    # Of a program nothing is known: it refuses by itself what it does not answer.
    speaks = LLAMACPP_PATHS | VLLM_PATHS

    def facts(self, model: Model) -> EngineFacts:
        """`sizes_itself` is the operator's key if given; otherwise true for programs known to take all free memory."""
        sizes = takes_free_memory(words(model.cmd or ())) if model.sizes_itself is None else model.sizes_itself
        return EngineFacts(sizes_itself=sizes, can_split=_split(model))

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        return estimate_command(words(model.cmd or ()), gpus)

    def identity(self, model: Model) -> tuple[str, str]:
        said = words(model.cmd or ())
        return file_identity(files_of_command(said)), program_identity(said)

    def files(self, model: Model) -> list[Path]:
        return list(files_of_command(words(model.cmd or ())))

    def missing(self, model: Model) -> str | None:
        program = words(model.cmd or ())[0]
        is_there = can_be_run(program, model.cwd, model.env.get("PATH"))
        return None if is_there else f"there is no program {program}; install it or correct `cmd`"

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        assert model.cmd is not None, "the configuration refuses a command without cmd"
        said = _said(place)
        env = {name: _filled(value, said) for name, value in environment(model, place).items()}
        stop = tuple(_filled(word, said) for word in words(model.cmd_stop)) if model.cmd_stop else None
        argv = tuple(_filled(word, said) for word in words(model.cmd))
        check = None if model.check_endpoint == "none" else model.check_endpoint
        return Launch(Command(argv, env, model.cwd, stop), check)


def _split(model: Model) -> Split | None:
    """How it can be spread, by the placeholders in `cmd` and `env`: without any it cannot be told to use several GPUs.
    One that is told how many GPUs it has, but not how much of each, takes the same of all."""
    texts = (*words(model.cmd or ()), *model.env.values())
    holes = {hole for hole in GPU_HOLES for text in texts if f"${{{hole}}}" in text}
    if not holes:
        return None
    return Split.EQUAL if "GPU_COUNT" in holes and "TENSOR_SPLIT" not in holes else Split.PROPORTIONAL


def _said(place: LaunchPlace) -> dict[str, str]:
    """The value of each placeholder at this start."""
    gpus = place.gpus or ()
    return {
        "PORT": str(place.port),
        "GPUS": ",".join(gpus),
        "GPU_COUNT": str(len(gpus)),
        "TENSOR_SPLIT": ",".join(map(str, place.shares)),
    }


def _filled(text: str, said: Mapping[str, str]) -> str:
    for hole, value in said.items():
        text = text.replace(f"${{{hole}}}", value)
    return text


def takes_free_memory(command: Sequence[str]) -> bool:
    """True if these words start a server that takes whatever GPU memory is free, such as `vllm serve`."""
    command = command[:WORDS_MAX]
    for word, following in itertools.pairwise((*command, "")):
        program = os.path.basename(word)
        if program in _ALONE or (program in _WITH_SERVE and following == "serve"):
            return True
        if word == "-m" and following.partition(".")[0] in _MODULES:
            return True
        # An image's tag or digest follows its name; a colon before the last slash is a registry's port.
        if re.sub(r"[:@][^/]*$", "", word).endswith(_IMAGES):
            return True
    return False


WORDS_MAX: Final = 256
# Longer numbers are slips.
DIGITS_MAX: Final = 9
# Options of servers for Transformers models that change their memory.
_CONTEXT: Final = frozenset(
    ("--max-model-len", "--ctx", "--ctx-size", "--context", "--context-length", "--max-length", "--max-seq-len", "-c")
)
_SEQUENCES: Final = frozenset(("--max-num-seqs", "--batch-size", "--max-batch-size", "--parallel"))
_DTYPE: Final = frozenset(("--dtype", "--torch-dtype"))


def estimate_command(words: Sequence[str], gpus: int) -> Estimate | None:
    """From the first model file or folder among the words; None if there is none."""
    words = words[:WORDS_MAX]
    if (file := _file(words)) is not None:
        said = llama_options.read(words, llama_options.LlamaOptions(model=file))
        # The version is unknown, so room for the logits of a whole batch is counted.
        return estimate_gguf(said, gpus, logits_all=True)
    folder = _folder(words)
    return None if folder is None else estimate_folder(folder, folder_options(words), gpus)


def files_of_command(words: Sequence[str]) -> list[Path]:
    """The files it would read, as far as its words tell."""
    words = words[:WORDS_MAX]
    if (file := _file(words)) is not None:
        return files_of(llama_options.read(words, llama_options.LlamaOptions(model=file)))
    folder = _folder(words)
    return [] if folder is None else [folder / "config.json", *weight_files(folder)]


def folder_options(words: Sequence[str]) -> FolderOptions:
    """The last occurrence of each option wins."""
    context, sequences, dtype = None, 1, None
    for name, value in _pairs(words):
        if name in _CONTEXT:
            context = _number(value) or context
        elif name in _SEQUENCES:
            sequences = _number(value) or sequences
        elif name in _DTYPE:
            dtype = value
    return FolderOptions(context, sequences, dtype if dtype in DTYPE_BYTES else None)


def _file(words: Sequence[str]) -> str | None:
    return next((value for value in _values(words) if value.endswith(".gguf") and os.path.isfile(value)), None)


def _folder(words: Sequence[str]) -> Path | None:
    return next(
        (
            Path(value)
            for value in _values(words)
            if os.sep in value and os.path.isdir(value) and is_folder(Path(value))
        ),
        None,
    )


def _values(words: Sequence[str]) -> list[str]:
    """The words; of `--x=y` only y."""
    return [word.partition("=")[2] if word.startswith("-") else word for word in words]


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    after = [*words[1:], ""]
    joined = [word.partition("=") for word in words]
    return [(name, value if sign else follows) for (name, sign, value), follows in zip(joined, after, strict=True)]


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()) or len(text) > DIGITS_MAX:
        return None
    return int(text) or None
