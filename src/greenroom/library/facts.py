"""What the headers of a model's files tell: quantisation, context length, parameters, abilities, and what it will need.

Owns the reading of one model, through the readers and estimates of the engines. Counts what lies in the files and
uses no sum that a file states. Reads headers only, within the bounds of those readers. Blocks.

`Remembered` is what the library keeps of this, and of uses and downloads, over restarts. All of it can be found again:
a file that cannot be read costs a warning and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

import greenroom
from greenroom.base.plain_file import read_plain
from greenroom.config.schema import Model
from greenroom.engines.builtin.llamacpp import files_in
from greenroom.engines.builtin.whisper import STORED_BYTES, stored_type
from greenroom.engines.estimates.gguf import header_of, weights_of
from greenroom.engines.estimates.gguf_header import BadModelFile
from greenroom.engines.estimates.hf_folder import Facts, SafetensorsHeader, folder_config, read_all, weight_files
from greenroom.engines.registry import engine_for, facts_of
from greenroom.library.records import ENGINE_OF_KIND, FetchedFile, ModelKind
from greenroom.telemetry.logs import get_logger

# No number of a model takes less than a bit.
NUMBERS_PER_BYTE_MAX: Final = 8
# Names of file types, by their numbers in GGUF files.
# fmt: off
FILE_TYPES: Final[Mapping[int, str]] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}
# fmt: on
# As in `model-UD-Q4_K_XL.gguf` and `model.q8_0.gguf`: the last such word of a name.
_IN_NAME: Final = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32))(?=$|[-.])", re.IGNORECASE
)
# fmt: off
_DTYPES: Final[Mapping[str, str]] = {
    "F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8",
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
}
# Bytes of one number in safetensors files.
_NUMBER_BYTES: Final[Mapping[str, float]] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1, "F4": 0.5,
}
# fmt: on
# Types that quantised weights are packed into.
_PACKED: Final = frozenset({"I32", "U32", "U8", "I8"})
_WORD: Final = re.compile(r"[a-z0-9_.-]{1,32}")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """None where the files do not tell."""

    quantization: str | None = None
    context_length: int | None = None
    parameters: int | None = None
    memory_mib: int | None = None
    abilities: tuple[str, ...] = ()


NOTHING: Final = FileFacts()


class NoModel(ValueError):
    """The file is what it should be, but no model: an adapter, a projector, a table of importance."""


def read_facts(
    kind: ModelKind, path: str, weights: Sequence[str], size_bytes: int, *, projector: str | None, on_gpu: bool
) -> FileFacts:
    """The facts of the model at `path`, whose weights are these files. Raises BadModelFile or NoModel. `size_bytes` is
    the size of all its files, `projector` the one of a GGUF model. `memory_mib` is what it will take of a GPU, or of
    the host where there is none."""
    model = Model(engine=ENGINE_OF_KIND[kind], path=path, mmproj=projector)
    facts = _read(model, path, weights)
    # Tensors may claim the same bytes.
    parameters = min(facts.parameters or 0, NUMBERS_PER_BYTE_MAX * size_bytes) or None
    estimate = engine_for(model).estimate(model, 1 if on_gpu else 0)
    memory_mib = None if estimate is None else estimate.need.gpu_mib if on_gpu else estimate.need.host_mib
    abilities = tuple(sorted(facts_of(model).abilities or ()))
    return FileFacts(facts.quantization, facts.context_length, parameters, memory_mib, abilities)


def quantization_of(model: Model) -> str | None:
    """As it is configured, else as its files tell; None where neither does. Reads headers and never raises."""
    if model.quantization is not None or model.path is None:
        return model.quantization
    path, _ = files_in(model.path)
    try:
        told = _read(model, path, [str(file) for file in weight_files(Path(path))]).quantization
    except (BadModelFile, OSError, ValueError):
        return None
    # Weights that are not packed are loaded as another type if that is configured.
    return _DTYPES.get(model.dtype, told) if told in _DTYPES.values() else told


def _read(model: Model, path: str, weights: Sequence[str]) -> FileFacts:
    if model.engine == ENGINE_OF_KIND[ModelKind.GGUF]:
        return _gguf(path)
    return _whisper(path) if model.engine == ENGINE_OF_KIND[ModelKind.WHISPER] else _folder(path, weights)


def quantization_in(name: str) -> str | None:
    """The quantisation that the name of a GGUF file tells, in capitals."""
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.IGNORECASE)
    found = _IN_NAME.findall(stem)
    return str(found[-1]).upper() if found else None


def _gguf(path: str) -> FileFacts:
    weights, header = weights_of(path), header_of(path)
    if header is None:
        raise BadModelFile(f"{path} changed while it was read.")
    if not header.is_model:
        raise NoModel(f"{path} is no model by itself")
    said = None if header.file_type is None else FILE_TYPES.get(header.file_type)
    return FileFacts(
        quantization_in(Path(path).name) or said,
        header.context_length or None,
        weights.elements,
    )


def _folder(path: str, weights: Sequence[str]) -> FileFacts:
    """A folder of Transformers, or a pipeline, whose own config.json says nothing of its parts."""
    header, said = read_all(map(Path, weights)), folder_config(Path(path))
    context = Facts(said).number("max_position_embeddings", "n_positions")
    words, bits = _quantization(said)
    return FileFacts(words or _DTYPES.get(header.dtype), context or None, _numbers(header, bits))


def _quantization(said: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """`awq-4bit` and the bits of a weight, by the quantization_config of a config.json."""
    inner = said.get("text_config")
    found = said.get("quantization_config") or (inner.get("quantization_config") if isinstance(inner, dict) else None)
    if not isinstance(found, dict):
        return None, None
    method, bits = found.get("quant_method"), found.get("bits")
    if not isinstance(method, str) or not _WORD.fullmatch(method):
        return None, None
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        bits = 4 if found.get("load_in_4bit") is True else 8 if found.get("load_in_8bit") is True else None
    return (method if bits is None else f"{method}-{bits}bit"), bits


def _numbers(header: SafetensorsHeader, bits: int | None) -> int:
    """How many numbers these bytes hold. Packed weights count by the bits of each."""
    count = 0.0
    for dtype, size in header.by_dtype.items():
        is_packed = bits is not None and dtype in _PACKED
        count += size * 8 / bits if is_packed and bits else size / _NUMBER_BYTES.get(dtype, 1)
    return int(count)


def _whisper(path: str) -> FileFacts:
    file = Path(path) / "model.bin"
    try:
        stored, size = stored_type(file), file.stat().st_size
    except (OSError, ValueError) as error:
        raise BadModelFile(f"{file} cannot be read: {error}") from error
    return FileFacts(_DTYPES.get(stored, stored), None, size // STORED_BYTES[stored])


# --- kept across restarts ---------------------------------------------------------------------------------------------


_log = get_logger("library")

FILE_NAME: Final = "library.json"
VERSION: Final = 1
# Models whose last use is remembered, those that are not there any more included; the oldest are forgotten first.
USED_MAX: Final = 10_000
FACTS_MAX: Final = 20_000
FETCHED_MAX: Final = 20_000
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
# A year far away: a later time in the file is not ours.
TIME_MAX: Final = 1e11
_Facts = tuple[str | None, int | None, int | None, int | None, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Remembered:
    """When models were last used, by path, what their headers told, by state, and which files were fetched, by path."""

    used: dict[str, float] = field(default_factory=dict)
    facts: dict[str, FileFacts] = field(default_factory=dict)
    fetched: dict[str, FetchedFile] = field(default_factory=dict)


def text_of(known: Remembered, on_gpu: bool) -> str:
    facts = {state: astuple(one) for state, one in list(known.facts.items())[-FACTS_MAX:]}
    # Another release may read or estimate otherwise, and so does a machine with GPUs.
    fetched = {path: asdict(one) for path, one in known.fetched.items()}
    said = {"version": VERSION, "read_by": _reader(on_gpu), "used": known.used, "facts": facts, "fetched": fetched}
    return json.dumps(said)


def _reader(on_gpu: bool) -> str:
    return f"{greenroom.__version__}{' gpu' if on_gpu else ''} with abilities"


def read_remembered(path: Path, on_gpu: bool) -> Remembered:
    """Empty if the file is not there or not ours. What an earlier release read is forgotten."""
    try:
        said = json.loads(read_plain(path, FILE_BYTES_MAX))
        if said["version"] != VERSION:
            return Remembered()
        used = {str(path): float(when) for path, when in said["used"].items() if 0 <= float(when) <= TIME_MAX}
        told = said["facts"] if said.get("read_by") == _reader(on_gpu) else {}
        facts = msgspec.convert(told, dict[str, _Facts])
        fetched = msgspec.convert(said["fetched"], dict[str, FetchedFile])
    except FileNotFoundError:
        return Remembered()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("cannot be read, and is begun anew", file=str(path), error=str(error))
        return Remembered()
    newest = sorted(used.items(), key=lambda item: item[1])[-USED_MAX:]
    return Remembered(dict(newest), {state: FileFacts(*one) for state, one in facts.items()}, fetched)
