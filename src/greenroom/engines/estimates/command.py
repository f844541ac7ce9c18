"""What a command will take, as far as its words give it away: a GGUF file, or the folder of a model, among them.

Owns the search for such words and for those that say how long a text may be. A guess for the first load; from the
second on the figure is measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from greenroom.engines.estimates import llama_options
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.estimates.gguf import estimate_gguf, files_of
from greenroom.engines.estimates.hf_folder import DTYPE_BYTES, FolderOptions, estimate_folder, is_folder, weight_files

WORDS_MAX: Final = 256
# Longer numbers are slips.
DIGITS_MAX: Final = 9
# How servers of Transformers models spell what changes their memory.
_CONTEXT: Final = frozenset(
    ("--max-model-len", "--ctx", "--ctx-size", "--context", "--context-length", "--max-length", "--max-seq-len", "-c")
)
_SEQUENCES: Final = frozenset(("--max-num-seqs", "--batch-size", "--max-batch-size", "--parallel"))
_DTYPE: Final = frozenset(("--dtype", "--torch-dtype"))


def estimate_command(words: Sequence[str], gpus: int) -> Estimate | None:
    """From the first file or folder of a model among the words; None when there is none."""
    words = words[:WORDS_MAX]
    if (file := _file(words)) is not None:
        said = llama_options.read(words, llama_options.LlamaOptions(model=file))
        # Of a binary nobody knows the version, so room for the logits of a whole batch is counted.
        return estimate_gguf(said, gpus, logits_all=True)
    folder = _folder(words)
    return None if folder is None else estimate_folder(folder, folder_options(words), gpus)


def files_of_command(words: Sequence[str]) -> list[Path]:
    """The files it would read, as far as its words say."""
    words = words[:WORDS_MAX]
    if (file := _file(words)) is not None:
        return files_of(llama_options.read(words, llama_options.LlamaOptions(model=file)))
    folder = _folder(words)
    return [] if folder is None else [folder / "config.json", *weight_files(folder)]


def folder_options(words: Sequence[str]) -> FolderOptions:
    """The last word on each counts."""
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
    return next((Path(value) for value in _values(words) if os.sep in value and is_folder(Path(value))), None)


def _values(words: Sequence[str]) -> list[str]:
    """The words, and what stands behind the sign in `--x=y`."""
    return [word.partition("=")[2] if word.startswith("-") else word for word in words]


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    after = [*words[1:], ""]
    joined = [word.partition("=") for word in words]
    return [(name, value if sign else follows) for (name, sign, value), follows in zip(joined, after, strict=True)]


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()) or len(text) > DIGITS_MAX:
        return None
    return int(text) or None
