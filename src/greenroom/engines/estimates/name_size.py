"""A size guessed from a name, where nothing better is known: `qwen2.5-7b-instruct-q4_k_m`, `mixtral-8x7b`.

The last resort, and as rough as it looks: it keeps a model nobody has measured from being taken for nothing.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

from greenroom.config.commands import words
from greenroom.config.schema import Model
from greenroom.engines.estimates.estimate import NAME, Estimate, Part, mib

# Names longer than this are no names; it also bounds what the patterns have to look at.
TEXT_MAX: Final = 512
WORDS_MAX: Final = 64
# Weights, then a cache and buffers in proportion: what the file-size rule adds to a Transformers folder.
OVERHEAD: Final = 1.2
# More than any model has; a number beyond it is a date or a version.
BILLIONS_MAX: Final = 2_000.0
BITS_DEFAULT: Final = 16.0
BITS_DEFAULT_GGUF: Final = 4.85

# `7b`, `0.5B`, `270m`, `8x7b`; not the `3b` of `a3b`, which says how many of all work at once, nor a part of a word.
_PARAMETERS: Final = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([bm])(?![a-z0-9])")
# Experts share the attention between them: Mixtral's 8x7B are 46.7 billion, not 56.
EXPERTS_SHARE: Final = 0.83
# Bits a weight, scales included, by how files call it. Longest names first, so that q4_k_m is not taken for q4.
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
    """From its id, else its file's name, else the words of its command; None when none of them names a size."""
    for text in _texts(model_id, model):
        billions = parameters_billion(text)
        if billions:
            bits = bits_of(text) or bits_of(model_id) or (BITS_DEFAULT_GGUF if "gguf" in text else BITS_DEFAULT)
            size_mib = mib(billions * 1e9 * bits / 8 * OVERHEAD)
            part = Part("all, by its name", size_mib if gpus else 0, 0 if gpus else size_mib)
            return Estimate((part,), NAME)
    return None


def parameters_billion(text: str) -> float | None:
    """The largest number of parameters a name speaks of, in billions."""
    return max(
        filter(None, map(_billions, _PARAMETERS.finditer(text[:TEXT_MAX].lower().replace("_", "-")))), default=None
    )


def bits_of(text: str) -> float | None:
    """Bits a weight, as the name of a quantisation says."""
    found = (bits for pattern, bits in _BITS if pattern.search(text[:TEXT_MAX].lower()))
    return next(found, None)


def _billions(found: re.Match[str]) -> float | None:
    experts, number, unit = found.groups()
    size = float(number) * (1 if unit == "b" else 0.001) * (int(experts) * EXPERTS_SHARE if experts else 1)
    return size if 0 < size <= BILLIONS_MAX else None


def _texts(model_id: str, model: Model) -> list[str]:
    said = [PurePath(model.path).name] if model.path else list(words(model.cmd or ()))[:WORDS_MAX]
    return [model_id, *(PurePath(word).name for word in said if not word.startswith("-"))]
